"""Memory savings through tiled MLPs and losses, head chunks, and sliced weights."""

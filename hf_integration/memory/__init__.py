"""Tiled MLPs and losses, head chunks, and sliced weights, for less memory."""

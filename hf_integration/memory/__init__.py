"""Tiled MLPs and losses, head chunks and sliced weights, which save memory."""

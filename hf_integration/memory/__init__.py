"""Tiled MLPs and losses, stages of heads, and sliced weights, for less memory."""

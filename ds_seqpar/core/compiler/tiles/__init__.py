"""The visible part of a product of blocks, as tiles and kernel launches."""

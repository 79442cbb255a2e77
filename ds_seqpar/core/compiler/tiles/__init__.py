"""The visible part of a product, as tiles and kernel launches."""

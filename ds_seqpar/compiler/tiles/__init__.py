"""The visible part of a product, as kernel launches."""

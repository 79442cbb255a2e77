"""The same products in a faster order, and the simulator that compares orders."""

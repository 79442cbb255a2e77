"""Checkpoints that are there as a whole, or not at all, and that runs in another world go on from."""

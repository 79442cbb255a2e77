"""Checkpoints that are written whole or not at all, and from which a run with another world size can resume."""

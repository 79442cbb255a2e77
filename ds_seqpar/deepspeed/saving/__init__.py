"""Atomic checkpoints, from which a run with a different world size can resume."""

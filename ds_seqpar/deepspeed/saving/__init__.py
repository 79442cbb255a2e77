"""Atomic checkpoints from which runs with a different world size can resume."""

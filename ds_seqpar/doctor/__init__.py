"""Examine a job before it trains: what the ranks, their links and kernels do is measured, and compared with what it
must be."""

from .findings import Check, Finding, Job, examine
from .ranks import agreement, environment

# what needs no model; each with what it looks at
RANKS_CHECKS: tuple[tuple[str, Check], ...] = (("environment", environment), ("agreement", agreement))

__all__ = ["RANKS_CHECKS", "Check", "Finding", "Job", "examine"]

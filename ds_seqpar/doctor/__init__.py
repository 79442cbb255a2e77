"""Examine a job before it trains: what the ranks, their links and kernels do is measured, and compared with what it
must be."""

from .findings import Check, Finding, Job, examine
from .report import examined, require_sound, table

__all__ = ["Check", "Finding", "Job", "examine", "examined", "require_sound", "table"]

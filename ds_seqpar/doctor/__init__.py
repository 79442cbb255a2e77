"""Examine a job before it trains: what the ranks, their links and kernels do is measured, and compared with what it
must be."""

from .attention import check_attention
from .findings import Check, Finding, Job, examine
from .kernels import check_kernels
from .ranks import check_agreement, check_environment
from .transfers import check_transfers

# what needs no model; each with what it looks at
RANKS_CHECKS: tuple[tuple[str, Check], ...] = (
    ("environment", check_environment),
    ("agreement", check_agreement),
    ("kernels", check_kernels),
    ("transfers", check_transfers),
    ("attention", check_attention),
)

__all__ = ["RANKS_CHECKS", "Check", "Finding", "Job", "examine"]

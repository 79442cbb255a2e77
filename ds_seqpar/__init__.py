"""Exact sequence parallel attention for DeepSpeed: Ulysses around any schedule, as settings of one engine."""

from .config import SequenceParallelConfig
from .engine import initialize
from .errors import SeqParError
from .parallel import SequenceParallel

__all__ = ["SeqParError", "SequenceParallel", "SequenceParallelConfig", "initialize"]

"""Exact sequence parallel attention for DeepSpeed: Ulysses around any schedule, as settings of one engine."""

from .config import SequenceParallelConfig
from .engine import initialize
from .errors import SeqParError
from .parallel import SequenceParallel
from .planning.masks import Mask
from .planning.shards import UnevenShards

__all__ = ["Mask", "SeqParError", "SequenceParallel", "SequenceParallelConfig", "UnevenShards", "initialize"]

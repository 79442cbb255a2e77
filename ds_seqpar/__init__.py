"""Exact sequence parallel attention for DeepSpeed: Ulysses around any schedule, as settings of one engine."""

from .compiler.masks import Mask
from .compiler.shards import UnevenShards
from .config import SequenceParallelConfig
from .engine import initialize
from .errors import SeqParError
from .parallel import SequenceParallel

__all__ = ["Mask", "SeqParError", "SequenceParallel", "SequenceParallelConfig", "UnevenShards", "initialize"]

"""Checkpoints that are there as a whole, or not at all, and that runs in another world go on from."""

from .atomic import AtomicCheckpoint, atomic_checkpoint, is_whole, recover
from .engine import EngineCheckpoints
from .resuming import LoadingRun, fault_of, inspect_engine

__all__ = [
    "AtomicCheckpoint",
    "EngineCheckpoints",
    "LoadingRun",
    "atomic_checkpoint",
    "fault_of",
    "inspect_engine",
    "is_whole",
    "recover",
]

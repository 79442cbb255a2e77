"""Checkpoints that are there as a whole, or not at all, and that runs in another world go on from."""

from .atomic import Aside, is_whole, recover, written_aside
from .engine import EngineCheckpoints
from .resuming import LoadingRun, fault_of, inspect_engine

__all__ = [
    "Aside",
    "EngineCheckpoints",
    "LoadingRun",
    "fault_of",
    "inspect_engine",
    "is_whole",
    "recover",
    "written_aside",
]

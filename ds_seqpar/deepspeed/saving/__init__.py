"""Checkpoints that are there as a whole, or not at all, and that runs in another world go on from."""

from .atomic import Aside, is_whole, recover, written_aside
from .engine import EngineCheckpoints
from .resuming import EngineReport, LoadingRun, inspect_engine

__all__ = [
    "Aside",
    "EngineCheckpoints",
    "EngineReport",
    "LoadingRun",
    "inspect_engine",
    "is_whole",
    "recover",
    "written_aside",
]

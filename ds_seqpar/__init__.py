"""Exact sequence-parallel attention for DeepSpeed. Settings combine Ulysses with any schedule."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base.errors import SeqParError
    from .core.compiler.sharding.masks import Mask
    from .core.compiler.sharding.shards import UnevenShards
    from .core.settings import SequenceParallelConfig
    from .deepspeed.config import read_config
    from .engine import initialize
    from .parallel import SequenceParallel

__version__ = "0.2.0"
__all__ = [
    "Mask",
    "SeqParError",
    "SequenceParallel",
    "SequenceParallelConfig",
    "UnevenShards",
    "initialize",
    "read_config",
]
HOMES = {
    "Mask": "core.compiler.sharding.masks",
    "SeqParError": "base.errors",
    "SequenceParallel": "parallel",
    "SequenceParallelConfig": "core.settings",
    "UnevenShards": "core.compiler.sharding.shards",
    "initialize": "engine",
    "read_config": "deepspeed.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name of the package on first use, so that planning commands do not import torch."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = exported = getattr(importlib.import_module(f".{HOMES[name]}", __name__), name)
    return exported

"""Exact sequence parallel attention for DeepSpeed: Ulysses around any schedule, as settings of one engine."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiler.sharding.masks import Mask
    from .compiler.sharding.shards import UnevenShards
    from .config.deepspeed_json import read_config
    from .config.settings import SequenceParallelConfig
    from .engine import initialize
    from .errors import SeqParError
    from .parallel import SequenceParallel

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
    "Mask": "compiler.sharding.masks",
    "SeqParError": "errors",
    "SequenceParallel": "parallel",
    "SequenceParallelConfig": "config.settings",
    "UnevenShards": "compiler.sharding.shards",
    "initialize": "engine",
    "read_config": "config.deepspeed_json",
}


def __getattr__(name: str) -> Any:
    """What the package exports, imported when it is first asked for: commands that only plan import no torch."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = exported = getattr(importlib.import_module(f".{HOMES[name]}", __name__), name)
    return exported

"""Read accelerate's ParallelismConfig, which scripts for DeepSpeed's Ulysses use, as our "sequence_parallel" section.

It comes from TrainingArguments, or from accelerate's launcher through the environment. accelerate itself must not see
it: it would shard every batch a second time, with separate groups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import ParallelismConfig
from transformers import TrainingArguments

from ds_seqpar.base.errors import SECTION, ConfigError

LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"  # set by accelerate's launcher, beside the fields
# an sp_attn_implementation -> our kernel; any other is refused
KERNELS = {
    None: None,
    "None": None,
    "sdpa": None,
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_3",
}


@contextlib.contextmanager
def taken_from(args: TrainingArguments) -> Iterator[ParallelismConfig | None]:
    """Remove the ParallelismConfig from the arguments and the environment for a context.

    Yields the one that was there, or None.
    """
    parallelism, launched = args.parallelism_config, os.environ.get(LAUNCHED, "")
    if parallelism is None and launched.lower() == "true":
        parallelism = ParallelismConfig()  # from the environment
    in_arguments, args.parallelism_config = args.parallelism_config, None
    os.environ.pop(LAUNCHED, None)
    try:
        yield parallelism
    finally:
        args.parallelism_config = in_arguments
        if launched:
            os.environ[LAUNCHED] = launched


def joined(section: Mapping[str, Any], parallelism: ParallelismConfig | None, world: int) -> Any:
    """Return the section with the settings of a ParallelismConfig.

    Raises ConfigError if both have a setting and the values differ, and for fields other than sequence parallelism's.
    """
    if parallelism is None or not isinstance(section, Mapping):  # SequenceParallelConfig raises if it is no mapping
        return section
    for field in ("tp_size", "cp_size"):
        if (value := getattr(parallelism, field)) > 1:
            instead = f'say sp_size={value}, sp_backend="deepspeed"' if field == "cp_size" else "leave it out"
            raise ConfigError(
                f"of accelerate's ParallelismConfig sequence parallelism takes sp_size and its dp sizes; got {field} "
                f"{value}, {instead}"
            )
    if parallelism.sp_size == 1:  # it has data parallel sizes only, which DeepSpeed has anyway
        return section
    groups = parallelism.dp_replicate_size * parallelism.dp_shard_size
    if groups not in (1, world // parallelism.sp_size):
        raise ConfigError(
            f"dp_replicate_size x dp_shard_size of a ParallelismConfig must be ranks / sp_size, {world} / "
            f"{parallelism.sp_size}; got {groups}, leave both out"
        )
    settings = {"size": parallelism.sp_size} | _kernel(parallelism.sp_handler.sp_attn_implementation)
    for name, value in settings.items():
        if section.get(name, "auto") not in ("auto", value):
            raise ConfigError(
                f"{SECTION}.{name} must be what accelerate's ParallelismConfig says; got {section[name]!r} there and "
                f"{value!r} by it, leave one out"
            )
    return {**section, **settings}


def _kernel(name: str | None) -> dict[str, str]:
    if name not in KERNELS:
        raise ConfigError(
            f'sp_attn_implementation of a ParallelismConfig must be sdpa, flash_attention_2 or _3; got "{name}", leave '
            f'it out, and choose a "kernel" in the "{SECTION}" section'
        )
    kernel = KERNELS[name]
    return {} if kernel is None else {"kernel": kernel}

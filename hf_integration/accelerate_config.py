"""Convert accelerate's ParallelismConfig, which configures DeepSpeed's Ulysses, to our "sequence_parallel" section.

The ParallelismConfig comes from TrainingArguments, from a script that passes it to an Accelerator, or from accelerate's
launcher through the environment. The ParallelismConfig must be removed from the Accelerator. Otherwise the Accelerator
would shard every batch a second time, using separate process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, ParallelismConfig

from ds_seqpar.base.errors import SECTION, ConfigError

# our kernel for each supported sp_attn_implementation
KERNELS = {
    None: None,
    "None": None,
    "sdpa": None,
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_3",
}


def removed_from(accelerator: Accelerator) -> ParallelismConfig | None:
    """Remove an Accelerator's ParallelismConfig and return it, or None if the Accelerator has none."""
    state: Any = accelerator.state
    parallelism, state.parallelism_config, state.device_mesh = state.parallelism_config, None, None
    return parallelism


def joined(section: Mapping[str, Any], parallelism: ParallelismConfig | None, world: int) -> Any:
    """Merge the settings of a ParallelismConfig into the section and return the result.

    Raises ConfigError if the section contradicts the ParallelismConfig, or sets a field that is unrelated to sequence
    parallelism.
    """
    # SequenceParallelConfig raises an error for a non-mapping
    if parallelism is None or not isinstance(section, Mapping):
        return section
    for field in ("tp_size", "cp_size"):
        if (value := getattr(parallelism, field)) > 1:
            instead = f'say sp_size={value}, sp_backend="deepspeed"' if field == "cp_size" else "leave it out"
            raise ConfigError(
                f"of accelerate's ParallelismConfig sequence parallelism takes sp_size and its dp sizes; got {field} "
                f"{value}, {instead}"
            )
    if parallelism.sp_size == 1:  # only data parallel sizes, which DeepSpeed determines itself
        return section
    groups = parallelism.dp_replicate_size * parallelism.dp_shard_size
    if groups not in (1, world // parallelism.sp_size):
        raise ConfigError(
            f"dp_replicate_size x dp_shard_size of a ParallelismConfig must be ranks / sp_size, {world} / "
            f"{parallelism.sp_size}; got {groups}, leave both out"
        )
    if (name := parallelism.sp_handler.sp_attn_implementation) not in KERNELS:
        raise ConfigError(
            f'sp_attn_implementation of a ParallelismConfig must be sdpa, flash_attention_2 or _3; got "{name}", leave '
            f'it out, and choose a "kernel" in the "{SECTION}" section'
        )
    settings = {"size": parallelism.sp_size} | ({"kernel": KERNELS[name]} if KERNELS[name] else {})
    for name, value in settings.items():
        if section.get(name, "auto") not in ("auto", value):
            raise ConfigError(
                f"{SECTION}.{name} must be what accelerate's ParallelismConfig says; got {section[name]!r} there and "
                f"{value!r} by it, leave one out"
            )
    return {**section, **settings}

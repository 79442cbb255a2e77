"""Reads the DeepSpeed JSON and its "sequence_parallel" section, and raises for faults that would pass unnoticed."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SECTION, ConfigError
from ..files import JsonField, read_json

KIND = "the DeepSpeed configuration"
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# key of the DeepSpeed JSON -> why it breaks the gradient contract or the sharding
REFUSED = {
    "sequence_parallel_size": f'it switches DeepSpeed\'s own groups on; use "{SECTION}": {{"size": ...}}',
    "data_parallel_size": f'it changes the ranks that gradients are averaged over; use "{SECTION}": {{"size": ...}}',
    "tensor_parallel": "AutoTP splits heads by itself; remove it",
    "expert_parallel": "it makes groups of its own; remove it",
    "hybrid_engine": "its forward is another one than the model's; remove it",
    "curriculum_learning": "it cuts sequences after they were sharded; remove it",
    "data_efficiency": "it drops tokens or picks samples by rank; remove it",
    "gradient_allreduce_op": "the loss is scaled for the mean over ranks; remove it",
    "managed_gradient_accumulation": "engine.backward must divide by the accumulation steps; remove it",
    "zero_optimization.zenflow": "it accumulates by itself, and steps with gradients of other windows; remove it",
}
NEUTRAL = {"sequence_parallel_size": 1, "gradient_allreduce_op": "mean", "managed_gradient_accumulation": True}
# flags of earlier releases, which DeepSpeed still reads
OLD_NAMES = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
# keys of DeepSpeed that look like the section's
OTHERS = ("sequence_parallel_size", "seq_parallel_communication_data_type")


def read_deepspeed(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration as a dict. Raises ConfigError with file and line for a missing or malformed file, and
    for a key that an object in it has twice."""
    if isinstance(config, Mapping):
        return dict(config)
    return read_json(config, KIND)


def section_of(content: Mapping[str, Any]) -> Any:
    """The "sequence_parallel" section of a configuration; {} where it has none. Raises ConfigError for a misspelt key,
    and for a section that stands inside another one."""
    for key in content:
        if _is_meant(key):
            raise ConfigError(f'sequence parallelism is set under the key "{SECTION}"; got "{key}", rename it')
    for key, inner in content.items():
        for name in inner if isinstance(inner, Mapping) and key != SECTION else ():
            if name == SECTION or _is_meant(name):
                raise ConfigError(
                    f'"{SECTION}" must stand at the top of the DeepSpeed JSON; got "{name}" inside "{key}", move it out'
                )
    return content.get(SECTION, {})


def dtype_of(content: Mapping[str, Any]) -> str:
    """The dtype that a DeepSpeed JSON trains in. An "enabled" of "auto" counts as true."""
    bf16 = content.get("bf16", content.get("bfloat16", {}))  # DeepSpeed still reads the older name
    halves = {"bfloat16": bf16, "float16": content.get("fp16", {})}
    return next((name for name, section in halves.items() if section.get("enabled")), "float32")


def check_settings(content: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting of a DeepSpeed JSON that would break the gradient contract or the sharding."""
    for key, why in REFUSED.items():
        value: Any = content
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None and not _is_off(key, value):
            raise ConfigError(f'the DeepSpeed JSON must not set "{key}" with sequence parallelism: {why}')
    if "gradient_clipping" not in content:
        warnings.warn(
            'the DeepSpeed JSON does not set "gradient_clipping", and DeepSpeed then clips at 1.0; set it (0 for none)',
            stacklevel=4,
        )


def check_auto(content: Mapping[str, Any]) -> None:
    """Raises ConfigError for an "auto" that only the HuggingFace Trainer replaces, and that DeepSpeed would ignore."""
    keys = [key for key, value in content.items() if value == "auto"]
    for key, value in content.items():
        if isinstance(value, Mapping) and key != SECTION:
            keys += [f"{key}.enabled"] if value.get("enabled") == "auto" else []
            params = value.get("params")
            keys += (
                [f"{key}.params.{n}" for n, x in params.items() if x == "auto"] if isinstance(params, Mapping) else []
            )
    if keys:
        raise ConfigError(
            f'"auto" is what the HuggingFace Trainer fills in; got "auto" for {", ".join(keys)} without a Trainer, '
            "write values"
        )


def left_out(content: Mapping[str, Any]) -> list[str]:
    """The keys that DeepSpeed must not see: our section, and those that it refuses even where they enable nothing."""
    return [SECTION, *(key for key in REFUSED if key in content and _is_off(key, content[key]))]


def _is_off(key: str, value: Any) -> bool:
    """Whether a key of REFUSED has a value that changes nothing."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or (key == "tensor_parallel" and value.get("autotp_size", 2) in (0, 1))
    return value == NEUTRAL.get(key)


def _is_meant(key: object) -> bool:
    """Whether a key that is not the section's is a misspelling of it."""
    if key == SECTION or key in OTHERS or not isinstance(key, str):
        return False
    plain, right = ("".join(filter(str.isalnum, name.lower())) for name in (key, SECTION))
    return plain in ("sp", "ulysses") or difflib.SequenceMatcher(None, plain, right).ratio() > 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """The settings of "offload_optimizer" or "offload_param", with DeepSpeed's defaults.

    device: where states go: "none", "cpu" (host memory) or "nvme". ratio: the share of sub-groups that go there.
    buffer_count, buffer_size (elements): of the pool between drives and host memory. max_in_cpu: elements that stay in
    host memory with "nvme".
    """

    device: str = "none"
    pin_memory: bool = True
    ratio: float = 1.0
    super_offload: bool = False
    buffer_count: int = 4
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000

    def read(self, field: JsonField) -> Offload:
        """These settings with the values of the JSON. Raises ConfigError for a value of a wrong type."""
        if not field.value:
            return self
        known, inside = dataclasses.asdict(self), field.object()
        read = {
            name: inner.like(known[name]) for name, inner in inside.items() if name in known and inner.value != "auto"
        }
        return dataclasses.replace(self, **read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero:
    """Settings of "zero_optimization", with DeepSpeed's defaults. Sizes are in elements."""

    stage: int = 0
    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool | None = None
    offload_optimizer: Offload = Offload()
    offload_param: Offload = Offload(buffer_count=5)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Zero:
        """From "zero_optimization" of a DeepSpeed JSON. Raises ConfigError for a setting of a wrong type."""
        names = {f.name for f in dataclasses.fields(cls)}
        known: dict[str, Any] = {new: Offload(device="cpu") for old, new in OLD_NAMES.items() if section.get(old)}
        for name, value in section.items():
            if value == "auto" or (field := name.removeprefix("stage3_")) not in names:
                continue
            given, default = JsonField("zero_optimization", value, name), getattr(cls, field)
            if isinstance(default, Offload):
                known[field] = default.read(given)
            elif field == "overlap_comm":
                known[field] = value
            else:
                known[field] = given.like(default)
        return cls(**known)

    @property
    def optimiser_away(self) -> bool:
        """Whether the optimiser works in host memory."""
        return self.stage > 0 and self.offload_optimizer.device != "none"

    @property
    def parameters_away(self) -> bool:
        """Whether a rank's share of parameters is in host memory or on drives. DeepSpeed does that at stage 3 only."""
        return self.stage == 3 and self.offload_param.device != "none"

    @property
    def drives(self) -> bool:
        """Whether any state is on drives. Stages 1 and 2 keep in host memory what "nvme" asks for."""
        return self.stage == 3 and "nvme" in (self.offload_optimizer.device, self.offload_param.device)

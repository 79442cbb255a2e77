"""Parse the DeepSpeed JSON once into an object for the engine, the Trainer and the planner."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from ..base.errors import SECTION, ConfigError
from ..base.files import STRICT, call_library, read_as, read_json
from ..core.settings import SequenceParallelConfig

KIND = "the DeepSpeed configuration"
KNOWN = STRICT | {"extra": "ignore"}  # for sections with additional DeepSpeed keys
# reasons why keys of the DeepSpeed JSON break gradients or sharding, by key
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
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# keys that are not passed to DeepSpeed's own class, since they are checked or rejected in this module
CHECKED_HERE = {SECTION, *REFUSED, *BATCH_SIZES}
# number of state tensors per parameter, by optimizer name in lower case; Adam variants have two
OPTIMIZER_STATES = {"sgd": 0, "adagrad": 1, "lion": 1}
# values to write instead of "auto", by key of an object that a Trainer does not fill in
OBJECTS = {
    "zero_optimization": '{"stage": 3}',
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), '{"enabled": "auto"}'),
    **dict.fromkeys(("optimizer", "scheduler"), "its type and params, or leave it out"),
    "optimizer.params": '{"lr": "auto"}',
    "scheduler.params": '{"warmup_max_lr": "auto"}',
    **dict.fromkeys(("zero_optimization.offload_optimizer", "zero_optimization.offload_param"), '{"device": "cpu"}'),
}
# values that no Trainer computes, and for which DeepSpeed reads "auto" as 0 or "none"
DECISIVE = (
    "zero_optimization.stage", "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"
)  # fmt: skip
# attributes of DeepSpeed's configuration that may differ between ranks, such as logging or a single rank's files, and
# attributes derived from other attributes
OF_A_RANK = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "monitor_config",
    "comms_config", "flops_profiler_config", "timers_config", "aio_config", "disable_python_gc", "global_rank",
    "world_size", "zero_enabled", "zero_optimization_stage", "_param_dict",
)  # fmt: skip
# keys in the JSON, by attribute
KEYS = {"zero_config": "zero_optimization", "float16_config": "fp16", "bfloat16_config": "bf16"}
# DeepSpeed keys that resemble the section's name
OTHERS = ("sequence_parallel_size", "seq_parallel_communication_data_type")

# DeepSpeed accepts 5e8 as an integer
Elements = Annotated[
    int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x), Field(ge=0)
]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, config=KNOWN)
class Offload:
    """Settings of "offload_optimizer" or "offload_param", with DeepSpeed's defaults."""

    device: str = "none"
    """Where states are stored: "none" (on the device), "cpu" (host memory) or "nvme"."""
    pin_memory: bool = True
    ratio: Annotated[float, Field(ge=0)] = 1.0
    """The fraction of sub-groups to offload."""
    super_offload: bool = False
    buffer_count: Elements = 4
    """The number of buffers in the pool between drives and host memory."""
    buffer_size: Elements = 100_000_000
    """The number of elements in each buffer."""
    max_in_cpu: Elements = 1_000_000_000
    """The number of elements that stay in host memory with "nvme"."""


def _without_flag(given: Any) -> Any:
    """Convert a boolean, which DeepSpeed accepts under an older key, to a section."""
    return ({"device": "cpu"} if given else {}) if isinstance(given, bool) else given


@dataclass(frozen=True, kw_only=True, config=KNOWN)
class Zero:
    """Settings of "zero_optimization", with DeepSpeed's defaults. Sizes are in elements."""

    stage: Elements = 0
    reduce_bucket_size: Elements = 500_000_000
    prefetch_bucket_size: Annotated[Elements, Field(alias="stage3_prefetch_bucket_size")] = 50_000_000
    max_live_parameters: Annotated[Elements, Field(alias="stage3_max_live_parameters")] = 1_000_000_000
    max_reuse_distance: Annotated[Elements, Field(alias="stage3_max_reuse_distance")] = 1_000_000_000
    sub_group_size: Elements = 1_000_000_000
    overlap_comm: bool | None = None
    offload_optimizer: Annotated[
        Offload,
        BeforeValidator(_without_flag),
        Field(validation_alias=AliasChoices("offload_optimizer", "cpu_offload")),
    ] = Offload()
    offload_param: Annotated[
        Offload,
        BeforeValidator(lambda given: {"buffer_count": 5} | given if isinstance(given, dict) else given),
        BeforeValidator(_without_flag),
        Field(validation_alias=AliasChoices("offload_param", "cpu_offload_param")),
    ] = Offload(buffer_count=5)

    @property
    def optimizer_away(self) -> bool:
        """Whether the optimizer runs in host memory."""
        return self.stage > 0 and self.offload_optimizer.device != "none"

    @property
    def parameters_away(self) -> bool:
        """Whether parameters are stored in host memory or on drives, which DeepSpeed supports only at stage 3."""
        return self.stage == 3 and self.offload_param.device != "none"

    @property
    def drives(self) -> bool:
        """Whether any state is stored on drives. With "nvme", stages 1 and 2 keep states in host memory."""
        return self.stage == 3 and "nvme" in (self.offload_optimizer.device, self.offload_param.device)


@dataclass(frozen=True, kw_only=True, config=KNOWN)
class Half:
    """A section that enables a 16-bit dtype."""

    enabled: bool = False


@dataclass(frozen=True, kw_only=True, config=KNOWN)
class Known:
    """The keys of a DeepSpeed JSON that ds_seqpar reads in addition to the "sequence_parallel" section.

    None means that a key is missing or is left to a Trainer ("auto").
    """

    zero_optimization: Zero = Zero()
    bf16: Half = Half()
    bfloat16: Half = Half()  # older name, still supported by DeepSpeed
    fp16: Half = Half()
    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None

    @property
    def dtype(self) -> str:
        """The training dtype."""
        halves = {"bfloat16": self.bf16.enabled or self.bfloat16.enabled, "float16": self.fp16.enabled}
        return next((name for name, enabled in halves.items() if enabled), "float32")


@dataclasses.dataclass(frozen=True)
class DeepSpeedJson:
    """A DeepSpeed JSON and its parsed settings, each computed once on first use."""

    content: Mapping[str, Any]
    place: str  # name of the JSON in error messages

    @classmethod
    def read(cls, config: str | os.PathLike[str] | Mapping[str, Any], source: object = None) -> DeepSpeedJson:
        """Return the DeepSpeedJson for a file or a dict.

        Args:
            config: The path of a file, or a dict.
            source: The file from which the dict was read, if any.

        Raises:
            ConfigError: The file is missing or malformed, or contains an object with a duplicate key.
        """
        source = source if isinstance(config, Mapping) else config
        place = f"{KIND} {source}" if isinstance(source, str | os.PathLike) else KIND
        return cls(config if isinstance(config, Mapping) else read_json(config, KIND), place)

    @functools.cached_property
    def section(self) -> Any:
        """Our section, or {} if the section is missing.

        Raises ConfigError if the section is misspelled or inside another section.
        """
        _check_place_of_section(self.content)
        return self.content.get(SECTION, {})

    @functools.cached_property
    def known(self) -> Known:
        """The keys that ds_seqpar reads.

        Raises ConfigError for a value of the wrong type, such as a string instead of a number or a boolean. DeepSpeed
        interprets the string "false" as false, but transformers interprets it as true.
        """
        names = [field.name for field in dataclasses.fields(Known) if self.content.get(field.name, "auto") != "auto"]
        return read_as(Known, {name: without_auto(self.content[name]) for name in names}, f"{self.place}: ")

    def check_settings(self) -> None:
        """Raise ConfigError for settings that would break gradients or sharding."""
        wrong = []
        for key in REFUSED:
            outer, _, inner = key.partition(".")
            value = self.content.get(outer)
            if inner:
                value = value.get(inner) if isinstance(value, Mapping) else None
            if value is not None and not _is_off(key, value):
                wrong.append(key)
        if wrong:
            keys, why = ('", "'.join(wrong), "; ".join(REFUSED[key] for key in wrong))
            raise ConfigError(f'the DeepSpeed JSON must not set "{keys}" with sequence parallelism: {why}')
        if "gradient_clipping" not in self.content:
            warnings.warn(
                'the DeepSpeed JSON does not set "gradient_clipping", and DeepSpeed then clips at 1.0; set it (0 for '
                "none)",
                stacklevel=3,
            )

    def check_auto(self) -> None:
        """Raise ConfigError for each "auto" that only the HuggingFace Trainer replaces and DeepSpeed would ignore."""
        passed = "zero_optimization.", "bf16.keep_in_fp32", "fp16.keep_in_fp32"  # for DeepSpeed "auto" is the default
        keys = [key for key in autos(self.content) if key in (*OBJECTS, *DECISIVE) or not key.startswith(passed)]
        if keys:
            raise ConfigError(
                f'"auto" is what the HuggingFace Trainer fills in; got "auto" for {", ".join(keys)} without a Trainer, '
                "write values"
            )

    def check(self) -> None:
        """Raise ConfigError for a misspelled section, values of the wrong type, and settings that DeepSpeed rejects."""
        for key in autos(self.content):
            if key in OBJECTS:
                raise ConfigError(
                    f'{self.place} must have values in "{key}", which a Trainer may fill in; got "auto" for the whole '
                    f"object, write {OBJECTS[key]}"
                )
        _ = self.section, self.known, self.resolved

    @functools.cached_property
    def resolved(self) -> dict[str, Any]:
        """The configuration as read by DeepSpeed, including defaults, without values that may differ between ranks.

        Every "auto" value is treated as missing. Raises ConfigError for settings that DeepSpeed itself rejects.
        """
        given = dict(vars(call_library("DeepSpeed", self.place, self.content, _parsed)))
        given |= {field: getattr(self.known, field) for field in BATCH_SIZES}
        kept = {KEYS.get(name, name): x for name, x in given.items() if name not in OF_A_RANK}
        return json.loads(json.dumps(kept, default=_as_json, skipkeys=True))

    @property
    def left_out(self) -> list[str]:
        """The keys to hide from DeepSpeed: our section, and keys that DeepSpeed rejects even if they enable nothing."""
        return [SECTION, *(key for key in REFUSED if key in self.content and _is_off(key, self.content[key]))]

    def for_deepspeed(self, size: int, groups: int) -> dict[str, Any]:
        """Return the JSON for DeepSpeed, which counts a sequence once for each of the `size` ranks in a group.

        See `batch_by_rank` for errors.
        """
        content = dict(self.content)
        for key in self.left_out:
            content.pop(key, None)
        if self.known.train_batch_size is not None:
            content["train_batch_size"] = self.batch_by_rank(size, groups)
        return content

    @property
    def batch_sizes(self) -> tuple[int | None, int | None, int | None]:
        """The batch size, the micro-batch size and the number of accumulation steps, with None for missing values."""
        batch, micro, steps = (getattr(self.known, name) for name in BATCH_SIZES)
        return batch, micro, steps

    @property
    def optimizer_states(self) -> int:
        """The number of state tensors that the optimizer stores per parameter. If unknown, the number is 2 (AdamW)."""
        optimizer = without_auto(self.content.get("optimizer")) or {}
        known = OPTIMIZER_STATES.get(str(optimizer.get("type")).lower())
        return 2 if known is None else known + bool(optimizer.get("params", {}).get("momentum"))

    def batch_by_rank(self, size: int, groups: int) -> int:
        """Return "train_batch_size" as DeepSpeed counts it, which is the number of sequences multiplied by `size`.

        Raise ConfigError if the batch sizes are inconsistent with `groups` groups of `size` ranks.
        """
        sequences, micro, steps = self.batch_sizes
        assert sequences is not None
        step = groups * (micro or 1) * (steps or 1)
        if sequences % step or (micro and steps and sequences != step):
            raise ConfigError(
                f"train_batch_size counts sequences: it must be {'' if micro and steps else 'a multiple of '}{step} = "
                f"{groups} groups of {size} ranks x micro-batch {micro or 'any'} x accumulation {steps or 'any'}; got "
                f"{sequences}"
            )
        return sequences * size


def without_auto(section: Any) -> Any:
    """Return a section without keys that are left to a Trainer ("auto") or to DeepSpeed (null)."""
    if not isinstance(section, Mapping):
        return section
    return {name: without_auto(value) for name, value in section.items() if value != "auto" and value is not None}


def autos(content: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    """Yield the dotted keys of all "auto" values outside our section."""
    for name, value in content.items():
        if isinstance(value, Mapping) and name != SECTION:
            yield from autos(value, f"{outer}{name}.")
        elif isinstance(value, str) and value == "auto":
            yield f"{outer}{name}"


def _check_place_of_section(content: Mapping[str, Any]) -> None:
    """Raise ConfigError if the section is misspelled or inside another section."""
    for key, inner in content.items():
        if _is_meant(key):
            raise ConfigError(f'sequence parallelism is set under the key "{SECTION}"; got "{key}", rename it')
        for name in inner if isinstance(inner, Mapping) and key != SECTION else ():
            if name == SECTION or _is_meant(name):
                raise ConfigError(
                    f'"{SECTION}" must stand at the top of the DeepSpeed JSON; got "{name}" inside "{key}", move it out'
                )


def _is_off(key: str, value: Any) -> bool:
    """Return whether the value of a key in REFUSED disables the key's feature."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or (key == "tensor_parallel" and value.get("autotp_size", 2) in (0, 1))
    return value == NEUTRAL.get(key)


def _is_meant(key: object) -> bool:
    """Return whether a key is a misspelling of the section's key."""
    if key == SECTION or key in OTHERS or not isinstance(key, str):
        return False
    plain, right = ("".join(filter(str.isalnum, name.lower())) for name in (key, SECTION))
    return plain in ("sp", "ulysses") or difflib.SequenceMatcher(None, plain, right).ratio() > 0.8


def _parsed(content: dict[str, Any]) -> Any:
    """Return DeepSpeed's configuration object.

    DeepSpeed's class raises errors for settings that it rejects. The given batch sizes are replaced with 1, since they
    depend on the number of ranks.
    """
    from deepspeed.runtime.config import DeepSpeedConfig  # takes seconds to import, so only for a user's configuration

    return DeepSpeedConfig({**_checked_by_deepspeed(content), "train_micro_batch_size_per_gpu": 1})


def _as_json(value: Any) -> Any:
    """Return the contents of a section of DeepSpeed's configuration, without the path to the host's drives."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(exclude={name: {"nvme_path"} for name in ("offload_param", "offload_optimizer")})
    if isinstance(value, Mapping | Sequence):
        return dict(value) if isinstance(value, Mapping) else list(value)
    if hasattr(value, "repr") or dataclasses.is_dataclass(value):  # DeepSpeed itself writes objects with `repr` as JSON
        return vars(value)
    return type(value).__qualname__ if " at 0x" in str(value) else str(value)  # addresses differ between ranks


def _checked_by_deepspeed(content: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Return the configuration without "auto" values and without keys that are checked elsewhere.

    `outer` is the key of the section that contains `content`, followed by a dot.
    """
    return {
        key: _checked_by_deepspeed(value, f"{outer}{key}.") if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value != "auto" and f"{outer}{key}" not in CHECKED_HERE
    }


def read_config(config: str | Path | Mapping[str, Any]) -> SequenceParallelConfig:
    """Return the settings of the "sequence_parallel" section of a DeepSpeed JSON.

    Args:
        config: The path of a JSON file, or the dict. Without a section, every setting has its default value.

    Raises:
        ConfigError: The file is malformed, or the section is misspelled, invalid, or inside another section.
    """
    return SequenceParallelConfig.from_dict(DeepSpeedJson.read(config).section)

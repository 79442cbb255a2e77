"""What a user chooses: the `"sequence_parallel"` section of a DeepSpeed JSON, as one frozen dataclass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, choose, nearest

SECTION = "sequence_parallel"
LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEDULES = ("ring",)
KERNELS = ("auto", "cpu_flash", "cuda_flash", "flash_attn", "reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How one sequence is shared by `size` ranks. The JSON section has the same field names.

    size: ranks that share one sequence (P). "auto": all ranks of the job.
    ulysses: ranks of an all-to-all that trades sequence for heads (U); the other `size / ulysses` (A) run `schedule`.
        "auto": the largest that divides `size` and fits the model's heads, 1 where heads are not known. The floor on
        received bytes falls as 1/sqrt(U P), so larger is better until heads or slow links end it.
    schedule: what the inner A ranks do. "ring" (Liu et al., Ring Attention). "auto" is "ring".
    layout: which tokens a rank holds: "zigzag" (chunks r and 2A-1-r of 2A; equal causal work in every step), "striped"
        (every A-th token; Striped Attention, section 3) or "contiguous". "auto" is "zigzag".
    kernel: the block kernel; "auto" is the first that can take the blocks.
    """

    size: int | str = "auto"
    ulysses: int | str = "auto"
    schedule: str = "auto"
    layout: str = "auto"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for field in ("size", "ulysses"):
            value = getattr(self, field)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f'{SECTION}.{field} must be a whole number from 1 or "auto"; got {value!r}')
        choose(f"{SECTION}.schedule", self.schedule, ("auto", *SCHEDULES))
        choose(f"{SECTION}.layout", self.layout, ("auto", *LAYOUTS))
        choose(f"{SECTION}.kernel", self.kernel, KERNELS)

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> SequenceParallelConfig:
        """From the section itself. Raises ConfigError for a key that does not exist, naming the nearest that does."""
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be an object such as {{"size": 4, "ulysses": 2}}; got {section!r}')
        known = [field.name for field in dataclasses.fields(cls)]
        for key in section:
            if key not in known:
                raise ConfigError(f'"{SECTION}" takes {", ".join(known)}; got {key!r}{nearest(str(key), known)}')
        return cls(**section)

    @classmethod
    def from_deepspeed(cls, config: str | Path | Mapping[str, Any]) -> SequenceParallelConfig:
        """From a DeepSpeed configuration (a JSON file's path, or the dict). No section: every field "auto"."""
        return cls.from_dict(read_deepspeed(config).get(SECTION, {}))

    def resolve(self, world_size: int, heads: tuple[int, int] | None = None) -> SequenceParallelConfig:
        """The same with every "auto" replaced.

        world_size: ranks of the job. heads: (query heads, key/value heads) of the model, where known.
        Raises ConfigError where size does not divide the world, ulysses not the size, or ulysses does not fit heads.
        """
        size = world_size if self.size == "auto" else self.size
        if world_size % size:
            raise ConfigError(
                f"{SECTION}.size must divide the number of ranks; got size {size} on {world_size} ranks, "
                f"use one of {_divisors(world_size)}"
            )
        ulysses = self.ulysses
        if ulysses == "auto":
            ulysses = max(legal_ulysses(size, *heads)) if heads else 1
        if size % ulysses:
            raise ConfigError(
                f"{SECTION}.ulysses must divide {SECTION}.size; got ulysses {ulysses}, size {size}, "
                f"use one of {_divisors(size)}"
            )
        if heads:
            check_heads(ulysses, *heads, size=size)
        auto = {"schedule": "ring", "layout": "zigzag"}
        chosen = {name: value for name, value in auto.items() if getattr(self, name) == "auto"}
        return dataclasses.replace(self, size=size, ulysses=ulysses, **chosen)


def legal_ulysses(size: int, q_heads: int, kv_heads: int) -> list[int]:
    """The Ulysses degrees that divide `size` and fit the heads. Where U > kv_heads, U / kv_heads members share one."""
    return [u for u in _divisors(size) if q_heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)]


def check_heads(ulysses: int, q_heads: int, kv_heads: int, *, size: int) -> None:
    """Raises ConfigError where this Ulysses degree cannot share these heads equally."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ConfigError(f"query heads must be a multiple of key/value heads; got {q_heads} and {kv_heads}")
    legal = legal_ulysses(size, q_heads, kv_heads)
    if ulysses not in legal:
        raise ConfigError(
            f"{SECTION}.ulysses must divide the query heads and divide, or be a multiple of, the key/value heads; "
            f"got ulysses {ulysses} for {q_heads} query and {kv_heads} key/value heads, use one of {legal}"
        )


def read_deepspeed(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration as a dict. Raises ConfigError with file and line for a missing or malformed file."""
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the DeepSpeed configuration must be a readable JSON file; {path}: {error.strerror}"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"the DeepSpeed configuration must be valid JSON; "
            f"{path}, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the DeepSpeed configuration must be UTF-8 text; {path}: {error.reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the DeepSpeed configuration must be a JSON object; {path} holds a {type(content).__name__}")
    return content


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

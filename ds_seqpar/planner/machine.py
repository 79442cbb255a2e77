"""Description of a machine for the planner, with its nodes, links, rates and memory.

Presets and their sources are stored in machines.json, and users' files have the same format. This module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..base.errors import ConfigError, did_you_mean
from ..base.files import SHOWN, STRICT, read_as, read_json

DEFAULT = "modest"  # preset used if no machine is specified
CORE = "cpu"  # preset with the rates of one CPU core
PRESETS = Path(__file__).with_name("machines.json")

# The limits exceed the values of every real machine, and products of several values stay finite.
Rate = Annotated[float, Field(ge=1, le=1e24)]  # bytes/s, flops/s or bytes
Seconds = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wire:
    """Latency and rate of a link."""

    latency: Seconds
    """Seconds until an empty message arrives."""
    rate: Rate
    """Bytes/s that one rank receives. Ranks that share a link also share its rate."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Machine:
    """A machine's links, rates and memory, as stored in its file."""

    name: str
    """Name shown to the user: the key of the preset, or the file name without .json."""
    about: str
    """One-line description for the user."""
    per_node: Annotated[int, Field(ge=1, lt=2**63)]
    """Number of ranks per node; rank r is on node `r // per_node`."""
    gpus: bool
    """Whether ranks have device memory in addition to host memory."""
    inside: Wire
    """Link to ranks on the same node."""
    between: Wire
    """Link to ranks on other nodes."""
    attention: Mapping[str, Rate]
    """Flops/s of attention by dtype. Only visible pairs are counted."""
    matrices: Mapping[str, Rate]
    """Flops/s of matrix products by dtype."""
    memory: Rate
    """Bytes of memory per rank."""
    reserve_fraction: Annotated[float, Field(ge=0, le=0.99)]
    """Fraction of `memory` that is not available for tensors."""
    host_memory: Rate
    """Bytes of host memory per node."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each value, by field."""

    @classmethod
    def load(cls, place: str) -> Machine:
        """Load a preset by name, or a machine file by path.

        Raises:
            ConfigError: `place` is neither a preset nor a JSON file, or the file is invalid.
        """
        if (preset := presets().get(place)) is not None:
            return machine_of(place, preset)
        if place.endswith(".json"):
            return machine_of(Path(place).stem, read_json(place, "a machine's file"), f"machine {place}")
        raise ConfigError(
            f"a machine is one of {', '.join(presets())}, or a JSON file; got {place[:SHOWN]!r}"
            f"{did_you_mean(place, presets())}"
        )

    @classmethod
    def guessed(cls, device: str) -> Machine:
        """Return the preset that matches a device name such as "NVIDIA H100 80GB HBM3", or the preset `DEFAULT`."""
        preset_by_prefix = {name.partition("-")[0].upper(): name for name in presets()}
        return cls.load(next((name for prefix, name in preset_by_prefix.items() if prefix in device.upper()), DEFAULT))

    @classmethod
    def of_cores(cls, cores: int, memory: int, per_node: int) -> Machine:
        """Return a machine without GPUs, on which ranks share the cores and memory of each host equally.

        Args:
            cores: Number of cores per host.
            memory: Bytes of memory per host.
            per_node: Number of ranks per host.
        """
        core = cls.load(CORE)
        attention, matrices = (
            {dtype: rate * cores / per_node for dtype, rate in rates.items()}
            for rates in (core.attention, core.matrices)
        )
        return dataclasses.replace(
            core, name="these hosts", about=f"{cores} cores and {memory / 2**30:.0f} GiB each, rates supposed",
            per_node=per_node, between=dataclasses.replace(core.between, rate=core.between.rate / per_node),
            attention=attention, matrices=matrices, host_memory=float(memory), memory=memory / per_node,
        )  # fmt: skip

    def is_inside(self, *ranks: int) -> bool:
        """Return whether all given ranks are on the same node."""
        return len({rank // self.per_node for rank in ranks}) == 1

    @property
    def usable(self) -> int:
        """Bytes of a rank's memory that are available for tensors."""
        return int(self.memory * (1 - self.reserve_fraction))

    def rates(self, dtype: str) -> tuple[float, float]:
        """Return the flops/s of attention and of matrix products in a dtype. float16 has the same rates as bfloat16.

        Raises:
            ConfigError: The machine has no rates for the dtype.
        """
        wanted = "bfloat16" if dtype == "float16" else dtype
        if wanted not in self.attention or wanted not in self.matrices:
            known = sorted({*self.attention} & {*self.matrices})
            raise ConfigError(f"machine {self.name} has rates for {', '.join(known)}; got a model in {dtype}")
        return self.attention[wanted], self.matrices[wanted]


@functools.cache
def presets() -> dict[str, Any]:
    return json.loads(PRESETS.read_text(encoding="utf-8"))


def machine_of(name: str, content: object, place: str = "") -> Machine:
    """Build a machine from the content of a file.

    Args:
        name: Name of the machine.
        content: Parsed JSON.
        place: Name of the file in error messages. The default is "machine NAME".

    Raises:
        ConfigError: A field is missing, unknown or invalid. The message names the field.
    """
    if isinstance(content, Mapping):
        content = {"name": name, **content}
    return read_as(Machine, content, f"{place or f'machine {name}'}: ")

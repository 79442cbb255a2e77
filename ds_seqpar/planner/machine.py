"""The planner's description of a machine: nodes, links, rates and memory. Presets with their sources are in
machines.json; a user's file has the same form. Does not import torch."""

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

DEFAULT = "modest"  # the preset where no machine is named
CORE = "cpu"  # the preset whose rates are those of one CPU core
PRESETS = Path(__file__).with_name("machines.json")

# Ends of the ranges: beyond those of any machine, and such that products of several numbers are finite.
Rate = Annotated[float, Field(ge=1, le=1e24)]  # bytes/s or flops/s; bytes too
Seconds = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wire:
    """Latency and rate of a link."""

    latency: Seconds
    """Seconds until an empty message arrives."""
    rate: Rate
    """Bytes/s that a rank receives. Of a link that ranks share, each has a part."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Machine:
    """Links, rates and memory of a machine, as its file describes them."""

    name: str
    """For the user; the preset's key, or the file's name without .json."""
    about: str
    """One line for the user."""
    per_node: Annotated[int, Field(ge=1, lt=2**63)]
    """Ranks per node; rank r is in node r // per_node."""
    gpus: bool
    """Whether ranks have device memory beside their host's."""
    inside: Wire
    """A rank's link to ranks of its own node."""
    between: Wire
    """A rank's link to ranks of other nodes."""
    attention: Mapping[str, Rate]
    """dtype -> flops/s of attention, of the pairs that are visible."""
    matrices: Mapping[str, Rate]
    """dtype -> flops/s of matrix products."""
    memory: Rate
    """Bytes of a rank."""
    reserve_fraction: Annotated[float, Field(ge=0, le=0.99)]
    """Fraction of `memory` that is not for tensors."""
    host_memory: Rate
    """Bytes of a node's host."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field -> where its value comes from."""

    @classmethod
    def load(cls, place: str) -> Machine:
        """Load a preset by its name, or a machine file by its path.

        Raises:
            ConfigError: If `place` is neither a preset nor a JSON file, or the file is not valid.
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
        """Return the preset whose name is part of the device's name ("NVIDIA H100 80GB HBM3"), or `DEFAULT`."""
        preset_by_prefix = {name.partition("-")[0].upper(): name for name in presets()}
        return cls.load(next((name for prefix, name in preset_by_prefix.items() if prefix in device.upper()), DEFAULT))

    @classmethod
    def of_cores(cls, cores: int, memory: int, per_node: int) -> Machine:
        """Return a machine of hosts without GPUs. Each host has `cores` cores and `memory` bytes, which its `per_node`
        ranks share equally."""
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
        """Return whether one node has all of these ranks."""
        return len({rank // self.per_node for rank in ranks}) == 1

    @property
    def usable(self) -> int:
        """Bytes of a rank's memory that tensors may take."""
        return int(self.memory * (1 - self.reserve_fraction))

    def rates(self, dtype: str) -> tuple[float, float]:
        """Return the flops/s of (attention, matrix products) in a dtype; float16 has those of bfloat16.

        Raises:
            ConfigError: If the machine has no rates for it.
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
    """Build the machine from a file's content.

    Args:
        name: Name of the machine.
        content: The parsed JSON.
        place: Its name in error messages; default "machine NAME".

    Raises:
        ConfigError: If a field is missing, unknown or invalid; the message names it.
    """
    if isinstance(content, Mapping):
        content = {"name": name, **content}
    return read_as(Machine, content, f"{place or f'machine {name}'}: ")

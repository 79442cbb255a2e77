"""The planner's description of a machine: nodes, links, rates and memory. Presets with their sources are in
machines.json; a user's file has the same form. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasPath, Field
from pydantic.dataclasses import dataclass

from ..compiler.tiles.launches import KERNELS
from ..compiler.tiles.tiles import Tile
from ..errors import ConfigError, did_you_mean
from ..files import SHOWN, STRICT, read_as, read_json

DEFAULT = "modest"  # the preset where no machine is named
CORE = "cpu"  # the preset whose rates are those of one CPU core
PRESETS = Path(__file__).with_name("machines.json")
# kind of tile -> kind of the table that has its rate
TABLE_OF = {"full": "full", "causal": "causal", "upper": "causal", "band": "causal", "segments": "causal"}
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # flops of a visible pair and element of head_dim: 2 and 5 matmuls

T = TypeVar("T", bound=Mapping[str, Any])


def _with_keys(*keys: str) -> AfterValidator:
    def checked(given: T) -> T:
        if set(given) != set(keys):
            raise ValueError(f"it should have {' and '.join(keys)}")
        return given

    return AfterValidator(checked)


def _ascending(table: Table) -> Table:
    if not table or any(after[0] <= before[0] for before, after in itertools.pairwise(table)):
        raise ValueError("it should be a list of [tokens, flops/s], tokens ascending")
    return table


def _known(kernel: str) -> str:
    if kernel not in KERNELS[1:]:
        raise ValueError(f"it should be one of {', '.join(KERNELS[1:])}")
    return kernel


# Ends of the ranges: beyond those of any machine, and such that products of several numbers are finite.
Rate = Annotated[float, Field(ge=1, le=1e24)]  # bytes/s or flops/s; bytes and tokens too
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Table = Annotated[tuple[tuple[Rate, Rate], ...], AfterValidator(_ascending)]  # (tokens, flops/s)
Tables = Annotated[Mapping[str, Table], _with_keys("full", "causal")]
Kernel = Annotated[str, AfterValidator(_known)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wire:
    """Latency and rate of a link."""

    latency: Seconds
    """Seconds until an empty message arrives."""
    rate: Rate
    """Bytes/s in each direction."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ZeroCosts:
    """Measured costs of DeepSpeed's ZeRO. Rates of collectives count the bytes of the whole tensor."""

    ranks: Annotated[int, Field(ge=2)]
    """Ranks that were measured together; the costs apply to jobs of as many ranks."""
    gather: Wire
    reduce: Wire
    """Reduce-scatter."""
    all_reduce: Wire
    forward: Seconds
    """Host seconds per module that ZeRO-3 hooks, in forward."""
    backward: Seconds
    """The same, in backward."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Machine:
    """Links, rates and memory of a machine, as its file describes them."""

    name: str
    """For the user; the preset's key, or the file's name without .json."""
    about: str
    """One line for the user."""

    per_node: Annotated[int, Field(ge=1, lt=2**63)]
    """Ranks per node; rank r is in node r // per_node."""
    inside: Wire
    """A rank's link to ranks of its own node."""
    between: Wire
    """A rank's link to ranks of other nodes."""
    uplink: Rate | None
    """Bytes/s in each direction that all ranks of a node share; None: they share no link."""
    duplex: bool
    """Whether a link carries both directions at once."""
    stolen: Seconds
    """Seconds by which each byte that a rank sends or receives delays its computation; where CPUs carry the bytes, this
    is most of what a byte costs."""

    attention: Mapping[str, Annotated[Mapping[str, Tables], _with_keys(*FLOPS_PER_PAIR)]]
    """dtype -> direction -> kind of tile -> rows (tokens, flops/s of the visible pairs); tokens is the geometric mean
    of a tile's rows and columns."""
    gemm: Mapping[str, Rate]
    """dtype -> flops/s of matrix products."""
    memory_rate: Rate
    """Bytes/s, read and written, of merging and copying."""
    elementwise_rate: Rate
    """Bytes/s, read and written, of elementwise operations into new tensors."""
    offload_rate: Rate
    """Bytes/s of copies between a rank and its host's memory."""
    instruction: Annotated[Seconds, Field(validation_alias=AliasPath("host", "instruction"))]
    """Host seconds per instruction."""
    ahead: Annotated[bool, Field(validation_alias=AliasPath("host", "ahead"))]
    """Whether the host continues while the device works, as with GPUs."""

    host_memory: Rate
    """Bytes of a node's host."""
    host_rate: Rate
    """Bytes/s of the host's memory, shared by the ranks of a node."""
    memory: Rate
    """Bytes of a rank."""
    reserve_fraction: Annotated[float, Field(ge=0, le=0.99)]
    """Fraction of `memory` that is not for tensors."""

    sources: Mapping[str, str]
    """Field -> where its value comes from."""

    nvme_rate: Rate | None = None
    """Bytes/s of a node's drives, shared by its ranks; None: not known."""
    peak: Rate | None = None
    """Flops/s in bfloat16 and float16 by the data sheet, the base of MFU; None: not known."""
    zero: ZeroCosts | None = None
    """None: not measured; then the cost of collectives follows from the links, and hooks cost nothing."""
    kernels: Mapping[str, Mapping[str, tuple[Kernel, ...]]] = dataclasses.field(default_factory=dict)
    """Device name -> case ("bfloat16 128 causal") -> kernels that support the case, the fastest first."""

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
    def guessed(cls, device: str, dtype: str) -> Machine:
        """Return the preset whose name is part of the device's name ("NVIDIA H100 80GB HBM3"), or `DEFAULT`. A dtype
        without rates gets those of bfloat16."""
        preset_by_prefix = {name.partition("-")[0].upper(): name for name in presets()}
        name = next((name for prefix, name in preset_by_prefix.items() if prefix in device.upper()), DEFAULT)
        machine = cls.load(name)
        if "float16" in dtype:  # bfloat16 too
            return machine
        attention, gemm = machine.attention, machine.gemm
        return dataclasses.replace(
            machine,
            attention={dtype: attention["bfloat16"], **attention},
            gemm={dtype: gemm["bfloat16"], **gemm},
        )

    @classmethod
    def of_cores(cls, cores: int, memory: int, per_node: int) -> Machine:
        """Return a machine of hosts without GPUs. Each host has `cores` cores and `memory` bytes, which its `per_node`
        ranks share equally."""
        core, share = cls.load(CORE), cores / per_node

        def scaled(table: Table) -> Table:
            return tuple((tokens, rate * share) for tokens, rate in table)

        return dataclasses.replace(
            core,
            name="these hosts",
            about=f"{cores} cores and {memory / 2**30:.0f} GiB each, rates supposed",
            per_node=per_node,
            attention={
                dtype: {
                    direction: {kind: scaled(table) for kind, table in tables.items()}
                    for direction, tables in tables_by_direction.items()
                }
                for dtype, tables_by_direction in core.attention.items()
            },
            gemm={dtype: rate * share for dtype, rate in core.gemm.items()},
            **{name: getattr(core, name) * share for name in ("memory_rate", "elementwise_rate", "offload_rate")},
            host_memory=float(memory),
            host_rate=core.host_rate * cores,
            memory=memory / per_node,
        )

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def wire(self, src: int, dst: int) -> Wire:
        return self.inside if self.node(src) == self.node(dst) else self.between

    @property
    def usable(self) -> int:
        """Bytes of a rank's memory that tensors may take."""
        return int(self.memory * (1 - self.reserve_fraction))

    @property
    def apart(self) -> bool:
        """Whether ranks have device memory beside their host's. CPU ranks have none, and their host does not work
        ahead."""
        return self.ahead

    def rated_dtype(self, dtype: str) -> str:
        """Return the dtype whose rates apply to `dtype`; float16 uses those of bfloat16.

        Raises:
            ConfigError: If the machine has no rates for it.
        """
        wanted = "bfloat16" if dtype == "float16" else dtype
        if wanted not in self.attention or wanted not in self.gemm:
            known = sorted({*self.attention} & {*self.gemm})
            raise ConfigError(f"machine {self.name} has rates for {', '.join(known)}; got a model in {dtype}")
        return wanted

    def tile_seconds(self, dtype: str, direction: str, tile: Tile, heads: int, head_dim: int, batch: int = 1) -> float:
        """Return the seconds of one kernel call on a tile. Hidden pairs cost nothing, but masked and small tiles have
        lower rates."""
        rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
        flops = FLOPS_PER_PAIR[direction] * tile.pairs * heads * head_dim * batch
        return flops / self.tile_rate(dtype, direction, TABLE_OF[tile.kind], math.sqrt(rows * columns))

    def tile_rate(self, dtype: str, direction: str, kind: str, tokens: float) -> float:
        """Return the flops/s of a tile. A causal tile larger than its table counts as a full square and two causal
        halves, and so on."""
        tables = self.attention[self.rated_dtype(dtype)][direction]
        rate, last = interpolated(tables[kind], tokens), tables[kind][-1][0]
        if kind == "full" or tokens <= last:
            return rate
        full = interpolated(tables["full"], tokens)
        return 1 / (1 / full + (1 / rate - 1 / full) * last / tokens)

    def best_rate(self, dtype: str, direction: str) -> float:
        """Return the highest rate of attention, in flops/s."""
        tables = self.attention[self.rated_dtype(dtype)][direction]
        return max(rate for table in tables.values() for _, rate in table)

    def gemm_seconds(self, dtype: str, flops: float) -> float:
        return flops / self.gemm[self.rated_dtype(dtype)]


def interpolated(table: Table, tokens: float) -> float:
    """Return a table's rate at `tokens` tokens: linear in log(tokens) between two rows, proportional to tokens below
    the first row, and constant above the last."""
    if tokens <= table[0][0]:
        return table[0][1] * tokens / table[0][0]
    for (low, slow), (high, fast) in itertools.pairwise(table):
        if tokens <= high:
            return slow + (fast - slow) * math.log(tokens / low) / math.log(high / low)
    return table[-1][1]


@functools.cache
def presets() -> dict[str, Any]:
    return json.loads(PRESETS.read_text(encoding="utf-8"))


def machine_of(name: str, content: object, place: str = "") -> Machine:
    """Build the machine from a file's content.

    Args:
        name: Name of the machine.
        content: The parsed JSON.
        place: What error messages call it; default "machine NAME".

    Raises:
        ConfigError: If a field is missing, unknown or not valid; the message names it.
    """
    if isinstance(content, Mapping):
        content = {"name": name, **content}
    return read_as(Machine, content, f"{place or f'machine {name}'}: ")

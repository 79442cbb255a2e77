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
from typing import Any

from .. import renamed
from ..compiler.tiles.launches import KERNELS
from ..compiler.tiles.tiles import Tile
from ..errors import ConfigError, did_you_mean
from ..files import JsonField, read_json

DEFAULT = "modest"  # the preset where no machine is named
CORE = "cpu"  # the preset whose rates are those of one CPU core
PRESETS = Path(__file__).with_name("machines.json")
# kind of tile -> kind of the table that has its rate
TABLE_OF = {"full": "full", "causal": "causal", "upper": "causal", "band": "causal", "segments": "causal"}
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # flops of a visible pair and element of head_dim: 2 and 5 matmuls
Table = tuple[tuple[float, float], ...]  # (tokens, flops/s), ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """Latency and rate of a link."""

    latency: float  # seconds until an empty message arrives
    rate: float  # bytes/s in each direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroCosts:
    """Measured costs of DeepSpeed's ZeRO."""

    ranks: int  # ranks that were measured together; the costs apply to jobs of as many ranks
    # collectives over all `ranks`; rates count the bytes of the whole tensor
    gather: Wire
    reduce: Wire  # reduce-scatter
    all_reduce: Wire
    forward: float  # host seconds per module that ZeRO-3 hooks, in forward
    backward: float  # the same, in backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Links, rates and memory of a machine, as its file describes them.

    In the file the fields `instruction` and `ahead` are keys of "host"; `name` is the preset's key, or the file's name
    without .json."""

    name: str  # for the user
    about: str  # for the user: one line that describes the machine

    # links
    per_node: int  # ranks per node; rank r is in node r // per_node
    inside: Wire  # a rank's link to ranks of its own node
    between: Wire  # a rank's link to ranks of other nodes
    uplink: float | None  # bytes/s in each direction that all ranks of a node share; None: they share no link
    duplex: bool  # whether a link carries both directions at once
    # seconds by which each byte that a rank sends or receives delays its computation; where CPUs carry the bytes, this
    # is most of what a byte costs
    stolen: float

    # rates
    # dtype -> direction -> kind of tile ("full", "causal") -> rows (tokens, flops/s of the visible pairs); tokens is
    # the geometric mean of a tile's rows and columns
    attention: Mapping[str, Mapping[str, Mapping[str, Table]]]
    gemm: Mapping[str, float]  # dtype -> flops/s of matrix products
    memory_rate: float  # bytes/s, read and written, of merging and copying
    elementwise_rate: float  # bytes/s, read and written, of elementwise operations into new tensors
    offload_rate: float  # bytes/s of copies between a rank and its host's memory
    instruction: float  # host seconds per instruction
    ahead: bool  # whether the host continues while the device works, as with GPUs

    # memory
    host_memory: float  # bytes of a node's host
    host_rate: float  # bytes/s of the host's memory, shared by the ranks of a node
    memory: float  # bytes of a rank
    reserve_fraction: float  # fraction of `memory` that is not for tensors

    sources: Mapping[str, str]  # field -> where its value comes from

    # not known for every machine
    nvme_rate: float | None = None  # bytes/s of a node's drives, shared by its ranks; None: not known
    peak: float | None = None  # flops/s in bfloat16 and float16 by the data sheet, the base of MFU; None: not known
    # None: not measured; then the cost of collectives follows from the links, and hooks cost nothing
    zero: ZeroCosts | None = None
    # device name -> case ("bfloat16 128 causal") -> kernels that support the case, the fastest first
    kernels: Mapping[str, Mapping[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, place: str) -> Machine:
        """Load a preset by its name, or a machine file by its path.

        Raises:
            ConfigError: If `place` is neither a preset nor a JSON file, or the file is not valid.
        """
        known = presets()
        if place in known:
            return machine_of(place, known[place])
        if not place.endswith(".json"):
            raise ConfigError(
                f"a machine is one of {', '.join(known)}, or a JSON file; got {place!r}"
                f"{did_you_mean(place, tuple(known))}"
            )
        return machine_of(Path(place).stem, read_json(place, "a machine's file"), f"machine {place}")

    @classmethod
    def guessed(cls, device: str, dtype: str) -> Machine:
        """Return the preset whose name is part of the device's name ("NVIDIA H100 80GB HBM3"), or `DEFAULT`. A dtype
        without rates gets those of bfloat16."""
        preset_by_prefix = {name.partition("-")[0].upper(): name for name in presets()}
        machine = cls.load(
            next((name for prefix, name in preset_by_prefix.items() if prefix in device.upper()), DEFAULT)
        )
        rates = {"attention": machine.attention, "gemm": machine.gemm}
        with_dtype: Any = {
            name: {dtype: rates_by_dtype["bfloat16"], **rates_by_dtype}
            for name, rates_by_dtype in rates.items()
            if "float16" not in dtype
        }
        return dataclasses.replace(machine, **with_dtype)

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
            memory_rate=core.memory_rate * share,
            elementwise_rate=core.elementwise_rate * share,
            offload_rate=core.offload_rate * share,
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


# largest values that a file may have: above those of any machine, and small enough that products of several are finite
MOST_RATE, MOST_SECONDS, MOST_RESERVED = 1e24, 1e6, 0.99
NUMBERS = ("memory_rate", "elementwise_rate", "offload_rate", "host_memory", "host_rate", "memory")
FIELDS = ("about", "per_node", "inside", "between", "uplink", "duplex", "stolen", "attention", "gemm", "peak", *NUMBERS,
          "nvme_rate", "host", "reserve_fraction", "zero", "kernels", "sources")  # fmt: skip


def machine_of(name: str, content: object, place: str = "") -> Machine:
    """Build the machine from a file's content.

    Args:
        name: Name of the machine.
        content: The parsed JSON.
        place: What error messages call it; default "machine NAME".

    Raises:
        ConfigError: If a field is missing, unknown or not valid; the message names it.
    """
    optional = {"kernels": None, "peak": None}  # presets have no kernels, and calibrate does not measure a peak
    content = {**optional, **renamed.machine_file(content)} if isinstance(content, Mapping) else content
    fields = JsonField(place or f"machine {name}", content).object(FIELDS)
    host = fields["host"].object(("instruction", "ahead"))
    return Machine(
        name=name,
        about=fields["about"].text(),
        per_node=fields["per_node"].count(),
        inside=_wire(fields["inside"]),
        between=_wire(fields["between"]),
        uplink=None if fields["uplink"].value is None else _rate(fields["uplink"]),
        duplex=fields["duplex"].flag(),
        stolen=_seconds(fields["stolen"]),
        attention=_attention(fields["attention"]),
        gemm={dtype: _rate(rate) for dtype, rate in fields["gemm"].object().items()},
        instruction=_seconds(host["instruction"]),
        ahead=host["ahead"].flag(),
        nvme_rate=None if fields["nvme_rate"].value is None else _rate(fields["nvme_rate"]),
        peak=None if fields["peak"].value is None else _rate(fields["peak"]),
        reserve_fraction=fields["reserve_fraction"].number(least=0, most=MOST_RESERVED),
        zero=None if fields["zero"].value is None else _zero(fields["zero"]),
        kernels={} if fields["kernels"].value is None else _kernels(fields["kernels"]),
        sources={name: source.text() for name, source in fields["sources"].object().items()},
        **{name: _rate(fields[name]) for name in NUMBERS},
    )


def _zero(field: JsonField) -> ZeroCosts:
    fields = field.object(tuple(field.name for field in dataclasses.fields(ZeroCosts)))
    return ZeroCosts(
        ranks=fields["ranks"].count(least=2),
        gather=_wire(fields["gather"]),
        reduce=_wire(fields["reduce"]),
        all_reduce=_wire(fields["all_reduce"]),
        forward=_seconds(fields["forward"]),
        backward=_seconds(fields["backward"]),
    )


def _kernels(field: JsonField) -> dict[str, dict[str, tuple[str, ...]]]:
    return {
        device: {case: _order(order) for case, order in cases.object().items()}
        for device, cases in field.object().items()
    }


def _order(field: JsonField) -> tuple[str, ...]:
    names = KERNELS[1:]
    if not isinstance(field.value, list) or not all(name in names for name in field.value):
        raise field.wrong(f"a list of kernels, of {', '.join(names)}")
    return tuple(field.value)


def _attention(field: JsonField) -> dict[str, dict[str, dict[str, Table]]]:
    return {
        dtype: {
            direction: {kind: _table(table) for kind, table in kinds.object(("full", "causal")).items()}
            for direction, kinds in directions.object(tuple(FLOPS_PER_PAIR)).items()
        }
        for dtype, directions in field.object().items()
    }


def _table(field: JsonField) -> Table:
    wrong = field.wrong("a list of [tokens, flops/s], tokens ascending")
    rows = field.value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and len(row) == 2 for row in rows):
        raise wrong
    inner = [[field.inner(f"{index}", value) for value in row] for index, row in enumerate(rows)]
    table = tuple((_rate(tokens), _rate(rate)) for tokens, rate in inner)
    if any(after[0] <= before[0] for before, after in itertools.pairwise(table)):
        raise wrong
    return table


def _wire(field: JsonField) -> Wire:
    fields = field.object(("latency", "rate"))
    return Wire(latency=_seconds(fields["latency"]), rate=_rate(fields["rate"]))


def _rate(field: JsonField) -> float:
    # tokens, bytes, bytes/s or flops/s
    return field.number(least=1, most=MOST_RATE)


def _seconds(field: JsonField) -> float:
    return field.number(least=0, most=MOST_SECONDS)

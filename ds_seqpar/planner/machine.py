"""The planner's description of a machine: nodes, links, and how fast a rank computes. Presets with their sources are in
machines.json; a user's file has the same form. Imports no torch."""

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
    """A link. latency: seconds until a message of no bytes arrives. rate: bytes/s in each direction."""

    latency: float
    rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroCosts:
    """Measured costs of DeepSpeed's ZeRO. gather, reduce, all_reduce: latency and rate of collectives of all `ranks`;
    the bytes are those of the whole tensor. forward, backward: seconds of the host for a module that ZeRO-3 hooks."""

    ranks: int
    gather: Wire
    reduce: Wire
    all_reduce: Wire
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine. name, about: for the user. sources: where each figure is from.

    Links: per_node: ranks of a node; rank r is in node r // per_node. inside: a rank's link to ranks of its node;
    between: to ranks of other nodes. uplink: bytes/s in each direction that all ranks of a node share; None: they share
    no link. duplex: whether a link carries both directions at once. stolen: seconds by which a byte that a rank sends
    or receives delays the rank's work; where CPUs carry the bytes, this is most of what a byte costs.

    Rates: attention: dtype -> direction -> kind of tile ("full", "causal") -> flops/s by tokens, the geometric mean of
    a tile's rows and columns. gemm: dtype -> flops/s. peak: flops/s in bfloat16 and float16 by the data sheet, of which
    MFU is a share; None: not known. memory_rate: bytes/s of merging and copying; elementwise_rate: of elementwise
    operations into new tensors; offload_rate: of copies to host memory. instruction: seconds of the host for one
    instruction; ahead: whether the host goes on while the device works. kernels: name of a device -> case, as
    "bfloat16 128 causal" -> the kernels that take it, the fastest first. zero: None: not measured, so collectives cost
    what links cost, and hooks nothing.

    Memory: memory: bytes of a rank; reserve_fraction: the share of them that is not for tensors. host_memory: bytes of
    a node's host; host_rate: its bytes/s, which a node's ranks share; nvme_rate: bytes/s of its drives, shared too;
    None: not known.
    """

    name: str
    about: str
    per_node: int
    inside: Wire
    between: Wire
    uplink: float | None
    duplex: bool
    stolen: float
    attention: Mapping[str, Mapping[str, Mapping[str, Table]]]
    gemm: Mapping[str, float]
    memory_rate: float
    elementwise_rate: float
    offload_rate: float
    instruction: float
    ahead: bool
    host_memory: float
    host_rate: float
    memory: float
    reserve_fraction: float
    sources: Mapping[str, str]
    nvme_rate: float | None = None
    peak: float | None = None
    zero: ZeroCosts | None = None
    kernels: Mapping[str, Mapping[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, place: str) -> Machine:
        """A preset by its name, or a file by its path. Raises ConfigError for anything else, and for a wrong file."""
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
        """The preset whose name is in the device's ("NVIDIA H100 80GB HBM3"), or `DEFAULT`. A dtype without rates
        counts as fast as bfloat16."""
        model = {name.partition("-")[0].upper(): name for name in presets()}
        machine = cls.load(next((name for word, name in model.items() if word in device.upper()), DEFAULT))
        rates = {"attention": machine.attention, "gemm": machine.gemm}
        same: Any = {name: {dtype: its["bfloat16"], **its} for name, its in rates.items() if "float16" not in dtype}
        return dataclasses.replace(machine, **same)

    @classmethod
    def of_cores(cls, cores: int, memory: int, per_node: int) -> Machine:
        """Hosts without GPUs. cores, memory (bytes): of each host; its `per_node` ranks share them equally."""
        core, share = cls.load(CORE), cores / per_node

        def scaled(table: Table) -> Table:
            return tuple((tokens, rate * share) for tokens, rate in table)

        return dataclasses.replace(
            core,
            name="these hosts",
            about=f"{cores} cores and {memory / 2**30:.0f} GiB each, rates supposed",
            per_node=per_node,
            attention={
                dtype: {way: {kind: scaled(table) for kind, table in kinds.items()} for way, kinds in ways.items()}
                for dtype, ways in core.attention.items()
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
        """Bytes of a rank that tensors may take."""
        return int(self.memory * (1 - self.reserve_fraction))

    @property
    def apart(self) -> bool:
        """Whether ranks have memory beside their host's. CPU ranks have none, and their host does not work ahead."""
        return self.ahead

    def rated_dtype(self, dtype: str) -> str:
        """The dtype whose rates hold for `dtype`. Raises ConfigError where the machine has none."""
        wanted = "bfloat16" if dtype == "float16" else dtype
        if wanted not in self.attention or wanted not in self.gemm:
            known = sorted({*self.attention} & {*self.gemm})
            raise ConfigError(f"machine {self.name} has rates for {', '.join(known)}; got a model in {dtype}")
        return wanted

    def tile_seconds(self, dtype: str, direction: str, tile: Tile, heads: int, head_dim: int, batch: int = 1) -> float:
        """Seconds of one kernel call. Hidden pairs of a tile cost nothing, but masked and small tiles have lower
        rates."""
        rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
        flops = FLOPS_PER_PAIR[direction] * tile.pairs * heads * head_dim * batch
        return flops / self.tile_rate(dtype, direction, TABLE_OF[tile.kind], math.sqrt(rows * columns))

    def tile_rate(self, dtype: str, direction: str, kind: str, tokens: float) -> float:
        """Flops/s. A causal tile larger than its table counts as a full square and two causal halves, and so on."""
        tables = self.attention[self.rated_dtype(dtype)][direction]
        rate, last = interpolated(tables[kind], tokens), tables[kind][-1][0]
        if kind == "full" or tokens <= last:
            return rate
        full = interpolated(tables["full"], tokens)
        return 1 / (1 / full + (1 / rate - 1 / full) * last / tokens)

    def best_rate(self, dtype: str, direction: str) -> float:
        """The highest rate of attention, in flops/s."""
        tables = self.attention[self.rated_dtype(dtype)][direction]
        return max(rate for table in tables.values() for _, rate in table)

    def gemm_seconds(self, dtype: str, flops: float) -> float:
        return flops / self.gemm[self.rated_dtype(dtype)]


def interpolated(table: Table, tokens: float) -> float:
    """A table's rate at so many tokens: linear in log(tokens) between two rows, proportional to tokens below the first
    row, and constant above the last."""
    if tokens <= table[0][0]:
        return table[0][1] * tokens / table[0][0]
    for (low, slow), (high, fast) in itertools.pairwise(table):
        if tokens <= high:
            return slow + (fast - slow) * math.log(tokens / low) / math.log(high / low)
    return table[-1][1]


@functools.cache
def presets() -> dict[str, Any]:
    return json.loads(PRESETS.read_text(encoding="utf-8"))


# the largest figures of a file: above those of any machine, and small enough for products of several
MOST_RATE, MOST_SECONDS, MOST_RESERVED = 1e24, 1e6, 0.99
NUMBERS = ("memory_rate", "elementwise_rate", "offload_rate", "host_memory", "host_rate", "memory")
FIELDS = ("about", "per_node", "inside", "between", "uplink", "duplex", "stolen", "attention", "gemm", "peak", *NUMBERS,
          "nvme_rate", "host", "reserve_fraction", "zero", "kernels", "sources")  # fmt: skip


def machine_of(name: str, content: object, place: str = "") -> Machine:
    """The machine of a file's content. place: what errors call it; default: "machine NAME". Raises ConfigError, which
    names the wrong field."""
    optional = {"kernels": None, "peak": None}  # presets have no kernels, and nobody measures a peak
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
            way: {kind: _table(table) for kind, table in kinds.object(("full", "causal")).items()}
            for way, kinds in ways.object(tuple(FLOPS_PER_PAIR)).items()
        }
        for dtype, ways in field.object().items()
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
    """A number of tokens, of bytes, of bytes/s or of flops/s."""
    return field.number(least=1, most=MOST_RATE)


def _seconds(field: JsonField) -> float:
    return field.number(least=0, most=MOST_SECONDS)

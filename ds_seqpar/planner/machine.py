"""What a machine is to the planner: nodes, links, and how fast a rank computes. Presets with their sources are in
machines.json; a file of a user's own has the form of one of them. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..compiler.cuts import KERNELS
from ..compiler.tiles import Tile
from ..errors import ConfigError, nearest
from ..files import Given, read_json

DEFAULT = "modest"  # what a machine is that nobody named
CORE = "cpu"  # the preset whose rates are those of one core
PRESETS = Path(__file__).with_name("machines.json")
# kinds of tile that tables have
NEAREST = {"full": "full", "causal": "causal", "upper": "causal", "band": "causal", "segments": "causal"}
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # flops of a visible pair and element of head_dim: 2 and 5 matmuls
Table = tuple[tuple[float, float], ...]  # (tokens, flops/s), ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """latency: seconds from start to arrival of a message without bytes. rate: bytes/s each way."""

    latency: float
    rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroCosts:
    """What DeepSpeed's ZeRO takes, as measured. gather, reduce, all_reduce: collectives of all `ranks`, latency and
    bytes/s of what each rank has of it in the end, or in the beginning. forward, backward: seconds of the host for a
    module that ZeRO-3 hooks."""

    ranks: int
    gather: Wire
    reduce: Wire
    all_reduce: Wire
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """per_node: ranks of a node; rank r is in node r // per_node. inside: a rank's link to ranks of its node; between:
    its own to other nodes. uplink: bytes/s each way that all of a node's ranks share, None where they share none.
    duplex: whether a link carries both ways at once. stolen: seconds of a rank's work that a byte takes which it sends
    or receives: where processors carry bytes, that is most of what a byte costs.

    attention: dtype, direction, kind of tile ("full", "causal") -> flops/s by tokens, the geometric mean of a tile's
    rows and columns. gemm: dtype -> flops/s. memory_rate: bytes/s of merging and copying; elementwise_rate: of
    operations one after another whose results are new tensors; offload_rate: of copies to host memory. instruction:
    seconds of host time for each; ahead: whether the host goes on while the device works. host_memory: bytes of a
    node's host; host_rate: bytes/s of it, which a node's ranks share; nvme_rate: bytes/s of its drives, shared too,
    None where that is not known. memory: bytes a rank; spare: the share of them that is not for tensors.
    zero: None where it was not measured: collectives take what links do then, and hooks nothing. kernels: of a device,
    by its name, and a case, as "bfloat16 128 causal": the kernels that take it, the fastest first. sources: where each
    figure is from.
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
    spare: float
    sources: Mapping[str, str]
    nvme_rate: float | None = None
    zero: ZeroCosts | None = None
    kernels: Mapping[str, Mapping[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, place: str) -> Machine:
        """A preset by its name, or a file by its path. Raises ConfigError for neither, and for a wrong file."""
        found = presets()
        if place in found:
            return machine_of(place, found[place])
        if not place.endswith(".json"):
            raise ConfigError(
                f"a machine is one of {', '.join(found)}, or a JSON file; got {place!r}{nearest(place, tuple(found))}"
            )
        return machine_of(Path(place).stem, read_json(place, "a machine's file"), f"machine {place}")

    @classmethod
    def guessed(cls, device: str, dtype: str) -> Machine:
        """Where nobody says which: the preset that is named after the device ("NVIDIA H100 80GB HBM3"), or `DEFAULT`.
        A dtype without rates is taken to be as fast as bfloat16."""
        model = {name.partition("-")[0].upper(): name for name in presets()}
        machine = cls.load(next((name for word, name in model.items() if word in device.upper()), DEFAULT))
        rates = {"attention": machine.attention, "gemm": machine.gemm}
        same: Any = {name: {dtype: its["bfloat16"], **its} for name, its in rates.items() if "float16" not in dtype}
        return dataclasses.replace(machine, **same)

    @classmethod
    def of_cores(cls, cores: int, memory: int, per_node: int) -> Machine:
        """Hosts without GPUs, of so many cores and bytes, which `per_node` ranks each share equally."""
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
        return int(self.memory * (1 - self.spare))

    @property
    def apart(self) -> bool:
        """Whether ranks have memory of their own beside their host's. Processors have not, nor work ahead."""
        return self.ahead

    def rated_dtype(self, dtype: str) -> str:
        """The dtype whose rates count. Raises ConfigError where there are none."""
        wanted = "bfloat16" if dtype == "float16" else dtype
        if wanted not in self.attention or wanted not in self.gemm:
            known = sorted({*self.attention} & {*self.gemm})
            raise ConfigError(f"machine {self.name} has rates for {', '.join(known)}; got a model in {dtype}")
        return wanted

    def tile_seconds(self, dtype: str, direction: str, tile: Tile, heads: int, head_dim: int, batch: int = 1) -> float:
        """Of one kernel call: what a mask hides in the tile costs nothing, but a masked or small tile is slower."""
        rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
        flops = FLOPS_PER_PAIR[direction] * tile.products * heads * head_dim * batch
        return flops / self.tile_rate(dtype, direction, NEAREST[tile.kind], math.sqrt(rows * columns))

    def tile_rate(self, dtype: str, direction: str, kind: str, tokens: float) -> float:
        """Flops/s. A causal tile beyond its table is taken for two causal halves and a full square, and those again."""
        tables = self.attention[self.rated_dtype(dtype)][direction]
        rate, last = interpolated(tables[kind], tokens), tables[kind][-1][0]
        if kind == "full" or tokens <= last:
            return rate
        full = interpolated(tables["full"], tokens)
        return 1 / (1 / full + (1 / rate - 1 / full) * last / tokens)

    def best_rate(self, dtype: str, direction: str) -> float:
        """Flops/s of attention at most."""
        tables = self.attention[self.rated_dtype(dtype)][direction]
        return max(rate for table in tables.values() for _, rate in table)

    def gemm_seconds(self, dtype: str, flops: float) -> float:
        return flops / self.gemm[self.rated_dtype(dtype)]


def interpolated(table: Table, tokens: float) -> float:
    """Straight between neighbours, on a scale on which doubling is one step; below the first in proportion, beyond the
    last as that."""
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
MOST_RATE, MOST_SECONDS, MOST_SPARE = 1e24, 1e6, 0.99
NUMBERS = ("memory_rate", "elementwise_rate", "offload_rate", "host_memory", "host_rate", "memory")
FIELDS = ("about", "per_node", "inside", "between", "uplink", "duplex", "stolen", "attention", "gemm", *NUMBERS,
          "nvme_rate", "host", "spare", "zero", "kernels", "sources")  # fmt: skip


def machine_of(name: str, content: object, place: str = "") -> Machine:
    """From what a file holds. place: where errors say that it is from; default: the machine's name. Raises ConfigError,
    which names what is wrong."""
    content = {"kernels": None, **content} if isinstance(content, Mapping) else content  # which no preset has
    given = Given(place or f"machine {name}", content).object(FIELDS)
    host = given["host"].object(("instruction", "ahead"))
    return Machine(
        name=name,
        about=given["about"].text(),
        per_node=given["per_node"].count(),
        inside=_wire(given["inside"]),
        between=_wire(given["between"]),
        uplink=None if given["uplink"].value is None else _rate(given["uplink"]),
        duplex=given["duplex"].flag(),
        stolen=_seconds(given["stolen"]),
        attention=_attention(given["attention"]),
        gemm={dtype: _rate(rate) for dtype, rate in given["gemm"].object().items()},
        instruction=_seconds(host["instruction"]),
        ahead=host["ahead"].flag(),
        nvme_rate=None if given["nvme_rate"].value is None else _rate(given["nvme_rate"]),
        spare=given["spare"].number(least=0, most=MOST_SPARE),
        zero=None if given["zero"].value is None else _zero(given["zero"]),
        kernels={} if given["kernels"].value is None else _kernels(given["kernels"]),
        sources={field: source.text() for field, source in given["sources"].object().items()},
        **{field: _rate(given[field]) for field in NUMBERS},
    )


def _zero(given: Given) -> ZeroCosts:
    found = given.object(tuple(field.name for field in dataclasses.fields(ZeroCosts)))
    return ZeroCosts(
        ranks=found["ranks"].count(least=2),
        gather=_wire(found["gather"]),
        reduce=_wire(found["reduce"]),
        all_reduce=_wire(found["all_reduce"]),
        forward=_seconds(found["forward"]),
        backward=_seconds(found["backward"]),
    )


def _kernels(given: Given) -> dict[str, dict[str, tuple[str, ...]]]:
    return {
        device: {case: _order(order) for case, order in cases.object().items()}
        for device, cases in given.object().items()
    }


def _order(given: Given) -> tuple[str, ...]:
    names = KERNELS[1:]
    if not isinstance(given.value, list) or not all(name in names for name in given.value):
        raise given.wrong(f"a list of kernels, of {', '.join(names)}")
    return tuple(given.value)


def _attention(given: Given) -> dict[str, dict[str, dict[str, Table]]]:
    return {
        dtype: {
            way: {kind: _table(table) for kind, table in kinds.object(("full", "causal")).items()}
            for way, kinds in ways.object(tuple(FLOPS_PER_PAIR)).items()
        }
        for dtype, ways in given.object().items()
    }


def _table(given: Given) -> Table:
    wrong = given.wrong("a list of [tokens, flops/s], tokens ascending")
    rows = given.value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and len(row) == 2 for row in rows):
        raise wrong
    inner = [[given.inner(f"{index}", value) for value in row] for index, row in enumerate(rows)]
    table = tuple((_rate(tokens), _rate(rate)) for tokens, rate in inner)
    if any(after[0] <= before[0] for before, after in itertools.pairwise(table)):
        raise wrong
    return table


def _wire(given: Given) -> Wire:
    found = given.object(("latency", "rate"))
    return Wire(latency=_seconds(found["latency"]), rate=_rate(found["rate"]))


def _rate(given: Given) -> float:
    """Tokens, bytes, or bytes or flops in a second."""
    return given.number(least=1, most=MOST_RATE)


def _seconds(given: Given) -> float:
    return given.number(least=0, most=MOST_SECONDS)

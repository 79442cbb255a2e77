"""What a machine is to the planner: nodes, links, and how fast a rank computes. Presets with their sources are in
machines.json; a file of a user's own has the form of one of them. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, nearest
from .tiles import Tile

DEFAULT = "modest"  # what a machine is that nobody named
PRESETS = Path(__file__).with_name("machines.json")
NEAREST = {"full": "full", "causal": "causal", "upper": "causal", "band": "causal"}  # kinds of tile that tables have
PER_PRODUCT = {"forward": 4, "backward": 10}  # flops of a visible pair and element of head_dim: 2 and 5 matmuls
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
    node's host. memory: bytes a rank; spare: the share of them that is not for tensors.
    zero: None where it was not measured: collectives take what links do then, and hooks nothing. sources: where each
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
    memory: float
    spare: float
    sources: Mapping[str, str]
    zero: ZeroCosts | None = None

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
        try:
            content = json.loads(Path(place).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"a machine's file must be a readable JSON file; got {place}: {error}") from None
        return machine_of(Path(place).stem, content)

    @classmethod
    def supposed(cls, device: str, dtype: str) -> Machine:
        """Where nobody says which: the preset that is named after the device ("NVIDIA H100 80GB HBM3"), or `DEFAULT`.
        A dtype without rates is taken to be as fast as bfloat16."""
        model = {name.partition("-")[0].upper(): name for name in presets()}
        machine = cls.load(next((name for word, name in model.items() if word in device.upper()), DEFAULT))
        rates = {"attention": machine.attention, "gemm": machine.gemm}
        same: Any = {name: {dtype: its["bfloat16"], **its} for name, its in rates.items() if "float16" not in dtype}
        return dataclasses.replace(machine, **same)

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def wire(self, src: int, dst: int) -> Wire:
        return self.inside if self.node(src) == self.node(dst) else self.between

    @property
    def usable(self) -> int:
        """Bytes of a rank that tensors may take."""
        return int(self.memory * (1 - self.spare))

    def needs(self, dtype: str) -> str:
        """The dtype whose rates count. Raises ConfigError where there are none."""
        wanted = "bfloat16" if dtype == "float16" else dtype
        if wanted not in self.attention or wanted not in self.gemm:
            known = sorted({*self.attention} & {*self.gemm})
            raise ConfigError(f"machine {self.name} has rates for {', '.join(known)}; got a model in {dtype}")
        return wanted

    def tile_seconds(self, dtype: str, direction: str, tile: Tile, heads: int, head_dim: int, batch: int = 1) -> float:
        """Of one kernel call: what a mask hides in the tile costs nothing, but a masked or small tile is slower."""
        rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
        flops = PER_PRODUCT[direction] * tile.products * heads * head_dim * batch
        return flops / self.tile_rate(dtype, direction, NEAREST[tile.kind], math.sqrt(rows * columns))

    def tile_rate(self, dtype: str, direction: str, kind: str, tokens: float) -> float:
        """Flops/s. A causal tile beyond its table is taken for two causal halves and a full square, and those again."""
        tables = self.attention[self.needs(dtype)][direction]
        rate, last = interpolated(tables[kind], tokens), tables[kind][-1][0]
        if kind == "full" or tokens <= last:
            return rate
        full = interpolated(tables["full"], tokens)
        return 1 / (1 / full + (1 / rate - 1 / full) * last / tokens)

    def best_rate(self, dtype: str, direction: str) -> float:
        """Flops/s of attention at most."""
        tables = self.attention[self.needs(dtype)][direction]
        return max(rate for table in tables.values() for _, rate in table)

    def gemm_seconds(self, dtype: str, flops: float) -> float:
        return flops / self.gemm[self.needs(dtype)]


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


NUMBERS = ("memory_rate", "elementwise_rate", "offload_rate", "host_memory", "memory")
FIELDS = ("about", "per_node", "inside", "between", "uplink", "duplex", "stolen", "attention", "gemm", *NUMBERS, "host",
          "spare", "zero", "sources")  # fmt: skip


def machine_of(name: str, content: object) -> Machine:
    """From what a file holds. Raises ConfigError, which names what is wrong."""
    given = _object(name, "the file", content, FIELDS)
    per_node = given["per_node"]
    if not isinstance(per_node, int) or isinstance(per_node, bool) or per_node < 1:
        raise _wrong(name, "per_node", "a whole number from 1", per_node)
    spare = given["spare"]
    if isinstance(spare, bool) or not isinstance(spare, int | float) or not 0 <= spare < 1:
        raise _wrong(name, "spare", "a share from 0 to below 1", spare)
    host = _object(name, "host", given["host"], ("instruction", "ahead"))
    sources = given["sources"]
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise _wrong(name, "sources", "an object of texts", sources)
    return Machine(
        name=name,
        about=str(given["about"]),
        per_node=per_node,
        inside=_wire(name, "inside", given["inside"]),
        between=_wire(name, "between", given["between"]),
        uplink=None if given["uplink"] is None else _number(name, "uplink", given["uplink"]),
        duplex=_flag(name, "duplex", given["duplex"]),
        stolen=_number(name, "stolen", given["stolen"], least=0),
        attention=_attention(name, given["attention"]),
        gemm={
            dtype: _number(name, f"gemm.{dtype}", rate) for dtype, rate in _object(name, "gemm", given["gemm"]).items()
        },
        instruction=_number(name, "host.instruction", host["instruction"], least=0),
        ahead=_flag(name, "host.ahead", host["ahead"]),
        spare=spare,
        zero=None if given["zero"] is None else _zero(name, given["zero"]),
        sources=sources,
        **{field: _number(name, field, given[field]) for field in NUMBERS},
    )


def _zero(name: str, given: object) -> ZeroCosts:
    found = _object(name, "zero", given, tuple(field.name for field in dataclasses.fields(ZeroCosts)))
    ranks = found["ranks"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
        raise _wrong(name, "zero.ranks", "a whole number from 2", ranks)
    return ZeroCosts(
        ranks=ranks,
        gather=_wire(name, "zero.gather", found["gather"]),
        reduce=_wire(name, "zero.reduce", found["reduce"]),
        all_reduce=_wire(name, "zero.all_reduce", found["all_reduce"]),
        forward=_number(name, "zero.forward", found["forward"], least=0),
        backward=_number(name, "zero.backward", found["backward"], least=0),
    )


def _attention(name: str, given: object) -> dict[str, dict[str, dict[str, Table]]]:
    found: dict[str, dict[str, dict[str, Table]]] = {}
    for dtype, ways in _object(name, "attention", given).items():
        place = f"attention.{dtype}"
        found[dtype] = {
            way: {
                kind: _table(name, f"{place}.{way}.{kind}", table)
                for kind, table in _object(name, f"{place}.{way}", kinds, ("full", "causal")).items()
            }
            for way, kinds in _object(name, place, ways, tuple(PER_PRODUCT)).items()
        }
    return found


def _table(name: str, place: str, given: object) -> Table:
    wanted = "a list of [tokens, flops/s], tokens ascending"
    if not isinstance(given, list) or not given or not all(isinstance(row, list) and len(row) == 2 for row in given):
        raise _wrong(name, place, wanted, given)
    table = tuple((_number(name, place, tokens), _number(name, place, rate)) for tokens, rate in given)
    if any(after[0] <= before[0] for before, after in itertools.pairwise(table)):
        raise _wrong(name, place, wanted, given)
    return table


def _wire(name: str, place: str, given: object) -> Wire:
    found = _object(name, place, given, ("latency", "rate"))
    latency = _number(name, f"{place}.latency", found["latency"], least=0)
    return Wire(latency=latency, rate=_number(name, f"{place}.rate", found["rate"]))


def _object(name: str, place: str, given: object, fields: Sequence[str] = ()) -> dict[str, Any]:
    """fields: those that it must have, no more and no less."""
    if not isinstance(given, dict) or not given:
        raise _wrong(name, place, "an object", given)
    if fields and (missing := [field for field in fields if field not in given]):
        raise ConfigError(f"machine {name}: {place} needs {', '.join(fields)}; it has no {', '.join(missing)}")
    if fields and (more := [field for field in given if field not in fields]):
        known = ", ".join(fields)
        raise ConfigError(f"machine {name}: {place} takes {known}; got {more[0]!r}{nearest(more[0], fields)}")
    return given


def _number(name: str, place: str, given: object, least: float | None = None) -> float:
    """Above 0, or from `least` on."""
    right = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    if not right or given < (least or 0) or (least is None and given == 0):  # type: ignore[operator]
        raise _wrong(name, place, "a number above 0" if least is None else "a number from 0", given)
    return float(given)  # type: ignore[arg-type]


def _flag(name: str, place: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise _wrong(name, place, "true or false", given)
    return given


def _wrong(name: str, place: str, wanted: str, given: object) -> ConfigError:
    return ConfigError(f"machine {name}: {place} must be {wanted}; got {given!r:.80}")

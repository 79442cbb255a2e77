"""What the planner looks at, and what it predicts of each candidate: estimates, memory, closed forms, simulations.
Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..compiler import heads as dealing
from ..compiler.layout import LAYOUTS, Axes, Topology, contiguous
from ..compiler.masks import Mask
from ..compiler.memory import Figures
from ..compiler.shape import ITEMSIZE, Shape, shape_of
from ..compiler.timeline import Timeline
from ..config import SequenceParallelConfig
from ..errors import ConfigError
from . import prices
from .attended import attention_figures, stages_inside
from .candidates import Candidate, travels
from .closed import Closed, closed, sampled
from .footprint import Footprint, fits, footprint, taken
from .machine import PER_PRODUCT, Machine
from .request import Request, Step
from .steptime import StepTime, call_of, carried_seconds, step_time

DIRECTIONS = ("forward", "backward")
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """Of a candidate that was looked at. config: resolved. travels: forward and backward. spared: settings that spare
    memory. figures: of attention's memory. forward, backward: of one stage of heads of one layer. seconds: for each
    sequence. simulated: whether attention's time was simulated, else it is the closed form's."""

    candidate: Candidate
    config: SequenceParallelConfig
    travels: tuple[str, str]
    spared: Mapping[str, Any]
    figures: Figures
    forward: Closed
    backward: Closed
    time: StepTime
    seconds: float
    memory: Footprint
    simulated: bool = False


# ---- estimates without a plan


class Estimate(NamedTuple):
    """seconds: for each sequence, with what is received; least: a bound, of the products alone. moved: seconds of what
    is received, of one layer. work: about how many steps the closed form looks at."""

    seconds: float
    least: float
    moved: float
    work: int
    candidate: Candidate


class Estimator:
    """By what candidates are ordered. What layouts share is found once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.products = functools.lru_cache(maxsize=None)(self._products)
        self.seconds = functools.lru_cache(maxsize=None)(self._seconds)
        self.known: dict[tuple, tuple[float, list[float]]] = {}

    def __call__(self, candidate: Candidate) -> Estimate:
        size, ulysses, inner = candidate.size, candidate.ulysses, candidate.inner
        products, lopsided = self.products(size, ulysses), self.lopsided(candidate)
        exchanged, carried = self.links(candidate)
        slower = 2 if lopsided else 1
        took = [max(product * slower, links) + exchanged for product, links in zip(products, carried, strict=True)]
        steps = candidate.turns + inner // 8 + (inner**2 // 50 if lopsided else 0)  # blocks may go one by one
        return Estimate(
            seconds=self.seconds(size, *took),
            least=self.seconds(size, *products),
            moved=2 * exchanged + sum(carried),
            work=len(sampled(self.request.machine, size)) * (steps + 2),
            candidate=candidate,
        )

    def _products(self, size: int, ulysses: int) -> tuple[float, float]:
        """Seconds of a layer's products forward and backward, on the busiest member, if inner ranks share them."""
        its = self.request
        wide, _ = dealing.most(*its.heads, ulysses)
        pairs = its.pairs * wide * its.model.head_dim * its.batch / (size // ulysses)
        forward, backward = (PER_PRODUCT[way] * pairs / its.machine.best_rate(its.dtype, way) for way in DIRECTIONS)
        return forward, backward

    def _seconds(self, size: int, forward: float, backward: float) -> float:
        step = self.request.step(_plain(size))
        took = step_time(step, self.request.machine, forward, backward)
        return self.request.seconds_each(took.seconds, took.sequences)

    def links(self, candidate: Candidate) -> tuple[float, list[float]]:
        """Seconds of Ulysses' exchanges of a direction, and of what the schedule brings forward and backward."""
        key = candidate.schedule.name, *candidate.own.values(), candidate.topology
        if key not in self.known:
            its = self.request
            heads = dealing.most(*its.heads, candidate.ulysses)
            dtype = its.given.get("travel_dtype", "fp32")
            shape = shape_of(dtype, its.dtype, its.batch, (*heads, its.model.head_dim))
            self.known[key] = _exchanged(its, candidate, *heads), _carried(its, candidate, shape)
        return self.known[key]

    def lopsided(self, candidate: Candidate) -> bool:
        """Whether the last rank has about twice its share: causal attention on blocks in the order of the text, unless
        the schedule is made for that, and so takes nothing else."""
        plain = self.request.mask.scale_free and LAYOUTS[candidate.layout].runs is contiguous
        return plain and candidate.inner > 1 and candidate.schedule.takes(0, 1)


@functools.lru_cache(maxsize=64)
def _plain(size: int) -> SequenceParallelConfig:
    return SequenceParallelConfig(size=size, ulysses=1).resolve(size)


def _crossing(machine: Machine, topology: Topology, axis: str) -> float:
    """Of a rank's neighbours along an axis the share that is in other nodes, if ranks go round it; 0 where all its
    ranks are in one node."""
    stride = 1
    for name, size in topology.axes:
        if name == axis:
            near = size == 1 or (stride * size <= machine.per_node and machine.per_node % (stride * size) == 0)
            return 0.0 if near else min(1.0, stride / machine.per_node)
        stride *= size
    return 0.0


def _carried(request: Request, candidate: Candidate, shape: Shape) -> list[float]:
    """Seconds, forward and backward, of what the busiest rank receives. Bytes count as ones between nodes where an axis
    that brings them leaves the node."""
    machine, schedule, top = request.machine, candidate.schedule, candidate.topology
    axes = tuple((name, top.size(name)) for name in top.inner_axes)
    crossing = {name: _crossing(machine, top, name) for name, _ in axes}
    near = tuple((name, 1 if crossing[name] else size) for name, size in axes)
    rate, block = _between(machine, max(crossing.values())), request.seq / (candidate.inner * schedule.parts)

    def seconds(way: str, side: str) -> float:
        units = tuple((kind, n * block) for kind, n in shape.bytes_per_token(way).items())
        total, inside = (_most_received(schedule.received, sizes, way, side, units) for sizes in (axes, near))
        return max(inside / machine.inside.rate, (total - inside) / rate)

    return [min(seconds(way, side) for side in sides) for way, sides in travels(candidate, request.given).items()]


@functools.lru_cache(maxsize=2**14)
def _most_received(
    received: Callable[..., list[float]], axes: Axes, way: str, side: str, units: tuple[tuple[str, float], ...]
) -> float:
    """By the busiest rank; candidates that differ in layout and placement alone have the same."""
    return max(received(axes, way, side, dict(units)))


def _between(machine: Machine, crossing: float) -> float:
    """Bytes/s of a rank to other nodes where so large a share of a node's ranks sends there."""
    if not (machine.uplink and crossing):
        return machine.between.rate
    return min(machine.between.rate, machine.uplink / (machine.per_node * crossing))


def _exchanged(request: Request, candidate: Candidate, wide: int, narrow: int) -> float:
    machine, members = request.machine, candidate.ulysses
    near = not _crossing(machine, candidate.topology, "ulysses")
    rate = machine.inside.rate if near else _between(machine, 1.0)  # straight to all of them
    tokens = request.seq / candidate.size * request.batch
    elements = tokens * (members - 1) * (2 * wide + 2 * narrow) * request.model.head_dim
    return elements * ITEMSIZE[request.dtype] / rate


# ---- closed form, memory, simulation


def predict(request: Request, candidate: Candidate) -> Prediction | str:
    """By its closed form, with as few settings that spare memory as it needs; or why it cannot be. Of those that are
    last resorts the faster one is taken."""
    least, best = math.inf, None
    ways: dict[tuple, list[Closed]] = {}  # by stages of heads, and what is kept
    try:
        plain = configured(request, candidate)
        for spared in memory_settings(request, candidate.ulysses):
            if best is not None and not (LAST & set(best.spared) and len(spared) == len(best.spared)):
                break
            config = dataclasses.replace(plain, **spared)
            step = request.step(config, Mask())
            without = taken(footprint(step, least_attention(step)), request.room)
            if without > request.limit:  # what attention takes exactly is a hundred times the work to find
                least = min(least, without)
                continue
            figures = attention_figures(step)
            memory = footprint(step, figures)
            least = min(least, taken(memory, request.room))
            if fits(memory, request.room):
                one = _prediction(request, candidate, config, spared, figures, memory, ways)
                best = one if best is None or one.seconds < best.seconds else best
    except ConfigError as error:
        return str(error)
    if best is not None:
        return best
    if least <= request.limit:
        return "what would have to leave the device does not fit the host"
    return f"needs at least {least / GIB:.1f} GiB on each rank, which has {request.limit / GIB:.1f}"


def configured(request: Request, candidate: Candidate, **spared: Any) -> SequenceParallelConfig:
    """Resolved. What goes round is given, or what brings the busiest rank fewer bytes."""
    sides = {way: request.given.get(way, "auto") for way in DIRECTIONS}
    return candidate.config(request.heads, **{**common(request.given), **spared, **sides})


def _prediction(
    request: Request, candidate: Candidate, config: SequenceParallelConfig, spared: Mapping[str, Any],
    figures: Figures, memory: Footprint, known: dict[tuple, list[Closed]],
) -> Prediction:  # fmt: skip
    stages = config.head_stages
    call = call_of(request.step(config), stages)
    if (stages, call.kept) not in known:
        known[stages, call.kept] = [closed(request.machine, call, way) for way in DIRECTIONS]
    ways = known[stages, call.kept]
    seconds = [stages * (way.overlapped if config.overlap else way.seconds) for way in ways]
    carried = [stages * carried_seconds(request.machine, request.world, way) for way in ways]
    took = step_time(request.step(config), request.machine, seconds[0], seconds[1], figures, (carried[0], carried[1]))
    return Prediction(
        candidate=candidate,
        config=config,
        travels=(call.travels("forward"), call.travels("backward")),
        spared=dict(spared),
        figures=figures,
        forward=ways[0],
        backward=ways[1],
        time=took,
        seconds=request.seconds_each(took.seconds, took.sequences),
        memory=memory,
    )


def staged(request: Request, one: Prediction) -> list[Prediction]:
    """The same in stages of heads that hide Ulysses' exchanges, in as many as send no more bytes, where that fits."""
    found = []
    candidate = dataclasses.replace(one.candidate, overlap=True)
    for stages in dealing.free_stages(*request.heads, candidate.ulysses)[1:]:
        given = {**request.given, **one.spared, "head_stages": stages}
        other = predict(dataclasses.replace(request, given=given), candidate)
        if isinstance(other, Prediction):
            found.append(dataclasses.replace(other, spared={**one.spared, **other.spared, "head_stages": stages}))
    return found


def instructions(request: Request, one: Prediction) -> int:
    """About how many are simulated: each rank that is followed has some for every other inner one at most."""
    inner = one.candidate.inner
    call = call_of(request.step(one.config), one.config.head_stages)
    return (
        12 * prices.followed_ranks(request.machine, call) * (inner + 1) * (call.stages if call.hides_exchanges else 1)
    )


def overlapped(request: Request, one: Prediction) -> float:
    """Seconds for each sequence that it takes at least with overlap."""
    stages = one.config.head_stages
    seconds = [stages * way.overlapped for way in (one.forward, one.backward)]
    took = _timed(request, one, seconds)
    return request.seconds_each(took.seconds, took.sequences)


def _timed(request: Request, one: Prediction, seconds: Sequence[float]) -> StepTime:
    """seconds: of attention of a layer, forward and backward."""
    stages, machine = one.config.head_stages, request.machine
    ways = one.forward, one.backward
    carried = [stages * carried_seconds(machine, request.world, way) for way in ways]
    step, figures = request.step(one.config), one.figures
    return step_time(step, machine, seconds[0], seconds[1], figures, (carried[0], carried[1]))


def simulated(request: Request, one: Prediction) -> Prediction:
    """With the time of attention that the simulator finds."""
    call = call_of(request.step(one.config), one.config.head_stages)
    seconds = [prices.call_seconds(request.machine, call, way) for way in DIRECTIONS]
    took = _timed(request, one, seconds)
    return dataclasses.replace(
        one, time=took, seconds=request.seconds_each(took.seconds, took.sequences), simulated=True
    )


def timelines(request: Request, one: Prediction) -> dict[str, Timeline]:
    """Direction -> what all ranks do in attention of one layer, for one stage of heads unless stages hide exchanges."""
    call = call_of(request.step(one.config), one.config.head_stages)
    return {way: prices.simulated(request.machine, call, way) for way in DIRECTIONS}


def floor(request: Request, one: Prediction) -> float:
    """The least bytes that a rank can receive in forward, whatever the schedule, of full attention and for this degree
    of Ulysses: 4 S D sqrt(Hq Hkv / (U P)), less what it owns of them. Under a causal mask it is lower by sqrt(2)."""
    (q_heads, kv_heads), size = request.heads, one.config.size
    token = request.model.head_dim * ITEMSIZE[request.dtype] * request.batch * request.seq
    whole = 4 * token * math.sqrt(q_heads * kv_heads / (one.config.ulysses * size))
    return max(0.0, whole - token * 2 * (q_heads + kv_heads) / (size * one.config.ulysses))


# ---- settings that spare memory

# in the order in which they are tried; each with those before it
SPARING: tuple[dict[str, Any], ...] = ({"loss_tiles": "auto"}, {"mlp_tiles": "auto"})
LAST_SPARING: tuple[dict[str, Any], ...] = (
    {"keep_exchanged": False},
    {"offload_checkpoints": True},
    {"keep_attention": False},
    {"offload_checkpoints": True, "keep_attention": False},
)
LAST = {name for settings in LAST_SPARING for name in settings}
NOTHING = Figures(forward=0, kept=0, backward=0, inputs=True)  # of attention but its inputs: none takes less
COMMON = (
    "travel_dtype",
    "kernel",
    "head_stages",
    "keep_attention",
    "keep_exchanged",
    "offload_checkpoints",
    "mlp_tiles",
    "loss_tiles",
)  # that candidates do not have


def common(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of settings that candidates do not have; stages that are "auto" are a choice still."""
    return {name: given[name] for name in COMMON if name in given and (name, given[name]) != ("head_stages", "auto")}


def memory_settings(request: Request, ulysses: int) -> list[dict[str, Any]]:
    """Settings that spare more and more memory; what is given is left as it is."""
    given, (q_heads, kv_heads) = request.given, request.heads
    stages = [{"head_stages": n} for n in dealing.free_stages(q_heads, kv_heads, ulysses) if n > 1]
    rungs: list[dict[str, Any]] = [{}]
    for settings in (*SPARING, *stages):
        if more := {name: value for name, value in settings.items() if name not in common(given)}:
            rungs.append({**rungs[-1], **more})
    for settings in LAST_SPARING if request.checkpointing else ():
        away = request.machine.apart or "offload_checkpoints" not in settings
        fits = away and (ulysses > 1 or "keep_exchanged" not in settings)
        if fits and not set(settings) & set(common(given)):
            rungs.append({**rungs[_lean(rungs)], **settings})
    return rungs


def leanest(request: Request, ulysses: int) -> dict[str, Any]:
    """All that spares memory and is not given."""
    return memory_settings(request, ulysses)[-1]


def in_words(spared: Mapping[str, Any]) -> list[str]:
    said = {"keep_attention False": "attention runs twice", "keep_exchanged False": "heads are exchanged again"}
    words = [name if value is True else f"{name} {value}" for name, value in spared.items()]
    return [said.get(word, word) for word in words]


def _lean(rungs: list[dict[str, Any]]) -> int:
    """The last without any of `LAST_SPARING`."""
    return max(n for n, rung in enumerate(rungs) if not set(rung) & LAST)


def least_memory(request: Request, size: int) -> Footprint:
    """Without attention, with everything that spares: no candidate of this size takes less."""
    spared = {**common(request.given), **leanest(request, 1)}
    config = SequenceParallelConfig(size=size, ulysses=1, **spared).resolve(size)
    return footprint(request.step(config, Mask()), NOTHING)


def least_attention(step: Step) -> Figures:
    """What attention takes at least, whatever the schedule: out, and in backward dq, dk and dv beside it. With
    projections inside of stages none of them is there whole."""
    if stages_inside(step) > 1:
        return NOTHING
    m, rows = step.model, step.seq // step.config.size * step.batch
    out, grads = (rows * heads * m.head_dim * ITEMSIZE[step.dtype] for heads in (m.heads, m.heads + 2 * m.kv_heads))
    return Figures(forward=out, kept=out, backward=out + grads, inputs=True)

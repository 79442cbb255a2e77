"""What the planner predicts of a candidate, from cheap to exact: an estimate, memory and a closed form, a simulation.
Also the settings that save memory, in the order in which they are tried. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..compiler.heads import free_stage_counts, largest_share
from ..compiler.layout import LAYOUTS, Axes, Topology, contiguous
from ..compiler.masks import Mask
from ..compiler.memory import Figures
from ..compiler.shape import ITEMSIZE, Shape, shape_of
from ..compiler.timeline import Timeline
from ..config import MEMORY_SETTINGS, SequenceParallelConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """What is predicted of a candidate that fits.

    config: resolved. travels: "q" or "kv", forward and backward. spared: the settings that it needs to save memory.
    figures: bytes of attention. forward, backward: closed forms of one head stage of one layer. time: of a training
    step. seconds: of a step, for each sequence. memory: of a rank and its host. simulated: whether attention's time is
    the simulator's; else it is the closed form's."""

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

    @property
    def ways(self) -> tuple[Closed, Closed]:
        return self.forward, self.backward


# ---- estimates without a plan


class Estimate(NamedTuple):
    """A quick guess of a candidate's time. seconds: of a step, for each sequence. least: a lower bound of that, without
    messages. moved: seconds of one layer's messages. work: about how many steps its closed form would look at."""

    seconds: float
    least: float
    moved: float
    work: int
    candidate: Candidate


class Estimator:
    """Estimates candidates, to order them. Keeps what candidates have in common."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.products, self.seconds = functools.cache(self._products), functools.cache(self._seconds)
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
        """(forward, backward) seconds of a layer's products on the Ulysses member with the most heads, if inner ranks
        have equal shares."""
        request = self.request
        q_heads, _ = largest_share(*request.heads, ulysses)
        pairs = request.pairs * q_heads * request.model.head_dim * request.batch / (size // ulysses)
        rates = [request.machine.best_rate(request.dtype, way) for way in DIRECTIONS]
        forward, backward = (PER_PRODUCT[way] * pairs / rate for way, rate in zip(DIRECTIONS, rates, strict=True))
        return forward, backward

    def _seconds(self, size: int, forward: float, backward: float) -> float:
        """Seconds of a step, for each sequence, given those of attention of one layer."""
        step = self.request.step(_plain(size))
        took = step_time(step, self.request.machine, forward, backward)
        return self.request.seconds_each(took.seconds, took.sequences)

    def links(self, candidate: Candidate) -> tuple[float, list[float]]:
        """(seconds of Ulysses' exchanges in one direction, [those of the schedule's messages forward, backward])."""
        key = candidate.schedule.name, *candidate.own.values(), candidate.topology
        if key not in self.known:
            request = self.request
            heads = largest_share(*request.heads, candidate.ulysses)
            dtype = request.given.get("travel_dtype", "fp32")
            shape = shape_of(dtype, request.dtype, request.batch, (*heads, request.model.head_dim))
            exchanged = _exchange_seconds(request, candidate, *heads)
            self.known[key] = exchanged, _schedule_seconds(request, candidate, shape)
        return self.known[key]

    def lopsided(self, candidate: Candidate) -> bool:
        """Whether the last rank computes about twice its share: causal attention on contiguous blocks. Not so with a
        schedule made for that, which never takes keys of a later block."""
        plain = self.request.mask.scale_free and LAYOUTS[candidate.layout].runs is contiguous
        return plain and candidate.inner > 1 and candidate.schedule.can_compute(0, 1)


@functools.lru_cache(maxsize=64)
def _plain(size: int) -> SequenceParallelConfig:
    return SequenceParallelConfig(size=size, ulysses=1).resolve(size)


def _crossing(machine: Machine, topology: Topology, axis: str) -> float:
    """The share of ranks whose neighbour round this axis is in another node; 0 where a node holds the whole axis."""
    stride = 1
    for name, size in topology.axes:
        if name == axis:
            near = size == 1 or (stride * size <= machine.per_node and machine.per_node % (stride * size) == 0)
            return 0.0 if near else min(1.0, stride / machine.per_node)
        stride *= size
    return 0.0


def _schedule_seconds(request: Request, candidate: Candidate, shape: Shape) -> list[float]:
    """[Seconds of all that the busiest rank receives by the schedule, forward, backward]. Bytes along an axis that
    leaves the node count as bytes between nodes."""
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
    """Bytes that the busiest rank receives: the same for candidates that differ only in layout and placement."""
    return max(received(axes, way, side, dict(units)))


def _between(machine: Machine, crossing: float) -> float:
    """Bytes/s of a rank to other nodes. crossing: the share of a node's ranks that send there, and share its uplink."""
    if not (machine.uplink and crossing):
        return machine.between.rate
    return min(machine.between.rate, machine.uplink / (machine.per_node * crossing))


def _exchange_seconds(request: Request, candidate: Candidate, q_heads: int, kv_heads: int) -> float:
    """Seconds of Ulysses' exchanges in one direction, of the member with these numbers of heads."""
    machine, members = request.machine, candidate.ulysses
    near = not _crossing(machine, candidate.topology, "ulysses")
    rate = machine.inside.rate if near else _between(machine, 1.0)  # members send straight to one another
    tokens = request.seq / candidate.size * request.batch
    elements = tokens * (members - 1) * (2 * q_heads + 2 * kv_heads) * request.model.head_dim
    return elements * ITEMSIZE[request.dtype] / rate


# ---- closed form, memory, simulation


def predict(request: Request, candidate: Candidate) -> Prediction | str:
    """The prediction of a candidate by its closed form, with as few settings that save memory as it needs.

    Returns one sentence where it does not fit or is not legal. Of the last resorts (`LAST_RESORTS`) the fastest that
    fits is taken."""
    least, best = math.inf, None
    closed_forms: dict[tuple, list[Closed]] = {}  # by (head stages, what forward leaves for backward)
    try:
        plain = configured(request, candidate)
        for spared in memory_settings(request, candidate.ulysses):
            if best is not None and not (LAST_NAMES & set(best.spared) and len(spared) == len(best.spared)):
                break
            config = dataclasses.replace(plain, **spared)
            step = request.step(config, Mask())
            without = taken(footprint(step, least_attention(step)), request.room)
            if without > request.limit:  # the exact memory of attention takes a hundred times the work
                least = min(least, without)
                continue
            figures = attention_figures(step)
            memory = footprint(step, figures)
            least = min(least, taken(memory, request.room))
            if fits(memory, request.room):
                one = _prediction(request, candidate, config, spared, figures, memory, closed_forms)
                best = one if best is None or one.seconds < best.seconds else best
    except ConfigError as error:
        return str(error)
    if best is not None:
        return best
    if least <= request.limit:
        return "what would have to leave the device does not fit the host"
    return request.shortage(least)


def configured(request: Request, candidate: Candidate, **spared: Any) -> SequenceParallelConfig:
    """The resolved config. What travels, q or kv, is given, or else what brings the busiest rank fewer bytes."""
    sides = {way: request.given.get(way, "auto") for way in DIRECTIONS}
    return candidate.config(request.heads, **{**common(request.given), **spared, **sides})


def _prediction(
    request: Request, candidate: Candidate, config: SequenceParallelConfig, spared: Mapping[str, Any],
    figures: Figures, memory: Footprint, known: dict[tuple, list[Closed]],
) -> Prediction:  # fmt: skip
    """known: closed forms that were computed before."""
    stages, call = config.head_stages, call_of(request.step(config))
    if (stages, call.kept) not in known:
        known[stages, call.kept] = [closed(request.machine, call, way) for way in DIRECTIONS]
    ways = known[stages, call.kept]
    attention = [stages * (way.overlapped if config.overlap else way.seconds) for way in ways]
    time, seconds = _timed(request, config, figures, ways, attention)
    return Prediction(
        candidate=candidate,
        config=config,
        travels=(call.travels("forward"), call.travels("backward")),
        spared=dict(spared),
        figures=figures,
        forward=ways[0],
        backward=ways[1],
        time=time,
        seconds=seconds,
        memory=memory,
    )


def _timed(
    request: Request, config: SequenceParallelConfig, figures: Figures, ways: Sequence[Closed],
    attention: Sequence[float],
) -> tuple[StepTime, float]:  # fmt: skip
    """(The time of a step, its seconds for each sequence). ways: closed forms, forward and backward. attention: seconds
    of one layer, forward and backward."""
    carried = [config.head_stages * carried_seconds(request.machine, request.world, way) for way in ways]
    forward, backward = attention
    took = step_time(request.step(config), request.machine, forward, backward, figures, (carried[0], carried[1]))
    return took, request.seconds_each(took.seconds, took.sequences)


def staged(request: Request, one: Prediction) -> list[Prediction]:
    """The same candidate with overlap, in head stages that hide Ulysses' exchanges: one for each number of stages that
    sends no more bytes and fits."""
    found = []
    candidate = dataclasses.replace(one.candidate, overlap=True)
    for stages in free_stage_counts(*request.heads, candidate.ulysses)[1:]:
        given = {**request.given, **one.spared, "head_stages": stages}
        other = predict(dataclasses.replace(request, given=given), candidate)
        if isinstance(other, Prediction):
            found.append(dataclasses.replace(other, spared={**one.spared, **other.spared, "head_stages": stages}))
    return found


def instructions(request: Request, one: Prediction) -> int:
    """About how many instructions a simulation would take: at most 12 for each pair of a followed and an inner rank."""
    call = call_of(request.step(one.config))
    each = call.stages if call.hides_exchanges else 1
    return 12 * prices.followed_ranks(request.machine, call) * (one.candidate.inner + 1) * each


def overlapped(request: Request, one: Prediction) -> float:
    """A lower bound of the seconds of a step with overlap, for each sequence."""
    attention = [one.config.head_stages * way.overlapped for way in one.ways]
    return _timed(request, one.config, one.figures, one.ways, attention)[1]


def simulated(request: Request, one: Prediction) -> Prediction:
    """The same prediction, with the time of attention that the simulator finds."""
    call = call_of(request.step(one.config))
    attention = [prices.call_seconds(request.machine, call, way) for way in DIRECTIONS]
    time, seconds = _timed(request, one.config, one.figures, one.ways, attention)
    return dataclasses.replace(one, time=time, seconds=seconds, simulated=True)


def timelines(request: Request, one: Prediction) -> dict[str, Timeline]:
    """Direction -> what all ranks do in attention of one layer, for one stage of heads unless stages hide exchanges."""
    call = call_of(request.step(one.config))
    return {way: prices.simulated(request.machine, call, way) for way in DIRECTIONS}


def floor(request: Request, one: Prediction) -> float:
    """The least bytes that a rank can receive in one layer's forward, for full attention and this Ulysses degree.

    No schedule receives less than 4 S D sqrt(Hq Hkv / (U P)), less what the rank owns. Here S is tokens, D head_dim, U
    the Ulysses degree and P the ranks of a sequence. Under a causal mask the bound is lower by sqrt(2)."""
    (q_heads, kv_heads), size = request.heads, one.config.size
    token = request.model.head_dim * ITEMSIZE[request.dtype] * request.batch * request.seq
    whole = 4 * token * math.sqrt(q_heads * kv_heads / (one.config.ulysses * size))
    return max(0.0, whole - token * 2 * (q_heads + kv_heads) / (size * one.config.ulysses))


# ---- settings that spare memory

# tried in this order, each together with those before it; head stages come next
TILES: tuple[dict[str, Any], ...] = ({"loss_tiles": "auto"}, {"mlp_tiles": "auto"})
LAST_RESORTS: tuple[dict[str, Any], ...] = (
    {"keep_exchanged": False},
    {"offload_checkpoints": True},
    {"keep_attention": False},
    {"offload_checkpoints": True, "keep_attention": False},
)
LAST_NAMES = {name for settings in LAST_RESORTS for name in settings}
NOTHING = Figures(forward=0, saved=0, backward=0, inputs=True)  # attention with no memory but its inputs: a bound
COMMON = ("travel_dtype", "kernel", *MEMORY_SETTINGS)  # settings that are the same for all candidates


def common(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of COMMON that the user gives; `head_stages` "auto" is not given, but chosen."""
    return {name: given[name] for name in COMMON if name in given and (name, given[name]) != ("head_stages", "auto")}


def memory_settings(request: Request, ulysses: int) -> list[dict[str, Any]]:
    """Settings to try one after another, which save more and more memory. Given settings are left as they are."""
    given = common(request.given)
    stages = [{"head_stages": n} for n in free_stage_counts(*request.heads, ulysses) if n > 1]
    rungs: list[dict[str, Any]] = [{}]
    for settings in (*TILES, *stages):
        if more := {name: value for name, value in settings.items() if name not in given}:
            rungs.append({**rungs[-1], **more})
    plain = rungs[-1]
    for settings in LAST_RESORTS if request.checkpointing else ():
        away = request.machine.apart or "offload_checkpoints" not in settings
        fits = away and (ulysses > 1 or "keep_exchanged" not in settings)
        if fits and not set(settings) & set(given):
            rungs.append({**plain, **settings})
    return rungs


def leanest(request: Request, ulysses: int) -> dict[str, Any]:
    """All settings that save memory and are not given: the last of `memory_settings`."""
    return memory_settings(request, ulysses)[-1]


def in_words(spared: Mapping[str, Any]) -> list[str]:
    """Each setting that saves memory, for messages."""
    said = {"keep_attention False": "attention runs twice", "keep_exchanged False": "heads are exchanged again"}
    words = [name if value is True else f"{name} {value}" for name, value in spared.items()]
    return [said.get(word, word) for word in words]


def least_memory(request: Request, size: int) -> Footprint:
    """A lower bound for all candidates of a size: no attention, and every setting that saves memory."""
    spared = {**common(request.given), **leanest(request, 1)}
    config = SequenceParallelConfig(size=size, ulysses=1, **spared).resolve(size)
    return footprint(request.step(config, Mask()), NOTHING)


def least_attention(step: Step) -> Figures:
    """The least bytes of attention in any schedule: out, and in backward also dq, dk and dv. With projections inside
    head stages it is nothing, since none of these exists whole."""
    if stages_inside(step) > 1:
        return NOTHING
    m, rows = step.model, step.seq // step.config.size * step.batch
    out, grads = (rows * heads * m.head_dim * ITEMSIZE[step.dtype] for heads in (m.heads, m.heads + 2 * m.kv_heads))
    return Figures(forward=out, saved=out, backward=out + grads, inputs=True)

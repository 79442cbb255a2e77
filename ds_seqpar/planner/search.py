"""What the planner looks at, and what it finds of each candidate: numbers. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..compiler import heads as dealing
from ..compiler.layout import NAMED, contiguous
from ..compiler.masks import Mask
from ..compiler.memory import Figures
from ..compiler.shape import ITEMSIZE, shape_of
from ..compiler.simulate import simulate
from ..compiler.timeline import Timeline
from ..compiler.topology import Axes
from ..config import SequenceParallelConfig
from ..errors import ConfigError
from .candidates import Frame, travels
from .closed import Closed, closed, sampled
from .everyone import call_seconds, followed_ranks, programs
from .footprint import attention_figures, footprint
from .machine import PER_PRODUCT, Machine
from .needs import Footprint
from .question import Question
from .sparing import common, ladder
from .steptime import StepTime, call_of, carried_seconds, step_time

DIRECTIONS = ("forward", "backward")
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """travels: forward and backward. sparing: settings of memory. figures: of attention's memory. forward, backward: of
    one stage of heads of one layer. seconds: for each sequence. simulated: whether attention's time was simulated, else
    it is the closed form's."""

    frame: Frame
    config: SequenceParallelConfig
    travels: tuple[str, str]
    sparing: Mapping[str, Any]
    figures: Figures
    forward: Closed
    backward: Closed
    time: StepTime
    seconds: float
    memory: Footprint
    simulated: bool = False


# ---- bounds without a plan


class Guess(NamedTuple):
    """seconds: an estimate for each sequence, with what is received; least: a bound, of the products alone. moved:
    seconds of what is received, of one layer. work: about how many steps the closed form looks at."""

    seconds: float
    least: float
    moved: float
    work: int
    frame: Frame


class Guesser:
    """By what frames are ordered. Bytes count as ones between nodes where an axis that brings them leaves the node."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.products: dict[tuple[int, int], tuple[float, ...]] = {}
        self.leasts: dict[tuple[int, int], float] = {}

    def product(self, frame: Frame) -> tuple[float, ...]:
        """Seconds of a layer's products forward and backward, on the busiest member, if inner ranks share them."""
        key, its = (frame.size, frame.ulysses), self.question
        if key not in self.products:
            wide, _ = dealing.most(*its.heads, frame.ulysses)
            pairs = its.pairs * wide * its.model.head_dim * its.batch / frame.inner
            self.products[key] = tuple(
                PER_PRODUCT[way] * pairs / its.machine.best_rate(its.dtype, way) for way in DIRECTIONS
            )
            self.leasts[key] = self.seconds(frame, *self.products[key])
        return self.products[key]

    def seconds(self, frame: Frame, forward: float, backward: float) -> float:
        step = self.question.step(_plain(frame.size))
        return self.question.objective(step_time(step, self.question.machine, forward, backward))

    def __call__(self, frame: Frame) -> Guess:
        its, products = self.question, self.product(frame)
        wide, narrow = dealing.most(*its.heads, frame.ulysses)
        lopsided = self.lopsided(frame)
        exchanged = _exchanged(its, frame, wide, narrow)
        heads = wide, narrow, its.model.head_dim
        shape = shape_of(its.given.get("travel_dtype", "fp32"), its.dtype, its.batch, heads)
        took, moved = [], 2 * exchanged
        for way, product in zip(DIRECTIONS, products, strict=True):
            block = its.seq / (frame.inner * frame.schedule.parts)
            units = {kind: n * block for kind, n in shape.bytes_per_token(way).items()}
            carried = min(_seconds(its.machine, frame, way, side, units) for side in travels(frame, its.given)[way])
            took.append(max(product * (2 if lopsided else 1), carried) + exchanged)
            moved += carried
        steps = frame.turns + frame.inner // 8 + (frame.inner**2 // 50 if lopsided else 0)  # blocks may go one by one
        work = len(sampled(its.machine, frame.size)) * (steps + 2)
        return Guess(self.seconds(frame, *took), self.leasts[frame.size, frame.ulysses], moved, work, frame)

    def lopsided(self, frame: Frame) -> bool:
        """Whether the last rank has about twice its share: causal attention on blocks in the order of the text, unless
        the schedule is made for that, and so takes nothing else."""
        plain = self.question.mask.scale_free and NAMED[frame.layout] is contiguous
        return plain and frame.inner > 1 and frame.schedule.takes(0, 1)


@functools.lru_cache(maxsize=64)
def _plain(size: int) -> SequenceParallelConfig:
    return SequenceParallelConfig(size=size, ulysses=1).resolve(size)


def _crossing(machine: Machine, frame: Frame, axis: str) -> float:
    """Of a rank's neighbours along an axis the share that is in other nodes, if ranks go round it; 0 where all its
    ranks are in one node."""
    stride = 1
    for name, size in frame.topology.axes:
        if name == axis:
            near = size == 1 or (stride * size <= machine.per_node and machine.per_node % (stride * size) == 0)
            return 0.0 if near else min(1.0, stride / machine.per_node)
        stride *= size
    return 0.0


def _seconds(machine: Machine, frame: Frame, way: str, side: str, units: Mapping[str, float]) -> float:
    axes = [(name, frame.topology.size(name)) for name in frame.topology.inner_axes]
    crossing = {name: _crossing(machine, frame, name) for name, _ in axes}
    near = [(name, 1 if crossing[name] else size) for name, size in axes]
    kinds = tuple(units.items())
    total = _most_received(frame.schedule.received, tuple(axes), way, side, kinds)
    inside = _most_received(frame.schedule.received, tuple(near), way, side, kinds)
    return max(inside / machine.inside.rate, (total - inside) / _between(machine, max(crossing.values())))


@functools.lru_cache(maxsize=2**14)
def _most_received(
    received: Callable[..., list[float]], axes: Axes, way: str, side: str, units: tuple[tuple[str, float], ...]
) -> float:
    """By the busiest rank; frames that differ in layout and placement alone have the same."""
    return max(received(axes, way, side, dict(units)))


def _between(machine: Machine, crossing: float) -> float:
    """Bytes/s of a rank to other nodes where so large a share of a node's ranks sends there."""
    if not (machine.uplink and crossing):
        return machine.between.rate
    return min(machine.between.rate, machine.uplink / (machine.per_node * crossing))


def _exchanged(question: Question, frame: Frame, wide: int, narrow: int) -> float:
    machine, members = question.machine, frame.ulysses
    near = not _crossing(machine, frame, "ulysses")
    rate = machine.inside.rate if near else _between(machine, 1.0)  # straight to all of them
    tokens = question.seq / frame.size * question.batch
    elements = tokens * (members - 1) * (2 * wide + 2 * narrow) * question.model.head_dim
    return elements * ITEMSIZE[question.dtype] / rate


# ---- closed form, memory, simulation


def looked_at(question: Question, frame: Frame, overlap: bool = False) -> Candidate | str:
    """A candidate by its closed form, with as few settings that spare memory as it needs; or why it is none."""
    known: dict[tuple, Figures] = {}  # attention's memory, by the settings that it depends on
    least = math.inf
    try:
        for sparing in ladder(question, frame.ulysses):
            config = configured(question, frame, sparing, overlap)
            key = config.head_stages, config.keep_attention
            if key not in known:
                known[key] = attention_figures(question.step(config, Mask()))
            memory = footprint(question.step(config, Mask()), known[key])
            least = min(least, memory.peak.total)
            if memory.peak.total <= question.limit and question.hosted(memory.host):
                return _candidate(question, frame, config, sparing, known[key], memory)
    except ConfigError as error:
        return str(error)
    return f"{least / GIB:.1f} GiB a rank are needed at least, there are {question.limit / GIB:.1f}"


def configured(
    question: Question, frame: Frame, sparing: Mapping[str, Any], overlap: bool = False
) -> SequenceParallelConfig:
    """Resolved. What goes round is given, or what brings the busiest rank fewer bytes."""
    sides = {way: question.given.get(way, "auto") for way in DIRECTIONS}
    return frame.config(question.heads, **{**common(question.given), **sparing, **sides, "overlap": overlap})


def _candidate(
    question: Question, frame: Frame, config: SequenceParallelConfig, sparing: Mapping[str, Any], figures: Figures,
    memory: Footprint,
) -> Candidate:  # fmt: skip
    stages = config.head_stages
    call = call_of(question.step(config), stages)
    ways = [closed(question.machine, call, way) for way in DIRECTIONS]
    seconds = [stages * (way.overlapped if config.overlap else way.seconds) for way in ways]
    carried = [stages * carried_seconds(question.machine, question.world, way) for way in ways]
    took = step_time(question.step(config), question.machine, seconds[0], seconds[1], figures, (carried[0], carried[1]))
    return Candidate(
        frame=frame,
        config=config,
        travels=(call.travels("forward"), call.travels("backward")),
        sparing=dict(sparing),
        figures=figures,
        forward=ways[0],
        backward=ways[1],
        time=took,
        seconds=question.objective(took),
        memory=memory,
    )


def instructions(question: Question, candidate: Candidate) -> int:
    """About how many are simulated: each rank that is followed has some for every other inner one at most."""
    call = call_of(question.step(candidate.config), candidate.config.head_stages)
    return 12 * followed_ranks(question.machine, call) * (candidate.frame.inner + 1)


def overlapped(question: Question, candidate: Candidate) -> float:
    """Seconds for each sequence that it takes at least with overlap."""
    stages = candidate.config.head_stages
    seconds = [stages * way.overlapped for way in (candidate.forward, candidate.backward)]
    return question.objective(_timed(question, candidate, seconds))


def _timed(question: Question, candidate: Candidate, seconds: Sequence[float]) -> StepTime:
    """seconds: of attention of a layer, forward and backward."""
    stages, machine = candidate.config.head_stages, question.machine
    ways = candidate.forward, candidate.backward
    carried = [stages * carried_seconds(machine, question.world, way) for way in ways]
    step, figures = question.step(candidate.config), candidate.figures
    return step_time(step, machine, seconds[0], seconds[1], figures, (carried[0], carried[1]))


def simulated(question: Question, candidate: Candidate) -> Candidate:
    """With the time of attention that the simulator finds."""
    stages = candidate.config.head_stages
    call = call_of(question.step(candidate.config), stages)
    seconds = [stages * call_seconds(question.machine, call, way) for way in DIRECTIONS]
    took = _timed(question, candidate, seconds)
    return dataclasses.replace(candidate, time=took, seconds=question.objective(took), simulated=True)


def timelines(question: Question, candidate: Candidate) -> dict[str, Timeline]:
    """Direction -> what all ranks do in attention of one layer, for one stage of heads."""
    call = call_of(question.step(candidate.config), candidate.config.head_stages)
    return {way: simulate(*programs(question.machine, call, way)) for way in DIRECTIONS}


def floor(question: Question, candidate: Candidate) -> float:
    """The least bytes that a rank can receive in forward, whatever the schedule, of full attention and for this degree
    of Ulysses: 4 S D sqrt(Hq Hkv / (U P)), less what it owns of them. Under a causal mask it is lower by sqrt(2)."""
    (q_heads, kv_heads), frame = question.heads, candidate.frame
    token = question.model.head_dim * ITEMSIZE[question.dtype] * question.batch * question.seq
    whole = 4 * token * math.sqrt(q_heads * kv_heads / (frame.ulysses * frame.size))
    return max(0.0, whole - token * 2 * (q_heads + kv_heads) / (frame.size * frame.ulysses))

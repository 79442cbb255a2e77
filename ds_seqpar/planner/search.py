"""The planner's predictions for a candidate, from cheap to exact: an estimate; its memory and a lower bound of its
time; a simulation. Also the settings that save memory, in the order in which they are tried. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..compiler.memory import Figures
from ..compiler.overlap.timeline import Timeline
from ..compiler.program.shape import ITEMSIZE, Shape, shape_of
from ..compiler.sharding.heads import free_head_chunk_counts, largest_share
from ..compiler.sharding.layout import LAYOUTS, Axes, Topology, contiguous
from ..compiler.sharding.masks import Mask
from ..config.settings import MEMORY_SETTINGS, SequenceParallelConfig
from ..errors import ConfigError
from . import call_costs
from .attention_memory import attention_figures, projecting_head_chunks
from .candidates import Candidate, travels
from .footprint import Footprint, fits, footprint, rank_bytes
from .lower_bound import LowerBound, lower_bound, sampled_ranks
from .machine import FLOPS_PER_PAIR, Machine
from .request import Request, TrainingStep
from .steptime import StepTime, attention_link_seconds, call_of, step_time

DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """The predicted time and memory of a candidate that fits."""

    candidate: Candidate
    config: SequenceParallelConfig  # without any "auto"
    travels: tuple[str, str]  # the side that rotates ("q" or "kv"), in forward and in backward
    spared: Mapping[str, Any]  # memory settings that it needs to fit
    figures: Figures  # bytes of attention
    forward: LowerBound  # of attention's forward, for one head chunk of one layer
    backward: LowerBound  # the same, of its backward
    time: StepTime  # of a micro-batch, by item
    seconds: float  # of an optimizer step, divided by its sequences
    memory: Footprint  # of a rank and its host
    simulated: bool = False  # whether attention's time comes from the simulator; else it is the lower bound

    @property
    def bounds(self) -> tuple[LowerBound, LowerBound]:
        return self.forward, self.backward


# ---- estimates without a plan


class Estimate(NamedTuple):
    """A quick estimate of a candidate's time."""

    seconds: float  # of a step, divided by its sequences
    least_seconds: float  # the same without messages, a lower bound
    message_seconds: float  # of one layer's messages
    bound_steps: int  # about how many steps of the schedule `lower_bound` would visit
    candidate: Candidate


class Estimator:
    """Estimates the time of candidates, to order them. Caches what several candidates have in common."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.products, self.seconds = functools.cache(self._products), functools.cache(self._seconds)
        self.link_seconds: dict[tuple, tuple[float, list[float]]] = {}

    def __call__(self, candidate: Candidate) -> Estimate:
        size, ulysses, cp_size = candidate.size, candidate.ulysses, candidate.cp_size
        products, lopsided = self.products(size, ulysses), self.lopsided(candidate)
        exchange, messages = self.links(candidate)
        slower = 2 if lopsided else 1
        attention = [max(slower * work, links) + exchange for work, links in zip(products, messages, strict=True)]
        steps = candidate.ring_ranks + cp_size // 8 + (cp_size**2 // 50 if lopsided else 0)  # blocks may go one by one
        return Estimate(
            seconds=self.seconds(size, *attention),
            least_seconds=self.seconds(size, *products),
            message_seconds=2 * exchange + sum(messages),
            bound_steps=len(sampled_ranks(self.request.machine, size)) * (steps + 2),
            candidate=candidate,
        )

    def _products(self, size: int, ulysses: int) -> tuple[float, float]:
        """Return the seconds of a layer's products (forward, backward) on the Ulysses rank with the most heads, if all
        CP ranks compute equally much."""
        request = self.request
        q_heads, _ = largest_share(*request.heads, ulysses)
        pairs = request.pairs * q_heads * request.model.head_dim * request.batch / (size // ulysses)
        rates = [request.machine.best_rate(request.dtype, direction) for direction in DIRECTIONS]
        forward, backward = (
            FLOPS_PER_PAIR[direction] * pairs / rate for direction, rate in zip(DIRECTIONS, rates, strict=True)
        )
        return forward, backward

    def _seconds(self, size: int, forward: float, backward: float) -> float:
        """Return the seconds of a step, divided by its sequences, from the seconds of one layer's attention."""
        time = step_time(self.request.step(_plain(size)), self.request.machine, forward, backward)
        return self.request.seconds_a_sequence(time.seconds, time.sequences)

    def links(self, candidate: Candidate) -> tuple[float, list[float]]:
        """Return (seconds of Ulysses' exchanges in one direction, seconds of the schedule's messages [in forward, in
        backward])."""
        key = candidate.schedule.name, *candidate.options.values(), candidate.topology
        if key not in self.link_seconds:
            request = self.request
            heads = largest_share(*request.heads, candidate.ulysses)
            dtype = request.given.get("comm_dtype", "fp32")
            shape = shape_of(dtype, request.dtype, request.batch, (*heads, request.model.head_dim))
            exchange = _exchange_seconds(request, candidate, *heads)
            self.link_seconds[key] = exchange, _schedule_seconds(request, candidate, shape)
        return self.link_seconds[key]

    def lopsided(self, candidate: Candidate) -> bool:
        """Return whether the last rank computes about twice its share, as for causal attention on contiguous blocks.
        Schedules that never take keys of a later block are made for such blocks, and are balanced."""
        in_order = self.request.mask.scale_free and LAYOUTS[candidate.layout].runs is contiguous
        return in_order and candidate.cp_size > 1 and candidate.schedule.can_compute(0, 1)


@functools.lru_cache(maxsize=64)
def _plain(size: int) -> SequenceParallelConfig:
    return SequenceParallelConfig(size=size, ulysses=1).resolve(size)


def _crossing(machine: Machine, topology: Topology, axis: str) -> float:
    """Return the share of ranks whose neighbor along this axis is in another node; 0 if a node holds the whole axis."""
    stride = 1
    for name, size in topology.axes:
        if name == axis:
            in_node = size == 1 or (stride * size <= machine.per_node and machine.per_node % (stride * size) == 0)
            return 0.0 if in_node else min(1.0, stride / machine.per_node)
        stride *= size
    return 0.0


def _schedule_seconds(request: Request, candidate: Candidate, shape: Shape) -> list[float]:
    """Return the seconds in which the busiest rank receives all messages of the schedule [in forward, in backward]. All
    bytes along an axis that leaves the node count as bytes between nodes."""
    machine, schedule, topology = request.machine, candidate.schedule, candidate.topology
    axes = tuple((name, topology.size(name)) for name in topology.cp_axes)
    crossing = {name: _crossing(machine, topology, name) for name, _ in axes}
    in_node = tuple((name, 1 if crossing[name] else size) for name, size in axes)
    rate, block = (
        _between_rate(machine, max(crossing.values())),
        request.seq / (candidate.cp_size * schedule.blocks_per_rank),
    )

    def seconds(direction: str, side: str) -> float:
        units = tuple((kind, n * block) for kind, n in shape.bytes_per_token(direction).items())
        total, inside = (_most_received(schedule.received, sizes, direction, side, units) for sizes in (axes, in_node))
        return max(inside / machine.inside.rate, (total - inside) / rate)

    return [
        min(seconds(direction, side) for side in sides)
        for direction, sides in travels(candidate, request.given).items()
    ]


@functools.lru_cache(maxsize=2**14)
def _most_received(
    received: Callable[..., list[float]], axes: Axes, direction: str, side: str, units: tuple[tuple[str, float], ...]
) -> float:
    # bytes; cached, since candidates that differ only in layout or rank order share them
    return max(received(axes, direction, side, dict(units)))


def _between_rate(machine: Machine, crossing: float) -> float:
    """Return the bytes/s of a rank to other nodes, if the share `crossing` of a node's ranks uses its uplink."""
    if not (machine.uplink and crossing):
        return machine.between.rate
    return min(machine.between.rate, machine.uplink / (machine.per_node * crossing))


def _exchange_seconds(request: Request, candidate: Candidate, q_heads: int, kv_heads: int) -> float:
    """Return the seconds of Ulysses' exchanges in one direction, for a Ulysses rank with these numbers of heads."""
    machine, ulysses_size = request.machine, candidate.ulysses
    in_node = not _crossing(machine, candidate.topology, "ulysses")
    rate = machine.inside.rate if in_node else _between_rate(machine, 1.0)  # Ulysses ranks send directly to one another
    tokens = request.seq / candidate.size * request.batch
    elements = tokens * (ulysses_size - 1) * (2 * q_heads + 2 * kv_heads) * request.model.head_dim
    return elements * ITEMSIZE[request.dtype] / rate


# ---- memory, lower bound, simulation


def predict(request: Request, candidate: Candidate) -> Prediction | str:
    """Predict a candidate by the lower bound of its time, with as few memory settings as it needs. Of `LAST_RESORTS`
    the fastest that fits is taken.

    Returns:
        The prediction, or a sentence if the candidate does not fit or is not legal.
    """
    least, best = math.inf, None
    bounds: dict[tuple, list[LowerBound]] = {}  # by (head chunks, what forward keeps for backward)
    try:
        without_saving = config_of_candidate(request, candidate)
        for spared in memory_options(request, candidate.ulysses):
            if best is not None and not (LAST_NAMES & set(best.spared) and len(spared) == len(best.spared)):
                break
            config = dataclasses.replace(without_saving, **spared)
            step = request.step(config, Mask())
            at_least = rank_bytes(footprint(step, least_attention(step)), request.budget)
            if at_least > request.limit:  # attention's exact memory takes a hundred times the work
                least = min(least, at_least)
                continue
            figures = attention_figures(step)
            memory = footprint(step, figures)
            least = min(least, rank_bytes(memory, request.budget))
            if fits(memory, request.budget):
                prediction = _prediction(request, candidate, config, spared, figures, memory, bounds)
                best = prediction if best is None or prediction.seconds < best.seconds else best
    except ConfigError as error:
        return str(error)
    if best is not None:
        return best
    if least <= request.limit:
        return "what would have to leave the device does not fit the host"
    return request.memory_shortage(least)


def config_of_candidate(request: Request, candidate: Candidate, **spared: Any) -> SequenceParallelConfig:
    """Return the candidate's configuration without any "auto". Where the request does not say whether q or kv rotates,
    it is the side with which the busiest rank receives fewer bytes."""
    sides = {f"rotate_{direction}": request.given.get(f"rotate_{direction}", "auto") for direction in DIRECTIONS}
    return candidate.config(request.heads, **{**given_common_settings(request.given), **spared, **sides})


def _prediction(
    request: Request, candidate: Candidate, config: SequenceParallelConfig, spared: Mapping[str, Any],
    figures: Figures, memory: Footprint, known: dict[tuple, list[LowerBound]],
) -> Prediction:  # fmt: skip
    # `known` has the bounds that were computed before; bounds that are computed here are added to it
    head_chunks, call = config.head_chunks, call_of(request.step(config))
    if (head_chunks, call.kept) not in known:
        known[head_chunks, call.kept] = [lower_bound(request.machine, call, direction) for direction in DIRECTIONS]
    bounds = known[head_chunks, call.kept]
    attention = [head_chunks * (bound.overlapped if config.overlap else bound.seconds) for bound in bounds]
    time, seconds = _step_time(request, config, figures, bounds, attention)
    return Prediction(
        candidate=candidate,
        config=config,
        travels=(call.moving_side("forward"), call.moving_side("backward")),
        spared=dict(spared),
        figures=figures,
        forward=bounds[0],
        backward=bounds[1],
        time=time,
        seconds=seconds,
        memory=memory,
    )


def _step_time(
    request: Request, config: SequenceParallelConfig, figures: Figures, bounds: Sequence[LowerBound],
    attention: Sequence[float],
) -> tuple[StepTime, float]:  # fmt: skip
    """Return (the time of a micro-batch, the seconds of a step divided by its sequences). `bounds` and `attention`
    (seconds) are those of one layer, [forward, backward]."""
    links = [config.head_chunks * attention_link_seconds(request.machine, request.world, bound) for bound in bounds]
    forward, backward = attention
    time = step_time(request.step(config), request.machine, forward, backward, figures, (links[0], links[1]))
    return time, request.seconds_a_sequence(time.seconds, time.sequences)


def with_head_chunks(request: Request, prediction: Prediction) -> list[Prediction]:
    """Return predictions of the same candidate with overlap, in head chunks that hide Ulysses' exchanges: one for each
    number of head chunks that sends no more bytes and fits."""
    predictions = []
    candidate = dataclasses.replace(prediction.candidate, overlap=True)
    for head_chunks in free_head_chunk_counts(*request.heads, candidate.ulysses)[1:]:
        given = {**request.given, **prediction.spared, "head_chunks": head_chunks}
        chunked_by_heads = predict(dataclasses.replace(request, given=given), candidate)
        if isinstance(chunked_by_heads, Prediction):
            spared = {**prediction.spared, **chunked_by_heads.spared, "head_chunks": head_chunks}
            predictions.append(dataclasses.replace(chunked_by_heads, spared=spared))
    return predictions


def simulated_instructions(request: Request, prediction: Prediction) -> int:
    """Return about how many instructions the simulator would execute: at most 12 per pair of a simulated rank and a CP
    rank."""
    call = call_of(request.step(prediction.config))
    head_chunks = call.head_chunks if call.hides_exchanges else 1
    return 12 * call_costs.simulated_ranks(request.machine, call) * (prediction.candidate.cp_size + 1) * head_chunks


def least_seconds_with_overlap(request: Request, prediction: Prediction) -> float:
    """Return a lower bound of the seconds of a step with overlap, divided by its sequences."""
    attention = [prediction.config.head_chunks * bound.overlapped for bound in prediction.bounds]
    return _step_time(request, prediction.config, prediction.figures, prediction.bounds, attention)[1]


def with_simulated_time(request: Request, prediction: Prediction) -> Prediction:
    """Return the prediction with the time of attention by the simulator."""
    call = call_of(request.step(prediction.config))
    attention = [call_costs.call_seconds(request.machine, call, direction) for direction in DIRECTIONS]
    time, seconds = _step_time(request, prediction.config, prediction.figures, prediction.bounds, attention)
    return dataclasses.replace(prediction, time=time, seconds=seconds, simulated=True)


def timelines(request: Request, prediction: Prediction) -> dict[str, Timeline]:
    """Return direction -> timeline of all ranks in one layer's attention: for one head chunk, or for all head chunks
    where they hide one another's exchanges."""
    call = call_of(request.step(prediction.config))
    return {direction: call_costs.simulate_call(request.machine, call, direction) for direction in DIRECTIONS}


def least_received_bytes(request: Request, prediction: Prediction) -> float:
    """Return the least bytes that a rank can receive in one layer's forward, for full attention and this Ulysses size.

    With any schedule a rank needs at least 4 S D sqrt(Hq Hkv / (U P)) bytes, some of which it holds already. Here S is
    tokens, D the bytes of head_dim elements, Hq and Hkv the numbers of query and key/value heads, U the Ulysses size
    and P the ranks of a sequence. A causal mask lowers the bound by sqrt(2)."""
    (q_heads, kv_heads), size = request.heads, prediction.config.size
    token = request.model.head_dim * ITEMSIZE[request.dtype] * request.batch * request.seq
    needed = 4 * token * math.sqrt(q_heads * kv_heads / (prediction.config.ulysses * size))
    return max(0.0, needed - token * 2 * (q_heads + kv_heads) / (size * prediction.config.ulysses))


# ---- settings that save memory

# tried in this order, each in addition to those before it; head chunks are tried after these
TILES: tuple[dict[str, Any], ...] = ({"loss_tiles": "auto"}, {"mlp_tiles": "auto"})
LAST_RESORTS: tuple[dict[str, Any], ...] = (
    {"save_qkv_after_all_to_all": False},
    {"offload_checkpoints": True},
    {"recompute_attention": True},
    {"offload_checkpoints": True, "recompute_attention": True},
)
LAST_NAMES = {name for settings in LAST_RESORTS for name in settings}
NO_ATTENTION = Figures(forward=0, saved=0, backward=0, inputs=True)  # a lower bound: attention needs its inputs alone
COMMON = ("comm_dtype", "kernel", *MEMORY_SETTINGS)  # settings that all candidates share


def given_common_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of COMMON that the user gives; a `head_chunks` of "auto" counts as not given."""
    return {name: given[name] for name in COMMON if name in given and (name, given[name]) != ("head_chunks", "auto")}


def memory_options(request: Request, ulysses: int) -> list[dict[str, Any]]:
    """Return sets of memory settings to try one after another, each of which saves more. None of them changes a given
    setting."""
    given = given_common_settings(request.given).keys()
    head_chunks = [{"head_chunks": n} for n in free_head_chunk_counts(*request.heads, ulysses) if n > 1]
    options: list[dict[str, Any]] = [{}]
    for settings in (*TILES, *head_chunks):
        if not settings.keys() & given:
            options.append({**options[-1], **settings})
    before_last_resorts = options[-1]
    for settings in LAST_RESORTS if request.checkpointing else ():
        can_offload = request.machine.apart or "offload_checkpoints" not in settings
        has_effect = can_offload and (ulysses > 1 or "save_qkv_after_all_to_all" not in settings)
        if has_effect and not settings.keys() & given:
            options.append({**before_last_resorts, **settings})
    return options


def most_saving_settings(request: Request, ulysses: int) -> dict[str, Any]:
    """Return the last of `memory_options`, which saves most."""
    return memory_options(request, ulysses)[-1]


def settings_in_words(spared: Mapping[str, Any]) -> list[str]:
    """Return each memory setting as it is printed for the user."""
    plain_text = {
        "recompute_attention": "attention runs twice",
        "save_qkv_after_all_to_all False": "heads are exchanged again",
    }
    texts = [name if value is True else f"{name} {value}" for name, value in spared.items()]
    return [plain_text.get(text, text) for text in texts]


def least_memory(request: Request, size: int) -> Footprint:
    """Return a lower bound of the memory of all candidates of a size: without attention, and with every memory
    setting."""
    spared = {**given_common_settings(request.given), **most_saving_settings(request, 1)}
    config = SequenceParallelConfig(size=size, ulysses=1, **spared).resolve(size)
    return footprint(request.step(config, Mask()), NO_ATTENTION)


def least_attention(step: TrainingStep) -> Figures:
    """Return the least memory of attention with any schedule: out, and in backward also dq, dk and dv. With projections
    inside head chunks the bound is 0, since none of these tensors ever exists as a whole."""
    if projecting_head_chunks(step) > 1:
        return NO_ATTENTION
    m, rows = step.model, step.seq // step.config.size * step.batch
    out, grads = (rows * heads * m.head_dim * ITEMSIZE[step.dtype] for heads in (m.heads, m.heads + 2 * m.kv_heads))
    return Figures(forward=out, saved=out, backward=out + grads, inputs=True)

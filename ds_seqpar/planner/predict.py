"""The prediction of a candidate: the memory settings with which it fits, and then its time. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..compiler.memory import Figures
from ..compiler.program.shape import ITEMSIZE
from ..compiler.sharding.heads import free_head_chunk_counts
from ..compiler.sharding.masks import Mask
from ..config.settings import MEMORY_SETTINGS, SequenceParallelConfig
from ..errors import ConfigError
from .attention_memory import projecting_head_chunks
from .candidates import Candidate
from .footprint import Footprint, fits, footprint, rank_bytes
from .price import DIRECTIONS, Price, call_of, price_of
from .request import Request, TrainingStep
from .steptime import StepTime, attention_link_seconds, step_time

# settings that save memory, tried in this order, each in addition to those before it; head chunks are tried after these
TILES: tuple[dict[str, Any], ...] = ({"loss_tiles": "auto"}, {"mlp_tiles": "auto"})
# tried last, each in addition to all of the others: the fastest that fits is taken
LAST_RESORTS: tuple[dict[str, Any], ...] = (
    {"save_qkv_after_all_to_all": False},
    {"offload_checkpoints": True},
    {"recompute_attention": True},
    {"offload_checkpoints": True, "recompute_attention": True},
)
# settings that all candidates share
COMMON = ("comm_dtype", "kernel", "agreement", "prove", "recurrent_layers", "latent_attention", *MEMORY_SETTINGS)
# memory settings that do not change how a call of attention runs, nor what it keeps
SAME_CALL: dict[str, Any] = {
    "loss_tiles": 1, "mlp_tiles": 1, "offload_checkpoints": False, "recompute_attention": False
}  # fmt: skip
NO_ATTENTION = Figures(forward=0, saved=0, backward=0, inputs=True)  # a lower bound: attention needs its inputs alone


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """The predicted time and memory of a candidate that fits."""

    candidate: Candidate
    config: SequenceParallelConfig  # without any "auto"
    travels: tuple[str, str]  # the side that rotates ("q" or "kv"), in forward and in backward
    spared: Mapping[str, Any]  # memory settings that it needs to fit
    forward: Price  # of one layer's attention
    backward: Price
    time: StepTime  # of a micro-batch, by item
    seconds: float  # of an optimizer step, divided by its sequences
    memory: Footprint  # of a rank and its host

    @property
    def simulated(self) -> bool:
        """Whether attention was simulated on all ranks; else a few of them were followed."""
        return self.forward.simulated and self.backward.simulated


class Predictor:
    """Predicts candidates of a request. Configurations that attend alike share one price."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prices: dict[tuple, tuple[Price, Price]] = {}

    def __call__(self, candidate: Candidate, **settings: Any) -> Prediction | str:
        """Predict a candidate with as few memory settings as it needs. Of `LAST_RESORTS` the fastest that fits is
        taken.

        Args:
            candidate: The candidate.
            settings: Memory settings that are given beside the request's.

        Returns:
            The prediction, or a sentence if the candidate does not fit or is not legal.
        """
        request, best, least = self.request, None, math.inf
        try:
            for spared, is_last in memory_options(request, candidate.ulysses, settings):
                if best is not None and not is_last:
                    break
                step = request.step(config_of(request, candidate, {**settings, **spared}))
                memory = memory_of(request, step)
                least = min(least, rank_bytes(memory, request.budget))
                if fits(memory, request.budget):
                    found = self.prediction(candidate, step, {**settings, **spared}, memory)
                    best = found if best is None or found.seconds < best.seconds else best
        except ConfigError as error:
            return str(error)
        if best is not None:
            return best
        if least <= request.limit:
            return "what would have to leave the device does not fit the host"
        return request.memory_shortage(least)

    def prediction(
        self, candidate: Candidate, step: TrainingStep, spared: Mapping[str, Any], memory: Footprint
    ) -> Prediction:
        request, call = self.request, call_of(step)
        key = dataclasses.replace(step.config, **SAME_CALL), call.kept
        if key not in self.prices:
            self.prices[key] = price_of(request.machine, call, "forward"), price_of(request.machine, call, "backward")
        prices = self.prices[key]
        links = [attention_link_seconds(request.machine, request.world, price) for price in prices]
        time = step_time(step, request.machine, prices[0].seconds, prices[1].seconds, (links[0], links[1]))
        return Prediction(
            candidate=candidate,
            config=step.config,
            travels=(call.moving_side("forward"), call.moving_side("backward")),
            spared=spared,
            forward=prices[0],
            backward=prices[1],
            time=time,
            seconds=request.seconds_a_sequence(time.seconds, time.sequences),
            memory=memory,
        )


def predict(request: Request, candidate: Candidate, **settings: Any) -> Prediction | str:
    """Return `Predictor(request)(candidate, **settings)`."""
    return Predictor(request)(candidate, **settings)


def config_of(request: Request, candidate: Candidate, settings: Mapping[str, Any]) -> SequenceParallelConfig:
    """Return the candidate's configuration without any "auto". Where the request does not say whether q or kv rotates,
    it is the side with which the busiest rank receives fewer bytes."""
    sides = {f"rotate_{direction}": request.given.get(f"rotate_{direction}", "auto") for direction in DIRECTIONS}
    return candidate.config(request.heads, **given_common_settings(request.given), **settings, **sides)


def given_common_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of COMMON that the user gives; a `head_chunks` of "auto" counts as not given."""
    return {name: given[name] for name in COMMON if name in given and (name, given[name]) != ("head_chunks", "auto")}


def memory_options(
    request: Request, ulysses: int, settings: Mapping[str, Any] = MappingProxyType({})
) -> list[tuple[dict[str, Any], bool]]:
    """Return (memory settings, whether they are a last resort) to try one after another, each of which saves more. None
    of them changes a setting of the request or of `settings`."""
    given = {*given_common_settings(request.given), *settings}
    if request.objective.head != "logits":  # trl's head is in tiles already, and is refused beside others
        given.add("loss_tiles")
    head_chunks = [{"head_chunks": n} for n in free_head_chunk_counts(*request.heads, ulysses) if n > 1]
    options: list[tuple[dict[str, Any], bool]] = [({}, False)]
    for tried in (*TILES, *head_chunks):
        if not tried.keys() & given:
            options.append(({**options[-1][0], **tried}, False))
    before_last_resorts = options[-1][0]
    for tried in LAST_RESORTS if request.checkpointing else ():
        can_offload = request.machine.apart or "offload_checkpoints" not in tried
        has_effect = can_offload and (ulysses > 1 or "save_qkv_after_all_to_all" not in tried)
        if has_effect and not tried.keys() & given:
            options.append(({**before_last_resorts, **tried}, True))
    return options


def most_saving_settings(request: Request, ulysses: int) -> dict[str, Any]:
    """Return the last of `memory_options`, which saves most."""
    return memory_options(request, ulysses)[-1][0]


def settings_in_words(spared: Mapping[str, Any]) -> list[str]:
    """Return each memory setting as it is printed for the user."""
    plain_text = {
        "recompute_attention": "attention runs twice",
        "save_qkv_after_all_to_all False": "heads are exchanged again",
    }
    texts = [name if value is True else f"{name} {value}" for name, value in spared.items()]
    return [plain_text.get(text, text) for text in texts]


def least_memory(request: Request, size: int) -> int:
    """Return a lower bound of the bytes of a rank for all candidates of a size: without attention, and with every
    memory setting."""
    spared = {**given_common_settings(request.given), **most_saving_settings(request, 1)}
    config = SequenceParallelConfig(size=size, ulysses=1, **spared).resolve(size)
    return rank_bytes(footprint(request.step(config, Mask()), NO_ATTENTION), request.budget)


def memory_of(request: Request, step: TrainingStep) -> Footprint:
    """Return the memory of a step; a lower bound of it where that is too much already, since attention's exact memory
    takes a hundred times the work."""
    step = dataclasses.replace(step, mask=Mask())
    least = footprint(step, least_attention(step))
    return least if rank_bytes(least, request.budget) > request.limit else footprint(step)


def least_attention(step: TrainingStep) -> Figures:
    """Return the least memory of attention with any schedule: out, and in backward also dq, dk and dv. With projections
    inside head chunks the bound is 0, since none of these tensors ever exists as a whole."""
    if projecting_head_chunks(step) > 1:
        return NO_ATTENTION
    m, rows = step.model, step.seq // step.config.size * step.batch
    out, grads = (rows * heads * m.head_dim * ITEMSIZE[step.dtype] for heads in (m.heads, m.heads + 2 * m.kv_heads))
    return Figures(forward=out, saved=out, backward=out + grads, inputs=True)

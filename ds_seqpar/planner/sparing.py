"""Settings that spare memory, in the order in which the planner tries them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler import heads as dealing
from ..compiler.masks import Mask
from ..compiler.memory import Figures
from ..config import SequenceParallelConfig
from .footprint import footprint
from .needs import Footprint
from .question import Question

# settings that spare memory, in the order in which they are tried; each with those before it
SPARING: tuple[dict[str, Any], ...] = ({"loss_tiles": "auto"}, {"mlp_tiles": "auto"})
LAST_SPARING: tuple[dict[str, Any], ...] = (
    {"offload_checkpoints": True},
    {"keep_attention": False},
    {"offload_checkpoints": True, "keep_attention": False},
)
NOTHING = Figures(forward=0, kept=0, backward=0, inputs=True)  # of attention but its inputs: none takes less
COMMON = (
    "travel_dtype",
    "kernel",
    "head_stages",
    "keep_attention",
    "offload_checkpoints",
    "mlp_tiles",
    "loss_tiles",
)  # that candidates do not have


def common(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of settings that candidates do not have; stages that are "auto" are a choice still."""
    return {name: given[name] for name in COMMON if name in given and (name, given[name]) != ("head_stages", "auto")}


def ladder(question: Question, ulysses: int) -> list[dict[str, Any]]:
    """Settings that spare more and more memory; what is given is left as it is."""
    given, (q_heads, kv_heads) = question.given, question.heads
    stages = [{"head_stages": n} for n in dealing.free_stages(q_heads, kv_heads, ulysses) if n > 1]
    rungs: list[dict[str, Any]] = [{}]
    for settings in (*SPARING, *stages):
        if more := {name: value for name, value in settings.items() if name not in common(given)}:
            rungs.append({**rungs[-1], **more})
    for settings in LAST_SPARING if question.checkpointing else ():
        if not set(settings) & set(common(given)):
            rungs.append({**rungs[_lean(rungs)], **settings})
    return rungs


def _lean(rungs: list[dict[str, Any]]) -> int:
    """The last that keeps everything on the device, and attention runs once."""
    return max(n for n, rung in enumerate(rungs) if not set(rung) & {"offload_checkpoints", "keep_attention"})


def least_memory(question: Question, size: int) -> Footprint:
    """Without attention, with everything that spares: no candidate of this size takes less."""
    sparing = {name: value for name, value in ladder(question, 1)[-1].items() if name != "head_stages"}
    config = SequenceParallelConfig(size=size, ulysses=1, **{**common(question.given), **sparing}).resolve(size)
    return footprint(question.step(config, Mask()), NOTHING)

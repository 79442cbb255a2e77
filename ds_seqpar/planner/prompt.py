"""The time of a prompt's first token, and the memory of its cache, by the prices of a training step. Does not import
torch."""

from __future__ import annotations

import dataclasses

from ..compiler.program.shape import ITEMSIZE
from ..compiler.sharding.layout import multiple
from ..compiler.sharding.masks import Mask
from ..errors import ConfigError
from .machine import Machine
from .price import call_of, price_of
from .request import TrainingStep
from .steptime import collective_seconds, elementwise_bytes

PROMPT_ITEMS = {
    "attention": "all layers, transfers included",
    "matrices": "projections and MLPs",
    "elementwise": "norms, RoPE, activations and residuals",
    "ZeRO": "all parameters, gathered once",
}


def cache_bytes(step: TrainingStep, tokens: int) -> int:
    """Return the bytes of keys and values that the rank with most of them keeps of `tokens` tokens."""
    m, kept = step.model, _of_prompt(step, tokens).seq // step.config.size
    if step.mask.window is not None:
        kept = min(kept, step.mask.window)  # one rank may hold all tokens of a window
    return m.attending * 2 * m.kv_heads * m.head_dim * ITEMSIZE[step.dtype] * kept


def prompt_seconds(step: TrainingStep, machine: Machine, tokens: int) -> dict[str, float]:
    """Return the seconds until the first token of a prompt, by the names of `PROMPT_ITEMS`, with the model, the
    settings and the window of a training step."""
    prompt, m, size = _of_prompt(step, tokens), step.model, ITEMSIZE[step.dtype]
    rows = m.layers * prompt.seq // step.config.size
    gathered = collective_seconds(machine, step.world, "gather", m.parameters * size) if step.zero.stage == 3 else 0.0
    return {
        "attention": m.layers * price_of(machine, call_of(prompt), "forward").seconds,
        "matrices": machine.gemm_seconds(step.dtype, 2 * (m.projections + m.mlp) * rows),
        "elementwise": elementwise_bytes(step) * rows / machine.elementwise_rate,
        "ZeRO": gathered,
    }


def _of_prompt(step: TrainingStep, tokens: int) -> TrainingStep:
    # padded to a length that ranks can share
    if step.model.states is not None:
        raise ConfigError(
            "--prompt is of models all of whose layers attend; got one with layers that have a state or a convolution, "
            "leave it out"
        )
    unit = multiple(step.config.layout, step.config.size, step.config.ulysses)
    mask = Mask(window=step.mask.window)
    return dataclasses.replace(step, seq=-(-tokens // unit) * unit, batch=1, checkpointing=False, mask=mask)

"""How long a training step takes on a machine: attention as it is simulated or bounded, everything else by the flops
and bytes that it has. Norms, RoPE and other work that no matrix is multiplied in is not in it. Torch-free."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from .balance import shards_of
from .calls import Figures
from .machine import Machine
from .needs import Step
from .pricing import Call
from .shape import ITEMSIZE
from .shards import EvenShards, Shards

TIMES = {
    "attention forward": "all layers; with what it sends",
    "attention backward": "the same, and forward once more where checkpoints do not keep it",
    "matrices": "projections and MLPs, forward, backward, and once more where layers are checkpointed",
    "logits": "the head, forward and backward",
    "ZeRO": "what gathers and reductions take beyond the work that they run beside",
    "offload": "what checkpoints on their way to host memory and back take beyond that",
}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """parts: seconds by name, of `TIMES`; sequences: that are trained in them together."""

    parts: Mapping[str, float]
    sequences: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def call_of(step: Step, stages: int = 1) -> Call:
    """Attention of one layer of a step, on the heads of the first of so many stages."""
    m, inner = step.model, step.config.size // step.config.ulysses
    kv_heads = math.ceil(m.kv_heads / stages)
    return Call(
        config=step.config,
        world=step.world,
        mask=step.mask,
        shards=_shards(step, inner),
        heads=(kv_heads * (m.heads // m.kv_heads), kv_heads, m.head_dim),
        dtype=step.dtype,
        batch=step.batch,
    )


def _shards(step: Step, inner: int) -> Shards:
    if step.mask.documents:
        ends = (*step.mask.documents, step.seq)
        return shards_of(step.config.layout, tuple(b - a for a, b in itertools.pairwise(ends)), inner)
    return EvenShards(step.config.layout, step.seq, inner)


def step_time(step: Step, machine: Machine, forward: float, backward: float, kept: Figures | None = None) -> StepTime:
    """forward, backward: seconds of attention of one layer, all stages together. kept: of its memory, for what
    checkpoints bring to host memory."""
    m, layers, dtype = step.model, step.model.layers, step.dtype
    rows = math.ceil(step.seq / step.config.size) * step.batch
    projections = 2 * m.hidden * (m.heads + m.kv_heads) * m.head_dim  # q and o; k and v
    mlp = 3 * m.hidden * m.intermediate
    passes = 2 * (projections + mlp) * rows
    tiled = 2 * mlp * rows if step.config.mlp_tiles != 1 else 0  # backward computes each tile again
    ahead = machine.gemm_seconds(dtype, passes)
    behind = machine.gemm_seconds(dtype, (2 + step.checkpointing) * passes + tiled)
    again = forward if step.checkpointing and not step.config.keep_attention else 0.0
    hidden = forward + ahead, backward + again + behind  # of a layer, which transfers can run beside
    parts = {
        "attention forward": layers * forward,
        "attention backward": layers * (backward + again),
        "matrices": layers * (ahead + behind),
        "logits": machine.gemm_seconds(dtype, 3 * 2 * m.embedding * rows),
        "ZeRO": zero_seconds(step, machine, hidden),
    }
    if step.config.offload_checkpoints and step.checkpointing:
        size = rows * m.hidden * ITEMSIZE[dtype] + (kept.kept if kept and step.config.keep_attention else 0)
        parts["offload"] = layers * sum(max(0.0, size / machine.offload_rate - beside) for beside in hidden)
    return StepTime(parts, step.world // step.config.size * step.batch)


def gathered_seconds(machine: Machine, world: int, size: float) -> float:
    """Of an all-gather after which each of all ranks has `size` bytes, or of a reduce-scatter of as many: every node
    takes in what others have, by all its links to them, and shares it out inside."""
    per_node = min(world, machine.per_node)
    nodes = math.ceil(world / machine.per_node)
    if world == 1:
        return 0.0
    inside = size * (per_node - 1) / per_node / machine.inside.rate
    if nodes == 1:
        return machine.inside.latency + inside
    rate = per_node * machine.between.rate
    between = size * (nodes - 1) / nodes / (min(rate, machine.uplink) if machine.uplink else rate)
    return machine.between.latency + max(inside, between)


def zero_seconds(step: Step, machine: Machine, hidden: tuple[float, float]) -> float:
    """hidden: seconds of a layer, forward and backward."""
    m, zero, size = step.model, step.zero, ITEMSIZE[step.dtype]

    def take(parameters: int) -> float:
        return gathered_seconds(machine, step.world, parameters * size)

    rest = max(0, m.parameters - m.layers * m.layer_parameters)
    beside = zero.overlap_comm if zero.overlap_comm is not None else zero.stage == 3
    if zero.stage == 3:
        layer = take(m.layer_parameters)  # gathered in forward and in backward, its gradients reduced in backward
        ahead, behind = (
            max(0.0, took - (room if beside else 0)) for took, room in zip((layer, 2 * layer), hidden, strict=True)
        )
        return m.layers * (ahead + behind) + 3 * take(rest)
    reduced = take(m.parameters) * (1 if zero.stage else 2)  # without ZeRO an all-reduce
    reduced = max(0.0, reduced - (m.layers * hidden[1] if beside else 0))
    return reduced + (take(m.parameters) if zero.stage else 0)  # and then the new parameters

"""How long a training step takes on a machine. Attention's seconds are given; all else is counted by its flops and
bytes, and the host's time by the modules that ZeRO hooks. Imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from ..compiler.memory import Figures
from ..compiler.program.shape import ITEMSIZE
from ..compiler.sharding.balance import shards_of
from ..compiler.sharding.shards import EvenShards, Shards
from .attention_call import AttentionCall
from .attention_memory import projecting_head_chunks
from .lower_bound import LowerBound
from .machine import Machine
from .request import TrainingStep
from .states import MASTER, states

STEP_ITEMS = {
    "attention forward": "all layers, transfers included",
    "attention backward": "the same, and forward again if checkpoints do not keep it",
    "matrices": "projections and MLPs, forward, backward, and forward again for checkpointed layers",
    "elementwise": "norms, RoPE, activations, residuals and the loss, as many times",
    "logits": "the head, forward and backward",
    "host": "ZeRO-3's hooks of modules, while the device waits for them",
    "ZeRO": "gathers and reductions that computation does not hide",
    "copies": "ZeRO's copies into and out of its messages",
    "optimiser": "norm, clipping and AdamW's step of the rank's share",
    "offload": "copies to host memory and back that computation does not hide",
    "drives": "ZeRO's reads from drives and writes to them",
}
# of a LLaMA as transformers writes it. A layer: itself, its attention, 4 projections, its MLP, 3 more, the activation
# and 2 norms; beside layers: two models, the embedding, RoPE, a norm and the head
LAYER_MODULES, OTHER_MODULES = 13, 6
LOGIT_BYTES = 32  # of a logit, by the loss in fp32: log_softmax reads thrice and writes once, its gradient likewise
# of an element of a rank's share: gradients are read for their norm and clipped (4 + 8), AdamW reads four tensors and
# writes three (28), and the parameter is copied out of its fp32 copy (8)
OPTIMISER_BYTES = 48
# the same where DeepSpeed's CPUAdam steps in host memory: clipped (8), seven tensors (28), and read as it is cast (4);
# what the cast writes comes to that
HOST_OPTIMISER_BYTES = 40
# on drives, a step: the copy in fp32, its gradient and two moments are read and written again
DRIVE_BYTES = 32


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of one micro-batch on all ranks. seconds_by_item: seconds by the names of `STEP_ITEMS`. sequences: how
    many are trained in it."""

    seconds_by_item: Mapping[str, float]
    sequences: int

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_item.values())


def call_of(step: TrainingStep) -> AttentionCall:
    """The attention call of one layer of a step, on the heads of its first head chunk."""
    m, cp_size, head_chunks = step.model, step.config.size // step.config.ulysses, step.config.head_chunks
    kv_heads = math.ceil(m.kv_heads / head_chunks)
    return AttentionCall(
        config=step.config,
        world=step.world,
        mask=step.mask,
        shards=_shards(step, cp_size),
        heads=(kv_heads * (m.heads // m.kv_heads), kv_heads, m.head_dim),
        dtype=step.dtype,
        batch=step.batch,
        head_chunks=head_chunks,
        kept=step.config.kept(head_chunks, step.checkpointing, not step.config.recompute_attention),
    )


def _shards(step: TrainingStep, cp_size: int) -> Shards:
    if step.mask.documents:
        ends = (*step.mask.documents, step.seq)
        return shards_of(step.config.layout, tuple(b - a for a, b in itertools.pairwise(ends)), cp_size)
    return EvenShards(step.config.layout, step.seq, cp_size)


def step_time(
    step: TrainingStep, machine: Machine, forward: float, backward: float, kept: Figures | None = None,
    attention_links: tuple[float, float] = (0.0, 0.0),
) -> StepTime:  # fmt: skip
    """The time of a step. forward, backward: seconds of one layer's attention, all head chunks together. kept:
    attention's memory, for the bytes that checkpoints offload. attention_links: `attention_link_seconds` of both
    directions."""
    m, layers, dtype = step.model, step.model.layers, step.dtype
    rows = math.ceil(step.seq / step.config.size) * step.batch
    passes = 2 * (m.projections + m.mlp) * rows
    # flops that backward repeats: tiles, unless a checkpoint repeats the whole layer, and projections of head chunks
    tiled = 2 * m.mlp * rows if step.config.mlp_tiles != 1 and not step.checkpointing else 0
    if projecting_head_chunks(step) > 1 and not (step.checkpointing and not step.config.recompute_attention):
        tiled += 2 * m.hidden * (m.heads + 2 * m.kv_heads) * m.head_dim * rows
    attention_again = step.checkpointing and step.config.recompute_attention
    elementwise = rows * elementwise_bytes(step)
    small = elementwise / machine.elementwise_rate  # seconds of a forward pass beside matrices; backward has twice that
    work = machine.gemm_seconds(dtype, passes) + small, machine.gemm_seconds(dtype, 2 * passes + tiled) + 2 * small
    recomputed = work[0] if step.checkpointing else 0.0
    attention = forward, backward + (forward if attention_again else 0.0)
    device = attention[0] + work[0], attention[1] + work[1] + recomputed  # seconds of a layer
    hooks = hook_seconds(step, machine, device)
    hiding = tuple(  # seconds of a layer in which the links are free for ZeRO's transfers
        max(0.0, busy + host - links) for busy, host, links in zip(device, hooks, attention_links, strict=True)
    )
    parts = {
        "attention forward": layers * attention[0],
        "attention backward": layers * attention[1],
        "matrices": layers * machine.gemm_seconds(dtype, (3 + step.checkpointing) * passes + tiled),
        "elementwise": (layers * (3 + step.checkpointing) * elementwise + rows * m.vocab * LOGIT_BYTES)
        / machine.elementwise_rate,
        "logits": machine.gemm_seconds(dtype, 3 * 2 * m.embedding * rows),
        "host": layers * sum(hooks) + (OTHER_MODULES / LAYER_MODULES * sum(hook_seconds(step, machine, (0.0, 0.0)))
                                       if not machine.ahead else 0.0),
        "ZeRO": zero_seconds(step, machine, (hiding[0], hiding[1])),
        "copies": zero_copied_bytes(step) / machine.elementwise_rate,
        "optimiser": optimiser_seconds(step, machine),
        "offload": offload_seconds(step, machine, kept, (hiding[0], hiding[1])),
        "drives": drive_seconds(step, machine),
    }  # fmt: skip
    return StepTime(parts, step.world // step.config.size * step.batch)


def optimiser_seconds(step: TrainingStep, machine: Machine) -> float:
    """Seconds of the optimiser's step: of the elements on the device, and of those in host memory."""
    on_device = states(step.model, step.zero, step.world, ITEMSIZE[step.dtype]).elements_on_device
    on_host = _owned_parameters(step) - on_device
    rate = machine.host_rate / min(step.world, machine.per_node)
    host_bytes = (HOST_OPTIMISER_BYTES + ITEMSIZE[step.dtype]) * on_host
    return OPTIMISER_BYTES * on_device / machine.elementwise_rate + host_bytes / rate


def offload_seconds(step: TrainingStep, machine: Machine, kept: Figures | None, hiding: tuple[float, float]) -> float:
    """Seconds of copies between a rank and its host that no computation hides. The link carries both directions at
    once. kept: attention's memory, for the bytes that checkpoints offload. hiding: seconds of a layer (forward,
    backward) beside which copies of pinned memory run."""
    config, zero, layers, size = step.config, step.zero, step.model.layers, ITEMSIZE[step.dtype]
    rows, own = math.ceil(step.seq / config.size) * step.batch, _owned_parameters(step)
    on_host = own - states(step.model, zero, step.world, size).elements_on_device
    checkpoint = lent = 0
    if config.offload_checkpoints and step.checkpointing:
        checkpoint = rows * step.model.hidden * size + (kept.saved if kept and not config.recompute_attention else 0)
        lent = (
            kept.saved if kept and projecting_head_chunks(step) > 1 else 0
        )  # offloaded when a layer is computed again
    fetched = own * size / layers if zero.parameters_away else 0.0
    # stage 3 copies gradients as they come, and once more in fp32
    gradients = (MASTER * on_host + (size * own if zero.stage == 3 else 0)) / layers if zero.optimiser_away else 0.0
    pinned = zero.offload_optimizer.pin_memory
    forward, backward = max(checkpoint, fetched), lent + max(checkpoint + fetched, gradients if pinned else 0.0)
    of_layer = sum(
        max(0.0, moved / machine.offload_rate - room) for moved, room in zip((forward, backward), hiding, strict=True)
    )
    not_hidden = 0.0 if pinned else layers * gradients  # bytes
    if zero.optimiser_away != zero.parameters_away:  # the new parameters are copied to where parameters are kept
        not_hidden += size * (on_host if zero.optimiser_away else own)
    return layers * of_layer + not_hidden / machine.offload_rate


def drive_seconds(step: TrainingStep, machine: Machine) -> float:
    """Seconds of drives: optimiser states are read and written once a step, parameters read twice and written once."""
    if not step.zero.drives or machine.nvme_rate is None:
        return 0.0
    zero, own, moved = step.zero, _owned_parameters(step), 0
    if zero.offload_optimizer.device == "nvme":
        moved += DRIVE_BYTES * own
    if zero.offload_param.device == "nvme":
        moved += 3 * ITEMSIZE[step.dtype] * max(0, own - zero.offload_param.max_in_cpu)
    return moved * min(step.world, machine.per_node) / machine.nvme_rate


def _owned_parameters(step: TrainingStep) -> int:
    """The number of parameters whose states a rank has."""
    return step.model.parameters // (step.world if step.zero.stage else 1)


def attention_link_seconds(machine: Machine, world: int, attention: LowerBound) -> float:
    """Seconds in which a layer's attention uses the links that ZeRO's collectives need. With several nodes these are
    the links between nodes."""
    if world <= machine.per_node:
        return attention.links
    rate = min(machine.between.rate, machine.uplink / machine.per_node if machine.uplink else math.inf)
    return min(attention.links, attention.between / rate)


def elementwise_bytes(step: TrainingStep) -> float:
    """Bytes that the elementwise operations of a layer's forward read and write for a token, one operation after
    another as transformers has them."""
    m, size = step.model, ITEMSIZE[step.dtype]
    cast = 2 * (4 + size) if size < 4 else 0  # to fp32 and back
    norm = cast + 2 * 4 + 4 + 2 * 4 + 2 * size  # squares, their mean, times 1 / root, times weight
    rope = (2 + 1 + 2 + 2 + 3) * size  # times cos; half of it negated, and put together; times sin; added
    residual, activation = 3 * size, (2 + 3) * size  # silu, times
    rotated = (m.heads + m.kv_heads) * m.head_dim
    return 2 * m.hidden * (norm + residual) + rotated * rope + m.intermediate * activation


def hook_seconds(step: TrainingStep, machine: Machine, device: tuple[float, float]) -> tuple[float, float]:
    """Seconds of ZeRO-3's hooks in a layer (forward, backward), while the device waits. device: seconds of its work in
    the layer, which hides hooks on machines whose host works ahead."""
    if machine.zero is None or step.zero.stage < 3:
        return 0.0, 0.0
    forward, backward = LAYER_MODULES * machine.zero.forward, LAYER_MODULES * machine.zero.backward
    if step.checkpointing:
        backward += forward
    if not machine.ahead:
        return forward, backward
    return max(0.0, forward - device[0]), max(0.0, backward - device[1])


def gather_seconds(machine: Machine, world: int, size: float) -> float:
    """Seconds of an all-gather of `size` bytes over all ranks, or of a reduce-scatter of as many. Each node receives
    the parts of other nodes over all its links, and passes them on inside."""
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


def collective_seconds(machine: Machine, world: int, kind: str, size: float, count: float = 1) -> float:
    """Seconds of `count` collectives of `size` bytes in all. kind: "gather", "reduce" (a reduce-scatter) or
    "all_reduce". As measured, where the machine was measured on `world` ranks; else by its links."""
    measured = machine.zero
    if measured is not None and measured.ranks == world:
        wire = {"gather": measured.gather, "reduce": measured.reduce, "all_reduce": measured.all_reduce}[kind]
        return count * wire.latency + size / wire.rate
    return (2 if kind == "all_reduce" else 1) * count * gather_seconds(machine, world, size / count)


def zero_seconds(step: TrainingStep, machine: Machine, hiding: tuple[float, float]) -> float:
    """Seconds of ZeRO's collectives that no computation hides. hiding: seconds of a layer (forward, backward) beside
    which transfers can run."""
    m, zero, size, world = step.model, step.zero, ITEMSIZE[step.dtype], step.world
    if world == 1:
        return 0.0

    def gather(parameters: int) -> float:
        return collective_seconds(machine, world, "gather", parameters * size)

    def reduction(parameters: int) -> float:
        count = max(1.0, parameters / zero.reduce_bucket_size)
        return collective_seconds(machine, world, "reduce", parameters * size, count)

    outside_layers = max(0, m.parameters - m.layers * m.layer_parameters)
    overlaps = zero.overlap_comm if zero.overlap_comm is not None else zero.stage == 3
    norm = collective_seconds(machine, world, "all_reduce", 4.0)  # of gradients, which clipping needs
    if zero.stage == 3:
        layer = gather(m.layer_parameters)
        # transfers slow down the computation that hides them
        slowed = machine.stolen * 2 * size * (world - 1) / world * m.layer_parameters
        ends = norm + 2 * gather(outside_layers)
        if machine.ahead:
            room = hiding if overlaps else (0.0, 0.0)
            layers = max(slowed, layer - room[0]) + max(slowed, layer + reduction(m.layer_parameters) - room[1])
            ends += reduction(outside_layers)
        else:  # without streams DeepSpeed waits for a reduction as soon as it starts, for a gather where it is needed
            layers = max(slowed, layer - hiding[0]) + max(slowed, layer - hiding[1])
            ends += reduction(m.parameters)
        return m.layers * layers + ends
    # stages 1 and 2 reduce buckets on all ranks too, unless they are told not to (use_multi_rank_bucket_allreduce)
    seconds = collective_seconds(machine, world, "all_reduce", m.parameters * size)
    seconds = max(0.0, seconds - (m.layers * hiding[1] if overlaps and machine.ahead else 0.0)) + norm
    return seconds + (gather(m.parameters) if zero.stage else 0.0)  # of the new parameters


def zero_copied_bytes(step: TrainingStep) -> float:
    """Bytes that ZeRO reads and writes around its collectives, one operation after another as DeepSpeed has them."""
    if step.world == 1:
        return 0.0
    gathered = 2 * 2 if step.zero.stage == 3 else 0  # copied out of the gathered buffer, in forward and in backward
    reduced = (0, 3 * 2, 3 * 2, 4 * 2)[step.zero.stage]  # into a bucket, divided, out of it; at stage 3 also reordered
    return (gathered + reduced) * ITEMSIZE[step.dtype] * step.model.parameters

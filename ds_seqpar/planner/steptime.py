"""The time of a training step on a machine. Attention's seconds are given; everything else follows from its flops and
bytes, and the host's time from the modules that ZeRO hooks. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ..compiler.program.shape import ITEMSIZE
from ..compiler.sharding.masks import Mask
from .attention_memory import attention_figures, projecting_head_chunks
from .footprint import MASTER, states
from .machine import Machine
from .price import Price
from .request import TrainingStep
from .state_memory import state_bytes

STEP_ITEMS = {
    "attention forward": "all layers, transfers included",
    "attention backward": "the same, and forward again if checkpoints do not keep it",
    "states": "messages of layers with a state, forward and backward",
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
# modules of a LLaMA as transformers implements it. A layer: itself, its attention, 4 projections, its MLP, 3 more, the
# activation and 2 norms; beside layers: two models, the embedding, RoPE, a norm and the head
LAYER_MODULES, OTHER_MODULES = 13, 6
# bytes per logit that the loss reads and writes in fp32: log_softmax reads three times and writes once, its gradient
# likewise
LOGIT_BYTES = 32
# bytes per element of a rank's shard that the optimizer reads and writes: gradients are read for their norm and clipped
# (4 + 8), AdamW reads four tensors and writes three (28), and the parameter is copied out of its fp32 copy (8)
OPTIMISER_BYTES = 48
# the same if DeepSpeed's CPUAdam steps in host memory: clipped (8), seven tensors (28), and read as it is cast (4);
# what the cast writes is added to this
HOST_OPTIMISER_BYTES = 40
# bytes per element on drives and step: the fp32 copy, its gradient and two moments are read and written again
DRIVE_BYTES = 32


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of one micro-batch on all ranks."""

    seconds_by_item: Mapping[str, float]  # by the names of `STEP_ITEMS`
    sequences: int  # sequences that are trained in it

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_item.values())


def step_time(
    step: TrainingStep, machine: Machine, forward: float, backward: float,
    attention_links: tuple[float, float] = (0.0, 0.0),
) -> StepTime:  # fmt: skip
    """Return the time of a step.

    Args:
        step: The step.
        machine: The machine.
        forward: Seconds of one layer's attention in forward, all head chunks together.
        backward: The same in backward.
        attention_links: `attention_link_seconds` in forward and in backward.
    """
    m, layers, dtype = step.model, step.model.layers, step.dtype
    rows = math.ceil(step.seq / step.config.size) * step.batch
    passes = 2 * m.weights / layers * rows  # of a layer, as a mean
    forward, backward = (m.attending / layers * seconds for seconds in (forward, backward))
    # flops that backward repeats: tiles, unless a checkpoint repeats the whole layer, and projections of head chunks
    tiled = 2 * m.mlp * rows * m.with_mlp / layers if step.config.mlp_tiles != 1 and not step.checkpointing else 0
    if projecting_head_chunks(step) > 1 and not (step.checkpointing and not step.config.recompute_attention):
        tiled += 2 * m.hidden * (m.heads + 2 * m.kv_heads) * m.head_dim * rows * m.attending / layers
    attention_again = step.checkpointing and step.config.recompute_attention
    elementwise = rows * elementwise_bytes(step)
    # seconds of a forward pass besides matrix products; backward has twice that
    elementwise_seconds = elementwise / machine.elementwise_rate
    work = (
        machine.gemm_seconds(dtype, passes) + elementwise_seconds,
        machine.gemm_seconds(dtype, 2 * passes + tiled) + 2 * elementwise_seconds,
    )
    recomputed = work[0] if step.checkpointing else 0.0
    attention = forward, backward + (forward if attention_again else 0.0)
    device = attention[0] + work[0], attention[1] + work[1] + recomputed  # seconds of a layer
    hooks = hook_seconds(step, machine, device)
    hiding = tuple(  # seconds of a layer in which the links are free for ZeRO's transfers
        max(0.0, busy + host - links) for busy, host, links in zip(device, hooks, attention_links, strict=True)
    )
    seconds_by_item = {
        "attention forward": layers * attention[0],
        "attention backward": layers * attention[1],
        "states": state_seconds(step, machine),
        "matrices": layers * machine.gemm_seconds(dtype, (3 + step.checkpointing) * passes + tiled),
        "elementwise": (layers * (3 + step.checkpointing) * elementwise + rows * m.vocab * LOGIT_BYTES)
        / machine.elementwise_rate,
        "logits": machine.gemm_seconds(dtype, 3 * 2 * m.embedding * rows),
        "host": layers * sum(hooks) + (OTHER_MODULES / LAYER_MODULES * sum(hook_seconds(step, machine, (0.0, 0.0)))
                                       if not machine.ahead else 0.0),
        "ZeRO": zero_seconds(step, machine, (hiding[0], hiding[1])),
        "copies": zero_copied_bytes(step) / machine.elementwise_rate,
        "optimiser": optimiser_seconds(step, machine),
        "offload": offload_seconds(step, machine, (hiding[0], hiding[1])),
        "drives": drive_seconds(step, machine),
    }  # fmt: skip
    return StepTime(seconds_by_item, step.world // step.config.size * step.batch)


def state_seconds(step: TrainingStep, machine: Machine) -> float:
    """Return the seconds of messages of layers with a state, of which computation hides none."""
    layers, config = step.model.states, step.config
    if layers is None or config.size == 1:
        return 0.0
    moved, rate = state_bytes(step), min(machine.between.rate, (machine.uplink or math.inf) / machine.per_node)

    def seconds(size: float, ranks: int) -> float:
        inside = ranks <= machine.per_node
        return (machine.inside if inside else machine.between).latency + size / (
            machine.inside.rate if inside else rate
        )

    passes = 2 + (step.checkpointing and config.recompute_attention)
    exchanges = 2 * (2 + step.checkpointing) * (moved.exchanged > 0)  # checkpoints exchange heads again
    halo = passes * seconds(0.0, config.size)  # a convolution's few tokens
    of_states = passes * seconds(moved.received, config.size) if moved.received else 0.0
    return layers.count * (halo + of_states + exchanges * seconds(moved.exchanged / 2, config.ulysses))


def optimiser_seconds(step: TrainingStep, machine: Machine) -> float:
    """Return the seconds of the optimizer's step, on the elements on the device and on those in host memory."""
    on_device = states(step.model, step.zero, step.world, ITEMSIZE[step.dtype]).elements_on_device
    on_host = _owned_parameters(step) - on_device
    rate = machine.host_rate / min(step.world, machine.per_node)
    host_bytes = (HOST_OPTIMISER_BYTES + ITEMSIZE[step.dtype]) * on_host
    return OPTIMISER_BYTES * on_device / machine.elementwise_rate + host_bytes / rate


def offload_seconds(step: TrainingStep, machine: Machine, hiding: tuple[float, float]) -> float:
    """Return the seconds of copies between a rank and its host that no computation hides. The link carries both
    directions at once.

    Args:
        step: The step.
        machine: The machine.
        hiding: Seconds of a layer (forward, backward) that can hide copies of pinned memory.
    """
    config, zero, layers, size = step.config, step.zero, step.model.layers, ITEMSIZE[step.dtype]
    rows, local_parameters = math.ceil(step.seq / config.size) * step.batch, _owned_parameters(step)
    on_host = local_parameters - states(step.model, zero, step.world, size).elements_on_device
    checkpoint = offloaded_again = 0
    if config.offload_checkpoints and step.checkpointing:
        saved = attention_figures(dataclasses.replace(step, mask=Mask())).saved
        saved = saved * step.model.attending // layers
        checkpoint = rows * step.model.hidden * size + (0 if config.recompute_attention else saved)
        # offloaded when a layer is computed again
        offloaded_again = saved if projecting_head_chunks(step) > 1 else 0
    fetched = local_parameters * size / layers if zero.parameters_away else 0.0
    # stage 3 copies gradients as they are computed, and once more in fp32
    gradients = (
        (MASTER * on_host + (size * local_parameters if zero.stage == 3 else 0)) / layers
        if zero.optimiser_away
        else 0.0
    )
    pinned = zero.offload_optimizer.pin_memory
    forward, backward = (
        max(checkpoint, fetched),
        offloaded_again + max(checkpoint + fetched, gradients if pinned else 0.0),
    )
    of_layer = sum(
        max(0.0, moved / machine.offload_rate - hidden)
        for moved, hidden in zip((forward, backward), hiding, strict=True)
    )
    not_hidden = 0.0 if pinned else layers * gradients  # bytes
    if zero.optimiser_away != zero.parameters_away:  # the new parameters are copied to where parameters are kept
        not_hidden += size * (on_host if zero.optimiser_away else local_parameters)
    return layers * of_layer + not_hidden / machine.offload_rate


def drive_seconds(step: TrainingStep, machine: Machine) -> float:
    """Return the seconds of drives: optimizer states are read and written once a step, parameters are read twice and
    written once."""
    if not step.zero.drives or machine.nvme_rate is None:
        return 0.0
    zero, local_parameters, moved = step.zero, _owned_parameters(step), 0
    if zero.offload_optimizer.device == "nvme":
        moved += DRIVE_BYTES * local_parameters
    if zero.offload_param.device == "nvme":
        moved += 3 * ITEMSIZE[step.dtype] * max(0, local_parameters - zero.offload_param.max_in_cpu)
    return moved * min(step.world, machine.per_node) / machine.nvme_rate


def _owned_parameters(step: TrainingStep) -> int:
    # the number of parameters whose states a rank has
    return step.model.parameters // (step.world if step.zero.stage else 1)


def attention_link_seconds(machine: Machine, world: int, attention: Price) -> float:
    """Return the seconds in which a layer's attention uses the links that ZeRO's collectives need. With several nodes
    these are the links between nodes."""
    if world <= machine.per_node:
        return attention.links
    rate = min(machine.between.rate, machine.uplink / machine.per_node if machine.uplink else math.inf)
    return min(attention.links, attention.between / rate)


def elementwise_bytes(step: TrainingStep) -> float:
    """Return the bytes that the elementwise operations of a layer's forward read and write for a token, one operation
    after another as transformers implements them."""
    m, size = step.model, ITEMSIZE[step.dtype]
    cast = 2 * (4 + size) if size < 4 else 0  # to fp32 and back
    norm = cast + 2 * 4 + 4 + 2 * 4 + 2 * size  # squares, their mean, times 1 / root, times weight
    rope = (2 + 1 + 2 + 2 + 3) * size  # times cos; half of it negated, and put together; times sin; added
    residual, activation = 3 * size, (2 + 3) * size  # silu, times
    rotated = (m.heads + m.kv_heads) * m.head_dim * m.attending / m.layers
    activated = m.intermediate * m.with_mlp / m.layers
    if m.states is not None:
        activated += m.states.kept * m.states.count / m.layers
    return 2 * m.hidden * (norm + residual) + rotated * rope + activated * activation


def hook_seconds(step: TrainingStep, machine: Machine, device: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds of ZeRO-3's hooks in a layer (forward, backward) during which the device waits. `device` is
    the seconds of its work in the layer (forward, backward), which hides hooks if the host works ahead."""
    if machine.zero is None or step.zero.stage < 3:
        return 0.0, 0.0
    forward, backward = LAYER_MODULES * machine.zero.forward, LAYER_MODULES * machine.zero.backward
    if step.checkpointing:
        backward += forward
    if not machine.ahead:
        return forward, backward
    return max(0.0, forward - device[0]), max(0.0, backward - device[1])


def gather_seconds(machine: Machine, world: int, size: float) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter, of `size` bytes over all ranks. Each node receives
    the shards of other nodes over all its links, and forwards them inside."""
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
    """Return the seconds of `count` collectives of `size` bytes in all: as measured, if the machine was measured on
    `world` ranks; else by its links. `kind` is "gather", "reduce" (a reduce-scatter) or "all_reduce"."""
    measured = machine.zero
    if measured is not None and measured.ranks == world:
        wire = {"gather": measured.gather, "reduce": measured.reduce, "all_reduce": measured.all_reduce}[kind]
        return count * wire.latency + size / wire.rate
    return (2 if kind == "all_reduce" else 1) * count * gather_seconds(machine, world, size / count)


def zero_seconds(step: TrainingStep, machine: Machine, hiding: tuple[float, float]) -> float:
    """Return the seconds of ZeRO's collectives that no computation hides. `hiding` is the seconds of a layer (forward,
    backward) that can hide transfers."""
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
    # stages 1 and 2 all-reduce buckets over all ranks too, unless use_multi_rank_bucket_allreduce is false
    seconds = collective_seconds(machine, world, "all_reduce", m.parameters * size)
    seconds = max(0.0, seconds - (m.layers * hiding[1] if overlaps and machine.ahead else 0.0)) + norm
    return seconds + (gather(m.parameters) if zero.stage else 0.0)  # of the new parameters


def zero_copied_bytes(step: TrainingStep) -> float:
    """Return the bytes that ZeRO reads and writes around its collectives, one operation after another as DeepSpeed
    implements them."""
    if step.world == 1:
        return 0.0
    gathered = 2 * 2 if step.zero.stage == 3 else 0  # copied out of the gathered buffer, in forward and in backward
    reduced = (0, 3 * 2, 3 * 2, 4 * 2)[step.zero.stage]  # into a bucket, divided, out of it; at stage 3 also reordered
    return (gathered + reduced) * ITEMSIZE[step.dtype] * step.model.parameters

"""How long a training step takes on a machine. Attention is simulated or bounded, everything else counted by its flops
and bytes, and the host by the modules that ZeRO hooks. Torch-free."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from ..compiler.balance import shards_of
from ..compiler.memory import Figures
from ..compiler.shape import ITEMSIZE
from ..compiler.shards import EvenShards, Shards
from .attention_call import AttentionCall
from .attention_memory import projecting_stages
from .lower_bound import LowerBound
from .machine import Machine
from .request import TrainingStep
from .states import MASTER, states

TIMES = {
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
    """parts: seconds by name, of `TIMES`; sequences: that are trained in them together."""

    parts: Mapping[str, float]
    sequences: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def call_of(step: TrainingStep) -> AttentionCall:
    """Attention of one layer of a step, on the heads of its first stage."""
    m, inner, stages = step.model, step.config.size // step.config.ulysses, step.config.head_stages
    kv_heads = math.ceil(m.kv_heads / stages)
    return AttentionCall(
        config=step.config,
        world=step.world,
        mask=step.mask,
        shards=_shards(step, inner),
        heads=(kv_heads * (m.heads // m.kv_heads), kv_heads, m.head_dim),
        dtype=step.dtype,
        batch=step.batch,
        stages=stages,
        kept=step.config.kept(stages, step.checkpointing, step.config.keep_attention),
    )


def _shards(step: TrainingStep, inner: int) -> Shards:
    if step.mask.documents:
        ends = (*step.mask.documents, step.seq)
        return shards_of(step.config.layout, tuple(b - a for a, b in itertools.pairwise(ends)), inner)
    return EvenShards(step.config.layout, step.seq, inner)


def step_time(
    step: TrainingStep, machine: Machine, forward: float, backward: float, kept: Figures | None = None,
    carried: tuple[float, float] = (0.0, 0.0),
) -> StepTime:  # fmt: skip
    """forward, backward: seconds of attention of one layer, all stages together. kept: of its memory, for what
    checkpoints bring to host memory. carried: of those, `attention_link_seconds`."""
    m, layers, dtype = step.model, step.model.layers, step.dtype
    rows = math.ceil(step.seq / step.config.size) * step.batch
    passes = 2 * (m.projections + m.mlp) * rows
    # backward computes each tile again, which is what a checkpoint does anyway
    tiled = 2 * m.mlp * rows if step.config.mlp_tiles != 1 and not step.checkpointing else 0
    if projecting_stages(step) > 1 and not (step.checkpointing and step.config.keep_attention):  # and so do stages
        tiled += 2 * m.hidden * (m.heads + 2 * m.kv_heads) * m.head_dim * rows
    again = step.checkpointing and not step.config.keep_attention
    touched = rows * elementwise_bytes(step)
    small = touched / machine.elementwise_rate  # of a pass, beside matrices; backward has twice as much
    work = machine.gemm_seconds(dtype, passes) + small, machine.gemm_seconds(dtype, 2 * passes + tiled) + 2 * small
    once = work[0] if step.checkpointing else 0.0
    attention = forward, backward + (forward if again else 0.0)
    device = attention[0] + work[0], attention[1] + work[1] + once  # of a layer
    hooks = hook_seconds(step, machine, device)
    beside = tuple(
        max(0.0, took + host - links) for took, host, links in zip(device, hooks, carried, strict=True)
    )  # of a layer, which transfers can run beside
    parts = {
        "attention forward": layers * attention[0],
        "attention backward": layers * attention[1],
        "matrices": layers * machine.gemm_seconds(dtype, (3 + step.checkpointing) * passes + tiled),
        "elementwise": (layers * (3 + step.checkpointing) * touched + rows * m.vocab * LOGIT_BYTES)
        / machine.elementwise_rate,
        "logits": machine.gemm_seconds(dtype, 3 * 2 * m.embedding * rows),
        "host": layers * sum(hooks) + (OTHER_MODULES / LAYER_MODULES * sum(hook_seconds(step, machine, (0.0, 0.0)))
                                       if not machine.ahead else 0.0),
        "ZeRO": zero_seconds(step, machine, (beside[0], beside[1])),
        "copies": zero_copied_bytes(step) / machine.elementwise_rate,
        "optimiser": optimiser_seconds(step, machine),
        "offload": offload_seconds(step, machine, kept, (beside[0], beside[1])),
        "drives": drive_seconds(step, machine),
    }  # fmt: skip
    return StepTime(parts, step.world // step.config.size * step.batch)


def optimiser_seconds(step: TrainingStep, machine: Machine) -> float:
    """Of the elements that stay on the device, and of those that its host steps."""
    own = _owned_parameters(step)
    elements_on_device = states(step.model, step.zero, step.world, ITEMSIZE[step.dtype]).elements_on_device
    each = HOST_OPTIMISER_BYTES + ITEMSIZE[step.dtype]
    rate = machine.host_rate / min(step.world, machine.per_node)
    return OPTIMISER_BYTES * elements_on_device / machine.elementwise_rate + each * (own - elements_on_device) / rate


def offload_seconds(step: TrainingStep, machine: Machine, kept: Figures | None, beside: tuple[float, float]) -> float:
    """Of copies between a rank and its host, which has a link that carries both ways at once. kept: of attention's
    memory, for what checkpoints bring there; beside: seconds of a layer, forward and backward, that copies of pinned
    memory run beside."""
    config, zero, layers, size = step.config, step.zero, step.model.layers, ITEMSIZE[step.dtype]
    rows, own = math.ceil(step.seq / config.size) * step.batch, _owned_parameters(step)
    is_offloaded = own - states(step.model, zero, step.world, size).elements_on_device
    checkpoint = lent = 0
    if config.offload_checkpoints and step.checkpointing:
        checkpoint = rows * step.model.hidden * size + (kept.kept if kept and config.keep_attention else 0)
        lent = kept.kept if kept and projecting_stages(step) > 1 else 0  # from when a layer is computed again
    fetched = own * size / layers if zero.parameters_away else 0.0
    # stage 3 brings gradients as they come, and once more in fp32
    gradients = (
        (MASTER * is_offloaded + (size * own if zero.stage == 3 else 0)) / layers if zero.optimiser_away else 0.0
    )
    pinned = zero.offload_optimizer.pin_memory
    forward, backward = max(checkpoint, fetched), lent + max(checkpoint + fetched, gradients if pinned else 0.0)
    found = sum(
        max(0.0, moved / machine.offload_rate - room) for moved, room in zip((forward, backward), beside, strict=True)
    )
    alone = 0.0 if pinned else layers * gradients
    if zero.optimiser_away != zero.parameters_away:  # the new parameters are not where they are kept
        alone += size * (is_offloaded if zero.optimiser_away else own)
    return layers * found + alone / machine.offload_rate


def drive_seconds(step: TrainingStep, machine: Machine) -> float:
    """Of states on drives: the optimiser's once a step; parameters are read twice, and written."""
    if not step.zero.drives or machine.nvme_rate is None:
        return 0.0
    zero, own, moved = step.zero, _owned_parameters(step), 0
    if zero.offload_optimizer.device == "nvme":
        moved += DRIVE_BYTES * own
    if zero.offload_param.device == "nvme":
        moved += 3 * ITEMSIZE[step.dtype] * max(0, own - zero.offload_param.max_in_cpu)
    return moved * min(step.world, machine.per_node) / machine.nvme_rate


def _owned_parameters(step: TrainingStep) -> int:
    """Parameters whose states a rank has."""
    return step.model.parameters // (step.world if step.zero.stage else 1)


def attention_link_seconds(machine: Machine, world: int, attention: LowerBound) -> float:
    """How long attention of a layer has the links busy that ZeRO's collectives wait for: those between nodes, where
    there are any."""
    if world <= machine.per_node:
        return attention.links
    rate = min(machine.between.rate, machine.uplink / machine.per_node if machine.uplink else math.inf)
    return min(attention.links, attention.between / rate)


def elementwise_bytes(step: TrainingStep) -> float:
    """Bytes that a layer's forward reads and writes for a token where it multiplies no matrix, operation by operation
    as transformers writes it."""
    m, size = step.model, ITEMSIZE[step.dtype]
    cast = 2 * (4 + size) if size < 4 else 0  # to fp32 and back
    norm = cast + 2 * 4 + 4 + 2 * 4 + 2 * size  # squares, their mean, times 1 / root, times weight
    rope = (2 + 1 + 2 + 2 + 3) * size  # times cos; half of it negated, and put together; times sin; added
    residual, activation = 3 * size, (2 + 3) * size  # silu, times
    rotated = (m.heads + m.kv_heads) * m.head_dim
    return 2 * m.hidden * (norm + residual) + rotated * rope + m.intermediate * activation


def hook_seconds(step: TrainingStep, machine: Machine, device: tuple[float, float]) -> tuple[float, float]:
    """Of the host in a layer, forward and backward, that its device (so many seconds) does not work beside."""
    if machine.zero is None or step.zero.stage < 3:
        return 0.0, 0.0
    ahead, back = LAYER_MODULES * machine.zero.forward, LAYER_MODULES * machine.zero.backward
    found = ahead, back + (ahead if step.checkpointing else 0.0)
    if not machine.ahead:
        return found
    return max(0.0, found[0] - device[0]), max(0.0, found[1] - device[1])


def gather_seconds(machine: Machine, world: int, size: float) -> float:
    """Of an all-gather after which each of all ranks has `size` bytes, or of a reduce-scatter of as many. Every node
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


def collective_seconds(machine: Machine, world: int, kind: str, size: float, count: float = 1) -> float:
    """Of `count` collectives of so many bytes together: "gather", "reduce" (a reduce-scatter) or "all_reduce". As they
    were measured on so many ranks, else by the links."""
    its = machine.zero
    if its is not None and its.ranks == world:
        wire = {"gather": its.gather, "reduce": its.reduce, "all_reduce": its.all_reduce}[kind]
        return count * wire.latency + size / wire.rate
    return (2 if kind == "all_reduce" else 1) * count * gather_seconds(machine, world, size / count)


def zero_seconds(step: TrainingStep, machine: Machine, beside: tuple[float, float]) -> float:
    """beside: seconds of a layer, forward and backward, that transfers can run beside."""
    m, zero, size, world = step.model, step.zero, ITEMSIZE[step.dtype], step.world
    if world == 1:
        return 0.0

    def gather(parameters: int) -> float:
        return collective_seconds(machine, world, "gather", parameters * size)

    def reduction(parameters: int) -> float:
        count = max(1.0, parameters / zero.reduce_bucket_size)
        return collective_seconds(machine, world, "reduce", parameters * size, count)

    rest = max(0, m.parameters - m.layers * m.layer_parameters)
    overlaps = zero.overlap_comm if zero.overlap_comm is not None else zero.stage == 3
    norm = collective_seconds(machine, world, "all_reduce", 4.0)  # of gradients, which clipping needs
    if zero.stage == 3:
        layer = gather(m.layer_parameters)
        # what bytes on their way take of the work beside them
        lent = machine.stolen * 2 * size * (world - 1) / world * m.layer_parameters
        ends = norm + 2 * gather(rest)
        if machine.ahead:
            room = beside if overlaps else (0.0, 0.0)
            layers = max(lent, layer - room[0]) + max(lent, layer + reduction(m.layer_parameters) - room[1])
            ends += reduction(rest)
        else:  # without streams DeepSpeed waits for a reduction as soon as it starts, for a gather where it is needed
            layers = max(lent, layer - beside[0]) + max(lent, layer - beside[1])
            ends += reduction(m.parameters)
        return m.layers * layers + ends
    # stages 1 and 2 reduce buckets on all ranks too, unless they are told not to (use_multi_rank_bucket_allreduce)
    took = collective_seconds(machine, world, "all_reduce", m.parameters * size)
    took = max(0.0, took - (m.layers * beside[1] if overlaps and machine.ahead else 0.0)) + norm
    return took + (gather(m.parameters) if zero.stage else 0.0)  # and then the new parameters


def zero_copied_bytes(step: TrainingStep) -> float:
    """Read and written by ZeRO around its collectives, operation by operation as DeepSpeed writes it."""
    if step.world == 1:
        return 0.0
    gathered = 2 * 2 if step.zero.stage == 3 else 0  # twice, out of what came
    reduced = (0, 3 * 2, 3 * 2, 4 * 2)[step.zero.stage]  # to a bucket, divided, and out of it; stage 3: put in order
    return (gathered + reduced) * ITEMSIZE[step.dtype] * step.model.parameters

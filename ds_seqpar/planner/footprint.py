"""Predict a rank's memory, item by item, in a training step of a LLaMA-like model.

A step has a few moments at which memory can peak. The memory at each moment is a sum of items, and the largest sum is
the peak. Layers are modeled operation by operation, as implemented in transformers (norms in fp32, RoPE, gate, up,
down). Attention is modeled on the basis of its programs, and states and buffers are modeled as DeepSpeed allocates
them. Only the bytes of tensors are counted, not the memory that an allocator or a kernel uses internally.
docs/memory.md contains the formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from ..analysis.memory import Figures
from ..base.errors import ConfigError
from ..core.compiler.program.shape import ITEMSIZE
from ..core.compiler.sharding.layout import multiple
from ..core.settings import HOST_PIECE, SequenceParallelConfig, most_logits
from ..deepspeed.config import Zero
from . import limits
from .attention_memory import attention_figures, is_offloaded, projecting_head_chunks, tokens_on_rank
from .request import MemoryBudget, Model, TrainingStep
from .state_memory import state_bytes

FOOTPRINT_ITEMS = {
    "parameters": "the rank's share of parameters, with fp32 copies",
    "reference": "parameters of the reference model",
    "gradients": "the rank's share of gradients, and whole ones that are not yet reduced",
    "optimizer": "its states, and buffers of its step",
    "buckets": "ZeRO's buffer for gradients that it sends",
    "gathered": "parameters that ZeRO-3 has gathered whole",
    "checkpoints": "inputs of layers; without checkpointing all that layers save",
    "kept attention": "attention's results and states, which checkpoints keep",
    "layer": "norms, projections, residuals and their gradients, of the layer being computed",
    "attention": "buffers of its attention and its messages",
    "state": "what a layer with a state projects, and states that arrive",
    "mlp": "its MLP",
    "tower": "what makes features of images: its layers, and embeddings of all tokens with the features",
    "loss": "logits, their softmax and gradient",
    "cache": "keys and values of the rows that the rank generates",
}
ACTIVATIONS = ("checkpoints", "kept attention", "layer", "attention", "mlp")  # items that a tower's layers contribute
ENDS = 6  # memory of pixels, positions, norm and projector, as a multiple of a layer's input
TILE = (4096, 32768)  # number of tokens and of vocabulary entries in a tile of trl's fused head
HOST_ITEMS = {
    "parameters": "fp32 copies, or shares of parameters",
    "reference": "shares of the reference model's parameters",
    "gradients": "of the rank's share, for the optimizer that works there",
    "optimizer": "its states",
    "buffers": "between drives and the device",
    "checkpoints": "inputs of layers",
    "kept attention": "attention's results, which checkpoints keep",
    "rounding": "torch rounds each pinned tensor up to a power of two",
}


@dataclasses.dataclass(frozen=True)
class Moment:
    """Memory at one moment during a step."""

    name: str
    bytes_by_item: Mapping[str, int]  # keyed by `FOOTPRINT_ITEMS`, or by `HOST_ITEMS` for host memory

    @property
    def total(self) -> int:
        return sum(self.bytes_by_item.values())


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A rank's memory."""

    resting: Moment  # memory between steps
    moments: tuple[Moment, ...]  # moments during a step
    host: Moment  # host memory used in addition
    drives: int = 0  # bytes on drives

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def footprint(step: TrainingStep, attention: Figures | None = None) -> Footprint:
    """Return a step's memory on the rank that needs the most memory.

    `attention` is the memory of one layer's attention. The default is `attention_figures(step)`.
    """
    memory = _StepMemory(step)
    if attention is not None:
        memory.attention = attention
    return memory.footprint()


def rank_bytes(memory: Footprint, budget: MemoryBudget) -> int:
    """Return a rank's peak memory in bytes, including host memory if ranks have no device memory."""
    host = 0 if budget.apart else memory.host.total - memory.host.bytes_by_item.get("rounding", 0)
    return memory.peak.total + host


def fits_host(memory: Footprint, budget: MemoryBudget) -> bool:
    """Return whether a node's host has enough memory for the node's ranks."""
    return not budget.apart or memory.host.total * budget.ranks_per_node <= budget.host


def fits(memory: Footprint, budget: MemoryBudget) -> bool:
    return rank_bytes(memory, budget) <= budget.limit and fits_host(memory, budget)


class Longest(NamedTuple):
    """Longest sequence that fits in memory."""

    tokens: int  # 0 if no length fits
    full: str  # memory that a longer sequence would exceed, "rank" or "host"; "": longer sequences are not allowed


def longest(step: TrainingStep, budget: MemoryBudget) -> Longest:
    """Find the longest sequence that fits in memory, by bisection to within 0.1 %."""
    unit = multiple(step.config.layout, step.config.size, step.config.ulysses)

    def memory_of(units: int) -> Footprint:
        return footprint(dataclasses.replace(step, seq=units * unit))

    fitting, too_long = 0, math.ceil(step.seq / unit)
    while too_long * unit <= limits.MAX_TOKENS and fits(memory_of(too_long), budget):
        fitting, too_long = too_long, 2 * too_long
    while fitting == 0 and too_long > 1 and not fits(memory_of(too_long // 2), budget):
        too_long //= 2
    fitting = fitting or too_long // 2
    while too_long - fitting > max(1, fitting // 1000):
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if fits(memory_of(middle), budget) else (fitting, middle)
    if too_long * unit > limits.MAX_TOKENS:
        return Longest(fitting * unit, "")
    return Longest(fitting * unit, "rank" if rank_bytes(memory_of(too_long), budget) > budget.limit else "host")


def bytes_a_token(step: TrainingStep) -> float:
    """Return the number of bytes by which one more token per rank raises the peak, averaged up to twice the current
    length.
    """
    short = _StepMemory(step)
    padded = short.tokens * step.config.size  # ranks can share this length equally
    long = _StepMemory(dataclasses.replace(step, seq=2 * padded))
    return (long.footprint().peak.total - short.footprint().peak.total) / (long.rows - short.rows)


def cache_bytes(step: TrainingStep, tokens: int) -> int:
    """Return the size in bytes of the keys and values that the busiest rank keeps for a prompt with this number of
    tokens.
    """
    m, config = step.model, step.config
    if m.states is not None:
        raise ConfigError(
            "--prompt is of models all of whose layers attend; got one with layers that have a state or a convolution, "
            "leave it out"
        )
    unit = multiple(config.layout, config.size, config.ulysses)  # prompts are padded to a length that ranks can share
    kept = -(-tokens // unit) * unit // config.size
    if step.mask.window is not None:
        kept = min(kept, step.mask.window)  # one rank may hold all tokens in a window
    picked = m.index.layers * m.index.latent + m.index.own * m.index.keys if m.index else 0
    return (picked + m.dense * 2 * m.kv_heads * m.head_dim) * ITEMSIZE[step.dtype] * kept


def _named_moment(name: str, bytes_by_item: Mapping[str, int], items: Mapping[str, str] = FOOTPRINT_ITEMS) -> Moment:
    return Moment(name, {item: bytes_by_item[item] for item in items if bytes_by_item.get(item)})


class _StepMemory:
    """Memory use over the course of a step."""

    def __init__(self, step: TrainingStep) -> None:
        self.step, self.model, self.zero, self.config = step, step.model, step.zero, step.config
        m, self.size = step.model, ITEMSIZE[step.dtype]  # size: number of bytes per element
        self.tokens, self.head_chunks = tokens_on_rank(step), projecting_head_chunks(step)
        self.rows = self.tokens * step.batch
        # size in bytes of a rank's tensors with these widths
        self.hidden = self.rows * m.hidden * self.size
        self.q = self.rows * m.heads * m.head_dim * self.size
        self.kv = self.rows * (m.index.latent if m.index else 2 * m.kv_heads * m.head_dim) * self.size
        self.mlp = self.rows * m.intermediate * self.size
        # size in bytes of an fp32 copy of the hidden states, since norms compute in fp32; 0 if hidden states are fp32
        self.fp32_copy = self.rows * m.hidden * 4 if self.size < 4 else 0
        tiled = self.mlp_tiles() > 1  # if the MLP is tiled, norms are also tiled
        # saved by a norm in addition to its input
        self.norm = self.hidden if tiled else self.fp32_copy + 2 * self.hidden
        # a norm's input; 0 if the norm saves an fp32 copy
        self.residual = 0 if self.fp32_copy and not tiled else self.hidden
        self.rope = 2 * self.rows * m.head_dim * self.size
        self.keeps = step.checkpointing and not step.config.recompute_attention
        self.state = state_bytes(step)

    @functools.cached_property
    def attention(self) -> Figures:
        return attention_figures(self.step)

    # ---- the tower

    @functools.cached_property
    def tower(self) -> _StepMemory | None:
        """Memory of a tower's layers, modeled as a separate model that processes the rank's own images."""
        step, tower, images = self.step, self.model.tower, self.step.images
        if tower is None or images is None:
            return None
        alone = SequenceParallelConfig(recompute_attention=True, size=1).resolve(step.world)
        seq = images.of_rank(self.config, step.batch) * images.patches
        return _StepMemory(TrainingStep(
            model=tower.layers, config=alone, world=step.world, seq=seq, dtype=step.dtype, zero=step.zero,
            checkpointing=step.checkpointing, on_gpu=step.on_gpu,
        ))  # fmt: skip

    @functools.cached_property
    def of_tower(self) -> int:
        """Bytes kept for the tower's backward pass: its layers, the part before the layers, and the projector."""
        return sum(self.tower.layers(self.tower.model.layers).values()) + ENDS * self.tower.hidden if self.tower else 0

    @property
    def whole(self) -> int:
        """Size in bytes of all token embeddings, with image features inserted, which every rank holds."""
        return self.hidden * self.config.size if self.tower else 0

    def tower_moments(self, backward: bool) -> list[Moment]:
        """Return the tower's moments: its last layer in the forward pass, or its last and first layers in the backward
        pass.
        """
        if self.tower is None:
            return []
        m, tower, last = self.model, self.tower, self.tower.model.layers
        found = [x for end in (last, 1) for x in tower.backward(end)] if backward else tower.forward()
        most = max(sum(moment.bytes_by_item.get(item, 0) for item in ACTIVATIONS) for moment in found)
        done = m.parameters - m.embedding if backward else 0
        name, gathered = (
            "backward: tower" if backward else "forward: tower",
            self.gathered(tower.model.layer_parameters),
        )
        embeddings = self.moment(
            f"{name}, features", done=done, tower=self.of_tower + 3 * self.whole, gathered=m.embedding
        )
        return [self.moment(name, done=done, gathered=gathered, tower=most + self.whole), embeddings]

    # ---- states

    def share(self, stage: int) -> int:
        """Return the number of ranks that share a state that ZeRO shards at `stage` and above."""
        return self.step.world if self.zero.stage >= stage else 1

    @functools.cached_property
    def states(self) -> States:
        step = self.step
        return states(self.model, self.zero, step.world, self.size, step.objective.reference, step.optimizer_states)

    def moment(self, name: str, *, done: int = 0, gathered: int = 0, grads: int = 0, **items: int) -> Moment:
        """Return a moment during the step.

        Args:
            name: Name of the moment, such as "forward".
            done: Number of parameters whose gradients exist.
            gathered: Number of parameters that ZeRO-3 has gathered.
            grads: Bytes of gradients that have not been reduced yet.
            **items: Bytes for other items.
        """
        bytes_by_item = dict(self.states.device)
        stage = self.zero.stage
        if name.startswith("backward") and stage in (1, 2):
            buffers = 2 if self.zero.overlap_comm else 1
            bytes_by_item["buckets"] = self.zero.reduce_bucket_size * self.size * buffers
        if stage < 3 and not (stage == 2 and self.zero.optimizer_away):
            bytes_by_item["gradients"] += self.trained(done) * self.size // self.share(2)
        bytes_by_item["gradients"] = bytes_by_item.get("gradients", 0) + self.trained(grads)
        if stage == 3:
            bytes_by_item["gathered"] = gathered * self.size
        for keyword, size in items.items():
            item = keyword.replace("_", " ")
            bytes_by_item[item] = bytes_by_item.get(item, 0) + size
        return _named_moment(name, bytes_by_item)

    def trained(self, count: int) -> int:
        """Return the trained part of the given number of parameters or bytes."""
        return count * _trained(self.model) // self.model.parameters

    def gathered(self, needed: int, matrices: int = 1) -> int:
        """Return the number of parameters that ZeRO-3 keeps gathered while `needed` parameters are in use.

        ZeRO-3 also keeps parameters that will soon be reused, prefetches later parameters, and gathers `matrices` MLP
        matrices together.
        """
        zero, matrix = self.zero, self.model.hidden * self.model.intermediate
        free = max(0, zero.max_live_parameters - needed)
        kept_or_prefetched = max(zero.prefetch_bucket_size, zero.max_reuse_distance)
        return min(self.model.parameters, needed + min(free, kept_or_prefetched) + matrices * matrix * (free > 0))

    # ---- activations

    def mlp_tiles(self) -> int:
        tiles = self.config.mlp_tiles
        return math.ceil(self.rows / self.model.hidden) if tiles == "auto" else min(tiles, self.tokens)

    def loss_tiles(self) -> int:
        tiles, m = self.config.loss_tiles, self.model
        if tiles != "auto":
            return min(tiles, self.tokens)
        return math.ceil(self.rows * m.vocab * 4 / most_logits(m.vocab, m.hidden))

    @property
    def saved_attention(self) -> int:
        """Bytes that attention saves for the backward pass: q, k and v (local or exchanged), out and lse.

        Head chunks recompute their projections instead of saving local q, k and v.
        """
        if self.head_chunks > 1:
            return 0 if is_offloaded(self.step) else self.attention.saved
        return self.attention.saved + (self.q + self.kv) * self.attention.inputs

    @property
    def saved_mixer(self) -> int:
        """Bytes that a layer saves for the backward pass of its attention, its state, or both."""
        m = self.model
        attention, states = self.saved_attention * (m.attending > 0), self.state.saved
        has_both = m.states is not None and m.attending + m.states.count > m.layers
        return attention + states if has_both else max(attention, states)

    @property
    def saved(self) -> int:
        """Mean number of bytes that a layer saves for its backward pass, including its input."""
        mlp = 4 * self.mlp if self.mlp_tiles() == 1 else 0
        mixers = self.mean(self.saved_attention, self.state.saved, mlp)
        return 2 * (self.residual + self.norm) + mixers

    def mean(self, attention: int, states: int = 0, mlp: int = 0) -> int:
        """Return the mean number of bytes per layer, given the bytes for layers that attend, have a state, or have an
        MLP.
        """
        m = self.model
        of_states = m.states.count * states if m.states else 0
        return (m.attending * attention + of_states + m.with_mlp * mlp) // m.layers

    def layers(self, count: int, running: bool = False) -> dict[str, int]:
        """Return the bytes, by item, that `count` layers hold for the backward pass.

        If `running` is true, the last layer is still being computed.
        """
        if not self.step.checkpointing:
            held = {"checkpoints": (count - running) * self.saved + self.rope + (self.hidden if running else 0)}
        elif self.config.offload_checkpoints:
            held = {"checkpoints": self.rope + 2 * self.hidden}
        else:
            kept = self.mean(self.attention.saved, self.state.entering) * (count - running) if self.keeps else 0
            held = {"checkpoints": count * self.hidden + self.rope, "kept_attention": kept}
        return {**held, "tower": self.of_tower}

    def forward(self, name: str = "forward", **held: int) -> list[Moment]:
        """Return the moments of the last layer's forward pass, during which the largest number of layers hold tensors.

        `held` contains the bytes of other items, and defaults to the bytes held by all layers.
        """
        m = self.model
        if not held:
            held = self.layers(m.layers, running=True)
            held["tower"] += self.whole
        gathered = self.gathered(m.layer_parameters)
        saved = 0 if self.step.checkpointing else 1
        tiles = self.mlp_tiles()
        # head chunks are accumulated into one output
        output = self.hidden if self.head_chunks > 1 else self.q + self.kv
        layer = self.hidden + output + saved * (self.norm - self.hidden)
        kept = self.attention.saved * (m.attending > 0) if self.keeps else 0
        kept = kept if self.step.checkpointing else self.saved_mixer
        after = (3 + saved) * self.mlp if tiles == 1 else 3 * self.mlp // tiles + self.hidden
        # the head's weights are prefetched and copied out of the gathered buffer
        head = 2 * m.embedding if self.zero.prefetch_bucket_size else 0
        return [
            self.moment(f"{name}: attention", gathered=gathered, layer=layer, attention=self.attention.forward, **held),
            self.moment(
                f"{name}: MLP", gathered=gathered + head,
                layer=2 * self.hidden + saved * 2 * self.norm,
                attention=kept, mlp=after, **held,
            ),
        ]  # fmt: skip

    def reference(self) -> list[Moment]:
        """Return the moments of the reference model, whose layers keep no tensors for a backward pass.

        trl trainers that generate completions run the reference model before the policy's forward pass. Other trainers
        run the reference model afterwards.
        """
        step, held = self.step, {"checkpoints": self.rope}
        if not step.objective.generated:
            held = self.layers(self.model.layers)
            held["checkpoints"] += self.norm + self.residual
        config = dataclasses.replace(self.config, recompute_attention=True, offload_checkpoints=False)
        alone = dataclasses.replace(step, checkpointing=True, config=config)
        return _StepMemory(alone).forward("reference", **held)

    def tile(self, forward: bool) -> int:
        """Return the size in bytes of a tile of logits in trl's fused head.

        Without Triton, torch also copies the used part of the tile.
        """
        rows, vocab = min(self.rows, TILE[0]), min(self.model.vocab, TILE[1])
        copies = 0.0 if self.step.objective.triton else 3.25 if forward else 7.25
        return rows * TILE[1] * self.size + int(copies * rows * vocab * 4)

    def fused_head(self) -> list[Moment]:
        m = self.model
        held = {**self.layers(m.layers), "gathered": self.gathered(m.embedding)}
        # the Triton head copies the tokens that count toward the loss
        end = self.norm + self.residual + self.hidden * self.step.objective.triton
        width = self.rows * m.hidden
        grads, fp32 = m.embedding * 4, width * 4  # gradients of the head and of the hidden states
        cast = self.size if self.fp32_copy else 0
        return [
            self.moment("forward: loss", layer=end, loss=self.tile(forward=True), **held),
            self.moment("backward: loss", grads=grads, layer=end + fp32, loss=self.tile(forward=False), **held),
            self.moment("backward: head", grads=grads + cast * m.embedding, layer=end + fp32 + cast * width, **held),
        ]

    def generation(self) -> list[Moment]:
        """Return the moments of `generate`, which each rank calls on its own with all parameters.

        All parameters are gathered by trl's `ds3_gather_for_generation`. The moments are the last layer's forward pass
        for the prompts, and the forward pass for the last token.
        """
        m, objective = self.model, self.step.objective
        row = objective.row(self.step.seq)
        rows, prompt = -(-objective.generated // self.config.size), row - objective.completion
        layer = rows * 2 * m.kv_heads * m.head_dim * self.size  # keys and values for a token
        # padding needs a mask over all token pairs, as bools and, in attention, as numbers
        tokens, mask = rows * prompt * self.size, rows * prompt**2
        mlp = tokens * (4 * m.hidden + 3 * m.intermediate) + mask
        attention = tokens * 3 * (m.hidden + m.heads * m.head_dim) + (1 + self.size) * mask
        return [
            self.moment(
                "generation: prompts", gathered=m.parameters, layer=max(mlp, attention),
                cache=m.attending * layer * prompt,
            ),
            self.moment(  # a longer cache replaces a layer's previous cache
                "generation: last token", gathered=m.parameters, cache=(m.attending * layer + layer // 2) * row,
                loss=3 * 4 * rows * m.vocab,
            ),
        ]  # fmt: skip

    def loss(self) -> list[Moment]:
        if self.step.objective.head != "logits":
            return self.fused_head() if self.step.objective.head == "fused" else []
        m, tiles = self.model, self.loss_tiles()
        held = self.layers(m.layers)
        gathered = self.gathered(m.embedding)
        logits = math.ceil(self.tokens / tiles) * self.step.batch * m.vocab
        end, head = self.norm + self.residual, m.embedding * self.size
        if tiles > 1:  # gradients are computed in the forward pass; in fp16, tiles are recomputed in the backward pass
            sums, late = m.embedding * 4, self.step.dtype == "float16"
            common = {"gathered": gathered, "layer": end + self.hidden}
            return [
                self.moment(
                    f"{'backward' if late else 'forward'}: loss", grads=sums, loss=12 * logits, **common, **held
                ),
                self.moment("backward: head", grads=sums + (head if self.fp32_copy else 0), **common, **held),
            ]
        cast = self.size if self.fp32_copy else 0  # logits in their original dtype, in addition to the fp32 logits
        return [
            self.moment("forward: loss", gathered=self.gathered(0), layer=end, loss=logits * (8 + cast), **held),
            self.moment("backward: loss", gathered=gathered, layer=end, loss=12 * logits, **held),
            self.moment(
                "backward: logits", gathered=gathered, grads=head, layer=end + self.hidden, loss=self.size * logits,
                **held,
            ),
        ]  # fmt: skip

    def backward(self, index: int) -> list[Moment]:
        """Return the moments of the backward pass through layer `index`, counted from 1."""
        m, attention = self.model, self.attention
        held = self.layers(index, running=True)
        prefetched = m.embedding if index == 1 else 0
        matrices = 1 if self.mlp_tiles() == 1 else 3  # ZeRO-3 gathers a tiled MLP as a whole, as a leaf module
        gathered = self.gathered(m.layer_parameters, matrices) + prefetched
        tower_parameters = m.tower.layers.parameters if m.tower else 0
        done = m.parameters - tower_parameters - m.embedding - index * m.layer_parameters
        # the head's gradient is kept until the embedding's gradient exists
        tied = m.embedding * self.size if m.tied else 0
        place = f"layer {index}"
        tiles = self.mlp_tiles()
        whole = self.hidden + self.residual + 2 * self.norm
        weight = m.hidden * m.intermediate
        tile = 6 * self.mlp // tiles + self.hidden * (tiles > 1)  # includes the gradient of a tiled MLP's input
        sums = weight * (self.size if tiles == 1 else 12 + self.size)
        moments = [
            self.moment(
                f"backward: {place}, MLP", done=done, gathered=gathered, grads=tied + sums, layer=whole,
                attention=self.saved_mixer, mlp=tile, **held,
            ),
            self.moment(
                f"backward: {place}, attention", done=done, gathered=gathered, grads=tied,
                layer=self.hidden + self.norm + (self.q if self.head_chunks == 1 else self.hidden),
                attention=attention.backward + (self.q + self.kv) * attention.inputs * (self.head_chunks == 1), **held,
            ),
        ]  # fmt: skip
        if self.step.checkpointing and not self.keeps:
            moments.append(
                self.moment(
                    f"backward: {place}, attention once more", done=done, gathered=gathered, grads=tied,
                    layer=self.hidden + self.norm
                    + (self.q + self.kv if self.head_chunks == 1 else self.hidden),
                    attention=attention.forward, **held,
                )
            )  # fmt: skip
        if m.states is not None:  # doubled for gradients
            layer, state = self.hidden + self.norm, 2 * self.state.saved + self.state.received
            held = {"layer": layer, "state": state, **held}
            moments.append(self.moment(f"backward: {place}, state", done=done, gathered=gathered, grads=tied, **held))
        return moments

    def ends(self) -> list[Moment]:
        m, zero = self.model, self.zero
        head = m.embedding * self.size
        waiting = min(zero.reduce_bucket_size, m.parameters) * self.size if zero.stage else 0
        whole = head * (3 if m.tied else 1)
        fp32_shard = self.states.elements_on_device * 4
        return [
            self.moment(
                "backward: embedding", done=m.parameters, gathered=self.gathered(m.embedding), grads=whole,
                layer=self.hidden + self.rope,
            ),
            self.moment("backward: gradients on their way", done=m.parameters, grads=waiting, gathered=m.embedding),
            self.moment(
                "step of the optimizer", done=0 if zero.optimizer_away else m.parameters,
                optimizer=(1 + self.step.optimizer_states) * fp32_shard,
            ),
        ]  # fmt: skip

    def footprint(self) -> Footprint:
        layers = self.model.layers
        ends = dict.fromkeys((layers, 1))
        moments = [
            *(self.generation() if self.step.objective.generated else []),
            *(self.reference() if self.step.objective.reference else []),
            *self.tower_moments(backward=False),
            *self.forward(),
            *self.loss(),
            *(moment for index in ends for moment in self.backward(index)),
            *self.tower_moments(backward=True),
            *self.ends(),
        ]
        counts = {"attention": self.model.attending, "MLP": self.model.with_mlp}
        absent = [kind for kind, count in counts.items() if not count]
        moments = [moment for moment in moments if not any(kind in moment.name for kind in absent)]
        host, pinned = dict(self.states.host), list(self.states.pinned)
        if self.config.offload_checkpoints and self.step.checkpointing:
            kept = self.kept_tensors if self.keeps else []
            host["checkpoints"] = layers * self.hidden
            host["kept attention"] = layers * self.mean(sum(kept), self.state.entering * self.keeps) or (
                self.attention.saved if self.head_chunks > 1 else 0
            )
            pinned += [(layers, size % HOST_PIECE) for size in (self.hidden, *kept)]
        host["rounding"] = sum(count * (pinned_bytes(size) - size) for count, size in pinned)
        in_host = _named_moment("in host memory", host, HOST_ITEMS)
        return Footprint(
            _named_moment("between steps", self.states.device), tuple(moments), in_host, self.states.drives
        )

    @property
    def kept_tensors(self) -> list[int]:
        """Size in bytes of each attention tensor that a checkpoint keeps: out, lse and, with Ulysses, also q, k and
        v.
        """
        out = min(self.q, self.attention.saved)
        lse = min(self.rows * self.model.heads * 4, self.attention.saved - out)
        exchanged = self.attention.saved - out - lse
        q = min(self.q, exchanged)
        return [out, lse, q, (exchanged - q) // 2, exchanged - q - (exchanged - q) // 2]


# ---- states that ZeRO keeps between steps

MASTER = 4  # bytes per element of an fp32 copy, its gradient, or an optimizer state such as Adam's moments


@dataclasses.dataclass(frozen=True)
class States:
    """The states that a rank keeps between steps."""

    device: Mapping[str, int]  # bytes in the rank's memory, by item
    host: Mapping[str, int]  # bytes in host memory, by item
    pinned: tuple[tuple[int, int], ...]  # pinned tensors in host memory, as (count, bytes per tensor)
    elements_on_device: int  # number of elements in the rank's shard whose optimizer states are on the device
    drives: int = 0  # bytes on drives


def pinned_bytes(size: int) -> int:
    """Return the number of bytes that torch allocates for pinned memory of this size, which is the next power of
    two.
    """
    return 1 << (size - 1).bit_length() if size else 0


def _trained(model: Model) -> int:
    return model.parameters if model.trained is None else model.trained


def states(
    model: Model, zero: Zero, world: int, size: int, reference: bool = False, optimizer_states: int = 2
) -> States:
    """Return the states that one rank keeps between steps.

    ZeRO makes fp32 copies of fp32 parameters too. At stage 0, DeepSpeed copies only 16-bit parameters.

    Args:
        model: The trained model.
        zero: The ZeRO settings.
        world: Number of ranks in the job.
        size: Number of bytes per element of a parameter.
        reference: Whether there is a reference model of the same size. trl passes the reference model to DeepSpeed
            without an optimizer. At stage 3, the reference model is sharded and offloaded like the policy. At other
            stages, every rank holds a whole copy.
        optimizer_states: Number of tensors that the optimizer keeps per parameter. An offloaded optimizer counts as
            Adam.
    """
    count, stage, shards = _trained(model), zero.stage, world if zero.stage == 3 else 1
    frozen, referred = (model.parameters - count) // shards, model.parameters * reference // shards
    local = count // world if stage else count  # number of elements whose states are on the rank
    if not zero.optimizer_away:
        copies = stage > 0 or size < MASTER
        device = {
            "parameters": (local if stage == 3 else count) * size + MASTER * local * copies,
            "gradients": local * size if stage == 3 else 0,
            "optimizer": optimizer_states * local * MASTER,
        }
        result = States(device, {}, (), elements_on_device=local)
    else:
        result = (
            _offloaded_at_stage_3(zero, local, size)
            if stage == 3
            else _offloaded_before_stage_3(model, zero, local, size)
        )
    for item, more in (("parameters", frozen), ("reference", referred)):
        device = {**result.device, item: result.device.get(item, 0) + size * more}
        result = dataclasses.replace(result, device=device)
    if zero.parameters_away:
        result = _with_parameters_offloaded(result, zero, local + frozen, size)
        result = _with_parameters_offloaded(result, zero, referred, size, "reference")
    if stage == 3:
        result = dataclasses.replace(result, device={**result.device, "buckets": zero.reduce_bucket_size * size})
    return result


def _offloaded_before_stage_3(model: Model, zero: Zero, local: int, size: int) -> States:
    """Return the states at stages 1 and 2 with the optimizer in host memory.

    Gradients pass through one buffer on the device and one on the host, each as large as the largest parameter. The
    host also holds updated parameters in their own dtype.
    """
    largest = size * max(model.embedding, model.hidden * model.intermediate)
    device = {"parameters": _trained(model) * size, "gradients": largest}
    host = {
        "parameters": (MASTER + size) * local,
        "gradients": MASTER * local + largest,
        "optimizer": 2 * MASTER * local,
    }
    pinned = _pinned(zero.offload_optimizer.pin_memory, (2, MASTER * local), (1, size * local), (1, largest))
    return States(device, host, pinned, elements_on_device=0)


def _offloaded_at_stage_3(zero: Zero, local: int, size: int) -> States:
    """Return the states at stage 3 with the optimizer in host memory or on drives.

    Some sub-groups may stay on the device. The host holds two copies of the gradients: one in the parameters' dtype,
    and one in fp32 for the optimizer.
    """
    offload, group = zero.offload_optimizer, min(local, zero.sub_group_size)
    if offload.device == "nvme":
        buffers = MASTER * offload.buffer_count * group
        host = {"gradients": size * local, "buffers": buffers}
        pinned = _pinned(offload.pin_memory, (1, size * local))
        return States({"parameters": size * local}, host, pinned, elements_on_device=0, drives=4 * MASTER * local)
    group = max(1, group)
    elements_on_device = min(local, int((1 - offload.ratio) * math.ceil(local / group)) * group)
    on_host = local - elements_on_device
    device = {
        "parameters": size * local + MASTER * elements_on_device,
        "gradients": MASTER * elements_on_device,
        "optimizer": 2 * MASTER * elements_on_device,
    }
    host = {
        "parameters": MASTER * on_host,
        "gradients": MASTER * on_host + size * local,
        "optimizer": 2 * MASTER * on_host,
    }
    gradients = (on_host // group, MASTER * group), (1, MASTER * (on_host % group))
    return States(device, host, _pinned(offload.pin_memory, (1, size * local), *gradients), elements_on_device)


def _with_parameters_offloaded(result: States, zero: Zero, local: int, size: int, item: str = "parameters") -> States:
    """Return the states with the rank's parameters in pinned host memory, or on drives beyond `max_in_cpu`."""
    offload = zero.offload_param
    kept = min(local, offload.max_in_cpu) if offload.device == "nvme" else local
    host = dict(result.host)
    host[item] = host.get(item, 0) + size * kept
    if kept < local:  # a pool of buffers, and space for a sub-group that is read back
        pool = offload.buffer_count * offload.buffer_size + min(local, zero.sub_group_size)
        host["buffers"] = host.get("buffers", 0) + size * pool
    device = {**result.device, item: result.device[item] - size * local}
    drives = result.drives + size * (local - kept)
    return dataclasses.replace(
        result, device=device, host=host, pinned=(*result.pinned, (1, size * kept)), drives=drives
    )


def _pinned(pin: bool, *sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return sizes if pin else ()

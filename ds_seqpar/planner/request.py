"""The planner's input: a model, a machine and the training step.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from ..base.errors import ConfigError
from ..core.compiler.sharding.layout import divisors
from ..core.compiler.sharding.masks import CAUSAL, Mask
from ..core.settings import SequenceParallelConfig
from ..deepspeed.config import DeepSpeedJson, Zero
from . import limits
from .machine import Machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLayers:
    """A model's layers with a state or a causal convolution. All layers count like the largest layer."""

    count: int
    heads: int  # heads with a state; 0 if layers have only a convolution
    keys: int  # number of keys in a head's state
    values: int
    transition: int  # number of elements in a head's state transition: keys * keys, or 1
    exchanged: int  # number of elements per token that Ulysses ranks exchange with their heads, including the output
    # number of elements per token that projections and convolution return, plus out before and after its gate
    kept: int
    weights: int  # number of weights in a layer's projections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """The part of a model that computes image or audio features, which replace tokens."""

    layers: Model  # the tower's layers as a model without a vocabulary; parameters include the parts around the layers
    full_layers: int  # number of layers in which a patch sees all patches of its image
    window: int = 0  # number of patches that a patch sees in the other layers
    patches_a_token: int | None = None  # None: not in the model's config
    patches: int | None = None  # patches per image, if all images have the same number
    tokens: int | None = None  # tokens per image, if all images have the same number

    def pairs(self, patches: int) -> float:
        """Return the number of patches that a patch of an image sees, as a mean over all layers."""
        windows = self.layers.layers - self.full_layers
        return (self.full_layers * patches + windows * min(self.window, patches)) / self.layers.layers


class Index(NamedTuple):
    """Layers that attend to latents selected by an index (docs/sparse.md).

    Latents and index keys are gathered from all ranks.
    """

    layers: int
    own: int  # number of layers with their own index; other layers attend to tokens picked by an earlier layer
    latent: int  # number of elements in a token's latent
    keys: int  # number of elements in a token's index key
    heads: int  # number of heads in the index
    picks: int  # maximum number of tokens that a query attends to

    def received(self, tokens: int, own: int, size: int) -> tuple[int, int]:
        """Return how many elements of a row a rank receives in all layers, for the forward and backward passes.

        `own` is the number of the row's tokens on the rank.
        """
        latents = self.layers * self.latent
        return (tokens - own) * (latents + self.own * self.keys), own * (size - 1) * latents


class Images(NamedTuple):
    """The images, videos or audio clips in each sequence, all of the same size."""

    number: int
    tokens: int  # number of tokens replaced by one image's features
    patches: int  # number of patches in one image

    def of_rank(self, config: SequenceParallelConfig, batch: int) -> int:
        """Return how many images in `batch` sequences a rank processes, rounded up to the same number on all ranks."""
        number = batch * self.number
        return number if config.divide_media is False else -(-number // config.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a model."""

    hidden: int
    intermediate: int  # with experts, the sum over the experts that one token uses
    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int  # number of parameters in the whole model; tied parameters are counted once
    layer_parameters: int  # number of parameters in one layer
    tied: bool = False  # whether the head and the embedding share weights
    # whether q and k have norms over all heads, so that head chunks cannot run their own projections
    norms_heads: bool = False
    states: StateLayers | None = None
    attention_layers: int | None = None  # number of layers that attend; None: all layers
    mlp_layers: int | None = None  # number of layers with an MLP; None: all layers
    latent_projections: int | None = None  # number of weights in attention's projections, for latent attention
    mlp_matrices: int = 3  # number of hidden x intermediate matrices; 2 without a gate
    gathers: bool = False  # whether layers run their own attention on gathered keys
    index: Index | None = None
    tower: Tower | None = None
    trained: int | None = None  # number of trained parameters, such as adapters; None: all parameters

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def attending(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def dense(self) -> int:
        """Number of layers that attend without an index."""
        return self.attending - (self.index.layers if self.index else 0)

    @property
    def with_mlp(self) -> int:
        return self.layers if self.mlp_layers is None else self.mlp_layers

    @property
    def weights(self) -> int:
        """Number of weights by which each token is multiplied, in all layers together."""
        states = self.states.count * self.states.weights if self.states else 0
        return self.attending * self.projections + self.with_mlp * self.mlp + states

    @property
    def not_counted(self) -> list[str]:
        """Costs that predictions for this model omit, as sentences for the user."""
        states = [] if self.states is None else [
            f"{self.states.count} of {self.layers} layers have a state or a convolution: what they project and send is "
            "counted, and not what their kernels compute and keep, which is several times as much in torch's own"
        ]  # fmt: skip
        latent = [] if self.latent_projections is None or not self.dense else [
            "attention has a latent, which counts as the keys and values that it expands to; where latents are sent, "
            "less is sent and kept, and keys are expanded more than once"
        ]  # fmt: skip
        gathers = [] if not self.gathers else [
            "layers run attention or an index of their own on keys of all tokens, which they gather: this counts as "
            "attention that the schedule shares, which sends and keeps less"
        ]  # fmt: skip
        return states + latent + gathers

    @property
    def projections(self) -> int:
        """Number of weights in a layer's four attention projections."""
        return self.latent_projections or 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def lora(self) -> int:
        """Number of weights in rank-1 adapters for all matrices in all layers."""
        attention = 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.attending * attention + self.with_mlp * self.mlp_matrices * (self.hidden + self.intermediate)

    @property
    def mlp(self) -> int:
        """Number of weights in a layer's MLP. In models with experts, only the experts used by a single token are
        counted."""
        return self.mlp_matrices * self.hidden * self.intermediate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Computations that a step performs in addition to, or instead of, the next-token loss."""

    rows: int = 1  # rows per example; a pair has two rows
    head: Literal["logits", "fused", "score"] = "logits"  # fused: trl's tiled head; score: one number per row
    # whether Triton computes tiles of the fused head in place; otherwise torch computes them, as on CPUs
    triton: bool = True
    reference: bool = False  # whether an untrained reference model computes the same rows
    completions: int = 1  # number of rows that share a prompt; the prompt is computed once
    completion: int = 0  # number of a row's tokens that are generated or follow a shared prompt
    generated: int = 0  # number of rows that a group generates at once, divided among its ranks

    def batch(self, examples: int) -> int:
        """Return the number of sequences in a forward pass. All completions of a shared prompt form one sequence."""
        return -(-examples * self.rows // self.completions)

    def sequence(self, row: int) -> int:
        """Return the number of tokens in a sequence whose rows have `row` tokens.

        In the sequence, each completion follows a copy of the prompt's last token and omits its own last token.
        """
        return row + self._shared

    def row(self, sequence: int) -> int:
        return max(self.completion, sequence - self._shared)

    @property
    def _shared(self) -> int:
        """Number of tokens in a sequence beyond the tokens of one row."""
        return (self.completions - 1) * self.completion - (self.completions > 1)


# supported trl trainers, and whether each uses a reference model by default
TRAINERS = {
    "dpo": Objective(rows=2, head="fused", reference=True),
    "kto": Objective(head="fused", reference=True),
    "grpo": Objective(head="fused", generated=1),
    "rloo": Objective(head="fused", generated=1, reference=True),
    "reward": Objective(rows=2, head="score"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A model's training step with one configuration."""

    model: Model
    config: SequenceParallelConfig  # without any "auto" values
    world: int  # ranks of the job
    seq: int  # number of tokens in the whole sequence
    batch: int = 1  # number of sequences that a group of ranks processes at once
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    optimizer_states: int = 2  # number of tensors that the optimizer keeps per parameter, such as Adam's two moments
    checkpointing: bool = True
    mask: Mask = CAUSAL
    images: Images | None = None
    objective: Objective = dataclasses.field(default_factory=Objective)
    on_gpu: bool = False  # whether GPU kernels are used, which allocate their own memory


def visible_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Return the number of (query, key) pairs in causal attention over documents with these lengths in tokens.

    `window` is the sliding window in tokens; None means no window.
    """
    pairs = 0
    for n in lengths:
        hidden = max(0, n - window) if window else 0
        pairs += n * (n + 1) // 2 - hidden * (hidden + 1) // 2
    return pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """State shared by all ranks when training starts.

    A `Request` requires a job with a known model and length.
    """

    model: Model | None = None
    seq: int | None = None  # number of tokens in the longest sequence; None: unknown
    documents: tuple[int, ...] = ()  # lengths of documents in tokens, if the longest sequence is a pack
    window: int | None = None  # sliding window of attention in tokens, which is the same in all layers
    batch: int | None = None  # number of examples that a group of ranks processes at once
    steps: int | None = None  # number of micro-batches in an optimizer step
    # number of sequences in an optimizer step; None: any number, and each sequence is shared by all ranks
    sequences: int | None = None
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    optimizer_states: int = 2  # see `TrainingStep`
    checkpointing: bool = False
    images: Images | None = None
    uncounted: str = ""  # reason why the model is unknown
    objective: Objective = dataclasses.field(default_factory=Objective)

    @classmethod
    def of(cls, json: DeepSpeedJson) -> Job:
        """Return the job that a DeepSpeed JSON describes. Values left to a Trainer ("auto") count as unknown."""
        (sequences, batch, steps), zero = json.batch_sizes, json.known.zero_optimization
        return cls(
            batch=batch, steps=steps, sequences=sequences, dtype=json.known.dtype, zero=zero,
            optimizer_states=json.optimizer_states,
        )  # fmt: skip

    @functools.cached_property
    def mask(self) -> Mask:
        return Mask(window=self.window, documents=Mask.documents_of(self.documents))

    def step(self, config: SequenceParallelConfig, world: int, on_gpu: bool) -> TrainingStep:
        """Return the training step on `world` ranks, for a configuration without "auto" values."""
        assert self.model is not None
        assert self.seq is not None
        return TrainingStep(
            model=self.model, config=config, world=world, seq=self.seq, batch=self.objective.batch(self.batch or 1),
            dtype=self.dtype, zero=self.zero, checkpointing=self.checkpointing, objective=self.objective,
            optimizer_states=self.optimizer_states, mask=self.mask, images=self.images, on_gpu=on_gpu,
        )  # fmt: skip

    def sizes(self, world: int) -> tuple[int, ...]:
        """Return the group sizes for which an optimizer step contains `sequences` sequences."""
        if self.sequences is None:
            return (world,)
        sequences_per_group = (self.batch or 1) * (self.steps or 1)
        exact = self.batch is not None and self.steps is not None
        trained = {size: world // size * sequences_per_group for size in divisors(world)}
        return tuple(
            size
            for size, count in trained.items()
            if (self.sequences == count if exact else self.sequences % count == 0)
        ) or (world,)


class MemoryBudget(NamedTuple):
    """The memory available to ranks and hosts."""

    limit: int  # bytes per rank that are available for tensors
    host: float  # bytes of host memory per node, shared by `ranks_per_node` ranks
    ranks_per_node: int
    apart: bool = True  # whether ranks have device memory in addition to host memory

    @classmethod
    def of(cls, machine: Machine, world: int, memory: int | None = None) -> MemoryBudget:
        """Return a machine's memory. `memory` overrides the number of bytes per rank."""
        limit = machine.usable if memory is None else memory
        return cls(limit, machine.host_memory, min(world, machine.per_node), machine.gpus)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A job to plan for, with its machine and fixed settings."""

    job: Job  # job with a known model and length
    machine: Machine
    world: int  # ranks of the job
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fixed settings
    sizes: tuple[int, ...] = ()  # allowed values of `size`; if empty, all values are allowed
    memory: int | None = None  # bytes per rank; None: the memory that the machine has for tensors

    def __post_init__(self) -> None:
        limits.check("the ranks of a job, nodes x ranks a node,", self.world, limits.MAX_RANKS)
        limits.check("the documents of a sequence", len(self.job.documents), limits.MAX_DOCUMENTS)
        limits.check("the tokens of documents together", sum(self.job.documents), limits.MAX_PACKED_TOKENS)
        sizes = self.sizes or [size for size in (self.given.get("size"),) if isinstance(size, int)]
        if sizes:
            name = "the ranks of a sequence that is planned,"
            limits.check(name, min(sizes), limits.MAX_PLANNED_RANKS, "take a smaller size")
        if sizes and isinstance(ulysses := self.given.get("ulysses"), int):
            limits.check_followed(min(sizes) // ulysses, overlap=False)
        if self.job.documents and sum(self.job.documents) != self.seq:
            raise ConfigError(f"documents must have {self.seq} tokens together; got {sum(self.job.documents)}")
        self.machine.rates(self.job.dtype)

    @property
    def model(self) -> Model:
        assert self.job.model is not None
        return self.job.model

    @property
    def seq(self) -> int:
        """Number of tokens in a sequence."""
        assert self.job.seq is not None
        return self.job.seq

    @property
    def heads(self) -> tuple[int, int]:
        return self.model.heads, self.model.kv_heads

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget.of(self.machine, self.world, self.memory)

    def step(self, config: SequenceParallelConfig) -> TrainingStep:
        """Return the training step for a configuration without "auto" values."""
        return self.job.step(config, self.world, self.machine.gpus)

    def seconds_a_sequence(self, seconds: float, config: SequenceParallelConfig) -> float:
        """Return an optimizer step's time per sequence, given the number of seconds per micro-batch on all ranks."""
        together = self.world // config.size * (self.job.batch or 1)  # number of sequences in a micro-batch
        if self.job.sequences is None:
            return seconds / together
        return math.ceil(self.job.sequences / together) * seconds / self.job.sequences

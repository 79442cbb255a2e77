"""The planner's input: a model, a machine, and the training step. Does not import torch."""

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
    """The layers of a model that have a state or a causal convolution. All count like the largest."""

    count: int
    heads: int  # with a state each; 0: the layers have a convolution alone
    keys: int  # of a head's state
    values: int
    transition: int  # numbers of what maps a head's state: keys x keys, or 1
    exchanged: int  # numbers of a token that Ulysses ranks exchange with their heads, the output's included
    kept: int  # numbers of a token that projections and the convolution return, and out before and after its gate
    weights: int  # of a layer's projections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """The part of a model that computes features of pictures or sounds, which replace tokens."""

    layers: Model  # its layers, as those of a model without a vocabulary, and the parameters of all around them
    full_layers: int  # in which a patch sees all patches of its picture
    window: int = 0  # patches that it sees in the others
    patches_a_token: int | None = None  # None: the config does not say
    patches: int | None = None  # of a picture, where all have as many
    tokens: int | None = None  # the same

    def pairs(self, patches: int) -> float:
        """Return how many patches a patch of a picture sees, as a mean over all layers."""
        windows = self.layers.layers - self.full_layers
        return (self.full_layers * patches + windows * min(self.window, patches)) / self.layers.layers


class Index(NamedTuple):
    """Layers that attend to latents which an index picks, and that gather both from all ranks (docs/sparse.md)."""

    layers: int
    own: int  # of them those with an index; the others attend to what a layer before has picked
    latent: int  # numbers of a token's latent
    keys: int  # numbers of a token's key of the index
    heads: int  # of the index
    picks: int  # most tokens that a query attends to

    def received(self, tokens: int, own: int, size: int) -> tuple[int, int]:
        """Return the numbers of a row that a rank receives in all layers, (in forward, in backward), if it has `own` of
        the row's tokens.
        """
        latents = self.layers * self.latent
        return (tokens - own) * (latents + self.own * self.keys), own * (size - 1) * latents


class Pictures(NamedTuple):
    """The pictures, films or sounds of each sequence, all of the same size."""

    number: int
    tokens: int  # that the features of one take the places of
    patches: int  # of one

    def of_rank(self, config: SequenceParallelConfig, batch: int) -> int:
        """Return how many of the items of `batch` sequences a rank computes; a rank with none left computes one too."""
        number = batch * self.number
        return number if config.divide_media is False else -(-number // config.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a model."""

    hidden: int
    intermediate: int  # with experts, the sum over those that one token is routed to
    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int  # of the whole model, tied ones counted once
    layer_parameters: int  # of one layer
    tied: bool = False  # whether the head and the embedding share their weights
    norms_heads: bool = False  # whether q and k have norms over all heads, so a head chunk cannot project its own
    states: StateLayers | None = None
    attention_layers: int | None = None  # layers that attend; None: all of them
    mlp_layers: int | None = None  # layers with an MLP; None: all of them
    latent_projections: int | None = None  # number of weights of an attention's projections, if it has a latent
    mlp_matrices: int = 3  # of hidden x intermediate weights; 2 where there is no gate
    gathers: bool = False  # whether layers run attention of their own on gathered keys
    index: Index | None = None
    tower: Tower | None = None
    trained: int | None = None  # parameters that are trained, as those of adapters; None: all of them

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
        """Number of weights of all layers that a token is multiplied with."""
        states = self.states.count * self.states.weights if self.states else 0
        return self.attending * self.projections + self.with_mlp * self.mlp + states

    @property
    def not_counted(self) -> list[str]:
        """What predictions omit for this model, in sentences for the user."""
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
        """Number of weights of a layer's four attention projections."""
        return self.latent_projections or 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def lora(self) -> int:
        """Number of weights of adapters of rank 1 of all matrices of all layers."""
        attention = 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.attending * attention + self.with_mlp * self.mlp_matrices * (self.hidden + self.intermediate)

    @property
    def mlp(self) -> int:
        """Number of weights of a layer's MLP; with experts, of those that one token is routed to."""
        return self.mlp_matrices * self.hidden * self.intermediate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What a step computes in addition to, or instead of, the next-token loss."""

    rows: int = 1  # of an example; a pair has two
    head: Literal["logits", "fused", "score"] = "logits"  # fused: trl's, in tiles; score: a number a row
    triton: bool = True  # whether kernels compute a tile of the fused head in place; else torch does, as on CPUs
    reference: bool = False  # whether a second model, which is not trained, computes the same rows
    completions: int = 1  # rows that share a prompt, which then is computed once
    completion: int = 0  # tokens of a row that are generated, or follow a shared prompt
    generated: int = 0  # rows that a group generates at once; its ranks divide them

    def batch(self, examples: int) -> int:
        """Return the sequences of a forward; one of them has all the completions that share a prompt."""
        return -(-examples * self.rows // self.completions)

    def sequence(self, row: int) -> int:
        """Return the tokens of a sequence, if a row has `row` tokens. A prompt's last token is before each completion,
        whose last one is left out."""
        return row + self._shared

    def row(self, sequence: int) -> int:
        return max(self.completion, sequence - self._shared)

    @property
    def _shared(self) -> int:
        """Tokens of a sequence beyond those of a row."""
        return (self.completions - 1) * self.completion - (self.completions > 1)


# trl's trainers whose steps are known; each has its default of a reference
TRAINERS = {
    "dpo": Objective(rows=2, head="fused", reference=True),
    "kto": Objective(head="fused", reference=True),
    "grpo": Objective(head="fused", generated=1),
    "rloo": Objective(head="fused", generated=1, reference=True),
    "reward": Objective(rows=2, head="score"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training step."""

    model: Model
    config: SequenceParallelConfig  # without any "auto"
    world: int  # ranks of the job
    seq: int  # tokens of the whole sequence
    batch: int = 1  # sequences that a group of ranks trains at once
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    optimizer_states: int = 2  # tensors that the optimizer keeps of each parameter; Adam has two moments
    checkpointing: bool = True
    mask: Mask = CAUSAL
    pictures: Pictures | None = None
    objective: Objective = dataclasses.field(default_factory=Objective)
    on_gpu: bool = False  # whether kernels are those for GPUs, which allocate memory of their own


def visible_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Return the number of (query, key) pairs that causal attention computes in documents of these lengths (tokens),
    with a window of `window` tokens; None: no window."""
    pairs = 0
    for n in lengths:
        hidden = max(0, n - window) if window else 0
        pairs += n * (n + 1) // 2 - hidden * (hidden + 1) // 2
    return pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What ranks know about a training run when they start. A `Request` needs its model and length."""

    model: Model | None = None
    seq: int | None = None  # tokens of the longest sequence; None: not known
    documents: tuple[int, ...] = ()  # their lengths in tokens, if that sequence is a pack
    window: int | None = None  # attention's window in tokens, the same in all layers
    batch: int | None = None  # examples that a group of ranks trains at once
    steps: int | None = None  # micro-batches of an optimizer step
    sequences: int | None = None  # of an optimizer step; None: any number, and then all ranks share each sequence
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    optimizer_states: int = 2  # as in `TrainingStep`
    checkpointing: bool = False
    pictures: Pictures | None = None
    uncounted: str = ""  # why the model is not known
    objective: Objective = dataclasses.field(default_factory=Objective)

    @classmethod
    def of(cls, json: DeepSpeedJson) -> Job:
        """Return the job of a DeepSpeed JSON. Values that the JSON leaves to a Trainer ("auto") count as unknown."""
        (sequences, batch, steps), zero = json.batch_sizes, json.known.zero_optimization
        return cls(
            batch=batch, steps=steps, sequences=sequences, dtype=json.known.dtype, zero=zero,
            optimizer_states=json.optimizer_states,
        )  # fmt: skip

    @functools.cached_property
    def mask(self) -> Mask:
        return Mask(window=self.window, documents=Mask.documents_of(self.documents))

    def step(self, config: SequenceParallelConfig, world: int, on_gpu: bool) -> TrainingStep:
        """Return the training step on `world` ranks, with a configuration that has no "auto"."""
        assert self.model is not None
        assert self.seq is not None
        return TrainingStep(
            model=self.model, config=config, world=world, seq=self.seq, batch=self.objective.batch(self.batch or 1),
            dtype=self.dtype, zero=self.zero, checkpointing=self.checkpointing, objective=self.objective,
            optimizer_states=self.optimizer_states, mask=self.mask, pictures=self.pictures, on_gpu=on_gpu,
        )  # fmt: skip

    def sizes(self, world: int) -> tuple[int, ...]:
        """Return the numbers of ranks that may share a sequence, such that an optimizer step has `sequences`
        sequences."""
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
    """The memory that ranks and hosts have."""

    limit: int  # bytes of a rank for tensors
    host: float  # bytes of a node's host, shared by `ranks_per_node` ranks
    ranks_per_node: int
    apart: bool = True  # whether ranks have device memory beside their host's, as GPUs do

    @classmethod
    def of(cls, machine: Machine, world: int, memory: int | None = None) -> MemoryBudget:
        """Return the memory of a machine. If `memory` is given, it is the bytes of a rank, in place of the
        machine's."""
        limit = machine.usable if memory is None else memory
        return cls(limit, machine.host_memory, min(world, machine.per_node), machine.gpus)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What to train, on which machine, and with which fixed settings."""

    job: Job  # whose model and length are known
    machine: Machine
    world: int  # ranks of the job
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fixed settings
    sizes: tuple[int, ...] = ()  # values that `size` may take; () for all
    memory: int | None = None  # bytes of a rank; None: what the machine has for tensors

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
        """Tokens of a sequence."""
        assert self.job.seq is not None
        return self.job.seq

    @property
    def heads(self) -> tuple[int, int]:
        return self.model.heads, self.model.kv_heads

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget.of(self.machine, self.world, self.memory)

    def step(self, config: SequenceParallelConfig) -> TrainingStep:
        """Return the training step with a configuration that has no "auto"."""
        return self.job.step(config, self.world, self.machine.gpus)

    def seconds_a_sequence(self, seconds: float, config: SequenceParallelConfig) -> float:
        """Return the seconds of an optimizer step divided by its sequences, if a micro-batch takes `seconds` on all
        ranks."""
        together = self.world // config.size * (self.job.batch or 1)  # sequences of a micro-batch
        if self.job.sequences is None:
            return seconds / together
        return math.ceil(self.job.sequences / together) * seconds / self.job.sequences

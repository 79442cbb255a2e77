"""The planner's question: a model, a machine, and what is to be trained. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..compiler.sharding.masks import CAUSAL, Mask
from ..config.deepspeed_json import Zero
from ..config.settings import SequenceParallelConfig, legal_ulysses
from ..errors import ConfigError
from . import limits
from .machine import Machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a model. intermediate: with experts, the sum over those that one token goes to. parameters: of the
    whole model, tied ones once; layer_parameters: of one layer. norms_heads: whether q and k have norms over all heads,
    so that a head stage cannot make its own."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    layer_parameters: int
    tied: bool = False
    norms_heads: bool = False

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def projections(self) -> int:
        """Weights of a layer's four attention projections."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def mlp(self) -> int:
        """Weights of a layer's MLP; with experts, of those that one token goes to."""
        return 3 * self.hidden * self.intermediate


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training step. config: without any "auto". seq: tokens of the whole sequence. batch: sequences that a group of
    ranks trains at once. world: ranks of the job."""

    model: Model
    config: SequenceParallelConfig
    world: int
    seq: int
    batch: int = 1
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    checkpointing: bool = True
    mask: Mask = CAUSAL


def visible_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """The number of (query, key) pairs that causal attention computes in documents of these lengths, with a window of
    so many tokens."""
    pairs = 0
    for n in lengths:
        hidden = max(0, n - window) if window else 0
        pairs += n * (n + 1) // 2 - hidden * (hidden + 1) // 2
    return pairs


class MemoryBudget(NamedTuple):
    """The memory that there is. limit: bytes of a rank for tensors. host: bytes of a node's host, which
    `ranks_per_node` ranks share. apart: whether ranks have memory beside their host's, as GPUs do."""

    limit: int
    host: float
    ranks_per_node: int
    apart: bool = True

    @classmethod
    def of(cls, machine: Machine, world: int, memory: int | None = None) -> MemoryBudget:
        """The memory of a machine. memory: bytes of a rank in place of the machine's."""
        limit = machine.usable if memory is None else memory
        return cls(limit, machine.host_memory, min(world, machine.per_node), machine.apart)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What is to be trained, on which machine, and which settings are fixed.

    world: ranks of the job. seq: tokens of a sequence. documents: their lengths in tokens, where the sequence is a
    pack; () for one document. window: attention's, in tokens. batch: sequences that a group of ranks trains at once.
    given: fixed settings. sequences: of an optimiser step; None: as many as the groups train at once. sizes: values
    that `size` may take; () for all. memory: bytes of a rank; None: what the machine has for tensors. ignores_memory:
    whether configurations may need more memory than there is."""

    model: Model
    machine: Machine
    world: int
    seq: int
    documents: tuple[int, ...] = ()
    window: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=lambda: Zero(stage=3))
    checkpointing: bool = True
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sequences: int | None = None
    sizes: tuple[int, ...] = ()
    memory: int | None = None
    ignores_memory: bool = False

    def __post_init__(self) -> None:
        for what, value, most in (
            ("the ranks of a job, nodes x ranks a node,", self.world, limits.MAX_RANKS),
            ("the tokens of a sequence", self.seq, limits.MAX_TOKENS),
            ("the documents of a sequence", len(self.documents), limits.MAX_DOCUMENTS),
            ("the sequences of a micro-batch", self.batch, limits.MAX_COUNT),
        ):
            limits.check(what, value, most)
        self._check_given()
        if self.documents and sum(self.documents) != self.seq:
            raise ConfigError(f"documents must have {self.seq} tokens together; got {sum(self.documents)}")
        self.machine.rated_dtype(self.dtype)
        if self.zero.drives and self.machine.nvme_rate is None:
            raise ConfigError(
                f'zero_optimization keeps states on drives ("nvme"), whose time hangs on nvme_rate; got machine '
                f"{self.machine.name}, which has none, say it in the machine's file or take another machine"
            )

    def _check_given(self) -> None:
        """Raises ConfigError where the given size, or all sizes that may be chosen, are too large to be planned."""
        ulysses = self.given.get("ulysses", "auto")
        if ulysses != "auto":
            limits.check("ulysses of a plan", ulysses, limits.MAX_ULYSSES)
        sizes = self.sizes or [size for size in (self.given.get("size"),) if isinstance(size, int)]
        if sizes:
            limits.check(
                "the ranks of a sequence that is planned,", min(sizes), limits.MAX_PLANNED_RANKS, "take a smaller size"
            )
            limits.check_followed(min(size // self._most_ulysses(size) for size in sizes), overlap=False)

    def _most_ulysses(self, size: int) -> int:
        if (given := self.given.get("ulysses", "auto")) != "auto":
            return given
        return max(ulysses for ulysses in legal_ulysses(size, self.model.heads) if ulysses <= limits.MAX_ULYSSES)

    @property
    def heads(self) -> tuple[int, int]:
        return self.model.heads, self.model.kv_heads

    @functools.cached_property
    def mask(self) -> Mask:
        return Mask(window=self.window, documents=Mask.documents_of(self.documents))

    @property
    def limit(self) -> int:
        return self.budget.limit

    @property
    def budget(self) -> MemoryBudget:
        budget = MemoryBudget.of(self.machine, self.world, self.memory)
        return budget._replace(limit=2**62, host=math.inf) if self.ignores_memory else budget

    def memory_shortage(self, needed: float) -> str:
        """The sentence for a configuration that needs `needed` bytes of a rank."""
        return f"needs at least {needed / 2**30:.1f} GiB on each rank, which has {self.limit / 2**30:.1f}"

    @functools.cached_property
    def pairs(self) -> int:
        """The number of (query, key) pairs of a sequence that attention computes."""
        return visible_pairs(self.documents or (self.seq,), self.window)

    @functools.cached_property
    def flops(self) -> int:
        """Model flops of training on a sequence, as MFU counts them: 6 a weight and token that meet, 12 a visible pair
        and element of the heads. What checkpoints compute again is not among them."""
        m = self.model
        weights = m.layers * (m.projections + m.mlp) + m.embedding  # of the head; the embedding is read by index
        return 6 * weights * self.seq + 12 * m.layers * m.heads * m.head_dim * self.pairs

    def step(self, config: SequenceParallelConfig, mask: Mask | None = None) -> TrainingStep:
        return TrainingStep(
            model=self.model, config=config, world=self.world, seq=self.seq, batch=self.batch, dtype=self.dtype,
            zero=self.zero, checkpointing=self.checkpointing, mask=self.mask if mask is None else mask,
        )  # fmt: skip

    def seconds_a_sequence(self, seconds: float, sequences: int) -> float:
        """Seconds of an optimiser step divided by its sequences. seconds: of a micro-batch on all ranks, which trains
        `sequences` sequences."""
        if self.sequences is None:
            return seconds / sequences
        return math.ceil(self.sequences / sequences) * seconds / self.sequences

"""The context of one forward of a patched model: local, sharded, whole or a decode step, with all that its parts must
know.

The outermost called module creates the context once. Layers get it as the keyword `sequence_parallel`. RoPE, norms,
MLPs and heads, which get no keyword, read it from a ContextVar. The ContextVar is empty in autograd threads, so code
that recomputes a part of a forward there must enter the context that the part had.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

from torch import Tensor, nn

from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.data.shared_prompts import SharedPrompts
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.whole.shard_spec import ShardSpec

from .noise import OwnNoise

Mode = Literal["local", "sharded", "whole", "decode"]
KEYWORD = "sequence_parallel"  # the keyword by which layers get the context


@dataclasses.dataclass(kw_only=True, eq=False)
class ForwardState:
    """What changes while a forward runs."""

    begun: bool = False  # whether the base model was called
    losses: list[float] | None = None  # the sum of token losses of each tile; None: the loss is not to be checked
    router_logits: tuple[Tensor, ...] | None = None  # those of the base model, until the forward ends
    noise: OwnNoise | None = None  # while this rank draws for its own tokens
    shared: list[Tensor] | None = None  # the random states of all ranks when a rank last drew for its own tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ForwardContext:
    """One forward of a patched model.

    Layers need this very object. FSDP2 rebuilds dataclasses among a module's arguments, which would copy the state, so
    instances hide that they are dataclasses.
    """

    mode: Mode | None = None  # None: the base model's call will decide
    module: nn.Module | None = None  # the module that is called
    layout: BatchLayout | None = None  # None: sequences are shared equally
    positions: Tensor | None = None  # the position_ids with which the base model will be called
    spec: ShardSpec | None = None  # the spec of a whole batch that was sharded
    logits: ShardSpec | None = None  # the spec of its tokens that get logits
    cached: Any = None  # the CachedForward of a forward with a cache in parts
    media: Any = None  # the MediaCall of a whole call that the stack inside shards
    shared: SharedPrompts | None = None  # the prompts of a whole batch that are computed once for several rows
    compared: ValueChecks | None = None  # what ranks compare for a whole batch, together with the forward
    rope_tokens: int | None = None  # tokens up to the longest position; None: RoPE sees them all
    state: ForwardState = dataclasses.field(default_factory=ForwardState)
    outer: ForwardContext | None = None  # the context around this one
    within: bool = False  # whether the module was called by that of `outer`, not by a user's hook

    @property
    def is_outermost(self) -> bool:
        """Whether no enclosing module has sharded the batch."""
        return self.outer is None or self.outer.state is not self.state

    @property
    def has_all_tokens(self) -> bool:
        """Whether this rank computes all tokens of the forward."""
        return self.mode in ("local", "decode")

    @property
    def is_undecided(self) -> bool:
        """Whether an inner module (the base model or its stack) may still be the one that shares the call."""
        return self.mode not in ("local", "sharded") and self.spec is None and self.cached is None

    @property
    def is_in_whole(self) -> bool:
        """Whether an enclosing module gets this one's outputs whole."""
        return self.within and self.outer is not None and self.outer.mode == "whole"

    def recomputing(self) -> ForwardContext:
        """Return the context in which a checkpoint computes a part of the forward, and recomputes it in backward."""
        return self.replace(state=ForwardState())

    def replace(self, **changes: Any) -> ForwardContext:
        """Return a copy of the context with some fields changed."""
        context = copy.copy(self)
        vars(context).update(changes)
        return context


del ForwardContext.__dataclass_fields__


# contexts of compiled graphs, which keep nothing of a forward
LOCAL, SHARDED = ForwardContext(mode="local"), ForwardContext(mode="sharded")

_current: ContextVar[ForwardContext | None] = ContextVar("hf_integration_forward", default=None)
current = _current.get
set_current = _current.set


@contextlib.contextmanager
def entered(context: ForwardContext | None) -> Iterator[None]:
    """Context manager in which `current` returns the context."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)

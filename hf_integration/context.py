"""The context of a patched model's forward, with its mode (local, sharded, whole or decode) and all shared state.

The outermost module in a call creates the context. Layers receive the context as the keyword argument
`sequence_parallel`. RoPE, norms, MLPs and heads do not get the keyword, so they read the context from a ContextVar. The
ContextVar is empty in autograd threads, so code that recomputes part of a forward in such a thread must first enter the
original context.
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
    """State that changes while a forward runs."""

    begun: bool = False  # whether the base model was called
    losses: list[float] | None = None  # the sum of token losses of each tile; None disables the loss check
    router_logits: tuple[Tensor, ...] | None = None  # the base model's router logits until the forward ends
    noise: OwnNoise | None = None  # set while this rank draws random numbers for its own tokens
    shared: list[Tensor] | None = None  # the shared random states after the last draw for own tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ForwardContext:
    """Context of one forward of a patched model.

    Layers must receive the same context object, not a copy. FSDP2 rebuilds dataclass arguments of modules, which would
    copy the state. ForwardContext therefore hides that it is a dataclass.
    """

    mode: Mode | None = None  # None until the base model's call sets the mode
    module: nn.Module | None = None  # the module in the call
    layout: BatchLayout | None = None  # None if sequences are divided equally
    positions: Tensor | None = None  # the position_ids of the coming base model call
    spec: ShardSpec | None = None  # the spec of a whole batch that was sharded
    logits: ShardSpec | None = None  # the spec of the tokens with logits
    cached: Any = None  # the CachedForward of a forward with a sharded cache
    media: Any = None  # the MediaCall of a whole call that is sharded at the inner stack
    shared: SharedPrompts | None = None  # prompts that several rows of a whole batch share
    compared: ValueChecks | None = None  # values that ranks compare for a whole batch
    rope_tokens: int | None = None  # the number of tokens up to the longest position; None if RoPE sees all tokens
    state: ForwardState = dataclasses.field(default_factory=ForwardState)
    outer: ForwardContext | None = None  # the enclosing context
    within: bool = False  # whether the module of `outer` called this one, rather than a user's hook

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
        """Whether the base model or its stack of layers can still decide how ranks share the call."""
        return self.mode not in ("local", "sharded") and self.spec is None and self.cached is None

    @property
    def is_in_whole(self) -> bool:
        """Whether an enclosing module receives outputs for whole sequences."""
        return self.within and self.outer is not None and self.outer.mode == "whole"

    def recomputing(self) -> ForwardContext:
        """Return a context with fresh state, for recomputing a part of a forward in a checkpoint."""
        return self.replace(state=ForwardState())

    def replace(self, **changes: Any) -> ForwardContext:
        """Return a copy of the context with some fields changed."""
        context = copy.copy(self)
        vars(context).update(changes)
        return context


del ForwardContext.__dataclass_fields__


# contexts for compiled graphs, which store no per-forward state
LOCAL, SHARDED = ForwardContext(mode="local"), ForwardContext(mode="sharded")

_current: ContextVar[ForwardContext | None] = ContextVar("hf_integration_forward", default=None)
current = _current.get
set_current = _current.set


@contextlib.contextmanager
def entered(context: ForwardContext | None) -> Iterator[None]:
    """Context manager in which `current` returns the given context."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)

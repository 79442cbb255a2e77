"""Checkpointing that keeps what attention gave, so that its forward, and all that it sends, run once a step
(DistFlashAttn, section 3.3).

A checkpoint runs a function, lets go of all that it made, and runs it again once gradients are asked for. Attention in
a function that is `keeping` leaves its results where the second run finds them. It is told by nothing else than the
order of calls: any kind of checkpoint will do, and operations around attention may differ between the two runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from .buffers import Tensors

if TYPE_CHECKING:
    from .offload import Packed, Store

Result = TypeVar("Result")


class Kept:
    """What one checkpointed call keeps: the results of its attentions, in their order. keep: whether it does; runs: how
    often it was run. lent: what functions inside leave for their own backward (see `Lent`), by their number."""

    outer: Kept | None = None

    def __init__(self, keep: bool, store: Store | None) -> None:
        self.results: deque[list[Packed | Tensor]] = deque()
        self.lent: dict[int, list[list[Packed | Tensor]]] = {}
        self.keep, self.runs, self.store = keep, 0, store

    @property
    def keeps(self) -> bool:
        """Whether a checkpoint keeps what attention gives."""
        return self.keep

    def put(self, found: Tensors) -> None:
        self.results.append(self.packed(found))

    def take(self) -> Tensors:
        return self.unpacked(self.results.popleft())

    def packed(self, found: Tensors) -> list[Packed | Tensor]:
        pack = (lambda x: x) if self.store is None else self.store.pack
        return [pack(x.detach()) for x in found]  # the caller's become part of a graph

    def unpacked(self, found: list[Packed | Tensor]) -> Tensors:
        unpack = (lambda x: x) if self.store is None else self.store.unpack
        return tuple(map(unpack, found))

    def run(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        self.runs += 1
        if self.runs > 2:
            self.results.clear()  # of a second run that ended early
        self.lent = {}
        token = _now.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _now.reset(token)

    @property
    def again(self) -> bool:
        """Whether this is a later run, of which the next result is known."""
        return self.runs > 1 and bool(self.results)

    @property
    def known(self) -> bool:
        """Whether the next result was kept, here or further out."""
        return self.again or (self.outer is not None and self.outer.known)

    def taken(self) -> Tensors | None:
        """The next result, where it was kept, here or further out."""
        if self.again:
            return self.take()
        found = None if self.outer is None else self.outer.taken()
        if found is not None:
            self.note(found)
        return found

    def note(self, found: Tensors) -> None:
        """Keeps a result of the first run."""
        if self.runs == 1 and self.keep:
            self.put(found)


class Part(Kept):
    """The same of a function whose own backward runs it again, which has `found` of the first run: what its attention
    gave is the caller's to save. keeps: whether a checkpoint around both keeps it too."""

    def __init__(self, found: Tensors | None = None, keeps: bool = False) -> None:
        super().__init__(True, None)
        if found is None:
            self.outer = _innermost()
            self.around = self.outer is not None and self.outer.keeps
        else:
            self.around, self.runs = keeps, 1
            self.results.append(list(found))

    @property
    def keeps(self) -> bool:
        return self.around

    def gave(self) -> Tensors:
        """What attention gave in the first run."""
        return tuple(x for found in self.results for x in found if isinstance(x, Tensor))


class Lent:
    """What a function inside of a checkpointed one leaves for its own backward, part by part. It does so in the second
    run alone, just before backward, and in host memory where checkpoints go there. Parts are taken from the last one
    on, so that the one before is fetched meanwhile."""

    def __init__(self, kept: Kept) -> None:
        self.kept, self.number = kept, len(kept.lent)
        kept.lent[self.number] = []

    @classmethod
    def now(cls) -> Lent | None:
        """For the function that runs now; None outside of a checkpointed one."""
        kept = _innermost()
        return None if kept is None else cls(kept)

    def leave(self, found: Tensors) -> None:
        if self.kept.runs > 1:
            self.kept.lent[self.number].append(self.kept.packed(found))

    def take(self) -> Tensors:
        return self.kept.unpacked(self.kept.lent[self.number].pop())

    def here(self) -> list[Any]:
        """What is left of all parts, to be changed in place; nothing where it is in host memory."""
        return self.kept.lent[self.number] if self.kept.store is None else []


TORCHS = noop_context_fn.__code__.co_filename  # where torch's own checkpoint runs its function
_now: ContextVar[Kept | None] = ContextVar("ds_seqpar_kept", default=None)


def keeping(function: Callable[..., Result], store: Store | None = None, *, keep: bool = True) -> Callable[..., Result]:
    """The function, for one call of a checkpoint: `checkpoint(keeping(layer), x)`. What its first run keeps is given up
    by the second; a third, where a graph is retained, computes again. store: where it is kept. keep False: nothing is,
    but attention knows that it is checkpointed."""
    kept = Kept(keep, store)

    @functools.wraps(function, updated=())
    def run(*args: object, **kwargs: object) -> Result:
        return kept.run(function, *args, **kwargs)

    return run


def _innermost() -> Kept | None:
    """What keeps for the checkpoint that this is in. None outside of one, and in one of torch's own inside of ours.
    That one computes again when ours is over, and must then find what it found in forward: nothing."""
    kept = _now.get()
    frame: FrameType | None = sys._getframe(1)
    while kept is not None and frame is not None and frame.f_code is not Kept.run.__code__:
        if frame.f_code.co_filename == TORCHS:
            return None
        frame = frame.f_back
    return kept


def is_checkpointed() -> bool:
    """Whether this is inside of a checkpointed function."""
    return _innermost() is not None


def which_run() -> str:
    """Which run of a checkpointed function this is, for ranks to compare: what they send differs by it."""
    kept = _innermost()
    return "none" if kept is None else "first run" if kept.runs == 1 else "run again"


def is_kept() -> bool:
    """Whether what attention gives now is kept, or was."""
    kept = _innermost()
    return kept is not None and kept.keeps


def is_known() -> bool:
    """Whether the next result was kept: nothing is computed or sent for it."""
    kept = _innermost()
    return kept is not None and kept.known


def taken() -> Tensors | None:
    """The next result, where it was kept."""
    kept = _innermost()
    return None if kept is None else kept.taken()


def put(found: Tensors) -> None:
    """Keeps a result for the second run, where this is the first one of a function that is kept."""
    kept = _innermost()
    while kept is not None:
        kept.note(found)
        kept = kept.outer


class Checkpoint:
    """A checkpoint function, `checkpoint(function, *args, **kwargs)`, that keeps what attention gives (`keep`), and
    whose saved tensors go to a store of host memory, where there is one. What is compiled is the compiler's to keep."""

    def __init__(self, checkpoint: Callable[..., Any], keep: bool, store: Store | None = None) -> None:
        self.checkpoint, self.keep, self.store = checkpoint, keep, store

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return self.checkpoint(function, *args, **kwargs)
        with self.store.saving() if self.store is not None else contextlib.nullcontext():
            return self.checkpoint(keeping(function, self.store, keep=self.keep), *args, **kwargs)

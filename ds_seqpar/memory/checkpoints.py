"""Checkpoints in which attention runs once: the first run saves what attention returns, and the second replays it.

So attention's forward, with everything that it sends, runs once per step (DistFlashAttn, section 3.3). A checkpoint
runs a function, frees the tensors that it made, and runs it again when gradients are needed. Saved results are matched
to calls of attention only by the order of the calls. So any kind of checkpoint works, and operations around attention
may differ between the two runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from ..core.runtime import replay as seam
from ..core.runtime.buffers import Tensors

if TYPE_CHECKING:
    from .offload import HostTensor, Store

Result = TypeVar("Result")


class Replay(seam.Replay):
    """The results of attention in one checkpointed call of a function, in the order of the calls of attention.

    Args:
        saves: whether the first run saves them.
        store: the host memory that they are copied to; None leaves them on the device.
    """

    outer: Replay | None = None

    def __init__(self, saves: bool, store: Store | None) -> None:
        self.saved: deque[list[HostTensor | Tensor]] = deque()  # results that no later run has replayed yet
        # those that each `HeadChunkResults` of this call holds
        self.head_chunk_results: list[list[list[HostTensor | Tensor]]] = []
        # whether results are saved; whether a checkpoint saves them: a head chunk's own backward may without one
        self.saves = self.checkpoint_saves = saves
        self.runs, self.store = 0, store  # runs: how often the function was run

    def pack(self, result: Tensors) -> list[HostTensor | Tensor]:
        """Return the tensors of a result without their graph, in host memory if there is a store."""
        pack = (lambda x: x) if self.store is None else self.store.pack
        return [pack(x.detach()) for x in result]  # the caller's tensors become part of a graph

    def unpack(self, packed: list[HostTensor | Tensor]) -> Tensors:
        """Return the tensors of a packed result: the inverse of `pack`."""
        unpack = (lambda x: x) if self.store is None else self.store.unpack
        return tuple(map(unpack, packed))

    def run(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Run the function. Attention inside it finds this replay."""
        self.runs += 1
        self.which_run = "first run" if self.runs == 1 else "run again"
        if self.runs > 2:
            self.saved.clear()  # left by a second run that ended early
        self.head_chunk_results = []
        token = _current.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    @property
    def has_next(self) -> bool:
        """Whether this is a later run whose next result was saved here."""
        return self.runs > 1 and bool(self.saved)

    @property
    def replays_next(self) -> bool:
        """Whether the next result was saved, here or in a checkpoint around this one."""
        return self.has_next or (self.outer is not None and self.outer.replays_next)

    def next_result(self) -> Tensors | None:
        """Return the next result if it was saved here or in a checkpoint around this one, otherwise None."""
        if self.has_next:
            return self.unpack(self.saved.popleft())
        result = None if self.outer is None else self.outer.next_result()
        if result is not None:
            self.save(result)
        return result

    def save(self, result: Tensors) -> None:
        """Save a result, if this is the first run and results are saved."""
        if self.runs == 1 and self.saves:
            self.saved.append(self.pack(result))

    def once(self, compute: Callable[[], Sequence[Tensor]], replays: Callable[[], object]) -> Tensors:
        result = self.next_result()
        if result is not None:
            replays()
            return result
        result = tuple(compute())
        around: Replay | None = self
        while around is not None:
            around.save(result)
            around = around.outer
        return result


class HeadChunkReplay(Replay):
    """The results of attention in a function whose own backward runs it again, as with head chunks. The function's
    caller saves the results, and passes them to the replay of the second run.

    Args:
        results: of the first run; None: this is the replay of the first run.
        checkpoint_saves: for the second run, the value from the first run's replay.
    """

    def __init__(self, results: Tensors | None = None, checkpoint_saves: bool = False) -> None:
        super().__init__(True, None)
        if results is None:
            self.outer = current()
            self.checkpoint_saves = self.outer is not None and self.outer.checkpoint_saves
        else:
            self.checkpoint_saves, self.runs = checkpoint_saves, 1
            self.saved.append(list(results))

    def tensors(self) -> Tensors:
        """Return all tensors that attention returned in the first run."""
        return tuple(x for result in self.saved for x in result if isinstance(x, Tensor))


class HeadChunkResults:
    """A stack of head chunks' results, for a backward that runs head chunks again inside a checkpointed function.

    It is filled only in the function's second run, just before backward. The results are copied to host memory if the
    checkpoint's results are. Backward takes the last head chunk first, and meanwhile the previous one is fetched.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay, self.number = replay, len(replay.head_chunk_results)
        replay.head_chunk_results.append([])

    @classmethod
    def in_checkpoint(cls) -> HeadChunkResults | None:
        """Return a stack for the checkpointed function that runs now; None outside a checkpoint."""
        replay = current()
        return None if replay is None else cls(replay)

    def push(self, result: Tensors) -> None:
        """Add a head chunk's result, if this is the function's second run."""
        if self.replay.runs > 1:
            self.replay.head_chunk_results[self.number].append(self.replay.pack(result))

    def pop(self) -> Tensors:
        """Remove the last head chunk's result from the stack, and return it."""
        return self.replay.unpack(self.replay.head_chunk_results[self.number].pop())

    def on_device(self) -> list[Any]:
        """Return the results still on the stack, to be changed in place; empty if they are in host memory."""
        return self.replay.head_chunk_results[self.number] if self.replay.store is None else []


TORCH_CHECKPOINT_FILE = noop_context_fn.__code__.co_filename  # where torch's own checkpoint runs its function
_current: ContextVar[Replay | None] = ContextVar("ds_seqpar_replay", default=None)


def replaying(
    function: Callable[..., Result], store: Store | None = None, *, saves: bool = True
) -> Callable[..., Result]:
    """Return the function for one call of a checkpoint: `checkpoint(replaying(layer), x)`.

    The second run consumes what the first one saved. A third run, with a retained graph, computes attention again.

    Args:
        function: what the checkpoint runs.
        store: host memory for what is saved; None leaves it on the device.
        saves: if False, nothing is saved, but attention is marked as checkpointed.
    """
    replay = Replay(saves, store)

    @functools.wraps(function, updated=())
    def run(*args: object, **kwargs: object) -> Result:
        return replay.run(function, *args, **kwargs)

    return run


def current() -> Replay | None:
    """Return the replay of the innermost checkpoint around this call; None outside a checkpoint.

    Also None in one of torch's own checkpoints inside ours. It recomputes after ours has ended, and must find no replay
    in forward either.
    """
    found = _current.get()
    frame: FrameType | None = sys._getframe(1)
    while found is not None and frame is not None and frame.f_code is not Replay.run.__code__:
        if frame.f_code.co_filename == TORCH_CHECKPOINT_FILE:
            return None
        frame = frame.f_back
    return found


seam.finders.append(current)


class Checkpoint:
    """A checkpoint function, `checkpoint(function, *args, **kwargs)`, in which attention runs once if `saves`.

    In compiled code the compiler decides what is saved.

    Args:
        checkpoint: the checkpoint function that it calls.
        saves: whether results of attention are saved.
        store: host memory for the tensors that are saved; None leaves them on the device.
    """

    def __init__(self, checkpoint: Callable[..., Any], saves: bool, store: Store | None = None) -> None:
        self.checkpoint, self.saves, self.store = checkpoint, saves, store

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return self.checkpoint(function, *args, **kwargs)
        with self.store.saving() if self.store is not None else contextlib.nullcontext():
            return self.checkpoint(replaying(function, self.store, saves=self.saves), *args, **kwargs)

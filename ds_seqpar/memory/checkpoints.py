"""Checkpoints that compute attention only once. The first run saves attention's results, and the second replays them.

A checkpoint runs a function, frees the intermediate tensors, and runs the function again when gradients are needed.
With replay, attention's forward pass and its communication run once per step (DistFlashAttn, section 3.3). Saved
results are matched to attention calls by call order only. Every kind of checkpoint is therefore supported, and
operations around attention may differ between the two runs.
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
    """The attention results of one checkpointed function call, in the order of the attention calls.

    Args:
        saves: Whether the first run saves results.
        store: The host memory for saved results, or None to keep results on the device.
    """

    outer: Replay | None = None

    def __init__(self, saves: bool, store: Store | None) -> None:
        self.saved: deque[list[HostTensor | Tensor]] = deque()  # results not yet replayed by a later run
        # the results in each HeadChunkResults for this call
        self.head_chunk_results: list[list[list[HostTensor | Tensor]]] = []
        # checkpoint_saves is False if results are saved only for a head chunk's own backward
        self.saves = self.checkpoint_saves = saves
        self.runs, self.store = 0, store  # runs counts how often the function has run

    def pack(self, result: Tensors) -> list[HostTensor | Tensor]:
        """Return a result's tensors, detached from the graph, in host memory if there is a store."""
        pack = (lambda x: x) if self.store is None else self.store.pack
        return [pack(x.detach()) for x in result]  # the caller's tensors will become part of a graph

    def unpack(self, packed: list[HostTensor | Tensor]) -> Tensors:
        """Return the tensors of a packed result. The inverse of `pack`."""
        unpack = (lambda x: x) if self.store is None else self.store.unpack
        return tuple(map(unpack, packed))

    def run(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Run the function with this Replay active for attention inside the function."""
        self.runs += 1
        self.which_run = "first run" if self.runs == 1 else "run again"
        if self.runs > 2:
            self.saved.clear()  # left over from a second run that ended early
        self.head_chunk_results = []
        token = _current.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    @property
    def has_next(self) -> bool:
        """Whether the function is being repeated and this Replay contains the next result."""
        return self.runs > 1 and bool(self.saved)

    @property
    def replays_next(self) -> bool:
        """Whether this Replay or the Replay of an enclosing checkpoint contains the next result."""
        return self.has_next or (self.outer is not None and self.outer.replays_next)

    def next_result(self) -> Tensors | None:
        """Return the next result, or None if neither this Replay nor an enclosing Replay contains it."""
        if self.has_next:
            return self.unpack(self.saved.popleft())
        result = None if self.outer is None else self.outer.next_result()
        if result is not None:
            self.save(result)
        return result

    def save(self, result: Tensors) -> None:
        """Save a result during the first run, if saving is enabled."""
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
    """The attention results of a function that runs again in its own backward pass, as with head chunks.

    The function's caller saves the results of the first run, and passes the results to the replay of the second run.

    Args:
        results: The results of the first run, or None for the replay of the first run.
        checkpoint_saves: For the second run, the value from the first run's replay.
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
    """A stack of head chunk results, for a backward pass that runs head chunks again inside a checkpointed function.

    The stack is filled only in the function's second run, shortly before the backward pass. Head chunk results are
    stored in host memory if the checkpoint's results are. Backward pops the last head chunk first, while the previous
    head chunk is fetched.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay, self.number = replay, len(replay.head_chunk_results)
        replay.head_chunk_results.append([])

    @classmethod
    def in_checkpoint(cls) -> HeadChunkResults | None:
        """Return a stack for the current checkpointed function, or None outside a checkpoint."""
        replay = current()
        return None if replay is None else cls(replay)

    def push(self, result: Tensors) -> None:
        """Push a head chunk's result, but only during the function's second run."""
        if self.replay.runs > 1:
            self.replay.head_chunk_results[self.number].append(self.replay.pack(result))

    def pop(self) -> Tensors:
        """Pop the last head chunk's result."""
        return self.replay.unpack(self.replay.head_chunk_results[self.number].pop())

    def on_device(self) -> list[Any]:
        """Return the remaining results for modification in place.

        The list is empty if the results are in host memory.
        """
        return self.replay.head_chunk_results[self.number] if self.replay.store is None else []


# the file in which torch's own checkpoint runs its function
TORCH_CHECKPOINT_FILE = noop_context_fn.__code__.co_filename
_current: ContextVar[Replay | None] = ContextVar("ds_seqpar_replay", default=None)


def replaying(
    function: Callable[..., Result], store: Store | None = None, *, saves: bool = True
) -> Callable[..., Result]:
    """Wrap a function for one call of a checkpoint, as in `checkpoint(replaying(layer), x)`.

    The second run consumes the results saved by the first run. A third run, which requires a retained graph, recomputes
    attention.

    Args:
        function: The function that the checkpoint runs.
        store: The host memory for saved results, or None to keep results on the device.
        saves: Whether to save results. If False, attention is still marked as checkpointed.
    """
    replay = Replay(saves, store)

    @functools.wraps(function, updated=())
    def run(*args: object, **kwargs: object) -> Result:
        return replay.run(function, *args, **kwargs)

    return run


def current() -> Replay | None:
    """Return the replay of the innermost enclosing checkpoint, or None.

    Also return None inside one of torch's own checkpoints that is nested in our checkpoint. The recomputation in
    torch's checkpoint starts after our checkpoint has ended, so the first run must not use a replay either.
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
    """A checkpoint function, `checkpoint(function, *args, **kwargs)`, that computes attention once if `saves` is True.

    In compiled code, the compiler decides which tensors to save.

    Args:
        checkpoint: The wrapped checkpoint function.
        saves: Whether to save attention's results.
        store: The host memory for saved tensors, or None to keep tensors on the device.
    """

    def __init__(self, checkpoint: Callable[..., Any], saves: bool, store: Store | None = None) -> None:
        self.checkpoint, self.saves, self.store = checkpoint, saves, store

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return self.checkpoint(function, *args, **kwargs)
        with self.store.saving() if self.store is not None else contextlib.nullcontext():
            return self.checkpoint(replaying(function, self.store, saves=self.saves), *args, **kwargs)

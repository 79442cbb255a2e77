"""Detect models that ignore sequence parallelism because they never call its attention or never read `position_ids`.

An unpatched model still trains with a plausible loss, although each rank attends only to its own tokens. A custom model
that numbers each rank's tokens from 0 also trains with a plausible but incorrect loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..base import compat
from ..base.errors import ConfigError
from ..guards.backward_order import Calls

# operators that copy positions without reading them
COPIES = {f"aten::{name}" for name in ("_to_copy", "alias", "clone", "detach", "expand", "slice.Tensor", "view")}
# functions that need the data, or whose copies would not call `read`; Triton kernels call data_ptr
UNDISPATCHED = {
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "data_ptr", "share_memory_", "__deepcopy__", "__reduce_ex__")
}


class UnusedSharding:
    """Detector for models that never call attention on sharded tensors or never read the positions.

    Detection stops when attention has been called and positions have been read.

    Args:
        calls: Counter for calls of attention and of stateful layers.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.calls_before: int | None = None  # number of calls when the first batch was sharded; None before then
        self.is_met = not calls.of[1]  # a single rank has whole sequences
        self.are_read: bool | None = None  # None until positions are returned to the user

    def begin(self) -> None:
        """Start counting calls, unless counting has already started."""
        if self.calls_before is None:
            self.calls_before = self.calls.count

    def watch(self, positions: Tensor) -> Tensor:
        """Wrap positions in a tensor that records its first read, unless a read is already recorded."""
        if self.is_met or self.are_read:
            return positions
        self.are_read = False
        return _Positions(positions, self.read)

    def read(self) -> None:
        self.are_read = True

    def error(self) -> ConfigError | None:
        """Return the error for a model that computed its loss without using the shards, or None."""
        if self.is_met or self.calls_before is None:
            return None
        if self.calls.count == self.calls_before:
            return ConfigError(
                "a model that is given shards must attend to all ranks' tokens; got one that called no attention of a "
                "SequenceParallel, so that each rank attended to its own tokens alone: give it to initialize, "
                "share_sequences or patch_attention, or call sp.attention in it"
            )
        if self.are_read is False:
            return ConfigError(
                "a model of your own must take the position_ids of a batch that was sharded; got one in which nothing "
                "read them, so that each rank would number its tokens from 0: give them to its rotary or learned "
                "positions, and where it has none, read them once, as by batch['position_ids'].max()"
            )
        self.is_met = True
        return None


class _Positions(Tensor):
    """A tensor of positions that calls a function when the tensor or a copy of it is read."""

    plain: Tensor
    read: Callable[[], None]

    @staticmethod
    def __new__(cls: type[_Positions], plain: Tensor, read: Callable[[], None]) -> _Positions:
        strides, device = plain.stride(), plain.device
        x = compat.make_wrapper(cls, plain.shape, strides=strides, dtype=plain.dtype, device=device)
        x.plain, x.read = plain, read
        return x

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in UNDISPATCHED:
            args[0].read()
            args = (args[0].plain, *args[1:])
        with compat.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        reads = [x.read for x in compat.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        args, kwargs = compat.tree_map(lambda x: x.plain if isinstance(x, cls) else x, (args, kwargs or {}))
        result = op(*args, **kwargs)
        if op.name() in COPIES:
            return cls(result, reads[0])
        for read in reads:
            read()
        return result

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # assume that a compiled graph reads the positions
        self.read()
        return ["plain"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> _Positions:
        return cls(parts["plain"], lambda: None)

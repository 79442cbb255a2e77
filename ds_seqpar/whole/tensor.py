"""Tensors of whole sequences, whose tokens stay on the ranks that computed them until the values are read.

To user code, a `WholeTensor` looks like the whole tensor. A `WholeTensor` has the whole shape, and every torch function
returns the same result and gradients as for the whole tensor. Internally, a WholeTensor stores this rank's shard.
Functions that process tokens independently run on the shard and return another WholeTensor. Examples are conversions,
arithmetic, softmax, and slices of rows and tokens. Any other function first gathers the whole tensor from all ranks
that share the sequence, and the gathered tensor is kept for later calls.

All ranks that share a sequence run the same computation on the whole tensor, so each rank receives the whole gradient.
Backward selects this rank's shard of the gradient, and multiplies the shard by the number of ranks that share the
sequence, because gradients are averaged over all ranks in the job.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..base import compat
from ..base.compat import tree_leaves, tree_map
from ..base.errors import InputError
from ..data.batch_layout import BatchLayout
from ..data.sharding import Sharding
from ..guards.waits import explaining_failure
from .shard_spec import ShardSpec

# given (operator, arguments by name), returns the result, or None to gather the whole
Rule = Callable[[Any, dict[str, Any]], Any]
RULES: dict[str, Rule] = {}  # rules by operator name; filled by rules.py


class WholeTensor(Tensor):
    """A tensor of shape (rows, tokens, ...), or (rows * tokens, ...) if flat, of which this rank stores a shard."""

    shard: Tensor  # (1 or rows, local tokens, ...), without autograd
    shard_spec: ShardSpec  # the assignment of tokens to ranks
    flat: bool  # whether rows and tokens are one dim
    is_piece: bool  # whether this is a view or a slice of another WholeTensor
    pieces: list[weakref.ref[WholeTensor]]  # all views and slices of one tensor, in a shared list
    _gathered: Tensor | None  # the whole tensor, after it has been gathered

    @staticmethod
    def __new__(
        cls: type[WholeTensor], shard: Tensor, shard_spec: ShardSpec, flat: bool = False, of: WholeTensor | None = None
    ) -> WholeTensor:
        """Wrap this rank's shard.

        If the new tensor is a view or a slice, `of` is the WholeTensor from which it was made.
        """
        lead = (shard_spec.rows * shard_spec.tokens,) if flat else (shard_spec.rows, shard_spec.tokens)
        tensor = compat.make_wrapper(cls, (*lead, *shard.shape[2:]), dtype=shard.dtype, device=shard.device)
        tensor.shard, tensor.shard_spec, tensor.flat, tensor._gathered = shard, shard_spec, flat, None
        tensor.is_piece, tensor.pieces = of is not None, [] if of is None else of.pieces
        if of is not None:
            tensor.pieces[:] = [piece for piece in tensor.pieces if piece() is not None] + [weakref.ref(tensor)]
        return tensor

    @property
    def placement(self) -> BatchLayout | None:
        """The batch's placement for `sp.gather` and `sp.shard`, or None for the configured layout."""
        return self.shard_spec.placement

    @property
    def local(self) -> Tensor:
        """This rank's differentiable shard (rows, local tokens, ...), or (1, local tokens, ...) if rows are
        concatenated.

        To train on the shards, compute a loss from `local` on every rank, and add up the losses with
        `sp.sum_over_ranks`.
        """
        return _Local.apply(self)

    def whole(self) -> Tensor:
        """Return the whole tensor, plain and differentiable.

        The first call is collective across the ranks that share the sequence.
        """
        return _Gathered.apply(self)

    def gathered(self) -> Tensor:
        """Return the whole tensor, plain and without gradients.

        The first call is collective across the ranks that share the sequence.
        """
        if self._gathered is None:
            whole = self.shard_spec.gathered(self.shard)
            self._gathered = whole.flatten(0, 1) if self.flat else whole
        return self._gathered

    @property
    def lead(self) -> int:
        """The number of leading dims for rows and tokens, which is 1 if flat and 2 otherwise."""
        return 1 if self.flat else 2

    def is_like(self, other: WholeTensor) -> bool:
        """Return whether each rank holds the same tokens of both tensors, and both have the same `flat`."""
        return self.shard_spec.is_like(other.shard_spec) and self.flat == other.flat

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with compat.without_torch_function():
            if func is Tensor.__getitem__ and (sliced := _sliced(*args)) is not None:
                return sliced
            if func is Tensor.__setitem__:
                _check_change(args[0])
                tree_map(_gathered, (args, kwargs))
            if func in UNCHANGEABLE:
                _refuse_change(args[0])
            if func in PLAIN:
                args, kwargs = tree_map(plain, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if outs := [kwargs[a.name] for a in compat.schema(func).arguments if a.is_out and a.name in kwargs]:
            if isinstance(outs[0], WholeTensor):
                _refuse_change(outs[0])
            return func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))
        if args and isinstance(args[0], WholeTensor) and (torch.Tag.inplace_view in func.tags or name in RESHAPING):
            _refuse_change(args[0])
        changed = args[0] if compat.schema(func).is_mutable and args and isinstance(args[0], WholeTensor) else None
        if changed is not None:
            name = name.removesuffix("_")
            _check_change(changed)
        result, rule = None, RULES.get(name)
        is_whole = all(x._gathered is not None for x in wholes(args, kwargs))  # the whole tensor may have been modified
        if rule is not None and not is_whole and (changed is None or changed._gathered is None):
            result = rule(func, _by_name(func, args, kwargs))
        if result is None:
            result = func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))
        return result if changed is None else changed


def whole_of(shard: Tensor, shard_spec: ShardSpec) -> WholeTensor:
    """Return the differentiable WholeTensor for all ranks' shards.

    Ranks communicate when the values are read, and in the backward pass.

    Args:
        shard: (rows, local tokens, ...), or (1, local tokens, ...) if rows are concatenated.
        shard_spec: The assignment of tokens to ranks.
    """
    return _FromShard.apply(shard, shard_spec)


def whole_loss(sp: Sharding, local: Tensor) -> Tensor:
    """Return the sum of the ranks' scalar shares of a loss.

    The call and its backward pass are collective across the ranks that share a sequence.

    The gradient of a share is `size` times the gradient of the loss, because gradients are averaged over ranks.

    Args:
        sp: The SequenceParallel.
        local: This rank's scalar share of the loss.
    """
    return _Sum.apply(local, sp)


def shard_of(x: Tensor, shard_spec: ShardSpec, flat: bool = False) -> Tensor:
    """Return this rank's shard of a plain tensor or WholeTensor. `flat` means that rows and tokens form one dim."""
    if isinstance(x, WholeTensor):
        if x._gathered is None and x.shard_spec.is_like(shard_spec):
            return x.shard
        x = x.gathered()
    return shard_spec.shard(x.unflatten(0, (shard_spec.rows, -1)) if flat else x)


class _FromShard(Function):
    """Convert a shard to a WholeTensor."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shard_spec: ShardSpec) -> WholeTensor:
        ctx.shard_spec = shard_spec
        shard_spec.sp.calls.follow(f"whole {shard_spec.name}")
        return WholeTensor(shard.detach(), shard_spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.shard_spec.sp.calls.enter()  # otherwise, a rank that gathers at this point would hang
        return shard_of(grad, ctx.shard_spec) * ctx.shard_spec.sp.size, None


class _Sum(Function):
    """Sum the shares of a loss over the ranks that share a sequence."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sp: Sharding) -> Tensor:
        ctx.sp, total = sp, local.detach().clone()
        sp.calls.follow("whole loss")
        if (group := sp.group_for(local)) is not None:  # torch would interpret None as all ranks
            with explaining_failure("the sum of the loss over ranks", group):
                dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sp.calls.enter()
        return grad * ctx.sp.size, None


class _Gathered(Function):
    """Convert a WholeTensor to the whole tensor as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: WholeTensor) -> Tensor:
        ctx.shard_spec, ctx.flat = x.shard_spec, x.flat
        return x.gathered().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return WholeTensor(shard_of(grad, ctx.shard_spec, ctx.flat), ctx.shard_spec, ctx.flat)


class _Local(Function):
    """Convert a WholeTensor to this rank's shard.

    The backward pass divides by the number of ranks, because both `sum_over_ranks` and `_FromShard` multiply by that
    number.
    """

    @staticmethod
    def forward(ctx: Any, x: WholeTensor) -> Tensor:
        ctx.shard_spec, ctx.flat = x.shard_spec, x.flat
        return shard_of(x, x.shard_spec, x.flat).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return WholeTensor(grad / ctx.shard_spec.sp.size, ctx.shard_spec, ctx.flat)


class _Narrowed(Function):
    """Slice rows and tokens of a WholeTensor. Each rank keeps those of its tokens that are in the slice."""

    @staticmethod
    def forward(ctx: Any, x: WholeTensor, rows: slice, tokens: slice) -> WholeTensor:
        ctx.shape, ctx.shard_spec, ctx.rows = x.shard.shape, x.shard_spec, rows
        ctx.narrow, ctx.places = x.shard_spec.narrow(rows, tokens, x.device)
        shard = x.shard if x.shard_spec.joined else x.shard[rows]
        return WholeTensor(shard.index_select(1, ctx.places), ctx.narrow, of=x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shard = shard_of(grad, ctx.narrow)
        whole = shard.new_zeros(ctx.shape)
        (whole if ctx.shard_spec.joined else whole[ctx.rows]).index_copy_(1, ctx.places, shard)
        return WholeTensor(whole, ctx.shard_spec), None, None


def _sliced(x: Any, index: Any) -> Any:
    """Return x[index] without communication if slices or integers select its rows and tokens, otherwise None."""
    if not isinstance(x, WholeTensor) or x.flat or x._gathered is not None:
        return None
    index = list(index) if isinstance(index, tuple) else [index]
    if any(i is None for i in index):
        return None
    if (position := next((position for position, i in enumerate(index) if i is Ellipsis), None)) is not None:
        index[position : position + 1] = [slice(None)] * (x.dim() - len(index) + 1)
    index += [slice(None)] * (2 - len(index))
    lead_index, rest = index[:2], index[2:]
    slices = [_as_slice(i, size) for i, size in zip(lead_index, x.shape, strict=False)]
    if None in slices or slices == [slice(None)] * 2:
        return None
    narrowed = _Narrowed.apply(x, *slices)
    numbers = sum(isinstance(i, int) for i in lead_index)
    if numbers:
        narrowed = narrowed.flatten(0, 1)  # one of the two dims has length 1
    if numbers == 2:
        narrowed = narrowed.select(0, 0)
    return narrowed[(*(slice(None) for i in lead_index if isinstance(i, slice)), *rest)] if rest else narrowed


def _as_slice(index: Any, size: int) -> slice | None:
    """Convert a slice or an integer to a slice. Return None for any other index."""
    if isinstance(index, slice) and (index.step is None or index.step > 0):
        return index
    if type(index) is int and -size <= index < size:
        return slice(index % size, index % size + 1)
    return None


def _check_change(x: Any) -> None:
    """Raise InputError if a view or slice, or a tensor with views or slices, is changed in place.

    Views and slices do not share memory, so a change would affect only one tensor.
    """
    if isinstance(x, WholeTensor) and (x.is_piece or any(piece() is not None for piece in x.pieces)):
        raise InputError(
            "a view or a slice of a model's whole output cannot be changed in place, nor a tensor that has one; got "
            f"one of {x.shard_spec.name}, make a new tensor, or change .whole() of the output"
        )


def _refuse_change(x: Any) -> NoReturn:
    """Raise InputError, since a WholeTensor has no memory that could be resized or replaced."""
    raise InputError(
        "a model's whole output cannot get another shape or other memory in place, nor be an out=; got one of "
        f"{x.shard_spec.name}, make a new tensor"
    )


def plain(x: Any) -> Any:
    """Return `x.whole()` for a WholeTensor, and return anything else unchanged.

    The first call for a WholeTensor is collective.
    """
    return _Gathered.apply(x) if isinstance(x, WholeTensor) else x


def _gathered(x: Any) -> Any:
    return x.gathered() if isinstance(x, WholeTensor) else x


def wholes(*arguments: Any) -> list[WholeTensor]:
    """Return all WholeTensors in the arguments, including nested arguments."""
    return [x for x in tree_leaves(arguments) if isinstance(x, WholeTensor)]


def _by_name(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, including defaults."""
    defaults = {a.name: a.default_value for a in compat.schema(func).arguments if a.has_default_value()}
    return {**defaults, **{a.name: x for a, x in zip(compat.schema(func).arguments, args, strict=False)}, **kwargs}


# methods that read a tensor's memory
MEMORY = """
    numpy tolist data_ptr storage untyped_storage __repr__ __format__ __reduce_ex__ __deepcopy__ __array__ __dlpack__
"""
DATA = compat.tensor_data
# functions that receive the whole tensor as a plain tensor
PLAIN = {
    *(getattr(Tensor, name) for name in MEMORY.split()),
    DATA.__get__,
    *(f for of in (torch, Tensor) for f in (of.quantile, of.nanquantile)),  # change shapes in place
}
UNCHANGEABLE = {DATA.__set__}  # functions that raise an error
RESHAPING = {"resize_", "resize_as_", "set_"}  # change shapes in place, but lack the tag inplace_view

"""Accumulators, to which the results of kernel launches are added.

An accumulator is initially empty. Then it holds the tensors that the kernel returned, in their dtypes. After a second
result is added, it is in accum_dtype: fp32, or fp64 for fp64. Every tensor has its tokens on dim 1.

Results over disjoint keys are merged by an online softmax. An attention sink (gpt-oss) is one more score per head,
whose value is 0. It is merged into (out, lse) once, after all partial results, and backward reads the merged tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compiler.tiles.tiles import MERGED_AT_ONCE, Rows, Tile
from .reference import Kernel

# elements that torch's operations take at once on a device. Each temporary of theirs has 256 MiB in fp32 then: a merge
# needs none of that size, a delta two, and an output from delta three
AT_ONCE = 1 << 26
# of add-ons: functions that return a namespace with `merge_`, `rowsum` and `out_with_rowsum`, each in one launch, where
# these take a tensor, else None
FUSED: list[Callable[[Tensor], Any]] = []


def fused(x: Tensor) -> Any:
    """Return the namespace of fused ops that take x; None if there is none, so that torch's operations are used."""
    return next(filter(None, (ops(x) for ops in FUSED)), None)


Tensors = tuple[Tensor, ...]
INF = float("inf")
CAUSAL = ("causal", "upper")  # kinds of launches that are causal for a kernel: "upper" in reverse order


class Accumulator:
    """The accumulator of one block: tensors whose rows are `blank` until something is added.

    Args:
        make: Returns uninitialized tensors in accum_dtype, in the memory that the result is sent from. It is called at
            most once, and only if needed.
    """

    blank: tuple[float, float] = (0.0, 0.0)

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = make
        self._held: Tensors | None = None
        self._rows: Rows | None = None  # the only rows that the held tensors have; None: all
        self._end = 0  # all rows from this one on are blank, and not yet written in the held tensors
        self._materialized = False  # whether the held tensors are in memory of `make` or of a message

    @property
    def held(self) -> Tensors | None:
        """Return the held tensors; None while the accumulator is empty."""
        return self._held

    @property
    def written(self) -> Tensors:
        """Return the written rows of the held tensors."""
        return tuple(x if self._rows else x[:, : self._end] for x in self._held or ())

    def expect(self, rows: Rows) -> None:
        """Prepare for an `add` to these rows, before the kernel is called. Rows that will be added to are cast to
        accum_dtype now, so that both their copies, in the inputs' dtype and in accum_dtype, are never in memory
        together with the kernel's result.
        """
        if self._held is not None and rows.start < self._end:
            self._widen()

    def add(self, new: Tensors, rows: Rows, tokens: int) -> None:
        """Add the tensors that a kernel returned.

        Args:
            new: The tensors (B, size, ...), or (B, groups, size, ...) for several groups. The first tensors are held
                without a copy, and may be changed later.
            rows: Their rows in the block. Several groups may share rows.
            tokens: The number of rows of the block.
        """
        if self._held is None and rows.groups == 1:
            self._held, self._rows, self._end = new, None if rows.all_of(tokens) else rows, rows.end
        elif self._held is None and rows.all_of(tokens):
            self._held, self._end = tuple(x.flatten(1, 2) for x in new), tokens
        else:
            for group_slice, slice_rows in rows.apart():
                self._join(tuple(x[:, :, group_slice] if rows.groups > 1 else x for x in new), slice_rows, tokens)

    def _join(self, new: Tensors, rows: Rows, tokens: int) -> None:
        """Add to rows that are all different. Blank rows are overwritten."""
        blank = rows.start >= self._end
        if not blank:
            self._widen()
        elif self._held is None or self._rows is not None:
            token_dims = 2 if rows.groups > 1 else 1
            self._move(tuple(x.new_empty(x.shape[0], tokens, *x.shape[1 + token_dims :]) for x in new))
        self._write_blank(rows.start if blank and rows.step <= rows.size else rows.end)
        targets = tuple(map(rows.of, self._held or ()))
        if blank:
            for x, tensor in zip(targets, new, strict=True):
                x.copy_(tensor)
        else:
            self._combine(targets, new)
        self._end = max(self._end, rows.end)

    def add_(self, *arrived: Tensor) -> None:
        """Add another rank's partial result for all rows. Its tensors may be changed: if they are in accum_dtype, the
        held tensors are added to them, and they become the held tensors.
        """
        if self._held is None:
            self._held, self._materialized = arrived, True
        elif self._is_wide(arrived):
            rows = self._rows or Rows(0, self._end)
            self._combine(tuple(map(rows.of, arrived)), self._held if self._rows else tuple(map(rows.of, self._held)))
            self._held, self._rows, self._materialized = arrived, None, True
        else:
            self._combine(self.settled(), arrived)
        self._end = arrived[0].shape[1]

    def merge(self, *arrived: Tensor) -> None:
        """Add another rank's partial result for all rows, without changing its tensors."""
        self._combine(self.settled(), arrived)

    def materialize(self) -> Tensors:
        """Return the tensors in accum_dtype, in the memory from which they are sent."""
        held = self.settled()
        if not self._materialized:
            self._move(self._make(), materialized=True)
        return self._held or held

    def copy_into(self, targets: Tensors) -> None:
        """Write the result into these tensors, in their dtype."""
        for target, x in zip(targets, self.settled(), strict=True):
            target.copy_(x)

    def finish(self, *dtypes: torch.dtype | None) -> Tensors:
        """Return the tensors in these dtypes (None: without a cast), contiguous and in separate memory.

        Rows to which nothing was added are blank. A kernel's tensors that have the dtype are neither cast nor copied.
        """
        if self._held is None or self._rows is not None:
            self._widen()
        self._write_blank()
        held = list(self._held or ())
        self._held = None
        return tuple(_owned(held.pop(0), dtype, self._materialized) for dtype in dtypes)  # each freed before the next

    def settled(self) -> Tensors:
        """Return the held tensors in accum_dtype, with all rows."""
        self._widen()
        self._write_blank()
        return self._held or ()

    def _widen(self) -> None:
        """Cast the held tensors to accum_dtype, with all rows."""
        if self._held is None or self._rows is not None or not self._is_wide(self._held):
            self._move(self._make(), materialized=True)

    def _move(self, targets: Tensors, materialized: bool = False) -> None:
        """Copy the held tensors into these, which become the held tensors."""
        rows, held = self._rows or Rows(0, self._end), self._held
        self._held, self._rows, self._materialized = targets, None, materialized
        if held is None:
            return
        self._end = 0
        self._write_blank(rows.start)
        for target, x in zip(targets, held, strict=True):
            rows.of(target).copy_(rows.of(x) if x.shape[1] > rows.size else x)
        self._end = rows.end

    def _write_blank(self, end: int | None = None) -> None:
        """Write blanks into the blank rows before row `end`, or into all of them."""
        if self._held and self._end >= (self._held[0].shape[1] if end is None else end):
            return
        for x, value in zip(self._held or (), self.blank, strict=False):
            last = x.shape[1] if end is None else end
            if last > self._end:
                x[:, self._end : last].fill_(value)
        self._end = max(self._end, (self._held or ())[0].shape[1] if end is None else end)

    def _is_wide(self, tensors: Tensors) -> bool:
        return tensors[0].dtype in (torch.float32, torch.float64)

    def _combine(self, targets: Tensors, new: Tensors) -> None:
        """Add new tensors to tensors of the same rows, in place."""
        raise NotImplementedError


class Softmax(Accumulator):
    """The accumulator (out, lse) of one block of queries: out (B, n, H, D) in any dtype, always in accum_dtype."""

    blank = (0.0, -INF)

    def _combine(self, targets: Tensors, new: Tensors) -> None:
        merge_(*targets, *new)


class Sum(Accumulator):
    """The accumulated gradients of one block: (dq,), or (dk, dv)."""

    def _combine(self, targets: Tensors, new: Tensors) -> None:
        for target, x in zip(targets, new, strict=True):
            if x.is_cpu:
                in_pieces(torch.Tensor.add_, target, x)
            else:
                target.add_(x)


def _owned(x: Tensor, dtype: torch.dtype | None, copy: bool) -> Tensor:
    """Return x in the dtype (None: in its own), contiguous. `copy` is needed if tensors of one message share memory,
    since results of an op must not.
    """
    if copy or dtype not in (None, x.dtype):
        return x.to(dtype or x.dtype, memory_format=torch.contiguous_format, copy=copy)
    return x.contiguous()


# ---- launches of a kernel


def _operand(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """Return the rows of x in a kernel's form: groups joined to the batch, reversed for upper; a view if possible."""
    if not upper and rows.size == x.shape[1]:
        return x
    x = rows.of(x)
    if rows.groups > 1:
        x = x.flatten(0, 1)
    return x.flip(1) if upper else x


def _result(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """Return a kernel's result in the shape and order of the rows: the inverse of `_operand`."""
    if upper:
        x = x.flip(1)
    return x.unflatten(0, (-1, rows.groups)) if rows.groups > 1 else x


def _keywords(launch: Tile) -> dict[str, Any]:
    """Return the arguments that only kernels with bands or windows take."""
    return (
        {"width": launch.width} if launch.kind == "band" else {"segments": launch.segments} if launch.segments else {}
    )


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, launches: Sequence[Tile], scale: float, into: Accumulator
) -> None:
    """Add attention over the tiles of the launches to an accumulator.

    Args:
        kernel: The kernel to call.
        q: (B, Sq, Hq, D), with a stride of 1 in the last dimension.
        k: (B, Sk, Hkv, D), with a stride of 1 in the last dimension.
        v: (B, Sk, Hkv, D), with a stride of 1 in the last dimension.
        launches: The result of `compiler.tiles.launches.launches` for this kernel's support.
        scale: The factor of q . k.
        into: The accumulator, a `Softmax`.
    """
    for launch in launches:
        into.expect(launch.sides[0])
        into.add(_attend(kernel, q, k, v, launch, scale), launch.sides[0], q.shape[1])


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, launch: Tile, scale: float) -> Tensors:
    (rows, columns), upper = launch.sides, launch.kind == "upper"
    operands = (_operand(q, rows, upper), _operand(k, columns, upper), _operand(v, columns, upper))
    results = kernel.forward(*operands, launch.kind in CAUSAL, scale, **_keywords(launch))
    del operands  # copies, where they are in reverse order
    return tuple(_result(x, rows, upper) for x in results)


def backward(
    kernel: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    launches: Sequence[Tile], scale: float, dq: Accumulator, dkv: Accumulator,
) -> None:  # fmt: skip
    """Add the gradients of the tiles of the launches to accumulators.

    Args:
        kernel: The kernel to call.
        do: The gradient of out, with q's shape and dtype.
        q: As in `forward`.
        k: As in `forward`.
        v: As in `forward`.
        out: The output of whole rows, not only of these launches, with q's shape and dtype.
        lse: (B, Sq, Hq) in accum_dtype, of whole rows too.
        launches: As in `forward`.
        scale: As in `forward`.
        dq: A `Sum` of (dq,).
        dkv: A `Sum` of (dk, dv).
    """
    for launch in launches:
        _add_gradients(kernel, (do, q, k, v, out, lse), launch, scale, dq, dkv)


def _add_gradients(
    kernel: Kernel, operands: Tensors, launch: Tile, scale: float, dq: Accumulator, dkv: Accumulator
) -> None:
    (rows, columns), upper = launch.sides, launch.kind == "upper"
    sides = (rows, rows, columns, columns, rows, rows)
    dq.expect(rows)
    dkv.expect(columns)
    do, q, k, v, out, lse = [_operand(x, side, upper) for x, side in zip(operands, sides, strict=True)]
    grads = [*kernel.backward(do, q, k, v, out, lse, launch.kind in CAUSAL, scale, **_keywords(launch))]
    del do, q, k, v, out, lse
    for index, side in enumerate((rows, columns, columns)):
        grads[index] = _result(grads[index], side, upper)
    dq.add((grads[0],), rows, operands[1].shape[1])
    dkv.add(tuple(grads[1:]), columns, operands[2].shape[1])


# ---- the online softmax


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge (new_out, new_lse) into (out, lse), in place.

    The two weights sum to 1 regardless of the rounding of the merged lse. A row that saw no key on either side keeps
    out 0 and lse -inf.

    Args:
        out: (B, S, H, D) in fp32, or fp64 for fp64 attention. There may be further dimensions before the last one.
        lse: (B, S, H) in the same dtype.
        new_out: Of out's shape, in any dtype.
        new_lse: Of lse's shape.
    """
    if ops := fused(out):
        ops.merge_(out, lse, new_out, new_lse)
    else:
        in_pieces(_merge_, out, new_out, lse, new_lse)


def _merge_(out: Tensor, new_out: Tensor, lse: Tensor, new_lse: Tensor) -> None:
    difference = _difference(lse, new_lse)
    out.mul_(torch.sigmoid(difference).unsqueeze(-1))
    if new_out.is_cpu:  # where torch would copy it without being counted; on a device it casts each element it reads
        new_out = new_out.to(out.dtype)
    out.addcmul_(new_out, torch.sigmoid(difference.neg_()).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b of two log-sum-exps, and 0 where both have no scores, since -inf - -inf is NaN."""
    return (a - b).nan_to_num_()


def in_pieces(function: Callable[..., object], *tensors: Tensor, limit: int | None = None) -> None:
    """Apply an elementwise in-place function to pieces of the tensors; the first tensor is the largest. So on CPUs the
    function's temporaries, and torch's own if dtypes differ, take at most a 16th of the first tensor's size, and stay
    in the caches. On devices, where a call may cost more than its elements, a piece has `AT_ONCE` elements. The last
    dimension is not cut.
    """
    x = tensors[0]
    limit = limit or (max(MERGED_AT_ONCE, x.numel() // 16) if x.is_cpu else AT_ONCE)
    dim = max(range(x.dim() - 1), key=lambda dim: x.shape[dim])
    if x.numel() <= limit or x.shape[dim] == 1:
        function(*tensors)
        return
    half = x.shape[dim] // 2
    in_pieces(function, *(y.narrow(dim, 0, half) for y in tensors), limit=limit)
    in_pieces(function, *(y.narrow(dim, half, y.shape[dim] - half) for y in tensors), limit=limit)


# ---- sinks


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge sinks into out and lse, in place.

    The out of a row that saw no key stays 0. A sink of -inf changes nothing, and one of inf takes all weight.

    Args:
        out: (B, S, H, D) in any dtype.
        lse: (B, S, H) in accum_dtype.
        sinks: (H,), or (B, S, H) with one per row.
    """
    sinks = sinks.to(lse.dtype)
    out.mul_(torch.sigmoid(_difference(lse, sinks)).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, sinks))


def sinks_deltas(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return each row's sink weight, exp(sink - lse), times its delta, as (B, S, H).

    A row's part of the sink's gradient is minus this, as for any key whose value is 0. If sink and lse are both -inf,
    the row has neither key nor sink; if both are inf, its out and delta are 0.

    Args:
        delta: rowsum(do * out), (B, S, H).
        lse: (B, S, H), after `merge_sinks_`.
        sinks: (H,) or (B, S, H).
    """
    return torch.exp(sinks.to(lse.dtype) - lse).nan_to_num_() * delta

"""Accumulators that add up the results of kernel launches.

An accumulator starts empty. After the first result, an accumulator holds the kernel's tensors in their original dtypes.
After the second result, the accumulator's tensors are in accum_dtype (fp32, or fp64 for fp64 inputs). The token
dimension of every tensor is dim 1.

Results for disjoint sets of keys are merged with an online softmax. An attention sink (gpt-oss) is an additional score
per head whose value vector is 0. The sink is merged into (out, lse) once, after all partial results. The backward pass
uses the merged tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compiler.tiles.tiles import MERGED_AT_ONCE, Rows, Tile
from .reference import Kernel

# Number of elements that torch's operations process at once on a device. Each temporary then takes 256 MiB in fp32.
# Merging needs no such temporaries, computing delta needs two, and computing out from delta needs three.
AT_ONCE = 1 << 26
# Functions that add-ons register. For a supported tensor, a function returns a namespace with `merge_`, `rowsum` and
# `out_with_rowsum`, each of which runs in one launch. For any other tensor, the function returns None.
FUSED: list[Callable[[Tensor], Any]] = []


def fused(x: Tensor) -> Any:
    """Return the namespace of fused ops that support x, or None if only torch's own operations support x."""
    return next(filter(None, (ops(x) for ops in FUSED)), None)


Tensors = tuple[Tensor, ...]
INF = float("inf")
CAUSAL = ("causal", "upper")  # launch kinds that run as causal kernels, "upper" in reverse order


class Accumulator:
    """The accumulator for one block. Its tensors contain the value `blank` in all rows to which nothing has been added.

    Args:
        make: Function that returns uninitialized tensors in accum_dtype, backed by the memory from which the result is
            sent. `make` is called at most once, and only if needed.
    """

    blank: tuple[float, float] = (0.0, 0.0)

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = make
        self._held: Tensors | None = None
        self._rows: Rows | None = None  # rows of the block that the held tensors cover; None: all rows
        self._end = 0  # rows starting at this index are blank and have not been written in the held tensors
        self._materialized = False  # whether the held tensors use memory from `make` or from a message

    @property
    def held(self) -> Tensors | None:
        """The held tensors, or None if the accumulator is empty."""
        return self._held

    @property
    def written(self) -> Tensors:
        """The written rows of the held tensors."""
        return tuple(x if self._rows else x[:, : self._end] for x in self._held or ())

    def expect(self, rows: Rows) -> None:
        """Prepare for an `add` to the given rows, before the kernel is called.

        Existing rows that `add` will update are cast to accum_dtype now. Otherwise, copies in both dtypes would be in
        memory at the same time as the kernel's result.
        """
        if self._held is not None and rows.start < self._end:
            self._widen()

    def add(self, new: Tensors, rows: Rows, tokens: int) -> None:
        """Add the tensors that a kernel returned.

        Args:
            new: Tensors (B, size, ...), or (B, groups, size, ...) for several groups. The tensors of the first call are
                stored without a copy, and may be modified later.
            rows: Rows of the block to which the tensors belong. Several groups may share rows.
            tokens: Number of rows of the block.
        """
        if self._held is None and rows.groups == 1:
            self._held, self._rows, self._end = new, None if rows.all_of(tokens) else rows, rows.end
        elif self._held is None and rows.all_of(tokens):
            self._held, self._end = tuple(x.flatten(1, 2) for x in new), tokens
        else:
            for group_slice, slice_rows in rows.apart():
                self._join(tuple(x[:, :, group_slice] if rows.groups > 1 else x for x in new), slice_rows, tokens)

    def _join(self, new: Tensors, rows: Rows, tokens: int) -> None:
        """Add tensors to distinct rows, overwriting rows that are blank."""
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
        """Add another rank's partial result for all rows. The partial result's tensors may be modified.

        If the arrived tensors are in accum_dtype, the held tensors are added to the arrived tensors in place, and the
        arrived tensors replace the held tensors.
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
        """Add another rank's partial result for all rows, without modifying its tensors."""
        self._combine(self.settled(), arrived)

    def materialize(self) -> Tensors:
        """Return the tensors in accum_dtype, stored in the memory from which they are sent."""
        held = self.settled()
        if not self._materialized:
            self._move(self._make(), materialized=True)
        return self._held or held

    def copy_into(self, targets: Tensors) -> None:
        """Write the result to the given tensors, in their dtypes."""
        for target, x in zip(targets, self.settled(), strict=True):
            target.copy_(x)

    def finish(self, *dtypes: torch.dtype | None) -> Tensors:
        """Return the tensors in the given dtypes (None: without a cast), contiguous and in separate memory.

        Rows to which nothing was added are blank. A kernel's tensors that already have the requested dtype are neither
        cast nor copied.
        """
        if self._held is None or self._rows is not None:
            self._widen()
        self._write_blank()
        held = list(self._held or ())
        self._held = None
        # frees each held tensor before the next cast
        return tuple(_owned(held.pop(0), dtype, self._materialized) for dtype in dtypes)

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
        """Copy the held tensors to the targets, and hold the targets from then on."""
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
        """Fill all blank rows, or only the blank rows before row `end`."""
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
    """The accumulator for the out and lse of one query block. The dtype of out (B, n, H, D) is arbitrary, while lse is
    always in accum_dtype.
    """

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
    """Return x as a contiguous tensor in the given dtype (None: unchanged).

    `copy` is needed if tensors of one message share memory, since an op's results must not share memory.
    """
    if copy or dtype not in (None, x.dtype):
        return x.to(dtype or x.dtype, memory_format=torch.contiguous_format, copy=copy)
    return x.contiguous()


# ---- launches of a kernel


def _operand(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """Return the rows of x in the format that kernels expect, as a view if possible.

    Groups are merged into the batch dimension. For "upper" tiles, the rows are in reverse order.
    """
    if not upper and rows.size == x.shape[1]:
        return x
    x = rows.of(x)
    if rows.groups > 1:
        x = x.flatten(0, 1)
    return x.flip(1) if upper else x


def _result(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """Return a kernel's result in the shape and order of the rows, the inverse of `_operand`."""
    if upper:
        x = x.flip(1)
    return x.unflatten(0, (-1, rows.groups)) if rows.groups > 1 else x


def _keywords(launch: Tile) -> dict[str, Any]:
    """Return the extra arguments for kernels with bands or windows."""
    return (
        {"width": launch.width} if launch.kind == "band" else {"segments": launch.segments} if launch.segments else {}
    )


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, launches: Sequence[Tile], scale: float, into: Accumulator
) -> None:
    """Compute attention over each launch's tiles and add the results to an accumulator.

    Args:
        kernel: The kernel to call.
        q: (B, Sq, Hq, D), with a stride of 1 in the last dimension.
        k: (B, Sk, Hkv, D), with a stride of 1 in the last dimension.
        v: (B, Sk, Hkv, D), with a stride of 1 in the last dimension.
        launches: The launches that `compiler.tiles.launches.launches` returns for this kernel's `support`.
        scale: Factor by which q . k is multiplied.
        into: A `Softmax` that accumulates the results.
    """
    for launch in launches:
        into.expect(launch.sides[0])
        into.add(_attend(kernel, q, k, v, launch, scale), launch.sides[0], q.shape[1])


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, launch: Tile, scale: float) -> Tensors:
    (rows, columns), upper = launch.sides, launch.kind == "upper"
    operands = (_operand(q, rows, upper), _operand(k, columns, upper), _operand(v, columns, upper))
    results = kernel.forward(*operands, launch.kind in CAUSAL, scale, **_keywords(launch))
    del operands  # operands in reverse order are copies, so free them
    return tuple(_result(x, rows, upper) for x in results)


def backward(
    kernel: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    launches: Sequence[Tile], scale: float, dq: Accumulator, dkv: Accumulator,
) -> None:  # fmt: skip
    """Compute the gradients for each launch's tiles and add them to accumulators.

    Args:
        kernel: The kernel to call.
        do: Gradient of out, with q's shape and dtype.
        q: As in `forward`.
        k: As in `forward`.
        v: As in `forward`.
        out: Output for whole rows, not only for these launches, with q's shape and dtype.
        lse: The lse for whole rows, (B, Sq, Hq) in accum_dtype.
        launches: As in `forward`.
        scale: As in `forward`.
        dq: A `Sum` that accumulates (dq,).
        dkv: A `Sum` that accumulates (dk, dv).
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

    The weights of the two results sum to 1 no matter how the merged lse is rounded. For rows without any key in either
    result, `out` stays 0 and `lse` stays -inf.

    Args:
        out: (B, S, H, D) in fp32, or fp64 for fp64 attention. There may be additional dimensions before the last
            dimension.
        lse: (B, S, H) in the same dtype.
        new_out: Tensor with out's shape, in any dtype.
        new_lse: Tensor with lse's shape.
    """
    if ops := fused(out):
        ops.merge_(out, lse, new_out, new_lse)
    else:
        in_pieces(_merge_, out, new_out, lse, new_lse)


def _merge_(out: Tensor, new_out: Tensor, lse: Tensor, new_lse: Tensor) -> None:
    difference = _difference(lse, new_lse)
    out.mul_(torch.sigmoid(difference).unsqueeze(-1))
    if new_out.is_cpu:  # torch would make this copy anyway, but uncounted; devices cast without a copy
        new_out = new_out.to(out.dtype)
    out.addcmul_(new_out, torch.sigmoid(difference.neg_()).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the difference a - b of two log-sum-exps, or 0 if both are -inf, since -inf - -inf is NaN."""
    return (a - b).nan_to_num_()


def in_pieces(function: Callable[..., object], *tensors: Tensor, limit: int | None = None) -> None:
    """Apply an elementwise in-place function to pieces of the tensors. The first tensor must be the largest.

    On CPUs, the function's temporaries (and torch's own temporaries if dtypes differ) take at most a 16th of the first
    tensor's size, and fit in the caches. On devices, where a call may cost more than processing its elements, a piece
    has `AT_ONCE` elements. The last dimension is not split.
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

    For rows that see no key, `out` stays 0. A sink of -inf changes nothing, and a sink of inf takes all weight.

    Args:
        out: (B, S, H, D) in any dtype.
        lse: (B, S, H) in accum_dtype.
        sinks: (H,), or (B, S, H) with one sink per row.
    """
    sinks = sinks.to(lse.dtype)
    out.mul_(torch.sigmoid(_difference(lse, sinks)).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, sinks))


def sinks_deltas(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return each row's sink weight, exp(sink - lse), multiplied by the row's delta, as (B, S, H).

    A row contributes -exp(sink - lse) * delta to the sink's gradient, like any key with a value of 0. If sink and lse
    are both -inf, the row has neither a key nor a sink. If sink and lse are both inf, the row's out and delta are 0.

    Args:
        delta: The rowsum of `do * out`, (B, S, H).
        lse: The lse after `merge_sinks_`, (B, S, H).
        sinks: (H,) or (B, S, H).
    """
    return torch.exp(sinks.to(lse.dtype) - lse).nan_to_num_() * delta

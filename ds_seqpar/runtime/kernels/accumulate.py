"""Adds the results of kernel calls to accumulators.

An accumulator is empty at first. Then it is narrow: the tensors that the kernel returned. Once a second result is
added it is in accum_dtype: fp32, or fp64 for fp64. Every tensor has its tokens on dim 1.

Results over disjoint keys are merged by an online softmax. An attention sink (gpt-oss) is one more score a head, of
value 0. It is merged into (out, lse) once, after all partial results, and backward reads the merged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from ...compiler.tiles.tiles import MERGED_AT_ONCE, Tile
from .reference import Kernel

Tensors = tuple[Tensor, ...]
INF = float("inf")
CAUSAL = ("causal", "upper")  # kinds of calls that are causal to a kernel: upper in reverse order


class Rows(NamedTuple):
    """Rows in `groups` groups of `size` neighbouring rows. start: the first row; step: from one group's first row to
    the next one's."""

    start: int
    size: int
    groups: int = 1
    step: int = 0

    def of(self, x: Tensor) -> Tensor:
        """A view: (B, n, ...) -> (B, size, ...), or (B, groups, size, ...) for several groups."""
        if self.size == x.shape[1]:
            return x
        if self.groups == 1:
            return x.narrow(1, self.start, self.size)
        span = x.narrow(1, self.start, self.step * (self.groups - 1) + self.size)
        return span.unfold(1, self.size, self.step).movedim(-1, 2)

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.start + self.step * (self.groups - 1) + self.size

    def all_of(self, tokens: int) -> bool:
        """Whether these are all of so many rows, each once."""
        return self.size * self.groups == tokens and self.end - self.start == tokens

    def apart(self) -> Iterator[tuple[slice, Rows]]:
        """Cuts the groups into parts, each the same slice of every group, so that the rows of one part share no
        token."""
        step = self.step if self.groups > 1 else self.size
        for first in range(0, self.size, step):
            last = min(self.size, first + step)
            yield slice(first, last), Rows(self.start + first, last - first, self.groups, self.step)


class Accumulator:
    """The accumulator of one block: tensors whose rows are `blank` until something is added.

    make: returns uninitialised tensors in accum_dtype, in the memory that the result is sent from. It is called once at
    most, and only if they are needed.
    """

    blank: tuple[float, float] = (0.0, 0.0)

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = make
        self._held: Tensors | None = None
        self._rows: Rows | None = None  # the only rows that the held tensors have; None: all
        self._end = 0  # the first of the rows at the end that are blank, and not yet written in the held tensors
        self._materialized = False  # whether the held tensors are in memory of `make` or of a message

    @property
    def held(self) -> Tensors | None:
        """The held tensors; None while the result is empty."""
        return self._held

    def expect(self, rows: Rows) -> None:
        """Prepares for an `add` to those rows, before the kernel is called. Rows that will be added to become wide now,
        so that those in the inputs' dtype and in accum_dtype are never in memory together with the kernel's result."""
        if self._held is not None and rows.start < self._end:
            self._widen()

    def add(self, new: Tensors, rows: Rows, of: int) -> None:
        """Adds a kernel's tensors (B, size, ...) for those rows of `of` rows. For several groups, which may share rows,
        they are (B, groups, size, ...). The first tensors are held as they are, and may be changed later."""
        if self._held is None and rows.groups == 1:
            self._held, self._rows, self._end = new, None if rows.all_of(of) else rows, rows.end
        elif self._held is None and rows.all_of(of):
            self._held, self._end = tuple(x.flatten(1, 2) for x in new), of
        else:
            for part, its_rows in rows.apart():
                self._join(tuple(x[:, :, part] if rows.groups > 1 else x for x in new), its_rows, of)

    def _join(self, new: Tensors, rows: Rows, of: int) -> None:
        """Adds to rows that are all different. Blank rows are overwritten."""
        blank = rows.start >= self._end
        if not blank:
            self._widen()
        elif self._held is None or self._rows is not None:
            token_dims = 2 if rows.groups > 1 else 1
            self._move(tuple(x.new_empty(x.shape[0], of, *x.shape[1 + token_dims :]) for x in new))
        self._write_blank(rows.start if blank and rows.step <= rows.size else rows.end)
        into = tuple(map(rows.of, self._held or ()))
        if blank:
            for x, part in zip(into, new, strict=True):
                x.copy_(part)
        else:
            self._combine(into, new)
        self._end = max(self._end, rows.end)

    def add_(self, *arrived: Tensor) -> None:
        """Adds another rank's part, of all rows. Its tensors may be changed: if they are in accum_dtype, the held
        tensors are added to them, and they are held from then on."""
        if self._held is None:
            self._held, self._materialized = arrived, True
        elif self._is_wide(arrived):
            rows = self._rows or Rows(0, self._end)
            self._combine(tuple(map(rows.of, arrived)), self._held if self._rows else tuple(map(rows.of, self._held)))
            self._held, self._rows, self._materialized = arrived, None, True
        else:
            self._combine(self._settled(), arrived)
        self._end = arrived[0].shape[1]

    def merge(self, *arrived: Tensor) -> None:
        """Adds another rank's part, of all rows, and does not change its tensors."""
        self._combine(self._settled(), arrived)

    def materialize(self) -> Tensors:
        """The tensors in accum_dtype, in the memory that they are sent from."""
        held = self._settled()
        if not self._materialized:
            self._move(self._make(), materialized=True)
        return self._held or held

    def copy_into(self, targets: Tensors) -> None:
        """Writes the result into these tensors, in their dtype."""
        for target, x in zip(targets, self._settled(), strict=True):
            target.copy_(x)

    def finish(self, *dtypes: torch.dtype | None) -> Tensors:
        """The tensors in those dtypes (None: in their own), contiguous, each in memory of its own. Rows to which
        nothing was added are blank. A kernel's tensors that have the dtype are neither cast nor copied."""
        if self._held is None or self._rows is not None:
            self._widen()
        self._write_blank()
        held = list(self._held or ())
        self._held = None
        return tuple(_owned(held.pop(0), dtype, self._materialized) for dtype in dtypes)  # each freed before the next

    def _settled(self) -> Tensors:
        """The held tensors, after they are in accum_dtype and have all rows."""
        self._widen()
        self._write_blank()
        return self._held or ()

    def _widen(self) -> None:
        """Casts the held tensors to accum_dtype, with all rows."""
        if self._held is None or self._rows is not None or not self._is_wide(self._held):
            self._move(self._make(), materialized=True)

    def _move(self, into: Tensors, materialized: bool = False) -> None:
        """Copies the held tensors into these, which are held from then on."""
        rows, held = self._rows or Rows(0, self._end), self._held
        self._held, self._rows, self._materialized = into, None, materialized
        if held is None:
            return
        self._end = 0
        self._write_blank(rows.start)
        for x, old in zip(into, held, strict=True):
            rows.of(x).copy_(rows.of(old) if old.shape[1] > rows.size else old)
        self._end = rows.end

    def _write_blank(self, end: int | None = None) -> None:
        """Writes blanks into the blank rows before row `end`; None: into all of them."""
        if self._held and self._end >= (self._held[0].shape[1] if end is None else end):
            return
        for x, value in zip(self._held or (), self.blank, strict=False):
            last = x.shape[1] if end is None else end
            if last > self._end:
                x[:, self._end : last].fill_(value)
        self._end = max(self._end, (self._held or ())[0].shape[1] if end is None else end)

    def _is_wide(self, tensors: Tensors) -> bool:
        return tensors[0].dtype in (torch.float32, torch.float64)

    def _combine(self, into: Tensors, new: Tensors) -> None:
        """Adds new tensors to tensors of the same rows, in place."""
        raise NotImplementedError


class Softmax(Accumulator):
    """The accumulator (out, lse) of one block of queries: out (B, n, H, D) in any dtype, always in accum_dtype."""

    blank = (0.0, -INF)

    def _combine(self, into: Tensors, new: Tensors) -> None:
        merge_(*into, *new)


class Sum(Accumulator):
    """The accumulated gradients of one block: (dq,), or (dk, dv)."""

    def _combine(self, into: Tensors, new: Tensors) -> None:
        for x, part in zip(into, new, strict=True):
            in_pieces(torch.Tensor.add_, x, part)


def _owned(x: Tensor, dtype: torch.dtype | None, copy: bool) -> Tensor:
    """x in the dtype (None: in its own), contiguous. copy: whether it must be copied, since tensors of one message
    share memory, and results of an op must not."""
    if copy or dtype not in (None, x.dtype):
        return x.to(dtype or x.dtype, memory_format=torch.contiguous_format, copy=copy)
    return x.contiguous()


# ---- calls of a kernel


def _sides(call: Tile) -> tuple[Rows, Rows]:
    """The rows and the columns of a call."""
    q0, q1, k0, k1, _, _, groups, q_step, k_step, _ = call
    return Rows(q0, q1 - q0, groups, q_step), Rows(k0, k1 - k0, groups, k_step)


def _operand(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """The rows of x as a kernel takes them: groups as a part of the batch, reversed for upper. A view if possible."""
    if not upper and rows.size == x.shape[1]:
        return x
    x = rows.of(x)
    if rows.groups > 1:
        x = x.flatten(0, 1)
    return x.flip(1) if upper else x


def _result(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """The inverse of `_operand`: a kernel's result in the shape of the rows and in their order."""
    if upper:
        x = x.flip(1)
    return x.unflatten(0, (-1, rows.groups)) if rows.groups > 1 else x


class Accumulating(Kernel, Protocol):
    """A kernel that takes all tiles of a product, and adds to accumulators itself: `KernelSupport.tiles`. Its
    methods are called in place of `forward` and `backward` below, with their arguments."""

    def forward_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, into: Accumulator
    ) -> None: ...

    def backward_tiles(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        tiles: Sequence[Tile], scale: float, dq: Accumulator, dkv: Accumulator,
    ) -> None: ...  # fmt: skip


def _accumulates(kernel: Kernel) -> TypeGuard[Accumulating]:
    return kernel.support.tiles


def _keywords(call: Tile) -> dict[str, Any]:
    """The arguments that only kernels for bands, or for windows, take."""
    return {"width": call.width} if call.kind == "band" else {"segments": call.segments} if call.segments else {}


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Tile], scale: float, into: Accumulator
) -> None:
    """Adds attention over the calls' tiles to `into`, a `Softmax`. q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D), of any
    strides but 1 in the last dimension. calls: those of `compiler.cuts.launches` for what this kernel takes."""
    if _accumulates(kernel):
        kernel.forward_tiles(q, k, v, calls, scale, into)
        return
    for call in calls:
        into.expect(_sides(call)[0])
        into.add(_attend(kernel, q, k, v, call, scale), _sides(call)[0], q.shape[1])


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: Tile, scale: float) -> Tensors:
    (rows, columns), upper = _sides(call), call.kind == "upper"
    operands = (_operand(q, rows, upper), _operand(k, columns, upper), _operand(v, columns, upper))
    results = kernel.forward(*operands, call.kind in CAUSAL, scale, **_keywords(call))
    del operands  # copies, where they are in reverse order
    return tuple(_result(x, rows, upper) for x in results)


def backward(
    kernel: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    calls: Sequence[Tile], scale: float, dq: Accumulator, dkv: Accumulator,
) -> None:  # fmt: skip
    """Adds the gradients of the calls' tiles to the `Sum`s dq, of (dq,), and dkv, of (dk, dv). do and out as q, lse (B,
    Sq, Hq) in accum_dtype. out and lse are those of whole rows, not only of these calls."""
    if _accumulates(kernel):
        kernel.backward_tiles(do, q, k, v, out, lse, calls, scale, dq, dkv)
        return
    for call in calls:
        _add_gradients(kernel, (do, q, k, v, out, lse), call, scale, dq, dkv)


def _add_gradients(
    kernel: Kernel, operands: Tensors, call: Tile, scale: float, dq: Accumulator, dkv: Accumulator
) -> None:
    (rows, columns), upper = _sides(call), call.kind == "upper"
    sides = (rows, rows, columns, columns, rows, rows)
    dq.expect(rows)
    dkv.expect(columns)
    do, q, k, v, out, lse = [_operand(x, side, upper) for x, side in zip(operands, sides, strict=True)]
    grads = [*kernel.backward(do, q, k, v, out, lse, call.kind in CAUSAL, scale, **_keywords(call))]
    del do, q, k, v, out, lse
    for index, side in enumerate((rows, columns, columns)):
        grads[index] = _result(grads[index], side, upper)
    dq.add((grads[0],), rows, operands[1].shape[1])
    dkv.add(tuple(grads[1:]), columns, operands[2].shape[1])


# ---- the online softmax


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges (new_out, new_lse) into (out, lse), in place.

    out (B, S, H, D) and lse (B, S, H): fp32, or fp64 for fp64 attention; new_out in any dtype. There may be further
    dimensions before the last one of out. The two weights sum to 1, however the merged lse is rounded. A row that saw
    no key on either side keeps out 0 and lse -inf.
    """
    in_pieces(_merge_, out, new_out, lse, new_lse)


def _merge_(out: Tensor, new_out: Tensor, lse: Tensor, new_lse: Tensor) -> None:
    over = _difference(lse, new_lse)
    out.mul_(torch.sigmoid(over).unsqueeze(-1))
    out.addcmul_(new_out.to(out.dtype), torch.sigmoid(over.neg_()).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b of two log-sum-exps, and 0 where both are of nothing: -inf - -inf is NaN."""
    return (a - b).nan_to_num_()


def in_pieces(function: Callable[..., object], *tensors: Tensor, limit: int | None = None) -> None:
    """Applies an elementwise in-place function to pieces of the tensors, of which the first is the largest. So the
    function's temporaries, and torch's own where dtypes differ, take at most a 16th of its size. There are never more
    than 32 pieces, since on a device a call may cost more than its elements. The last dimension is not cut."""
    x = tensors[0]
    limit = limit or max(MERGED_AT_ONCE, x.numel() // 16)
    dim = max(range(x.dim() - 1), key=lambda dim: x.shape[dim])
    if x.numel() <= limit or x.shape[dim] == 1:
        function(*tensors)
        return
    half = x.shape[dim] // 2
    in_pieces(function, *(y.narrow(dim, 0, half) for y in tensors), limit=limit)
    in_pieces(function, *(y.narrow(dim, half, y.shape[dim] - half) for y in tensors), limit=limit)


# ---- sinks


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merges sinks (H,) into out (B, S, H, D), of any dtype, and lse (B, S, H), in accum_dtype, in place. The out of a
    row that saw no key stays 0. sinks may also be (B, S, H), one for each row. A sink of -inf changes nothing, and one
    of inf takes all weight."""
    sinks = sinks.to(lse.dtype)
    out.mul_(torch.sigmoid(_difference(lse, sinks)).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, sinks))


def sinks_deltas(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Each row's sink weight, exp(sink - lse), times its delta, rowsum(do * out); all are (B, S, H), or sinks (H,).
    lse: after `merge_sinks_`. A row's part of the sink's gradient is minus this, as for any key of value 0.

    Where both are -inf, the row has neither key nor sink; where both are inf, its out and delta are 0."""
    return torch.exp(sinks.to(lse.dtype) - lse).nan_to_num_() * delta

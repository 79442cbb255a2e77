"""Attention to keys and values that were kept: a cache of which each rank of the sequence holds a part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compiler.decode import bound_decode
from ..compiler.program.shape import shape_of
from ..compiler.program.ulysses import SavedForBackward
from ..compiler.sharding.heads import check_heads
from ..compiler.tiles.tiles import Tile
from ..errors import InputError, SeqParError, as_seqpar_error
from . import attention, input_checks
from .buffers import Tensors, sum_dtype
from .call_io import ForwardCall
from .groups import check_thread
from .input_checks import AttentionOptions, admit, check_kept, check_no_gradients, describe
from .kernels import BlockSpec, Kernel, Scores, is_deterministic, select
from .kernels.accumulate import Accumulator, merge_sinks_
from .kernels.reference import attend as attend_densely
from .runtime import Runtime, readable
from .walk import Walk
from .work import Forward

Counts = Sequence[tuple[int, int]]  # for each row (first, end) of its keys among those that are kept


def attend(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, agreed: bool
) -> tuple[Tensor, Tensor]:
    """Compute `SequenceParallel.cache_attention`."""
    if agreed:
        check_kept(options)
    out, lse = attention.attention(admit(runtime.one_ring, q, k, v, options, agreed))
    assert lse is not None
    return out, lse


def decode(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, counts: Counts | None, options: AttentionOptions, agreed: bool
) -> Tensor:
    """Compute `SequenceParallel.decode_attention`."""
    runtime = runtime.one_ring
    if agreed:
        check_no_gradients(options.backward)
    else:
        _agree(runtime, q, k, v, counts, options)
    rows, _, heads, dim = q.shape
    scores = Scores(dim**-0.5 if options.scale is None else float(options.scale), float(options.softcap or 0.0))
    shape = shape_of(
        runtime.config.comm_dtype, str(sum_dtype(q.dtype)).removeprefix("torch."), rows, (1, 1, v.shape[3])
    )
    bound, kernel = bound_decode(runtime.size, runtime.rank, heads, shape), _kernel(runtime, q, k, scores.softcap)
    local = readable({"q": q, "k": k, "v": v})
    call = _DecodeCall(bound, kernel, scores, local, None, None, SavedForBackward.NOTHING, False)
    call.work = _Decode(kernel, scores.scale, *local.values())
    call.work.counts = [(0, k.shape[1])] * rows if counts is None else counts
    call.work.softcap = scores.softcap
    out, lse = Walk(bound, call, runtime.comm, runtime.observers).run()
    out, lse = out.view(rows, 1, heads, -1), lse.view(rows, 1, heads)
    if options.sinks is not None:
        merge_sinks_(out, lse, options.sinks)
    return out


def _kernel(runtime: Runtime, q: Tensor, k: Tensor, softcap: float) -> Kernel:
    """Return the kernel for a tile whose rows are the query heads that read the same key/value head."""
    spec = BlockSpec(q.device.type, q.dtype, k.shape[2], k.shape[2], q.shape[3], softcap)
    return select(runtime.config.kernel, spec, is_deterministic())


def _agree(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, counts: Counts | None, options: AttentionOptions) -> None:
    """Check the inputs of a decode step on this rank, and compare them between the ranks. Collective."""
    check_thread()
    error: SeqParError | None = None
    fields: dict[str, object] = {}
    try:
        check_no_gradients(options.backward)
        input_checks.check_arguments(q, k, v, options.mask, options.scale, lengths_differ=True)
        input_checks.check_softcap(options.softcap)
        input_checks.check_sinks(options.sinks, q)
        check_heads(1, q.shape[2], k.shape[2], size=1)
        _check_rows(q, k, counts)
        _kernel(runtime, q, k, options.softcap or 0.0)
        fields = {name: f"{(x.shape[0], *x.shape[2:])} {x.dtype}" for name, x in zip("qkv", (q, k, v), strict=True)}
        fields |= {"scale": options.scale, "softcap": options.softcap, "sinks": describe(options.sinks)}
        fields["SequenceParallel"] = runtime.calls.of[0]
    except Exception as reason:  # a rank that raised alone would leave its peers waiting
        error = as_seqpar_error("a decode step needs inputs that can be read; reading them failed", reason)
    runtime.checker.check_deferred(
        "decode inputs", fields, error=error, call="decode_attention", device=getattr(q, "device", None)
    )


def _check_rows(q: Tensor, k: Tensor, counts: Counts | None) -> None:
    if q.shape[1] != 1:
        raise InputError(f"a decode step needs one new token a row; got {q.shape[1]}, cache_attention takes several")
    ranges = [(0, 0)] * len(q) if counts is None else counts
    whole = all(isinstance(x, int) for span in ranges for x in span)
    if len(ranges) != len(q) or not whole or not all(0 <= first <= end <= k.shape[1] for first, end in ranges):
        raise InputError(
            f"a decode step needs counts (first, end) for each of {len(q)} rows, ints within {k.shape[1]} kept keys; "
            f"got {counts!r:.80}"
        )


class _DecodeCall(ForwardCall):
    """A decode step: a `ForwardCall` whose tokens are query heads. Its results are out (B, Hq, 1, Dv) and lse."""

    work: _Decode

    def enter(self, head_chunk: int) -> _Decode:
        return self.work


class _Decode(Forward):
    """The product of a decode step: q (B, 1, Hq, D) with the keys (B, n, Hkv, D) that this rank has kept."""

    counts: Counts
    softcap: float

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        runs, end = [], 0  # rows that have the same range of keys are computed together
        for (first, last), rows in itertools.groupby(self.counts):
            start, end = end, end + len([*rows])
            runs.append(self.rows(q[0][start:end], *(x[start:end, first:last] for x in kv)))
        part = runs[0] if len(runs) == 1 else tuple(map(torch.cat, zip(*runs, strict=True)))
        results[0].add(part, launches[0].sides[0], q[0].shape[2])

    def rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """Return (out, lse) of rows over all of these keys, with heads on dim 1."""
        batch, _, heads, dim = q.shape
        if not k.shape[1]:
            lse = q.new_full((batch, heads, 1), -torch.inf, dtype=sum_dtype(q.dtype))
            return q.new_zeros(batch, heads, 1, v.shape[3]), lse
        if v.shape[3] != dim:  # kernels would need a padded copy of all keys or values
            out, lse = attend_densely(q, k, v, False, self.scale, self.softcap)
            return out.to(q.dtype).transpose(1, 2), lse.transpose(1, 2)
        tile = q.reshape(batch, k.shape[2], -1, dim).transpose(1, 2)
        out, lse = self.kernel.forward(tile, k, v, False, self.scale)
        return out.transpose(1, 2).reshape(batch, heads, 1, dim), lse.transpose(1, 2).reshape(batch, heads, 1)

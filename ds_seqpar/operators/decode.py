"""Attention to cached keys and values that are distributed across the ranks that share the sequence."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ..base.errors import InputError, SeqParError, as_seqpar_error
from ..base.fingerprint import Compared
from ..core.compiler.program import instructions as op
from ..core.compiler.schedules.actions import Gather
from ..core.compiler.sharding.heads import check_heads
from ..core.compiler.sharding.shards import UnevenShards
from ..core.runtime import admit, attention
from ..core.runtime.admit import AttentionOptions, admitted_call
from ..core.runtime.buffers import sum_dtype
from ..core.runtime.call import readable
from ..core.runtime.kernels import BlockSpec, Kernel, Scores, is_deterministic, select
from ..core.runtime.kernels.accumulate import merge_sinks_
from ..core.runtime.kernels.reference import attend as attend_densely
from ..core.runtime.operator import Operator, describe, register
from ..core.runtime.runtime import Runtime
from ..core.runtime.seams import Inputs
from ..core.runtime.transport import TorchComm

STEP = "the exchange of a decode step"
MOST = 2**18  # maximum size in bytes of a rank's partial results for which every rank merges all results
Counts = Sequence[tuple[int, int]]  # (first, end) for each row's keys in the cache


def attend(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, agreed: bool
) -> tuple[Tensor, Tensor]:
    """Compute `SequenceParallel.cache_attention`."""
    if agreed:
        check_kept(options)
    options = options._replace(operator=KEPT)
    out, lse = attention.attention(admitted_call(runtime.one_ring, (q, k, v), options, agreed))
    assert lse is not None
    return out, lse


def check_kept(options: AttentionOptions) -> None:
    """Raise InputError for options that attention to cached keys does not support."""
    check_no_gradients(options.backward)
    if not isinstance(options.shards, UnevenShards):
        got = type(options.shards).__name__
        raise InputError(
            f"attention to kept keys needs shards that are UnevenShards, of new tokens and kept; got {got}"
        )


def check_no_gradients(backward: bool) -> None:
    """Raise InputError if gradients are required, which attention to cached keys does not support."""
    if backward:
        raise InputError(
            "attention to kept keys has no backward; got tensors that require gradients, call it under torch.no_grad()"
        )


class Kept(Operator):
    """Attention to cached keys, without a backward pass."""

    name = "attention to kept keys"

    def check_options(self, options: AttentionOptions) -> None:
        check_kept(options)


KEPT = register(Kept())


def decode(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, counts: Counts | None, options: AttentionOptions, agreed: bool
) -> Tensor:
    """Compute `SequenceParallel.decode_attention`.

    All ranks have the queries, and each rank attends to its own cached keys. Afterwards, ranks exchange and merge their
    partial results.
    """
    runtime = runtime.one_ring
    if agreed:
        check_no_gradients(options.backward)
    else:
        _agree(runtime, q, k, v, counts, options)
    q, k, v = readable({"q": q, "k": k, "v": v}).values()
    scores = Scores(q.shape[3] ** -0.5 if options.scale is None else float(options.scale), float(options.softcap or 0))
    kernel, autocast = _kernel(runtime, q, k, scores.softcap), torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if autocast else contextlib.nullcontext():
        part = _part(kernel, scores, q, k, v, counts)
    if options.sinks is not None and runtime.rank == 0:  # one additional score per head, whose value is 0
        merge_sinks_(part[..., :-1], part[..., -1], options.sinks)
    return merged_by_all(runtime, part).to(q.dtype)


def _part(kernel: Kernel, scores: Scores, q: Tensor, k: Tensor, v: Tensor, counts: Counts | None) -> Tensor:
    """Return (out, lse) for a step's queries and this rank's keys as one tensor (rows, 1, heads, v_dim + 1)."""
    if counts is None:
        return _attend(kernel, scores, q, k, v)
    parts, end = [], 0
    for (first, last), rows in itertools.groupby(counts):
        start, end = end, end + len([*rows])  # consecutive rows with the same range of keys are computed together
        parts.append(_attend(kernel, scores, q[start:end], *(x[start:end, first:last] for x in (k, v))))
    return torch.cat(parts)


def _attend(kernel: Kernel, scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the result of `_part` for rows that attend to all given keys."""
    rows, keys, kv_heads, dim = k.shape
    if not keys:
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=sum_dtype(q.dtype))
    elif v.shape[3] != dim:  # a kernel would need a padded copy of all keys or values
        out, lse = attend_densely(q, k, v, False, *scores)
    else:  # the query heads of a key/value head form the rows of a tile
        out, lse = kernel.forward(q.reshape(rows, kv_heads, -1, dim).transpose(1, 2), k, v, False, scores.scale)
        out, lse = out.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(q.shape[:3])
    return torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)


def merged_by_all(runtime: Runtime, part: Tensor) -> Tensor:
    """Merge all ranks' parts (rows, 1, heads, v_dim + 1) into the output (rows, 1, heads, v_dim)."""
    merged = _exchanged(runtime, part)
    if not part.is_cpu:
        for observer in runtime.observers:
            observer.sent(part.device, _program(runtime.rank, runtime.size), [None], runtime.comm)
    return merged


def _exchanged(runtime: Runtime, part: Tensor) -> Tensor:
    comm, size, width = runtime.comm, runtime.size, part.shape[-1]
    if size <= 2 or part.nbytes <= MOST:
        return _merged(comm.parts_of_all(part.view(-1), STEP).view(size, *part.shape))
    # too large to merge on every rank, so each rank merges an equal share of the results
    results = part.view(-1, width)
    share = -(-len(results) // size)
    sent = functional.pad(results, (0, 0, 0, share * size - len(results)))
    merged = _merged(comm.parts_of_all(sent.view(-1), STEP, shares=True).view(size, share, width))
    whole = comm.parts_of_all(merged.view(-1), STEP).view(-1, width - 1)
    return whole[: len(results)].view(*part.shape[:-1], width - 1)


def _merged(parts: Tensor) -> Tensor:
    """Merge all ranks' parts (ranks, ..., v_dim + 1) into the output (..., v_dim)."""
    out, lses = parts.split([parts.shape[-1] - 1, 1], -1)
    weights = lses.softmax(0).nan_to_num_()  # NaN if there are no scores
    return (out * weights).sum(0)


@functools.cache
def _program(rank: int, size: int) -> op.Program:
    """Return a program that describes a step's queued device work for the watchdog."""
    gather = Gather(ranks=tuple(range(size)), kind="out", keys=tuple((block,) for block in range(size)))
    return op.Program(
        name="decode", direction="forward", rank=rank, size=size, words=(), slots=(), frees=(),
        code=(op.GatherStart(0, 0, gather, 0, 0), op.Wait(0, 0)),
    )  # fmt: skip


def _kernel(runtime: Runtime, q: Tensor, k: Tensor, softcap: float) -> Kernel:
    """Return the kernel for tiles whose rows are the query heads of a key/value head."""
    spec = BlockSpec(q.device.type, q.dtype, k.shape[2], k.shape[2], q.shape[3], softcap)
    return select(runtime.config.kernel, spec, is_deterministic())


def _agree(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, counts: Counts | None, options: AttentionOptions) -> None:
    """Check the inputs of a decode step on this rank, and compare them between ranks. The call is collective."""
    error: SeqParError | None = None
    fields: dict[str, object] = {}
    try:
        check_no_gradients(options.backward)
        admit.check_arguments((q, k, v), options.mask, options.scale, lengths_differ=True)
        admit.check_softcap(options.softcap)
        admit.check_sinks(options.sinks, q)
        check_heads(1, q.shape[2], k.shape[2], size=1)
        _check_rows(q, k, counts)
        _kernel(runtime, q, k, options.softcap or 0.0)
        fields = {name: f"{(x.shape[0], *x.shape[2:])} {x.dtype}" for name, x in zip("qkv", (q, k, v), strict=True)}
        fields |= {"scale": options.scale, "softcap": options.softcap, "sinks": describe(options.sinks)}
        fields["SequenceParallel"] = cast(TorchComm, runtime.comm).groups.number
    except Exception as reason:  # if only one rank raised an error, the other ranks would hang
        error = as_seqpar_error("a decode step needs inputs that can be read; reading them failed", reason)
    runtime.admit(Inputs("decode_attention", Compared("decode inputs", fields), {"q": q, "k": k, "v": v}), error)


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

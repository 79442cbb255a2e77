"""Gather a sequence's tokens from all ranks that share the sequence, in order of position and with gradients.

The ranks must already have agreed on the inputs, as in a patched model.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.compiler.sharding.shards import Shards
from ..core.runtime.buffers import sum_dtype
from ..core.runtime.runtime import Runtime
from ..core.runtime.seams import GuardedCall
from .segments import Segments, segments_of

Context: TypeAlias = Any  # autograd's ctx
NAME, KIND = "a gather of tokens", "gathered"  # names in errors and in statistics


class Piece(NamedTuple):
    """Consecutive tokens of one document on one rank."""

    place: int  # index of the piece's first token among the rank's tokens
    length: int
    start: int  # position of the piece's first token
    document: int  # position of the document's first token

    @property
    def end(self) -> int:
        return self.start + self.length


def segments(runtime: Runtime, tokens: int, shards: Shards | None, documents: tuple[int, ...]) -> Segments:
    """Return the segments of all SP ranks.

    Args:
        runtime: This rank's runtime.
        tokens: Number of tokens on this rank.
        shards: See `SequenceParallel.attention`. None for the configured layout.
        documents: Start positions of documents; () for a single document.
    """
    return segments_of(shards or runtime.shards(tokens * runtime.ulysses.size), documents, runtime.ulysses.size)


@functools.lru_cache(maxsize=64)
def pieces_of(segments: Segments, rows: int) -> tuple[tuple[Piece, ...], ...]:
    """Return each SP rank's pieces in order. A piece has at most `rows` tokens."""
    return tuple(tuple(_pieces(segments, numbers, rows)) for numbers in segments.numbers)


def _pieces(segments: Segments, numbers: Sequence[int], rows: int) -> list[Piece]:
    pieces, starts, place = list[Piece](), segments.starts, 0
    for run in (segments.runs[number] for number in numbers):
        end = run.start + run.length
        inside = starts[bisect_right(starts, run.start) : bisect_left(starts, end)]
        for first, last in itertools.pairwise((run.start, *inside, end)):
            document = starts[bisect_right(starts, first) - 1]
            for start in range(first, last, rows):
                pieces.append(Piece(place, min(rows, last - start), start, document))
                place += pieces[-1].length
    return pieces


class Gathered(torch.autograd.Function):
    """Gather x (B, local tokens, W) from each rank to (B, tokens, W) on every rank, in order of position.

    The call is collective across the ranks that share the sequence, and so is the backward pass, in which each rank
    receives the sum of the gradients of its tokens.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, peers: Runtime, segments: Segments) -> Tensor:
        ctx.peers, ctx.segments = peers, segments
        counts, ranks = _counts(segments), tuple(range(peers.size))
        with peers.guarded(GuardedCall("forward", NAME)):
            if peers.size == 1:
                parts = x.contiguous().view(1, -1)
            else:
                sent = x.new_zeros(max(counts) * len(x) * x.shape[2])
                sent[: x.numel()] = x.flatten()
                parts = sent.new_empty(peers.size, len(sent))
                others = (sum(counts) - x.shape[1]) * len(x) * x.shape[2]
                peers.comm.all_gather(ranks, KIND, others, _bytes(sent), _bytes(parts)).wait()
        by_rank = dict(zip(peers.comm.order(ranks) if peers.size > 1 else ranks, parts, strict=True))
        of_rank = [by_rank[rank][: len(x) * n * x.shape[2]].view(len(x), n, -1) for rank, n in enumerate(counts)]
        return torch.cat([of_rank[rank][:, place : place + n] for rank, place, n in _runs(segments)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple:
        peers, counts = ctx.peers, _counts(ctx.segments)
        parts: list[list[Tensor]] = [[] for _ in counts]
        in_order = grad.split([n for _, _, n in _runs(ctx.segments)], 1)
        for (rank, *_), part in sorted(zip(_runs(ctx.segments), in_order, strict=True), key=lambda x: x[0]):
            parts[rank].append(part)
        of_rank = [torch.cat([grad[:, :0], *part], 1) for part in parts]
        with peers.guarded(GuardedCall("backward", NAME)):
            if peers.size == 1:
                return of_rank[0], None, None
            mine, ranks = of_rank[peers.rank], tuple(range(peers.size))
            order = peers.comm.order(ranks)
            sent = torch.cat([of_rank[rank].flatten() for rank in order])
            received = sent.new_empty(peers.size, mine.numel())
            outgoing, incoming = [of_rank[rank].nbytes for rank in order], [mine.nbytes] * peers.size
            elements = mine.numel() * (peers.size - 1)
            exchange = peers.comm.all_to_all(
                ranks, KIND, elements, _bytes(sent), _bytes(received), (outgoing, incoming)
            )
            exchange.wait()
        return received.sum(0, dtype=sum_dtype(grad.dtype)).to(grad.dtype).view(mine.shape), None, None


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


@functools.lru_cache(maxsize=64)
def _runs(segments: Segments) -> tuple[tuple[int, int, int], ...]:
    """Return (rank, index of the first token on the rank, length) for each run, in order of position."""
    runs = dict[int, tuple[int, int, int]]()
    for rank, numbers in enumerate(segments.numbers):
        lengths = [segments.runs[number].length for number in numbers]
        places = itertools.accumulate(lengths, initial=0)
        runs.update(
            {number: (rank, *place) for number, place in zip(numbers, zip(places, lengths, strict=False), strict=True)}
        )
    return tuple(runs[number] for number in range(len(segments.runs)))


def _counts(segments: Segments) -> list[int]:
    """Return the number of tokens on each rank."""
    return [sum(segments.runs[number].length for number in numbers) for numbers in segments.numbers]


def gather(peers: Runtime, xs: Sequence[Tensor], segments: Segments) -> list[Tensor]:
    """Gather tensors (B, local tokens, ...) from all ranks into tensors (B, tokens, ...).

    Tensors of the same dtype share a message. Tensors that require gradients are sent separately.

    Args:
        peers: The runtime of all ranks that share the sequence (see `Runtime.one_ring`).
        xs: The tensors. Ranks must pass the same number of tensors, with equal dtypes, equal `requires_grad`, and equal
            sizes except for the number of tokens.
        segments: The segments of all ranks.
    """
    found: dict[int, Tensor] = {}
    for kind in dict.fromkeys((x.dtype, x.requires_grad) for x in xs):
        numbers = [number for number, x in enumerate(xs) if (x.dtype, x.requires_grad) == kind]
        flat = [xs[number].flatten(2) if xs[number].dim() > 2 else xs[number][..., None] for number in numbers]
        whole = Gathered.apply(torch.cat(flat, 2), peers, segments).split([x.shape[2] for x in flat], 2)
        found.update((n, x.reshape(*x.shape[:2], *xs[n].shape[2:])) for n, x in zip(numbers, whole, strict=True))
    return [found[number] for number in range(len(xs))]

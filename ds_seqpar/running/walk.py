"""Walks a program over blocks of tensors. One walker for every schedule, both directions, real and virtual ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..planning.plan import Gather, Key, Move, Program, ReduceScatter, Unit, last_uses
from .comm import Comm, Handle, Message, Together
from .work import Tensors, Work

KINDS = ("q", "kv", "out", "dq", "dkv")
Arrivals = tuple[Handle, list[tuple[Unit, Tensors]]]


def walk(program: Program, work: Work, comm: Comm) -> Iterator[int]:
    """Executes a program. Yields the number of the step under way wherever peers must have posted before it goes on:
    a real rank just runs it to the end; virtual ranks take turns from yield to yield.
    """
    rank = work.problem.rank
    operands: dict[int, list[Arrivals]] = defaultdict(list)  # due at the end of step
    results: dict[int, list[Arrivals]] = defaultdict(list)  # due after the products of step
    for index, (step, frees) in enumerate(zip(program, last_uses(program, rank), strict=True)):
        gathered = [(gather, _gather(gather, work, comm)) for gather in step.gathers]
        yield index
        for gather, arrivals in gathered:
            _finish_gather(gather, work, arrivals)
        for within, arrivals in _post(step.moves, work, comm, lambda unit: work.operands[unit]):
            operands[index + within - 1].append(arrivals)
        for compute in step.computes:
            work.compute(compute.q, compute.kv)
        for arrivals in results.pop(index, []):
            _merge(work, arrivals)
        for within, arrivals in _post(step.results, work, comm, work.take):
            results[index + within].append(arrivals)
        reduced = [_reduce(reduce, work, comm) for reduce in step.reduces]
        yield index
        for arrivals in reduced:
            _merge(work, arrivals)
        for arrivals in operands.pop(index, []):
            work.operands.update(_wait(arrivals))
        for unit in frees:
            work.release(unit)
    for due in sorted(results):
        for arrivals in results[due]:
            _merge(work, arrivals)


def _post(
    moves: tuple[Move, ...], work: Work, comm: Comm, tensors_of: Callable[[Unit], Tensors]
) -> list[tuple[int, Arrivals]]:
    """Starts the moves, those that are due together as one, and says within how many steps each is due."""
    rank = work.problem.rank
    posted = []
    for within in sorted({move.within for move in moves}):
        sends, receives, arrivals = [], [], []
        for move in (move for move in moves if move.within == within):
            if move.src == rank:
                sends += _messages(move.dst, move.kind, move.key, tensors_of(move.unit), work)
            else:
                buffers = work.empty(move.kind, move.key)
                receives += _messages(move.src, move.kind, move.key, buffers, work)
                arrivals.append((move.unit, buffers))
        posted.append((within, (comm.post(sends, receives), arrivals)))
    return posted


def _gather(gather: Gather, work: Work, comm: Comm) -> Arrivals:
    mine = work.operands[gather.kind, gather.part(work.problem.rank)]
    buffers = [work.empty(gather.kind, part) for part in gather.parts]
    handles = [
        comm.all_gather(gather.ranks, gather.kind, tensor, list(received))
        for tensor, received in zip(mine, zip(*buffers, strict=True), strict=True)
    ]
    return Together(handles), [((gather.kind, part), x) for part, x in zip(gather.parts, buffers, strict=True)]


def _finish_gather(gather: Gather, work: Work, arrivals: Arrivals) -> None:
    parts = _wait(arrivals)
    whole = work.empty(gather.kind, gather.whole)
    for (_, key), tensors in parts.items():
        rows = work.problem.rows(gather.whole, key)
        for target, tensor in zip(whole, tensors, strict=True):
            pieces = tensor.split([row.stop - row.start for row in rows], dim=1)
            for row, piece in zip(rows, pieces, strict=True):
                target[:, row] = piece
    work.operands[gather.kind, gather.whole] = whole


def _reduce(reduce: ReduceScatter, work: Work, comm: Comm) -> Arrivals:
    """An all-to-all of partials, merged where they arrive: the bytes of a reduce-scatter with our own reduction."""
    mine = reduce.kind, reduce.part(work.problem.rank)
    own = work.problem.rows(reduce.whole, mine[1])
    kept = tuple(_rows_of(tensor, own) for tensor in work.accumulators[reduce.kind, reduce.whole])
    whole = work.take((reduce.kind, reduce.whole))
    work.merge(mine, kept)  # it does not travel, so it is not rounded to what travels
    buffers = [work.empty(*mine) for _ in reduce.ranks]
    rows = [work.problem.rows(reduce.whole, part) for part in reduce.parts]
    handles = [
        comm.all_to_all(reduce.ranks, reduce.kind, [_rows_of(tensor, r) for r in rows], list(received))
        for tensor, received in zip(whole, zip(*buffers, strict=True), strict=True)
    ]
    return Together(handles), [(mine, x) for r, x in zip(reduce.ranks, buffers, strict=True) if r != work.problem.rank]


def _rows_of(tensor: Tensor, rows: list[slice]) -> Tensor:
    return torch.cat([tensor[:, row] for row in rows], dim=1)


def _messages(peer: int, kind: str, key: Key, tensors: Tensors, work: Work) -> list[Message]:
    """One message a tensor; the tag says what it is, so that several may be under way between two ranks."""
    base = (KINDS.index(kind) * len(work.problem.blocks) + key[0]) * 8
    return [Message(peer, kind, tensor, base + number) for number, tensor in enumerate(tensors)]


def _wait(arrivals: Arrivals) -> dict[Unit, Tensors]:
    handle, units = arrivals
    handle.wait()
    return dict(units)


def _merge(work: Work, arrivals: Arrivals) -> None:
    handle, units = arrivals
    handle.wait()
    for unit, tensors in units:
        work.merge(unit, tensors)

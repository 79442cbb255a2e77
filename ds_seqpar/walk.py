"""Walks a program over blocks of tensors. One walker for every schedule, both directions, real and virtual ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from .comm import Comm, Handle, Message
from .plan import Gather, Key, Move, Program, ReduceScatter, Unit, last_uses
from .work import Tensors, Work

KINDS = ("q", "kv", "out", "dq", "dkv")
Arrivals = tuple[Handle, list[tuple[Unit, Tensors]]]


def walk(program: Program, work: Work, comm: Comm) -> Iterator[int]:
    """Executes a program. Yields the number of the step under way wherever peers must have posted before it goes on:
    a real rank just runs it to the end; virtual ranks take turns from yield to yield.
    """
    rank = work.problem.rank
    own = {("q", (rank,)), ("kv", (rank,))}  # the caller holds these anyway
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
        for unit in frees - own:
            del work.operands[unit]
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
    """Every member sends its part to every other: the bytes of an all-gather, over the transport of moves."""
    rank = work.problem.rank
    mine = gather.part(rank)
    sends, receives, arrivals = [], [], []
    for peer, part in zip(gather.ranks, gather.parts, strict=True):
        if peer == rank:
            continue
        sends += _messages(peer, gather.kind, mine, work.operands[gather.kind, mine], work)
        buffers = work.empty(gather.kind, part)
        receives += _messages(peer, gather.kind, part, buffers, work)
        arrivals.append(((gather.kind, part), buffers))
    return comm.post(sends, receives), arrivals


def _finish_gather(gather: Gather, work: Work, arrivals: Arrivals) -> None:
    parts = _wait(arrivals)
    mine = gather.kind, gather.part(work.problem.rank)
    parts[mine] = work.operands[mine]
    whole = work.empty(gather.kind, gather.whole)
    for (_, key), tensors in parts.items():
        rows = work.problem.rows(gather.whole, key)
        for target, tensor in zip(whole, tensors, strict=True):
            target[:, rows] = tensor
    work.operands[gather.kind, gather.whole] = whole


def _reduce(reduce: ReduceScatter, work: Work, comm: Comm) -> Arrivals:
    """An all-to-all of partials, merged where they arrive: the bytes of a reduce-scatter with our own reduction."""
    rank = work.problem.rank
    whole = work.take((reduce.kind, reduce.whole))
    mine = reduce.part(rank)
    sends, receives, arrivals = [], [], []
    for peer, part in zip(reduce.ranks, reduce.parts, strict=True):
        tensors = tuple(x[:, work.problem.rows(reduce.whole, part)] for x in whole)
        if peer == rank:
            work.merge((reduce.kind, mine), tensors)
            continue
        sends += _messages(peer, reduce.kind, part, tensors, work)
        buffers = work.empty(reduce.kind, mine)
        receives += _messages(peer, reduce.kind, mine, buffers, work)
        arrivals.append(((reduce.kind, mine), buffers))
    return comm.post(sends, receives), arrivals


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

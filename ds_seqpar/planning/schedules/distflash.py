"""DistFlashAttn's load-balanced schedule (section 3.1 and Algorithm 2) for a causal mask on contiguous blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError
from ..plan import Compute, Move, Needed, Plan, Step
from ..topology import Axes, Topology
from .base import Own, Schedule


def distflash(topology: Topology, needed: Needed, direction: str, travels: str = "kv") -> Plan:
    """In step t worker p takes the k/v of p - t. One that has no work left, p < t, helps: it takes the queries of the
    late worker p - t + A, computes them against its own k/v and sends the result back.

    floor(A/2) + 1 steps. Helpers work at every t except 2t = A, where both would do the same product; the paper's
    Algorithm 2 as printed also leaves them out at the last step of odd A. Raises ConfigError unless the needed products
    are those of a causal mask on contiguous blocks, or for travels="q" (both sides travel here already).
    """
    size = topology.size("ring")
    if travels != "kv":
        raise ConfigError('distflash moves k/v and queries by itself; got travelling q, use "kv" or "auto"')
    if any(needed(i, j) != (j <= i) for i in range(size) for j in range(size)):
        raise ConfigError(
            "distflash needs causal attention on the contiguous layout; got other visibility, "
            "use the contiguous layout, or schedule ring or mesh with zigzag"
        )
    steps = []
    for t in range(size // 2 + 1):
        moves = _moves(size, t + 1) if t < size // 2 else []
        computes = [_product(size, p, t) for p in range(size) if _works(size, p, t)]
        results = [move for c in computes if t for move in _results(c, direction)]
        steps.append(Step(moves=tuple(moves), computes=tuple(computes), results=tuple(results)))
    return Plan(name="distflash", direction=direction, size=size, steps=tuple(steps))


def _works(size: int, p: int, t: int) -> bool:
    return p >= t or 2 * t != size


def _product(size: int, p: int, t: int) -> Compute:
    return Compute(rank=p, q=(p,), kv=(p - t,)) if p >= t else Compute(rank=p, q=(p - t + size,), kv=(p,))


def _moves(size: int, t: int) -> list[Move]:
    """The operands of step t, straight from their owners."""
    moves = []
    for p in range(size):
        if _works(size, p, t):
            owner = (p - t) % size
            kind = "kv" if p >= t else "q"
            moves.append(Move(src=owner, dst=p, kind=kind, key=(owner,)))
    return moves


def _results(compute: Compute, direction: str) -> list[Move]:
    """A visitor's part of the result goes straight back to its owner."""
    (q,), (kv,), rank = compute.q, compute.kv, compute.rank
    if q != rank:
        return [Move(src=rank, dst=q, kind="out" if direction == "forward" else "dq", key=(q,))]
    return [Move(src=rank, dst=kv, kind="dkv", key=(kv,))] if direction == "backward" else []


def axes(ranks: int, own: Own) -> Axes:
    return (("ring", ranks),)


def received(axes: Axes, direction: str, travels: str, units: Mapping[str, float]) -> list[float]:
    """Not the same on all ranks: early ones are sent late ones' queries, late ones what was computed for them."""
    ((_, size),) = axes
    return [_received_by(rank, size, direction, units) for rank in range(size)]


def _received_by(rank: int, size: int, direction: str, units: Mapping[str, float]) -> float:
    half = size // 2
    keys, visitors, back = min(rank, half), max(0, size - half - 1 - rank), max(0, rank - half)
    operands = keys * units["kv"] + visitors * units["q"]
    if direction == "forward":
        return operands + back * units["out"]
    return operands + back * units["dq"] + min(half, size - 1 - rank) * units["dkv"]


SCHEDULE = Schedule(
    name="distflash",
    summary="DistFlashAttn's: ranks without work left help late ones; causal attention only",
    build=distflash,
    axes=axes,
    received=received,
    layouts=("contiguous",),
    default_layout="contiguous",
    travellers=("kv",),
    takes=lambda q, kv: kv <= q,
    ring_axes=("ring",),
)

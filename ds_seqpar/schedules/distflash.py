"""DistFlashAttn's load-balanced schedule (section 3.1 and Algorithm 2) for a causal mask on contiguous blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..base.errors import ConfigError
from ..core.compiler.schedules.actions import ACCUMULATORS, Compute, Move, Step, moves_of
from ..core.compiler.schedules.base import Schedule
from ..core.compiler.schedules.plan import BlockMask, StepsOf
from ..core.compiler.sharding.layout import Axes, Topology


def distflash(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str = "kv") -> StepsOf:
    """Return the steps of DistFlashAttn, which takes floor(A/2) + 1 steps on A ranks.

    In step t, worker p receives the k/v of worker p - t. If p < t, worker p has no work left and becomes a helper. A
    helper computes attention for the queries of the late worker p - t + A with its own k/v, and sends back the result.

    Helpers compute in every step, with one exception: if A is even, both workers would compute the same product in step
    A / 2. As printed in the paper, Algorithm 2 also omits helpers in the last step if A is odd. If the mask hides more
    than a causal mask, the hidden products are skipped.

    Raises:
        ConfigError: A query sees a later block, or `moving_side` is "q" (in this schedule, both sides move).
    """
    if moving_side != "kv":
        raise ConfigError('distflash moves k/v and queries by itself; got traveling q, use "kv" or "auto"')
    for i, j in block_mask.pairs():
        if j > i:
            raise ConfigError(
                "distflash needs causal attention on the contiguous layout, in which no query sees a later block; got "
                f"queries of block {i} that see keys of block {j}, use a causal mask and that layout, or schedule ring "
                "or mesh"
            )
    size = topology.size("ring")
    half = size // 2

    def product(p: int, t: int) -> Compute | None:
        """Return the product that worker p computes in step t, or None if the worker is idle."""
        if p < t and 2 * t == size:
            return None
        q, kv = (p, p - t) if p >= t else (p - t + size, p)
        return Compute(rank=p, q=(q,), kv=(kv,)) if block_mask(q, kv) else None

    def steps(rank: int) -> Iterator[Step]:
        for t in range(half + 1):
            # computed: products in step t on this rank and on the rank t positions later; coming: products in the next
            # step, whose operands move now
            computed, coming = (
                [compute for p in {rank, (rank + turn) % size} if (compute := product(p, turn))] for turn in (t, t + 1)
            )
            yield Step(
                moves=moves_of(rank, map(_operand, coming) if t < half else ()),
                computes=tuple(compute for compute in computed if compute.rank == rank),
                results=moves_of(rank, [move for c in computed for move in _results(c, direction)] if t else ()),
            )

    return lambda rank: tuple(steps(rank))


def _operand(compute: Compute) -> Move:
    """Return the move that sends a product's remote operand directly from the operand's owner."""
    foreign = compute.kv if compute.q == (compute.rank,) else compute.q
    kind = "kv" if foreign is compute.kv else "q"
    return Move(src=foreign[0], dst=compute.rank, kind=kind, key=foreign)


def _results(compute: Compute, direction: str) -> list[Move]:
    """Return the moves that send a product's results directly to the owners of their blocks."""
    kinds = zip(ACCUMULATORS[direction], (compute.q, compute.kv), strict=False)
    return [Move(src=compute.rank, dst=key[0], kind=kind, key=key) for kind, key in kinds if key != (compute.rank,)]


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the number of elements that each rank receives.

    Early ranks receive queries from late ranks, and late ranks receive the results.
    """
    ((_, size),) = axes
    return [_received_by(rank, size, direction, units) for rank in range(size)]


def _received_by(rank: int, size: int, direction: str, units: Mapping[str, float]) -> float:
    half = size // 2
    keys, queries, results = min(rank, half), max(0, size - half - 1 - rank), max(0, rank - half)
    operands = keys * units["kv"] + queries * units["q"]
    if direction == "forward":
        return operands + results * units["out"]
    return operands + results * units["dq"] + min(half, size - 1 - rank) * units["dkv"]


SCHEDULE = Schedule(
    name="distflash",
    summary="DistFlashAttn's: ranks without work left help late ones; causal attention only",
    build=distflash,
    axes=lambda ranks, options: (("ring", ranks),),
    received=received,
    layouts=("contiguous",),
    default_layout="contiguous",
    moving_sides=("kv",),
    can_compute=lambda q, kv: kv <= q,
    ring_axes=("ring",),
)

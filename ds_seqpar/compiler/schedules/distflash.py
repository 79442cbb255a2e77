"""DistFlashAttn's load-balanced schedule (section 3.1 and Algorithm 2) for a causal mask on contiguous blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError
from ..sharding.layout import Axes, Topology
from .actions import Compute, Move, Step, Steps
from .base import Schedule
from .plan import BlockMask, StepsOf


def distflash(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str = "kv") -> StepsOf:
    """Return DistFlashAttn's steps: floor(A/2) + 1 of them on A ranks.

    In step t worker p takes the k/v of p - t. A worker with no work left, p < t, is a helper: it computes the queries
    of the late worker p - t + A with its own k/v, and sends the result back.

    Helpers compute at every t except 2t = A, where both would compute the same product. (The paper's Algorithm 2 as
    printed also leaves them out at the last step of odd A.) A mask that hides more than the causal one removes
    products.

    Raises:
        ConfigError: A query sees a later block, or moving_side is "q" (both sides move here).
    """
    if moving_side != "kv":
        raise ConfigError('distflash moves k/v and queries by itself; got travelling q, use "kv" or "auto"')
    for i, j in block_mask.pairs():
        if j > i:
            raise ConfigError(
                "distflash needs causal attention on the contiguous layout, in which no query sees a later block; got "
                f"queries of block {i} that see keys of block {j}, use a causal mask and that layout, or schedule ring "
                "or mesh"
            )
    return _DistFlash(topology.size("ring"), block_mask, direction).of


class _DistFlash:
    def __init__(self, size: int, block_mask: BlockMask, direction: str) -> None:
        self.size, self.block_mask, self.direction = size, block_mask, direction

    def of(self, rank: int) -> Steps:
        return tuple(self.step(rank, t) for t in range(self.size // 2 + 1))

    def step(self, rank: int, t: int) -> Step:
        # in step t + 1 this rank works with a block of t + 1 before it, and its own is with the rank t + 1 after it
        coming = [self.product((rank + shift * (t + 1)) % self.size, t + 1) for shift in (0, 1)]
        # a result of step t comes from the rank t before or after, or goes there
        done = [self.product((rank + shift * t) % self.size, t) for shift in ((0, 1) if t else (0,))]
        results = [move for compute in {c.rank: c for c in done if c}.values() for move in self.results(compute, t)]
        return Step(
            moves=_moves_of(
                rank, [self.operand(compute) for compute in coming if compute] if t < self.size // 2 else []
            ),
            computes=(done[0],) if done[0] else (),
            results=_moves_of(rank, results),
        )

    def product(self, p: int, t: int) -> Compute | None:
        """Return the product that worker p computes in step t."""
        if p < t and 2 * t == self.size:
            return None
        q, kv = (p, p - t) if p >= t else (p - t + self.size, p)
        return Compute(rank=p, q=(q,), kv=(kv,)) if self.block_mask(q, kv) else None

    def operand(self, compute: Compute) -> Move:
        """Return the move of the operand that the worker does not own, directly from its owner."""
        foreign = compute.kv if compute.q == (compute.rank,) else compute.q
        kind = "kv" if foreign is compute.kv else "q"
        return Move(src=foreign[0], dst=compute.rank, kind=kind, key=foreign)

    def results(self, compute: Compute, t: int) -> list[Move]:
        """Return the moves of results whose block another rank owns, directly to that rank."""
        (q,), (kv,), rank = compute.q, compute.kv, compute.rank
        if t == 0:
            return []
        if q != rank:
            return [Move(src=rank, dst=q, kind="out" if self.direction == "forward" else "dq", key=(q,))]
        return [Move(src=rank, dst=kv, kind="dkv", key=(kv,))] if self.direction == "backward" else []


def _moves_of(rank: int, moves: list[Move]) -> tuple[Move, ...]:
    """Return the moves that a rank takes part in, in one order on all ranks."""
    local_moves = {move for move in moves if rank in move.ranks}
    return tuple(sorted(local_moves, key=lambda move: (move.kind, move.key, move.dst)))


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the elements that each rank receives: early ranks get late ranks' queries, late ranks the results."""
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

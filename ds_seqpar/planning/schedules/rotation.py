"""What every ring has in common: units that go round while others stay, and results that follow them home."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Compute, Gather, Key, Move, Needed, Plan, ReduceScatter, Step

# (what travels, direction) -> the accumulator that travels with it, one hop behind
FOLLOWER = {("kv", "forward"): None, ("kv", "backward"): "dkv", ("q", "forward"): "out", ("q", "backward"): "dq"}


def rotation(
    name: str,
    direction: str,
    travels: str,
    units: Sequence[tuple[Key, Key]],
    paths: Sequence[Sequence[int]],
    needed: Needed,
    gathers: tuple[Gather, ...] = (),
    reduces: tuple[ReduceScatter, ...] = (),
) -> Plan:
    """units[r]: the (q, kv) keys that rank r starts with. paths[r][t]: where the travelling one of them is in step t
    (paths[r][0] = r; in every step all ranks are visited by different units).

    A unit stops at the last rank that needs it. What was computed at home stays at home; the results of visits follow
    the unit one hop behind, and the last visited rank sends them home. gathers come before the first step, reduces
    after everything is home.
    """
    side = 1 if travels == "kv" else 0
    follower = FOLLOWER[travels, direction]

    def product(unit: int, rank: int) -> Compute:
        moving, staying = units[unit][side], units[rank][1 - side]
        return Compute(rank=rank, q=staying if side else moving, kv=moving if side else staying)

    def wanted(compute: Compute) -> bool:
        return any(needed(i, j) for i in compute.q for j in compute.kv)

    visits = [[t for t, rank in enumerate(path) if wanted(product(unit, rank))] for unit, path in enumerate(paths)]
    last = [max(steps, default=0) for steps in visits]
    first = [min((t for t in steps if t > 0), default=len(paths)) for steps in visits]
    steps = []
    for t in range(max(last) + 1):
        moves, computes, results = [], [], []
        for unit, path in enumerate(paths):
            key = units[unit][side]
            if t < last[unit]:
                moves.append(Move(src=path[t], dst=path[t + 1], kind=travels, key=key))
            if t in visits[unit]:
                computes.append(product(unit, path[t]))
            if follower and first[unit] <= t <= last[unit]:
                home = unit if t == last[unit] else path[t + 1]
                results.append(Move(src=path[t], dst=home, kind=follower, key=key))
        steps.append(
            Step(gathers=() if t else gathers, moves=tuple(moves), computes=tuple(computes), results=tuple(results))
        )
    if reduces:
        steps.append(Step(reduces=reduces))
    return Plan(name=name, direction=direction, size=len(paths), steps=tuple(steps))

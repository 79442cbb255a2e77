"""A mesh schedule for tests: the first user of Gather and ReduceScatter, which have to work before others come."""

from dataclasses import replace

from ds_seqpar.plan import Compute, Gather, Move, Plan, ReduceScatter, Step


def mesh(a, b, rounds):
    """The builder of a mesh: gather q along x and kv along y, rotate kv along z, reduce-scatter out along x.

    Blocks q(x0, y0, z0) and kv(x1, y1, z1) meet on rank (x1, y0, z0). Backward makes the same moves; the gradient of
    visiting keys rides one hop behind them, and is reduce-scattered along y where its keys came from.
    """

    def build(topology, needed, direction):
        size = topology.size(*topology.inner_axes)
        assert size == a * b * rounds
        places = [(x, y, z) for z in range(rounds) for y in range(b) for x in range(a)]
        steps = [_step(places, t, direction) for t in range(rounds)]
        home = _collectives(ReduceScatter, "dkv", columns) if direction == "backward" else ()
        if home and rounds == 1:
            steps[0] = replace(steps[0], reduces=steps[0].reduces + home)
        elif home:
            steps.append(Step(reduces=home))  # gradients that travelled are home one step after the last product
        return Plan(name="mesh", direction=direction, size=size, steps=tuple(steps))

    def rank(x, y, z):
        return x + a * (y + b * (z % rounds))

    def row(y, z):
        return tuple(rank(x, y, z) for x in range(a))

    def column(x, z):
        return tuple(rank(x, y, z) for y in range(b))

    rows = [row(y, z) for z in range(rounds) for y in range(b)]
    columns = [column(x, z) for z in range(rounds) for x in range(a)]

    def _step(places, t, direction):
        gathers, moves, computes, results, reduces = (), [], [], [], ()
        if t == 0:
            gathers = _collectives(Gather, "q", rows) + _collectives(Gather, "kv", columns)
        for x, y, z in places:
            here, onward, kv = rank(x, y, z), rank(x, y, z + 1), column(x, z - t)
            computes.append(Compute(rank=here, q=row(y, z), kv=kv))
            if t < rounds - 1:
                moves.append(Move(src=here, dst=onward, kind="kv", key=kv))
            if direction == "backward" and t > 0:
                # in the last step the next rank is the one where these keys came from
                results.append(Move(src=here, dst=onward, kind="dkv", key=kv))
        if t == rounds - 1:
            reduces = _collectives(ReduceScatter, "out" if direction == "forward" else "dq", rows)
        return Step(
            gathers=gathers, moves=tuple(moves), computes=tuple(computes), results=tuple(results), reduces=reduces
        )

    return build


def _collectives(kind_of, kind, groups):
    parts = [tuple((rank,) for rank in ranks) for ranks in groups]
    return tuple(
        kind_of(ranks=ranks, kind=kind, parts=mine) for ranks, mine in zip(groups, parts, strict=True) if len(ranks) > 1
    )

"""Whether equal shares of causal attention can do with fewer bytes than the triangle's: asked of an exact solver.

    pip install -c constraints.txt '.[solver]'
    python -m benchmarks.triangle_optimum

The sequence is T (T - 1) chunks; each of T (T - 1) / 2 ranks owns two, whichever, and computes T (T - 1) products of
chunks, a chunk with itself counting half: any placement with equal work. A chunk of q that comes to a rank costs two
halves of a unit, one in and one for its partial output that somebody receives; a chunk of k/v costs two (MHA, forward,
partial outputs as wide as q). So bytes are chunks received.

one rank: the fewest chunks that any one rank must receive for its share of work, by OR-Tools' CP-SAT, proven. That many
times the ranks is a bound for all placements. all ranks: the whole placement at once, up to --whole. A question that is
not answered in --seconds says between what the answer lies.
"""

from __future__ import annotations

import argparse

from ds_seqpar.compiler.actions import OPERANDS
from ds_seqpar.compiler.compile import pattern_of
from ds_seqpar.compiler.masks import CAUSAL
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.config import SequenceParallelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=4, metavar="T")
    parser.add_argument("--whole", type=int, default=3, metavar="T", help="up to which all ranks are placed at once")
    parser.add_argument("--seconds", type=float, default=300, help="for each question")
    args = parser.parse_args()
    print("| T | ranks | triangle, chunks a rank | one rank, at least | triangle, all ranks | all ranks, at least |")
    print("|---|---|---|---|---|---|", flush=True)
    for blocks in range(3, args.largest + 1):
        ours = received(blocks)
        one, all_of_them = fewest(blocks, 1, args.seconds), "not asked"
        if blocks <= args.whole:
            all_of_them = fewest(blocks, len(ours), args.seconds)
        print(f"| {blocks} | {len(ours)} | {max(ours)} | {one} | {sum(ours)} | {all_of_them} |", flush=True)


def received(blocks: int) -> list[int]:
    """Chunks of q and of k/v that each rank of the triangle receives, by its plan."""
    ranks = blocks * (blocks - 1) // 2
    config = SequenceParallelConfig(size=ranks, ulysses=1, schedule="triangle").resolve(ranks)
    pattern = pattern_of(CAUSAL, EvenShards(config.layout, 4 * ranks, ranks))
    plan = config.recipe(config.topology(ranks)).plan("forward", pattern, shape_of("fp32", "bfloat16", 1, (1, 1, 64)))
    return [
        sum(move.dst == rank and move.kind in OPERANDS for step in steps for move in step.moves)
        for rank, steps in enumerate(plan.ranks)
    ]


def fewest(blocks: int, placed: int, seconds: float) -> str:
    """Chunks that so many of the ranks receive together at least: one, or all, which then compute everything."""
    from ortools.sat.python import cp_model  # of the extra

    model, chunks, ranks = cp_model.CpModel(), range(blocks * (blocks - 1)), range(placed)
    new = model.new_bool_var
    own, q, kv = ({(c, r): new("") for c in chunks for r in ranks} for _ in range(3))  # has it; receives it
    does = {(m, n, r): new("") for m in chunks for n in range(m + 1) for r in ranks}
    for r in ranks:
        model.add(sum(own[c, r] for c in chunks) == 2)
        work = sum((1 if m == n else 2) * done for (m, n, rank), done in does.items() if rank == r)
        model.add(work == 2 * blocks * (blocks - 1))
    for (m, n, r), done in does.items():
        model.add_bool_or(done.negated(), own[m, r], q[m, r])
        model.add_bool_or(done.negated(), own[n, r], kv[n, r])
    if placed > 1:
        for c in chunks:
            model.add_exactly_one(own[c, r] for r in ranks)
            for r in ranks[1:]:  # ranks are alike: numbered by the first chunk that they own
                model.add_bool_or(own[c, r].negated(), *(own[d, r - 1] for d in range(c)))
        for m in chunks:
            for n in range(m + 1):
                model.add_exactly_one(does[m, n, r] for r in ranks)
    model.minimize(sum(q.values()) + sum(kv.values()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status == cp_model.OPTIMAL:
        return str(round(solver.objective_value))
    return f"{solver.best_objective_bound:.0f} to {solver.objective_value:.0f}: {solver.status_name(status).lower()}"


if __name__ == "__main__":
    main()

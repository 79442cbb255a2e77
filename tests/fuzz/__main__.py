"""Replays a case as a failed test printed it: python -m tests.fuzz attention|batches|loops|commands "{...}"."""

import ast
import contextlib
import sys

from tests.fuzz import batches, loops, ranks, shell
from tests.fuzz.run import Pools

if __name__ == "__main__":
    name, case = sys.argv[1], ast.literal_eval(sys.argv[2])
    if name == "loops":
        print(*loops.try_one(case), sep=": ")
    elif name == "commands":
        code, out, err = shell.run(case)
        print(out, err, *shell.verdict(case, code, out, err), sep="\n")
    else:
        run = {"attention": ranks.run, "batches": batches.run}[name]
        with contextlib.closing(Pools()) as pools:
            results, errors = pools.call(case["ranks"], run, case)
            for rank, outcome in sorted({**results, **errors}.items()):
                print(f"rank {rank}: {outcome}")
            print(*ranks.verdict(case, results, errors), sep=": ")

"""Replays one drawn case: python -m tests.fuzz "{'ranks': 2, ...}", as a failed test printed it."""

import ast
import sys

from tests.fuzz import ranks
from tests.fuzz.run import Pools

if __name__ == "__main__":
    case, pools = ast.literal_eval(sys.argv[1]), Pools()
    results, errors = pools.call(case["ranks"], ranks.run, case)
    for rank, outcome in sorted({**results, **errors}.items()):
        print(f"rank {rank}: {outcome}")
    print(*ranks.verdict(case, results, errors), sep=": ")
    pools.close()

"""Runs drawn cases and counts what they came to."""

import contextlib
from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings

from tests.launch import Ranks

SECONDS = 20  # for one case
CASES_A_PROCESS = 40  # each makes process groups, which hold files and threads as long as the process lives
FAILURES = 20  # after which the rest is not tried


class Pools:
    """Ranks by their number, made anew after a failure and now and then."""

    def __init__(self):
        self.pools, self.used = {}, Counter()

    def call(self, world, function, case):
        if world not in self.pools:
            self.pools[world] = Ranks(world)
        results, errors = self.pools[world].call(function, case, timeout=SECONDS)
        self.used[world] += 1
        if errors or self.used[world] % CASES_A_PROCESS == 0:
            self.drop(world, patience=0.1 if errors else 10)
        return results, errors

    def drop(self, world, patience=0.1):
        with contextlib.suppress(KeyError):
            self.pools.pop(world).close(patience)

    def close(self):
        for world in list(self.pools):
            self.drop(world)


def fuzz(strategy, count, try_one):
    """Tries `count` drawn cases, of which try_one tells (what it came to, None or a fault); prints the counts."""
    counts, failures = Counter(), {}

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def each(case):
        if counts["failed"] < FAILURES:
            came_to, fault = try_one(case)
            counts[came_to] += 1
            if fault:
                failures.setdefault(fault.splitlines()[-1], f"{case!r}\n{fault}")

    each()
    print("\n" + "\n".join(f"{number:6} {name}" for name, number in sorted(counts.items())))
    replay = 'python -m tests.fuzz "{...}" replays one; those that end alike are shown once'
    assert not failures, "\n\n".join([replay, *failures.values()])

"""Runs drawn cases and counts what they came to."""

from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings

from tests.launch import Ranks

SECONDS = 45  # for one case, on a machine that is busy otherwise too
FAILURES = 20  # after which the rest is not tried


class Pools:
    """Ranks by their number, in the same processes for all cases up to a failure."""

    def __init__(self):
        self.pools = {}

    def call(self, world, function, case):
        if world not in self.pools:
            self.pools[world] = Ranks(world)
        results, errors = self.pools[world].call(function, case, timeout=SECONDS)
        if errors:
            self.pools.pop(world).close(patience=0.1)
        return results, errors

    def close(self):
        for pool in self.pools.values():
            pool.close()


class Tried:
    """What cases came to."""

    def __init__(self, try_one):
        self.try_one, self.counts, self.failures = try_one, Counter(), {}

    def add(self, case):
        if self.counts["failed"] < FAILURES:
            came_to, fault = self.try_one(case)
            self.counts[came_to] += 1
            if fault:
                self.failures.setdefault(fault.splitlines()[-1], f"{case!r}\n{fault}")

    def report(self, record_property):
        record_property("cases", "; ".join(f"{number} {name}" for name, number in sorted(self.counts.items())))
        kinds = "attention|batches|loops|commands"
        replay = f'python -m tests.fuzz {kinds} "{{...}}" replays one; those that end alike are shown once'
        assert not self.failures, "\n\n".join([replay, *self.failures.values()])


def fuzz(strategy, count, tried):
    """Adds `count` cases that hypothesis draws."""

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def each(case):
        tried.add(case)

    each()

"""Grids of cases: the whole Cartesian product, and a small cover of it that contains every pair of values. `make test`
runs covers and a few drawn cases, `make test-all` the whole grid, or another cover if cases take long.
"""

import heapq
import itertools

import pytest
from hypothesis import settings

quick = False  # whether tests marked `slow` are skipped; set by the root conftest


def few_then_rest(few, rest):
    """pytest parameters: `few` as one, and the rest as another that is marked `slow`."""
    return [pytest.param(few, id="few"), pytest.param(rest, id="rest", marks=pytest.mark.slow)]


def each_then_rest(few, rest):
    """pytest parameters: each of `few`, and each of the rest marked `slow`."""
    return [*few, *(pytest.param(value, marks=pytest.mark.slow) for value in rest)]


def examples(count):
    """The number of cases that hypothesis draws: `count`, or a quarter of it in `make test`."""
    return settings(max_examples=max(5, count // 4) if quick else count)


def whole(legal=lambda case: True, **axes):
    """Every legal case as a dict, the last axis fastest."""
    found = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [case for case in found if legal(case)]


def cover(legal=lambda case: True, **axes):
    """A few of `whole`'s cases that together contain every pair of values of any legal case, the same on every run.
    Greedy: takes the case with the most missing pairs, and among equals the first in `whole`.
    """
    return pairwise(whole(legal, **axes))


def pairwise(cases, without=()):
    """A few of these cases that together contain every pair of values in any of them. without: axes to ignore."""
    axes = [{axis: value for axis, value in case.items() if axis not in without} for case in cases]
    return [cases[index] for index in _chosen(axes)]


def _chosen(cases):
    """The indices of the cases in the cover."""
    # every pair of values has a bit, since sets of tuples take many times as long
    bits = {}
    pairs = [
        sum(1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(sorted(case.items()), 2))
        for case in cases
    ]
    wanting = (1 << len(bits)) - 1
    heap = [(-mine.bit_count(), index) for index, mine in enumerate(pairs)]
    heapq.heapify(heap)
    taken = []
    while wanting:
        # counts only decrease, so a case whose count is still at the top of the heap has the most
        count, index = heapq.heappop(heap)
        fresh = (pairs[index] & wanting).bit_count()
        if fresh == -count:
            taken.append(index)
            wanting &= ~pairs[index]
        elif fresh:
            heapq.heappush(heap, (-fresh, index))
    return sorted(taken)


def grouped(group, legal=lambda case: True, few=None, large=lambda case: False, **axes):
    """pytest parameters (name, cases): the cover, and the rest marked `slow`, each split by the axes in `group`. A
    group of cases is one test, so that pytest's overhead per case stays small. few: cases to use instead of the cover.
    large: whether a case takes long; for a group of such cases the rest is also a cover.
    """
    cases = whole(legal, **axes)
    few = [cases[index] for index in _chosen(cases)] if few is None else few
    rest = _split([case for case in cases if case not in few], group)
    thinned = {
        f"rest-{name}": [members[index] for index in _chosen(members)] if large(members[0]) else members
        for name, members in rest.items()
    }
    return [
        *(pytest.param(members, id=name) for name, members in _split(few, group).items()),
        *(pytest.param(members, id=name, marks=pytest.mark.slow) for name, members in thinned.items()),
    ]


def _split(cases, group):
    groups = {}
    for case in cases:
        groups.setdefault("-".join(f"{axis}_{_name(case[axis])}" for axis in group), []).append(case)
    return groups


def _name(value):
    return "_".join(map(str, value)) if isinstance(value, tuple) else str(value)

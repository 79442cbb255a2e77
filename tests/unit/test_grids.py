"""The helper that makes covers of case grids: every pair once at least, nothing illegal, the same every time."""

import itertools

from tests.grids import cover, grouped, whole

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2, 3)}


def _pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}


def _odd_one_out(case):
    return not (case["a"] == 1 and case["d"] == 3)


def test_whole_is_the_product():
    cases = whole(**AXES)
    assert len(cases) == 3 * 2 * 2 * 4
    assert len({tuple(case.items()) for case in cases}) == len(cases)


def test_cover_holds_every_legal_pair_in_few_cases():
    for legal in (lambda case: True, _odd_one_out):
        cases = cover(legal, **AXES)
        assert _pairs(cases) == _pairs(whole(legal, **AXES))
        assert all(legal(case) for case in cases)
        # the two longest axes alone need 3 * 4 cases; greedy may take a few more
        assert len(cases) <= 16
        assert cases == cover(legal, **AXES)


def test_groups_hold_every_case_once():
    groups = grouped(("a", "c"), _odd_one_out, **AXES)
    cases = [case for group in groups for case in group.values[0]]
    key = lambda case: str(case)  # noqa: E731
    assert sorted(cases, key=key) == sorted(whole(_odd_one_out, **AXES), key=key)
    few = [case for group in groups if not group.marks for case in group.values[0]]
    assert sorted(few, key=key) == sorted(cover(_odd_one_out, **AXES), key=key)
    assert len({group.id for group in groups}) == len(groups)

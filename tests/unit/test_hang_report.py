"""Who keeps a job waiting, from what its ranks do."""

import pytest

from ds_seqpar.guards.watchdog import State, report
from tests.words import missing

LOADS = State("is in its data loader (train.py:31, in get)")
LINK = "a link is slow or down"


def compares(whom, what="a comparison"):
    return State(f"waits in {what} for {whom}", what)


def receives(step, whom):
    return State(f"waits at step {step} for {whom}", "a transfer", (3, step))


CASES = {
    "a collective, of which all but one are there": (
        {0: compares("rank 2"), 1: compares("rank 2"), 2: LOADS, 3: compares("rank 2")},
        ("rank 2 is in its data loader (train.py:31, in get); ranks 0-1, 3 wait in a comparison for rank 2",),
    ),
    "two calls": (
        {0: compares("rank 2"), 1: compares("rank 2"), 2: compares("rank 0", "another call"), 3: compares("rank 2")},
        ("rank 2 waits in another call for rank 0; ranks 0-1, 3 wait in a comparison for rank 2", "different calls"),
    ),
    "a message that does not come": (
        {0: receives(2, "rank 3"), 1: receives(2, "rank 0"), 2: receives(0, "rank 1"), 3: receives(1, "rank 2")},
        ("rank 2 waits at step 0 for rank 1; rank 3 waits at step 1 for rank 2; rank 0 waits", LINK),
    ),
    "many": (
        {**{rank: receives(rank, f"rank {rank + 1}") for rank in range(40)}, 40: LOADS, 41: LOADS},
        ("ranks 40-41 are in its data loader (", "rank 2 waits at step 2 for rank 3, and 37 more"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_report_begins_with_the_ranks_that_keep_the_others_waiting(case):
    states, words = CASES[case]
    text, said = report(states, 60.0)
    assert missing(said, "after 60 s of waiting ", *words) == [], said
    assert said.startswith(f"after 60 s of waiting {words[0]}")
    assert len(text.splitlines()) <= 17

"""Who keeps a job waiting, from what its ranks do."""

import pytest

from ds_seqpar.runtime.hang_report import State, report
from tests.words import missing


def busy(words="is in its data loader"):
    return State("here", words)


def compares(awaited, what="a comparison"):
    return State("here", f"waits in {what} for", what, awaited)


def receives(unit, sender, receiver, posted=(), programs=3):
    message = f"{unit}:{sender}>{receiver}"
    return State("here", f"waits for {unit} from", "a transfer", [sender], [message], [message, *posted], programs)


RING = {0: receives("kv(2)", 3, 0), 1: receives("kv(3)", 0, 1), 3: receives("kv(1)", 2, 3)}
CASES = {
    "one that does not wait": (
        {0: compares([3]), 1: compares([0]), 2: busy(), 3: compares([2])},
        "rank 0 waits in a comparison for rank 3, which waits in a comparison for rank 2, which is in its data loader",
    ),
    "a collective, of which all but one are there": (
        {0: compares([1, 2, 3]), 1: compares([0, 2, 3]), 2: busy(), 3: compares([0, 1, 2])},
        "rank 0 waits in a comparison for rank 2, which is in its data loader",
    ),
    "a collective of which all are there": (
        {rank: compares([other for other in range(3) if other != rank]) for rank in range(3)},
        "rank 0 waits in a comparison for ranks 1-2, which has come to it too: the link between ranks 0-2 is slow",
    ),
    "two calls": (
        {0: compares([2]), 1: compares([2]), 2: compares([0], "another call"), 3: compares([2])},
        "rank 0 waits in a comparison for rank 2, which waits in another call for rank 0: rank 2 is in another call",
    ),
    "a message that was not posted": (
        {**RING, 2: receives("kv(0)", 1, 2, programs=2), 1: busy()},
        "rank 0 waits for kv(2) from rank 3, which waits for kv(1) from rank 2, which waits for kv(0) from rank 1, "
        "which is in its data loader",
    ),
    "a message that was posted": (
        {**RING, 2: receives("kv(1)", 1, 2), 1: receives("kv(3)", 0, 1, posted=["kv(1):1>2"])},
        "rank 2, which waits for kv(1) from rank 1, which has come to it too: the link between ranks 1-2 is slow",
    ),
    "a message of a program that has ended": (
        {**RING, 2: receives("kv(1)", 1, 2), 1: State("here", "waits in end for", "end", [2], programs=4)},
        "rank 2, which waits for kv(1) from rank 1, which has come to it too: the link between ranks 1-2 is slow",
    ),
    "messages of which one's end has not come": (
        {
            0: State(
                "here",
                "has a device that waits for both with",
                "device",
                [1, 2],
                ["kv(1):1>0", "kv(0):0>2"],
                ["kv(1):1>0", "kv(0):0>2"],
                3,
            ),
            1: State("here", "is at home", posted=["kv(1):1>0"], programs=3),
            2: State("here", "is in its data loader", programs=2),
        },
        "rank 0 has a device that waits for both with rank 2, which is in its data loader",
    ),
    "many": (
        {**{rank: compares([rank + 1]) for rank in range(40)}, 40: busy()},
        "rank 0 waits in a comparison for rank 1, which waits, as 37 more ranks after it, for rank 39, which waits in "
        "a comparison for rank 40, which is in its data loader",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_report_ends_with_the_rank_that_keeps_the_others_waiting(case):
    states, sentence = CASES[case]
    text, said = report(dict(sorted(states.items())), 0, 60.0)
    assert missing(said, "after 60 s of waiting rank 0 ", sentence) == [], said
    assert missing(text, "rank 0, here") == [], text

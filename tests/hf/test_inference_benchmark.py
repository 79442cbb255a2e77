"""The benchmark of generation, for real and small: it ends where a contender's tokens are not those of one rank."""

import pytest

from benchmarks.inference.__main__ import arguments, lines, measure
from benchmarks.inference.ranks import GATHERING, ONE, TRAINING, decode, prefill

SMALL = "--ranks 3 --layers 2 --hidden 64 --intermediate 64 --heads 4 --kv-heads 2 --tokens 4 --rounds 1"


@pytest.mark.slow  # two sets of ranks; what generate gives is seen in test_generate.py
def test_all_give_the_tokens_of_one_rank():
    args = arguments(SMALL.split())
    first = measure(args, 3, prefill, [ONE, "ring", GATHERING, TRAINING], 100)
    token = measure(args, 3, decode, [ONE, "ring", GATHERING], 1000)  # not as many on each rank
    assert [len(took) for took in (*first.values(), *token.values())] == [1] * 7
    rows = [*lines(3, 100, first, ONE, TRAINING)]
    assert [row[:3] for row in rows] == [[3, "100", name] for name in first]
    assert rows[0][4:6] == ["1.00", "1.00-1.00"] == rows[3][6:8]


def test_contenders_are_ours_on_several_ranks(capsys):
    for words in ("--ranks 1", "-- deepspeed"):
        with pytest.raises(SystemExit):
            arguments(words.split())
        assert "contenders must be ours" in capsys.readouterr().err

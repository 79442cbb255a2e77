"""Ranks that are kept for one function after another: the same processes, in which each finds what a new one has; and
ranks of other kinds, for a run by night and for a debugger."""

import os

import pytest
import torch

from tests.launch import RankFailure, on_ranks, on_warm_ranks


def who():
    return os.getpid(), torch.rand(3).tolist()


def fail():
    raise ValueError("for the ranks to be of no more use")


def test_ranks_are_kept_until_one_fails_the_word_is_another_or_the_environment_is(monkeypatch):
    first = on_warm_ranks(2, who)
    assert on_warm_ranks(2, who) == first
    assert [numbers for _, numbers in on_ranks(2, who)] == [numbers for _, numbers in first]
    with pytest.raises(RankFailure, match="no more use"):
        on_warm_ranks(2, fail)
    seen = [first]
    for environment, word in (({}, "plain"), ({"OF_A_TEST": "1"}, "plain"), ({"OF_A_TEST": "1"}, "another")):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        seen.append(on_ranks(2, who, keep=word))
    processes = [pid for found in seen for pid, _ in found]
    assert len(set(processes)) == len(processes)
    assert [numbers for found in seen for _, numbers in found] == [first[0][1]] * 8


def test_with_RANKS_FRESH_every_call_gets_new_ranks(monkeypatch):
    monkeypatch.setenv("RANKS_FRESH", "1")
    (first,), (second,) = on_warm_ranks(1, who), on_warm_ranks(1, who)
    assert first[0] != second[0]


def stop():
    found = []
    breakpoint()
    return found


def test_with_RANKS_SPAWN_a_rank_has_a_debugger_on_the_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("RANKS_SPAWN", "1")
    (tmp_path / "typed").write_text("found.append(42)\nc\n")
    ours = os.dup(0)
    with (tmp_path / "typed").open() as typed:
        os.dup2(typed.fileno(), 0)
    try:
        assert on_ranks(1, stop, patience=None, timeout=0) == [[42]]
    finally:
        os.dup2(ours, 0)
        os.close(ours)

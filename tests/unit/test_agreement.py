"""What ranks are told that were given different things: the fields that differ, and who was given what."""

import dataclasses

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.guards.agreement import differences, fields_of
from tests.words import missing


def told(values):
    """Who was given what; before it stands what they were to be given alike."""
    said = differences({rank: ("settings", fields_of(value)) for rank, value in enumerate(values)})
    assert said == "" or said.startswith("settings; got ")
    return said.removeprefix("settings; got ")


def test_only_the_field_that_differs_is_named_for_ranks_that_gave_the_same():
    values = [{**vars(SequenceParallelConfig(size=2 if rank == 3 else 4)), "heads": (8, 2)} for rank in range(4)]
    assert told(values) == "ranks 0-2: size 4; rank 3: size 2"


def test_configurations_are_compared_by_field():
    config = SequenceParallelConfig(size=4)
    values = [config, dataclasses.replace(config, layout="striped", ulysses=2)]
    first = f"ulysses {config.ulysses!r}, layout {config.layout!r}"
    assert told(values) == f"rank 0: {first}; rank 1: ulysses 2, layout 'striped'"


def test_64_ranks_are_told_in_a_short_sentence():
    halves = [{"size": 2, "seed": rank % 2} for rank in range(64)]
    assert told(halves) == "ranks 0, 2, 4, 6 and 28 more: seed 0; ranks 1, 3, 5, 7 and 28 more: seed 1"
    few = told(list(range(64)))
    assert missing(few, "rank 3: 3", "60 other") == []
    assert "rank 4" not in few
    windows = [[{"labels": rank == 63} for _ in range(8)] for rank in range(64)]
    parts = told(windows).split("; ")
    for part, ranks, value in zip(parts, ("ranks 0-62", "rank 63"), (False, True), strict=True):
        assert missing(part, f"{ranks}: [0] labels {value}", f"[3] labels {value}", "4 more") == []
        assert "[4]" not in part


def test_what_a_rank_does_not_have_is_told():
    values = [{"labels": 1, "token_type_ids": 1}, {"labels": 1}]
    assert told(values) == "rank 0: token_type_ids 1; rank 1: no token_type_ids"


def test_other_calls_are_named():
    given = {0: ("batches", {}), 1: ("attention inputs", {"causal": "True"}), 2: ("batches", {})}
    assert missing(differences(given), "calls", "ranks 0, 2: batches", "rank 1: attention inputs") == []


def test_the_same_is_no_difference():
    assert told([{"b": 1, "a": 2}, {"a": 2, "b": 1}]) == ""

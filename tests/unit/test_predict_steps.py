"""The parts of `benchmarks.predict_steps` that run nothing: what a configuration changes, what is set side by side."""

import argparse

import pytest

from benchmarks.cluster_spec import parse
from benchmarks.predict_steps import grouped, inside, most, named, split, table

ARGS = argparse.Namespace(link="50mbit", seq=2048, hidden=256, layers=4, zero=[("stage3_max_live_parameters", 7)])
PARTS = {"attention forward": 1.0, "attention backward": 2.0, "matrices": 3.0, "host": 1.5, "ZeRO": 0.5, "optimiser": 1}
CLOCKS = {"all": 10.0, "attention": 4.0, "ZeRO": 1.0, "step": 0.5, "step: ZeRO": 0.2}
ROW = {"name": "u4", "held_out": False, "seconds": [4.0, 5.0, 9.0], "predicted": 9.0, "parts": PARTS, "inside": CLOCKS}


def test_a_configuration_changes_the_model_the_length_and_zero_for_itself():
    its, options = split(parse("u2/ring+seq=1024+hidden=512+stage=1+checkpointing=false+layout=striped"), ARGS)
    assert (its.seq, its.hidden, its.layers, its.link) == (1024, 512, 4, ["50mbit"])
    assert dict(its.zero) == {"stage": 1, "stage3_max_live_parameters": 7, "stage3_max_reuse_distance": 2**20}
    assert options == {"ulysses": 2, "schedule": "ring", "checkpointing": False, "layout": "striped"}
    assert (ARGS.seq, ARGS.zero) == (2048, [("stage3_max_live_parameters", 7)])


def test_parts_are_grouped_as_they_are_measured():
    assert grouped(PARTS) == {"attention": 3.0, "ZeRO": 1.5, "rest": 4.5}
    # a step with clocks took 10 s and others 5; of the optimiser's step what is no collective is ZeRO's too
    assert inside(ROW) == pytest.approx({"attention": 2.0, "ZeRO": 0.65, "rest": 2.35})


def test_what_takes_most_is_compared_with_what_did():
    assert most(grouped(PARTS)) == "rest"
    wrong = {**ROW, "inside": {**CLOCKS, "attention": 7.0}}
    assert named([ROW, wrong]).endswith("1 of 2")
    lines = table([ROW, wrong]).splitlines()
    assert lines[2] == ("| u4 | 5.00 | 4.00-9.00 | 9.00 | 1.80 | 3.00 / 2.00 | 1.50 / 0.65 | 4.50 / 2.35 | rest |  |")
    assert "| rest, was attention |" in lines[3]

"""Commands end in seconds, whatever they are given: cheap answers to large numbers, and refusals before any work."""

import dataclasses
import itertools
import json
import random
import re
import time

import pytest

from ds_seqpar.analysis.memory import free_head_chunk_counts
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.sharding import heads
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import Zero
from ds_seqpar.planner import attention_memory, limits
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.plan import find_plan
from ds_seqpar.planner.request import Job, Model, Request, TrainingStep
from tests.unit.commands import LLAMA, run

MODEL = Model(
    hidden=64, intermediate=96, layers=2, heads=8, kv_heads=2, head_dim=8, vocab=256, parameters=100_000,
    layer_parameters=30_000,
)  # fmt: skip
PATIENCE = 30  # seconds of processor: against what does not end


def _run(capsys, *words):
    """(what it said on stderr, exit code)."""
    began = time.process_time()
    _, *said = run(capsys, *words)
    assert time.process_time() - began < PATIENCE
    return tuple(said)


def _refused(capsys, most, *words):
    """One sentence with the limit, before any work."""
    began = time.process_time()
    err, code = _run(capsys, *words)
    assert time.process_time() - began < PATIENCE / 3
    assert code == 2
    assert err.count("\n") == 1
    assert f"at most {most:,}; got" in err


PLANNED = ["--seq-len", 2**20]
REFUSED = [
    (limits.MAX_SHOWN_RANKS, ["show", "--size", 1024, "--ulysses", 4]),
    (limits.MAX_SHOWN_OVERLAP_RANKS, ["show", "--size", 96, "--overlap"]),
    (limits.MAX_DRAWN_RANKS, ["show", "--size", 96, "--png", "never.png"]),
    (limits.MAX_RANKS, ["memory", *PLANNED, "--ranks", 10**15 + 37]),
    (limits.MAX_SHARING_RANKS, ["memory", *PLANNED, "--ranks", 2**20]),
    (
        limits.MAX_CP_RANKS,
        ["memory", *PLANNED, "--ranks", 2**12, "--set", "schedule=attention2d", "--set", "ulysses=1"],
    ),
    (limits.MAX_OVERLAP_RANKS, ["memory", *PLANNED, "--ranks", 128, "--set", "overlap=true", "--set", "ulysses=1"]),
    (limits.MAX_RANKS, ["plan", *PLANNED, "--nodes", 10**12]),
    (limits.MAX_PLANNED_RANKS, ["plan", *PLANNED, "--nodes", 1024, "--set", "size=8192"]),
    (limits.MAX_CP_RANKS, ["plan", *PLANNED, "--nodes", 512, "--set", "size=4096", "--set", "ulysses=2"]),
]


@pytest.mark.parametrize(("most", "words"), REFUSED, ids=str)
def test_what_would_cost_too_much_is_refused(capsys, place, most, words):
    model = [] if words[0] == "show" else ["--model", place]
    _refused(capsys, most, *words, *model)


@pytest.mark.parametrize("words", [["--ranks", 2**16], ["--ranks", 2**20, "--set", "size=64"]], ids=str)
def test_memory_takes_any_number_of_ranks_that_there_are(capsys, place, words):
    assert _run(capsys, "memory", "--model", place, "--seq-len", 2**20, *words) == ("", 0)


def test_plan_with_documents(capsys, place, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("1\n" * 10**6, encoding="utf-8")
    _refused(capsys, limits.MAX_DOCUMENTS, "plan", "--model", place, "--documents", file)
    file.write_text(str(10**12), encoding="utf-8")
    _refused(capsys, limits.MAX_PACKED_TOKENS, "plan", "--model", place, "--documents", file)


@pytest.mark.parametrize(
    ("most", "change"),
    [
        (1000, {"num_hidden_layers": 100_000}),
        (limits.MAX_EXPERTS, {"model_type": "mixtral", "num_local_experts": 10**6}),
    ],
    ids=str,
)
def test_a_models_numbers(capsys, tmp_path, most, change):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}), encoding="utf-8")
    for command in (["memory", "--ranks", 4], ["plan"]):
        _refused(capsys, most, *command, "--model", tmp_path, "--seq-len", 1024)


def _asked(world, **given):
    machine = dataclasses.replace(Machine.load("h100-ib"), memory=1e15)
    return Request(job=Job(model=MODEL, seq=2**16), machine=machine, world=world, **given)


def test_sizes_whose_programs_cannot_be_followed_are_left_out_and_named(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CP_RANKS", 2)
    monkeypatch.setattr(limits.check_followed, "__defaults__", (2, limits.MAX_OVERLAP_RANKS))
    found = find_plan(_asked(64, given={"schedule": "ring"}))
    assert all(one.config.size // one.config.ulysses <= 2 for one in found.ranked)
    assert any("must be at most 2; got 4" in why for _, why in found.rejected)
    with pytest.raises(ConfigError, match="planned, must be at most 4,096; got 8192"):
        _asked(8192, sizes=(8192,))


def test_schedules_are_compared_on_few_ranks():
    found = find_plan(_asked(256, given={"size": 256, "ulysses": 1}))
    assert {one.config.schedule for one in found.ranked} == {"ring"}


def test_the_order_of_overlap_is_planned_for_few_ranks():
    found = find_plan(_asked(128, given={"overlap": True, "size": 128, "ulysses": 1, "schedule": "mesh"}))
    assert not found.ranked
    assert any("overlap" in why for _, why in found.rejected)


def test_a_number_of_any_length_is_named():
    for value, said in ((5, "5"), (10**17, "1" + 17 * "0"), (10**400, "a number of 401 digits")):
        with pytest.raises(ConfigError, match=re.escape(f"x must be at most 4; got {said}")):
            limits.check("x", value, 4)
    limits.check("x", 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["show", "--size", limits.MAX_SHOWN_RANKS],
        ["show", "--size", 120, "--schedule", "triangle"],
        ["show", "--size", limits.MAX_SHOWN_OVERLAP_RANKS, "--overlap"],
        ["show", "--size", limits.MAX_SHOWN_OVERLAP_RANKS, "--overlap", "--schedule", "mesh"],
        ["memory", "--ranks", limits.MAX_CP_RANKS, "--set", "ulysses=1", "--set", "schedule=attention2d"],
        ["memory", "--ranks", 990, "--set", "ulysses=1", "--set", "schedule=triangle"],
        ["memory", "--ranks", limits.MAX_OVERLAP_RANKS, "--set", "ulysses=1", "--set", "overlap=true"],
        ["plan", "--nodes", 12500, "--gpus-per-node", 8],
        ["plan", "--nodes", 512, "--gpus-per-node", 8, "--set", "size=4096"],
        ["plan", "--nodes", 128, "--gpus-per-node", 8, "--machine", "modest", "--window", 4096],
    ],
    ids=str,
)  # fmt: skip
def test_the_largest_that_are_taken(capsys, place, words):
    if words[0] != "show":
        words = [*words, "--model", place, "--seq-len", 1024 * 990 * 100]
    assert _run(capsys, *words) == ("", 0)


@pytest.mark.slow
def test_the_most_documents(capsys, place, tmp_path):
    (tmp_path / "lengths.txt").write_text("256\n" * limits.MAX_DOCUMENTS, encoding="utf-8")
    words = ["--documents", tmp_path / "lengths.txt", "--nodes", 8, "--gpus-per-node", 8]
    assert _run(capsys, "plan", "--model", place, *words) == ("", 0)


# ---- what is cheap, and the same as what was not


def test_stages_and_the_most_heads_are_known_without_dealing_them():
    for kv_heads, group in itertools.product(range(1, 11), range(1, 6)):
        q_heads = kv_heads * group
        for ulysses_size in range(1, q_heads + 1):
            shares = heads.heads_by_ulysses_rank(q_heads, kv_heads, ulysses_size)
            largest = max((q.stop - q.start, kv.stop - kv.start) for q, kv in shares)
            assert heads.largest_share(q_heads, kv_heads, ulysses_size) == largest
            legal = [n for n in range(1, kv_heads + 1) if n == 1 or kv_heads // n * group >= ulysses_size]
            assert heads.max_head_chunks(q_heads, kv_heads, ulysses_size) == legal[-1]
            free = [n for n in legal if n == 1 or (kv_heads % n == 0 and kv_heads // n % ulysses_size == 0)]
            assert free_head_chunk_counts(q_heads, kv_heads, ulysses_size) == free


def _figures(config, tokens=256):
    step = TrainingStep(model=MODEL, config=config, world=config.size, seq=tokens * config.size, zero=Zero(stage=3))
    return attention_memory.attention_figures(step)


SHAPES = [{"schedule": "ring"}, {"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"},
          {"schedule": "distflash"},
          {"schedule": "double_ring", "ring_size": 3}, {"schedule": "mesh", "mesh": (2, 2, 0)},
          {"schedule": "mesh", "mesh": (1, 3, 0)}, {"schedule": "wallfacer", "team": 2}]  # fmt: skip


LAYOUTS = ("auto", "contiguous", "striped")


@pytest.mark.parametrize(
    ("settings", "layout", "lengths"),
    [
        # each shape with one layout in turn
        *((settings, LAYOUTS[n % 3], (20, 25)) for n, settings in enumerate(SHAPES)),
        *(
            pytest.param(settings, layout, (20, 25, 34), marks=pytest.mark.slow)
            for settings, layout in itertools.product(SHAPES, LAYOUTS)
        ),
    ],
    ids=str,
)
def test_a_long_way_round_takes_what_a_short_one_does(monkeypatch, settings, layout, lengths):
    if settings["schedule"] == "distflash":
        layout = "auto"
    for turns in lengths:
        each = {"double_ring": 3, "wallfacer": 4}.get(settings["schedule"], 1)
        own = dict(settings)
        if "mesh" in own:
            own["mesh"], each = (*own["mesh"][:2], turns), own["mesh"][0] * own["mesh"][1]
        config = SequenceParallelConfig(size=each * turns, ulysses=1, layout=layout, **own).resolve(
            each * turns, (8, 2)
        )
        assert attention_memory.on_fewer_ranks(config).size < config.size
        short = _figures(config)
        with monkeypatch.context() as context:
            context.setattr(attention_memory, "on_fewer_ranks", lambda config: config)
            assert _figures(config) == short


def test_what_has_no_way_round_is_not_shortened():
    for size, settings in ((120, {"schedule": "triangle"}), (64, {"schedule": "attention2d"}), (64, {"overlap": True})):
        config = SequenceParallelConfig(size=size, ulysses=1, **settings).resolve(size, (8, 2))
        assert attention_memory.on_fewer_ranks(config) == config


def test_runs_of_one_step_cover_what_their_positions_do():
    generator, right = random.Random(0), 0
    for _ in range(3000):
        step = generator.randint(2, 3)
        runs = sorted(
            Run(generator.randint(0, 5), step, generator.randint(1, 3)) for _ in range(generator.randint(1, 4))
        )
        positions = sorted(p for run in runs for p in run.positions)
        covers = positions == list(range(len(positions)))
        try:
            UnevenShards([(run,) for run in runs])
        except ValueError:
            assert not covers
        else:
            assert covers
        right += covers
    assert right > 20

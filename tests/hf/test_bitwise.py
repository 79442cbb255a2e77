"""Two runs of one seed and one configuration have the same losses, gradient norms and weights, bit by bit."""

import pytest
import torch

import ds_seqpar
from ds_seqpar.core.compiler.schedules import SCHEDULES
from tests.hf.llama import adam, llama, settings, update, weights
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
STEPS, ACCUMULATION, SEQ = 2, 2, 96
# ranks of every schedule, and settings that it cannot choose
SHAPES = {"triangle": (3, {}), "double_ring": (4, {"ring_size": 2}), "wallfacer": (4, {"team": 2})}


def trained(section, stage, changes):
    """(losses, norms, weights) of a run."""
    engine, *_ = ds_seqpar.initialize(
        model=llama(), config=settings(section, stage, ACCUMULATION, 1, **adam(1e-2), **changes)
    )
    sp = engine.sequence_parallel
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 64, (ACCUMULATION, sp.data_size, 1, SEQ), generator=generator)[:, sp.data_rank]
        found.append(update(engine, sp.shard_batches([{"input_ids": x, "labels": x} for x in ids])))
    return found, {name: x.tobytes() for name, x in weights(engine.module).items()}


def twice(sections, stages, changes):
    for section in sections:
        for stage in stages:
            first, second = (trained(section, stage, changes) for _ in range(2))
            assert first == second, (section, stage)
            assert len({loss for loss, _ in first[0]}) == STEPS  # it learns: the numbers are not constants


def sections_of(size, names):
    found = []
    for name in names:
        ranks, options = SHAPES.get(name, (4, {}))
        if ranks == size:
            found.append({"size": size, "ulysses": 1, "schedule": name, **options})
    return found


def test_two_runs_are_bitwise_the_same():
    on_ranks(2, twice, [{"size": 2, "ulysses": 1}], ["3"], {})


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_two_runs_of_every_schedule_are_bitwise_the_same(size):
    sections = sections_of(size, SCHEDULES)
    sections += [{"size": 4, "ulysses": 2}] * (size == 4)
    sections += [{**section, "overlap": True} for section in sections]
    on_ranks(size, twice, sections, ["3"], {}, timeout=600)
    on_ranks(size, twice, sections[:2], ["0", "2"], {"bf16": {"enabled": True}}, timeout=600)


def test_every_schedule_is_run_twice_somewhere():
    run = {section["schedule"] for size in (3, 4) for section in sections_of(size, SCHEDULES)}
    assert run == {*SCHEDULES}

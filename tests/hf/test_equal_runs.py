"""A small LLaMA trains alike however its sequences are shared: the same losses and norms, step by step."""

import pytest
import torch.distributed as dist

import ds_seqpar
from tests.hf.llama import MODES, part, ragged, settings, small, update
from tests.launch import on_engine_ranks as on_ranks

STEPS, MICRO_STEPS, SEQUENCES = 5, 2, 4
RUN = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "gradient_clipping": 0.5}


def run(section):
    """(losses, gradient norms) of all steps; every way to share gets the same global batches."""
    sequences = SEQUENCES // (dist.get_world_size() // section["size"])
    engine, *_ = ds_seqpar.initialize(model=small(), config=settings(section, "3", MICRO_STEPS, sequences, **RUN))
    sp = engine.sequence_parallel
    losses, norms = [], []
    for number in range(STEPS):
        window = ragged(MODES["r4"], 1, MICRO_STEPS, sequences=SEQUENCES, seed=number % 2)
        loss, norm = update(engine, sp.shard_batches([part(batch, sp.data_rank, sp.data_size) for batch in window]))
        losses.append(loss)
        norms.append(norm)
    return losses, norms


@pytest.fixture(scope="module")
def alone(compiled):
    """The run of one process."""
    return on_ranks(1, run, MODES["s1"])[0]


def test_the_run_learns_and_is_clipped(alone):
    """Otherwise equal curves would say little."""
    losses, norms = alone
    assert losses[-1] < losses[0] - 0.5
    assert max(norms) > RUN["gradient_clipping"]


@pytest.mark.parametrize(("mode", "layout"), [
    pytest.param("u4", "zigzag", marks=pytest.mark.whole),
    pytest.param("r4", "zigzag", marks=pytest.mark.whole),
    ("u2r2", "zigzag"),
    pytest.param("r2", "zigzag", marks=pytest.mark.whole),
    pytest.param("r4", "striped", marks=pytest.mark.whole),
    pytest.param("u2r2", "contiguous", marks=pytest.mark.whole),
])  # fmt: skip
def test_losses_and_norms_are_those_of_one_process(alone, mode, layout):
    """deepspeed#5419, #7473, verl#2857: other losses at other sizes. ZeRO-3, AdamW, clipping, two micro-steps."""
    losses, norms = alone
    for found_losses, found_norms in on_ranks(4, run, {**MODES[mode], "layout": layout}):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)

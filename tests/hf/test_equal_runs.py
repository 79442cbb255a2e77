"""A small LLaMA trains alike however its sequences are shared: the same losses and norms, step by step."""

import pytest

import ds_seqpar
from tests.hf.llama import MODES, llama, part, ragged, settings, step
from tests.launch import on_ranks

STEPS, MICRO_STEPS, SEQUENCES = 10, 2, 4
RUN = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}, "gradient_clipping": 1.0}


def run(section):
    """(losses, gradient norms) of all steps; every way to share gets the same global batches."""
    sequences = SEQUENCES // (ds_seqpar_world() // section["size"])
    engine, *_ = ds_seqpar.initialize(model=llama(), config=settings(section, "3", MICRO_STEPS, sequences, **RUN))
    sp = engine.sequence_parallel
    losses, norms = [], []
    for number in range(STEPS):
        window = ragged(MODES["r4"], 1, MICRO_STEPS, sequences=SEQUENCES, seed=number)
        found = step(engine, sp.shard_batches([part(batch, sp.data_rank, sp.data_size) for batch in window]))
        losses.append(found["loss"])
        norms.append(found["norm"])
    return losses, norms

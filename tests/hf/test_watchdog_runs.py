"""The watchdog beside real engines, a Trainer, and processes that end."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import ds_seqpar
from tests.dist.test_watchdog import AFTER, WORLD, Hang
from tests.hf import trainers
from tests.hf.llama import adam, llama, ragged, settings, step
from tests.launch import free_port, on_engine_ranks, on_trainer_ranks
from tests.words import missing

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.slow]
SECTION = {"size": WORLD, "ulysses": 1, "watchdog": "report", "watchdog_s": 1.0}


def hanging(file, call):
    """What is printed while this rank makes the call."""
    file.touch()
    before = sys.stderr
    dist.barrier()
    with file.open("a") as sys.stderr:
        call(Hang(file))
        dist.barrier()
    sys.stderr = before
    return file.read_text()


def on_an_engine(folder, stage):
    engine, *_ = ds_seqpar.initialize(model=llama(), config=settings(SECTION, stage, 1, 4, **adam(1e-3)))
    sp = engine.sequence_parallel

    def a_step(*_):
        step(engine, sp.shard_batches(ragged(SECTION, 1, 1)))

    def before_the_step(hang):
        hook = engine.optimizer.optimizer.register_step_pre_hook(lambda *_: hang.told() if hang.late else None)
        a_step()
        hook.remove()
        a_step()

    def in_a_save(hang):
        real = torch.save
        if hang.late:
            torch.save = lambda *args, **kwargs: (hang.told(), real(*args, **kwargs))
        engine.save_checkpoint(str(folder / stage))
        torch.save = real

    a_step()
    return [
        hanging(folder / f"{stage} {name}", call) for name, call in (("step", before_the_step), ("save", in_a_save))
    ]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_rank_that_keeps_zeros_collectives_waiting_is_named(stage, tmp_path):
    (step, save), *_ = on_engine_ranks(WORLD, on_an_engine, tmp_path, stage)
    assert missing(step, AFTER, "rank 2 is at test_watchdog") == [], step
    assert missing(save, AFTER, "rank 2 is at test_watchdog") == [], save


def in_a_trainer(folder):
    class Sleeps(TrainerCallback):
        file = None

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1 and hang.late:
                hang.told()

    def metrics(prediction):
        if hang.late:
            hang.told()
        return {}

    trainer = trainers.make(
        folder, 1, SECTION, 2, parts={"callbacks": [Sleeps()], "compute_metrics": metrics}, max_steps=2
    )
    found = []
    for name, call in (("train", trainer.train), ("evaluate", trainer.evaluate)):

        def run(given, call=call):
            nonlocal hang
            hang = given
            call()
            trainer.accelerator.wait_for_everyone()

        hang = None
        found.append(hanging(folder / name, run))
    return found


def test_a_callback_and_an_evaluation_that_hang_are_named(tmp_path):
    (train, evaluate), *_ = on_trainer_ranks(WORLD, in_a_trainer, tmp_path)
    assert missing(train, AFTER, "rank 2 is at test_watchdog") == [], train
    assert missing(evaluate, AFTER, "rank 2 is at test_watchdog") == [], evaluate


ENDING = """
import sys, threading, time
import torch, torch.distributed as dist
from ds_seqpar import SequenceParallel, SequenceParallelConfig

dist.init_process_group("gloo")
sp = SequenceParallel(SequenceParallelConfig(size=2, watchdog_s=1.0))
if dist.get_rank() == 0:
    sp.gather(torch.ones(2), 0)
elif sys.argv[0].endswith("stays.py"):
    threading.Thread(target=time.sleep, args=(30,)).start()
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stays", "after 1 s of waiting rank 1 is in threading._shutdown ("),
        ("returns", "gather failed because another rank ended or gave up: rank 1 did not take part"),
    ],
)
def test_a_rank_at_its_end_is_named(name, words, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text(ENDING)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = "".join(rank.communicate(timeout=200)[1] for rank in ranks)
    assert ranks[0].returncode == 1
    assert missing(said, words) == [], said

"""What `tests.faults` runs on a rank: training that saves, goes on from its last checkpoint, and may be killed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import ds_seqpar
from ds_seqpar.deepspeed.cpu_launch import op_lock
from ds_seqpar.guards.process_exit import is_lost, wait_at_exit
from hf_integration import SequenceParallelTrainer
from tests.hf.llama import settings, small
from tests.hf.trainers import documents, make

STEPS, SAVE_STEPS, SEQUENCES, SIZE = 6, 2, 4, 2  # an epoch has 4 steps
TRAINING, SAVING, RESUMING = "training", "saving", "resuming"
PRINTED = "printed"  # a file, for what ranks print
BEGUN, SAVED = "begun-", "saved-"  # files, with the step of a save
Losses = dict[int, list[float]]  # by step: the loss and the norm of gradients


class Kill:
    """A kill of this rank in one phase of a run, and how long each phase takes.

    Args:
        folder: The folder of the run.
        planned: (phase, the step in or after which it is, seconds after its start); None: there is none.
    """

    def __init__(self, folder: Path, planned: tuple[str, int, float] | None) -> None:
        self.folder, self.planned = folder, planned
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        if self.planned and (name, step if name != RESUMING else 0) == self.planned[:2]:
            threading.Thread(target=self.run, args=self.planned[2:], daemon=True).start()
        began = time.monotonic()
        if name == SAVING:
            (self.folder / f"{BEGUN}{step}").touch()
        yield
        if name == SAVING:
            (self.folder / f"{SAVED}{step}").touch()
        self.seconds.setdefault(name, []).append(time.monotonic() - began)

    def run(self, seconds: float) -> None:
        time.sleep(seconds)
        (self.folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def run(driver: str, stage: int, folder: Path, victim: int, planned: tuple | None) -> tuple[Losses, dict[str, Any]]:
    """Train from the last checkpoint of a folder, or anew, to the last step.

    An error ends the process as Python would end it, and leaves a file with what it was (see `ends`).

    Returns:
        (losses by step, seconds of each phase)
    """
    kill = Kill(folder, planned if dist.get_rank() == victim else None)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    op_lock.prepare_start()
    deepspeed.init_distributed()  # as a launched Trainer does at first: a rank killed in it keeps the lock of an op
    wait_at_exit()  # which sets the hook of errors
    hook: Any = functools.partial(ends, folder, sys.excepthook)
    hook.before = sys.excepthook  # so nobody sets that one again
    sys.excepthook = hook
    logging.disable(logging.WARNING)  # DeepSpeed's, of folders that have no checkpoint yet
    try:
        return (loop if driver == "loop" else trainer)(stage, folder / "checkpoints", kill), kill.seconds
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def ends(folder: Path, before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook that notes the error: the watchdog, which ends a rank that hangs, calls it too."""
    with open(folder / PRINTED, "a") as printed:
        os.dup2(printed.fileno(), 2)
        before(kind, error, trace)
    ended = {"error": f"{kind.__name__}: {error}", "lost": is_lost(error), "at": time.monotonic()}
    (folder / f"ended-{dist.get_rank()}.json").write_text(json.dumps(ended))


def loop(stage: int, folder: Path, kill: Kill) -> Losses:
    """A loop under `initialize`, with the loader of `sp.loader`, a scheduler and accumulation."""
    torch.manual_seed(1)
    micro_steps = SEQUENCES // (dist.get_world_size() // SIZE)
    config = settings({"size": SIZE}, str(stage), micro_steps, 1)
    del config["optimizer"]
    model = small(initializer_range=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    engine, *_ = ds_seqpar.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=schedule)
    sp, losses = engine.sequence_parallel, Losses()
    torch.manual_seed(2)  # which the order of examples comes from
    ids = torch.randint(0, 64, (4 * SEQUENCES, 24), generator=torch.Generator().manual_seed(3))
    loader = sp.loader(DataLoader([{"input_ids": x, "labels": x} for x in ids], 1, shuffle=True))
    with kill.phase(RESUMING, 0):
        engine.load_checkpoint(folder, loader=loader)
    while engine.global_steps < STEPS:
        batches = iter(loader)
        while engine.global_steps < STEPS and (window := list(itertools.islice(batches, micro_steps))):
            step = engine.global_steps + 1
            with kill.phase(TRAINING, step):
                shard_losses = []
                for batch in sp.shard_batches(window):
                    shard_losses.append(engine(**batch).loss)
                    engine.backward(shard_losses[-1])
                    engine.step()
                losses[step] = [sp.mean_loss(shard_losses), float(engine.get_global_grad_norm())]
            if step % SAVE_STEPS == 0:
                with kill.phase(SAVING, step):
                    engine.save_checkpoint(folder, loader=loader)
    return losses


class Killed(SequenceParallelTrainer):
    """A Trainer whose steps, saves and resumption are phases."""

    kill: Kill

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.kill.phase(TRAINING, self.state.global_step + 1):
            return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.kill.phase(SAVING, self.state.global_step):
            super()._save_checkpoint(*args, **kwargs)


class Begin(TrainerCallback):
    """Marks where resuming ends and training begins, and after which step."""

    def __init__(self) -> None:
        self.resuming, self.step = contextlib.ExitStack(), STEPS

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.resuming.close()
        self.step = min(self.step, state.global_step)


def trainer(stage: int, folder: Path, kill: Kill) -> Losses:
    """The Trainer, which goes on from its last checkpoint where there is one."""
    micro_steps, begin = SEQUENCES // (dist.get_world_size() // SIZE), Begin()
    given = {"train_dataset": documents(4 * SEQUENCES), "callbacks": [begin]}
    made = make(
        folder, 1, {"size": SIZE}, stage, parts=given, kind=Killed, max_steps=STEPS, save_strategy="steps",
        save_steps=SAVE_STEPS, gradient_accumulation_steps=micro_steps,
    )  # fmt: skip
    made.kill = kill
    begin.resuming.enter_context(kill.phase(RESUMING, 0))
    made.train(resume_from_checkpoint=True if any(folder.glob("checkpoint-*")) else None)
    return {
        x["step"]: [x["loss"], x["grad_norm"]] for x in made.state.log_history if "loss" in x and x["step"] > begin.step
    }

"""Engines of `initialize` that are saved and go on, in the same run or a changed one: the losses are those of the run
that was not interrupted, and a checkpoint is whole or not there."""

import dataclasses
import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import ds_seqpar
from tests.hf.llama import IGNORE, settings, small, update

pytestmark = pytest.mark.usefixtures("compiled")
STOP, END = 3, 8  # an epoch has 5 steps
SEQUENCES = 8  # of a step


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of run."""

    world: int = 2
    size: int = 2
    stage: int = 2
    bf16: bool = False


def examples():
    """Sequences whose labels do not all count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 64, (5 * SEQUENCES, 24), generator=generator)
    labels = ids.clone()
    for row, first in enumerate(torch.randint(0, 20, (len(ids),), generator=generator).tolist()):
        labels[row, :first] = IGNORE
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def made(case):
    """(engine, loader) whose order torch's random numbers draw."""
    torch.manual_seed(1)
    groups = case.world // case.size
    micro = 1 if groups == 4 else 2
    config = settings(
        {"size": case.size}, str(case.stage), SEQUENCES // micro // groups, micro, bf16={"enabled": case.bf16}
    )
    config |= {"gradient_clipping": 1.0}
    del config["optimizer"]
    model = small(initializer_range=0.2)
    decayed = [x for x in model.parameters() if x.dim() > 1]
    parts = [{"params": decayed, "weight_decay": 0.5}, {"params": [x for x in model.parameters() if x.dim() == 1]}]
    optimizer = torch.optim.AdamW(parts, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    engine, *_ = ds_seqpar.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=schedule)
    torch.manual_seed(2)
    return engine, engine.sequence_parallel.loader(DataLoader(examples(), micro, shuffle=True))


def losses(engine, loader, steps, save=lambda done: None):
    """Of so many optimizer steps."""
    found = []
    while True:
        batches = iter(loader)
        while len(found) < steps and (window := list(itertools.islice(batches, engine.gradient_accumulation_steps()))):
            shards = engine.sequence_parallel.shard_batches(window)
            found.append(update(engine, shards)[0])
            save(len(found))
        if len(found) == steps:
            return found


def whole(folder, case):
    """The losses of a run that is not interrupted, and saves in the middle of its first epoch."""
    engine, loader = made(case)
    return losses(engine, loader, END, lambda done: done == STOP and engine.save_checkpoint(folder, loader=loader))


def gone_on(folder, case):
    """The losses of a run from there on."""
    engine, loader = made(case)
    torch.manual_seed(77)
    path, _ = engine.load_checkpoint(folder, loader=loader)
    assert path is not None
    return losses(engine, loader, END - STOP)

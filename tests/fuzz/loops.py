"""Drawn loops with an Accelerator: what is drawn, and what a rank writes down of one.

The plain script runs on as many processes as there are groups; with two more lines it runs on groups of ranks. Both
must write down the same.
"""

import random
import shutil
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, broadcast_object_list
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset
from transformers import get_scheduler

from hf_integration import share_accelerator, share_sequences
from tests.hf.llama import small
from tests.launch import RankFailure, on_ranks

SCHEDULERS = {
    "none": None,
    "linear": lambda optimizer, steps: get_scheduler("linear", optimizer, 1, steps),
    "cosine": lambda optimizer, steps: get_scheduler("cosine", optimizer, 0, steps),
    "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=steps + 20),
    "steps": lambda optimizer, steps: lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
}
# what is gathered -> how, of the accelerator, the output, the numbers of this group's examples and their loss
GATHERS = {
    "gather": lambda accelerator, output, numbers, loss: accelerator.gather(numbers),
    "one a group": lambda accelerator, output, numbers, loss: accelerator.gather(loss),
    "metrics": lambda accelerator, output, numbers, loss: accelerator.gather_for_metrics((numbers, {"x": numbers / 3})),
    "metrics of logits": lambda accelerator, output, numbers, loss: accelerator.gather_for_metrics(
        output.logits.argmax(-1)
    ),
    "objects": lambda accelerator, output, numbers, loss: accelerator.gather_for_metrics(
        [f"example {number}" for number in numbers.tolist()]
    ),
    "tensors as objects": lambda accelerator, output, numbers, loss: accelerator.gather_for_metrics(
        [number for number in numbers], use_gather_object=True
    ),
    "sum": lambda accelerator, output, numbers, loss: accelerator.reduce([loss, numbers.sum()]),
    "mean": lambda accelerator, output, numbers, loss: accelerator.reduce({"loss": loss}, reduction="mean"),
    "max": lambda accelerator, output, numbers, loss: accelerator.reduce(numbers.max(), reduction="max"),
    "padded": lambda accelerator, output, numbers, loss: accelerator.gather(
        accelerator.pad_across_processes(torch.arange(1 + int(numbers.max())), pad_index=-1)
    ),
    "trigger": lambda accelerator, output, numbers, loss: (
        accelerator.set_trigger() if accelerator.process_index == 0 else None,
        accelerator.check_trigger(),
    )[1],
}


TRIMMED = {"metrics", "metrics of logits", "objects", "tensors as objects"}  # the others see repetitions too


def case(seed):
    draw = random.Random(seed)
    ranks, size = draw.choice(((2, 2), (4, 2), (4, 2), (4, 4)))
    stream = draw.random() < 0.2
    others = [] if stream else sorted(GATHERS.keys() - TRIMMED)
    return {
        "ranks": ranks,
        "size": size,
        "examples": draw.randint(1, 9),
        "batch": draw.randint(1, 3),
        "shuffle": draw.random() < 0.5 and not stream,
        "drop last": draw.random() < 0.3 and not stream,
        "split": draw.random() < 0.3 and not stream,
        "seedable": draw.random() < 0.5,
        "stream": stream,  # evaluated alone: accelerate deals the last batch of a stream otherwise
        "epochs": draw.randint(1, 2),
        "skipped": draw.randint(0, 2),
        "accumulation": draw.randint(1, 3),
        "to the end": draw.random() < 0.5,
        "scheduler": draw.choice(sorted(SCHEDULERS)),
        "with optimizer": draw.random() < 0.7,
        "length": draw.randint(4, 12),
        "clip": draw.random() < 0.5,
        "saved": draw.random() < 0.2,
        "gathers": [draw.choice(sorted(TRIMMED)), *draw.sample(others, min(2, len(others)))],
        "split values": draw.randint(0, 7),
        "padding": draw.random() < 0.5,
        "seed": seed,
    }


def try_one(case):
    """(what it came to, None or what differs)"""
    groups = case["ranks"] // case["size"]
    try:
        plain = on_ranks(groups, run, case, 1, keep="accelerate")
        found = on_ranks(case["ranks"], run, case, case["size"], keep="accelerate")
    except RankFailure as failure:
        return "failed", str(failure)
    for rank, shared in enumerate(found):
        if fault := faults(plain[rank // case["size"]], shared):
            return "failed", f"rank {rank}: {fault}"
    return f"right, {groups} groups of {case['size']}", None


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def run(case, size):
    """What this rank writes down of the loop; size 1: of the plain script's."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    batching = {"split_batches": case["split"], "use_seedable_sampler": case["seedable"]}
    accelerator = Accelerator(
        cpu=True,
        step_scheduler_with_optimizer=case["with optimizer"],
        dataloader_config=DataLoaderConfiguration(**batching),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case["accumulation"], sync_with_dataloader=case["to the end"]
        ),
    )
    torch.manual_seed(case["seed"])
    data = [{"ids": torch.randint(0, 64, (16,)), "number": number} for number in range(case["examples"])]
    model = small()
    if size > 1:
        sp = share_sequences(model, size=size)
        accelerator = share_accelerator(accelerator, sp)
    torch.manual_seed(case["seed"])
    groups = case["ranks"] // case["size"]
    batch = case["batch"] * (groups if case["split"] else 1)
    given = Stream(data) if case["stream"] else data
    loader = DataLoader(given, batch_size=batch, shuffle=case["shuffle"], drop_last=case["drop last"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    written = [accelerator.num_processes, accelerator.process_index, accelerator.state.num_processes]
    values = [*range(case["split values"])]
    with accelerator.split_between_processes(values, apply_padding=case["padding"] and bool(values)) as mine:
        written.append(mine)
    if case["stream"]:
        model.eval()
        with torch.no_grad():
            return written + [gathered(case, accelerator, model, given)[0] for given in accelerator.prepare(loader)]
    return written + trained(case, accelerator, model, optimizer, loader)


def trained(case, accelerator, model, optimizer, loader):
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler, written = SCHEDULERS[case["scheduler"]], []
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler(optimizer.optimizer, case["length"]))
    for epoch in range(case["epochs"]):
        batches = accelerator.skip_first_batches(loader, case["skipped"]) if epoch else loader
        for given in batches:
            with accelerator.accumulate(wrapped):
                found, loss = gathered(case, accelerator, wrapped, given)
                accelerator.backward(loss)
                if accelerator.sync_gradients and case["clip"]:
                    found.append(float(accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)))
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                    found.append(scheduler.get_last_lr())
                optimizer.zero_grad()
            written.append([loss.item(), *found])
        if case["saved"]:
            written.append(saved(accelerator, scheduler))
    return [*written, [float(p.detach().sum()) for p in model.parameters()]]


def saved(accelerator, scheduler):
    """The learning rate after the state was saved, changed and loaded."""
    folder = [tempfile.mkdtemp()]
    if dist.get_world_size() > 1:
        broadcast_object_list(folder)
    accelerator.save_state(folder[0])
    accelerator.wait_for_everyone()
    if scheduler is not None:
        scheduler.step()
    accelerator.load_state(folder[0])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder[0])
    return scheduler and scheduler.get_last_lr()


def gathered(case, accelerator, model, given):
    """(what was gathered of a batch, its loss)"""
    output = model(input_ids=given["ids"], labels=given["ids"])
    loss = output.loss.detach()
    found = [GATHERS[name](accelerator, output, given["number"], loss) for name in case["gathers"]]
    return [as_lists(x) for x in found], output.loss


def as_lists(x):
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return [as_lists(one) for one in x.values()]
    return [as_lists(one) for one in x] if isinstance(x, list | tuple) else x


def faults(plain, shared):
    """Where the plain script's lists and those of a group's rank differ; None: nowhere."""
    if isinstance(plain, list) and isinstance(shared, list):
        if len(plain) != len(shared):
            return f"{len(shared)} in place of {len(plain)}: {shared} in place of {plain}"
        return next((found for pair in zip(plain, shared, strict=True) if (found := faults(*pair))), None)
    numbers = isinstance(plain, float) and isinstance(shared, float)
    same = abs(plain - shared) <= 1e-5 * max(1, abs(plain)) if numbers else plain == shared
    return None if same and type(plain) is type(shared) else f"{shared!r} in place of {plain!r}"

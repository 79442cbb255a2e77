"""Train many steps with changing lengths, masks and packs, and print the growth of memory, file handles and threads.

    python -m benchmarks.memory.endurance
    python -m benchmarks.memory.endurance --steps 200 --ranks 2 --stage 2 --schedule attention2d

Ranks are gloo processes of this machine with one thread each. A step has --accumulation micro-batches of one or two
rows with 64 to --tokens tokens, which are plain, padded on either side, or packed. Every 50th step is followed by an
evaluation.

Each row covers a part of the run, and lists the maximum over ranks of several medians: resident memory, the numbers of
handles, threads and Python objects of a rank, and the number of files in /dev/shm. The first part warms up caches.
"grows" is the difference between the last row and the second row.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys

import torch
import torch.distributed as dist

import ds_seqpar
from benchmarks import tables
from benchmarks.memory.ranks import Model, memory
from tests.launch import on_engine_ranks

COLUMNS = "steps", "MiB", "handles", "threads", "objects", "shared files"
STRETCHES = 10  # parts of a run
Numbers = tuple[float, ...]  # floats in a tuple, which the garbage collector does not track


def main() -> None:
    args = tables.parser(__doc__, steps=2000, ranks=4, stage=3, ulysses=2, schedule="ring", tokens=512, accumulation=2,
                         check_finite=False).parse_args()  # fmt: skip
    os.environ["PYTHONWARNINGS"] = "ignore"
    by_rank = on_engine_ranks(args.ranks, train, args, timeout=100_000)
    each = len(by_rank[0]) // STRETCHES
    tables.head(*COLUMNS)
    rows = []
    for stretch in range(STRETCHES):
        part = slice(stretch * each, (stretch + 1) * each)
        of_ranks = [[statistics.median(column) for column in zip(*found[part], strict=True)] for found in by_rank]
        rows.append([max(column) for column in zip(*of_ranks, strict=True)])
        steps = f"{10 * stretch * each} to {10 * (stretch + 1) * each}"
        tables.row(steps, f"{rows[-1][0]:.1f}", *map(int, rows[-1][1:]))
    grown = [a - b for a, b in zip(rows[-1], rows[1], strict=True)]
    tables.row("grows", f"{grown[0]:+.1f}", *(f"{int(x):+}" for x in grown[1:]))


def train(args: argparse.Namespace) -> list[Numbers]:
    """Return the memory and object counts of this rank after every tenth step."""
    model = Model(vocab=256, hidden=64, intermediate=128, heads=8, kv_heads=4).make()
    section = {name: getattr(args, name) for name in ("ulysses", "schedule", "check_finite")} | {"size": args.ranks}
    engine, *_ = ds_seqpar.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": args.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage}, "steps_per_print": 2**30, "sequence_parallel": section,
    })  # fmt: skip
    sp, draw, found = engine.sequence_parallel, random.Random(0), []
    for step in range(args.steps):
        batches = [batch_of(draw, args.tokens) for _ in range(args.accumulation)]
        losses = []
        for batch in sp.shard_batches(batches, device=engine.device):
            losses.append(engine(**batch).loss)
            engine.backward(losses[-1])
            engine.step()
            losses[-1] = losses[-1].detach()
        loss = sp.mean_loss(losses)
        if step % 50 == 49:
            with torch.no_grad():
                sp.mean_loss([engine(**sp.shard_batch(batches[0], training=False)).loss])
        if step % 10 == 9:
            found.append(numbers())
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"\rstep {step + 1}, loss {loss:.3f}", end="", file=sys.stderr, flush=True)
    return found


def batch_of(draw: random.Random, most: int) -> dict[str, torch.Tensor]:
    """Return a batch of random length and kind, the same on all ranks."""
    rows, tokens, kind = draw.choice((1, 1, 2)), draw.randint(64, most), draw.choice(("plain", "left", "right", "pack"))
    ids = torch.tensor([[draw.randrange(256) for _ in range(tokens)] for _ in range(rows)])
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "pack":
        cuts = sorted(draw.sample(range(1, tokens), draw.randint(1, 5)))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        positions = torch.cat([torch.arange(n) for n in lengths])
        return {**batch, "position_ids": positions.expand(rows, -1).contiguous()}
    if kind != "plain":
        mask, padding = torch.ones_like(ids), draw.randint(1, tokens // 2)
        part = slice(0, padding) if kind == "left" else slice(tokens - padding, tokens)
        mask[0, part] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        if kind == "left":
            batch["labels"][0, padding] = -100
    return batch


def numbers() -> Numbers:
    gc.collect()
    handles, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return memory("VmRSS") / 2**20, handles, threads, len(gc.get_objects()), len(os.listdir("/dev/shm"))


if __name__ == "__main__":
    main()

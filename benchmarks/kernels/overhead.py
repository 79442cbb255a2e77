"""Print the overhead of a call relative to its kernel, as ratios of medians within one run, with calls in turns.

    python -m benchmarks.kernels.overhead
    python -m benchmarks.kernels.overhead --parts Call --tokens 8192 --heads 2 --calls 20 --dtypes float32 bfloat16

The parts are:

- Call: forward and backward of few tokens on one rank, compared with torch's scaled_dot_product_attention, which runs
  the same kernel. The clock measures processor time, since one rank never waits. "but for its kernel" is the time of a
  call outside the kernel.
- Agreement: the time to compare the inputs, once per call, relative to an all-reduce of one number over the same ranks;
  and a forward pass of few tokens, relative to one without comparison.
- Trust: the processor time of a training step of a small LLaMA on 4 ranks, of comparisons between ranks within the
  step, and of the watchdog.
- Program: the time to look up or derive a rank's program and its kernel launches before running it: for known lengths,
  new lengths, and new packs of 64 documents.

A ratio is the median over turns, and the spread covers the middle half. No launcher is needed: ranks are forked with
gloo, or simulated by torch's fake backend.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import tables
from benchmarks.attention.peers import dense, step
from benchmarks.turns import Step, in_turns, wall
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.core.compiler.program.instructions import Product
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.runtime.admit import AttentionOptions, check_inputs
from ds_seqpar.core.runtime.call import CallSettings
from ds_seqpar.core.runtime.kernels import KERNELS, Scores
from ds_seqpar.core.runtime.runtime import Runtime
from ds_seqpar.guards import agreement as agreements
from ds_seqpar.guards import watchdog
from hf_integration import patch_attention
from tests.hf.llama import llama
from tests.launch import on_ranks

HEADS, HEAD_DIM = 8, 64
Rows = dict[str, list[float]]  # seconds of each call, by name


def main() -> None:
    parser = tables.parser(__doc__, tokens=128, heads=HEADS, dtypes=["float32"], calls=300)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    args = parser.parse_args()
    for title in args.parts:
        print(f"\n{title}\n")
        tables.head("", "us", "spread", "ratio", "spread")
        for words, rows in PARTS[title](args):
            first = next(iter(rows.values()))
            for name, seconds in rows.items():
                ratios = [] if title == "Program" else [a / b for a, b in zip(seconds, first, strict=True)]
                digits = ".5f" if title == "Trust" else ".3f"
                tables.row(f"{name}, {words}", *tables.middle(seconds, 1e6, ".0f"), *tables.middle(ratios, 1, digits))


def call(args: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    for dtype in args.dtypes:
        yield dtype, on_ranks(1, one_rank, args.tokens, args.heads, dtype, args.calls, timeout=3600)[0]


def one_rank(tokens: int, heads: int, dtype: str, calls: int) -> Rows:
    sp = SequenceParallel(SequenceParallelConfig(size=1))
    local = [x.to(getattr(torch, dtype)) for x in blocks(tokens, heads)]
    rows: dict[str, Step] = {
        "torch's scaled_dot_product_attention": lambda: step(dense, *local),
        "attention, agreement apart": lambda: step(
            lambda *x: sp.attention_agreed(*x, AttentionOptions(CAUSAL, None, None)), *local
        ),
        "attention": lambda: step(sp.attention, *local),
    }
    warm = max(1, calls // 10)
    found = in_turns(rows, calls, lambda run: wall(run, time.process_time), warm)
    kernel, inside = KERNELS["cpu_flash"], Inside(time.process_time)
    for name in ("forward", "backward"):
        setattr(kernel, name, inside.counting(getattr(kernel, name)))
    outside = lambda: time.process_time() - inside.seconds  # noqa: E731
    last = {"attention, but for its kernel": rows["attention"]}
    return found | in_turns(last, calls, lambda run: wall(run, outside), warm)


def agreement(args: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    for ranks in (2, 4, 16):
        for rows in on_ranks(ranks, agreeing, args.tokens, args.calls // 3, timeout=600)[0]:
            yield f"{ranks} ranks", rows


def agreeing(tokens: int, calls: int) -> list[Rows]:
    sp = SequenceParallel(SequenceParallelConfig(size=dist.get_world_size(), ulysses=1))
    number, local = torch.zeros(1, dtype=torch.int64), blocks(tokens)[:3]
    agreed, options = AttentionOptions(CAUSAL, None, None), AttentionOptions(CAUSAL, None, None, True, False)
    pairs: list[dict[str, Step]] = [
        {"all-reduce of one number": lambda: dist.all_reduce(number, group=sp.groups.control),
         "agreement": lambda: check_inputs(sp.runtime, local, options)},
        {"attention, agreed before": lambda: sp.attention_agreed(*local, agreed),
         "attention": lambda: sp.attention(*local)},
    ]  # fmt: skip
    return [in_turns(rows, calls, warm=max(1, calls // 10)) for rows in pairs]


def trust(args: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    tokens = 16 * args.tokens
    yield f"4 ranks of {tokens} tokens", on_ranks(4, steps, tokens, max(3, args.calls // 60), timeout=3600)[0]


def steps(tokens: int, calls: int) -> Rows:
    comparisons, looks = Inside(time.thread_time), Inside(time.thread_time)
    agreements._maxima = comparisons.counting(agreements._maxima)
    watchdog._Watchdog.look = looks.counting(watchdog._Watchdog.look)  # type: ignore[method-assign]
    sp = SequenceParallel(SequenceParallelConfig(size=dist.get_world_size()))
    model = patch_attention(llama(hidden_size=256, num_hidden_layers=4, max_position_embeddings=4 * tokens), sp)
    ids = torch.arange(4 * tokens)[None] % 60
    rows: Rows = {"step": [], "agreement": [], "watchdog": []}
    for number in range(calls + 1):
        dist.barrier()
        before = time.process_time(), comparisons.seconds, looks.seconds
        loss = model(**sp.shard_batch({"input_ids": ids, "labels": ids})).loss
        loss.backward()
        sp.mean_loss(loss)
        for seconds, now, began in zip(
            rows.values(), (time.process_time(), comparisons.seconds, looks.seconds), before, strict=True
        ):
            seconds += [now - began] if number else []
    return rows


class Inside:
    """The seconds, measured by a clock, spent inside functions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.seconds = clock, 0.0

    def counting(self, function: Callable) -> Callable:
        def run(*args: object) -> object:
            began = self.clock()
            result = function(*args)
            self.seconds += self.clock() - began
            return result

        return run


def program(args: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    for ranks in (8, 64, 256):
        with fake_ranks(ranks) as runtime:
            derive(runtime, 128, CAUSAL)
            lengths = [128 + 2 * number for number in range(1, 10)]
            known = [wall(lambda: bounds(runtime, 128, CAUSAL)) for _ in range(args.calls)]
            new = [wall(lambda n=n: derive(runtime, n, CAUSAL)) for n in lengths]
            packs = [pack(ranks * 1024, seed) for seed in range(9)] if ranks == 64 else []
            packed = [wall(lambda m=m: derive(runtime, 1024, m)) for m in packs]
        found = {"known": known, "new length": new, **({"new pack": packed} if packed else {})}
        yield f"{ranks} ranks", {name: [x / 2 for x in seconds] for name, seconds in found.items()}  # two programs


def pack(tokens: int, seed: int) -> Mask:
    return Mask(causal=True, documents=(0, *sorted(random.Random(seed).sample(range(1, tokens), 63))))


def bounds(runtime: Runtime, tokens: int, mask: Mask) -> list:
    """Return the bound programs of forward and backward for a call."""
    q = torch.empty(1, tokens, HEADS, HEAD_DIM)
    settings = CallSettings(mask, runtime.shards(tokens), Scores(1.0))
    return [runtime.bound(way, q, [q.shape] * 3, settings)[0] for way in ("forward", "backward")]


def derive(runtime: Runtime, tokens: int, mask: Mask) -> None:
    """Derive the programs of a call and their kernel launches."""
    for bound in bounds(runtime, tokens, mask):
        for one in bound.program.code:
            if isinstance(one, Product):
                bound.launches(one.q, one.kv)


@contextlib.contextmanager
def fake_ranks(world: int) -> Iterator[Runtime]:
    """Context manager for one of `world` ranks of a ring, whose messages are dropped."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world)
    try:
        with SequenceParallel(SequenceParallelConfig(size=world, ulysses=1, schedule="ring")) as sp:
            yield sp.runtime
    finally:
        dist.destroy_process_group()


def blocks(tokens: int, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(1, tokens, heads, HEAD_DIM) for _ in range(4)]


PARTS = {"Call": call, "Agreement": agreement, "Trust": trust, "Program": program}

if __name__ == "__main__":
    main()

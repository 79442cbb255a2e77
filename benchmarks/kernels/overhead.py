"""Prints what a call costs beside its kernel: ratios within one run, of medians of calls that take turns.

    python -m benchmarks.kernels.overhead
    python -m benchmarks.kernels.overhead --parts Call --tokens 8192 --heads 2 --calls 20 --dtypes float32 bfloat16

Call: forward and backward of few tokens on one rank, beside torch's scaled_dot_product_attention, which has the same
kernel; of processor time, since it waits for nobody; and what a call takes outside of its kernel.
Agreement: what comparing the inputs costs, once a call, beside the all-reduce of one number over the same ranks.
Program: what is looked up, or derived, before a rank's walk: for what it has seen, for a
length that it has not, and for a pack of 64 documents that it has not; its kernel calls too.
A ratio is the median of those of single turns, whose calls follow one another; the spread is that of the middle half.
Needs no launcher: ranks are forked, over gloo, or are one of many on torch's fake backend, which carries nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import tables
from benchmarks.turns import Clock, Step, in_turns, wall
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.compiler.masks import CAUSAL, Mask
from ds_seqpar.compiler.program import Product
from ds_seqpar.runtime.inputs import Asked, agree_on_inputs
from ds_seqpar.runtime.kernels import KERNELS, Kernel
from ds_seqpar.runtime.runtime import Runtime
from tests.launch import on_ranks

HEADS, HEAD_DIM = 8, 64
TORCHS = "torch's scaled_dot_product_attention"


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--heads", type=int, default=HEADS, help="of Call")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"], help="of Call")
    parser.add_argument("--calls", type=int, default=300, help="of each kind, of which the median is taken")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    args = parser.parse_args()
    for title in args.parts:
        print(f"\n{title}\n\n{tables.head('', 'us', 'spread', 'ratio', 'spread')}")
        for name, row in PARTS[title](args).items():
            tables.row(name, *tables.middle(row.seconds, 1e6, ".0f"), *tables.middle(row.ratios, 1, ".3f"))


class Row(NamedTuple):
    """Of every call. ratios: to the call of the row that it is compared with, in the same turn; empty for none."""

    seconds: list[float]
    ratios: list[float]


Rows = dict[str, Row]


def compared(found: Mapping[str, list[float]], base: str) -> Rows:
    pairs = {name: zip(seconds, found[base], strict=True) for name, seconds in found.items()}
    return {name: Row(found[name], [a / b for a, b in both]) for name, both in pairs.items()}


def call(args: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for dtype in args.dtypes:
        (found,) = on_ranks(1, one_rank, args.tokens, args.heads, dtype, args.calls, timeout=3600)
        rows |= {f"{name}, {dtype}": row for name, row in compared(found, TORCHS).items()}
    return rows


def one_rank(tokens: int, heads: int, dtype: str, calls: int) -> dict[str, list[float]]:
    sp = SequenceParallel(SequenceParallelConfig(size=1))
    q, k, v, do = (x.to(getattr(torch, dtype)) for x in blocks(tokens, heads))
    rows = {
        TORCHS: torchs,
        "attention, agreement apart": lambda q, k, v: sp.attention_agreed(q, k, v, Asked(CAUSAL, None, None)),
        "attention": sp.attention,
    }

    def both(attend: Callable) -> Step:
        def run() -> None:
            attend(*(x.detach().requires_grad_() for x in (q, k, v))).backward(do)

        return run

    found = many_turns({name: both(attend) for name, attend in rows.items()}, calls, clock_of(time.process_time))
    clock = clock_of(Beside(KERNELS["cpu_flash"]))
    return found | many_turns({"attention, but for its kernel": both(sp.attention)}, calls, clock)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """On one rank the same, and the same kernel."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


class Beside:
    """A clock of processor time that stands still inside of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.inside = 0.0
        for name in ("forward", "backward"):
            setattr(kernel, name, self.stopping(getattr(kernel, name)))

    def __call__(self) -> float:
        return time.process_time() - self.inside

    def stopping(self, function: Callable) -> Callable:
        def run(*args: object) -> object:
            began = time.process_time()
            result = function(*args)
            self.inside += time.process_time() - began
            return result

        return run


def agreement(args: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for ranks in (2, 4, 16):
        both = on_ranks(ranks, agreeing, args.tokens, args.calls // 3, timeout=600)[0]
        rows |= {f"{name}, {ranks} ranks": row for name, row in compared(both, "all-reduce of one number").items()}
    return rows


def agreeing(tokens: int, calls: int) -> dict[str, list[float]]:
    size = dist.get_world_size()
    sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=1))
    q, k, v, _ = blocks(tokens)
    number = torch.zeros(1, dtype=torch.int64)
    rows = {
        "all-reduce of one number": lambda: dist.all_reduce(number, group=sp.groups.control),
        "agreement": lambda: agree_on_inputs(sp.runtime, q, k, v, Asked(CAUSAL, None, None, True, False)),
    }
    return many_turns(rows, calls)


def program(args: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for ranks in (8, 64, 256):
        with fake_ranks(ranks) as runtime:
            derive(runtime, 128, CAUSAL)
            rows[f"known, {ranks} ranks"] = timed([lambda: bound_of(runtime, 128, CAUSAL)] * args.calls)
            lengths = [128 + 2 * number for number in range(1, 10)]
            rows[f"new length, {ranks} ranks"] = timed([lambda n=n: derive(runtime, n, CAUSAL) for n in lengths])
    for ranks in (16, 64):
        with fake_ranks(ranks) as runtime:
            packs = [pack(ranks * 1024, seed) for seed in range(9)]
            rows[f"new pack, {ranks} ranks"] = timed([lambda m=m: derive(runtime, 1024, m) for m in packs])
    return rows


def pack(tokens: int, seed: int) -> Mask:
    starts = random.Random(seed).sample(range(1, tokens), 63)
    return Mask(causal=True, documents=(0, *sorted(starts)))


def bound_of(runtime: Runtime, tokens: int, mask: Mask) -> list:
    """Forward's and backward's programs, with the lengths of this call."""
    q = torch.empty(1, tokens, HEADS, HEAD_DIM)
    return [runtime.bound(way, q, q.shape[2], mask, runtime.shards(tokens))[0] for way in ("forward", "backward")]


def derive(runtime: Runtime, tokens: int, mask: Mask) -> None:
    """The same, and the calls of the kernel that they ask for."""
    for bound in bound_of(runtime, tokens, mask):
        for one in bound.program.code:
            if isinstance(one, Product):
                bound.calls(one.q, one.kv)


def timed(calls: list[Step]) -> Row:
    """Of the calls, of which each is of two programs: of one."""
    return Row([wall(run) / 2 for run in calls], [])


@contextlib.contextmanager
def fake_ranks(world: int) -> Iterator[Runtime]:
    """One of `world` ranks of a ring; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=min(1, world - 1), world_size=world)
    try:
        with SequenceParallel(SequenceParallelConfig(size=world, ulysses=1, schedule="ring")) as sp:
            yield sp.runtime
    finally:
        dist.destroy_process_group()


PARTS = {"Call": call, "Agreement": agreement, "Program": program}


def blocks(tokens: int, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(1, tokens, heads, HEAD_DIM) for _ in range(4)]


def many_turns(rows: Mapping[str, Step], calls: int, clock: Clock = wall) -> dict[str, list[float]]:
    """Seconds of each call, after a tenth of the calls (1 at least) as warm-up."""
    return in_turns(rows, calls, clock, warm=max(1, calls // 10))


def clock_of(read: Callable[[], float]) -> Clock:
    def clock(step: Step) -> float:
        began = read()
        step()
        return read() - began

    return clock


if __name__ == "__main__":
    main()

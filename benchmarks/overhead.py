"""Prints what a call costs beside its kernel: ratios within one run, of medians of calls that take turns.

    python -m benchmarks.overhead

Call: forward and backward of few tokens on one rank, beside the bare kernel behind an op of the same arguments.
Agreement: what comparing the inputs costs, once a call, beside the all-reduce of one number over the same ranks.
Step: one step of a ring of 16, kernels and transfers empty (torch's fake backend carries nothing), beside bare irecv
and isend of the same messages. Program: what is looked up, or derived, before a rank's walk: for what it has seen, for
a length that it has not, and for a pack of 64 documents that it has not; its kernel calls too.
Needs no launcher: ranks are forked, over gloo, or are one of many on the fake backend.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.planning.masks import CAUSAL, FULL, Mask
from ds_seqpar.planning.program import Post, Product
from ds_seqpar.running.inputs import Asked, agree_on_inputs
from ds_seqpar.running.runtime import Runtime
from ds_seqpar.running.walk import Walk
from ds_seqpar.running.work import Forward
from tests.launch import on_ranks

HEADS, HEAD_DIM = 8, 64
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=300, help="of each kind, of which the median is taken")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    args = parser.parse_args()
    for title in args.parts:
        print(f"\n{title}\n\n| | us | ratio |\n|---|---|---|")
        for name, (seconds, ratio) in PARTS[title](args).items():
            print(f"| {name} | {seconds * 1e6:.0f} | {'-' if ratio is None else f'{ratio:.2f}'} |", flush=True)


Rows = dict[str, tuple[float, float | None]]  # median seconds, ratio to the row that it is compared with


def call(args: argparse.Namespace) -> Rows:
    (seconds,) = on_ranks(1, one_rank, args.tokens, args.calls, timeout=600)
    return {name: (value, value / seconds["bare kernel"]) for name, value in seconds.items()}


def one_rank(tokens: int, calls: int) -> dict[str, float]:
    sp = SequenceParallel(SequenceParallelConfig(size=1))
    q, k, v, do = blocks(tokens)
    scale = HEAD_DIM**-0.5
    rows = {
        "bare kernel": lambda q, k, v: bare(q, k, v, sp.runtime.handle, CAUSAL.handle, -1, scale, None)[0],
        "attention, agreement apart": lambda q, k, v: sp.attention_agreed(q, k, v, Asked(CAUSAL, None, None)),
        "attention": sp.attention,
    }

    def both(attend: Callable) -> Step:
        def run() -> None:
            attend(*(x.detach().requires_grad_() for x in (q, k, v))).backward(do)

        return run

    return medians({name: both(attend) for name, attend in rows.items()}, calls)


def agreement(args: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for ranks in (2, 4, 16):
        both = on_ranks(ranks, agreeing, args.tokens, args.calls // 3, timeout=600)[0]
        for name, seconds in both.items():
            rows[f"{name}, {ranks} ranks"] = seconds, seconds / both["all-reduce of one number"]
    return rows


def agreeing(tokens: int, calls: int) -> dict[str, float]:
    size = dist.get_world_size()
    sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=1))
    q, k, v, _ = blocks(tokens)
    number = torch.zeros(1, dtype=torch.int64)
    rows = {
        "all-reduce of one number": lambda: dist.all_reduce(number, group=sp.groups.control),
        "agreement": lambda: agree_on_inputs(sp.runtime, q, k, v, Asked(CAUSAL, None, None, True, False)),
    }
    return medians(rows, calls)


class Empty:
    """A kernel that computes nothing."""

    square = False

    def forward_tiles(self, *_: object) -> None: ...


def step(args: argparse.Namespace) -> Rows:
    with fake_ranks(16) as runtime:
        q, k, v = blocks(2)[:3]
        bound, _ = runtime.bound("forward", q, k, FULL, runtime.shards(2))
        posts = [one for one in bound.program.code if isinstance(one, Post)]
        size = bound.unit_bytes(posts[0].sends[0].slot, *posts[0].sends[0].unit)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        group, order = runtime.comm.groups.inner, runtime.comm.groups.inner_order

        def transfer() -> None:
            for post in posts:
                works = [
                    one(buffer, group=group, tag=t.tag, **{f"group_{end}": order[t.peer]})
                    for one, buffer, end, transfers in (
                        (dist.irecv, buffers[0], "src", post.receives),
                        (dist.isend, buffers[1], "dst", post.sends),
                    )
                    for t in transfers
                ]
                for work in works:
                    work.wait()

        rows = {
            "bare irecv and isend": transfer,
            "a step of a ring": lambda: Walk(bound, Forward(Empty(), 1.0, q, k, v), runtime.comm).run(),
        }
        found = medians(rows, args.calls)
    return {name: (value / len(posts), value / found["bare irecv and isend"]) for name, value in found.items()}


def program(args: argparse.Namespace) -> Rows:
    rows: Rows = {}
    for ranks in (8, 64, 256):
        with fake_ranks(ranks) as runtime:
            derive(runtime, 128, CAUSAL)
            rows[f"known, {ranks} ranks"] = typical([lambda: bound_of(runtime, 128, CAUSAL)] * args.calls), None
            lengths = [128 + 2 * number for number in range(1, 10)]
            rows[f"new length, {ranks} ranks"] = (
                typical([lambda n=n: derive(runtime, n, CAUSAL) for n in lengths]),
                None,
            )
    for ranks in (16, 64):
        with fake_ranks(ranks) as runtime:
            packs = [pack(ranks * 1024, seed) for seed in range(9)]
            rows[f"new pack, {ranks} ranks"] = typical([lambda m=m: derive(runtime, 1024, m) for m in packs]), None
    return rows


def pack(tokens: int, seed: int) -> Mask:
    starts = random.Random(seed).sample(range(1, tokens), 63)
    return Mask(causal=True, documents=(0, *sorted(starts)))


def bound_of(runtime: Runtime, tokens: int, mask: Mask) -> list:
    """Forward's and backward's programs, with the lengths of this call."""
    q = torch.empty(1, tokens, HEADS, HEAD_DIM)
    return [runtime.bound(way, q, q, mask, runtime.shards(tokens))[0] for way in ("forward", "backward")]


def derive(runtime: Runtime, tokens: int, mask: Mask) -> None:
    """The same, and the calls of the kernel that they ask for."""
    for bound in bound_of(runtime, tokens, mask):
        for one in bound.program.code:
            if isinstance(one, Product):
                bound.tiles(one.q, one.kv)


def typical(calls: list[Step]) -> float:
    """Median seconds of the calls, of which each is of two programs: of one."""
    found = []
    for run in calls:
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found) / 2


@contextlib.contextmanager
def fake_ranks(world: int) -> Iterator[Runtime]:
    """One of `world` ranks of a ring; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world)
    try:
        with SequenceParallel(SequenceParallelConfig(size=world, ulysses=1, schedule="ring")) as sp:
            yield sp.runtime
    finally:
        dist.destroy_process_group()


PARTS = {"Call": call, "Agreement": agreement, "Step": step, "Program": program}


def blocks(tokens: int) -> list[Tensor]:
    return [torch.randn(1, tokens, HEADS, HEAD_DIM) for _ in range(4)]


def medians(rows: Mapping[str, Step], calls: int) -> dict[str, float]:
    """Seconds of a call; rows take turns, after a tenth of the calls as warm-up."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(-(calls // 10), calls):
        for name, step in rows.items():
            began = time.perf_counter()
            step()
            if turn >= 0:
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


@torch.library.custom_op("ds_seqpar_benchmarks::attention", mutates_args=())
def bare(
    q: Tensor, k: Tensor, v: Tensor, handle: int, mask: int, shards: int, scale: float, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kernel alone, with the arguments and results of the op that it is compared with."""
    parts = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


@torch.library.custom_op("ds_seqpar_benchmarks::attention_backward", mutates_args=())
def bare_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int, mask: int, shards: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = (x.transpose(1, 2) for x in (do, q, k, v, out, lse))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, 0.0, True, scale=scale)
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _save(ctx: object, inputs: tuple, output: tuple) -> None:
    q, k, v, *ctx.numbers, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: object, do: Tensor, _: Tensor) -> tuple:
    return *bare_backward(do, *ctx.saved_tensors, *ctx.numbers), *[None] * 5


bare.register_autograd(_differentiate, setup_context=_save)


if __name__ == "__main__":
    main()

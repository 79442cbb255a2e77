"""Prints what a call costs beside its kernel: ratios within one run, of medians of calls that take turns.

    python -m benchmarks.overhead

Call: forward and backward of few tokens on one rank, beside the bare kernel behind an op of the same arguments.
Agreement: what comparing the inputs costs, once a call, beside the all-reduce of one number over the same ranks.
Needs no launcher: ranks are forked, over gloo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.running.inputs import agree_on_inputs
from tests.launch import on_ranks

HEADS, HEAD_DIM = 8, 64
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=300, help="of each kind, of which the median is taken")
    args = parser.parse_args()
    for title, rows in (("Call", call(args)), ("Agreement", agreement(args))):
        print(f"\n{title}\n\n| | us | ratio |\n|---|---|---|")
        for name, (seconds, ratio) in rows.items():
            print(f"| {name} | {seconds * 1e6:.0f} | {ratio:.2f} |", flush=True)


Rows = dict[str, tuple[float, float]]  # median seconds, ratio to the row that it is compared with


def call(args: argparse.Namespace) -> Rows:
    (seconds,) = on_ranks(1, one_rank, args.tokens, args.calls, timeout=600)
    return {name: (value, value / seconds["bare kernel"]) for name, value in seconds.items()}


def one_rank(tokens: int, calls: int) -> dict[str, float]:
    sp = SequenceParallel(SequenceParallelConfig(size=1))
    q, k, v, do = blocks(tokens)
    scale = HEAD_DIM**-0.5
    rows = {
        "bare kernel": lambda q, k, v: bare(q, k, v, sp.runtime.handle, True, scale, None)[0],
        "attention, agreement apart": lambda q, k, v: sp.attention_agreed(q, k, v, True, None),
        "attention": sp.attention,
    }

    def step(attend: Callable) -> Step:
        def run() -> None:
            attend(*(x.detach().requires_grad_() for x in (q, k, v))).backward(do)

        return run

    return medians({name: step(attend) for name, attend in rows.items()}, calls)


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
        "agreement": lambda: agree_on_inputs(sp.runtime, q, k, v, True, None, True, False),
    }
    return medians(rows, calls)


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
    q: Tensor, k: Tensor, v: Tensor, handle: int, causal: bool, scale: float, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kernel alone, with the arguments and results of the op that it is compared with."""
    parts = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


@torch.library.custom_op("ds_seqpar_benchmarks::attention_backward", mutates_args=())
def bare_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    parts = (x.transpose(1, 2) for x in (do, q, k, v, out, lse))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, 0.0, causal, scale=scale)
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _save(ctx: object, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.handle, ctx.causal, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: object, do: Tensor, _: Tensor) -> tuple:
    return *bare_backward(do, *ctx.saved_tensors, ctx.handle, ctx.causal, ctx.scale), None, None, None, None


bare.register_autograd(_differentiate, setup_context=_save)


if __name__ == "__main__":
    main()

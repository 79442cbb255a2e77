"""Prints how much memory attention takes beyond its inputs, in units of one rank's block of queries.

    python -m benchmarks.allocation
    python -m benchmarks.allocation --heads 16 --head-stages 4

bf16, as many key and value heads as query heads, causal. Counted are the storages of tensors that are alive at once,
seen after every operation (see tests/live.py); each figure is that of the rank with the most, and the least of several
rounds, since gloo lets go late of what it has sent. The bare kernel is
PyTorch's flash attention for CPUs, on the tokens of one rank alone. Needs no launcher: ranks are forked, over gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests import live
from tests.launch import on_ranks

HEAD_DIM, ROUNDS = 64, 5
SETTINGS = {
    "one rank": {"size": 1},
    "ulysses 4": {"size": 4, "ulysses": 4},
    "ring of 4": {"size": 4, "ulysses": 1, "schedule": "ring"},
    "mesh (2, 1, 2)": {"size": 4, "ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2]},
    "attention2d 2 x 2": {"size": 4, "ulysses": 1, "schedule": "attention2d", "rows": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a rank")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-stages", type=int, default=1)
    args = parser.parse_args()
    shape = 1, args.tokens, args.heads, HEAD_DIM
    rows = {"bare kernel": on_ranks(1, bare, shape)}
    for name, setting in SETTINGS.items():
        rows[name] = on_ranks(setting["size"], ours, shape, {**setting, "head_stages": args.head_stages})
    unit = math.prod(shape) * torch.bfloat16.itemsize
    columns = [field.name for field in dataclasses.fields(live.Figures)]
    print(f"\n{args.tokens} tokens a rank, {args.heads} heads of {HEAD_DIM}, bf16; a rank's block of queries is 1\n")
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, ranks in rows.items():
        worst = [max(getattr(rank, column) for rank in ranks) / unit for column in columns]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in worst)} |")


def ours(shape: tuple[int, ...], setting: dict) -> live.Figures:
    with SequenceParallel(SequenceParallelConfig(**setting)) as sp:
        return least(sp.attention, shape)


def bare(shape: tuple[int, ...]) -> live.Figures:
    return least(kernel, shape)


def least(attend: Callable[..., Tensor], shape: tuple[int, ...]) -> live.Figures:
    """Of q, k, v and the output's gradient of one rank, all of this shape."""
    tensors = [torch.randn(shape).bfloat16() for _ in range(4)]
    seen = [live.measure(attend, *tensors) for _ in range(ROUNDS)]
    names = [field.name for field in dataclasses.fields(live.Figures)]
    return live.Figures(**{name: min(getattr(one, name) for one in seen) for name in names})


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, is_causal=True)[0].transpose(1, 2)


if __name__ == "__main__":
    main()

"""Prints how much memory attention takes beyond its inputs, in units of one rank's block of queries.

    python -m benchmarks.allocation

bf16, as many key and value heads as query heads, causal. Counted are the storages of tensors that are alive at once,
seen after every operation (see tests/live.py); each figure is that of the rank with the most. The bare kernel is
PyTorch's flash attention for CPUs, on the tokens of one rank alone. Needs no launcher: ranks are forked, over gloo.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from torch import Tensor

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests import live
from tests.launch import on_ranks

HEADS, HEAD_DIM = 8, 64
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
    args = parser.parse_args()
    rows = {"bare kernel": on_ranks(1, bare, args.tokens)}
    for name, setting in SETTINGS.items():
        rows[name] = on_ranks(setting["size"], ours, args.tokens, setting)
    unit = args.tokens * HEADS * HEAD_DIM * torch.bfloat16.itemsize
    columns = [field.name for field in dataclasses.fields(live.Figures)]
    print(f"\n{args.tokens} tokens a rank, {HEADS} heads of {HEAD_DIM}, bf16; a rank's block of queries is 1\n")
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, ranks in rows.items():
        worst = [max(getattr(rank, column) for rank in ranks) / unit for column in columns]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in worst)} |")


def tensors(tokens: int) -> list[Tensor]:
    """q, k, v and the output's gradient of one rank."""
    return [torch.randn(1, tokens, HEADS, HEAD_DIM).bfloat16() for _ in range(4)]


def ours(tokens: int, setting: dict) -> live.Figures:
    with SequenceParallel(SequenceParallelConfig(**setting)) as sp:
        return live.measure(sp.attention, *tensors(tokens))


def bare(tokens: int) -> live.Figures:
    return live.measure(kernel, *tensors(tokens))


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, is_causal=True)[0].transpose(1, 2)


if __name__ == "__main__":
    main()

"""Prints how much memory attention takes beyond its inputs, in units of one rank's block of queries.

    python -m benchmarks.memory.allocation
    python -m benchmarks.memory.allocation --heads 16 --head-stages 4

bf16, as many key and value heads as query heads, causal. Counted are the storages of tensors that are alive at once,
seen after every operation (see tests/live.py); each figure is that of the rank with the most, and the least of several
rounds, since gloo lets go late of what it has sent. The bare kernel is
PyTorch's flash attention for CPUs, on the tokens of one rank alone. Needs no launcher: ranks are forked, over gloo.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.contenders import parse
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests import live
from tests.launch import on_ranks

HEAD_DIM, ROUNDS = 64, 5
CONTENDERS = ["u4", "ring", "mesh=2,1,2", "attention2d=2,2"]  # of 4 ranks


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a rank")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-stages", type=int, default=1)
    args = parser.parse_args()
    shape = 1, args.tokens, args.heads, HEAD_DIM
    stages = {"head_stages": args.head_stages}
    rows = {"bare kernel": on_ranks(1, bare, shape), "one rank": on_ranks(1, ours, shape, {"size": 1, **stages})}
    for name in CONTENDERS:
        rows[name] = on_ranks(4, ours, shape, {"size": 4, **parse(name).section, **stages})
    unit = math.prod(shape) * torch.bfloat16.itemsize
    columns = [field.name for field in dataclasses.fields(live.Figures)]
    print(f"\n{args.tokens} tokens a rank, {args.heads} heads of {HEAD_DIM}, bf16; a rank's block of queries is 1\n")
    print(tables.head("", *columns))
    for name, ranks in rows.items():
        tables.row(name, *(f"{max(getattr(rank, column) for rank in ranks) / unit:.2f}" for column in columns))


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

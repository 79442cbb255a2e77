"""Print the memory of attention in addition to its inputs, in units of one rank's block of queries.

    python -m benchmarks.memory.allocation
    python -m benchmarks.memory.allocation --heads 16 --head-chunks 4

The setup is causal attention in bf16 with equal numbers of query and key/value heads, and --tokens tokens per rank. The
measurement counts the storages of tensors that are alive at the same time (tests/live.py). Each figure is the maximum
over ranks and the minimum over several rounds, since gloo releases sent tensors late. The bare kernel is PyTorch's,
applied to one rank's tokens. No launcher is needed: ranks are forked with gloo.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from benchmarks import contenders, tables
from benchmarks.attention.peers import dense
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests import live
from tests.launch import on_ranks

HEAD_DIM = 64


def main() -> None:
    parser = tables.parser(__doc__, tokens=512, heads=8, head_chunks=1, ranks=4)
    contenders.add(parser, "u4", "ring", "mesh=2,1,2", "attention2d=2,2")
    args = parser.parse_args()
    shape, more = (1, args.tokens, args.heads, HEAD_DIM), {"head_chunks": args.head_chunks}
    rows = {"bare kernel": on_ranks(1, taken, shape, None), "one rank": on_ranks(1, taken, shape, {"size": 1, **more})}
    for spec in args.contenders:
        rows[spec.name] = on_ranks(args.ranks, taken, shape, {"size": args.ranks, **spec.section, **more})
    unit = math.prod(shape) * torch.bfloat16.itemsize
    columns = [field.name for field in dataclasses.fields(live.Figures)]
    print(f"\n{args.tokens} tokens a rank, {args.heads} heads of {HEAD_DIM}, bf16; a rank's block of queries is 1\n")
    cells = ([max(getattr(rank, x) for rank in ranks) / unit for x in columns] for ranks in rows.values())
    lines = ([name, *(f"{x:.2f}" for x in row)] for name, row in zip(rows, cells, strict=True))
    print(tables.table(["", *columns], lines))


def taken(shape: tuple[int, ...], settings: dict[str, Any] | None) -> live.Figures:
    """Measure, on a rank, our attention with these settings, or the bare kernel."""
    tensors = [torch.randn(shape).bfloat16() for _ in range(4)]
    if settings is None:
        return live.least(lambda: live.measure(dense, *tensors))
    with SequenceParallel(SequenceParallelConfig(**settings)) as sp:
        return live.least(lambda: live.measure(sp.attention, *tensors))


if __name__ == "__main__":
    main()

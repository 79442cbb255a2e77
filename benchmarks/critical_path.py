"""What the ranks of a causal ring take together, and one after the other: beside one dense call, and by layout.

    python -m benchmarks.critical_path
    python -m benchmarks.critical_path --dtype bfloat16 --rounds 3

All ranks in one process on one core (`testing.py`): walks, kernels, merges and copies are the real ones, and a
message is a copy. Dense: the same kernel, called once for the whole sequence. All rows take turns. Seconds are of
processor time, which other work on the machine changes least.

Together: everything that all ranks do, forward and backward, over the dense call of the same turn; products: of that,
kernel calls and the merging of what they give. Critical path: of every step the slowest rank's product, summed, as a
ring takes it whose links cost nothing. Predicted: the same sum of the (query, key) pairs that products see, so that a
pair costs the same everywhere. Ratios are medians of those of single turns, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from ds_seqpar import SequenceParallelConfig
from ds_seqpar import testing as virtual
from ds_seqpar.compiler.program import Product
from ds_seqpar.runtime.kernels import KERNELS
from ds_seqpar.runtime.walk import EXECUTE, Walk

LAYOUTS = ("contiguous", "zigzag", "striped")
Steps = dict[tuple[str, int, int], float]  # (direction, step, rank) -> of its product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq", type=int, default=32768, help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernel", choices=("cpu_flash", "reference", "chunked"), default="cpu_flash")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="compared with the first")
    parser.add_argument("--rounds", type=int, default=5, help="after one of an eighth of the sequence")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = torch.randn(4, 1, args.seq, args.heads, args.head_dim).to(getattr(torch, args.dtype)).unbind()
    dense: list[float] = []
    whole: dict[str, list[float]] = {layout: [] for layout in args.layouts}
    products: dict[str, list[Steps]] = {layout: [] for layout in args.layouts}
    pairs: dict[str, Steps] = {}
    for turn in range(-1, args.rounds):
        inputs = tensors if turn >= 0 else [x[:, : args.seq // 8].contiguous() for x in tensors]  # to warm up
        took = seconds_of_dense(args.kernel, *inputs)
        if turn >= 0:
            dense.append(took)
        for layout in args.layouts[:: 1 if turn % 2 else -1]:
            config = SequenceParallelConfig(
                size=args.ranks, ulysses=1, schedule="ring", layout=layout, kernel=args.kernel
            )
            with watched() as (steps, pairs[layout]):
                began = time.process_time()
                virtual.attention(config, *inputs)
                took = time.process_time() - began
            if turn >= 0:
                whole[layout].append(took)
                products[layout].append(steps)
    print(
        f"\n{args.ranks} ranks, {args.seq} tokens, {args.heads} heads of {args.head_dim}, {args.dtype}, {args.kernel}; "
        f"{args.rounds} turns; the dense call {spread(dense)} s\n"
    )
    print("| layout | together, s | over dense | of it products |\n|---|---|---|---|")
    for layout in args.layouts:
        parts = [sum(steps.values()) / took for steps, took in zip(products[layout], whole[layout], strict=True)]
        print(
            f"| {layout} | {spread(whole[layout])} | {ratios(whole[layout], dense)} | {statistics.median(parts):.3f} |"
        )
    print(f"\n| layout | critical path, s | {args.layouts[0]} over it | predicted | forward | backward |")
    print("|---|---|---|---|---|---|")
    first = args.layouts[0]
    for layout in args.layouts:
        both = [[path(steps) for steps in products[name]] for name in (first, layout)]
        cells = [spread(both[1]), ratios(*both), f"{path(pairs[first]) / path(pairs[layout]):.3f}"]
        for way in ("forward", "backward"):
            cells.append(ratios(*([path(steps, way) for steps in products[name]] for name in (first, layout))))
        print(f"| {layout} | {' | '.join(cells)} |")


def seconds_of_dense(name: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> float:
    """Of one call of a kernel, forward and backward, for the whole sequence."""
    kernel, scale = KERNELS[name], q.shape[-1] ** -0.5
    began = time.process_time()
    out, lse = kernel.forward(q, k, v, True, scale)
    kernel.backward(do, q, k, v, out, lse, True, scale)
    return time.process_time() - began


@contextlib.contextmanager
def watched() -> Iterator[tuple[Steps, Steps]]:
    """Seconds, and visible pairs, of every product that is walked inside."""
    seconds: Steps = defaultdict(float)
    pairs: Steps = defaultdict(float)

    def product(walk: Walk, one: Product) -> None:
        place = walk.program.direction, one.step, walk.program.rank
        began = time.process_time()
        Walk.product(walk, one)
        seconds[place] += time.process_time() - began
        pairs[place] += sum(tile.products for tile in walk.bound.tiles(one.q, one.kv))

    EXECUTE[Product] = product
    try:
        yield seconds, pairs
    finally:
        EXECUTE[Product] = Walk.product


def path(steps: Steps, direction: str = "") -> float:
    """The most of any rank in each step, summed over the steps of a direction, or of both."""
    most: dict[tuple[str, int], float] = defaultdict(float)
    for (way, step, _), value in steps.items():
        if direction in ("", way):
            most[way, step] = max(most[way, step], value)
    return sum(most.values())


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def ratios(values: list[float], others: list[float]) -> str:
    found = [a / b for a, b in zip(values, others, strict=True)]
    return f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})"


if __name__ == "__main__":
    main()

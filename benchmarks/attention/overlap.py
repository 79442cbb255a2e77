"""Compares the time of real transfers beside sleeping products with the plan's own critical path.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.attention.overlap
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 6 -m benchmarks.attention.overlap --causal

Schedules that do not fit the number of ranks, or the mask, are left out.

Products are sleeps, so that a small machine's cores do not decide; transfers are real, over gloo, with all that goes
with them (buffers, copies, merging of results). What they take is measured first, in the same run, by the same plan
with products of no time; then products are made as slow as the links.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import tables
from benchmarks.attention.blocks import block_bytes
from benchmarks.contenders import parse
from benchmarks.turns import slowest
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.compiler.compile import Bound, weight
from ds_seqpar.compiler.masks import CAUSAL, FULL
from ds_seqpar.compiler.simulate import Costs, communication, computation, programs_of, simulate
from ds_seqpar.compiler.tiles import Tile
from ds_seqpar.errors import ConfigError
from ds_seqpar.runtime.buffers import Tensors
from ds_seqpar.runtime.call import ForwardCall
from ds_seqpar.runtime.kernels import KERNELS, Scores
from ds_seqpar.runtime.kernels.accumulate import Running
from ds_seqpar.runtime.walk import Walk
from ds_seqpar.runtime.work import Forward

CONTENDERS = ["ring", "attention2d=2", "attention2d=2+overlap", "mesh=2,1,2", "mesh=2,1,2+overlap", "triangle"]


class Sleeping(Forward):
    """A forward whose visible pairs take a fixed time, room for their result included, and leave one of the right
    shape."""

    pair = 0.0  # seconds of one

    def product(self, q: Tensors, kv: Tensors, q_slot: int, tiles: Sequence[Tile], results: list[Running]) -> None:
        until = time.perf_counter() + self.pair * sum(tile.products for tile in tiles)
        results[0].placed()
        time.sleep(max(0.0, until - time.perf_counter()))


class SleepingCall(ForwardCall):
    """One whose work is that; the kernel is never called."""

    pair = 0.0

    def enter(self, stage: int) -> Sleeping:
        work = Sleeping(self.kernel, self.scores.scale, *(self.own[name] for name in ("q", "k", "v")))
        work.pair = self.pair
        return work


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank; 16 heads of 64, fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size, mask = dist.get_world_size(), CAUSAL if args.causal else FULL
    tensors = [torch.randn(1, args.tokens, 16, 64) for _ in range(3)]
    rows = []
    for name in CONTENDERS:
        try:
            sp = SequenceParallel(SequenceParallelConfig(size=size, **parse(name).section))
            bound, _ = sp.runtime.bound("forward", tensors[0], 16, mask, sp.runtime.shards(args.tokens))
        except ConfigError:  # on all ranks
            continue
        rows.append((name, *compared(sp, bound, tensors, args.repeats)))
    if dist.get_rank() == 0:
        print(tables.head("contender", "max(compute, links), s", "critical path, s", "measured, s",
                          "measured / critical path"))  # fmt: skip
        for name, least, path, took in rows:
            tables.row(name, f"{least:.3f}", f"{path:.3f}", f"{took:.3f}", f"{took / path:.2f}")
    dist.destroy_process_group()


def compared(sp: SequenceParallel, bound: Bound, tensors: list[Tensor], repeats: int) -> tuple[float, float, float]:
    """Seconds: the longer of products and links, the critical path, and what was measured."""
    shape, shards, mask = bound.shape, bound.shards, bound.mask
    recipe = sp.runtime.compiler.recipe
    plan = recipe.plan("forward", sp.runtime.compiler.pattern(mask, shards), shape)
    programs = programs_of(plan)
    bare = Costs(transfer=block_bytes(shape, "forward", shards), product=0.0, weight=weight(mask, shards))
    rate = repeated(sp, bound, tensors, 0.0, repeats) / simulate(programs, bare).seconds
    transfer = {kind: value * rate for kind, value in bare.transfer.items()}
    costs = dataclasses.replace(bare, transfer=transfer).balanced(plan)
    whole = shards.tokens("q", (0,)) * shards.tokens("kv", (0,))
    took = repeated(sp, bound, tensors, costs.product / whole, repeats)
    return max(communication(plan, costs), computation(plan, costs)), simulate(programs, costs).seconds, took


def repeated(sp: SequenceParallel, bound: Bound, tensors: list[Tensor], pair: float, repeats: int) -> float:
    """The median over repeats, after a warm-up, of the slowest rank's seconds."""
    return statistics.median([run(sp, bound, tensors, pair) for _ in range(repeats + 1)][1:])


def run(sp: SequenceParallel, bound: Bound, tensors: list[Tensor], pair: float) -> float:
    own = dict(zip(("q", "k", "v"), tensors, strict=True))
    call = SleepingCall(bound, KERNELS["reference"], Scores(1.0), own, None, 0, False)
    call.pair = pair
    dist.barrier()
    began = time.perf_counter()
    Walk(bound, call, sp.comm).run()
    return slowest(time.perf_counter() - began)


if __name__ == "__main__":
    main()

"""Compares the time of real transfers beside sleeping products with the plan's own critical path.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/overlap.py

Products are sleeps, so that a small machine's cores do not decide; transfers are real, over gloo, with all that goes
with them (buffers, copies, merging of results). What they take is measured first, in the same run, by the same plan
with products of no time; then products are made as slow as the links.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.planning.compile import Bound
from ds_seqpar.planning.masks import FULL
from ds_seqpar.planning.simulate import Costs, communication, computation, programs_of, simulate
from ds_seqpar.planning.tiles import Tile
from ds_seqpar.running.buffers import Tensors
from ds_seqpar.running.kernels import KERNELS
from ds_seqpar.running.kernels.accumulate import Running
from ds_seqpar.running.walk import Walk
from ds_seqpar.running.work import Forward

SETTINGS = [
    {"schedule": "ring"},
    {"schedule": "attention2d", "rows": 2},
    {"schedule": "attention2d", "rows": 2, "overlap": True},
    {"schedule": "mesh", "mesh": [2, 1, 2]},
    {"schedule": "mesh", "mesh": [2, 1, 2], "overlap": True},
]


class Sleeping(Forward):
    """A forward whose products take a fixed time, room for their result included, and leave one of the right shape."""

    seconds = 0.0

    def product(self, q: Tensors, kv: Tensors, q_slot: int, tiles: Sequence[Tile], results: list[Running]) -> None:
        own = self.operands["q"][0].shape[1]  # tokens of a block
        until = time.perf_counter() + self.seconds * (q[0].shape[1] // own) * (kv[0].shape[1] // own)
        results[0].placed()
        time.sleep(max(0.0, until - time.perf_counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank; 16 heads of 64, fp32")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = dist.get_world_size()
    tensors = [torch.randn(1, args.tokens, 16, 64) for _ in range(3)]
    rows = []
    for setting in SETTINGS:
        sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=1, **setting))
        shape = bound_of(sp, tensors).shape
        compiler = sp.runtime.compiler
        plan = compiler.recipe.plan("forward", compiler.pattern(FULL, sp.runtime.shards(args.tokens)), shape)
        programs = programs_of(plan)
        bare = Costs(transfer=shape.bytes_per_token("forward"), product=0.0)
        rate = repeated(sp, tensors, 0.0, args.repeats) / simulate(programs, bare).seconds
        costs = Costs(transfer={kind: value * rate for kind, value in bare.transfer.items()}, product=1.0)
        costs = costs.balanced(plan)
        took = repeated(sp, tensors, costs.product, args.repeats)
        bound = max(communication(plan, costs), computation(plan, costs))
        rows.append((setting, bound, simulate(programs, costs).seconds, took))
    if dist.get_rank() == 0:
        print("| schedule | max(compute, links), s | critical path, s | measured, s | measured / critical path |")
        print("|---|---|---|---|---|")
        for setting, bound, path, took in rows:
            name = " ".join(str(value) if key == "schedule" else f"{key} {value}" for key, value in setting.items())
            print(f"| {name} | {bound:.3f} | {path:.3f} | {took:.3f} | {took / path:.2f} |")
    dist.destroy_process_group()


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def bound_of(sp: SequenceParallel, tensors: list[Tensor]) -> Bound:
    q, k, _ = tensors
    return sp.runtime.bound("forward", q, k, FULL, sp.runtime.shards(q.shape[1]))[0]


def repeated(sp: SequenceParallel, tensors: list[Tensor], product: float, repeats: int) -> float:
    """The median over repeats, after a warm-up, of the slowest rank's seconds."""
    return statistics.median([run(sp, tensors, product) for _ in range(repeats + 1)][1:])


def run(sp: SequenceParallel, tensors: list[Tensor], product: float) -> float:
    work = Sleeping(KERNELS["reference"], 1.0, *tensors)  # the kernel is never called: products are sleeps
    work.seconds = product
    dist.barrier()
    began = time.perf_counter()
    Walk(bound_of(sp, tensors), work, sp.comm).run()
    return slowest(time.perf_counter() - began)


if __name__ == "__main__":
    main()

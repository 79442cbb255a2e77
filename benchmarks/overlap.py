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

import torch
import torch.distributed as dist

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.planning.layout import LAYOUTS
from ds_seqpar.planning.plan import Key, Plan
from ds_seqpar.planning.simulate import Costs, communication, computation, simulate
from ds_seqpar.running.kernels import KERNELS
from ds_seqpar.running.walk import walk
from ds_seqpar.running.work import Forward, Problem, bytes_per_token

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

    def compute(self, q: Key, kv: Key) -> None:
        until = time.perf_counter() + self.seconds * len(q) * len(kv)
        self._accumulator(q)
        time.sleep(max(0.0, until - time.perf_counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank; 16 heads of 64, fp32")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = dist.get_world_size()
    q, kv = torch.randn(1, args.tokens, 16, 64), torch.randn(1, args.tokens, 2, 16, 64)
    rows = []
    for setting in SETTINGS:
        sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=1, **setting))
        plan = sp.runtime.plan(q, kv, False, "forward")
        bare = Costs(transfer=bytes_per_token("forward", q, kv, torch.float32), product=0.0)
        rate = repeated(sp, plan, q, kv, 0.0, args.repeats) / simulate(plan, bare).seconds
        costs = Costs(transfer={kind: value * rate for kind, value in bare.transfer.items()}, product=1.0)
        costs = costs.balanced(plan)
        took = repeated(sp, plan, q, kv, costs.product, args.repeats)
        bound = max(communication(plan, costs), computation(plan, costs))
        rows.append((setting, bound, simulate(plan, costs).seconds, took))
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


def repeated(
    sp: SequenceParallel, plan: Plan, q: torch.Tensor, kv: torch.Tensor, product: float, repeats: int
) -> float:
    """The median over repeats, after a warm-up, of the slowest rank's seconds."""
    return statistics.median([run(sp, plan, q, kv, product) for _ in range(repeats + 1)][1:])


def run(sp: SequenceParallel, plan: Plan, q: torch.Tensor, kv: torch.Tensor, product: float) -> float:
    seq = q.shape[1] * plan.size
    blocks = tuple(LAYOUTS[sp.config.layout](seq, plan.size, rank) for rank in range(plan.size))
    kernel = KERNELS["reference"]  # asked only whether its causal mask is square: products are sleeps
    problem = Problem(rank=sp.runtime.rank, blocks=blocks, causal=False, scale=1.0, kernel=kernel, travel=torch.float32)
    work = Sleeping(problem, q, kv)
    work.seconds = product
    dist.barrier()
    began = time.perf_counter()
    for _ in walk(plan.program(sp.runtime.rank), work, sp.comm):
        continue
    return slowest(time.perf_counter() - began)


if __name__ == "__main__":
    main()

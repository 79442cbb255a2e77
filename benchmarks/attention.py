"""Times attention, forward and backward, for every shape of the given ranks, beside DeepSpeed's own Ulysses.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/attention.py --seq 8192

All rows of one run do the same work and take turns, so that a noisy machine is noisy for all; compare rows of one run
by their ratio, not runs by their seconds. A row's time is that of its slowest rank; the median of `--repeats`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.config import even_ulysses

Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=8192, help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--head-stages", default="1", help="numbers, with commas: rows for each")
    parser.add_argument("--only", default="", help="rows whose name has this in it, and DeepSpeed's")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    deepspeed.init_distributed()
    size = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    shapes = [(args.heads, args.head_dim), (args.kv_heads, args.head_dim), (args.kv_heads, args.head_dim)]
    torch.manual_seed(dist.get_rank())
    local = [torch.randn(1, args.seq // size, *s, dtype=getattr(torch, args.dtype), device=device) for s in shapes]

    rows: dict[str, Step] = {}
    if args.heads % size == 0 and args.kv_heads % size == 0:
        rows["DeepSpeed DistributedAttention"] = peer(local)
    counted = {}
    stages = [int(n) for n in args.head_stages.split(",")]
    for ulysses in even_ulysses(size, args.heads, args.kv_heads):
        for layout in ("zigzag", "striped", "contiguous") if ulysses < size else ("zigzag",):
            for count in stages:
                name = f"ulysses {ulysses} x ring {size // ulysses}" + (f", {layout}" if ulysses < size else "")
                name += f", head stages {count}" if count > 1 else ""
                if args.only in name:
                    config = SequenceParallelConfig(size=size, ulysses=ulysses, layout=layout, head_stages=count)
                    counted[name] = SequenceParallel(config)
                    rows[name] = ours(counted[name], local)
    seconds = measure(rows, args.repeats, device)
    if dist.get_rank() == 0:
        first = seconds[next(iter(rows))]
        heads = f"{args.heads}/{args.kv_heads} heads of {args.head_dim}"
        print(f"\n{size} ranks, {args.seq} tokens, {heads}, {args.dtype}, causal\n")
        print("| | seconds | ratio | MiB received a rank |\n|---|---|---|---|")
        for name, value in seconds.items():
            mib = "-"
            if name in counted:
                mib = f"{counted[name].comm.received_bytes / (args.repeats + 1) / 2**20:.1f}"
            print(f"| {name} | {value:.3f} | {value / first:.2f} | {mib} |")
    dist.destroy_process_group()


def ours(sp: SequenceParallel, local: list[Tensor]) -> Step:
    def step() -> None:
        inputs = [x.detach().requires_grad_() for x in local]
        out = sp.attention(*inputs)
        out.backward(torch.ones_like(out))

    return step


def peer(local: list[Tensor]) -> Step:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous()

    attention = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def step() -> None:
        inputs = [x.detach().requires_grad_() for x in local]
        out = attention(*inputs, 0)
        out.backward(torch.ones_like(out))

    return step


def measure(rows: dict[str, Step], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of the slowest rank; one warm-up each, then rows take turns."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(repeats + 1):
        for name, step in rows.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn:
                found[name].append(took.item())
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    main()

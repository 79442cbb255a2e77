"""Times Ulysses, forward and backward, beside DeepSpeed's DistributedAttention, and counts what both receive.

    python -m benchmarks.ulysses
    python -m benchmarks.ulysses --ranks 4 --seq 2048 --rounds 25

One sequence, fp32, causal, 1,024 elements a token in q. Both run PyTorch's flash attention for CPUs on the same ranks
(forked, over gloo) and take turns, either being the first in every other round, so that a noisy machine is noisy for
both. A round's time is that of its slowest rank. DeepSpeed's needs a kv head a member: GQA has 4 query heads to one of
as many kv heads as ranks. Ours agrees on its inputs in every call, as it always does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests.launch import on_ranks

WIDTH = 1024
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 8192], help="tokens of the whole sequence")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(
        "\n| ranks | tokens | heads | ours, s | DeepSpeed's, s | ratio | ours, MiB a rank | DeepSpeed's, MiB a rank |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for ranks in args.ranks:
        for heads, kv_heads in ((16, 16), (4 * ranks, ranks)):
            for seq in args.seq:
                found = on_ranks(ranks, compare, seq, (heads, kv_heads), args.rounds, timeout=3600)
                (ours, theirs), (our_bytes, their_bytes) = found[0]
                print(
                    f"| {ranks} | {seq} | {heads}/{kv_heads} of {WIDTH // heads} | {ours:.4f} | {theirs:.4f} | "
                    f"{ours / theirs:.3f} | {our_bytes / 2**20:.2f} | {their_bytes / 2**20:.2f} |",
                    flush=True,
                )


def compare(seq: int, heads: tuple[int, int], rounds: int) -> tuple[list[float], list[int]]:
    """(median seconds of the slowest rank, bytes received by this one), each of ours and of DeepSpeed's."""
    deepspeed.init_distributed("gloo", verbose=False)
    size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    local = [torch.randn(1, seq // size, h, WIDTH // heads[0]) for h in (heads[0], heads[1], heads[1])]
    sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=size))
    theirs = DistributedAttention(flash, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    rows = [sp.attention, lambda q, k, v: theirs(q, k, v, 0)]
    step(rows[0], local)  # a warm-up too
    received = [sp.comm.received_bytes, count(rows[1], local)]
    found: list[list[float]] = [[], []]
    for turn in range(rounds):
        for row in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            step(rows[row], local)
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            found[row].append(took.item())
    return [statistics.median(seconds) for seconds in found], received


def step(attend: Attend, local: list[Tensor]) -> None:
    out = attend(*(x.detach().requires_grad_() for x in local))
    out.backward(torch.ones_like(out))


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous()


def count(attend: Attend, local: list[Tensor]) -> int:
    """Bytes that a step of DeepSpeed's, which is a warm-up too, receives from other ranks: all by all-to-alls."""
    real, received = dist.all_to_all_single, []

    def counting(output: Tensor, *args: object, **kwargs: object) -> object:
        received.append(output.nbytes)
        return real(output, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counting):
        step(attend, local)
    return sum(received) * (dist.get_world_size() - 1) // dist.get_world_size()


if __name__ == "__main__":
    main()

"""Times attention, forward and backward, beside DeepSpeed's DistributedAttention on the ranks of one machine.

    python -m benchmarks.attention.peers --ranks 4 --seq 2048 --rounds 25 -- deepspeed u4
    python -m benchmarks.attention.peers --ranks 2 --heads 8 --kv-heads 2 -- deepspeed ring ring+layout=contiguous u2
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.attention.peers -- deepspeed u2

One causal sequence. Ranks are forked, over gloo; those that torchrun started use GPUs where there are any. All
contenders (`benchmarks.contenders`) do the same work and take turns; a round's time is that of its slowest rank.
Compare rows of one run by their ratio to the first. Ours compares its inputs between ranks in every call, as always.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import contenders, tables
from benchmarks.contenders import Spec
from benchmarks.turns import in_turns, together
from ds_seqpar import SequenceParallel, SequenceParallelConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Attention:
    """attend: of this rank's tokens, (1, local_seq, heads, head_dim) each. positions: of these tokens. sp: of ours."""

    attend: Attend
    positions: Tensor
    sp: SequenceParallel | None = None


def made(spec: Spec, seq: int, heads: tuple[int, int], causal: bool = True) -> Attention:
    """A contender over all ranks. heads: of queries, of keys. Raises ValueError on all ranks alike where it cannot."""
    if spec.peer:
        return deepspeed_ulysses(spec, seq, heads, causal)
    config = SequenceParallelConfig.from_dict({"size": dist.get_world_size(), **spec.section})
    sp = SequenceParallel(config, heads=heads)
    positions = sp.shard(torch.arange(seq), 0)
    return Attention(lambda q, k, v: sp.attention(q, k, v, causal=causal), positions, sp)


def deepspeed_ulysses(spec: Spec, seq: int, heads: tuple[int, int], causal: bool) -> Attention:
    """DeepSpeed's `DistributedAttention` around PyTorch's attention."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    size, rank = dist.get_world_size(), dist.get_rank()
    if spec.name != "deepspeed":
        raise ValueError(f"attention is compared with deepspeed, which takes no settings; got {spec.name}")
    if any(count % size for count in heads):
        raise ValueError(f"DistributedAttention needs heads that {size} ranks divide; got {heads[0]}/{heads[1]}")
    with contextlib.redirect_stdout(sys.stderr):  # it tells of its op
        deepspeed.init_distributed(dist.get_backend(), verbose=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True).transpose(1, 2).contiguous()

    layer = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return Attention(lambda q, k, v: layer(q, k, v, 0), torch.arange(seq // size) + rank * (seq // size))


def step(attend: Attend, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    out.backward(do)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def compare(args: argparse.Namespace) -> list[list[str]]:
    """A row for each contender; the same on all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    shapes = [(heads, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    torch.manual_seed(dist.get_rank())
    heads, steps, ours = (args.heads, args.kv_heads), {}, {}
    for spec in args.contenders:
        found = made(spec, args.seq, heads)
        dtype, tokens = getattr(torch, args.dtype), len(found.positions)
        local = [torch.randn(1, tokens, *shape, dtype=dtype, device=device) for shape in shapes]
        steps[spec.name] = lambda attend=found.attend, local=local: step(attend, *local)
        if found.sp:
            ours[spec.name] = found.sp
    seconds = in_turns(steps, args.rounds, together(device))
    first, rows = statistics.median(seconds[args.contenders[0].name]), []
    for name, took in seconds.items():
        mib = f"{ours[name].comm.received_bytes / (args.rounds + 1) / 2**20:.2f}" if name in ours else "-"
        median = statistics.median(took)
        rows.append([name, f"{median:.4f}", tables.spread(took), f"{median / first:.3f}", mib])
    return rows


def main() -> None:
    parser = tables.parser(__doc__)
    contenders.add(parser, "deepspeed", "u4", "u2/ring", "ring")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048, help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        args.ranks, rows = dist.get_world_size(), compare(args)
        silent = dist.get_rank() > 0
        dist.destroy_process_group()
        if silent:
            return
    else:
        from tests.launch import on_ranks

        rows = on_ranks(args.ranks, compare, args, timeout=3600)[0]
    heads = f"{args.heads}/{args.kv_heads} heads of {args.head_dim}"
    print(f"\n{args.ranks} ranks, {args.seq} tokens, {heads}, {args.dtype}, causal; median of {args.rounds}\n")
    print(tables.table(["contender", "s", "spread", "to the first", "MiB received a rank"], rows), flush=True)


if __name__ == "__main__":
    main()

"""The attention calls of contenders: this library's, and DeepSpeed's `DistributedAttention`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.contenders import Spec
from ds_seqpar import SequenceParallel, SequenceParallelConfig, UnevenShards
from ds_seqpar.core.compiler.compile import Compiler
from ds_seqpar.core.compiler.sharding.masks import CAUSAL

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention call of a contender.

    Attributes:
        attend: The function, called with this rank's q, k and v, (1, local_seq, heads, head_dim) each.
        positions: The positions of this rank's tokens.
        sp: The SequenceParallel; None for peers.
    """

    attend: Attend
    positions: Tensor
    sp: SequenceParallel | None = None


def made(spec: Spec, seq: int, heads: tuple[int, int], causal: bool = True) -> Attention:
    """Create a contender over all ranks. `heads` is (query heads, key/value heads).

    Raises:
        ValueError: The contender does not support these settings. Raised on all ranks.
    """
    if spec.peer:
        return deepspeed_ulysses(spec, seq, heads, causal)
    config = SequenceParallelConfig.from_dict({"size": dist.get_world_size(), **spec.section})
    sp = SequenceParallel(config, heads=heads)
    return Attention(lambda q, k, v: sp.attention(q, k, v, causal=causal), sp.shard(torch.arange(seq), 0), sp)


def deepspeed_ulysses(spec: Spec, seq: int, heads: tuple[int, int], causal: bool) -> Attention:
    """Return DeepSpeed's layer around PyTorch's attention."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    size, rank = dist.get_world_size(), dist.get_rank()
    if spec.name != "deepspeed":
        raise ValueError(f"attention is compared with deepspeed, which takes no settings; got {spec.name}")
    if any(count % size for count in heads):
        raise ValueError(f"DistributedAttention needs heads that {size} ranks divide; got {heads[0]}/{heads[1]}")
    with contextlib.redirect_stdout(sys.stderr):  # for messages about its op
        deepspeed.init_distributed(dist.get_backend(), verbose=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, causal).contiguous()

    layer = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return Attention(lambda q, k, v: layer(q, k, v, 0), torch.arange(seq // size) + rank * (seq // size))


def of_cache(spec: Spec, its: Attention, step: str, seq: int, kept: int) -> tuple[Attend, Tensor, Tensor]:
    """Return (attend, positions of this rank's new tokens, positions of its cached tokens) for attention to a cache.

    Each rank has equal, consecutive parts of the new and the cached tokens. In decoding, all ranks have the single new
    token.
    """
    if its.sp is None:
        raise ValueError(f"attention to a cache is ours alone; got {spec.name}")
    sp, side = its.sp, spec.section.get("rotate_forward", "auto")
    new, old = (torch.arange(count // sp.size) + sp.rank * (count // sp.size) for count in (seq, kept))
    if step == "decode":
        return (gathering if side == "kv" else sp.decode_attention), torch.zeros(1, dtype=torch.long), old
    runs = [[[(start + rank * (count // sp.size), 1, count // sp.size)] for rank in range(sp.size)]
            for start, count in ((kept, seq), (0, kept))]  # fmt: skip
    shards, ring = UnevenShards(*runs, q_start=kept), sp.runtime.one_ring
    ring.compiler = Compiler(dataclasses.replace(ring.compiler.recipe, forward=side), ring.rank)
    return lambda q, k, v: sp.cache_attention(q, k, v, mask=CAUSAL, shards=shards)[0], new, old


def gathering(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of the same queries on all ranks, after each rank has gathered all keys and values."""
    parts = [[torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (k, v)]
    for found, x in zip(parts, (k, v), strict=True):
        dist.all_gather(found, x)
    return dense(q, *(torch.cat(found, 1) for found in parts), causal=False)


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Compute PyTorch's attention for tensors (1, seq, heads, head_dim)."""
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True).transpose(1, 2)


def step(attend: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Run forward and backward. The last tensor is the output's gradient. Return the output and the gradients of the
    others.
    """
    *inputs, do = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]

"""What others have, as rows of `benchmarks.cluster`: the same inputs, dealt as each wants them.

Each function takes (spec, task) of `cluster_ranks` and returns how to attend, and which positions of the sequence this
rank holds. It raises ValueError or ImportError, on all ranks alike, where the peer cannot do the task.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cluster_spec import Spec

if TYPE_CHECKING:
    from benchmarks.cluster_ranks import Attend, Task


def contiguous(task: Task) -> Tensor:
    """The positions of this rank's equal slice."""
    tokens = task.seq // dist.get_world_size()
    return torch.arange(tokens) + dist.get_rank() * tokens


def deepspeed_ulysses(spec: Spec, task: Task) -> tuple[Attend, Tensor]:
    """DeepSpeed's `DistributedAttention` around PyTorch's flash attention for CPUs."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    size = dist.get_world_size()
    if task.heads % size or task.kv_heads % size:
        raise ValueError(f"DistributedAttention needs heads that {size} ranks divide; got {task.heads}/{task.kv_heads}")
    with contextlib.redirect_stdout(sys.stderr):  # it tells of its op
        deepspeed.init_distributed("gloo", verbose=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*parts, is_causal=task.causal, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    layer = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return (lambda q, k, v: layer(q, k, v, 0)), contiguous(task)


def ringmaster(spec: Spec, task: Task) -> tuple[Attend, Tensor]:
    """axolotl-ringmaster: "ring" (its P2P ring, contiguous), "distflash" or "usp,U". Its kernels for CPUs are written
    out in PyTorch, with all scores in memory; over gloo its all-to-alls are all-gathers, and its zigzag needs CUDA."""
    method, *degree = spec.section["words"] or ("ring",)
    if method not in ("ring", "distflash", "usp") or len(degree) != (method == "usp"):
        raise ValueError(f"ringmaster has ring, distflash and usp,U on CPUs; got {spec.name!r}")
    if method == "distflash" and not task.causal:
        raise ValueError("ringmaster's distflash is for causal attention; got full attention, take --causal")
    from ringmaster.ring.distflash import distflash_attention
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    if method == "usp":
        return _heads_first(_usp(int(degree[0]), task)), contiguous(task)
    group, scale = dist.group.WORLD, task.head_dim**-0.5
    if method == "ring":
        options = {"group": group, "causal": task.causal, "scaling": scale}
        return _heads_first(lambda q, k, v: ring_p2p_attention(q, k, v, **options)), contiguous(task)
    return _heads_first(lambda q, k, v: distflash_attention(q, k, v, group=group, scaling=scale)), contiguous(task)


def _heads_first(attend: Attend) -> Attend:
    """Of inputs (1, local_seq, heads, head_dim), where the peer takes heads before tokens."""
    return lambda q, k, v: attend(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))


def _usp(degree: int, task: Task) -> Attend:
    """Ulysses over neighbours around its P2P ring."""
    from ringmaster.config import Backend, RingImpl, RingmasterConfig, RotateMethod
    from ringmaster.mesh import build_runtime
    from ringmaster.runtime import set_runtime
    from ringmaster.strategies.usp import make_usp_attention

    size = dist.get_world_size()
    if not 1 < degree < size or size % degree or task.kv_heads % degree:
        raise ValueError(
            f"ringmaster's usp needs a degree between 1 and {size} that divides both it and the {task.kv_heads} "
            f"key/value heads; got {degree}"
        )
    config = RingmasterConfig(
        size=size, backend=Backend.USP, ulysses_size=degree, ring_size=size // degree,
        rotate_method=RotateMethod.ALLTOALL, ring_impl=RingImpl.HF_KERNELS,
    )  # fmt: skip
    runtime = build_runtime(config, device_type="cpu")
    forward, layer = make_usp_attention("math", "math", config.rotate_method), torch.nn.Module()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_runtime(runtime)  # of the process: another degree may have been the last
        return forward(layer, q, k, v, None, scaling=task.head_dim**-0.5, is_causal=task.causal)[0]

    return attend


def ring_attention_pytorch(spec: Spec, task: Task) -> tuple[Attend, Tensor]:
    """ring-attention-pytorch's ring in plain PyTorch, contiguous: every rank meets all blocks, masked ones too.
    (Release 0.5.20 gives wrong gradients of k and v, so it gets no time.)"""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    options = {"causal": task.causal, "bucket_size": task.seq // dist.get_world_size(), "ring_reduce_col": True}
    return (lambda q, k, v: ring_flash_attn(q, k, v, **options)), contiguous(task)


PEERS: dict[str, Callable[[Spec, Task], tuple[Attend, Tensor]]] = {
    "deepspeed": deepspeed_ulysses,
    "ringmaster": ringmaster,
    "ring-attention-pytorch": ring_attention_pytorch,
}

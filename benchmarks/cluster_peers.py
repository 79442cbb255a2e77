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


PEERS: dict[str, Callable[[Spec, Task], tuple[Attend, Tensor]]] = {
    "deepspeed": deepspeed_ulysses,
}

"""The idea of UPipe (Untied Ulysses, arXiv 2602.21196), reimplemented around DeepSpeed's all-to-all.

Ulysses attention is computed for some of the query heads at a time. A head chunk projects its query heads from the
layer's input, computes attention, and adds its part to the module's output. A separate checkpoint per chunk makes
backward do the same. Keys and values are exchanged once for all head chunks, as in the paper with GQA. Each head chunk
takes the same number of query heads from every group that shares a key/value head.

The authors of UPipe save what attention's backward needs, while the checkpoints in this module recompute attention. The
memory of this benchmark is therefore comparable with UPipe's, but not its time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.sequence.layer import _dim_zero_all_to_all
from deepspeed.utils import groups
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb


def use(llama: nn.Module, head_chunks: int, world: int) -> None:
    """Make every attention module of a model compute attention in `head_chunks` chunks.

    Raises ValueError if the heads cannot be divided into that many chunks.
    """
    config = llama.config
    if config.num_key_value_heads % world or (config.num_attention_heads // config.num_key_value_heads) % head_chunks:
        raise ValueError(
            f"head chunks by hand need key/value heads that the {world} ranks divide, each with query heads that the "
            f"head chunks divide; got {config.num_attention_heads}/{config.num_key_value_heads} heads and "
            f"{head_chunks} head chunks"
        )
    for module in llama.modules():
        if isinstance(module, LlamaAttention):
            # (kv heads, head chunks, query heads of a head chunk in a group): rows of q_proj, and columns of o_proj
            axes = {"kv": config.num_key_value_heads, "n": head_chunks, "d": module.head_dim}
            rows = rearrange(module.q_proj.weight.data, "(kv n g d) c -> n (kv g d) c", **axes)
            columns = rearrange(module.o_proj.weight.data, "c (kv n g d) -> n c (kv g d)", **axes)
            module.q_proj, module.o_proj = linears(rows), linears(columns)
            module.forward = functools.partial(chunked_by_heads, module, world)


def linears(weights: Tensor) -> nn.ModuleList:
    """Return a linear layer for each head chunk.

    ZeRO-3 fetches whole modules, and a head chunk needs only its own weights.
    """
    found = nn.ModuleList(nn.Linear(*weights.shape[:0:-1], bias=False) for _ in weights)
    for linear, weight in zip(found, weights, strict=True):
        linear.weight.data.copy_(weight)
    return found


def chunked_by_heads(
    module: Any, world: int, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    """Replace LlamaAttention.forward. `hidden_states` (B, s, hidden) belong to this rank's tokens."""
    dim, x = module.head_dim, hidden_states
    k, v = (rearrange(part(x), "b s (h d) -> b h s d", d=dim) for part in (module.k_proj, module.v_proj))
    k = apply_rotary_pos_emb(k, k, *position_embeddings)[1]
    k, v = inward(k, world), inward(v, world)

    def attend_chunk(index: int, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = rearrange(module.q_proj[index](x), "b s (h d) -> b h s d", d=dim)
        q = inward(apply_rotary_pos_emb(q, q, *position_embeddings)[0], world)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return module.o_proj[index](outward(out, world))

    out = torch.zeros_like(x)
    for index in range(len(module.q_proj)):
        out = out + checkpoint(attend_chunk, index, x, k, v, use_reentrant=False)
    return out, None


def exchanged(x: Tensor) -> Tensor:
    group = groups._get_sequence_parallel_group()  # created by initialize, after the model was patched
    return _dim_zero_all_to_all(group, x.contiguous())


def inward(x: Tensor, world: int) -> Tensor:
    """Exchange (B, all heads, local tokens, D) to (B, local heads, all tokens, D)."""
    x = exchanged(rearrange(x, "b (w h) s d -> w b h s d", w=world))
    return rearrange(x, "w b h s d -> b h (w s) d")


def outward(x: Tensor, world: int) -> Tensor:
    """Exchange (B, local heads, all tokens, D) to (B, local tokens, all heads x D)."""
    x = exchanged(rearrange(x, "b h (w s) d -> w b h s d", w=world))
    return rearrange(x, "w b h s d -> b s (w h d)")

"""A model of FlashAttention 3: its two custom ops with their signatures from November 2025 on, for any device."""

import torch
from torch import Tensor
from torch.library import custom_op

from tests.cuda_masks import flash_3_backward, flash_3_forward
from tests.cuda_models import flash, flash_gradients, launches

aten = torch.ops.aten


def _lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    if cu_seqlens_q is None:
        assert (cu_seqlens_k, max_seqlen_q, max_seqlen_k) == (None, None, None)
        return None, None, q.shape[1], k.shape[1]
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


@custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    lengths = _lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = causal, window_size_left, window_size_right
    out, lse = flash(q, k, v, *lengths, *window, softmax_scale, softcap, flash_3_forward)
    lse.masked_fill_(lse.isposinf(), -float("inf"))  # hopper/softmax.h: 151
    return out, lse, q.new_empty(0), q.new_empty(0)


@custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    launches["deterministic"] += deterministic
    lengths = _lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = is_causal, window_size_left, window_size_right
    softmax_lse = softmax_lse.masked_fill(softmax_lse.isneginf(), 0.0)  # hopper/flash_bwd_preprocess_kernel.h: 228
    found = flash_gradients(
        dout, q, k, v, out, softmax_lse, *lengths, *window, softmax_scale, softcap, flash_3_backward
    )  # fmt: skip
    for x, gradient in zip((dq, dk, dv), found, strict=True):
        assert (x.shape, x.dtype, x.device, x.stride(-1)) == (*(gradient.shape, gradient.dtype, gradient.device), 1)
        aten.copy_.default(x, gradient)  # `copy_` asks a build without CUDA for its driver
    return q.new_empty(0)


_flash_attn_forward.register_fake(_flash_attn_forward._init_fn)
_flash_attn_backward.register_fake(_flash_attn_backward._init_fn)

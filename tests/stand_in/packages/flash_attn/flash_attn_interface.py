from tests.cuda_models import flash, flash_gradients, launches


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    window = causal, window_size_left, window_size_right
    return *flash(q, k, v, None, None, q.shape[1], k.shape[1], *window, softmax_scale, softcap), None, None


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    window = causal, window_size_left, window_size_right
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return *flash(q, k, v, *lengths, *window, softmax_scale, softcap), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, alibi_slopes) == (0.0, None)
    launches["deterministic"] += deterministic
    lengths, window = (None, None, q.shape[1], k.shape[1]), (causal, window_size_left, window_size_right)
    _fill((dq, dk, dv), flash_gradients(dout, q, k, v, out, softmax_lse, *lengths, *window, softmax_scale, softcap))


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert (dropout_p, alibi_slopes) == (0.0, None)
    launches["deterministic"] += deterministic
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = causal, window_size_left, window_size_right
    _fill((dq, dk, dv), flash_gradients(dout, q, k, v, out, softmax_lse, *lengths, *window, softmax_scale, softcap))


def _fill(given, found):
    for x, gradient in zip(given, found, strict=True):
        assert (x.shape, x.dtype, x.device, x.stride(-1)) == (*(gradient.shape, gradient.dtype, gradient.device), 1)
        x.copy_(gradient)

"""Models of CUDA's attention operators, computed densely, on CPUs and in any dtype.

Each has the signature of the operator that it replaces, the same layout and padding of the log-sum-exp, and the same
requirements on its operands. So the wrappers of `ds_seqpar.kernels` run unchanged. What a row sees is computed as in
the operator's C++, separately for forward and backward (`tests/cuda_masks.py`); cuDNN's source is not public. On fake
tensors they check what is visible there, and return results without values.
"""

import contextlib
import itertools
import sys
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ds_seqpar.core.runtime.kernels import register, remove, select
from ds_seqpar.kernels.flash import CudaEfficient, CudaFlash, Cudnn, FlashAttn, FlashAttn3, import_reason
from tests.cuda_masks import (
    BOTTOM_RIGHT,
    TOP_LEFT,
    efficient_backward,
    efficient_forward,
    flash_3_backward,
    flash_3_forward,
    flash_backward,
    flash_forward,
)

launches = Counter()  # calls of each operator, for tests; and backward calls that must be deterministic
STAND_INS = Path(__file__).with_name("stand_in") / "packages"
WIDE = {torch.float64: 1e-12, torch.float32: 1e-5}


class OnCpu:
    """A wrapper for CPUs, with the dtypes in which a model can show that it is exact."""

    def reasons(self, spec):
        return []


class FlashModel(OnCpu, CudaFlash):
    name = "cuda_flash_model"
    tolerance = CudaFlash.tolerance | WIDE
    multiples = dict.fromkeys(tolerance, 8)


class EfficientModel(OnCpu, CudaEfficient):
    name = "cuda_efficient_model"
    tolerance = CudaEfficient.tolerance | WIDE
    multiples = CudaEfficient.multiples | {torch.float64: 4}


class CudnnModel(OnCpu, Cudnn):
    name = "cudnn_model"
    tolerance = Cudnn.tolerance | WIDE
    multiples = dict.fromkeys(tolerance, 8)


class FlashAttnModel(OnCpu, FlashAttn):
    name = "flash_attn_model"
    tolerance = FlashAttn.tolerance | WIDE
    multiples = dict.fromkeys(tolerance, 8)


class FlashAttn3Model(OnCpu, FlashAttn3):
    name = "flash_attn_3_model"
    tolerance = FlashAttn3.tolerance | WIDE
    multiples = dict.fromkeys(tolerance, 8)


MODELS = (FlashModel, EfficientModel, CudnnModel, FlashAttnModel, FlashAttn3Model)


@contextlib.contextmanager
def models():
    """Context manager in which the models can be chosen by name, and the operators that they call exist on CPUs."""
    library, kernels = torch.library.Library("aten", "IMPL"), [model() for model in MODELS]
    for name, function in OPERATORS.items():
        library.impl(name, function, "CPU")
    with flash_attn():
        for kernel in kernels:
            register(kernel)
        yield {kernel.name: kernel for kernel in kernels}
        for kernel in kernels:
            remove(kernel.name)
    library._destroy()


@contextlib.contextmanager
def flash_attn():
    """Makes the models of flash-attention's packages discoverable like installed packages."""
    with packages(STAND_INS):
        yield


@contextlib.contextmanager
def packages(folder):
    """Makes the packages in a folder stand for flash-attention's."""
    sys.path.insert(0, str(folder))
    _forget_packages()
    yield
    sys.path.remove(str(folder))
    _forget_packages()


def _forget_packages():
    select.cache_clear()
    import_reason.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]


# ---- one block


def _scores(q, k, scale, softcap):
    """(H, m, n) in fp64, of q (m, H, D) and k (n, Hkv, D)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q.double(), k.double()) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _forward(q, k, v, sees, scale, softcap):
    """out (m, H, D) and lse (H, m); 0 and inf for a row without a key."""
    scores = _scores(q, k, scale, softcap).masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(-1)
    lse = torch.where(lse.isneginf(), torch.inf, lse)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).double()
    return torch.einsum("hmn,nhd->mhd", torch.exp(scores - lse[..., None]), v), lse


def _backward(do, q, k, v, out, lse, sees, scale, softcap):
    group = q.shape[1] // k.shape[1]
    do, out, wide = do.double(), out.double(), v.repeat_interleave(group, dim=1).double()
    scores = _scores(q, k, scale, softcap)
    p = torch.exp(scores - lse.double()[..., None]).masked_fill(~sees, 0.0)
    delta = (do * out).sum(-1).T
    ds = p * (torch.einsum("mhd,nhd->hmn", do, wide) - delta[..., None]) * scale
    if softcap:
        ds = ds * (1 - (scores / softcap).square())
    dq = torch.einsum("hmn,nhd->mhd", ds, k.repeat_interleave(group, dim=1).double())
    dk, dv = torch.einsum("hmn,mhd->nhd", ds, q.double()), torch.einsum("hmn,mhd->nhd", p, do)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


# ---- flash attention: PyTorch's and the package's


def flash(q, k, v, cu_q, cu_k, max_q, max_k, causal, left, right, scale, softcap=0.0, mask=flash_forward):
    """(out, lse); lse is (B, H, m), or (H, T) for several blocks. mask: a mask from `cuda_masks`."""
    launches["forward"] += 1
    _check_flash(q, k, v, (), mask is flash_3_forward)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = _lse(q, (q.shape[1], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1]))
    for at, rows, columns in _spans(q, k, cu_q, cu_k, max_q, max_k):
        i, j = (rows, columns) if at is None else (at, at)
        sees = mask(rows.stop - rows.start, columns.stop - columns.start, max_q, max_k, causal, left, right)
        found = _forward(q[i], k[j], v[j], sees, scale, softcap)
        out[i].copy_(found[0])
        (lse[:, rows] if at is None else lse[at]).copy_(found[1])
    return out, lse


def flash_gradients(
    do, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, left, right, scale, softcap=0.0, mask=flash_backward
):
    launches["backward"] += 1
    _check_flash(q, k, v, (out, do), mask is flash_3_backward)
    assert do.shape == out.shape == (*q.shape[:-1], v.shape[-1])
    like = _lse(q, (q.shape[1], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1]))
    assert (lse.shape, lse.dtype, lse.device) == (like.shape, like.dtype, like.device)
    assert lse.is_contiguous()
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for at, rows, columns in _spans(q, k, cu_q, cu_k, max_q, max_k):
        i, j = (rows, columns) if at is None else (at, at)
        sees = mask(rows.stop - rows.start, columns.stop - columns.start, max_q, max_k, causal, left, right)
        own = lse[:, rows] if at is None else lse[at]
        found = _backward(do[i], q[i], k[j], v[j], out[i], own, sees, scale, softcap)
        for x, side, part in zip(grads, (i, j, j), found, strict=True):
            x[side].copy_(part)
    return grads


def _spans(q, k, cu_q, cu_k, max_q, max_k):
    """(index in the batch, rows, columns) of each block; the index is None if several are in one tensor."""
    if cu_q is None:
        assert q.dim() == k.dim() == 4
        assert q.shape[0] == k.shape[0]
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        return [(at, slice(0, max_q), slice(0, max_k)) for at in _sequences(q)]
    assert q.dim() == k.dim() == 3
    for cu in (cu_q, cu_k):
        assert (cu.dtype, cu.device, cu.dim()) == (torch.int32, q.device, 1)
        assert cu.is_contiguous()
    assert cu_q.shape == cu_k.shape
    if isinstance(q, FakeTensor):
        return []
    rows, columns = ([slice(*pair) for pair in itertools.pairwise(cu.tolist())] for cu in (cu_q, cu_k))
    assert (rows[0].start, columns[0].start, rows[-1].stop, columns[-1].stop) == (0, 0, q.shape[0], k.shape[0])
    for spans, most in ((rows, max_q), (columns, max_k)):
        assert all(0 <= span.stop - span.start <= most for span in spans)
    assert max_q > 1  # flash-attn#1537: blocks of one row, and of none
    return [(None, *pair) for pair in zip(rows, columns, strict=True)]


def _check_flash(q, k, v, of_v_width, may_differ):
    """hopper/flash_api.cpp: 782 to 787 for the widths of v."""
    if not may_differ or q.shape[-1] == v.shape[-1]:
        _check(q, (q, *of_v_width, k, v), multiple=8)
        return
    assert (128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128) or (q.shape[-1] <= 64 and v.shape[-1] <= 512)
    _check(q, (q, k), multiple=8)
    _check((*of_v_width, v)[0], (*of_v_width, v), multiple=8)


def _lse(q, shape):
    return q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check(q, tensors, multiple):
    heads = q.shape[-2], tensors[-1].shape[-2]
    assert heads[0] % heads[1] == 0
    for x in tensors:
        assert (x.dtype, x.device, x.shape[-1], x.stride(-1)) == (q.dtype, q.device, q.shape[-1], 1)
        assert x.numel() > 0
    assert q.shape[-1] % multiple == 0


def _flash_operator(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert query.shape[-1] <= 256
    assert (dropout_p, return_debug_mask) == (0.0, False)
    window = is_causal, *(-1 if side is None else side for side in (window_size_left, window_size_right))
    found = flash(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, *window, scale)
    return *found, *(query.new_empty(0, dtype=torch.int64) for _ in range(2)), query.new_empty(0)


def _flash_operator_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout_p == 0.0
    window = is_causal, *(-1 if side is None else side for side in (window_size_left, window_size_right))
    lengths = cum_seq_q, cum_seq_k, max_q, max_k
    return flash_gradients(grad_out, query, key, value, out, logsumexp, *lengths, *window, scale)


# ---- memory-efficient attention


def _efficient(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    launches["forward"] += 1
    assert compute_log_sumexp
    assert (bias, cu_seqlens_q, cu_seqlens_k, dropout_p) == (None, None, None, 0.0)
    sees = _efficient_seen(efficient_forward, query, key, custom_mask_type, window_size)
    _check_efficient(query, (query, key, value))
    rows, limit = query.shape[1], 2**31
    # kernel_forward.h: 721 and 765, iter_key_start * p.k_strideM
    assert all((x.shape[1] - 1) * x.stride(1) < limit for x in (key, value))
    out, lse = torch.empty_like(query), _lse(query, (query.shape[0], query.shape[2], -(-rows // 32) * 32))
    lse.fill_(torch.inf)
    for at in _sequences(query):
        found = _forward(query[at], key[at], value[at], sees, scale, 0.0)
        out[at], lse[at, :, :rows] = found
    random = (torch.empty((), dtype=torch.int64) for _ in range(2))
    return out, lse, *random, rows, key.shape[1]


def _efficient_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp,
    dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None, num_splits_key=None,
    window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    launches["backward"] += 1
    assert (bias, cu_seqlens_q, cu_seqlens_k, dropout_p) == (None, None, None, 0.0)
    assert (max_seqlen_q, max_seqlen_k) == (query.shape[1], key.shape[1])
    found = _efficient_seen(efficient_backward, query, key, custom_mask_type, window_size)
    sees, written = found if found is not None else (None, None)
    _check_efficient(query, (grad_out_, query, key, value, out))
    out = _as_read(out, query.dtype)
    rows = query.shape[1]
    assert logsumexp.shape == (query.shape[0], query.shape[2], -(-rows // 32) * 32)
    assert logsumexp.is_contiguous()
    grads = tuple(torch.empty_like(x) for x in (query, key, value))
    for at in _sequences(query):
        assert logsumexp[at, :, rows:].isposinf().all()
        inputs = (x[at] for x in (grad_out_, query, key, value, out))
        found = _backward(*inputs, logsumexp[at, :, :rows], sees, scale, 0.0)
        for x, part in zip(grads, found, strict=True):
            x[at] = part
        grads[0][at, ~written] = torch.nan
    return *grads, torch.empty(())


def _as_read(out, dtype):
    """kernel_backward.h: 272 and 684: the kernel computes delta in half precision and assumes contiguous rows. In fp32
    attention_backward.cu computes it, using strides."""
    if dtype.itemsize > 2 or out.is_contiguous():
        return out
    assert not isinstance(out, FakeTensor)  # it has no values that could be wrong
    return out.as_strided(out.shape, (out.stride(0), out.shape[2] * out.shape[3], *out.stride()[2:]))


def _sequences(x):
    return range(0 if isinstance(x, FakeTensor) else x.shape[0])


def _efficient_seen(mask, query, key, kind, window):
    """A row sees `window` keys."""
    rows, columns = query.shape[1], key.shape[1]
    assert kind in range(BOTTOM_RIGHT + 1)
    assert kind != TOP_LEFT or rows == columns
    assert kind == 0 or rows <= columns  # the kernel compares their unsigned difference
    assert window is None or (kind and window > 0)
    return None if isinstance(query, FakeTensor) else mask(rows, columns, kind, window or 0)


def _check_efficient(query, tensors):
    _check(query, tensors, multiple=4 if query.dtype in (torch.float32, torch.float64) else 8)
    assert {x.shape[2] for x in tensors} == {query.shape[2]}


# ---- cuDNN's


TRAILING = True  # whether its lse is (B, H, m, 1): versions differ


def _cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None,
):  # fmt: skip
    launches["forward"] += 1
    assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    q, k, v, sees = _of_cudnn(is_causal, query, key, value)
    out, lse = torch.empty_like(q), _lse(q, query.shape[:3])
    for at in _sequences(q):
        out[at], lse[at] = _forward(q[at], k[at], v[at], sees, scale, 0.0)
    random = (torch.empty((), dtype=torch.int64) for _ in range(2))
    lse = lse.unsqueeze(-1) if TRAILING else lse
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *random, None


def _cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
    max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    launches["backward"] += 1
    assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0.0)
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert all(n == 1 or a == b for n, a, b in zip(out.shape, grad_out.stride(), out.stride(), strict=True))
    q, k, v, sees, do, out = _of_cudnn(is_causal, query, key, value, grad_out, out)
    assert logsumexp.shape == (*query.shape[:3], 1)[: 3 + TRAILING]
    assert logsumexp.is_contiguous()
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    for at in _sequences(q):
        own = logsumexp[at].view(query.shape[1:3])
        for x, part in zip(grads, _backward(do[at], q[at], k[at], v[at], out[at], own, sees, scale, 0.0), strict=True):
            x[at] = part
    return tuple(x.transpose(1, 2) for x in grads)


def _of_cudnn(causal, *tensors):
    """The operands in shape (B, m, H, D), with what is seen after the first three: causal from the upper left
    corner."""
    q, k, v, *more = (x.transpose(1, 2) for x in tensors)
    _check(q, (q, k, v, *more), multiple=8)
    rows, columns = q.shape[1], k.shape[1]
    assert q.shape[3] <= 128
    assert min(rows, columns) > 1
    sees = torch.ones(rows, columns, dtype=torch.bool, device="cpu")
    return q, k, v, sees.tril() if causal else sees, *more


OPERATORS = {
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_flash_attention_forward": _flash_operator,
    "_flash_attention_backward": _flash_operator_backward,
    "_efficient_attention_forward": _efficient,
    "_efficient_attention_backward": _efficient_backward,
}

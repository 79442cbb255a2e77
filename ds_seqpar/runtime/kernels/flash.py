"""Flash attention: PyTorch's for CPUs, PyTorch's for CUDA, and the flash-attn package's.

That for CPUs takes fp64, fp32, bf16 and fp16, GQA natively, and aligns a causal mask top-left; a band is a mask on a
block of few rows, of which the hidden part is computed too. Both for CUDA align a causal mask lower-right.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from packaging.version import Version
from torch import Tensor

from ...compiler.cuts import Takes
from .reference import BlockSpec


class CpuFlash:
    name = "cpu_flash"
    takes = Takes(band=512, rows=192)  # of wider bands squares cost less; fewer than 192 rows are slow
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = []
        if spec.device != "cpu":
            found.append(f"runs on the CPU, not on {spec.device}")
        if spec.dtype not in self.tolerance:
            found.append(f"takes floating point, not {spec.dtype}")
        return found

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, width: int = 0
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, attn_mask=_band(q, k, width), scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        width: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        operands = (x.transpose(1, 2) for x in (do, q, k, v, out, lse))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, 0.0, causal, attn_mask=_band(q, k, width), scale=scale
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _band(q: Tensor, k: Tensor, width: int) -> Tensor | None:
    """What is added to the scores of a block: 0 where a row sees a column, and -inf elsewhere."""
    if not width:
        return None
    above = torch.full((q.shape[1], k.shape[1]), float("-inf"), dtype=q.dtype).triu_(width)
    return above.add_(torch.full_like(above, float("-inf")).tril_(-1))


# ---- CUDA


def _cuda_reasons(spec: BlockSpec) -> list[str]:
    found = []
    if spec.device != "cuda":
        found.append(f"runs on CUDA, not on {spec.device}")
    if spec.dtype not in (torch.bfloat16, torch.float16):
        found.append(f"takes bf16 and fp16, not {spec.dtype}")
    if spec.device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        found.append("needs a GPU of compute capability 8.0 (Ampere) or later")
    if spec.head_dim > 256 or spec.head_dim % 8:
        found.append(f"takes head_dim up to 256 in multiples of 8, not {spec.head_dim}")
    return found


class CudaFlash:
    name = "cuda_flash"
    takes = Takes(square=True)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "nowhere yet (no GPU was at hand): tests/gpu waits for one"

    def reasons(self, spec: BlockSpec) -> list[str]:
        return _cuda_reasons(spec)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out, lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state: read only where dropout > 0
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            do, q, k, v, out, lse.transpose(1, 2).contiguous(), None, None, q.shape[1], k.shape[1],
            0.0, causal, unused, unused, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn:
    name = "flash_attn"
    takes = Takes(square=True)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "nowhere yet (no GPU was at hand): tests/gpu waits for one"

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap

    def capped(self, softcap: float) -> FlashAttn:
        return FlashAttn(softcap)

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = _cuda_reasons(spec)
        version = _version("flash-attn") if importlib.util.find_spec("flash_attn") else None
        if version is None:  # a folder of that name is none, either
            found.append("needs the flash-attn package (pip install 'ds_seqpar[flash]')")
        elif version < Version("2.7"):
            found.append("needs flash-attn 2.7 or later")
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(q, k, v, causal=causal, return_softmax=False, **self.options(scale))
        return out, lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lse = lse.transpose(1, 2).contiguous()
        _flash_attn_backward(do, q, k, v, out, lse, *grads, causal=causal, deterministic=False, **self.options(scale))
        return grads

    def options(self, scale: float) -> dict:
        return {
            "dropout_p": 0.0,
            "softmax_scale": scale,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": self.softcap,
            "alibi_slopes": None,
        }


def _version(package: str) -> Version | None:
    """Of an installed package; None where it is not."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None

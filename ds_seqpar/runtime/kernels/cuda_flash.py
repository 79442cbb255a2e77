"""Flash attention for CUDA: inside PyTorch, and the flash-attn package. Both align a causal mask lower-right."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from packaging.version import Version
from torch import Tensor

from ...compiler.cuts import Takes
from .base import BlockSpec


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

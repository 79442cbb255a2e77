"""PyTorch's flash attention for CPUs: fp64, fp32, bf16, fp16; GQA native; a causal mask is aligned top-left."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import BlockSpec


class CpuFlash:
    name = "cpu_flash"
    square = False
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = []
        if spec.device != "cpu":
            found.append(f"runs on the CPU, not on {spec.device}")
        if spec.dtype not in self.tolerance:
            found.append(f"takes floating point, not {spec.dtype}")
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (do, q, k, v, out, lse)), 0.0, causal, scale=scale
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

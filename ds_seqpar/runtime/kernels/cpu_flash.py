"""PyTorch's flash attention for CPUs: fp64, fp32, bf16, fp16; GQA native; a causal mask is aligned top-left.

A band is a mask on a block of few rows, of which the hidden part is computed too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiler.cuts import Takes
from .base import BlockSpec


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

"""Online-softmax merge of partial attention results over disjoint key blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges (new_out, new_lse) into (out, lse), in place.

    out (B, S, H, D) and lse (B, S, H): fp32, or fp64 for fp64 attention; new_out in any dtype. A row that neither has
    touched (lse -inf on both sides) stays out 0, lse -inf; the usual sigmoid form gives NaN there.
    """
    total = torch.logaddexp(lse, new_lse)
    finite = torch.where(total.isneginf(), 0.0, total)  # exp(-inf - 0) = 0, where -inf - -inf would be NaN
    out.mul_(torch.exp(lse - finite)[..., None])
    out.add_(new_out * torch.exp(new_lse - finite)[..., None])
    lse.copy_(total)

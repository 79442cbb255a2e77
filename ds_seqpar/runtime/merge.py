"""Online-softmax merge of partial attention results over disjoint key blocks, in little memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..compiler.tiles import PIECE


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges (new_out, new_lse) into (out, lse), in place.

    out (B, S, H, D) and lse (B, S, H): fp32, or fp64 for fp64 attention; new_out in any dtype. A row that neither has
    touched (lse -inf on both sides) stays out 0, lse -inf; the usual sigmoid form gives NaN there. Further dimensions
    before the last of out are fine.
    """
    in_pieces(_merge_, out, new_out, lse, new_lse)


def _merge_(out: Tensor, new_out: Tensor, lse: Tensor, new_lse: Tensor) -> None:
    total = torch.logaddexp(lse, new_lse)
    finite = torch.where(total.isneginf(), 0.0, total)  # exp(-inf - 0) = 0, where -inf - -inf would be NaN
    out.mul_(torch.exp(lse - finite).unsqueeze(-1))
    out.addcmul_(new_out.to(out.dtype), torch.exp(new_lse - finite).unsqueeze(-1))
    lse.copy_(total)


def in_pieces(function: Callable[..., object], *tensors: Tensor, limit: int | None = None) -> None:
    """Applies an elementwise function that works in place to pieces of the tensors, of which the first is the largest:
    its temporaries, and torch's own where dtypes differ, are then a 16th of that at most. There are never more than 32
    pieces, for devices where a call costs more than its elements. The first tensor's last dimension stays whole."""
    x = tensors[0]
    limit = limit or max(PIECE, x.numel() // 16)
    dim = max(range(x.dim() - 1), key=lambda dim: x.shape[dim])
    if x.numel() <= limit or x.shape[dim] == 1:
        function(*tensors)
        return
    half = x.shape[dim] // 2
    in_pieces(function, *(y.narrow(dim, 0, half) for y in tensors), limit=limit)
    in_pieces(function, *(y.narrow(dim, half, y.shape[dim] - half) for y in tensors), limit=limit)

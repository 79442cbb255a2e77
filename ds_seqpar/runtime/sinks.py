"""Attention sinks (gpt-oss): a learned score a head that takes its share of every row's weights, and brings nothing.

A row's softmax has one more term, exp(sink), whose value is 0. That is merged into (out, lse) once, when all partial
results are: what backward then reads as the row's out and lse is right for every key as it stands.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """In place. out (B, S, H, D) in any dtype, lse (B, S, H) wide, sinks (H,). A row that saw no key stays 0."""
    sinks = sinks.to(lse.dtype)
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, sinks))


def gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (H,) of the sinks, of these rows, given what `merge_` left: their weight exp(sink - lse) times
    (0 - delta), as that of any key of value 0. delta (B, S, H): rowsum(do * out)."""
    weights = torch.exp(sinks.to(lse.dtype) - lse)
    return -(weights * delta).sum((0, 1)).to(sinks.dtype)

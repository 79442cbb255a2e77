"""Attention in torch's own operations, a few query rows at a time: for what no fast kernel does, such as a softcap."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .reference import Reference, attend, gradients

SCORES = 1 << 22  # of a piece at most, where a single row has no more: 16 MiB in fp32


class Chunked(Reference):
    """The reference's arithmetic without its dense matrix: its temporaries do not grow with the product of lengths."""

    name = "chunked"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), []
        for rows, seen in _pieces(q, k, causal):
            part, part_lse = attend(q[:, rows], k[:, seen], v[:, seen], causal, scale, self.softcap, rows.start)
            out[:, rows] = part
            lse.append(part_lse)
        return out, torch.cat(lse, dim=1)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for rows, seen in _pieces(q, k, causal):
            given = do[:, rows], q[:, rows], k[:, seen], v[:, seen], out[:, rows], lse[:, rows]
            dq[:, rows], part_dk, part_dv = gradients(*given, causal, scale, self.softcap, rows.start)
            dk[:, seen] += part_dk
            dv[:, seen] += part_dv
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pieces(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(rows, the columns that they see), all rows."""
    rows, columns = q.shape[1], k.shape[1]
    size = max(1, SCORES // (q.shape[0] * q.shape[2] * columns))
    for start in range(0, rows, size):
        end = min(start + size, rows)
        yield slice(start, end), slice(0, min(end, columns) if causal else columns)

"""What one rank holds and computes while a program is walked: operands, accumulators, and the two directions."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .kernels import Kernel
from .layout import Runs, Tile, join, visible
from .merge import merge_
from .plan import Key, Unit

Tensors = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What does not change during a walk. blocks: the runs of every inner rank's tokens."""

    rank: int
    blocks: tuple[Runs, ...]
    causal: bool
    scale: float
    kernel: Kernel

    def runs(self, key: Key) -> Runs:
        return join(self.blocks[block] for block in key)

    def tokens(self, key: Key) -> int:
        return sum(run.length for run in self.runs(key))

    def tiles(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        return visible(self.runs(q), self.runs(kv), self.causal, self.kernel.square)

    def rows(self, whole: Key, part: Key) -> Tensor | slice:
        """Where the tokens of `part` stand among those of `whole` (which are kept in position order)."""
        if whole == part:
            return slice(None)
        wanted, rows, row = set(self.runs(part)), [], 0
        for run in self.runs(whole):
            if run in wanted:
                rows.append(torch.arange(row, row + run.length))
            row += run.length
        return torch.cat(rows)


class Work:
    """Operands and accumulators of one rank in one direction. Every tensor has its tokens on dim 1."""

    def __init__(self, problem: Problem, operands: dict[Unit, Tensors]) -> None:
        self.problem = problem
        self.operands = operands
        self.accumulators: dict[Unit, Tensors] = {}
        q = operands["q", (problem.rank,)][0]
        self.device = q.device
        self.wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def compute(self, q: Key, kv: Key) -> None:
        raise NotImplementedError

    def merge(self, unit: Unit, tensors: Tensors) -> None:
        """Into the accumulator of `unit`, which it becomes where there is none."""
        raise NotImplementedError

    def take(self, unit: Unit) -> Tensors:
        """Gives the accumulator away, in the dtypes that `empty` makes buffers of."""
        like = self.partial(unit[0])
        return tuple(x.to(model.dtype) for x, model in zip(self.accumulators.pop(unit), like, strict=True))

    def empty(self, kind: str, key: Key) -> Tensors:
        """Buffers for an operand or accumulator of that kind on its way here."""
        like = self.operands[kind, (self.problem.rank,)] if kind in ("q", "kv") else self.partial(kind)
        tokens = self.problem.tokens(key)
        return tuple(torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=self.device) for x in like)

    def partial(self, kind: str) -> Tensors:
        """Tensors with the shape and dtype of an accumulator of this rank's own block (on the meta device)."""
        raise NotImplementedError

    def _like(self, unit: Unit, tokens_only: bool = False) -> Tensor:
        """An accumulator's stand-in: as the operand, wide."""
        x = self.operands[unit][0]
        return torch.empty(x.shape[:-1] if tokens_only else x.shape, dtype=self.wide, device="meta")


class Forward(Work):
    """Operands: q (q,) with q (B, n, Hq, D); kv (kv,) with kv (B, n, 2, Hkv, D). Accumulator: out (out, lse)."""

    def compute(self, q: Key, kv: Key) -> None:
        (queries,), (pair,) = self.operands["q", q], self.operands["kv", kv]
        tiles = self.problem.tiles(q, kv)
        if not tiles:  # a plan may ask for it all the same, and send the result
            self._accumulator(q)
        for tile in tiles:
            rows, cols = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            k, v = pair[:, cols].unbind(2)
            part = self.problem.kernel.forward(queries[:, rows], k, v, tile.causal, self.problem.scale)
            if ("out", q) not in self.accumulators and part[0].shape == queries.shape:
                self.accumulators["out", q] = part
                continue
            out, lse = self._accumulator(q)
            merge_(out[:, rows], lse[:, rows], *part)

    def _accumulator(self, q: Key) -> Tensors:
        """The accumulator in the wide dtype: a first result stays as the kernel gave it until a second one comes."""
        found = self.accumulators.get(("out", q))
        if found is None:
            (queries,) = self.operands["q", q]
            out = torch.zeros_like(queries, dtype=self.wide)
            found = out, torch.full(out.shape[:-1], float("-inf"), dtype=self.wide, device=out.device)
        self.accumulators["out", q] = found[0].to(self.wide), found[1]
        return self.accumulators["out", q]

    def merge(self, unit: Unit, tensors: Tensors) -> None:
        if unit not in self.accumulators:
            self.accumulators[unit] = tensors
        else:
            merge_(*self._accumulator(unit[1]), *tensors)

    def partial(self, kind: str) -> Tensors:
        own = "q", (self.problem.rank,)
        return self._like(own), self._like(own, tokens_only=True)

    def result(self) -> Tensors:
        """(out in q's dtype, lse) of this rank's own queries."""
        out, lse = self._accumulator((self.problem.rank,))
        (q,) = self.operands["q", (self.problem.rank,)]
        return out.to(q.dtype), lse


class Backward(Work):
    """Operands: q (q, do, out, lse); kv (kv,). Accumulators: dq (dq,), dkv (dkv,), both wide."""

    def compute(self, q: Key, kv: Key) -> None:
        (pair,) = self.operands["kv", kv]
        (dq,), (dkv,) = self._accumulator("dq", q), self._accumulator("dkv", kv)
        for tile in self.problem.tiles(q, kv):
            rows, cols = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            queries, do, out, lse = (x[:, rows] for x in self.operands["q", q])
            k, v = pair[:, cols].unbind(2)
            grads = self.problem.kernel.backward(do, queries, k, v, out, lse, tile.causal, self.problem.scale)
            dq[:, rows] += grads[0]
            dkv[:, cols, 0] += grads[1]
            dkv[:, cols, 1] += grads[2]

    def _accumulator(self, kind: str, key: Key) -> Tensors:
        if (kind, key) not in self.accumulators:
            operand = self.operands["kv" if kind == "dkv" else "q", key][0]
            self.accumulators[kind, key] = (torch.zeros_like(operand, dtype=self.wide),)
        return self.accumulators[kind, key]

    def merge(self, unit: Unit, tensors: Tensors) -> None:
        if unit not in self.accumulators:
            self.accumulators[unit] = tensors
        else:
            self.accumulators[unit][0].add_(tensors[0])

    def partial(self, kind: str) -> Tensors:
        return (self._like(("kv" if kind == "dkv" else "q", (self.problem.rank,))),)

    def result(self) -> Tensors:
        """(dq, dkv) of this rank's own block, in the operands' dtype."""
        own = (self.problem.rank,)
        dq, dkv = self._accumulator("dq", own)[0], self._accumulator("dkv", own)[0]
        return dq.to(self.operands["q", own][0].dtype), dkv.to(self.operands["kv", own][0].dtype)

"""What one rank holds and computes while a program is walked: operands, accumulators, and the two directions."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..planning.layout import Runs, Tile, join, visible
from ..planning.plan import Key, Unit
from .kernels import Kernel
from .merge import merge_

Tensors = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What does not change during a walk. blocks: the runs of every inner rank's tokens; travel: the dtype of partial
    outputs and gradients on their way."""

    rank: int
    blocks: tuple[Runs, ...]
    causal: bool
    scale: float
    kernel: Kernel
    travel: torch.dtype

    def runs(self, key: Key) -> Runs:
        return join(self.blocks[block] for block in key)

    def tokens(self, key: Key) -> int:
        return sum(run.length for run in self.runs(key))

    def tiles(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        return visible(self.runs(q), self.runs(kv), self.causal, self.kernel.square)

    def rows(self, whole: Key, part: Key) -> list[slice]:
        """Where the tokens of `part`, in their order, stand among those of `whole`: both are in position order."""
        wanted, rows, row = set(self.runs(part)), [], 0
        for run in self.runs(whole):
            if run in wanted:
                rows.append(slice(row, row + run.length))
            row += run.length
        return rows


class Work:
    """Operands and accumulators of one rank in one direction. Every tensor has its tokens on dim 1."""

    def __init__(self, problem: Problem, q: Tensors, kv: Tensors) -> None:
        self.problem = problem
        self.own: Key = (problem.rank,)
        self.operands: dict[Unit, Tensors] = {("q", self.own): q, ("kv", self.own): kv}
        self.accumulators: dict[Unit, Tensors] = {}
        self.device, self.wide = q[0].device, wide(q[0].dtype)

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
        like = self.operands[kind, self.own] if kind in ("q", "kv") else self.partial(kind)
        tokens = self.problem.tokens(key)
        return tuple(torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=self.device) for x in like)

    def partial(self, kind: str) -> Tensors:
        """Tensors with the shape and dtype of an accumulator of this rank's own block (on the meta device)."""
        raise NotImplementedError

    def release(self, unit: Unit) -> None:
        """Frees an operand that no later step uses; the own blocks are the caller's anyway."""
        if unit[1] != self.own:
            del self.operands[unit]


class Forward(Work):
    """Operands: q (q,) with q (B, n, Hq, D); kv (kv,) with kv (B, n, 2, Hkv, D). Accumulator: out (out, lse)."""

    def __init__(self, problem: Problem, q: Tensor, kv: Tensor) -> None:
        super().__init__(problem, (q,), (kv,))

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
            out = queries.new_zeros(queries.shape, dtype=self.wide)
            found = out, torch.full(out.shape[:-1], float("-inf"), dtype=self.wide, device=out.device)
        self.accumulators["out", q] = found[0].to(self.wide), found[1]
        return self.accumulators["out", q]

    def merge(self, unit: Unit, tensors: Tensors) -> None:
        if unit not in self.accumulators:
            self.accumulators[unit] = tensors
        else:
            out, lse = tensors
            merge_(*self._accumulator(unit[1]), out, lse)

    def partial(self, kind: str) -> Tensors:
        (q,) = self.operands["q", self.own]
        out = torch.empty(q.shape, dtype=self.problem.travel, device="meta")
        return out, torch.empty(q.shape[:-1], dtype=self.wide, device="meta")

    def result(self) -> Tensors:
        """(out in q's dtype, lse) of this rank's own queries."""
        out, lse = self._accumulator(self.own)
        (q,) = self.operands["q", self.own]
        return out.to(q.dtype).contiguous(), lse.contiguous()


class Backward(Work):
    """Operands: q (q, do, lse), and delta if it travels; kv (kv,). Accumulators: dq (dq,), dkv (dkv,).

    A query block that travels brings delta = rowsum(do * out), a D-th of out's size (BurstAttention, section 3.1); the
    kernels want out, so a visitor's is made again from it. At home the true one is used.
    """

    def __init__(
        self, problem: Problem, q: Tensor, kv: Tensor, do: Tensor, out: Tensor, lse: Tensor, q_travels: bool = True
    ) -> None:
        delta = ((do.to(wide(q.dtype)) * out).sum(-1),) if q_travels else ()
        super().__init__(problem, (q, do, lse, *delta), (kv,))
        self.outs: dict[Key, Tensor] = {self.own: out}

    def out(self, key: Key) -> Tensor:
        if key not in self.outs:
            _, do, _, delta = self.operands["q", key]
            self.outs[key] = project(do, delta)
        return self.outs[key]

    def release(self, unit: Unit) -> None:
        super().release(unit)
        if unit[0] == "q" and unit[1] != self.own:
            self.outs.pop(unit[1], None)

    def compute(self, q: Key, kv: Key) -> None:
        (pair,) = self.operands["kv", kv]
        (dq,), (dkv,) = self._accumulator("dq", q), self._accumulator("dkv", kv)
        queries, do, lse = self.operands["q", q][:3]
        out = self.out(q)
        for tile in self.problem.tiles(q, kv):
            rows, cols = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            k, v = pair[:, cols].unbind(2)
            mine = (do[:, rows], queries[:, rows], k, v, out[:, rows], lse[:, rows])
            grads = self.problem.kernel.backward(*mine, tile.causal, self.problem.scale)
            dq[:, rows] += grads[0]
            dkv[:, cols, 0] += grads[1]
            dkv[:, cols, 1] += grads[2]

    def _accumulator(self, kind: str, key: Key) -> Tensors:
        if (kind, key) not in self.accumulators:
            operand = self.operands["kv" if kind == "dkv" else "q", key][0]
            self.accumulators[kind, key] = (operand.new_zeros(operand.shape, dtype=self.wide),)
        (found,) = self.accumulators[kind, key]
        self.accumulators[kind, key] = (found.to(self.wide),)
        return self.accumulators[kind, key]

    def merge(self, unit: Unit, tensors: Tensors) -> None:
        if unit not in self.accumulators:
            self.accumulators[unit] = tensors
        else:
            self._accumulator(*unit)[0].add_(tensors[0])

    def partial(self, kind: str) -> Tensors:
        operand = self.operands["kv" if kind == "dkv" else "q", self.own][0]
        return (torch.empty(operand.shape, dtype=self.problem.travel, device="meta"),)

    def result(self) -> Tensors:
        """(dq, dkv) of this rank's own block, in the operands' dtype."""
        dq, dkv = self._accumulator("dq", self.own)[0], self._accumulator("dkv", self.own)[0]
        return dq.to(self.operands["q", self.own][0].dtype), dkv.to(self.operands["kv", self.own][0].dtype)


def project(do: Tensor, delta: Tensor) -> Tensor:
    """An output whose rowsum with do is delta: do * delta / |do|^2, and 0 where do is 0.

    It is all that a backward kernel reads of out. do is divided by its row's maximum first: |do|^2 underflows in fp32.
    do (B, n, H, D), delta (B, n, H) wide; returns do's dtype.
    """
    top = do.abs().amax(-1, keepdim=True).to(delta.dtype)
    unit = do / torch.where(top > 0, top, 1.0)
    square = unit.square().sum(-1, keepdim=True)
    length = torch.where(top > 0, delta[..., None] / top / torch.where(square > 0, square, 1.0), 0.0)
    return (unit * length).to(do.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What results are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def travel_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What partial outputs and gradients travel in: the setting, where "fp32" means fp32 or wider."""
    return {"fp32": wide(dtype), "bf16": torch.bfloat16}[name]


def bytes_per_token(direction: str, q: Tensor, kv: Tensor, travel: torch.dtype) -> dict[str, int]:
    """Bytes on the wire for one token of each kind, for q (B, n, Hq, D) and kv (B, n, 2, Hkv, D)."""
    heads, row = q.shape[2], q.shape[3] * q.shape[2]
    lse, pair = heads * wide(q.dtype).itemsize, 2 * kv.shape[3] * kv.shape[4]
    if direction == "forward":
        return {"q": row * q.element_size(), "kv": pair * kv.element_size(), "out": row * travel.itemsize + lse}
    return {
        "q": 2 * (row * q.element_size() + lse),
        "kv": pair * kv.element_size(),
        "dq": row * travel.itemsize,
        "dkv": pair * travel.itemsize,
    }

"""Attention whose derivative is its own: in stages, some heads at a time, and with results that a checkpoint keeps.

Backward needs the inner ranks' q, k, v and lse, and delta = rowsum(do * out) (FlashAttention-2, algorithm 2), which a
rank's own out gives: what Ulysses' members computed of it is not kept beside it. A checkpoint keeps the inner q, k and
v, so that nothing is sent twice. Stages alone send theirs again, since what they are for is that the inner tensors of
all heads are never there together (Untied Ulysses).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compiler import heads as dealing
from ..compiler.heads import Stage
from ..compiler.masks import Mask
from ..compiler.shards import UnevenShards
from ..handles import held
from . import keeping, ops, ulysses
from . import sinks as sink
from .buffers import Tensors
from .exchange import Context, Place, gather_heads, scatter_heads
from .kernels import Scores
from .runtime import Runtime
from .work import rowsum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One attention but for its tensors. handles: of runtime, mask and shards, which stand for what is `held`. scores:
    scale and softcap. counts: tokens of every Ulysses member, of q and of k/v."""

    handles: tuple[int, int, int]
    held: object
    scores: Scores
    counts: Sequence[Sequence[int]]
    members: int
    member: int
    stages: tuple[Stage, ...]


def attention(
    runtime: Runtime, tensors: Tensors, mask: Mask, shards: UnevenShards | None, scores: Scores,
    sinks: Tensor | None = None, after: Tensor | None = None, lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """q (B, s, Hq, D), k and v (B, s, Hkv, D) of this rank's tokens, sinks (Hq,) -> out as q, differentiable, and with
    lse the lse (B, s, Hq) of its rows. after: what must have been computed before anything is sent."""
    (q, k, _), asked = tensors, (mask, shards, scores)
    counts, compiling = ops.counts_of(runtime, tensors, shards), torch.compiler.is_compiling()
    count = runtime.config.head_stages
    if count == "auto":
        held_here = runtime.shards(sum(counts[0])) if shards is None else shards
        count = 1 if compiling else runtime.fewest_stages(q, k, mask, held_here)
    stages = dealing.stages(q.shape[2], k.shape[2], count)
    if compiling:  # a graph of ops, of which the compiler knows what is needed when
        found = [_composed(runtime, tensors, stage, asked, sinks, after, lse) for stage in stages]
        return _joined([out for out, _ in found]), _joined([own for _, own in found if own is not None])
    if len(stages) == 1 and not keeping.is_checkpointed():
        return _composed(runtime, tensors, stages[0], asked, sinks, after, lse)
    handles = runtime.handle, mask.handle, ops.handle_of_shards(shards)
    call = Call(
        handles=handles,
        held=held(*handles),
        scores=scores,
        counts=counts,
        members=runtime.config.ulysses,
        member=runtime.member or 0,
        stages=stages,
    )
    out, *lses = Attention.apply(*tensors, sinks, call)
    return out, _own_lse(call, lses) if lse else None


def _joined(parts: Sequence[Tensor]) -> Any:
    """The heads of all stages; None for nothing."""
    return torch.cat(list(parts), dim=2) if len(parts) > 1 else next(iter(parts), None)


def _composed(
    runtime: Runtime, tensors: Tensors, stage: Stage, how: tuple, sinks: Tensor | None, after: Tensor | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """One stage, of ops that autograd knows."""
    part = tuple(_some(x, heads) for x, heads in zip(tensors, (stage.q, stage.kv, stage.kv), strict=True))
    mask, shards, scores = how
    out, inner = ops.attention(runtime, part, mask, shards, scores, None if sinks is None else sinks[stage.q], after)
    return out, ops.gather_lse(runtime, inner, part, shards) if lse else None


def _some(x: Tensor, heads: slice) -> Tensor:
    return x if x.shape[2] == heads.stop - heads.start else x[:, :, heads]


def _own_lse(call: Call, lses: Sequence[Tensor]) -> Tensor:
    """The lse (B, s, Hq) of this rank's rows, from those of its inner heads."""
    if call.members == 1:
        return _joined(lses)
    parts = [_Part(call, stage) for stage in call.stages]

    def gather() -> Tensors:
        found = [p.gather([lse.unsqueeze(-1)], "lse_heads", of_q=True)[0] for p, lse in zip(parts, lses, strict=True)]
        return (_joined(found).squeeze(-1),)

    return keeping.once(gather)[0]


class Attention(torch.autograd.Function):
    """q (B, s, Hq, D), k and v (B, s, Hkv, D) of this rank's tokens, sinks (Hq,) -> out as q, and of every stage the
    lse (B, T, h) of what this Ulysses member works on."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensors:
        out, *rest = keeping.once(lambda: _forward(call, (q, k, v), sinks))
        lses, arrived = rest[: len(call.stages)], rest[len(call.stages) :]
        ctx.call, ctx.sent_again = call, not arrived
        ctx.save_for_backward(sinks, out, *lses, *(arrived or (q, k, v)))
        ctx.mark_non_differentiable(*lses)
        return out, *lses

    @staticmethod
    def backward(ctx: Context, do: Tensor, *_: Tensor) -> tuple:
        call, (sinks, out, *rest) = ctx.call, ctx.saved_tensors
        lses, operands = rest[: len(call.stages)], rest[len(call.stages) :]
        grads: list[Tensor] = []
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        for index, (stage, lse) in enumerate(zip(call.stages, lses, strict=True)):
            part, each = _Part(call, stage), len(operands) // len(call.stages)
            kept = operands[index * each : (index + 1) * each]
            inner = part.views(part.arrive(operands) if ctx.sent_again else kept)
            found = part.backward(do, inner, out, lse, sinks, dsinks)
            grads = _placed(call, stage, grads, found)
        return *grads, dsinks, None


def _placed(call: Call, stage: Stage, whole: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    """The gradients of all heads, with those of a stage."""
    if len(call.stages) == 1:
        return found
    totals = call.stages[-1].q.stop, call.stages[-1].kv.stop, call.stages[-1].kv.stop
    whole = whole or [x.new_empty(*x.shape[:2], heads, x.shape[3]) for x, heads in zip(found, totals, strict=True)]
    for grad, heads in zip(whole, (stage.q, stage.kv, stage.kv), strict=True):
        grad[:, :, heads] = found.pop(0)
    return whole


def _forward(call: Call, tensors: Sequence[Tensor], sinks: Tensor | None) -> Tensors:
    """out, the lse of every stage and, where a checkpoint keeps them, the inner q, k and v as they arrived."""
    lses, kept, whole = [], [], None
    for stage in call.stages:
        part = _Part(call, stage)
        arrived = part.arrive(tensors)
        out, lse = part.forward(part.views(arrived), sinks)
        lses.append(lse)
        if call.members > 1 and (keeping.is_kept() or len(call.stages) == 1):
            kept += arrived
        del arrived
        if len(call.stages) == 1:
            whole = out
        else:
            whole = torch.empty_like(tensors[0]) if whole is None else whole
            whole[:, :, stage.q] = out
        del out
    assert whole is not None
    return whole, *lses, *kept


class _Part:
    """One stage of a call."""

    def __init__(self, call: Call, stage: Stage) -> None:
        self.call, self.stage = call, stage
        self.place: Place = stage.counts[1], call.members, call.member
        self.own = dealing.heads_of(*stage.counts, call.members, call.member)
        self.widths = [heads.stop - heads.start for heads in self.own]

    def arrive(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This stage of q, k and v; exchanged for the inner ones where there are other members."""
        (q_counts, kv_counts), (on_q, on_kv) = self.call.counts, self.stage
        q, k, v = (_some(x, heads) for x, heads in zip(tensors, (on_q, on_kv, on_kv), strict=True))
        if self.call.members == 1:
            return [q, k, v]
        if q_counts == kv_counts:
            return [self.scatter([q, k, v], "qkv", q_counts)]
        return [self.scatter([q], "qkv", q_counts), self.scatter([k, v], "qkv", kv_counts)]

    def views(self, arrived: Sequence[Tensor]) -> list[Tensor]:
        """Inner q, k and v."""
        if self.call.members == 1:
            return list(arrived)
        q, kv = self.widths
        if len(arrived) == 1:
            return ulysses.split_in(arrived[0], [q, kv, kv])
        return [*ulysses.split_in(arrived[0], [q]), *ulysses.split_in(arrived[1], [kv, kv])]

    def scatter(self, tensors: list[Tensor], kind: str, counts: Sequence[int]) -> Tensor:
        return scatter_heads(tensors, counts, self.place, self.call.handles[0], kind, None)

    def gather(self, tensors: list[Tensor], kind: str, of_q: bool) -> list[Tensor]:
        """Tensors of inner heads, of q's kind first or of k's alone, become this rank's own tokens of all heads. They
        are taken out of the list: in memory they are beside nothing that is made of them."""
        counts, (q, kv) = self.call.counts[0 if of_q else 1], self.stage.counts
        totals, joined = [q, kv, kv][: len(tensors)] if of_q else [kv] * len(tensors), ulysses.join_out(tensors)
        tensors.clear()
        return gather_heads(joined, totals, counts, self.place, self.call.handles[0], kind)

    def forward(self, inner: Sequence[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Own out of this stage's heads, and the inner lse."""
        own = None if sinks is None else sinks[self.stage.q][self.own[0]]
        out, lse = ops.attend(*inner, own, *self.call.handles, *self.call.scores, None)
        return out if self.call.members == 1 else self.gather([out], "out_heads", of_q=True)[0], lse

    def backward(
        self, do: Tensor, inner: list[Tensor], out: Tensor, lse: Tensor, sinks: Tensor | None, dsinks: Tensor | None
    ) -> list[Tensor]:
        """Own dq, dk, dv of this stage's heads, given do and out of all; the sinks' gradient goes into dsinks."""
        do, out, numbers = _some(do, self.stage.q), _some(out, self.stage.q), (*self.call.handles, *self.call.scores)
        if self.call.members > 1:
            delta = rowsum(do, out, lse.dtype).unsqueeze(-1)
            counts, width = self.call.counts[0], self.widths[:1]
            (do,) = ulysses.split_in(self.scatter([do], "do_heads", counts), width)
            (delta,) = ulysses.split_in(self.scatter([delta], "delta_heads", counts), width)
            out = delta.squeeze(-1)
        if sinks is not None and dsinks is not None:
            own = sinks[self.stage.q][self.own[0]]
            delta = out if out.dim() == lse.dim() else rowsum(do, out, lse.dtype)
            dsinks[self.stage.q][self.own[0]] = sink.gradient(delta, lse, own)
        found = list(ops.attend_backward(do, *inner, out, lse, *numbers))
        del do, out
        inner.clear()
        if self.call.members == 1:
            return found
        kv = [found.pop(), found.pop()][::-1]  # apart, since what is sent stands beside what arrives
        dkv = self.gather(kv, "dqkv", of_q=False)
        return self.gather(found, "dqkv", of_q=True) + dkv

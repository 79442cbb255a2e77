"""The caller's tensors of one attention, as a walk takes and gives them: all heads of own tokens, and of each stage
some heads of the inner rank's tokens. `compiler.exchange` has the names of what is exchanged."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.compile import BoundProgram
from ..compiler.program import HeadExchange
from .buffers import Tensors, split_in
from .kernels import Kernel, Scores
from .kernels.accumulate import merge_sinks_, sinks_gradient
from .work import Backward, Forward, Work, rowsum


class Saved(NamedTuple):
    """What forward left for backward, of every stage. lses: the inner ones. arrived: the inner q, k and v as they came,
    one tensor or two. outs: the inner out. The last two may be empty."""

    lses: Sequence[Tensor]
    arrived: Sequence[Tensor]
    outs: Sequence[Tensor]


class Call(abc.ABC):
    """What both directions share. own: the caller's tensors (B, s, H, D), by name. heads: who has which. inner: tensors
    of the stage that is walked; left: its results; whole: results of all stages."""

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, own: dict[str, Tensor], sinks: Tensor | None
    ) -> None:
        self.heads, self.own, self.sinks, self.kernel, self.scale = bound.heads, own, sinks, kernel, scores.scale
        self.alone, self.device = bound.heads.members.degree == 1, next(iter(own.values())).device
        self.inner: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}

    @abc.abstractmethod
    def enter(self, stage: int) -> Work:
        """The work of the stage's inner tensors."""

    @abc.abstractmethod
    def leave(self, stage: int, result: Tensors) -> None:
        """Takes the inner program's result."""

    @abc.abstractmethod
    def results(self) -> list[Tensor]:
        """What the call gives."""

    def part(self, stage: int, field: str) -> Tensor:
        """The stage's heads of the caller's own tokens, (B, s, h, D), D 1 for a number a row."""
        return self.some(self.own[field], stage, field)

    def some(self, x: Tensor, stage: int, field: str) -> Tensor:
        """Those of all heads that are the stage's."""
        held = self.heads.of_stage(stage, field)
        return x if x.shape[2] == held.stop - held.start else x[:, :, held]

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        """Takes the stage's inner tensors that travelled together, (T, B, h of all, D)."""
        self.inner.update(zip(exchange.fields, split_in(joined, self.heads.inner_counts(exchange)), strict=True))

    def give(self, field: str) -> Tensor:
        """A result (B, T, h, D) of the stage that was left, to be sent; it is given up."""
        return self.left.pop(field)

    def put(self, stage: int, field: str, part: Tensor) -> None:
        """Takes a result of own tokens, (B, s, h, D), of the stage's heads."""
        if len(self.heads.stages) == 1:
            self.whole[field] = part
            return
        if field not in self.whole:
            last = self.heads.of_stage(len(self.heads.stages) - 1, field)
            self.whole[field] = part.new_empty(*part.shape[:2], last.stop, part.shape[3])
        self.some(self.whole[field], stage, field).copy_(part)

    def own_inner(self, stage: int) -> dict[str, Tensor]:
        """Where there is no other member the caller's tensors are the inner ones."""
        return self.own if len(self.heads.stages) == 1 else {field: self.part(stage, field) for field in self.own}

    def put_alone(self, stage: int, **results: Tensor) -> None:
        """Where there is no other member the inner results are the caller's."""
        if self.alone:
            for field, x in results.items():
                self.put(stage, field, x)
        else:
            self.left.update(results)

    def own_sinks(self, stage: int) -> Tensor | None:
        """Those of the heads that this member works on."""
        if self.sinks is None:
            return None
        return self.sinks[self.heads.stages[stage].q][self.heads.inner(stage)[0]]


class ForwardCall(Call):
    """own: q, k and v. Ends with out, the inner lse of each stage and what is saved for backward (see `SaveChoice`;
    nothing where there are no other members). With `lse` and other members also with the lse of own tokens."""

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, own: dict[str, Tensor], sinks: Tensor | None,
        keep: int, lse: bool,
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, scores, own, sinks)
        self.keep, self.lse = keep, lse
        self.lses: list[Tensor] = []
        self.arrived: list[Tensor] = []
        self.out: list[Tensor] = []

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        super().arrive(exchange, joined)
        if self.keep:
            self.arrived.append(joined)

    def enter(self, stage: int) -> Work:
        if self.alone:
            self.inner = self.own_inner(stage)
        q, k, v = (self.inner[field] for field in ("q", "k", "v"))
        return Forward(self.kernel, self.scale, q, k, v)

    def leave(self, stage: int, result: Tensors) -> None:
        out, lse = result
        sinks = self.own_sinks(stage)
        if sinks is not None:
            merge_sinks_(out, lse, sinks)
        self.lses.append(lse)
        self.inner = {}
        if not self.alone and self.keep > 1:
            self.out.append(out)
        self.put_alone(stage, out=out)
        if self.lse:
            self.left["lse"] = lse.unsqueeze(-1)

    def results(self) -> list[Tensor]:
        own = [self.whole["lse"].squeeze(-1)] if self.lse else []
        return [self.whole["out"], *self.lses, *self.arrived, *self.out, *own]


class BackwardCall(Call):
    """own: do, and where they are needed q, k, v and out, or delta in its place. lses, arrived, outs: see `Saved`. Ends
    with dq, dk and dv, and the gradient of sinks where there are some."""

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, own: dict[str, Tensor], sinks: Tensor | None,
        lses: Sequence[Tensor], arrived: Sequence[Tensor], outs: Sequence[Tensor],
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, scores, own, sinks)
        self.lses, self.arrived, self.outs = lses, arrived, outs
        self.dsinks = None if sinks is None else torch.zeros_like(sinks)

    def part(self, stage: int, field: str) -> Tensor:
        if field != "delta":
            return super().part(stage, field)
        do, out = super().part(stage, "do"), super().part(stage, "out")
        return (out if out.dim() < do.dim() else rowsum(do, out, self.lses[stage].dtype)).unsqueeze(-1)

    def enter(self, stage: int) -> Work:
        if self.alone:
            self.inner = self.own_inner(stage)
        each = len(self.arrived) // len(self.lses)
        together = (("q", "k", "v"),) if each == 1 else (("q",), ("k", "v"))
        for fields, joined in zip(together, self.arrived[stage * each : (stage + 1) * each], strict=False):
            self.arrive(HeadExchange(stage, True, fields), joined)
        if self.outs:
            self.inner["out"] = self.outs[stage]
        elif not self.alone:
            self.inner["out"] = self.inner.pop("delta").squeeze(-1)
        do, q, k, v, out = (self.inner[field] for field in ("do", "q", "k", "v", "out"))
        lse = self.lses[stage]
        sinks = self.own_sinks(stage)
        if sinks is not None and self.dsinks is not None:
            delta = out if out.dim() == lse.dim() else rowsum(do, out, lse.dtype)
            mine = self.dsinks[self.heads.stages[stage].q][self.heads.inner(stage)[0]]
            mine.copy_(sinks_gradient(delta, lse, sinks))
        return Backward(self.kernel, self.scale, do, q, k, v, out, lse)

    def leave(self, stage: int, result: Tensors) -> None:
        dq, dk, dv = result
        self.inner = {}
        self.put_alone(stage, dq=dq, dk=dk, dv=dv)

    def results(self) -> list[Tensor]:
        found = [self.whole[field] for field in ("dq", "dk", "dv")]
        return found if self.dsinks is None else [*found, self.dsinks]

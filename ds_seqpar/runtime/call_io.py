"""The tensors of one attention call, as a walk takes and returns them. The caller's are all heads of this rank's own
tokens. Each head chunk's inner tensors are some heads of the CP rank's tokens. `compiler.program.ulysses` names
their fields."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.compile import BoundProgram
from ..compiler.program.instructions import HeadExchange
from ..compiler.program.ulysses import SavedForBackward
from .buffers import Tensors, split_in
from .kernels import Kernel, Scores
from .kernels.accumulate import merge_sinks_, sinks_deltas
from .work import Backward, Forward, Work, of_query_heads, offsets, rowsum


class Saved(NamedTuple):
    """Inner tensors that forward saved for backward. lses: of every head chunk. operands: q, k and v of every head
    chunk as they arrived, in one tensor or in two. outs: of every head chunk. The last two may be empty."""

    lses: list[Tensor]
    operands: list[Tensor]
    outs: list[Tensor]


class Call(abc.ABC):
    """What both directions share.

    local: the caller's tensors (B, s, H, D), by field. common (Hkv, D): what is taken off all keys, if anything is (see
    `runtime.work`); sinks: (Hq,), if there are some. heads: which Ulysses rank works on which heads in which head
    chunk. alone: whether this rank is the only Ulysses rank. inner: tensors of the head chunk that is walked, by field;
    inner_results: its results, to be sent. local_results: those of local tokens, all heads."""

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, local: dict[str, Tensor], sinks: Tensor | None,
        common: Tensor | None,
    ) -> None:  # fmt: skip
        self.heads, self.local, self.sinks, self.kernel, self.scale = bound.heads, local, sinks, kernel, scores.scale
        self.common = common
        self.alone, self.device = bound.heads.ulysses.size == 1, next(iter(local.values())).device
        self.inner: dict[str, Tensor] = {}
        self.inner_results: dict[str, Tensor] = {}
        self.local_results: dict[str, Tensor] = {}

    @abc.abstractmethod
    def enter(self, head_chunk: int) -> Work:
        """The work of the head chunk's inner tensors."""

    @abc.abstractmethod
    def leave(self, head_chunk: int, result: Tensors) -> None:
        """Takes the inner program's result."""

    @abc.abstractmethod
    def results(self) -> list[Tensor]:
        """What the call returns."""

    def part(self, head_chunk: int, field: str) -> Tensor:
        """The head chunk's heads of a tensor of the caller's, (B, s, h, D), with D = 1 for one number a row."""
        return self.of_head_chunk(self.local[field], head_chunk, field)

    def of_head_chunk(self, x: Tensor, head_chunk: int, field: str) -> Tensor:
        """The head chunk's heads of x, which has all heads of the field."""
        heads = self.heads.of_head_chunk(head_chunk, field)
        return x if x.shape[2] == heads.stop - heads.start else x[:, :, heads]

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        """Takes the head chunk's inner tensors that travelled together, (T, B, h of all, D)."""
        self.inner.update(zip(exchange.fields, split_in(joined, self.heads.inner_counts(exchange)), strict=True))

    def pop_result(self, field: str) -> Tensor:
        """An inner result (B, T, h, D), to be sent. The call refers to it no more."""
        return self.inner_results.pop(field)

    def put_result(self, head_chunk: int, field: str, part: Tensor) -> None:
        """Takes a result of local tokens, (B, s, h, D), of the head chunk's heads."""
        if len(self.heads.head_chunks) == 1:
            self.local_results[field] = part
            return
        if field not in self.local_results:
            last = self.heads.of_head_chunk(len(self.heads.head_chunks) - 1, field)
            self.local_results[field] = part.new_empty(*part.shape[:2], last.stop, part.shape[3])
        self.of_head_chunk(self.local_results[field], head_chunk, field).copy_(part)

    def take_local(self, head_chunk: int) -> None:
        """Without other Ulysses ranks, makes the inner tensors of the caller's."""
        if self.alone:
            one = len(self.heads.head_chunks) == 1
            self.inner = self.local if one else {field: self.part(head_chunk, field) for field in self.local}

    def put_inner(self, head_chunk: int, **results: Tensor) -> None:
        """Takes inner results, by field. Without other Ulysses ranks they are those of local tokens."""
        if self.alone:
            for field, x in results.items():
                self.put_result(head_chunk, field, x)
        else:
            self.inner_results.update(results)

    def of_inner_heads(self, x: Tensor, head_chunk: int, side: int = 0) -> Tensor:
        """A view of x (H, ...), as of the sinks, of the heads that this Ulysses rank works on. side: 0 for query heads,
        1 for key/value heads."""
        return x[self.heads.head_chunks[head_chunk][side]][self.heads.inner(head_chunk)[side]]

    def take_common_off(self, head_chunk: int) -> None:
        """Takes the common part off the inner keys: in place, unless they are the caller's."""
        if self.common is not None:
            k, common = self.inner["k"], self.of_inner_heads(self.common, head_chunk, 1)
            self.inner = self.inner | {"k": k - common if self.alone else k.sub_(common)}

    def inner_sinks(self, sinks: Tensor, head_chunk: int) -> Tensor:
        """The sinks (H,) that this Ulysses rank works on. Where the keys' common part was taken off every row has its
        own, (B, T, H), since its scores have changed by a number of its own."""
        sinks = self.of_inner_heads(sinks, head_chunk)
        if self.common is None:
            return sinks
        return sinks - offsets(self.inner["q"], self.of_inner_heads(self.common, head_chunk, 1), self.scale)


class ForwardCall(Call):
    """local: q, k and v. Returns out, each head chunk's inner lse, and the inner tensors that `saves` names, as
    `SavedForBackward` does. Without other Ulysses ranks none are saved. With `lse`, which needs other Ulysses ranks, it
    also returns the lse of local tokens."""

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, local: dict[str, Tensor], sinks: Tensor | None,
        common: Tensor | None, saves: int, lse: bool,
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, scores, local, sinks, common)
        self.saves, self.lse = saves, lse
        self.saved = Saved([], [], [])

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        super().arrive(exchange, joined)
        if self.saves:
            self.saved.operands.append(joined)

    def enter(self, head_chunk: int) -> Work:
        self.take_local(head_chunk)
        self.take_common_off(head_chunk)
        q, k, v = (self.inner[field] for field in ("q", "k", "v"))
        return Forward(self.kernel, self.scale, q, k, v)

    def leave(self, head_chunk: int, result: Tensors) -> None:
        out, lse = result
        if self.sinks is not None:
            merge_sinks_(out, lse, self.inner_sinks(self.sinks, head_chunk))
        self.saved.lses.append(lse)
        self.inner = {}
        if not self.alone and self.saves == SavedForBackward.QKV_AND_OUT:
            self.saved.outs.append(out)
        self.put_inner(head_chunk, out=out)
        if self.lse:
            self.inner_results["lse"] = lse.unsqueeze(-1)

    def results(self) -> list[Tensor]:
        local_lse = [self.local_results["lse"].squeeze(-1)] if self.lse else []
        return [self.local_results["out"], *self.saved.lses, *self.saved.operands, *self.saved.outs, *local_lse]


class BackwardCall(Call):
    """local: do, and where they are needed q, k, v and out, or delta in place of out. saved: what forward saved.
    Returns dq, dk and dv, and with sinks their gradient."""

    sinks_deltas: Tensor  # of the head chunk, with sinks

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, local: dict[str, Tensor], sinks: Tensor | None,
        common: Tensor | None, saved: Saved,
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, scores, local, sinks, common)
        self.saved = saved
        self.dsinks = None if sinks is None else torch.zeros_like(sinks)

    def part(self, head_chunk: int, field: str) -> Tensor:
        if field != "delta":
            return super().part(head_chunk, field)
        do, out = super().part(head_chunk, "do"), super().part(head_chunk, "out")
        return (out if out.dim() < do.dim() else rowsum(do, out, self.saved.lses[head_chunk].dtype)).unsqueeze(-1)

    def enter(self, head_chunk: int) -> Work:
        lses, operands, outs = self.saved
        self.take_local(head_chunk)
        each = len(operands) // len(lses)
        exchanges = (("q", "k", "v"),) if each == 1 else (("q",), ("k", "v"))
        for fields, joined in zip(exchanges, operands[head_chunk * each : (head_chunk + 1) * each], strict=False):
            self.arrive(HeadExchange(head_chunk, True, fields), joined)
        if not operands:  # forward saves inner keys without the common part
            self.take_common_off(head_chunk)
        if outs:
            self.inner["out"] = outs[head_chunk]
        elif not self.alone:
            self.inner["out"] = self.inner.pop("delta").squeeze(-1)
        do, q, k, v, out = (self.inner[field] for field in ("do", "q", "k", "v", "out"))
        lse = lses[head_chunk]
        if self.sinks is not None and self.dsinks is not None:
            delta = out if out.dim() == lse.dim() else rowsum(do, out, lse.dtype)
            self.sinks_deltas = sinks_deltas(delta, lse, self.inner_sinks(self.sinks, head_chunk))
            self.of_inner_heads(self.dsinks, head_chunk).copy_(self.sinks_deltas.sum((0, 1)).neg_())
        return Backward(self.kernel, self.scale, do, q, k, v, out, lse)

    def leave(self, head_chunk: int, result: Tensors) -> None:
        dq, dk, dv = result
        if self.sinks is not None and self.common is not None:  # a row's sink moves with its q . common
            common = of_query_heads(self.of_inner_heads(self.common, head_chunk, 1), dq.shape[2])
            dq.addcmul_(self.sinks_deltas.unsqueeze(-1), common * self.scale)
        self.inner = {}
        self.put_inner(head_chunk, dq=dq, dk=dk, dv=dv)

    def results(self) -> list[Tensor]:
        grads = [self.local_results[field] for field in ("dq", "dk", "dv")]
        return grads if self.dsinks is None else [*grads, self.dsinks]

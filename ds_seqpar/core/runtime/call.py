"""The tensors of one attention call, as a walk takes and returns them.

Local tensors, the caller's, have all heads of this rank's tokens. The inner tensors of a head chunk have some heads of
the CP rank's tokens. `compiler.program.ulysses` names their fields.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators.latent import Expansion, LatentBackward, LatentForward
from ..compiler.compile import BoundProgram
from ..compiler.program.instructions import HeadExchange
from ..compiler.program.ulysses import SavedForBackward
from ..compiler.program.ulysses import operands as exchanges_of_operands
from .buffers import Tensors, split_in
from .dense import Backward, Forward, Work, of_query_heads, offsets, rowsum
from .kernels import Kernel, Scores
from .kernels.accumulate import merge_sinks_, sinks_deltas


class Saved(NamedTuple):
    """Inner tensors that forward saved for backward, of every head chunk in turn. operands and outs may be empty."""

    lses: list[Tensor]
    operands: list[Tensor]  # q, k and v as they were received: one tensor a head chunk, or two
    outs: list[Tensor]


class Call(abc.ABC):
    """The base class of `ForwardCall` and `BackwardCall`.

    Attributes:
        local: The caller's tensors (B, s, H, D), by field.
        common: What is subtracted from all keys (Hkv, D), or None (see `runtime.work`).
        sinks: (Hq,), or None.
        expansion: Of latent attention the matrix (H, R, D + Dv) and Dv, else None.
        operands: The fields of q, k and v.
        heads: Which Ulysses rank works on which heads in which head chunk.
        alone: Whether this rank is the only Ulysses rank.
        inner: The tensors of the head chunk that was entered, by field.
        inner_results: The results of that head chunk that are still to be sent, by field.
        local_results: The results of local tokens, with all heads, by field.
    """

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, local: dict[str, Tensor], sinks: Tensor | None,
        common: Tensor | None, expansion: tuple[Tensor, int] | None,
    ) -> None:  # fmt: skip
        self.bound, self.heads, self.local, self.sinks = bound, bound.heads, local, sinks
        self.kernel, self.scale = kernel, scores.scale
        self.common, self.expansion = common, expansion
        self.operands = ("q", "k", "v") if expansion is None else ("q", "latent")
        self.alone, self.device = bound.heads.ulysses.size == 1, next(iter(local.values())).device
        self.inner: dict[str, Tensor] = {}
        self.inner_results: dict[str, Tensor] = {}
        self.local_results: dict[str, Tensor] = {}

    @abc.abstractmethod
    def enter(self, head_chunk: int) -> Work:
        """Return the work of the head chunk's inner tensors."""

    @abc.abstractmethod
    def leave(self, head_chunk: int, result: Tensors) -> None:
        """Take the inner program's result."""

    @abc.abstractmethod
    def results(self) -> list[Tensor]:
        """Return the results of the call."""

    def part(self, head_chunk: int, field: str) -> Tensor:
        """Return the head chunk's heads of a local tensor, (B, s, h, D), where D is 1 for one number a row."""
        return self.of_head_chunk(self.local[field], head_chunk, field)

    def of_head_chunk(self, x: Tensor, head_chunk: int, field: str) -> Tensor:
        """Return the head chunk's heads of x, which has all heads of the field."""
        heads = self.heads.of_head_chunk(head_chunk, field)
        return x if x.shape[2] == heads.stop - heads.start else x[:, :, heads]

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        """Take the inner tensors that were received in one message (elements,)."""
        parts = split_in(joined, self.bound.exchange_sizes(exchange).layout)
        self.inner.update(zip(exchange.fields, parts, strict=True))

    def pop_result(self, field: str) -> Tensor:
        """Return an inner result (B, T, h, D) that is to be sent, and drop the call's reference to it."""
        return self.inner_results.pop(field)

    def put_result(self, head_chunk: int, field: str, tensor: Tensor) -> None:
        """Take a result of local tokens (B, s, h, D), which has the head chunk's heads."""
        if len(self.heads.head_chunks) == 1:
            self.local_results[field] = tensor
            return
        if field not in self.local_results:
            last = self.heads.of_head_chunk(len(self.heads.head_chunks) - 1, field)
            self.local_results[field] = tensor.new_empty(*tensor.shape[:2], last.stop, tensor.shape[3])
        self.of_head_chunk(self.local_results[field], head_chunk, field).copy_(tensor)

    def take_local(self, head_chunk: int) -> None:
        """Set the inner tensors to the head chunk's heads of the local ones, where there are no other Ulysses ranks."""
        if self.alone:
            one_head_chunk = len(self.heads.head_chunks) == 1
            self.inner = self.local if one_head_chunk else {field: self.part(head_chunk, field) for field in self.local}

    def put_inner(self, head_chunk: int, **results: Tensor) -> None:
        """Take inner results, by field. Without other Ulysses ranks they are results of local tokens."""
        if self.alone:
            for field, x in results.items():
                self.put_result(head_chunk, field, x)
        else:
            self.inner_results.update(results)

    def of_inner_heads(self, x: Tensor, head_chunk: int, side: int = 0) -> Tensor:
        """Return a view of the heads of x that this Ulysses rank works on.

        Args:
            x: (H, ...), all heads, such as sinks.
            head_chunk: The number of the head chunk.
            side: 0 for query heads, 1 for key/value heads.
        """
        return x[self.heads.head_chunks[head_chunk][side]][self.heads.inner(head_chunk)[side]]

    def take_common_off(self, head_chunk: int) -> None:
        """Subtract the common part from the inner keys: in place, unless they are the caller's."""
        if self.common is not None:
            k, common = self.inner["k"], self.of_inner_heads(self.common, head_chunk, 1)
            self.inner = self.inner | {"k": k - common if self.alone else k.sub_(common)}

    def inner_expansion(self, matrix: Tensor, v_dim: int, head_chunk: int) -> Expansion:
        """Return the expansion to the heads that this Ulysses rank works on."""
        return Expansion.of(self.of_inner_heads(matrix, head_chunk), v_dim)

    def inner_sinks(self, sinks: Tensor, head_chunk: int) -> Tensor:
        """Return the sinks (H,) of the heads that this Ulysses rank works on. Where the keys' common part was
        subtracted they are (B, T, H), one for each row, since each row's scores have changed by a different number."""
        sinks = self.of_inner_heads(sinks, head_chunk)
        if self.common is None:
            return sinks
        return sinks - offsets(self.inner["q"], self.of_inner_heads(self.common, head_chunk, 1), self.scale)


class ForwardCall(Call):
    """The forward of a call, with local tensors q, k and v.

    Its results are out, each head chunk's inner lse, the inner tensors that `saves` names, and with `lse` the lse of
    local tokens.

    Args:
        saves: A `SavedForBackward`. Without other Ulysses ranks no inner tensors are saved.
        lse: Whether to send the lse of local tokens back too. Needs other Ulysses ranks.
    """

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, local: dict[str, Tensor], sinks: Tensor | None,
        common: Tensor | None, saves: int, lse: bool, expansion: tuple[Tensor, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, scores, local, sinks, common, expansion)
        self.saves, self.lse = saves, lse
        self.saved = Saved([], [], [])

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        super().arrive(exchange, joined)
        if self.saves:
            self.saved.operands.append(joined)

    def enter(self, head_chunk: int) -> Work:
        self.take_local(head_chunk)
        self.take_common_off(head_chunk)
        q, *kv = (self.inner[field] for field in self.operands)
        if self.expansion is None:
            return Forward(self.kernel, self.scale, q, *kv)
        return LatentForward(self.kernel, self.scale, q, kv[0], self.inner_expansion(*self.expansion, head_chunk))

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
    """The backward of a call. Its results are dq, dk and dv, or of latent attention dq and the gradients of the latent
    and of the matrix, and with sinks their gradient.

    Args:
        local: do, and where they are needed q, k, v and out, or delta in place of out.
        saved: What forward saved.
    """

    sinks_deltas: Tensor  # of the head chunk, with sinks
    latent_work: LatentBackward  # of the head chunk, in latent attention

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, scores: Scores, local: dict[str, Tensor], sinks: Tensor | None,
        common: Tensor | None, saved: Saved, expansion: tuple[Tensor, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, scores, local, sinks, common, expansion)
        self.saved = saved
        self.dmatrix = None if expansion is None else torch.zeros_like(expansion[0])
        self.dsinks = None if sinks is None else torch.zeros_like(sinks)

    def part(self, head_chunk: int, field: str) -> Tensor:
        if field != "delta":
            return super().part(head_chunk, field)
        do, out = super().part(head_chunk, "do"), super().part(head_chunk, "out")
        return (out if out.dim() < do.dim() else rowsum(do, out, self.saved.lses[head_chunk].dtype)).unsqueeze(-1)

    def enter(self, head_chunk: int) -> Work:
        lses, operands, outs = self.saved
        self.take_local(head_chunk)
        count = len(operands) // len(lses)  # tensors of a head chunk
        exchanges = exchanges_of_operands(count == 1, self.expansion is not None)
        for fields, joined in zip(exchanges, operands[head_chunk * count : (head_chunk + 1) * count], strict=False):
            self.arrive(HeadExchange(head_chunk, True, fields), joined)
        if not operands:  # forward saves inner keys without the common part
            self.take_common_off(head_chunk)
        if outs:
            self.inner["out"] = outs[head_chunk]
        elif not self.alone:
            self.inner["out"] = self.inner.pop("delta").squeeze(-1)
        do, out, q, *kv = (self.inner[field] for field in ("do", "out", *self.operands))
        lse = lses[head_chunk]
        if self.sinks is not None and self.dsinks is not None:
            delta = out if out.dim() == lse.dim() else rowsum(do, out, lse.dtype)
            self.sinks_deltas = sinks_deltas(delta, lse, self.inner_sinks(self.sinks, head_chunk))
            self.of_inner_heads(self.dsinks, head_chunk).copy_(self.sinks_deltas.sum((0, 1)).neg_())
        if self.expansion is None:
            return Backward(self.kernel, self.scale, do, q, tuple(kv), out, lse)
        expansion = self.inner_expansion(*self.expansion, head_chunk)
        self.latent_work = LatentBackward(self.kernel, self.scale, do, q, kv[0], out, lse, expansion)
        return self.latent_work

    def leave(self, head_chunk: int, result: Tensors) -> None:
        dq, *dkv = result
        if self.sinks is not None and self.common is not None:  # a row's sink moves with its q . common
            common = of_query_heads(self.of_inner_heads(self.common, head_chunk, 1), dq.shape[2])
            dq.addcmul_(self.sinks_deltas.unsqueeze(-1), common * self.scale)
        self.inner = {}
        self.put_inner(head_chunk, **dict(zip((f"d{field}" for field in self.operands), (dq, *dkv), strict=True)))
        if self.dmatrix is not None:
            matrix = self.of_inner_heads(self.dmatrix, head_chunk)
            matrix.copy_(self.latent_work.dmatrix.unflatten(1, (len(matrix), -1)).transpose(0, 1))
            del self.latent_work

    def results(self) -> list[Tensor]:
        grads = [self.local_results[f"d{field}"] for field in self.operands]
        grads += [] if self.dmatrix is None else [self.dmatrix]
        return grads if self.dsinks is None else [*grads, self.dsinks]

"""The tensors of one attention call: the inputs and results of its program.

Local tensors are the caller's tensors, with all heads for this rank's tokens. A head chunk's inner tensors have some of
the heads for all tokens of the CP rank. `compiler.program.ulysses` names the fields of local and inner tensors.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.compile import BoundProgram
from ..compiler.program.instructions import HeadExchange
from ..compiler.program.ulysses import SavedForBackward
from ..compiler.program.ulysses import operands as exchanges_of_operands
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import Shards, UnevenShards
from .buffers import Tensors, split_in
from .dense import Backward, Forward, Operands, is_delta, of_query_heads, offsets, rowsum
from .kernels import Kernel, Scores
from .kernels.accumulate import merge_sinks_, sinks_deltas
from .operator import DENSE, Operator


class CallSettings(NamedTuple):
    """Everything that determines how a call is computed, except its tensors."""

    mask: Mask
    shards: Shards | None  # None: the shards of the configured layout
    scores: Scores
    head_chunks: int = 1
    saves: SavedForBackward = SavedForBackward.QKV_AND_OUT
    lse: bool = False  # whether forward also exchanges the lse for local tokens; requires other Ulysses ranks
    operator: Operator = DENSE
    v_dim: int = 0  # width of `out` without zero padding
    layer: int | None = None  # layer index in a patched model, for guards

    def takes_common_off(self, dtype: torch.dtype, cp_size: int) -> bool:
        """Return whether to subtract the keys' common part. All ranks return the same value.

        The common part is subtracted in fp32 if several results of a row may be merged: with several CP ranks, or with
        several tiles per product.
        """
        whole = cp_size == 1 and self.mask.scale_free and not isinstance(self.shards, UnevenShards)
        return self.operator.has_common(dtype) and not self.scores.softcap and not whole


class Saved(NamedTuple):
    """Inner tensors saved for the backward pass, one list entry per head chunk. `operands` and `outs` may be empty."""

    lses: list[Tensor]
    operands: list[Tensor]  # received messages, one or two per head chunk
    outs: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], settings: CallSettings) -> Saved:
        """Return a `Saved`, given a flat list of its tensors."""
        lses, rest = [*tensors[: settings.head_chunks]], [*tensors[settings.head_chunks :]]
        end = len(rest) - settings.head_chunks * settings.saves.out
        return cls(lses, rest[:end], rest[end:])


class AttentionResults(NamedTuple):
    """The results of the forward pass."""

    out: Tensor  # (B, s, Hq, D), or delta (B, s, Hq) if a checkpoint replaced out
    saved: Saved
    lse: Tensor | None  # (B, s, Hq), for local tokens
    common: Tensor | None  # the keys' common part; 0 if nothing was subtracted

    def to_list(self) -> list[Tensor]:
        saved = [x for tensors in self.saved for x in tensors]
        return [self.out, *saved, *(x for x in (self.lse, self.common) if x is not None)]

    @classmethod
    def of(cls, results: Sequence[Tensor], dtype: torch.dtype, settings: CallSettings) -> AttentionResults:
        """Return the results from a list created by `to_list`. `dtype` is the dtype of q."""
        out, *rest = results
        common = rest.pop() if settings.operator.has_common(dtype) else None
        lse = rest.pop() if settings.lse else None
        return cls(out, Saved.of(rest, settings), lse, common)


class Call(abc.ABC):
    """The base class of `ForwardCall` and `BackwardCall`.

    Attributes:
        local: The caller's tensors (B, s, H, D), by field.
        parameters: The operator's parameters, for all heads.
        common: The vector (Hkv, D) subtracted from all keys, or None (see `dense`).
        sinks: Attention sinks (Hq,), or None.
        saved: Tensors saved for the backward pass, initially none.
        heads: Heads of each Ulysses rank in each head chunk.
        alone: Whether this rank is the only Ulysses rank.
        inner: Tensors of the current head chunk, by field.
        inner_results: The current head chunk's results that have not been sent yet, by field.
        local_results: Results for local tokens with all heads, by field.
    """

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, settings: CallSettings, local: dict[str, Tensor],
        sinks: Tensor | None, common: Tensor | None, saved: Saved,
    ) -> None:  # fmt: skip
        self.bound, self.heads, self.settings, self.operator = bound, bound.heads, settings, settings.operator
        self.kernel, self.scale, self.sinks, self.common = kernel, settings.scores.scale, sinks, common
        self.saved = saved
        self.parameters = [local.pop(name) for name in self.operator.parameters]
        self.local = readable(local)
        self.alone, self.device = bound.heads.ulysses.size == 1, next(iter(local.values())).device
        self.inner: dict[str, Tensor] = {}
        self.inner_results: dict[str, Tensor] = {}
        self.local_results: dict[str, Tensor] = {}

    @abc.abstractmethod
    def enter(self, head_chunk: int) -> Forward:
        """Return the object that computes with the head chunk's inner tensors."""

    @abc.abstractmethod
    def leave(self, head_chunk: int, result: Tensors) -> None:
        """Store the inner program's result."""

    @abc.abstractmethod
    def results(self) -> list[Tensor]:
        """Return the results of the call."""

    def part(self, head_chunk: int, field: str) -> Tensor:
        """Return the head chunk's part of a local tensor, (B, s, h, D). D is 1 for fields with one number per head."""
        return self.of_head_chunk(self.local[field], head_chunk, field)

    def of_head_chunk(self, x: Tensor, head_chunk: int, field: str) -> Tensor:
        """Return the head chunk's part of x, which has all heads of the field."""
        heads = self.heads.of_head_chunk(head_chunk, self.bound.shape.field(field).side)
        return x if x.shape[2] == heads.stop - heads.start else x[:, :, heads]

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        """Store the inner tensors received in one message (elements,)."""
        parts = split_in(joined, self.bound.exchange_sizes(exchange).layout)
        self.inner.update(zip(exchange.fields, parts, strict=True))

    def pop_result(self, field: str) -> Tensor:
        """Remove an inner result (B, T, h, D) from this call, and return it for sending."""
        return self.inner_results.pop(field)

    def put_result(self, head_chunk: int, field: str, tensor: Tensor) -> None:
        """Store a result (B, s, h, D) for local tokens and the head chunk's heads."""
        if len(self.heads.head_chunks) == 1:
            self.local_results[field] = tensor
            return
        if field not in self.local_results:
            last = self.heads.of_head_chunk(len(self.heads.head_chunks) - 1, self.bound.shape.field(field).side)
            self.local_results[field] = tensor.new_empty(*tensor.shape[:2], last.stop, tensor.shape[3])
        self.of_head_chunk(self.local_results[field], head_chunk, field).copy_(tensor)

    def take_local(self, head_chunk: int) -> None:
        """Set the inner tensors to the head chunk's heads of the local tensors if this is the only Ulysses rank."""
        if self.alone:
            one_head_chunk = len(self.heads.head_chunks) == 1
            self.inner = self.local if one_head_chunk else {field: self.part(head_chunk, field) for field in self.local}

    def put_inner(self, head_chunk: int, **results: Tensor) -> None:
        """Store inner results by field. If this is the only Ulysses rank, store the results as results for local tokens
        instead.
        """
        if self.alone:
            for field, x in results.items():
                self.put_result(head_chunk, field, x)
        else:
            self.inner_results.update(results)

    def of_inner_heads(self, x: Tensor, head_chunk: int, side: int = 0) -> Tensor:
        """Return a view of the heads of x that this Ulysses rank works on.

        Args:
            x: Tensor (H, ...) with all heads, such as sinks.
            head_chunk: Index of the head chunk.
            side: 0 for query heads, 1 for key/value heads.
        """
        return x[self.heads.head_chunks[head_chunk][side]][self.heads.inner(head_chunk)[side]]

    def take_common_off(self, head_chunk: int) -> None:
        """Subtract the common part from the inner keys. The subtraction is in place unless the keys belong to the
        caller.
        """
        if self.common is not None:
            k, common = self.inner["k"], self.of_inner_heads(self.common, head_chunk, 1)
            self.inner = self.inner | {"k": k - common if self.alone else k.sub_(common)}

    def operands(self, head_chunk: int) -> Operands:
        """Return the operands of the head chunk, with the heads that this Ulysses rank works on."""
        q, *kv = (self.inner[field] for field in self.operator.operands)
        parameters = [self.of_inner_heads(x, head_chunk) for x in self.parameters]
        return Operands(self.kernel, self.scale, q, tuple(kv), parameters, self.settings.v_dim)

    def inner_sinks(self, sinks: Tensor, head_chunk: int) -> Tensor:
        """Return the sinks for the heads that this Ulysses rank works on.

        The shape is (H,). If the keys' common part was subtracted, the shape is (B, T, H) with one sink per row,
        because the scores have changed by a different amount in each row.
        """
        sinks = self.of_inner_heads(sinks, head_chunk)
        if self.common is None:
            return sinks
        return sinks - offsets(self.inner["q"], self.of_inner_heads(self.common, head_chunk, 1), self.scale)


class ForwardCall(Call):
    """The forward pass of a call on the operator's local tensors, which returns `AttentionResults`.

    Without other Ulysses ranks, only the lse of each head chunk is saved.
    """

    def arrive(self, exchange: HeadExchange, joined: Tensor) -> None:
        super().arrive(exchange, joined)
        if self.settings.saves.qkv:
            self.saved.operands.append(joined)

    def enter(self, head_chunk: int) -> Forward:
        self.take_local(head_chunk)
        self.take_common_off(head_chunk)
        return self.operator.forward(self.operands(head_chunk))

    def leave(self, head_chunk: int, result: Tensors) -> None:
        out, lse = result
        if self.sinks is not None:
            merge_sinks_(out, lse, self.inner_sinks(self.sinks, head_chunk))
        self.saved.lses.append(lse)
        self.inner = {}
        if not self.alone and self.settings.saves.out:
            self.saved.outs.append(out)
        self.put_inner(head_chunk, out=out)
        if self.settings.lse:
            self.inner_results["lse"] = lse.unsqueeze(-1)

    def results(self) -> list[Tensor]:
        lse, common, keys = None, self.common, self.local[self.operator.operands[1]]
        if self.settings.lse:
            lse = self.local_results["lse"].squeeze(-1)
        if common is None and self.operator.has_common(keys.dtype):
            common = keys.new_zeros(keys.shape[2:])
        return AttentionResults(self.local_results["out"], self.saved, lse, common).to_list()


class BackwardCall(Call):
    """The backward pass of a call, which returns the gradients of the operator's tensors and of the sinks, if there are
    any.

    Args:
        local: The gradient `do`, the operator's parameters, and if needed the operands and out (or delta instead of
            out).
    """

    sinks_deltas: Tensor  # set inside a head chunk if there are sinks
    work: Backward  # set inside a head chunk if the operator has parameters

    def __init__(
        self, bound: BoundProgram, kernel: Kernel, settings: CallSettings, local: dict[str, Tensor],
        sinks: Tensor | None, common: Tensor | None, saved: Saved,
    ) -> None:  # fmt: skip
        super().__init__(bound, kernel, settings, local, sinks, common, saved)
        self.dparameters = [torch.zeros_like(x) for x in self.parameters]
        self.dsinks = None if sinks is None else torch.zeros_like(sinks)

    def part(self, head_chunk: int, field: str) -> Tensor:
        if field != "delta":
            return super().part(head_chunk, field)
        do, out = super().part(head_chunk, "do"), super().part(head_chunk, "out")
        return (out if is_delta(out) else rowsum(do, out, self.saved.lses[head_chunk].dtype)).unsqueeze(-1)

    def enter(self, head_chunk: int) -> Forward:
        lses, operands, outs = self.saved
        self.take_local(head_chunk)
        count = len(operands) // len(lses)  # number of tensors per head chunk
        exchanges = exchanges_of_operands(count == 1, self.operator.operands[1:])
        for fields, joined in zip(exchanges, operands[head_chunk * count : (head_chunk + 1) * count], strict=False):
            self.arrive(HeadExchange(head_chunk, True, fields), joined)
        if not operands:  # keys saved by forward already lack the common part
            self.take_common_off(head_chunk)
        if outs:
            self.inner["out"] = outs[head_chunk]
        elif not self.alone:
            self.inner["out"] = self.inner.pop("delta").squeeze(-1)
        do, out, lse = self.inner["do"], self.inner["out"], lses[head_chunk]
        if self.sinks is not None and self.dsinks is not None:
            delta = out if is_delta(out) else rowsum(do, out, lse.dtype)
            self.sinks_deltas = sinks_deltas(delta, lse, self.inner_sinks(self.sinks, head_chunk))
            self.of_inner_heads(self.dsinks, head_chunk).copy_(self.sinks_deltas.sum((0, 1)).neg_())
        work = self.operator.backward(self.operands(head_chunk), do, out, lse)
        if self.parameters:
            self.work = work
        return work

    def leave(self, head_chunk: int, result: Tensors) -> None:
        dq, *dkv = result
        if self.sinks is not None and self.common is not None:  # each row's sink depends on q through q . common
            common = of_query_heads(self.of_inner_heads(self.common, head_chunk, 1), dq.shape[2])
            dq.addcmul_(self.sinks_deltas.unsqueeze(-1), common * self.scale)
        self.inner = {}
        names = (f"d{field}" for field in self.operator.operands)
        self.put_inner(head_chunk, **dict(zip(names, (dq, *dkv), strict=True)))
        if self.dparameters:
            for whole, grad in zip(self.dparameters, self.work.parameter_gradients(), strict=True):
                self.of_inner_heads(whole, head_chunk).copy_(grad)
            del self.work

    def results(self) -> list[Tensor]:
        grads = [self.local_results[f"d{field}"] for field in self.operator.operands] + self.dparameters
        return grads if self.dsinks is None else [*grads, self.dsinks]


def readable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a stride of 1 in head_dim, as kernels require."""
    return {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}

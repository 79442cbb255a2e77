"""Extract this rank's part of a whole batch. Each input is divided as declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.compat import tree_leaves
from ..base.errors import InputError
from .batch_layout import BatchLayout
from .documents import Lengths
from .inputs import LAYOUT, InputSpec, refusal, replicated
from .sharding import Sharding
from .value_checks import describe


@dataclasses.dataclass(frozen=True)
class Part:
    """Selection of this rank's tokens from a whole batch."""

    sp: Sharding
    rows: int
    seq: int
    # number of tokens in each document and each run of padding; None: each row is one document
    segments: Lengths | None
    placement: BatchLayout | None  # None if the configured layout suffices

    def of(self, table: Mapping[str, InputSpec], batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, excluding inputs that only mark documents and padding.

        No communication takes place.

        Raises:
            InputError: An input is unsupported, undeclared, or not a tensor of the declared kind.
        """
        if wrong := refusal(table, batch):
            raise InputError(wrong)
        specs = {name: table.get(name) or _undeclared(name, x) for name, x in batch.items()}
        return {name: self._of(specs[name], name, x, batch) for name, x in batch.items() if specs[name] != LAYOUT}

    def _of(self, spec: InputSpec, name: str, x: Any, batch: Mapping[str, Any]) -> Any:
        if x is None or spec.kind == "replicated":
            return x
        if spec.divide is not None:
            return spec.divide(x, batch, self._held())
        dim, is_joined = spec.dim, self.placement is not None and self.placement.rows is not None
        first, expected = max(dim - 1, 0), (self.rows, self.seq) if dim else (self.rows,)
        if not isinstance(x, Tensor) or tuple(x.shape[first : dim + 1]) != expected:
            raise InputError(
                f"{name} must be a tensor with an entry for each {'token' if dim else 'row'}, {expected} from dim "
                f"{first} on; got {describe(x)}, give it so, or declare it as what it is"
            )
        if not dim and not is_joined:
            return x
        if not dim:
            x, dim = x[:, None].expand(-1, self.seq, *x.shape[1:]), 1
        return self.sp.shard(x if spec.fill is None else self.shifted(x, dim, spec.fill), dim, self.placement)

    def shifted(self, x: Tensor, dim: int, fill: float) -> Tensor:
        """Return a tensor with each entry moved to the previous token.

        Args:
            x: Tensor of shape (..., rows, seq, ...).
            dim: Dimension of the tokens.
            fill: Entry for the last token of each document.
        """

        def ends() -> Tensor:
            last = torch.tensor(self.segments or (self.seq,) * self.rows, device="cpu").cumsum(0) - 1
            is_last = torch.zeros(self.rows * self.seq, dtype=torch.bool, device="cpu").index_fill_(0, last, True)
            return is_last.view(self.rows, self.seq)

        is_last = self.sp.layout_tensors.get(("ends", self.rows, self.seq, self.segments), x.device, ends)
        return x.roll(-1, dim).masked_fill(is_last.view(*is_last.shape, *[1] * (x.dim() - dim - 1)), fill)

    def _held(self) -> Tensor:
        held = self.sp.held(self.seq, self.placement, self.sp.rank)
        if self.placement is not None and self.placement.rows is not None:
            return held
        return (torch.arange(self.rows, device="cpu")[:, None] * self.seq + held).flatten()


def _undeclared(name: str, x: Any) -> InputSpec:
    """Return the default declaration for an undeclared input, which may contain no tensors other than 0-dim tensors."""
    if all(not isinstance(leaf, Tensor) or not leaf.dim() for leaf in tree_leaves(x)):
        return replicated()
    raise InputError(
        f"ranks that share sequences need to know how they share each input; got {name} {describe(x)}, which nothing "
        f"declares, pass inputs={{'{name}': tokens()}} to shard_batches, share_sequences or patch_attention: tokens, "
        "or tokens(shifted=True) as labels are, row, replicated or own (ds_seqpar.data.inputs)"
    )

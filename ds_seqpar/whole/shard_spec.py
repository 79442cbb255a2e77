"""How a tensor of whole sequences is sharded over ranks, and how it is gathered from their shards."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from ..data.batch_layout import BatchLayout
from ..data.sharding import Sharding, assembled
from ..runtime.agreement import assert_ranks_agree

LARGE = 2**30  # bytes; a larger gather warns


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShardSpec:
    """How a tensor (rows, tokens, ...) is sharded over the ranks of a group.

    Each rank's shard is (rows, its tokens, ...); with `joined`, (1, its tokens, ...).
    """

    sp: Sharding
    rows: int
    tokens: int  # of each row
    joined: bool  # whether rows lie end to end
    # for each rank of the group the positions of its tokens in a row; with joined, row * tokens + token
    orders: tuple[Tensor, ...]
    placement: BatchLayout | None  # of the batch
    name: str  # of the tensor, for messages
    narrowed: dict[Any, tuple[ShardSpec, Tensor]] = dataclasses.field(default_factory=dict)  # cache of `narrow`

    @classmethod
    def of(cls, sp: Sharding, rows: int, tokens: int, placement: BatchLayout | None, name: str) -> ShardSpec:
        """Return the ShardSpec of a sharded batch of rows x tokens."""
        batch_layout = placement or sp.place(tokens)
        return cls(
            sp=sp,
            rows=rows,
            tokens=tokens,
            joined=placement is not None and placement.rows is not None,
            orders=tuple(sp.held(tokens, batch_layout, rank) for rank in sp.groups.sp_order),
            placement=placement,
            name=name,
        )

    def named(self, name: str) -> ShardSpec:
        """Return the same ShardSpec for a tensor with another name."""
        return dataclasses.replace(self, name=name)

    def is_like(self, other: ShardSpec) -> bool:
        """Whether ranks have the same tokens in both."""
        return self.orders is other.orders and self.rows == other.rows

    @property
    def own(self) -> Tensor:
        """The positions of this rank's tokens."""
        return self.orders[self.sp.groups.sp_order.index(self.sp.rank)]

    @property
    def lead(self) -> tuple[int, int]:
        """The first two dims of this rank's shard."""
        return (1 if self.joined else self.rows), len(self.own)

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor (rows, tokens, ...)."""
        if self.joined:
            whole = whole.flatten(0, 1)[None]
        return whole.index_select(1, self.own.to(whole.device))

    def gathered(self, shard: Tensor) -> Tensor:
        """Return the whole tensor (rows, tokens, ...) of all ranks' shards. Collective over ranks of the sequence.

        Args:
            shard: (rows or 1, local tokens, ...), this rank's shard.

        Raises:
            DisagreementError: on all these ranks, if one of them makes another call.
            CommunicationError: if one of them makes no call.
        """
        shape = (self.rows, self.tokens, *shard.shape[2:])
        call = f"gather of whole {self.name}, which all ranks must make"
        assert_ranks_agree(self.sp.groups.control, call, {"shape": shape, "dtype": shard.dtype}, call=f"the {call},")
        size = shard.element_size() * torch.Size(shape).numel()
        if size > LARGE:
            warn_of_size(self.name, round(size / 2**30, 1))
        tokens = self.tokens * (self.rows if self.joined else 1)
        whole = assembled(shard.movedim(1, 0), self.orders, tokens, self.sp.group_for(shard), call).movedim(0, 1)
        return whole.reshape(shape).contiguous()

    def narrow(self, rows: slice, tokens: slice) -> tuple[ShardSpec, Tensor]:
        """Return the ShardSpec of some rows and tokens, and the indices of those tokens in this rank's shard.

        Without `joined` a shard has all rows, and the caller slices these.
        """
        key = rows.indices(self.rows), tokens.indices(self.tokens)
        if key not in self.narrowed:
            self.narrowed[key] = self._narrow(range(*key[0]), range(*key[1]))
        shard_spec, kept = self.narrowed[key]
        return shard_spec.named(self.name), kept

    def _narrow(self, rows: range, tokens: range) -> tuple[ShardSpec, Tensor]:
        chosen = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        if self.joined:
            chosen = (torch.tensor(rows, dtype=torch.int64, device="cpu")[:, None] * self.tokens + chosen).flatten()
        new_positions = torch.full((self.tokens * (self.rows if self.joined else 1),), -1, device="cpu")
        new_positions[chosen] = torch.arange(len(chosen), device="cpu")
        orders = [new_positions[order] for order in self.orders]
        shard_spec = dataclasses.replace(
            self,
            rows=len(rows),
            tokens=len(tokens),
            orders=tuple(order[order >= 0] for order in orders),
            narrowed={},
        )
        return shard_spec, (new_positions[self.own] >= 0).nonzero().flatten()


@functools.cache
def warn_of_size(name: str, gib: float) -> None:
    """Warn once in a process for each name and size (GiB)."""
    warnings.warn(
        f"whole {name} of {gib} GiB are gathered on every rank of a sequence: slice what is needed first, or work on "
        f"this rank's local shard, {name}.local (docs/whole.md)",
        stacklevel=2,
    )

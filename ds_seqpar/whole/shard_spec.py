"""How a tensor of whole sequences is spread over ranks, and how it is gathered from their shards."""

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

LARGE = 2**30  # bytes of a gather that is warned of


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShardSpec:
    """How a tensor (rows, tokens, ...) is spread over the ranks of a group.

    Each rank's shard is (rows, its tokens, ...); with `joined`, where rows lie end to end, (1, its tokens, ...).
    orders: for each Ulysses rank the positions of its tokens in a sequence; with joined, row * tokens + token.
    placement: of the batch. name: of the tensor, for messages. narrowed: cache of `narrow`.
    """

    sp: Sharding
    rows: int
    tokens: int
    joined: bool
    orders: tuple[Tensor, ...]
    placement: BatchLayout | None
    name: str
    narrowed: dict[Any, tuple[ShardSpec, Tensor]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, sp: Sharding, rows: int, tokens: int, placement: BatchLayout | None, name: str) -> ShardSpec:
        """The ShardSpec of a sharded batch of rows x tokens."""
        where = placement or sp.place(tokens)
        return cls(
            sp=sp,
            rows=rows,
            tokens=tokens,
            joined=placement is not None and placement.rows is not None,
            orders=tuple(sp.held(tokens, where, rank) for rank in sp.groups.sp_order),
            placement=placement,
            name=name,
        )

    def named(self, name: str) -> ShardSpec:
        """The same spread of a tensor with another name."""
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
        """This rank's shard of a whole tensor (rows, tokens, ...)."""
        if self.joined:
            whole = whole.flatten(0, 1)[None]
        return whole.index_select(1, self.own.to(whole.device))

    def gathered(self, shard: Tensor) -> Tensor:
        """The whole tensor (rows, tokens, ...) of all ranks' shards. Collective over the ranks of the sequence. Raises
        DisagreementError on all of them where one calls something else, CommunicationError where one calls nothing."""
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
        """(the ShardSpec of some rows and tokens; the indices of this rank's tokens that are among them). Without
        `joined` a shard has all rows, and the caller cuts these."""
        key = rows.indices(self.rows), tokens.indices(self.tokens)
        if key not in self.narrowed:
            self.narrowed[key] = self._narrow(range(*key[0]), range(*key[1]))
        found, kept = self.narrowed[key]
        return found.named(self.name), kept

    def _narrow(self, rows: range, tokens: range) -> tuple[ShardSpec, Tensor]:
        chosen = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        if self.joined:
            chosen = (torch.tensor(rows, dtype=torch.int64, device="cpu")[:, None] * self.tokens + chosen).flatten()
        places = torch.full((self.tokens * (self.rows if self.joined else 1),), -1, device="cpu")
        places[chosen] = torch.arange(len(chosen), device="cpu")
        orders = [places[order] for order in self.orders]
        found = dataclasses.replace(
            self,
            rows=len(rows),
            tokens=len(tokens),
            orders=tuple(order[order >= 0] for order in orders),
            narrowed={},
        )
        return found, (places[self.own] >= 0).nonzero().flatten()


@functools.cache
def warn_of_size(name: str, gib: float) -> None:
    """Warns once in a process for each name and size (GiB)."""
    warnings.warn(
        f"whole {name} of {gib} GiB are gathered on every rank of a sequence: slice what is needed first, or work on "
        f"this rank's local shard, {name}.local (docs/whole.md)",
        stacklevel=2,
    )

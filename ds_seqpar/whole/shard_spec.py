"""Specify how a whole-sequence tensor is sharded across ranks, and gather the tensor from its shards."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Hashable

import torch
from torch import Tensor

from ..data.batch_layout import BatchLayout
from ..data.sharding import Sharding, assembled, order_of
from ..guards.agreement import ALL

Chosen = range | tuple[int, ...]  # in ascending order
LARGE = 2**30  # size in bytes above which a gather logs a warning


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShardSpec:
    """Specification of how a tensor (rows, tokens, ...) is sharded across the ranks of a group.

    A rank's shard has the shape (rows, local tokens, ...) or, if `joined`, (1, local tokens, ...).
    """

    sp: Sharding
    rows: int
    tokens: int  # tokens per row
    placement: BatchLayout | None  # placement of the batch
    name: str  # name of the tensor in messages
    key: Hashable  # equal if ranks hold the same tokens of a row or, if joined, of all rows
    narrowed_from: tuple[ShardSpec, range, Chosen] | None = None  # (wider spec, selected rows, selected tokens)

    @classmethod
    def of(cls, sp: Sharding, rows: int, tokens: int, placement: BatchLayout | None, name: str) -> ShardSpec:
        """Return the ShardSpec for a sharded batch with the given rows and tokens."""
        return cls(sp=sp, rows=rows, tokens=tokens, placement=placement, name=name, key=("whole", tokens, placement))

    def named(self, name: str) -> ShardSpec:
        """Return the same ShardSpec with another tensor name."""
        return dataclasses.replace(self, name=name)

    def is_like(self, other: ShardSpec) -> bool:
        """Return whether ranks hold the same tokens in both specs."""
        return self.key == other.key and self.rows == other.rows

    @property
    def joined(self) -> bool:
        """Whether rows are concatenated."""
        return self.placement is not None and self.placement.rows is not None

    @property
    def lead(self) -> tuple[int, int]:
        """The first two dims of this rank's shard."""
        return (1 if self.joined else self.rows), len(self._local("cpu"))

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor (rows, tokens, ...)."""
        if self.joined:
            whole = whole.flatten(0, 1)[None]
        return whole.index_select(1, self._local(whole.device))

    def gathered(self, shard: Tensor) -> Tensor:
        """Return the whole tensor (rows, tokens, ...) from all ranks' shards.

        The call is collective across the ranks that share the sequence.

        Args:
            shard: This rank's shard (rows or 1, local tokens, ...).

        Raises:
            DisagreementError: One of the ranks that share the sequence makes a different call. Raised on all these
                ranks.
            CommunicationError: One of the ranks that share the sequence does not join the gather.
        """
        shape = (self.rows, self.tokens, *shard.shape[2:])
        call = f"gather of whole {self.name}, which all ranks must make"
        told = f"the gather of whole {self.name} (read it {ALL}, and print what was read on one)"
        self.sp.checker.check_deferred(call, {"shape": shape, "dtype": shard.dtype}, call=told)
        size = shard.element_size() * torch.Size(shape).numel()
        if size > LARGE:
            warn_of_size(self.name, round(size / 2**30, 1))
        order = self.sp.layout_tensors.get(
            ("order", self.key), shard.device, lambda: order_of([self._positions(r) for r in self.sp.groups.sp_order])
        )
        whole = assembled(shard.movedim(1, 0), order, self.sp.group_for(shard), call).movedim(0, 1)
        return whole.reshape(shape).contiguous()

    def narrow(
        self, rows: slice, tokens: slice | tuple[int, ...], device: torch.device | str = "cpu"
    ) -> tuple[ShardSpec, Tensor]:
        """Return the ShardSpec for selected rows and tokens, and the selected tokens' indices in this rank's shard.

        Unless `joined`, a shard contains all rows, and the caller must slice the rows.

        Args:
            rows: The selected rows.
            tokens: The selected tokens of each row, in ascending order.
            device: The device of the indices.
        """
        chosen = range(self.rows)[rows], tokens if isinstance(tokens, tuple) else range(self.tokens)[tokens]
        narrow = dataclasses.replace(
            self, rows=len(chosen[0]), tokens=len(chosen[1]), key=(self.key, *chosen), narrowed_from=(self, *chosen)
        )
        kept = self.sp.layout_tensors.get(
            ("kept", narrow.key), device, lambda: (narrow._narrowed(self.sp.rank) >= 0).nonzero().flatten()
        )
        return narrow, kept

    def _local(self, device: torch.device | str) -> Tensor:
        """Return the positions of this rank's tokens, on a device."""
        return self.sp.layout_tensors.get(("local", self.key), device, lambda: self._positions(self.sp.rank))

    def _positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens in a row. If joined, the positions are `row * tokens + token`."""
        if self.narrowed_from is not None:
            return (narrowed := self._narrowed(rank))[narrowed >= 0]
        return self.sp.held(self.tokens, self.placement or self.sp.place(self.tokens), rank)

    def _narrowed(self, rank: int) -> Tensor:
        """Return the position in the narrowed tensor, or -1, of each of a rank's tokens in the wider tensor."""
        assert self.narrowed_from is not None
        wide, rows, tokens = self.narrowed_from
        positions = wide._positions(rank)
        row, token = (positions // wide.tokens, positions % wide.tokens) if self.joined else (None, positions)
        place, found = _index_in(tokens, token)
        if row is not None:
            row, found_row = _index_in(rows, row)
            place, found = row * self.tokens + place, found & found_row
        return place.masked_fill(~found, -1)


def _index_in(chosen: Chosen, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each number in `chosen`, and whether `chosen` contains the number."""
    if isinstance(chosen, tuple):
        numbers = torch.tensor(chosen, device="cpu")
        index = torch.searchsorted(numbers, x).clamp(max=len(chosen) - 1)
        return index, numbers[index] == x
    index = (x - chosen.start) // chosen.step
    return index, (x >= chosen.start) & (x < chosen.stop) & ((x - chosen.start) % chosen.step == 0)


@functools.cache
def warn_of_size(name: str, gib: float) -> None:
    """Log a warning once per process for each name and size (GiB)."""
    warnings.warn(
        f"whole {name} of {gib} GiB are gathered on every rank of a sequence: slice what is needed first, or work on "
        f"this rank's local shard, {name}.local (docs/own_loop.md)",
        stacklevel=2,
    )

"""Which tokens of a batch each rank holds, and which see one another, where the configured layout does not say."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from .compiler.masks import Mask
from .compiler.shards import Shards, UnevenShards, members_positions, tokens_of


@dataclasses.dataclass(frozen=True)
class Placement:
    """What `shard_batches` returns as "placement" where the layout does not say everything: for packed documents,
    padding that is not plainly on the right, and lengths that ranks cannot share equally. Give its mask and shards
    to `sp.attention`, and itself to `sp.gather`. A patched model takes it as it is.

    mask, shards: by position in the batch. rows: how many sequences lie end to end in it, as one of (1, tokens); None:
    sequences stand beside one another, all shared alike. restarts: the positions at which a model's position_ids begin
    again at 0.
    """

    mask: Mask
    shards: UnevenShards
    rows: int | None = None
    restarts: tuple[int, ...] = (0,)

    @property
    def tokens(self) -> int:
        """Of all ranks, of a sequence or of all that lie end to end."""
        return sum(tokens_of(self.shards, "q", rank) for rank in range(self.shards.size))

    @property
    def digest(self) -> int:
        """The same number in every process."""
        return hash((hash(self.mask), hash(self.shards), self.rows or 0, self.restarts)) & 0xFFFFFFFF

    def __str__(self) -> str:
        return f"of {self.tokens} tokens {self.digest:08x}"

    def masked(self, window: int | None) -> Mask:
        """Its mask with a layer's window."""
        return self.mask if window is None else windowed(self.mask, window)

    def positions(self, ulysses: int, rank: int) -> Tensor:
        """Those that an SP rank holds, int64, on the CPU."""
        return held(self.shards, ulysses, rank)

    def position_ids(self, ulysses: int, rank: int) -> Tensor:
        """What a model is given for them."""
        positions, restarts = self.positions(ulysses, rank), torch.tensor(self.restarts, device="cpu")
        return positions - restarts[torch.searchsorted(restarts, positions, right=True) - 1]


@functools.lru_cache(maxsize=64)
def windowed(mask: Mask, window: int) -> Mask:
    return dataclasses.replace(mask, window=window)


@functools.lru_cache(maxsize=64)
def held(shards: Shards, ulysses: int, rank: int) -> Tensor:
    inner, member = divmod(rank, ulysses)
    return torch.tensor(members_positions(shards, "q", inner, ulysses)[member], dtype=torch.int64, device="cpu")

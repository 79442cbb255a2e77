"""A batch's own sharding and mask, for batches that the configured layout does not fully describe."""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch
from torch import Tensor

from ..base.fingerprint import Fingerprint
from ..core.compiler.sharding.masks import Mask
from ..core.compiler.sharding.shards import Shards, UnevenShards, runs_of_sp_rank, tokens_of


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Which tokens of a batch each rank has, and what they attend to.

    It is made for batches that the configured layout does not fully describe: packed documents, padding that is not
    simply on the right, and lengths that ranks cannot share equally. `shard_batches` returns it as "placement"; for
    other batches, "placement" is `EQUAL`. Pass its mask and shards to `sp.attention`, and the layout itself to
    `sp.gather`. A patched model takes it as it is.
    """

    mask: Mask  # numbers tokens by position in the batch
    shards: UnevenShards  # numbers tokens as `mask` does
    # how many sequences lie end to end, so that tensors are (1, tokens). None: tensors stay (rows, seq), and every row
    # is sharded in the same way
    rows: int | None = None
    # positions at which a model's position_ids begin again at 0, ascending; not read where documents have parents
    restarts: tuple[int, ...] = (0,)

    @property
    def tokens(self) -> int:
        """The tokens that all ranks hold together: one sequence, or all rows if they lie end to end."""
        return sum(tokens_of(self.shards, "q", rank) for rank in range(self.shards.size))

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.mask, self.shards.fingerprint, self.rows, self.restarts)

    def __str__(self) -> str:
        return f"of {self.tokens} tokens {self.fingerprint}"

    def mask_with_window(self, window: int | None) -> Mask:
        """Return the mask, restricted to a layer's window of this many tokens; None: the mask itself."""
        return self.mask if window is None or self.fits(window) else _with_window(self.mask, window)

    def fits(self, tokens: int) -> bool:
        """Return whether documents have parents, and no query sees a key this many tokens before it."""
        return bool(self.mask.parents) and tokens >= self.longest

    def positions(self, ulysses: int, rank: int) -> Tensor:
        """Return the positions of an SP rank's tokens, int64 (its tokens,), on the CPU. ulysses: the Ulysses size."""
        return positions_held(self.shards, ulysses, rank)

    def position_ids(self, ulysses: int, rank: int, after_padding: bool = False) -> Tensor:
        """Return the position_ids of an SP rank's tokens, int64, on the CPU.

        They count from 0 in each document; in a document with a parent, from the end of the parent.

        Args:
            ulysses: The Ulysses size.
            rank: The SP rank.
            after_padding: Whether a row that begins with padding is counted from its first token after the padding.
        """
        starts, origins = self._counted_from(after_padding)
        positions, edges = self.positions(ulysses, rank), torch.tensor(starts, device="cpu")
        return positions - torch.tensor(origins, device="cpu")[torch.searchsorted(edges, positions, right=True) - 1]

    @functools.cached_property
    def longest(self) -> int:
        """One more than the greatest of the position_ids."""
        starts, origins = self._counted_from()
        return max(end - origin for end, origin in zip((*starts[1:], self.tokens), origins, strict=True))

    def _counted_from(self, after_padding: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (positions at which position_ids start a new count; for each, the position that has number 0)."""
        if self.mask.parents:
            return self.mask.documents, self.mask.origins
        starts = (self.mask.documents or (0,)) if after_padding else self.restarts
        return starts, starts


class EqualShares(enum.Enum):
    """The "placement" of a sharded batch that the configured layout fully describes; a constant in graphs."""

    EQUAL = "equal"

    mask = shards = property(lambda self: None)  # what attention is given for it


EQUAL = EqualShares.EQUAL
Placement = BatchLayout | EqualShares


@functools.lru_cache(maxsize=64)
def _with_window(mask: Mask, window: int) -> Mask:
    return dataclasses.replace(mask, window=window)


@functools.lru_cache(maxsize=2)  # a batch's tensors ask in turn; a long sequence's positions are tens of megabytes
def positions_held(shards: Shards, ulysses: int, rank: int, side: str = "q") -> Tensor:
    """Return the positions of an SP rank's tokens, int64, on the CPU.

    They are its CP rank's tokens in order, in shares that differ by at most one token. So after the all-to-all the CP
    rank holds its runs again.
    """
    runs = runs_of_sp_rank(shards, side, ulysses, rank)
    positions = [torch.arange(run.start, run.last + 1, run.step, device="cpu") for run in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *positions])

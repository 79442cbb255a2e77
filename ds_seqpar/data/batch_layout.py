"""Sharding and mask for a batch that the configured layout does not fully describe."""

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
    """Assignment of a batch's tokens to ranks, with the batch's attention mask.

    `shard_batches` creates a `BatchLayout` for packed documents, for padding that is not simply on the right, and for
    lengths that ranks cannot share equally. A sharded batch stores its layout under "placement". A batch without a
    layout stores `EQUAL` under "placement". Pass the layout's mask and shards to `sp.attention`, and the layout itself
    to `sp.gather` or a patched model.
    """

    mask: Mask  # tokens are numbered by position in the batch
    shards: UnevenShards  # tokens are numbered as in `mask`
    # number of sequences that are concatenated in tensors of shape (1, tokens). None: tensors keep the shape (rows,
    # seq), and all rows are sharded in the same way
    rows: int | None = None
    # ascending positions at which a model's position_ids restart from 0; unused if documents have parents
    restarts: tuple[int, ...] = (0,)

    @property
    def tokens(self) -> int:
        """Total number of tokens on all ranks, in one sequence or, if rows are concatenated, in all rows."""
        return sum(tokens_of(self.shards, "q", rank) for rank in range(self.shards.size))

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.mask, self.shards.fingerprint, self.rows, self.restarts)

    def __str__(self) -> str:
        return f"of {self.tokens} tokens {self.fingerprint}"

    def mask_with_window(self, window: int | None) -> Mask:
        """Return the mask restricted to a layer's sliding window of `window` tokens. If `window` is None, return the
        mask itself.
        """
        return self.mask if window is None or self.fits(window) else _with_window(self.mask, window)

    def fits(self, tokens: int) -> bool:
        """Return whether documents have parents and no query attends to a key that is `tokens` or more positions
        back.
        """
        return bool(self.mask.parents) and tokens >= self.longest

    def positions(self, ulysses: int, rank: int) -> Tensor:
        """Return the positions of an SP rank's tokens as an int64 CPU tensor. `ulysses` is the Ulysses size."""
        return positions_held(self.shards, ulysses, rank)

    def position_ids(self, ulysses: int, rank: int, after_padding: bool = False) -> Tensor:
        """Return the position_ids of an SP rank's tokens as an int64 CPU tensor.

        Position ids start at 0 in each document. In a document with a parent, position ids continue from the end of the
        parent.

        Args:
            ulysses: The Ulysses size.
            rank: The SP rank.
            after_padding: Whether position ids in a left-padded row start at its first token after the padding.
        """
        starts, origins = self._counted_from(after_padding)
        positions, edges = self.positions(ulysses, rank), torch.tensor(starts, device="cpu")
        return positions - torch.tensor(origins, device="cpu")[torch.searchsorted(edges, positions, right=True) - 1]

    @functools.cached_property
    def longest(self) -> int:
        """Largest position id plus one."""
        starts, origins = self._counted_from()
        return max(end - origin for end, origin in zip((*starts[1:], self.tokens), origins, strict=True))

    def _counted_from(self, after_padding: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the positions at which position_ids restart and, for each restart, the position that counts as 0."""
        if self.mask.parents:
            return self.mask.documents, self.mask.origins
        starts = (self.mask.documents or (0,)) if after_padding else self.restarts
        return starts, starts


class EqualShares(enum.Enum):
    """The value of "placement" for batches that the configured layout fully describes.

    Compiled graphs treat an enum member as a constant.
    """

    EQUAL = "equal"

    mask = shards = property(lambda self: None)  # the values passed to attention


EQUAL = EqualShares.EQUAL
Placement = BatchLayout | EqualShares


@functools.lru_cache(maxsize=64)
def _with_window(mask: Mask, window: int) -> Mask:
    return dataclasses.replace(mask, window=window)


@functools.lru_cache(maxsize=2)  # all tensors of a batch share an entry; long sequences take tens of megabytes
def positions_held(shards: Shards, ulysses: int, rank: int, side: str = "q") -> Tensor:
    """Return the positions of an SP rank's tokens as an int64 CPU tensor.

    SP ranks divide their CP rank's tokens, in order, into shares that differ by at most one token. The all-to-all
    therefore restores the CP rank's runs.
    """
    runs = runs_of_sp_rank(shards, side, ulysses, rank)
    positions = [torch.arange(run.start, run.last + 1, run.step, device="cpu") for run in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *positions])

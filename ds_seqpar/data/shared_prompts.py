"""Merge rows that share a prompt, such as several completions, into one row that contains the prompt once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import IGNORE
from .documents import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedPrompts:
    """A batch's concatenated rows, with each shared prompt stored only once.

    A row's prompt ends before the token that predicts the row's first non-ignored label. The predicting token stays in
    every row, because the predicted label differs between rows. Padding, tokens starting at the last label, and rows
    without labels are dropped because no label depends on them.
    """

    shape: tuple[int, int]  # (rows, tokens) of the batch
    tokens: Tensor  # int64 (merged tokens,): index row * tokens + token of each merged token in the batch
    # int64: indices of merged tokens that belong to a single row; only these tokens predict non-ignored labels
    own: Tensor
    # int64 (merged tokens,): position in the batch's row minus merged position; None: all differences are 0
    offsets: Tensor | None
    weights: Tensor  # int64 (merged tokens,): number of rows that contain each token
    documents: Lengths
    parents: tuple[int, ...]

    def to(self, device: torch.device) -> SharedPrompts:
        """Return a copy with `tokens` and `own` on a device."""
        return dataclasses.replace(self, tokens=self.tokens.to(device), own=self.own.to(device))

    def joined(self, x: Tensor) -> Tensor:
        """Return the merged tokens (1, merged tokens, ...) of a batch's tensor (rows, tokens, ...)."""
        return x.flatten(0, 1).index_select(0, self.tokens.to(x.device))[None]

    def by_row(self, x: Tensor) -> Tensor:
        """Scatter a tensor (1, merged tokens, ...) into a tensor (rows, tokens, ...).

        Only the tokens in `own` are copied. All other entries are 0.
        """
        places, own = self.tokens[self.own].to(x.device), self.own.to(x.device)
        rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return rows.index_copy(0, places, x[0].index_select(0, own)).unflatten(0, self.shape)


class Piece(NamedTuple):
    """A document in the batch after repeated prompts have been removed."""

    row: int  # row of the batch that provides the tokens
    begin: int  # index of the first token in the row
    end: int
    rows: int  # number of rows that contain the piece
    parent: int  # number of the piece that precedes this piece in these rows, or -1

    @property
    def length(self) -> int:
        return self.end - self.begin


def shared_prompts(
    ids: Tensor, mask: Tensor | None, labels: Tensor, least: float = 0.0, keep_all: bool = False
) -> SharedPrompts | None:
    """Find the prompts that rows share.

    Args:
        ids: The batch's token ids, int64 (rows, tokens), on the CPU.
        mask: bool (rows, tokens), with False for padding before and after a row's tokens; None if there is no padding.
        labels: Unshifted labels, int64 (rows, tokens), with -100 for tokens that do not count.
        least: Minimum fraction of the rows' unpadded tokens that sharing must save.
        keep_all: Whether to keep tokens on which no label depends, as needed for a loss that counts tokens. Padding is
            always dropped.

    Returns:
        The rows without repeated prompts, or None if no rows share a prompt or less than `least` would be saved. The
        result is also None if the first token of a row has a non-ignored label, which could only be predicted from
        padding.
    """
    rows, columns = ids.shape
    counts, begins, lengths = labels != IGNORE, [0] * rows, [columns] * rows
    if mask is not None:
        begins, lengths = mask.int().argmax(1).tolist(), mask.sum(1).tolist()
        if bool((counts & ~mask).any()):
            return None
    counts = F.pad(counts[:, 1:], (1, 0), value=False)  # no token predicts a row's first label
    labeled = counts.any(1).tolist()
    first = counts.int().argmax(1).tolist()
    last = (columns - 1 - counts.flip(1).int().argmax(1)).tolist()
    # rows of each prompt; the same tokens at other positions in a row count as a different prompt
    by_prompt: dict[object, list[int]] = {}
    for row in range(rows):
        prompt: object = row
        if labeled[row]:
            if first[row] <= begins[row]:
                return None
            prompt = begins[row], ids[row, begins[row] : first[row] - 1].contiguous().numpy().tobytes()
        if labeled[row] or (keep_all and lengths[row]):
            by_prompt.setdefault(prompt, []).append(row)
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)] if keep_all else last
    pieces = _pieces(by_prompt.values(), begins, first, ends)
    saves = sum(piece.length for piece in pieces) <= (1 - least) * sum(lengths)
    return _joined(pieces, (rows, columns), begins) if saves and any(piece.parent >= 0 for piece in pieces) else None


def _pieces(by_prompt: Iterable[list[int]], begins: list[int], first: list[int], ends: list[int]) -> list[Piece]:
    """Return the documents in rows grouped by prompt, given each row's start, first non-ignored label and end."""
    pieces: list[Piece] = []
    for members in by_prompt:
        head, parent = members[0], -1
        if len(members) > 1 and first[head] - 1 > begins[head]:
            parent = len(pieces)
            pieces.append(Piece(head, begins[head], first[head] - 1, len(members), -1))
        for row in members:
            pieces.append(Piece(row, begins[row] if parent < 0 else first[row] - 1, ends[row], 1, parent))
    return pieces


def _joined(pieces: list[Piece], shape: tuple[int, int], begins: list[int]) -> SharedPrompts:
    lengths, parents = tuple(piece.length for piece in pieces), tuple(piece.parent for piece in pieces)
    shared = {*parents}
    here = torch.arange(sum(lengths), device="cpu").split(lengths)
    by_piece = torch.tensor([(x.row * shape[1] + x.begin, begins[x.row], x.rows) for x in pieces], device="cpu")
    starts, offsets, weights = by_piece.repeat_interleave(torch.tensor(lengths, device="cpu"), dim=0).unbind(1)
    return SharedPrompts(
        shape=shape,
        tokens=starts + torch.cat([places - places[0] for places in here]),
        own=torch.cat([places for number, places in enumerate(here) if number not in shared]),
        offsets=offsets if bool(offsets.any()) else None,
        weights=weights,
        documents=lengths,
        parents=parents,
    )

"""Divide packed documents among CP ranks so that all ranks have the same number of tokens and causal pairs.

A causal pair is a query and a key that the query sees under a causal mask with document boundaries.

The set of ranks is halved recursively. At each halving, documents are arranged in a row, sorted by their mean number of
keys per query. The left half of the ranks receives the documents in one window of the row, sized to hold that half's
share of the tokens. The window is moved until it also contains the half's share of pairs. A suitable position exists
because the number of pairs grows as the window moves toward documents with more keys. If the window cuts a document,
the left half takes the front of the document, so that k/v are sent from lower ranks to higher ranks. If one document
has most of the pairs, even the last window may have too few pairs. The document is then cut as in the zigzag layout:
the left half takes enough tokens from both ends to reach its share of pairs.

All documents in a tree form a single item in the row, unless the tree has too many tokens or pairs.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..base.errors import InputError, whole_number
from ..core.compiler.sharding.layout import LAYOUTS, Run, Runs
from ..core.compiler.sharding.masks import Mask
from ..core.compiler.sharding.shards import UnevenShards

TOLERANCE = 256  # allowed error in a half's number of pairs: 1 / TOLERANCE of its share, plus the pairs of one token


def balanced(lengths: Sequence[int], ranks: int, parents: tuple[int, ...] = ()) -> tuple[Runs, ...]:
    """Return the runs of packed documents on each CP rank, for `UnevenShards(balanced(lengths, ranks))`.

    All ranks compute the same runs. Token counts differ by at most one between ranks. The numbers of causal pairs
    differ by a few parts in a thousand between ranks, or by the pairs of one token. At most `2 * (ranks - 1)` documents
    are cut. All other documents stay whole on one rank. The ranks have at most `len(lengths) + 4 * (ranks - 1)` runs in
    total. A block of k/v is sent only if it contains part of a cut document. A single document is divided as in the
    zigzag layout, into an early and a late chunk for each rank. The chunk lengths differ by at most one token.

    Args:
        lengths: Number of tokens in each document, in order from position 0.
        ranks: Number of CP ranks.
        parents: Number of each document's parent, as in `Mask`. For the number of cut documents, a tree counts as one
            document, unless the tree has most of the tokens or pairs.

    Raises:
        InputError: A length or the number of ranks is not a positive integer, or the parents are invalid.
    """
    count, starts = whole_number(ranks), Mask.documents_of(lengths)
    if count is None or count < 1:
        raise InputError(f"tokens are dealt to a whole number of ranks from 1 on; got {ranks!r}")
    lengths = [operator.index(length) for length in lengths]
    mask = Mask(documents=starts, parents=parents)
    trees: list[list[_Piece]] = []
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        base = mask.origins[number] if mask.parents else start
        end = start - base + length
        if base == start:  # a root document
            trees.append([])
        trees[-1].append(_piece(base, start - base, end, end, end))
    return tuple(_runs(rank_pieces) for rank_pieces in _pieces_of_ranks([_tree(tree) for tree in trees], count))


class _Piece(NamedTuple):
    """Tokens p to q - 1 and r to s - 1 of the document that starts at `base`; q = r = s if there is one interval."""

    base: int  # start of the document, or of its parents if they are placed directly before the document
    p: int
    q: int
    r: int
    s: int
    beside: int  # where the document continues: -1 on lower ranks, 1 on higher ranks, 0 on neither or both
    tokens: int
    pairs: int

    def of_ends(self, front: int, back: int) -> int:
        """Return the number of causal pairs of the first `front` and the last `back` tokens."""
        return (front * (2 * self.p + front + 1) + back * (2 * self.s - back + 1)) // 2

    def ends(self, tokens: int) -> tuple[int, int]:
        """Return how many of `tokens` tokens are taken from the front and from the back.

        From a piece with one interval, all tokens are taken from the front. From a piece with two intervals, the tokens
        are chosen to have the same mean number of keys as the whole piece.
        """
        _, p, q, r, s, _, total, pairs = self
        if q == s:
            return tokens, 0
        # the solution of of_ends(front, tokens - front) = pairs * tokens / total
        front = tokens * ((2 * s + 1 - tokens) * total - 2 * pairs) // (2 * (s - p - tokens) * total)
        front = min(max(front, tokens - (s - r), 0), q - p, tokens)
        return front, tokens - front

    def cut(self, front: int, back: int) -> tuple[_Piece, _Piece]:
        """Return both ends as one piece for the lower ranks, and the part between the ends."""
        base, p, q, r, s, beside, _, _ = self
        low, high = p + front, s - back
        q, r = (high, high) if q == s else (q, r)
        return (
            _piece(base, p, low, high, s, 0 if beside < 0 else 1),
            _piece(base, low, q, r, high, 0 if beside > 0 else -1),
        )

    def intervals(self) -> list[_Piece]:
        return [_piece(self.base, lo, hi, hi, hi) for lo, hi in ((self.p, self.q), (self.r, self.s)) if lo < hi]


def _piece(base: int, p: int, q: int, r: int, s: int, beside: int = 0) -> _Piece:
    """Return a piece without empty intervals, and with adjacent intervals merged."""
    if p == q:  # only the second interval
        p, q, r = r, s, s
    elif r == s:  # only the first interval
        r = s = q
    elif q == r:
        q = r = s
    pairs = (q - p) * (p + q + 1) + (s - r) * (r + s + 1)
    return _Piece(base, p, q, r, s, beside, q - p + s - r, pairs // 2)


class _Tree:
    """Documents with a common ancestor, as single-interval pieces in order of position.

    Lower ranks receive the front of the tree.
    """

    def __init__(self, pieces: list[_Piece], beside: int) -> None:
        self.pieces, self.beside, self.base, self.p = pieces, beside, pieces[0].base, pieces[0].p
        self.starts = [0, *accumulate([piece.tokens for piece in pieces])]
        self.before = [0, *accumulate([piece.pairs for piece in pieces])]
        self.tokens, self.pairs = self.starts[-1], self.before[-1]

    def of_ends(self, front: int, back: int) -> int:
        at = bisect_right(self.starts, front, hi=len(self.pieces)) - 1
        return self.before[at] + self.pieces[at].of_ends(front - self.starts[at], 0)

    def ends(self, tokens: int) -> tuple[int, int]:
        return tokens, 0

    def cut(self, front: int, back: int) -> tuple[_Item, _Item]:
        at = bisect_right(self.starts, front) - 1
        left, right = self.pieces[:at], self.pieces[at:]
        if front > self.starts[at]:
            (low, high), right = right[0].cut(front - self.starts[at], 0), right[1:]
            left, right = [*left, low], [high, *right]
        return _tree(left, 0 if self.beside < 0 else 1), _tree(right, 0 if self.beside > 0 else -1)

    def intervals(self) -> list[_Piece]:
        return self.pieces


_Item = _Piece | _Tree


def _tree(pieces: list[_Piece], beside: int = 0) -> _Item:
    """Return the pieces of a tree as one item.

    A document without a parent or children remains a piece, which can be cut at both ends.
    """
    return _Tree(pieces, beside) if len(pieces) > 1 else pieces[0]._replace(beside=beside)


def _pieces_of_ranks(pieces: list[_Item], ranks: int) -> list[list[_Item]]:
    if ranks == 1 or not pieces:
        return [pieces] + [[]] * (ranks - 1)
    if len(pieces) == 1 and isinstance(pieces[0], _Piece) and pieces[0].q == pieces[0].s:
        return _zigzag(pieces[0], ranks)
    left, right = _halved(pieces, ranks // 2, ranks)
    return _pieces_of_ranks(left, ranks // 2) + _pieces_of_ranks(right, ranks - ranks // 2)


def _zigzag(piece: _Piece, ranks: int) -> list[list[_Item]]:
    """Return each rank's pieces, with the outermost tokens on the first rank and the innermost tokens on the last."""
    taken = [piece.tokens * rank // ranks for rank in range(ranks + 1)]
    edges = [(piece.p + (outer + 1) // 2, piece.s - outer // 2) for outer in taken]
    return [
        [_piece(piece.base, low, lower, upper, high)] if (low, high) != (lower, upper) else []
        for (low, high), (lower, upper) in pairwise(edges)
    ]


def _halved(pieces: list[_Item], share: int, ranks: int) -> tuple[list[_Item], list[_Item]]:
    """Return the pieces of the lower `share` of the ranks, and the pieces of the other ranks.

    If a piece belongs to a document that continues on lower or higher ranks, the piece is assigned to the adjacent half
    if possible. From the adjacent half, the piece's k/v arrive after one hop.
    """
    tokens = sum([piece.tokens for piece in pieces]) * share // ranks
    pairs = sum([piece.pairs for piece in pieces]) * share // ranks
    if not tokens:
        return [], pieces
    pieces = sorted(pieces, key=lambda piece: (piece.pairs / piece.tokens, piece.base, piece.p))
    sides = {piece.beside for piece in pieces}
    for stay in ({-1, 1}, {-1}, {1}):
        if stay <= sides:
            lower = [piece for piece in pieces if piece.beside == -1 and -1 in stay]
            higher = [piece for piece in pieces if piece.beside == 1 and 1 in stay]
            row = _Row(
                [piece for piece in pieces if piece.beside not in stay],
                tokens - sum([piece.tokens for piece in lower]),
            )
            wanted = pairs - sum([piece.pairs for piece in lower])
            if row.reaches(wanted):
                left, right = row.window(wanted)
                return lower + left, right + higher
    row = _Row(pieces, tokens)
    trees = [piece for piece in pieces if isinstance(piece, _Tree)]
    if trees and not row.reaches(pairs):
        largest = max(trees, key=lambda tree: tree.tokens)
        return _halved([*(piece for piece in pieces if piece is not largest), *largest.pieces], share, ranks)
    left, right = row.window(pairs) if row.pairs(row.last) >= pairs else row.ends(pairs)
    if abs(sum([piece.pairs for piece in left]) - pairs) * TOLERANCE > pairs:
        # if one interval is much longer than the other, no choice of ends has the mean number of keys
        apart: list[_Item] = [interval for piece in pieces for interval in piece.intervals()]
        if len(apart) > len(pieces):
            return _halved(apart, share, ranks)
    return left, right


class _Row:
    """Pieces side by side, with windows of `width` tokens over the row.

    If a window begins or ends inside a piece, `_Piece.ends` selects the tokens that the window takes from the piece.
    """

    def __init__(self, pieces: list[_Item], width: int) -> None:
        self.pieces, self.width = pieces, width
        self.starts = [0, *accumulate([piece.tokens for piece in pieces])]
        self.before = [0, *accumulate([piece.pairs for piece in pieces])]
        self.last = self.starts[-1] - width  # last position of the window

    def reaches(self, pairs: int) -> bool:
        """Return whether some window is guaranteed to contain this number of causal pairs."""
        return 0 < self.width < self.starts[-1] and self.pairs(0) <= pairs <= self.pairs(self.last)

    def edges(self, at: int) -> tuple[int, int, int, int]:
        """Return the first and last piece of the window at `at`, each with its number of tokens in the window."""
        first = bisect_right(self.starts, at) - 1
        tokens = self.starts[first + 1] - at
        if tokens >= self.width:
            return first, self.width, first + 1, 0
        end = bisect_right(self.starts, at + self.width) - 1
        return first, tokens, end, at + self.width - self.starts[end]

    def pairs(self, at: int) -> int:
        """Return the number of causal pairs in the window that begins at `at`."""
        first, tokens, end, end_tokens = self.edges(at)
        total = self.before[end] - self.before[first + 1] + self.pieces[first].of_ends(*self.pieces[first].ends(tokens))
        return total + self.pieces[end].of_ends(*self.pieces[end].ends(end_tokens)) if end_tokens else total

    def window(self, pairs: int) -> tuple[list[_Item], list[_Item]]:
        """Return the pieces inside and outside the window that contains this number of pairs, to within the pairs of
        one token.
        """
        at = bisect_left(range(self.last + 1), pairs, key=self.pairs)
        at -= at > 0 and pairs - self.pairs(at - 1) < self.pairs(at) - pairs
        first, tokens, end, end_tokens = self.edges(at)
        inside, outside = self.pieces[first + 1 : end], self.pieces[:first] + self.pieces[end + bool(end_tokens) :]
        for index, taken in ((first, tokens), (end, end_tokens)):
            if not taken:
                continue
            piece = self.pieces[index]
            if taken == piece.tokens:
                inside.append(piece)
            else:
                left, right = piece.cut(*piece.ends(taken))
                inside.append(left)
                outside.append(right)
        return inside, outside

    def ends(self, pairs: int) -> tuple[list[_Item], list[_Item]]:
        """Return the pieces inside and outside the last window. Call this method if even the last window has too few
        pairs.

        From its first piece, the last window takes fewer tokens at the front and more tokens at the back.
        """
        first, tokens, _, _ = self.edges(self.last)
        piece = self.pieces[first]
        if tokens == piece.tokens:
            return self.pieces[first:], self.pieces[:first]
        assert isinstance(piece, _Piece)  # `_halved` has already split trees
        wanted = pairs - (self.before[-1] - self.before[first + 1])
        front, back = piece.ends(tokens)
        most = front if piece.q == piece.s else min(front, piece.s - piece.r - back)
        moved = bisect_left(range(most), wanted, key=lambda more: piece.of_ends(front - more, back + more))
        left, right = piece.cut(front - moved, back + moved)
        return [left, *self.pieces[first + 1 :]], [*self.pieces[:first], right]


def _runs(pieces: list[_Item]) -> Runs:
    """Return the tokens of pieces as runs, with adjacent runs merged."""
    runs: list[tuple[int, int]] = []  # (start, end)
    for start, end in sorted(
        [(interval.base + interval.p, interval.base + interval.q) for piece in pieces for interval in piece.intervals()]
    ):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return tuple([Run(start, 1, end - start) for start, end in runs])


@functools.lru_cache(maxsize=64)
def shards_of(layout: str, lengths: tuple[int, ...], ranks: int, parents: tuple[int, ...] = ()) -> UnevenShards:
    """Return the shards of packed documents with these lengths in tokens.

    Only the "balanced" layout depends on document boundaries.

    Args:
        layout: Name of the layout.
        lengths: Number of tokens in each document.
        ranks: Number of CP ranks.
        parents: Number of each document's parent, as in `Mask`.
    """
    if layout == "balanced":
        return UnevenShards(balanced(lengths, ranks, parents))
    held = [LAYOUTS[layout].runs(sum(lengths), ranks, rank) for rank in range(ranks)]
    blocks_per_rank = LAYOUTS[layout].blocks_per_rank
    return UnevenShards(
        held if blocks_per_rank == 1 else [(run,) for runs in held for run in runs], blocks_per_rank=blocks_per_rank
    )

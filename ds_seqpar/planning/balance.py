"""Deals the tokens of packed documents to inner ranks, so that all have as many tokens and as many causal products."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import InputError
from .layout import Run, Runs


class _Piece(NamedTuple):
    """Tokens [p, q) and [r, s) of the document that starts at `base`; of one part only q = r = s."""

    base: int
    p: int
    q: int
    r: int
    s: int
    beside: int  # the document goes on: -1 on ranks before these, 1 on ranks after these, 0 on neither or both
    tokens: int
    products: int

    def outer(self, front: int, back: int) -> int:
        """Products of its first `front` and last `back` tokens."""
        p, s = self.p, self.s
        return (front * (2 * p + front + 1) + back * (2 * s - back + 1)) // 2

    def ends(self, tokens: int) -> tuple[int, int]:
        """How many of so many tokens are cut off in front and how many at the back: of one part all in front."""
        p, q, r, s = self.p, self.q, self.r, self.s
        if q == s:
            return tokens, 0
        gap = s - p - tokens
        front = (tokens * ((2 * s + 1 - tokens) * self.tokens - 2 * self.products)) // (2 * gap * self.tokens)
        front = min(max(front, tokens - (s - r), 0), q - p, tokens)
        return front, tokens - front

    def cut(self, front: int, back: int) -> tuple[_Piece, _Piece]:
        """Its outer and its inner part; the outer one is for the ranks before."""
        (base, p, q, r, s, beside, _, _) = self
        left, right = (0, -1) if beside < 0 else (1, 0) if beside > 0 else (1, -1)
        middle = s - back if q == s else q
        return (
            _piece(base, p, p + front, s - back, s, left),
            _piece(base, p + front, middle, min(max(r, middle), s - back), s - back, right),
        )


def balanced(lengths, ranks):
    starts = [0, *accumulate(lengths)]
    held: list[Runs] = []
    pieces = [_piece(base, 0, length, length, length, 0) for base, length in zip(starts, lengths)]
    _deal(pieces, ranks, held)
    return tuple(held)


def _piece(base, p, q, r, s, beside):
    if p == q:
        p, q, r = r, s, s
    elif r == s or q == r:
        q = r = s = q if r == s else s
    tokens = q - p + s - r
    return _Piece(base, p, q, r, s, beside, tokens, (q * (q + 1) - p * (p + 1) + s * (s + 1) - r * (r + 1)) // 2)


def _deal(pieces, ranks, held):
    if ranks == 1:
        held.append(_runs(pieces))
        return
    left, right = _halved(pieces, ranks // 2, ranks)
    _deal(left, ranks // 2, held)
    _deal(right, ranks - ranks // 2, held)


STAT = {"s1p": 0, "s1": 0, "s2": 0, "broken": 0}

def _halved(pieces, share, ranks):
    tokens = sum([piece.tokens for piece in pieces]) * share // ranks
    products = sum([piece.products for piece in pieces]) * share // ranks
    if not tokens:
        return [], pieces
    for kept in (True, False):
        before = [p for p in pieces if kept and p.beside < 0]
        after = [p for p in pieces if kept and p.beside > 0]
        if not kept or before or after:
            free = [p for p in pieces if not (kept and p.beside)]
            found = _window(free, tokens - sum(p.tokens for p in before), products - sum(p.products for p in before), not kept)
            if found:
                STAT["s1p" if kept else "s1"] += 1
                left, right = before + found[0], found[1] + after
                err = sum(p.products for p in left) - products
                if abs(err) * 200 > products and any(p.q < p.s for p in pieces):
                    STAT["broken"] += 1
                    pieces = [_piece(p.base, x, y, y, y, p.beside) for p in pieces for x, y in ((p.p, p.q), (p.r, p.s)) if y > x]
                    left, right = _window(pieces, tokens, products, True)
                return left, right


def _window(pieces, tokens, products, must):
    pieces = sorted(pieces, key=lambda p: (p.products / p.tokens, p.base, p.p))
    ends = [0, *accumulate([p.tokens for p in pieces])]
    done = [0, *accumulate([p.products for p in pieces])]
    if not 0 < tokens < ends[-1]:
        return None

    def place(u):
        i = bisect_right(ends, u) - 1
        x = ends[i + 1] - u
        if x >= tokens:
            return i, tokens, i, 0
        j = bisect_right(ends, u + tokens) - 1
        return i, x, j, u + tokens - ends[j]

    def at(u):
        i, x, j, y = place(u)
        total = pieces[i].outer(*pieces[i].ends(x))
        if j > i:
            total += done[j] - done[i + 1]
            if y:
                total += pieces[j].outer(*pieces[j].ends(y))
        return total

    lo, hi = 0, ends[-1] - tokens
    if at(lo) > products and not must:
        return None
    if at(hi) < products:
        if not must:
            return None
        STAT["s2"] += 1
        i, x, j, y = place(hi)
        piece = pieces[i]
        want = products - (done[-1] - done[i + 1])
        lo, hi = max(0, x - (piece.s - piece.r if piece.s > piece.r else x)), piece.ends(x)[0]
        while lo < hi:
            mid = (lo + hi) // 2
            if piece.outer(mid, x - mid) <= want:
                hi = mid
            else:
                lo = mid + 1
        outer, inner = piece.cut(lo, x - lo)
        return [outer, *pieces[i+1:]], [*pieces[:i], *([inner] if inner.tokens else [])]
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if at(mid) <= products:
            lo = mid
        else:
            hi = mid
    if abs(at(hi) - products) < abs(at(lo) - products):
        lo = hi
    i, x, j, y = place(lo)
    left, right = list(pieces[i+1:j]), list(pieces[:i])
    for k, part in ((i, x), (j, y)) if j > i else ((i, x),):
        if k < len(pieces):
            if part == pieces[k].tokens:
                left.append(pieces[k])
            elif part == 0:
                right.append(pieces[k])
            else:
                a, b = pieces[k].cut(*pieces[k].ends(part))
                left.append(a)
                right.append(b)
    right += pieces[j + 1 if j > i else i + 1:]
    return left, right


def _runs(pieces):
    parts = sorted((b + x, b + y) for b, p, q, r, s, *_ in pieces for x, y in ((p, q), (r, s)) if y > x)
    runs = []
    for lo, hi in parts:
        if runs and runs[-1][1] == lo:
            runs[-1][1] = hi
        else:
            runs.append([lo, hi])
    return tuple(Run(lo, 1, hi - lo) for lo, hi in runs)

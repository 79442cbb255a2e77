"""Masks, which define the keys that each query sees. A mask can combine causality, windows, a prefix, documents with
parents, and blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....base.errors import InputError, whole_number
from .layout import Run, Runs
from .op_handles import handle_of

Triple = tuple[int, int, int]  # (start, step, length), the fields of a Run as a plain tuple that unpacks faster
END = sys.maxsize


class Level(NamedTuple):
    """Ascending, disjoint blocks of a mask: queries [q0[i], q1[i]) see only the keys [k0[i], k1[i]) of the level."""

    k0: tuple[int, ...]
    k1: tuple[int, ...]
    q0: tuple[int, ...]
    q1: tuple[int, ...]

    def between(self, q: tuple[int, int], kv: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield (k0, k1, q0, q1) for the blocks that may contain both given queries and given keys.

        `q` and `kv` are the first and last positions of the queries and of the keys.
        """
        begin = max(bisect_right(self.q1, q[0]), bisect_right(self.k1, kv[0]))
        end = min(bisect_right(self.q0, q[1]), bisect_right(self.k0, kv[1]))
        return zip(self.k0[begin:end], self.k1[begin:end], self.q0[begin:end], self.q1[begin:end], strict=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask over global positions: a query at position p sees the keys in [lo(p), hi(p)).

    The bounds lo(p) and hi(p) never decrease as p increases, and every query sees its own position. If several limits
    are set, all of them apply. Documents with parents are the only exception: a query also sees its document's parent,
    the parent's parent, and so on.

    Args:
        causal: Whether queries see only keys up to their own position.
        window: Maximum number of keys, at least 1, that a query sees up to and including its own position p. The query
            sees no key before position p - window + 1. None means no limit on the left.
        window_right: Maximum number of keys, at least 0, that a query sees after its own position p. The query sees no
            key after position p + window_right. `window_right` requires causal=False. None means no limit on the right.
        documents: Start positions of the documents in the sequence, ascending from 0. A query sees only keys in its own
            document. An empty tuple means a single document, and (0,) is normalized to the empty tuple.
        parents: Index of each document's parent, or -1 for none. A query also sees all keys of its document's parent,
            and everything that the parent sees. Documents must be in depth-first order: each child directly follows its
            parent or the complete subtree of a sibling. Parents cannot be combined with a window. An empty tuple means
            that no document has a parent.
        prefix: Number of keys at the start of the sequence that are visible to every query (a prefix-LM). A prefix
            requires a causal mask without a window or documents.
        blocks: Spans (first, end) of tokens that attend to each other in both directions, such as the tokens of an
            image. A query in [first, end) also sees the later keys of its block. Spans must be ascending, disjoint and
            within one document. Blocks require a causal mask without a prefix.
        whole_blocks: With blocks and a window, whether a query also sees keys of its own block that lie before its
            window. Models differ in whether a window limits visibility within a block.

    Raises:
        InputError: A field has an invalid type or value, or fields are incompatible.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    prefix: int = 0
    window_right: int | None = None
    parents: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        if type(self.causal) is not bool:
            raise InputError(f"causal must be True or False; got {self.causal!r}")
        window = None if self.window is None else whole_number(self.window) or 0
        if window is not None and window < 1:
            raise InputError(f"a window must be a whole number of keys from 1 on, or None for all; got {self.window!r}")
        right = None if self.window_right is None else whole_number(self.window_right)
        if self.window_right is not None and (right is None or right < 0 or self.causal):
            raise InputError(
                f"window_right must be a whole number of keys from 0 on, with causal=False; got {self.window_right!r} "
                f"and causal={self.causal}"
            )
        prefix, documents = whole_number(self.prefix), _checked_documents(self.documents)
        if prefix is None or prefix < 0:
            raise InputError(f"a prefix must be a whole number of keys from 0 on; got {self.prefix!r}")
        if prefix and (not self.causal or window or documents):
            conflict = Mask(causal=self.causal, window=window, documents=documents)
            raise InputError(
                f"a prefix needs a causal mask without window and documents; got prefix {prefix} and {conflict}, give "
                "each document a call of its own"
            )
        parents = _checked_parents(self.parents, len(documents) or 1)
        if parents and (window or right is not None):
            limits = Mask(causal=self.causal, window=window, window_right=right)
            raise InputError(
                f"documents with parents need a mask without a window; got {limits}, give each document a "
                "row of its own, behind copies of its parents"
            )
        blocks = _checked_blocks(self.blocks, documents)
        if blocks and (not self.causal or prefix):
            limits = Mask(causal=self.causal, prefix=prefix)
            raise InputError(
                f"blocks need a causal mask without a prefix; got {limits}, leave out the one or the other"
            )
        fields = {"window": window, "window_right": right, "prefix": prefix, "documents": documents, "parents": parents,
                  "blocks": blocks, "whole_blocks": bool(self.whole_blocks and blocks and window)}  # fmt: skip
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        _ = self.ancestors, self.handle, self._hash  # check the document order; cached for compiled graphs

    def __reduce__(self) -> tuple:
        """Rebuild a copied or unpickled mask, because a handle is valid only in the process that created it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(Mask, **fields), ()

    @functools.cached_property
    def handle(self) -> int:
        """The mask's handle for custom ops, which is not a dataclass field because FSDP2 rebuilds dataclasses from all
        fields.
        """
        return handle_of(self)

    @functools.cached_property
    def _hash(self) -> int:  # hashes only numbers, so every process gets the same hash
        right = -1 if self.window_right is None else self.window_right
        extra: tuple[object, ...] = (self.prefix, right) if self.prefix or right >= 0 else ()
        extra += (self.blocks, self.whole_blocks) if self.blocks else ()
        return hash((self.causal, self.window or 0, self.documents, *extra, *((self.parents,) if self.parents else ())))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        limits = ["causal"] * self.causal + [f"window {self.window}"] * bool(self.window)
        limits += [f"prefix {self.prefix}"] * bool(self.prefix)
        limits += [f"window_right {self.window_right}"] * (self.window_right is not None)
        limits += [f"{len(self.documents)} documents{' with parents' * bool(self.parents)}"] * bool(self.documents)
        blocks = "whole blocks" if self.whole_blocks else "blocks"
        limits += [f"{len(self.blocks)} {blocks.removesuffix('s' * (len(self.blocks) == 1))}"] * bool(self.blocks)
        return ", ".join(limits) or "full"

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.scale_free

    @property
    def right(self) -> int | None:
        """The maximum number of keys that a query sees after its own position, ignoring the prefix and blocks. None
        means no limit.
        """
        return 0 if self.causal else self.window_right

    @property
    def scale_free(self) -> bool:
        """Whether visibility depends only on the order of positions, not on the distances between them."""
        limits = self.window, self.documents, self.prefix, self.blocks
        return not any(limits) and self.window_right is None

    def bounds(self, p: int) -> tuple[int, int]:
        """Return (lo, hi): a query at position p sees the keys from lo to hi - 1 in its own document.

        If there is no upper limit, `hi` is END.
        """
        lo, hi = 0, END if self.right is None else max(p + 1 + self.right, self.prefix)
        if self.documents:
            document = bisect_right(self.documents, p)
            lo = self.documents[document - 1]
            if document < len(self.documents):
                hi = min(hi, self.documents[document])
        if self.window and p - self.window >= lo:
            lo = p - self.window + 1
        for first, end in self.blocks[(block := bisect_right(self.blocks, (p, END)) - 1) : block + 1]:
            if first <= p < end:
                return (min(lo, first) if self.whole_blocks else lo), end
        return lo, hi

    @functools.cached_property
    def _outside(self) -> Mask:
        """The mask for queries outside blocks."""
        return dataclasses.replace(self, blocks=())

    @functools.cached_property
    def _inside(self) -> Mask:
        """The mask for queries inside a block, applied to the keys up to the end of the block."""
        return dataclasses.replace(self, causal=False, blocks=(), whole_blocks=False)

    @functools.cached_property
    def _whole(self) -> Mask:
        """The mask that lets each query see its whole block."""
        return dataclasses.replace(self._inside, window=None)

    def parts(self, q: Triple) -> Iterator[tuple[int, Triple, tuple[int, int], Mask]]:
        """Split a run of queries into parts, each with a mask without blocks.

        Yields:
            (number of the run's queries before the part, the part, range [k0, k1) of keys that the part may see, the
            part's mask).
        """
        start, step, length = q
        last, position = start + step * (length - 1), start
        spans: list[tuple[int, int, tuple[int, int], Mask]] = []
        for first, end in self.blocks[max(0, bisect_right(self.blocks, (start, END)) - 1) :]:
            if first > last:
                break
            far = min(end, first + self.window) if self.whole_blocks and self.window else end
            spans += [(position, first, (0, END), self._outside), (first, far, (0, end), self._inside)]
            spans += [(far, end, (first, end), self._whole)] * (far < end)
            position = end
        for lo, hi, keys, mask in (*spans, (position, END, (0, END), self._outside)):
            before, part = between(q, lo, hi)
            if part[2] > 0:
                yield before, part, keys, mask

    @functools.cached_property
    def own(self) -> Level:
        """The level that lets each document see itself."""
        starts = self.documents or (0,)
        ends = (*starts[1:], END)
        return Level(starts, ends, starts, ends)

    @functools.cached_property
    def ancestors(self) -> tuple[Level, ...]:
        """Levels of documents that their descendants see completely: root documents first, then their children, and so
        on.
        """
        levels: list[list[tuple[int, ...]]] = []
        path: list[int] = []  # the current document, preceded by its ancestors
        for number, parent in enumerate((*self.parents, -1)):
            start = self.documents[number] if number < len(self.documents) else END
            while path and path[-1] != parent:
                seen = path.pop()
                if seen + 1 < number:
                    levels += [[] for _ in range(len(path) + 1 - len(levels))]
                    end = self.documents[seen + 1]
                    levels[len(path)].append((self.documents[seen], end, end, start))
            if not path and parent != -1:
                raise InputError(
                    "documents with parents must be in depth-first order, each right after its parent or after all "
                    f"that is below another child of it; got parent {parent} of document {number}"
                )
            path.append(number)
        return tuple(Level(*zip(*level, strict=True)) for level in levels)

    @functools.cached_property
    def origins(self) -> tuple[int, ...]:
        """Start position of each document minus the number of earlier tokens that the document sees. The tuple is empty
        if no document has a parent.
        """
        origins: list[int] = []
        for start, parent in zip(self.documents, self.parents, strict=False):
            origins.append(start if parent < 0 else start - self.documents[parent + 1] + origins[parent])
        return tuple(origins)

    @staticmethod
    def documents_of(lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the `documents` argument for consecutive documents of the given lengths, starting at position 0.

        Args:
            lengths: Number of tokens of each document, as a sequence, array or tensor of integers.

        Raises:
            InputError: `lengths` is not a list of positive integers.
        """
        try:
            values = list(lengths)
        except TypeError as error:
            raise InputError(f"documents_of needs a list of lengths; got {lengths!r:.80}") from error
        if wrong := [length for length in values if (whole_number(length) or 0) < 1]:
            raise InputError(
                f"documents must have lengths that are whole numbers from 1 on; got a length of {wrong[0]!r:.80}"
            )
        return tuple(itertools.accumulate(map(operator.index, values[:-1]), initial=0)) if values else ()


def _checked_documents(documents: tuple[int, ...]) -> tuple[int, ...]:
    """Return validated documents in the form that a mask stores: a single document becomes ()."""
    starts = [whole_number(start) for start in documents] if type(documents) is tuple else [None]
    if None in starts:
        raise InputError(f"documents must be a tuple of whole numbers, their first positions; got {documents!r:.80}")
    documents = tuple(start for start in starts if start is not None)
    if documents and documents[0] != 0:
        raise InputError(f"documents must start with position 0; got {documents[0]}")
    for before, after in itertools.pairwise(documents):
        if after <= before:
            raise InputError(f"first positions of documents must ascend; got {after} after {before}")
    return documents if len(documents) > 1 else ()


def _checked_parents(parents: tuple[int, ...], documents: int) -> tuple[int, ...]:
    """Return validated parents in the form that a mask stores: () if no document has a parent."""
    numbers = [whole_number(parent) for parent in parents] if type(parents) is tuple else [None]
    if None in numbers or (numbers and len(numbers) != documents):
        raise InputError(
            f"parents must be a tuple of numbers of documents, or -1 for none, one for each of the {documents} "
            f"documents; got {parents!r:.80}"
        )
    return tuple(number for number in numbers if number is not None) if {*numbers} - {-1} else ()


def _checked_blocks(blocks: tuple[tuple[int, int], ...], documents: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return validated blocks in the form that a mask stores. Blocks with a single token are dropped, since they have
    no effect.
    """
    try:
        pairs = tuple((whole_number(first), whole_number(end)) for first, end in blocks)
    except (TypeError, ValueError):
        pairs = ((None, None),)
    checked = [(first, end) for first, end in pairs if first is not None and end is not None]
    if type(blocks) is not tuple or len(checked) < len(pairs):
        raise InputError(f"blocks must be a tuple of (first position, position after the last); got {blocks!r:.80}")
    for (_, before), (first, end) in itertools.pairwise([(0, 0), *checked]):
        if not before <= first < end:
            raise InputError(
                f"blocks must ascend, with a token at least and disjoint; got {(first, end)} after {before}"
            )
        if bisect_right(documents, first) < bisect_left(documents, end):
            start = documents[bisect_right(documents, first)]
            raise InputError(f"a block must be within a document; got {(first, end)}, in which one begins at {start}")
    return tuple((first, end) for first, end in checked if end - first > 1)


CAUSAL, FULL = Mask(), Mask(causal=False)


def between(run: Triple, lo: int, hi: int) -> tuple[int, Triple]:
    """Return the number of a run's tokens before position lo, and the part of the run in [lo, hi).

    If the run has no tokens in [lo, hi), the length of the part is 0 or negative.
    """
    start, step, length = run
    before = -((start - lo) // step) if start < lo else 0
    end = min(length, -((start - hi) // step))
    return before, (start + before * step, step, end - before)


def visibility(q_blocks: Sequence[Runs], kv_blocks: Sequence[Runs], mask: Mask) -> tuple[int, ...]:
    """Return a bitmask for each q block that marks the kv blocks that the q block sees.

    Bit j is set if any query in the block sees any key in `kv_blocks[j]`.
    """
    keys = _Keys(kv_blocks)
    if mask.scale_free:
        first = [0, *itertools.accumulate(keys.bits, operator.or_)]  # first[i]: the blocks of the first i runs
        return tuple(first[bisect_left(keys.starts, _end(runs, mask))] for runs in q_blocks)
    return tuple(keys.seen_by(runs, mask) for runs in q_blocks)


class _Keys:
    """The runs of all kv blocks, sorted by start. `bits[i]` is `1 << block` for the block of run i."""

    def __init__(self, blocks: Sequence[Runs]) -> None:
        runs = [(run, 1 << block) for block, runs in enumerate(blocks) for run in runs if run.length]
        self.runs = sorted(runs, key=lambda pair: pair[0].start)
        self.bits = [bit for _, bit in self.runs]
        self.starts, self.lasts = [run.start for run, _ in self.runs], [run.last for run, _ in self.runs]
        # if runs have no gaps and are not nested, the runs that overlap an interval are consecutive
        self.plain = all(run.step == 1 for run, _ in runs) and all(a <= b for a, b in itertools.pairwise(self.lasts))

    def seen_by(self, queries: Runs, mask: Mask) -> int:
        """Return a bitmask of the blocks that the queries see."""
        seen = 0
        for run in queries:
            if not run.length:
                continue
            lo, hi = _reach(run, mask)
            seen = self._add(seen, run, lo, hi, mask)
            # queries without gaps already see every position in documents that begin later
            keys = 0, lo - 1 if run.step == 1 else END
            for level in mask.ancestors:
                for k0, k1, q0, q1 in level.between((run.start, run.last), keys):
                    if between(run, q0, q1)[1][2] > 0:
                        seen = self._add(seen, Run(k0, 1, 1), k0, k1, FULL)
        return seen

    def _add(self, seen: int, run: Run, lo: int, hi: int, mask: Mask) -> int:
        """Return `seen` plus the blocks visible to a run of queries. (lo, hi) is the run's `_reach`."""
        end = bisect_left(self.starts, hi)
        if self.plain and run.step == 1:
            return functools.reduce(operator.or_, self.bits[bisect_left(self.lasts, lo) : end], seen)
        for keys, bit in self.runs[:end]:
            if not seen & bit and keys.last >= lo and _meets(run, keys, lo, hi, mask):
                seen |= bit
        return seen


def _end(runs: Runs, mask: Mask) -> int:
    """Return the position after the last key that any query in the runs sees, given a scale-free mask."""
    return max((mask.bounds(run.last)[1] for run in runs if run.length), default=0)


def _reach(q: Run, mask: Mask) -> tuple[int, int]:
    """Return (lo, hi): the queries of a run see positions from lo to hi - 1.

    If the run has no gaps, its queries see every position in that range. Each query sees its own position, so there are
    no gaps between the ranges of adjacent queries.
    """
    last = q.start + q.step * (q.length - 1)
    return mask.bounds(q.start)[0], mask.bounds(last)[1]


def _meets(q: Run, kv: Run, lo: int, hi: int, mask: Mask) -> bool:
    """Return whether any query of a run sees any key of another run.

    (lo, hi) is the `_reach` of the queries. The caller ensures that the first key is before hi and that the last key is
    not before lo.
    """
    if kv.step > 1 and kv.start < lo:
        first = kv.start - (kv.start - lo) // kv.step * kv.step  # first key at or after lo
        if first > kv.last or first >= hi:
            return False
    if q.step > 1 and mask.blocks:
        return any(_meets_part(Run(*part), kv, span, its) for _, part, span, its in mask.parts(q))
    if q.step == 1 or not (mask.documents or (mask.window and mask.window < q.step)):
        return True  # the queries see every position from lo to hi - 1
    queries, keys = (q.start, q.step, q.length), (kv.start, kv.step, kv.length)
    if mask.window and not _meets_in_document(queries, keys, mask):
        return False
    if not mask.documents:
        return True
    begin = bisect_right(mask.documents, max(q.start, kv.start)) - 1
    for document in range(begin, bisect_right(mask.documents, min(q.last, kv.last))):
        edges = (*mask.documents[document : document + 2], END)[:2]
        (_, a), (_, b) = between(queries, *edges), between(keys, *edges)
        if a[2] > 0 and b[2] > 0 and _meets_in_document(a, b, mask):
            return True
    return False


def _meets_part(q: Run, kv: Run, span: tuple[int, int], mask: Mask) -> bool:
    """Return whether any query of a run sees any key that another run has within a span of positions."""
    (lo, hi), keys = _reach(q, mask), Run(*between(kv, *span)[1])
    lo, hi = max(lo, span[0]), min(hi, span[1])
    return keys.length > 0 and keys.start < hi and keys.last >= lo and _meets(q, keys, lo, hi, mask)


def _meets_in_document(q: Triple, kv: Triple, mask: Mask) -> bool:
    """Return whether any query of a run sees any key of another run, if both runs are in the same document.

    Under a window, the result depends on the nearest key at or before each query. The distance from a query to the
    nearest key repeats every key_step / gcd(step, key_step) queries. If a query also sees later keys, the query's
    position p is shifted to the last position that the query sees.
    """
    (p, step, rows), (key, key_step, keys) = q, kv
    last_key, window = key + key_step * (keys - 1), mask.window or END
    if mask.right is None:
        return p - last_key < window
    p, window = p + mask.right, window + mask.right
    last = p + step * (rows - 1)
    p += max(0, -((p - key) // step)) * step
    for _ in range(key_step // math.gcd(step, key_step)):
        if p > last or p >= last_key:
            break
        if (p - key) % key_step < window:
            return True
        p += step
    p += max(0, -((p - last_key) // step)) * step
    return p <= last and p - last_key < window

"""Placement of a micro-batch's documents, each of which is whole on one rank or split across several ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..core.compiler.sharding.layout import Run, owned
from ..core.compiler.sharding.shards import Shards, UnevenShards
from .balance import shards_of


class Apart(UnevenShards):
    """Shards of a pack in which every document is whole on one rank.

    Each rank computes the loss only for its own documents.
    """


class Part(NamedTuple):
    """The tokens of one document that are on one rank."""

    document: int  # number of the document in the pack
    start: int  # offset of the first token in the document
    step: int
    tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Pack:
    """A group's micro-batch, which consists of concatenated documents.

    Args:
        documents: Length of each document in tokens.
        shards: Tokens of each CP rank.
        ulysses: Number of ranks that share a CP rank's heads.
    """

    documents: tuple[int, ...]
    shards: Shards
    ulysses: int = 1

    @classmethod
    def shared(cls, documents: tuple[int, ...], layout: str, size: int, ulysses: int) -> Pack:
        """Return a pack whose documents are divided among all ranks by a layout."""
        return cls(documents, shards_of(layout, documents, size // ulysses), ulysses)

    @classmethod
    def of_whole(cls, by_rank: Sequence[Sequence[int]]) -> Pack:
        """Return a pack in which each rank has its own documents."""
        counts = [sum(documents) for documents in by_rank]
        starts = itertools.accumulate(counts, initial=0)
        runs = [(Run(start, 1, count),) if count else () for start, count in zip(starts, counts, strict=False)]
        return cls(tuple(itertools.chain(*by_rank)), Apart(runs))

    @functools.cached_property
    def parts(self) -> list[list[Part]]:
        """The document parts on each CP rank, in order of position."""
        return [self._parts(rank) for rank in range(self.shards.size)]

    def _parts(self, rank: int) -> list[Part]:
        starts, found = [0, *itertools.accumulate(self.documents)], list[Part]()
        for run in self.shards.runs("q", owned(rank, self.shards.blocks_per_rank)):
            for document in range(bisect_right(starts, run.start) - 1, bisect_left(starts, run.last + 1)):
                low, high = starts[document : document + 2]
                first = run.start + -(-max(0, low - run.start) // run.step) * run.step
                if tokens := len(range(first, min(high, run.last + 1), run.step)):
                    found.append(Part(document, first - low, run.step, tokens))
        return found

    @functools.cached_property
    def cut(self) -> set[int]:
        """The numbers of the documents that are split across CP ranks."""
        holders = Counter(document for parts in self.parts for document in {part.document for part in parts})
        return {document for document, ranks in holders.items() if ranks > 1}

"""Join what all ranks of a hanging job do to one report of who waits for whom."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import MOST_SHOWN, ranks_in_words


class State(NamedTuple):
    """What a rank does.

    Attributes:
        where: Its process.
        words: What it does, without its subject. Of a rank that waits, the name of the awaited one is to follow.
        what: What it waits in; "" where it does not wait.
        awaited: The global ranks that it waits for.
        messages: The message that it waits for of each of these, in words that are the same on both ends, or none.
        posted: The messages that it has started in its current program.
        programs: How many it has run before that.
        stack: The user's frames.
    """

    where: str
    words: str
    what: str = ""
    awaited: Sequence[int] = ()
    messages: Sequence[str] = ()
    posted: Sequence[str] = ()
    programs: int = 0
    stack: str = ""

    def comes_to(self, other: State, rank: int) -> bool:
        """Return whether this rank, for which another waits, has come to where that one waits."""
        if other.messages:
            asked = {x for x, peer in zip(other.messages, other.awaited, strict=True) if peer == rank}
            is_posted = self.programs == other.programs and asked <= {*self.posted}
            return is_posted or self.programs > other.programs
        return self.what == other.what and len(other.awaited) > 1


def report(states: Mapping[int, State], first: int, seconds: float) -> tuple[str, str]:
    """Return (a text about all ranks, the sentence that names the rank which the others wait for).

    Args:
        states: Of all ranks.
        first: A rank that has waited too long.
        seconds: How long that is.
    """
    path, counts = [first], Counter(state.what for state in states.values())
    while late := [rank for rank in states[path[-1]].awaited if not states[rank].comes_to(states[path[-1]], rank)]:
        # a rank that does not wait, or that is in another call than most, keeps the others from going on
        path.append(min(late, key=lambda rank: (states[rank].what != "", counts[states[rank].what], rank)))
        if path[-1] in path[:-1]:
            break
    last = path[-1]
    circle = path[path.index(last) : -1]
    if circle:
        last = min(circle, key=lambda rank: (counts[states[rank].what], states[rank].programs))
        before = circle.index(last) - 1
        path = [*circle[before:], *circle[:before], circle[before]]
    clauses, end = [f"{states[rank].words} rank {other}" for rank, other in itertools.pairwise(path)], states[last]
    if circle and counts[end.what] < max(counts[states[rank].what] for rank in circle):
        clauses[-1] += f": rank {last} is in another call than the others"
    elif circle:
        clauses[-1] += ": none of these goes on"
    elif end.what:
        peers = [*dict.fromkeys(end.awaited)]
        link = f"the link between {ranks_in_words([last, *peers])} is slow or down, or they send different things"
        clauses.append(f"{end.words} {ranks_in_words(peers)}, which has come to it too: {link}")
    else:
        clauses.append(end.words)
    if len(clauses) > MOST_SHOWN:
        clauses[1:-2] = [f"waits, as {len(clauses) - 4} more ranks after it, for rank {path[len(clauses) - 2]}"]
    by_words: dict[str, list[int]] = {}
    for rank, state in states.items():
        by_words.setdefault(f"{state.words} another rank" if state.what else state.words, []).append(rank)
    lines = [f"{ranks_in_words(ranks)}: {words}" for words, ranks in list(by_words.items())[: 4 * MOST_SHOWN]]
    lines += [f"rank {rank}, {states[rank].where}\n{states[rank].stack}" for rank in dict.fromkeys((path[0], last))]
    text = "\n".join(["ds_seqpar: what all ranks do:", *lines]).rstrip()
    return text, f"after {seconds:g} s of waiting rank {path[0]} {', which '.join(clauses)}"

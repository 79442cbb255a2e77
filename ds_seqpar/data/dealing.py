"""Deal the samples of an optimizer step to groups of ranks and to micro-batches, so that groups have equal costs.

Samples go to the group that has the least cost so far, the most expensive first, and in the group to a micro-batch in
the same way. A micro-batch has a cap on its tokens, and all groups have as many micro-batches, since they reduce
gradients and gather parameters together. One more micro-batch is tried where the cap leaves costs too unequal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base.errors import InputError

Pack = list[int]  # the samples of a micro-batch, by their numbers in the step, ascending
EVEN = 1.05  # the most expensive group's cost over the mean, for which no more micro-batches are tried
WHOLE = 1.02  # the same of ranks, for which no more samples are shared
TRIED = 3  # numbers of micro-batches, from the least one on


def deal(
    tokens: Sequence[int], costs: Sequence[float], groups: int, cap: int, taken: Sequence[float] = ()
) -> list[list[Pack]]:
    """Return the packs of each group. The result is the same wherever the arguments are.

    Args:
        tokens: of each sample, from 1 to `cap`.
        costs: of each sample, above 0.
        groups: how many there are.
        cap: most tokens of a pack.
        taken: of each group, what it costs that it has other packs; () for none.

    Returns:
        For each group as many packs, some of which may be empty; the most expensive ones come first.

    Raises:
        InputError: a sample has more tokens than a pack.
    """
    if tokens and max(tokens) > cap:
        raise InputError(
            f"a sample must fit one micro-batch, tokens_per_rank * size = {cap} tokens; got {max(tokens)} in sample "
            f"{tokens.index(max(tokens))} of a step, cut it to {cap}, or raise tokens_per_rank or size"
        )
    taken = taken or [0.0] * groups
    even, largest = EVEN * (sum(costs) + sum(taken)) / groups, max([*costs, *taken])
    least = max(1, -(-sum(tokens) // (cap * groups)))
    best: tuple[float, list[list[Pack]]] | None = None
    for count in range(least, len(tokens) + least + 1):
        dealt = _dealt(tokens, costs, taken, count, cap)
        if dealt is not None:
            most = max(of_groups(dealt, costs, taken))
            if best is None or most < best[0]:
                best = most, dealt
            if most <= max(even, largest):
                break
        if best is not None and count >= least + TRIED:
            break
    assert best is not None  # with a micro-batch for each sample, all fit
    return best[1]


class Dealt(NamedTuple):
    """The packs of each group: those that its ranks share, and those of which each rank has whole samples."""

    shared: list[list[Pack]]
    whole: list[list[list[Pack]]]  # of each group, for each micro-batch the samples of each rank


def deal_by_length(tokens: Sequence[int], costs: Sequence[float], groups: int, size: int, cap: int) -> Dealt:
    """Return packs in which samples are whole on a rank, but for the longest ones.

    Ranks share what has more tokens than a rank may have. Where the others give ranks unequal costs, they share the
    longest of these too.

    Args:
        tokens: of each sample, from 1 to `cap * size`.
        costs: of each sample, above 0.
        groups: how many there are.
        size: ranks of a group.
        cap: most tokens of a rank in a pack.

    Raises:
        InputError: a sample has more tokens than a pack.
    """
    order = sorted(range(len(tokens)), key=lambda sample: (-tokens[sample], sample))
    least = sum(count > cap for count in tokens)
    tried = min(least + TRIED * size, len(order))
    for number in [*range(least, tried), len(order)]:
        longest, samples = sorted(order[:number]), sorted(order[number:])
        of = [costs[x] for x in longest], [costs[x] for x in samples]
        shared = (
            deal([tokens[x] for x in longest], of[0], groups, cap * size) if longest else [[] for _ in range(groups)]
        )
        taken = [cost / size for cost in of_groups(shared, of[0], [0.0] * groups) for _ in range(size)]
        none: list[list[Pack]] = [[]] * (groups * size)
        whole = deal([tokens[x] for x in samples], of[1], groups * size, cap, taken) if samples else none
        if max(of_groups(whole, of[1], taken)) <= WHOLE * sum(costs) / (groups * size):
            break
    return Dealt(
        [[[longest[x] for x in pack] for pack in packs] for packs in shared],
        [
            [[[samples[x] for x in pack] for pack in row] for row in zip(*whole[at : at + size], strict=True)]
            for at in range(0, groups * size, size)
        ],
    )


def of_groups(dealt: Sequence[list[Pack]], costs: Sequence[float], taken: Sequence[float]) -> list[float]:
    """Return what the packs of each group cost, with what it had before."""
    return [
        own + sum(costs[sample] for pack in packs for sample in pack) for own, packs in zip(taken, dealt, strict=True)
    ]


def _dealt(
    tokens: Sequence[int], costs: Sequence[float], taken: Sequence[float], count: int, cap: int
) -> list[list[Pack]] | None:
    """Return `count` packs for each group; None where this order of samples leaves one that fits nowhere."""
    by_group = _spread(range(len(tokens)), tokens, costs, taken, count * cap)
    dealt = []
    for samples in by_group or ():
        packs = next(filter(None, (_spread(samples, tokens, by, [0.0] * count, cap) for by in (costs, tokens))), None)
        if packs is None:
            return None
        dealt.append(sorted(map(sorted, packs), key=lambda pack: (-sum(costs[sample] for sample in pack), pack)))
    return dealt or None


def _spread(
    samples: Sequence[int], tokens: Sequence[int], costs: Sequence[float], taken: Sequence[float], cap: int
) -> list[list[int]] | None:
    """Return the samples in bins, each in that of the least cost which has room; None where none has.

    `taken` is what each bin costs before.
    """
    bins = len(taken)
    spread: list[list[int]] = [[] for _ in range(bins)]
    load, room = [*taken], [cap] * bins
    for sample in sorted(samples, key=lambda sample: (-costs[sample], sample)):
        fitting = [number for number in range(bins) if room[number] >= tokens[sample]]
        if not fitting:
            return None
        to = min(fitting, key=lambda number: (load[number], number))
        spread[to].append(sample)
        load[to] += costs[sample]
        room[to] -= tokens[sample]
    return spread

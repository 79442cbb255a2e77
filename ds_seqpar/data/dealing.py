"""Distribute the samples of an optimizer step across groups and micro-batches so that groups have equal costs.

The most expensive samples are assigned first, each to the group with the lowest cost so far. Within a group, each
sample is assigned to the micro-batch with the lowest cost so far. The number of tokens in a micro-batch is limited. All
groups have the same number of micro-batches, because groups reduce gradients and gather parameters together. If the
token limit leaves costs too uneven, one more micro-batch is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base.errors import InputError

Pack = list[int]  # numbers of a micro-batch's samples within the step, ascending
EVEN = 1.05  # stop adding micro-batches if the largest group cost, relative to the mean, is at most this
WHOLE = 1.02  # stop sharing samples if the largest rank cost, relative to the mean, is at most this
TRIED = 3  # number of micro-batch counts that are tried, starting with the smallest
# fractions of samples that are spread evenly before the other samples fill up the micro-batches
LEADING = (0.9, 0.8, 0.0)


def deal(tokens: Sequence[int], costs: Sequence[float], groups: int, cap: int) -> list[list[Pack]]:
    """Return the packs of each group. The result depends only on the arguments.

    Args:
        tokens: Number of tokens in each sample, between 1 and `cap`.
        costs: Cost of each sample, greater than 0.
        groups: Number of groups.
        cap: Maximum number of tokens in a pack.

    Returns:
        A list of packs for each group, sorted by descending cost. All lists have the same length. Some packs may be
        empty.

    Raises:
        InputError: A sample has more tokens than fit in a pack.
    """
    if tokens and max(tokens) > cap:
        raise InputError(
            f"a sample must fit one micro-batch, tokens_per_rank * size = {cap} tokens; got {max(tokens)} in sample "
            f"{tokens.index(max(tokens))} of a step, cut it to {cap}, or raise tokens_per_rank or size"
        )
    even = max([EVEN * sum(costs) / groups, *costs])
    least = max(1, -(-sum(tokens) // (cap * groups)))
    best: tuple[float, list[list[Pack]]] | None = None
    for count in range(least, len(tokens) + least + 1):
        dealt = _dealt(tokens, costs, groups, count, cap)
        if dealt is not None:
            most = max(of_groups(dealt, costs))
            if best is None or most < best[0]:
                best = most, dealt
            if most <= even:
                break
        if best is not None and count >= least + TRIED:
            break
    assert best is not None  # all samples fit if there is one micro-batch per sample
    return best[1]


class Dealt(NamedTuple):
    """The packs of each group: packs that all ranks in the group share, and packs in which samples stay whole on one
    rank.
    """

    shared: list[list[Pack]]
    whole: list[list[list[Pack]]]  # samples by group, micro-batch and rank


def deal_by_length(
    tokens: Sequence[int], costs: Sequence[float], groups: int, size: int, cap: int, sharing: float = 1.0
) -> Dealt:
    """Return packs in which all samples except the longest are whole on one rank.

    A sample is shared by the ranks in a group if it has more tokens than one rank may hold. If the remaining samples
    would make ranks wait for each other, the longest of these samples are shared too, provided that sharing takes less
    time.

    Args:
        tokens: Number of tokens in each sample, between 1 and `cap * size`.
        costs: Cost of each sample, greater than 0.
        groups: Number of groups.
        size: Number of ranks in a group.
        cap: Maximum number of tokens per rank in a pack.
        sharing: Cost of sharing a sample that fits on one rank, relative to its cost on one rank.

    Raises:
        InputError: A sample has more tokens than fit in a pack.
    """
    order = sorted(range(len(tokens)), key=lambda sample: (-tokens[sample], sample))
    least, even = sum(count > cap for count in tokens), WHOLE * sum(costs) / (groups * size)
    best: tuple[float, Dealt] | None = None
    for number in [*range(least, min(least + TRIED * size, len(order))), len(order)]:
        longest, samples = sorted(order[:number]), sorted(order[number:])
        of_longest = [costs[x] * (sharing if tokens[x] <= cap else 1) for x in longest]
        shared = deal([tokens[x] for x in longest], of_longest, groups, cap * size) if longest else [[]] * groups
        taken = [cost / size for cost in of_groups(shared, of_longest)]
        whole = _whole(samples, tokens, costs, taken, size, cap)
        most = max(own + _seconds(packs, costs) for own, packs in zip(taken, whole, strict=True))
        if best is None or most < best[0]:
            best = most, Dealt([[[longest[x] for x in pack] for pack in packs] for packs in shared], whole)
        if most <= even:
            break
    assert best is not None
    return best[1]


def of_groups(dealt: Sequence[list[Pack]], costs: Sequence[float]) -> list[float]:
    """Return the total cost of each group's packs."""
    return [sum(costs[sample] for pack in packs for sample in pack) for packs in dealt]


def _seconds(packs: Sequence[Sequence[Pack]], costs: Sequence[float]) -> float:
    """Return the total cost of micro-batches, in each of which all ranks wait for the slowest rank."""
    return sum(max(sum(costs[sample] for sample in pack) for pack in by_rank) for by_rank in packs)


def _dealt(tokens: Sequence[int], costs: Sequence[float], groups: int, count: int, cap: int) -> list[list[Pack]] | None:
    """Return `count` packs for each group, or None if a sample does not fit in any pack."""
    by_group = _spread(range(len(tokens)), tokens, costs, [0.0] * groups, count * cap)
    dealt = []
    for samples in by_group or ():
        packs = next(filter(None, (_spread(samples, tokens, by, [0.0] * count, cap) for by in (costs, tokens))), None)
        if packs is None:
            return None
        dealt.append(sorted(map(sorted, packs), key=lambda pack: (-sum(costs[sample] for sample in pack), pack)))
    return dealt or None


def _whole(
    samples: Sequence[int], tokens: Sequence[int], costs: Sequence[float], taken: Sequence[float], size: int, cap: int
) -> list[list[list[Pack]]]:
    """Return each group's samples by micro-batch and rank, using as few micro-batches as possible.

    Args:
        samples: Numbers of the samples.
        tokens: Number of tokens in each sample.
        costs: Cost of each sample.
        taken: Cost that is already assigned to each rank, by group.
        size: Number of ranks in a group.
        cap: Maximum number of tokens per rank in a micro-batch.
    """
    groups, before = len(taken), [own * size for own in taken]
    least = -(-sum(tokens[sample] for sample in samples) // (cap * size * groups))
    for count in range(least, len(samples) + 1):
        by_group = _spread(samples, tokens, costs, before, count * size * cap) or ()
        found = [_side_by_side(of_group, tokens, costs, count, size, cap) for of_group in by_group]
        if found and None not in found:
            return [packs for packs in found if packs is not None]
    raise AssertionError("with a micro-batch for each sample, all fit")


def _side_by_side(
    samples: Sequence[int], tokens: Sequence[int], costs: Sequence[float], count: int, size: int, cap: int
) -> list[list[Pack]] | None:
    """Assign samples to the ranks of `count` micro-batches so that ranks spend little time waiting for each other.

    Most samples are spread across all ranks of all micro-batches. Per-rank packs with similar costs are then put in the
    same micro-batch. The remaining samples are then assigned, the most expensive first, each to the micro-batch where
    it adds the least time to the step.
    """
    order, found = sorted(samples, key=lambda sample: (-costs[sample], sample)), list[list[list[Pack]]]()
    for leading in (round(share * len(order)) for share in LEADING):
        bins = _spread(order[:leading], tokens, costs, [0.0] * (count * size), cap)
        if bins is not None:
            bins.sort(key=lambda pack: -sum(costs[sample] for sample in pack))
            packs = [bins[at : at + size] for at in range(0, len(bins), size)]
            if _fill(packs, order[leading:], tokens, costs, cap):
                found.append(packs)
    if not found:
        return None
    best, dealt, total = min(found, key=lambda packs: _seconds(packs, costs)), list[list[Pack]](), [0.0] * size
    for by_rank in sorted(best, key=lambda by_rank: -_seconds([by_rank], costs)):
        by_cost = iter(sorted(by_rank, key=lambda pack: -sum(costs[sample] for sample in pack)))
        mine = {rank: next(by_cost) for rank in sorted(range(size), key=total.__getitem__)}
        dealt.append([mine[rank] for rank in range(size)])
        total = [own + sum(costs[sample] for sample in pack) for own, pack in zip(total, dealt[-1], strict=True)]
    return dealt


def _fill(
    packs: list[list[Pack]], samples: Sequence[int], tokens: Sequence[int], costs: Sequence[float], cap: int
) -> bool:
    """Add samples to micro-batches that have one pack per rank, and return whether all samples fit."""
    load = [[sum(costs[sample] for sample in pack) for pack in by_rank] for by_rank in packs]
    room = [[cap - sum(tokens[sample] for sample in pack) for pack in by_rank] for by_rank in packs]
    most = [max(of_ranks) for of_ranks in load]
    for sample in samples:
        fitting = []
        for number, (loads, rooms) in enumerate(zip(load, room, strict=True)):
            ranks = [rank for rank, left in enumerate(rooms) if left >= tokens[sample]]
            if ranks:
                rank = min(ranks, key=loads.__getitem__)
                over = loads[rank] + costs[sample] - most[number]
                fitting.append((max(0.0, over), over, number, rank))
        if not fitting:
            return False
        *_, number, rank = min(fitting)
        packs[number][rank].append(sample)
        load[number][rank] += costs[sample]
        room[number][rank] -= tokens[sample]
        most[number] = max(most[number], load[number][rank])
    return True


def _spread(
    samples: Sequence[int], tokens: Sequence[int], costs: Sequence[float], taken: Sequence[float], cap: int
) -> list[list[int]] | None:
    """Put each sample in the cheapest bin that has room, and return the bins, or None if a sample does not fit in any
    bin.

    `taken` is the initial cost of each bin.
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


def most(works: Sequence[float]) -> float:
    """Return the ratio of the maximum to the mean."""
    return max(works) * len(works) / (sum(works) or 1.0)

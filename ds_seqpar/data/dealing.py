"""Deal the samples of an optimizer step to groups of ranks and to micro-batches, so that groups have equal costs.

Samples go to the group that has the least cost so far, the most expensive first, and in the group to a micro-batch in
the same way. A micro-batch has a cap on its tokens, and all groups have as many micro-batches, since they reduce
gradients and gather parameters together. One more micro-batch is tried where the cap leaves costs too unequal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import InputError

Pack = list[int]  # the samples of a micro-batch, by their numbers in the step, ascending
EVEN = 1.05  # the most expensive group's cost over the mean, for which no more micro-batches are tried
TRIED = 3  # numbers of micro-batches, from the least one on


def deal(tokens: Sequence[int], costs: Sequence[float], groups: int, cap: int) -> list[list[Pack]]:
    """Return the packs of each group. The result is the same wherever the arguments are.

    Args:
        tokens: of each sample, from 1 to `cap`.
        costs: of each sample, above 0.
        groups: how many there are.
        cap: most tokens of a pack.

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
    mean, largest = sum(costs) / groups, max(costs, default=0.0)
    least = max(1, -(-sum(tokens) // (cap * groups)))
    best: tuple[float, list[list[Pack]]] | None = None
    for count in range(least, len(tokens) + least + 1):
        dealt = _dealt(tokens, costs, groups, count, cap)
        if dealt is not None:
            most = max(sum(costs[sample] for pack in packs for sample in pack) for packs in dealt)
            if best is None or most < best[0]:
                best = most, dealt
            if most <= max(EVEN * mean, largest):
                break
        if best is not None and count >= least + TRIED:
            break
    assert best is not None  # with a micro-batch for each sample, all fit
    return best[1]


def _dealt(tokens: Sequence[int], costs: Sequence[float], groups: int, count: int, cap: int) -> list[list[Pack]] | None:
    """Return `count` packs for each group; None where this order of samples leaves one that fits nowhere."""
    by_group = _spread(range(len(tokens)), tokens, costs, groups, count * cap)
    dealt = []
    for samples in by_group or ():
        packs = _spread(samples, tokens, costs, count, cap) or _spread(samples, tokens, tokens, count, cap)
        if packs is None:
            return None
        dealt.append(sorted(map(sorted, packs), key=lambda pack: (-sum(costs[sample] for sample in pack), pack)))
    return dealt or None


def _spread(
    samples: Sequence[int], tokens: Sequence[int], costs: Sequence[float], bins: int, cap: int
) -> list[list[int]] | None:
    """Return the samples in so many bins, each in that of the least cost which has room; None where none has."""
    spread: list[list[int]] = [[] for _ in range(bins)]
    load, room = [0.0] * bins, [cap] * bins
    for sample in sorted(samples, key=lambda sample: (-costs[sample], sample)):
        fitting = [number for number in range(bins) if room[number] >= tokens[sample]]
        if not fitting:
            return None
        to = min(fitting, key=lambda number: (load[number], number))
        spread[to].append(sample)
        load[to] += costs[sample]
        room[to] -= tokens[sample]
    return spread

"""The programs of a call of attention for all ranks, Ulysses' exchanges included, to be simulated. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from ..compiler import exchange
from ..compiler.actions import Unit
from ..compiler.lower import lower
from ..compiler.program import (
    Assemble,
    ExchangeStart,
    GatherStart,
    Instruction,
    Post,
    Product,
    Program,
    ScatterStart,
)
from ..compiler.simulate import Carried, Start, Traded, simulate
from .machine import Machine
from .pricing import Call, MachinePrices


def followed(machine: Machine, call: Call) -> int:
    """How many sequences are followed together: as many as fill nodes where nodes' links are shared and a sequence
    does not end with its node; else one, as the others do the same at the same time."""
    size, per_node = call.config.size, machine.per_node
    if machine.uplink is None or size % per_node == 0 or per_node % size == 0:
        return 1
    return min(call.world // size, math.lcm(size, per_node) // size)


def programs(machine: Machine, call: Call, direction: str) -> tuple[list[Program], MachinePrices]:
    """Those of all ranks that are followed, each with Ulysses' exchanges before and after, and their prices."""
    inner = [_lowered(call, direction, steps, rank) for rank, steps in enumerate(_steps(call, direction))]
    return worldwide(machine, call, direction, inner)


def worldwide(
    machine: Machine, call: Call, direction: str, inner: Sequence[Program]
) -> tuple[list[Program], MachinePrices]:
    """inner: of the inner ranks."""
    prices, size = MachinePrices(machine, call, direction), call.config.size
    found = []
    for rank in range(followed(machine, call) * size):
        member, place = call.places[rank % size]
        base = rank - rank % size

        def at(peer: int, member: int = member, base: int = base) -> int:
            return base + call.ranks[member, peer]

        group = tuple(base + call.ranks[m, place] for m in range(call.members))
        program = _renamed(exchange.whole([inner[place]], call.members, True), rank, at, group)
        prices.added |= {(rank, product) for product in _added(program)}
        found.append(program)
    return found, prices


def _steps(call: Call, direction: str) -> list:
    shape = call.shapes[call.first]
    if call.recipe.overlap:
        return list(call.recipe.plan(direction, call.pattern, shape).ranks)
    recipe = call.recipe
    steps = recipe.schedule.build(call.topology, call.pattern, direction, call.travels(direction))
    return [steps(rank) for rank in range(recipe.size)]


def _lowered(call: Call, direction: str, steps: Sequence, rank: int) -> Program:
    shape = call.shapes[0]
    name, size = call.recipe.schedule.name, call.recipe.size
    wide = shape.travel == shape.wide
    return lower(name, direction, rank, size, tuple(steps), wide, call.recipe.schedule.parts)


def _renamed(program: Program, rank: int, at: Callable[[int], int], group: tuple[int, ...]) -> Program:
    """With ranks of the world in place of inner ones. group: Ulysses' members."""
    code: list[Instruction] = []
    for one in program.code:
        if isinstance(one, Post):
            sends, receives = (tuple(t._replace(peer=at(t.peer)) for t in ts) for ts in (one.sends, one.receives))
            code.append(one._replace(sends=sends, receives=receives))
        elif isinstance(one, GatherStart | ScatterStart | Assemble):
            ranks = tuple(map(at, one.collective.ranks))
            code.append(one._replace(collective=dataclasses.replace(one.collective, ranks=ranks)))
        elif isinstance(one, ExchangeStart):
            code.append(one._replace(ranks=group))
        else:
            code.append(one)
    return dataclasses.replace(program, rank=rank, code=tuple(code))


def _added(program: Program) -> Iterator[Product]:
    seen: set[Unit] = set()
    for one in program.code:
        if isinstance(one, Product):
            units = {unit for unit, _ in one.results}
            if units & seen:
                yield one
            seen |= units


# ---- one member for all


def call_seconds(machine: Machine, call: Call, direction: str) -> float:
    """Of a call, simulated: of one Ulysses member's ranks, where all members do the same at the same time."""
    if not alike(machine, call):
        return simulate(*programs(machine, call, direction)).seconds
    prices, ranks = MachinePrices(machine, call, direction), [call.ranks[0, i] for i in range(call.recipe.size)]
    inner = [_lowered(call, direction, steps, rank) for rank, steps in enumerate(_steps(call, direction))]
    prices.added |= {(ranks[i], product) for i, program in enumerate(inner) for product in _added(program)}
    return _around(prices, call, inner[0]) + simulate(inner, _Some(prices, ranks)).seconds


def followed_ranks(machine: Machine, call: Call) -> int:
    """How many ranks `call_seconds` simulates."""
    return call.recipe.size if alike(machine, call) else followed(machine, call) * call.config.size


def alike(machine: Machine, call: Call) -> bool:
    """Whether members have as many heads as one another, share no links, and lie alike on nodes."""
    if machine.uplink is not None or len(set(call.shapes)) > 1 or not call.shards.even:
        return False
    along = [[call.ranks[member, i] for i in range(call.recipe.size)] for member in range(call.members)]
    across = zip(*along, strict=True)
    return all(len({_pattern(machine, ranks) for ranks in groups}) == 1 for groups in (along, across))


def _pattern(machine: Machine, ranks: Sequence[int]) -> tuple[int, ...]:
    """Which of them are in one node."""
    nodes = [machine.node(rank) for rank in ranks]
    return tuple(map(nodes.index, nodes))


def _around(prices: MachinePrices, call: Call, program: Program) -> float:
    """Seconds of the exchanges of the first rank of each member, with what is packed for them."""
    group = tuple(call.ranks[member, 0] for member in range(call.members))
    empty = dataclasses.replace(program, code=(), frees=(), slots=(), words=())
    around = _renamed(exchange.whole([empty], call.members, True), group[0], lambda inner: inner, group).code
    waited = sum(prices.pace(one)[0] for one in around if isinstance(one, ExchangeStart))
    return waited + sum(prices.busy(group[0], one) for one in around)


class _Some:
    """Prices of some ranks, by their numbers among themselves."""

    def __init__(self, prices: MachinePrices, ranks: Sequence[int]) -> None:
        self.prices, self.ranks = prices, ranks

    def busy(self, rank: int, instruction: Instruction) -> float:
        return self.prices.busy(self.ranks[rank], instruction)

    def carried(self, src: int, dst: int, unit: Unit) -> Carried:
        return self.prices.carried(self.ranks[src], self.ranks[dst], unit)

    def traded(self, start: Start) -> Traded:
        assert not isinstance(start, ExchangeStart)  # which one member's ranks alone have none of
        ranks = tuple(self.ranks[rank] for rank in start.ranks)
        return self.prices.traded(start._replace(collective=dataclasses.replace(start.collective, ranks=ranks)))

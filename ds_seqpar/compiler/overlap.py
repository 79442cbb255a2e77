"""Overlap as a pass over plans: collectives become moves of single blocks, products run as their operands arrive.

Serves every schedule. For a mesh (a, b, 1) it yields what Attention2D-O tiles by hand (Algs. 4-11): own products first,
then those of whatever block has arrived, results on their way while other products still run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from .actions import ACCUMULATORS, Compute, Move, Step, owned, owner
from .plan import Pattern, Plan
from .simulate import Costs, communication, programs_of, simulate

Operand = tuple[int, str, int]  # rank, kind, block


def overlapped(plan: Plan, needed: Pattern, sizes: Mapping[str, float]) -> Plan:
    """The same products on the same ranks and the same bytes in another order: a greedy list schedule under the model
    of `simulate`, for products that take as long as the transfers do. Results go straight home, unless some rank
    would then receive more than in the plan: then they go the plan's way. Products that only a group needed are left
    out.

    Tried with gathered blocks passed on round their group, and, where there are gathers, with every block straight
    from its owner; what `simulate` finds fastest is returned, at worst the plan itself. sizes: bytes of a block of each
    kind.
    """
    costs = Costs(transfer=sizes, product=1.0)
    if communication(plan, costs) == 0:
        return plan
    costs = costs.balanced(plan)
    wanted = _wanted(_products(plan, needed), plan.parts)
    routes = [_sources(plan, wanted)]
    if any(step.gathers for steps in plan.ranks for step in steps):
        routes.append({unit: owner(unit[2], plan.parts) for unit in wanted})
    candidates = [plan, *(_ListScheduler(plan, needed, costs, route).run() for route in routes)]
    return min(candidates, key=lambda candidate: simulate(programs_of(candidate), costs).seconds)


class _ListScheduler:
    """Time is counted in products: in slot s, which becomes step s, a rank starts one product at most. Transfers are
    posted between products and queue for their links."""

    def __init__(self, plan: Plan, needed: Pattern, costs: Costs, source: dict[Operand, int]) -> None:
        self.plan, self.costs, self.source, self.parts = plan, costs, source, plan.parts
        self.remaining = _products(plan, needed)
        self.pending = set(self.source)
        own = [(r, b) for r in range(plan.size) for b in owned(r, plan.parts)]
        self.arrival: dict[Operand, float] = {(r, k, b): 0.0 for r, b in own for k in ("q", "kv")}
        self.first_use: dict[Operand, int] = {}
        # results that leave the rank: how many products, and results of others, are still to come into them
        self.open = Counter(
            unit for r, pairs in enumerate(self.remaining) for p in pairs for unit in self.leaving(r, *p)
        )
        self.next = _next(plan, set(self.open), source, costs.transfer)
        for (_, kind, block), rank in self.next.items():
            if rank != owner(block, self.parts):
                self.open[rank, kind, block] += 1
        self.coming: dict[int, list[Operand]] = defaultdict(list)  # slot -> results that get others' after its products
        self.link_in, self.link_out = [0.0] * plan.size, [0.0] * plan.size
        self.moves: list[tuple[int, Move]] = []
        self.computes: list[tuple[int, Compute]] = []
        self.results: list[tuple[int, Move]] = []

    def leaving(self, rank: int, q: int, kv: int) -> list[Operand]:
        """The results of a product that do not belong to the rank that computes it."""
        found = [(rank, kind, kv if kind == "dkv" else q) for kind in ACCUMULATORS[self.plan.direction]]
        return [unit for unit in found if owner(unit[2], self.parts) != rank]

    def run(self) -> Plan:
        slot = 0
        while self.pending or any(self.remaining) or self.open:
            self.post_operands(slot)
            for rank in range(self.plan.size):
                self.start_product(rank, slot)
            self.post_results(slot)
            slot += 1
        return self.emit(slot)

    def post_operands(self, slot: int) -> None:
        """Per link the transfer that lets its receiver compute most a second, until links are taken for the slot."""
        while found := [candidate for candidate in map(self.candidate, self.pending) if candidate]:
            posted = False
            for _, _, (rank, kind, block) in sorted(found):
                src = self.source[rank, kind, block]
                if self.arrival[src, kind, block] <= slot and self.link_free(src, rank) < slot + 1:
                    self.pending.remove((rank, kind, block))
                    move = Move(src=src, dst=rank, kind=kind, key=(block,))
                    self.arrival[rank, kind, block] = self.carry(move, slot)
                    self.first_use.setdefault((src, kind, block), slot)
                    self.moves.append((slot, move))
                    posted = True
            if not posted:
                return

    def candidate(self, unit: Operand) -> tuple[float, int, Operand] | None:
        """Priority of an operand that its source has: products it allows with what is there or on its way (others that
        it is part of count a little) for each second of link; then the nearest block."""
        rank, kind, block = unit
        if (self.source[unit], kind, block) not in self.arrival:
            return None
        side, other = (0, "kv") if kind == "q" else (1, "q")
        mine = [pair for pair in self.remaining[rank] if pair[side] == block]
        gain = sum(1.0 if (rank, other, pair[1 - side]) in self.arrival else 0.1 for pair in mine)
        return -gain / self.costs.transfer[kind], self.far(rank, block), unit

    def far(self, rank: int, block: int) -> int:
        """How many ranks before it the block's owner is."""
        return (rank - owner(block, self.parts)) % self.plan.size

    def link_free(self, src: int, dst: int) -> float:
        return max(self.link_out[src], self.link_in[dst])

    def carry(self, move: Move, earliest: float) -> float:
        """Takes the links; returns when it arrives."""
        end = max(earliest, self.link_free(move.src, move.dst)) + self.costs.move(*move.unit) / self.costs.product
        self.link_out[move.src] = self.link_in[move.dst] = end
        return round(end, 9)

    def start_product(self, rank: int, slot: int) -> None:
        never = float("inf")
        ready = [
            pair
            for pair in self.remaining[rank]
            if max(self.arrival.get((rank, "q", pair[0]), never), self.arrival.get((rank, "kv", pair[1]), never))
            <= slot
        ]
        if not ready:
            return
        q, kv = min(ready, key=lambda pair: self.urgency(rank, *pair))
        self.remaining[rank].remove((q, kv))
        self.computes.append((slot, Compute(rank=rank, q=(q,), kv=(kv,))))
        for unit in self.leaving(rank, q, kv):
            self.open[unit] -= 1
        for unit in ((rank, "q", q), (rank, "kv", kv)):
            self.first_use.setdefault(unit, slot)

    def urgency(self, rank: int, q: int, kv: int) -> tuple:
        """What completes a result that has to leave comes first, a rank's own product last."""
        still = [self.open[unit] for unit in self.leaving(rank, q, kv)]
        return (not still, min(still, default=0), self.far(rank, q), self.far(rank, kv))

    def post_results(self, slot: int) -> None:
        """Complete results go on after the slot's products, unless operands have taken the links."""
        self.open.subtract(self.coming.pop(slot, []))
        for unit in sorted(unit for unit, count in self.open.items() if count == 0):
            (rank, kind, block), dst = unit, self.next[unit]
            if self.link_free(rank, dst) < slot + 2:
                move = Move(src=rank, dst=dst, kind=kind, key=(block,))
                slots = math.ceil(self.carry(move, slot + 1)) - slot
                self.results.append((slot, dataclasses.replace(move, within=slots)))
                del self.open[unit]
                if dst != owner(block, self.parts):
                    self.coming[slot + slots].append((dst, kind, block))

    def emit(self, slots: int) -> Plan:
        steps: list[list[dict[str, list]]] = [
            [{"moves": [], "computes": [], "results": []} for _ in range(slots)] for _ in range(self.plan.size)
        ]
        for slot, move in self.moves:
            need = self.first_use[move.dst, move.kind, move.key[0]]
            for rank in move.ranks:
                steps[rank][slot]["moves"].append(dataclasses.replace(move, within=need - slot))
        for slot, compute in self.computes:
            steps[compute.rank][slot]["computes"].append(compute)
        for slot, move in self.results:
            for rank in move.ranks:
                steps[rank][slot]["results"].append(move)
        ranks = tuple(
            tuple(Step(**{name: tuple(actions) for name, actions in step.items()}) for step in mine) for mine in steps
        )
        return dataclasses.replace(self.plan, name=f"{self.plan.name}, overlapped", ranks=ranks)


def _products(plan: Plan, needed: Pattern) -> list[set[tuple[int, int]]]:
    found: list[set[tuple[int, int]]] = [set() for _ in range(plan.size)]
    for steps in plan.ranks:
        for compute in (compute for step in steps for compute in step.computes):
            found[compute.rank] |= {(i, j) for i in compute.q for j in compute.kv if needed(i, j)}
    return found


def _next(
    plan: Plan, results: set[Operand], source: Mapping[Operand, int], sizes: Mapping[str, float]
) -> dict[Operand, int]:
    """The rank that each of the results that leave theirs goes to next."""
    home = {unit: owner(unit[2], plan.parts) for unit in results}
    planned = {
        (move.src, move.kind, block): move.dst
        for rank, steps in enumerate(plan.ranks)
        for step in steps
        for move in step.results
        if move.src == rank
        for block in move.key
    }
    brought = [0.0] * plan.size
    for rank, kind, _ in [*source, *((dst, kind, block) for (_, kind, block), dst in home.items())]:
        brought[rank] += sizes[kind]
    more = any(a > b * (1 + 1e-9) for a, b in zip(brought, plan.received(sizes), strict=True))
    if not (more and results <= set(planned)):
        return home
    for unit in results:
        rank, kind, block = unit
        while rank != home[unit] and (rank := planned[rank, kind, block]) != home[unit]:
            if (rank, kind, block) in results:  # others have nothing to add
                break
        home[unit] = rank
    return home


def _wanted(products: list[set[tuple[int, int]]], parts: int) -> set[Operand]:
    """The foreign operand blocks that products read."""
    units = {(r, kind, b) for r, pairs in enumerate(products) for q, kv in pairs for kind, b in (("q", q), ("kv", kv))}
    return {unit for unit in units if unit[0] != owner(unit[2], parts)}


def _sources(plan: Plan, wanted: set[Operand]) -> dict[Operand, int]:
    """Where each rank gets each block from: as in the plan, a gather's by a ring of its members."""
    source: dict[Operand, int] = {}
    for rank, steps in enumerate(plan.ranks):
        for step in steps:
            for gather in step.gathers:
                for block in set(gather.whole) - set(gather.part(rank)):
                    source[rank, gather.kind, block] = gather.ranks[gather.ranks.index(rank) - 1]
            for move in (move for move in step.moves if move.dst == rank):
                for block in move.key:
                    source.setdefault((rank, move.kind, block), move.src)
    reached: set[Operand] = set()
    for rank, kind, block in wanted:  # and whoever passes it on
        while rank != owner(block, plan.parts) and (rank, kind, block) not in reached:
            reached.add((rank, kind, block))
            rank = source[rank, kind, block]
    return {unit: source[unit] for unit in reached}

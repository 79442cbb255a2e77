"""Overlap as a pass over plans: collectives become moves of single blocks, products run as their operands arrive.

It works on the plan of any schedule. For a mesh (a, b, 1) it finds what Attention2D-O orders by hand (Algs. 4-11). A
rank's own products come first, then those of whichever block has arrived. Results travel while other products run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from ..schedules.actions import ACCUMULATORS, Compute, Move, Step
from ..schedules.plan import BlockMask, Plan
from ..sharding.layout import owned, owner
from .simulate import Costs, communication, programs_of, simulate

RankBlock = tuple[int, str, int]  # (rank, kind, block): an operand or a result, and the rank where it is or is needed


def overlapped(plan: Plan, needed: BlockMask, sizes: Mapping[str, float]) -> Plan:
    """The same products on the same ranks and the same bytes, in another order that `simulate` finds fastest.

    plan: of all ranks. needed: which pairs of blocks meet; products of others are left out. sizes: bytes of a block, by
    kind. Returns the plan itself where no order is faster.

    The order is a greedy list schedule, for products that take as long as the transfers. Two routes of operands are
    tried: gathered blocks passed on round their group, and, where there are gathers, every block straight from its
    owner. Results go straight to the rank that owns the block. If some rank would then receive more bytes than in the
    plan, they go the plan's way, through other ranks that add theirs.
    """
    costs = Costs(transfer=sizes, product=1.0)
    if communication(plan, costs) == 0:
        return plan
    costs = costs.balanced(plan)
    wanted = _foreign_operands(_products(plan, needed), plan.blocks_per_rank)
    routes = [_sources(plan, wanted)]
    if any(step.gathers for steps in plan.ranks for step in steps):
        routes.append({unit: owner(unit[2], plan.blocks_per_rank) for unit in wanted})
    candidates = [plan, *(_ListScheduler(plan, needed, costs, route).run() for route in routes)]
    return min(candidates, key=lambda candidate: simulate(programs_of(candidate), costs).seconds)


class _ListScheduler:
    """Builds the plan step by step. Time is counted in ticks, one product long: tick t becomes step t of the plan. A
    rank starts at most one product a tick. Transfers are posted between products, and wait for free links.

    source: for each operand that a rank needs from another, the rank that sends it."""

    def __init__(self, plan: Plan, needed: BlockMask, costs: Costs, source: dict[RankBlock, int]) -> None:
        self.plan, self.costs, self.source, self.blocks_per_rank = plan, costs, source, plan.blocks_per_rank
        self.remaining = _products(plan, needed)
        self.pending = set(self.source)  # operands that nobody has sent yet
        own = [(r, b) for r in range(plan.size) for b in owned(r, plan.blocks_per_rank)]
        self.arrival: dict[RankBlock, float] = {(r, k, b): 0.0 for r, b in own for k in ("q", "kv")}
        self.first_use: dict[RankBlock, int] = {}
        # for each result that leaves its rank: how many products, and results of other ranks, it still lacks
        self.missing = Counter(
            unit for r, pairs in enumerate(self.remaining) for p in pairs for unit in self.leaving(r, *p)
        )
        self.next_rank = _next_ranks(plan, set(self.missing), source, costs.transfer)
        for (_, kind, block), rank in self.next_rank.items():
            if rank != owner(block, self.blocks_per_rank):
                self.missing[rank, kind, block] += 1
        # tick -> the results to which another rank's is added in it, after its products
        self.arriving: dict[int, list[RankBlock]] = defaultdict(list)
        # when each rank's links are free again, in ticks
        self.link_in, self.link_out = [0.0] * plan.size, [0.0] * plan.size
        self.moves: list[tuple[int, Move]] = []
        self.computes: list[tuple[int, Compute]] = []
        self.results: list[tuple[int, Move]] = []

    def leaving(self, rank: int, q: int, kv: int) -> list[RankBlock]:
        """The results of a product whose blocks another rank owns."""
        results = [(rank, kind, kv if kind == "dkv" else q) for kind in ACCUMULATORS[self.plan.direction]]
        return [unit for unit in results if owner(unit[2], self.blocks_per_rank) != rank]

    def run(self) -> Plan:
        tick = 0
        while self.pending or any(self.remaining) or self.missing:
            self.post_operands(tick)
            for rank in range(self.plan.size):
                self.start_product(rank, tick)
            self.post_results(tick)
            tick += 1
        return self.emit(tick)

    def post_operands(self, tick: int) -> None:
        """Posts operands until no link is free in this tick: first those that let their receiver compute the most for
        each second of link."""
        while candidates := [candidate for candidate in map(self.priority, self.pending) if candidate]:
            posted = False
            for _, _, (rank, kind, block) in sorted(candidates):
                src = self.source[rank, kind, block]
                if self.arrival[src, kind, block] <= tick and self.link_free(src, rank) < tick + 1:
                    self.pending.remove((rank, kind, block))
                    move = Move(src=src, dst=rank, kind=kind, key=(block,))
                    self.arrival[rank, kind, block] = self.occupy_links(move, tick)
                    self.first_use.setdefault((src, kind, block), tick)
                    self.moves.append((tick, move))
                    posted = True
            if not posted:
                return

    def priority(self, unit: RankBlock) -> tuple[float, int, RankBlock] | None:
        """What a pending operand is sorted by; None while its source does not have it.

        First the products that it makes possible with operands that are there or on their way, for each second of
        link; products that lack their other operand count a tenth. Then the block of the nearest owner."""
        rank, kind, block = unit
        if (self.source[unit], kind, block) not in self.arrival:
            return None
        side, other = (0, "kv") if kind == "q" else (1, "q")
        pairs = [pair for pair in self.remaining[rank] if pair[side] == block]
        gain = sum(1.0 if (rank, other, pair[1 - side]) in self.arrival else 0.1 for pair in pairs)
        return -gain / self.costs.transfer[kind], self.distance(rank, block), unit

    def distance(self, rank: int, block: int) -> int:
        """How many ranks before this one the block's owner is, counted round."""
        return (rank - owner(block, self.blocks_per_rank)) % self.plan.size

    def link_free(self, src: int, dst: int) -> float:
        """The tick from which the links of both ranks are free."""
        return max(self.link_out[src], self.link_in[dst])

    def occupy_links(self, move: Move, earliest: float) -> float:
        """Occupies both ranks' links for a move. Returns the tick in which it arrives."""
        end = max(earliest, self.link_free(move.src, move.dst)) + self.costs.move(*move.unit) / self.costs.product
        self.link_out[move.src] = self.link_in[move.dst] = end
        return round(end, 9)

    def start_product(self, rank: int, tick: int) -> None:
        """Starts the most urgent product whose operands are there, if any."""
        never = float("inf")
        ready = [
            pair
            for pair in self.remaining[rank]
            if max(self.arrival.get((rank, "q", pair[0]), never), self.arrival.get((rank, "kv", pair[1]), never))
            <= tick
        ]
        if not ready:
            return
        q, kv = min(ready, key=lambda pair: self.urgency(rank, *pair))
        self.remaining[rank].remove((q, kv))
        self.computes.append((tick, Compute(rank=rank, q=(q,), kv=(kv,))))
        for unit in self.leaving(rank, q, kv):
            self.missing[unit] -= 1
        for unit in ((rank, "q", q), (rank, "kv", kv)):
            self.first_use.setdefault(unit, tick)

    def urgency(self, rank: int, q: int, kv: int) -> tuple:
        """Products are sorted by this: first those that complete a result for another rank, last those whose results
        stay."""
        lacking = [self.missing[unit] for unit in self.leaving(rank, q, kv)]
        return (not lacking, min(lacking, default=0), self.distance(rank, q), self.distance(rank, kv))

    def post_results(self, tick: int) -> None:
        """Sends complete results on after the tick's products, unless operands have taken the links."""
        self.missing.subtract(self.arriving.pop(tick, []))
        for unit in sorted(unit for unit, count in self.missing.items() if count == 0):
            (rank, kind, block), dst = unit, self.next_rank[unit]
            if self.link_free(rank, dst) < tick + 2:
                move = Move(src=rank, dst=dst, kind=kind, key=(block,))
                ticks = math.ceil(self.occupy_links(move, tick + 1)) - tick
                self.results.append((tick, dataclasses.replace(move, within=ticks)))
                del self.missing[unit]
                if dst != owner(block, self.blocks_per_rank):
                    self.arriving[tick + ticks].append((dst, kind, block))

    def emit(self, ticks: int) -> Plan:
        """The plan of what was noted down, with a step for each tick."""
        steps: list[list[dict[str, list]]] = [
            [{"moves": [], "computes": [], "results": []} for _ in range(ticks)] for _ in range(self.plan.size)
        ]
        for tick, move in self.moves:
            need = self.first_use[move.dst, move.kind, move.key[0]]
            for rank in move.ranks:
                steps[rank][tick]["moves"].append(dataclasses.replace(move, within=need - tick))
        for tick, compute in self.computes:
            steps[compute.rank][tick]["computes"].append(compute)
        for tick, move in self.results:
            for rank in move.ranks:
                steps[rank][tick]["results"].append(move)
        ranks = tuple(
            tuple(Step(**{name: tuple(actions) for name, actions in step.items()}) for step in mine) for mine in steps
        )
        return dataclasses.replace(self.plan, name=f"{self.plan.name}, overlapped", ranks=ranks)


def _products(plan: Plan, needed: BlockMask) -> list[set[tuple[int, int]]]:
    """The products (q block, kv block) of each rank that are needed."""
    products: list[set[tuple[int, int]]] = [set() for _ in range(plan.size)]
    for steps in plan.ranks:
        for compute in (compute for step in steps for compute in step.computes):
            products[compute.rank] |= {(i, j) for i in compute.q for j in compute.kv if needed(i, j)}
    return products


def _next_ranks(
    plan: Plan, results: set[RankBlock], source: Mapping[RankBlock, int], sizes: Mapping[str, float]
) -> dict[RankBlock, int]:
    """For each result that leaves its rank, the rank that it is sent to: the owner of its block. Where that would bring
    some rank more bytes than the plan does, it is the next rank on the plan's way."""
    target = {unit: owner(unit[2], plan.blocks_per_rank) for unit in results}
    planned = {
        (move.src, move.kind, block): move.dst
        for rank, steps in enumerate(plan.ranks)
        for step in steps
        for move in step.results
        if move.src == rank
        for block in move.key
    }
    brought = [0.0] * plan.size
    for rank, kind, _ in [*source, *((dst, kind, block) for (_, kind, block), dst in target.items())]:
        brought[rank] += sizes[kind]
    exceeds = any(a > b * (1 + 1e-9) for a, b in zip(brought, plan.received(sizes), strict=True))
    if not (exceeds and results <= set(planned)):
        return target
    for unit in results:
        rank, kind, block = unit
        while rank != target[unit] and (rank := planned[rank, kind, block]) != target[unit]:
            if (rank, kind, block) in results:  # a rank that adds its own result; ranks between are skipped
                break
        target[unit] = rank
    return target


def _foreign_operands(products: list[set[tuple[int, int]]], blocks_per_rank: int) -> set[RankBlock]:
    """The operands of each rank's products that other ranks own."""
    units = {(r, kind, b) for r, pairs in enumerate(products) for q, kv in pairs for kind, b in (("q", q), ("kv", kv))}
    return {unit for unit in units if unit[0] != owner(unit[2], blocks_per_rank)}


def _sources(plan: Plan, wanted: set[RankBlock]) -> dict[RankBlock, int]:
    """The rank that sends each operand, as in the plan; a gather's blocks go round a ring of its members. Ranks that
    only pass an operand on have an entry too."""
    source: dict[RankBlock, int] = {}
    for rank, steps in enumerate(plan.ranks):
        for step in steps:
            for gather in step.gathers:
                for block in set(gather.blocks) - set(gather.key_of(rank)):
                    source[rank, gather.kind, block] = gather.ranks[gather.ranks.index(rank) - 1]
            for move in (move for move in step.moves if move.dst == rank):
                for block in move.key:
                    source.setdefault((rank, move.kind, block), move.src)
    reached: set[RankBlock] = set()
    for rank, kind, block in wanted:  # and for the ranks that pass it on
        while rank != owner(block, plan.blocks_per_rank) and (rank, kind, block) not in reached:
            reached.add((rank, kind, block))
            rank = source[rank, kind, block]
    return {unit: source[unit] for unit in reached}

"""Overlap computation with communication by reordering a plan's actions.

Collectives become moves of single blocks, and each product runs as soon as its operands arrive. The pass accepts any
schedule's plan. For a mesh (a, b, 1), the pass finds the order that the authors of Attention2D-O specified by hand
(Algs. 4-11). Products of a rank's own blocks come first, followed by products of other blocks in the order in which the
blocks arrive. Results are sent while other products run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from ..core.compiler.schedules.actions import ACCUMULATORS, Compute, Move, Step
from ..core.compiler.schedules.plan import BlockMask, Plan
from ..core.compiler.sharding.layout import owned, owner
from .simulate import Costs, communication, programs_of, simulate

# (rank, kind, block): an operand or a result, and the rank that has or needs the block
RankBlock = tuple[int, str, int]


def overlapped(plan: Plan, needed: BlockMask, sizes: Mapping[str, float]) -> Plan:
    """Return a plan with the same products on the same ranks, in the fastest order according to `simulate`.

    The number of bytes sent stays the same. The order is a greedy list schedule that assumes that computation takes as
    long as communication. Two routes for operands are tried if the plan has gathers. Either gathered blocks are passed
    around their group, or every block is sent directly by its owner. Results are sent directly to the rank that owns
    the block. If a rank would then receive more bytes than in the plan, results are instead sent as in the plan,
    through other ranks that add their own results.

    Args:
        plan: Plan for all ranks.
        needed: Pairs of blocks that see each other. All other products are omitted.
        sizes: Bytes of a block, by kind.

    Returns:
        The new plan, or `plan` itself if no order is faster.
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
    """Builds a plan step by step.

    Time is counted in ticks. A product takes one tick, and tick t becomes step t of the plan. A rank starts at most one
    product per tick. Transfers are posted between products and wait until their links are free.

    Args:
        plan: Plan to reorder.
        needed: Pairs of blocks that see each other.
        costs: Durations of products and of transfers.
        source: Sender of each operand that a rank needs from another rank.
    """

    def __init__(self, plan: Plan, needed: BlockMask, costs: Costs, source: dict[RankBlock, int]) -> None:
        self.plan, self.costs, self.source, self.blocks_per_rank = plan, costs, source, plan.blocks_per_rank
        self.remaining = _products(plan, needed)
        self.pending = set(self.source)  # operands that have not been sent yet
        owned_blocks = [(r, b) for r in range(plan.size) for b in owned(r, plan.blocks_per_rank)]
        self.arrival: dict[RankBlock, float] = {(r, k, b): 0.0 for r, b in owned_blocks for k in ("q", "kv")}
        self.first_use: dict[RankBlock, int] = {}
        # for each result for another rank, the number of products and of other ranks' results that are still missing
        self.missing = Counter(
            unit for r, pairs in enumerate(self.remaining) for pair in pairs for unit in self.leaving(r, *pair)
        )
        self.next_rank = _next_ranks(plan, set(self.missing), source, costs.transfer)
        for (_, kind, block), rank in self.next_rank.items():
            if rank != owner(block, self.blocks_per_rank):
                self.missing[rank, kind, block] += 1
        # maps a tick to the results to which a received result is added after the tick's products
        self.arriving: dict[int, list[RankBlock]] = defaultdict(list)
        # tick in which each rank's links become free
        self.link_in, self.link_out = [0.0] * plan.size, [0.0] * plan.size
        self.moves: list[tuple[int, Move]] = []
        self.computes: list[tuple[int, Compute]] = []
        self.results: list[tuple[int, Move]] = []

    def leaving(self, rank: int, q: int, kv: int) -> list[RankBlock]:
        """Return a product's results whose blocks belong to another rank."""
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
        """Post operands until no link is free in this tick.

        Operands that enable the most computation per second of link time are posted first.
        """
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
        """Return a pending operand's sort key, or None if the operand's source does not have the operand yet.

        The first key is the number of products that the operand enables per second of link time. A product counts as
        only a tenth if its other operand is neither present nor being sent. The second key prefers blocks whose owner
        is nearest.
        """
        rank, kind, block = unit
        if (self.source[unit], kind, block) not in self.arrival:
            return None
        side, other = (0, "kv") if kind == "q" else (1, "q")
        pairs = [pair for pair in self.remaining[rank] if pair[side] == block]
        gain = sum(1.0 if (rank, other, pair[1 - side]) in self.arrival else 0.1 for pair in pairs)
        return -gain / self.costs.transfer[kind], self.distance(rank, block), unit

    def distance(self, rank: int, block: int) -> int:
        """Return the distance from a block's owner to a rank, modulo the number of ranks."""
        return (rank - owner(block, self.blocks_per_rank)) % self.plan.size

    def link_free(self, src: int, dst: int) -> float:
        """Return the tick in which both ranks' links become free."""
        return max(self.link_out[src], self.link_in[dst])

    def occupy_links(self, move: Move, earliest: float) -> float:
        """Occupy both ranks' links for a move, and return the tick in which the move arrives."""
        end = max(earliest, self.link_free(move.src, move.dst)) + self.costs.move(*move.unit) / self.costs.product
        self.link_out[move.src] = self.link_in[move.dst] = end
        return round(end, 9)

    def start_product(self, rank: int, tick: int) -> None:
        """Start the most urgent product whose operands are present, if there is one."""
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
        """Return the sort key of a product.

        Products that complete a result for another rank come first. Products whose results stay on the rank come last.
        """
        lacking = [self.missing[unit] for unit in self.leaving(rank, q, kv)]
        return (not lacking, min(lacking, default=0), self.distance(rank, q), self.distance(rank, kv))

    def post_results(self, tick: int) -> None:
        """Send complete results after the products of a tick, unless operands occupy the links."""
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
        """Return the plan with the recorded moves, products and results, with one step per tick."""
        steps: list[list[dict[str, list]]] = [
            [{"moves": [], "computes": [], "results": []} for _ in range(ticks)] for _ in range(self.plan.size)
        ]
        for tick, move in self.moves:
            needed_at = self.first_use[move.dst, move.kind, move.key[0]]
            for rank in move.ranks:
                steps[rank][tick]["moves"].append(dataclasses.replace(move, within=needed_at - tick))
        for tick, compute in self.computes:
            steps[compute.rank][tick]["computes"].append(compute)
        for tick, move in self.results:
            for rank in move.ranks:
                steps[rank][tick]["results"].append(move)
        ranks = tuple(
            tuple(Step(**{name: tuple(actions) for name, actions in step.items()}) for step in rank_steps)
            for rank_steps in steps
        )
        return dataclasses.replace(self.plan, name=f"{self.plan.name}, overlapped", ranks=ranks)


def _products(plan: Plan, needed: BlockMask) -> list[set[tuple[int, int]]]:
    """Return the (q block, kv block) products that are needed on each rank."""
    products: list[set[tuple[int, int]]] = [set() for _ in range(plan.size)]
    for steps in plan.ranks:
        for compute in (compute for step in steps for compute in step.computes):
            products[compute.rank] |= {(i, j) for i in compute.q for j in compute.kv if needed(i, j)}
    return products


def _next_ranks(
    plan: Plan, results: set[RankBlock], source: Mapping[RankBlock, int], sizes: Mapping[str, float]
) -> dict[RankBlock, int]:
    """Return the receiver of each result that is sent to another rank.

    The receiver is the owner of the result's block. If a rank would then receive more bytes than in the plan, the
    receiver is instead the next rank on the plan's route.
    """
    target = {unit: owner(unit[2], plan.blocks_per_rank) for unit in results}
    planned = {
        (move.src, move.kind, block): move.dst
        for rank, steps in enumerate(plan.ranks)
        for step in steps
        for move in step.results
        if move.src == rank
        for block in move.key
    }
    received = [0.0] * plan.size
    for rank, kind, _ in [*source, *((dst, kind, block) for (_, kind, block), dst in target.items())]:
        received[rank] += sizes[kind]
    exceeds = any(a > b * (1 + 1e-9) for a, b in zip(received, plan.received(sizes), strict=True))
    if not (exceeds and results <= set(planned)):
        return target
    for unit in results:
        rank, kind, block = unit
        while rank != target[unit] and (rank := planned[rank, kind, block]) != target[unit]:
            # this rank adds its own result; ranks in between that add nothing are skipped
            if (rank, kind, block) in results:
                break
        target[unit] = rank
    return target


def _foreign_operands(products: list[set[tuple[int, int]]], blocks_per_rank: int) -> set[RankBlock]:
    """Return the operands in each rank's products that belong to other ranks."""
    units = {(r, kind, b) for r, pairs in enumerate(products) for q, kv in pairs for kind, b in (("q", q), ("kv", kv))}
    return {unit for unit in units if unit[0] != owner(unit[2], blocks_per_rank)}


def _sources(plan: Plan, wanted: set[RankBlock]) -> dict[RankBlock, int]:
    """Return each operand's sender in the plan.

    Gathered blocks are passed around a ring of the gather's members. The result also has an entry for each rank that
    only forwards an operand.
    """
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
    for rank, kind, block in wanted:  # includes ranks that only forward the block
        while rank != owner(block, plan.blocks_per_rank) and (rank, kind, block) not in reached:
            reached.add((rank, kind, block))
            rank = source[rank, kind, block]
    return {unit: source[unit] for unit in reached}

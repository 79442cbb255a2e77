"""Check a plan without a process or a tensor: plans from files, and in tests and `show` those that schedules build."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable

from ...errors import PlanError
from ..sharding.layout import Key, owned
from .actions import ACCUMULATORS, OPERANDS, Action, Move, Step, Unit, name_of, unit_name
from .plan import Plan


def validate(plan: Plan, needed: Iterable[tuple[int, int]]) -> None:
    """Check a plan.

    - Every needed (q block, kv block) product is computed exactly once.
    - Every operand is present when it is used.
    - Every send is received in the same step, and members of a collective agree on its order.
    - Every accumulator ends merged on its owner and nowhere else.

    Raises:
        PlanError: if the plan violates one of these.
    """
    _Validator(plan, needed).run()


def last_uses(steps: tuple[Step, ...], rank: int) -> list[set[Unit]]:
    """Return, for each step, the operands that `rank` does not use after it (its own blocks too)."""
    touched: list[set[Unit]] = [set() for _ in steps]
    for index, step in enumerate(steps):
        for move in step.moves:
            at = index if move.src == rank else min(index + move.within, len(steps)) - 1
            touched[at].add(move.unit)
        for compute in step.computes:
            touched[index] |= {("q", compute.q), ("kv", compute.kv)}
        for gather in step.gathers:
            touched[index] |= {(gather.kind, gather.key_of(rank)), (gather.kind, gather.blocks)}
    seen: set[Unit] = set()
    frees: list[set[Unit]] = []
    for units in reversed(touched):
        frees.append(units - seen)
        seen |= units
    return frees[::-1]


class _Validator:
    """Walks all ranks step by step. A set of products is an integer with bit i * blocks + j for q(i) * kv(j)."""

    def __init__(self, plan: Plan, needed: Iterable[tuple[int, int]]) -> None:
        self.plan, self.size, self.blocks = plan, plan.size, plan.blocks
        self.needed = self.bits(needed)
        self.operands: list[set[Unit]] = [
            {(kind, (b,)) for kind in OPERANDS for b in self.owned_blocks(r)} for r in range(plan.size)
        ]
        self.held: list[dict[Unit, int]] = [{} for _ in range(plan.size)]  # accumulator -> the products in it
        self.results: dict[int, list[tuple[Move, int]]] = defaultdict(list)  # step -> results that are due in it
        self.arrivals: dict[int, list[Move]] = defaultdict(list)  # step -> operands that are due at its end
        self.frees: list[list[set[Unit]]] = []
        self.done = 0
        self.step = 0

    def owned_blocks(self, rank: int) -> Key:
        return owned(rank, self.plan.blocks_per_rank)

    def bits(self, pairs: Iterable[tuple[int, int]]) -> int:
        """Return a set of products as an integer."""
        size, products = self.blocks, 0
        rows: dict[int, int] = defaultdict(int)
        for i, j in pairs:
            rows[i] |= 1 << j
        for i, row in rows.items():
            products |= row << i * size
        return products

    def column(self, j: int) -> int:
        return self.bits((i, j) for i in range(self.blocks))

    def row(self, i: int) -> int:
        return (1 << self.blocks) - 1 << i * self.blocks

    def products_of(self, kind: str, key: Key) -> int:
        """Return all products that belong to an accumulator of these blocks."""
        products = 0
        for block in key:
            products |= self.column(block) if kind == "dkv" else self.row(block)
        return products

    def products_text(self, products: int) -> str:
        size = self.blocks
        pairs = [(i, j) for i in range(size) for j in range(size) if products >> i * size + j & 1]
        return ", ".join(f"q({i})*kv({j})" for i, j in pairs[:4]) + (", ..." if len(pairs) > 4 else "")

    def fail(self, rank: int, message: str) -> None:
        raise PlanError(f"rank {rank}, step {self.step}: {message}\n{self.plan.around(self.step, rank)}")

    def check_present(self, units: Collection[Unit], unit: Unit, rank: int, action: str) -> None:
        """Fail unless the unit is among the units that are present on a rank."""
        if unit not in units:
            self.fail(rank, f"{action} {unit_name(unit)}, which is not there")

    def run(self) -> None:
        for rank, steps in enumerate(self.plan.ranks):
            if len(steps) != len(self.plan.ranks[0]):
                self.fail(rank, f"it has {len(steps)} steps, rank 0 has {len(self.plan.ranks[0])}")
        for check in (self.check_actions, self.check_matched, self.walk):
            for index, steps in enumerate(zip(*self.plan.ranks, strict=True)):
                self.step = index
                check(steps)
        for due in sorted(self.results):
            self.finish_results(due)
        self.check_results()

    def walk(self, steps: tuple[Step, ...]) -> None:
        self.frees = self.frees or [
            last_uses(steps_of_rank, rank) for rank, steps_of_rank in enumerate(self.plan.ranks)
        ]
        for act in (self.gather, self.send_operands, self.compute):
            for rank, step in enumerate(steps):
                act(rank, step)
        self.finish_results(self.step)
        for rank, step in enumerate(steps):
            self.send_results(rank, step)
        self.reduce(steps)
        self.receive_operands()

    def check_actions(self, steps: tuple[Step, ...]) -> None:
        for rank, step in enumerate(steps):
            for action in step.actions:
                if rank not in action.ranks:
                    self.fail(rank, f"{action} is not its own")
                if not all(0 <= peer < self.size for peer in action.ranks):
                    self.fail(rank, f"{action} names a rank that does not exist")
                if len(set(action.ranks)) != len(action.ranks):
                    self.fail(rank, f"{action} names a rank twice")
                if isinstance(action, Move) and action.within < 1:
                    self.fail(rank, f"{action} is due within {action.within} steps, before it was sent")

    def check_matched(self, steps: tuple[Step, ...]) -> None:
        """Check that actions of several ranks are in the programs of all of them, in the same order.

        The order must be the same for each pair of ranks in each direction, and for each group. Then posts in program
        order meet, and no message reaches the wrong buffer.
        """
        for field in ("gathers", "moves", "results", "reduces"):
            orders: list[dict[Key, list[Action]]] = [defaultdict(list) for _ in steps]
            for rank, step in enumerate(steps):
                for action in getattr(step, field):
                    orders[rank][action.ranks].append(action)
            for rank, order in enumerate(orders):
                for ranks, actions in order.items():
                    for peer in ranks:
                        self.check_same(rank, peer, actions, orders[peer].get(ranks, []))

    def check_same(self, rank: int, peer: int, actions: list[Action], peer_actions: list[Action]) -> None:
        if actions == peer_actions:
            return
        for action in actions:
            if action not in peer_actions:
                self.fail(rank, f"{action} has no counterpart on rank {peer}")
        self.fail(
            rank, f"{_actions_text(actions)} does not stand in the order of rank {peer}: {_actions_text(peer_actions)}"
        )

    def gather(self, rank: int, step: Step) -> None:
        for gather in step.gathers:
            for member in gather.ranks:
                shard = gather.kind, gather.key_of(member)
                self.check_present(self.operands[member], shard, member, f"{gather} needs")
            self.arrive(rank, gather.unit, gather)

    def send_operands(self, rank: int, step: Step) -> None:
        for move in step.moves:
            if move.kind not in OPERANDS:
                self.fail(rank, f"{move} moves no operand")
            if move.src == rank:
                self.check_present(self.operands[rank], move.unit, rank, f"{move} sends")
                due = self.step + move.within - 1
                if due >= len(self.plan.ranks[0]):
                    self.fail(rank, f"{move} is due within {move.within} steps, outside the plan")
                self.arrivals[due].append(move)

    def receive_operands(self) -> None:
        for move in self.arrivals.pop(self.step, []):
            self.arrive(move.dst, move.unit, move)
        for rank, frees in enumerate(self.frees):
            self.operands[rank] -= frees[self.step]

    def arrive(self, rank: int, unit: Unit, action: Action) -> None:
        """Add an operand that an action brings."""
        if unit in self.operands[rank]:
            self.fail(rank, f"{action} brings what is there already")
        self.operands[rank].add(unit)

    def compute(self, rank: int, step: Step) -> None:
        for compute in step.computes:
            for unit in (("q", compute.q), ("kv", compute.kv)):
                self.check_present(self.operands[rank], unit, rank, f"{compute} needs")
            products = self.bits((i, j) for i in compute.q for j in compute.kv)
            if twice := products & self.done:
                self.fail(rank, f"{compute} computes {self.products_text(twice)} a second time")
            self.done |= products
            for kind in ACCUMULATORS[self.plan.direction]:
                self.add(rank, (kind, compute.kv if kind == "dkv" else compute.q), products)

    def add(self, rank: int, unit: Unit, products: int) -> None:
        self.held[rank][unit] = self.held[rank].get(unit, 0) | products

    def finish_results(self, due: int) -> None:
        for move, products in self.results.pop(due, []):
            self.add(move.dst, move.unit, products)

    def send_results(self, rank: int, step: Step) -> None:
        for move in step.results:
            if move.kind not in ACCUMULATORS[self.plan.direction]:
                self.fail(rank, f"{move} moves no {self.plan.direction} result")
            if move.src == rank:
                self.check_present(self.held[rank], move.unit, rank, f"{move} sends")
                self.results[self.step + move.within].append((move, self.held[rank].pop(move.unit)))

    def reduce(self, steps: tuple[Step, ...]) -> None:
        for reduce in (reduce for rank, step in enumerate(steps) for reduce in step.reduces if rank == reduce.ranks[0]):
            products = 0
            for rank in reduce.ranks:
                self.check_present(self.held[rank], reduce.unit, rank, f"{reduce} needs")
                products |= self.held[rank].pop(reduce.unit)
            for rank in reduce.ranks:
                shard = reduce.kind, reduce.key_of(rank)
                self.add(rank, shard, products & self.products_of(*shard))

    def check_results(self) -> None:
        """Fail unless every needed product is done and is in the results on its owners, and nowhere else."""
        if missing := self.needed & ~self.done:
            first = (missing & -missing).bit_length() - 1
            self.fail(
                first // self.blocks // self.plan.blocks_per_rank,
                f"the product {self.products_text(missing)} is missing",
            )
        for rank in range(self.size):
            for kind, block in itertools.product(ACCUMULATORS[self.plan.direction], self.owned_blocks(rank)):
                expected = self.done & self.products_of(kind, (block,))
                if absent := expected & ~self.held[rank].pop((kind, (block,)), 0):
                    self.fail(rank, f"{kind}({block}) is not home: products {self.products_text(absent)} are not in it")
            for kind, key in self.held[rank]:
                self.fail(rank, f"{kind}{name_of(key)} is left over and never sent home")


def _actions_text(actions: Iterable[Action]) -> str:
    return ", ".join(map(str, actions))

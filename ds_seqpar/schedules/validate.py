"""Check plans without processes or tensors.

Plans from files are always checked. Plans built by schedules are checked in tests and in `show`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NoReturn

from ..base.errors import PlanError
from ..core.compiler.schedules.actions import ACCUMULATORS, OPERANDS, Action, Move, Step, Unit, name_of, unit_name
from ..core.compiler.schedules.plan import Plan
from ..core.compiler.sharding.layout import Key, owned

Products = set[tuple[int, int]]  # (q block, kv block)


def validate(plan: Plan, needed: Iterable[tuple[int, int]]) -> None:
    """Check that a plan computes all needed products and delivers all data.

    - Every needed (q block, kv block) product is computed exactly once.
    - Every operand is present when it is used, and arrives only once.
    - Every send is received in the same step, and the members of a group run their collectives in the same order.
    - Every accumulator ends up merged on its owner and nowhere else.

    Raises:
        PlanError: The plan violates one of these conditions.
    """
    validator = _Validator(plan, set(needed))
    for rank, steps in enumerate(plan.ranks):
        if len(steps) != len(plan.ranks[0]):
            validator.fail(rank, f"it has {len(steps)} steps, rank 0 has {len(plan.ranks[0])}")
    for check in (validator.check_actions, validator.check_matched, validator.walk):
        for validator.step, steps in enumerate(zip(*plan.ranks, strict=True)):
            check(steps)
    validator.check_results()


class _Validator:
    """Checks all ranks in a plan step by step."""

    def __init__(self, plan: Plan, needed: Products) -> None:
        self.plan, self.needed, self.kinds = plan, needed, ACCUMULATORS[plan.direction]
        self.step = 0
        self.operands: list[set[Unit]] = [
            {(kind, (block,)) for kind in OPERANDS for block in self.owned(rank)} for rank in range(plan.size)
        ]
        self.results: list[dict[Unit, Products]] = [defaultdict(set) for _ in range(plan.size)]
        # maps a step to the operands due at its end, and to the results due in the step
        self.arriving: dict[int, list[Move]] = defaultdict(list)
        self.merging: dict[int, list[tuple[Move, Products]]] = defaultdict(list)
        self.done: Products = set()

    def owned(self, rank: int) -> Key:
        return owned(rank, self.plan.blocks_per_rank)

    def fail(self, rank: int, message: str) -> NoReturn:
        raise PlanError(f"rank {rank}, step {self.step}: {message}\n{self.plan.around(self.step, rank)}")

    def check_present(self, units: Collection[Unit], unit: Unit, rank: int, action: str) -> None:
        if unit not in units:
            self.fail(rank, f"{action} {unit_name(unit)}, which is not there")

    def check_actions(self, steps: tuple[Step, ...]) -> None:
        for rank, step in enumerate(steps):
            for action in step.actions:
                if rank not in action.ranks:
                    self.fail(rank, f"{action} is not its own")
                if not all(0 <= peer < self.plan.size for peer in action.ranks):
                    self.fail(rank, f"{action} names a rank that does not exist")
                if len(set(action.ranks)) != len(action.ranks):
                    self.fail(rank, f"{action} names a rank twice")
                if isinstance(action, Move) and action.within < 1:
                    self.fail(rank, f"{action} is due within {action.within} steps, before it was sent")

    def check_matched(self, steps: tuple[Step, ...]) -> None:
        """Check that actions that involve several ranks occur in the same step and the same order on all of these
        ranks.

        The order must be the same for each pair of ranks in each direction, and for each group. Posts in program order
        therefore match, and no message ends up in the wrong buffer.
        """
        for field in ("gathers", "moves", "results", "reduces"):
            orders: list[dict[Key, list[Action]]] = [defaultdict(list) for _ in steps]
            for rank, step in enumerate(steps):
                for action in getattr(step, field):
                    orders[rank][action.ranks].append(action)
            for rank, order in enumerate(orders):
                for ranks, actions in order.items():
                    for peer, others in ((peer, orders[peer].get(ranks, [])) for peer in ranks):
                        for action in actions:
                            if action not in others:
                                self.fail(rank, f"{action} has no counterpart on rank {peer}")
                        if actions != others:
                            texts = (", ".join(map(str, group)) for group in (actions, others))
                            self.fail(rank, f"{next(texts)} does not stand in the order of rank {peer}: {next(texts)}")

    def walk(self, steps: tuple[Step, ...]) -> None:
        for act in (self.gather, self.send_operands, self.compute):
            for rank, step in enumerate(steps):
                act(rank, step)
        self.merge(self.step)
        for rank, step in enumerate(steps):
            self.send_results(rank, step)
        for rank, step in enumerate(steps):
            self.reduce(rank, step)
        for move in self.arriving.pop(self.step, []):
            self.arrive(move.dst, move.unit, move)

    def gather(self, rank: int, step: Step) -> None:
        for gather in step.gathers:
            for member in gather.ranks:
                self.check_present(
                    self.operands[member], (gather.kind, gather.key_of(member)), member, f"{gather} needs"
                )
            self.arrive(rank, gather.unit, gather)

    def arrive(self, rank: int, unit: Unit, action: Action) -> None:
        """Add an operand that an action delivers."""
        if unit in self.operands[rank]:
            self.fail(rank, f"{action} brings what is there already")
        self.operands[rank].add(unit)

    def send_operands(self, rank: int, step: Step) -> None:
        for move in step.moves:
            if move.kind not in OPERANDS:
                self.fail(rank, f"{move} moves no operand")
            if move.src == rank:
                self.check_present(self.operands[rank], move.unit, rank, f"{move} sends")
                due = self.step + move.within - 1
                if due >= len(self.plan.ranks[0]):
                    self.fail(rank, f"{move} is due within {move.within} steps, outside the plan")
                self.arriving[due].append(move)

    def compute(self, rank: int, step: Step) -> None:
        for compute in step.computes:
            for unit in (("q", compute.q), ("kv", compute.kv)):
                self.check_present(self.operands[rank], unit, rank, f"{compute} needs")
            products = set(itertools.product(compute.q, compute.kv))
            if twice := products & self.done:
                self.fail(rank, f"{compute} computes {_text(twice)} a second time")
            self.done |= products
            for kind in self.kinds:
                self.results[rank][kind, compute.kv if kind == "dkv" else compute.q] |= products

    def merge(self, due: int) -> None:
        for move, products in self.merging.pop(due, []):
            self.results[move.dst][move.unit] |= products

    def send_results(self, rank: int, step: Step) -> None:
        for move in step.results:
            if move.kind not in self.kinds:
                self.fail(rank, f"{move} moves no {self.plan.direction} result")
            if move.src == rank:
                self.check_present(self.results[rank], move.unit, rank, f"{move} sends")
                self.merging[self.step + move.within].append((move, self.results[rank].pop(move.unit)))

    def reduce(self, rank: int, step: Step) -> None:
        for reduce in step.reduces:
            if rank != reduce.ranks[0]:  # once for all members
                continue
            products: Products = set()
            for member in reduce.ranks:
                self.check_present(self.results[member], reduce.unit, member, f"{reduce} needs")
                products |= self.results[member].pop(reduce.unit)
            for member, key in zip(reduce.ranks, reduce.keys, strict=True):
                self.results[member][reduce.kind, key] |= {p for p in products if p[reduce.kind == "dkv"] in key}

    def check_results(self) -> None:
        """Raise an error unless every needed product was computed and is contained only in its owners' results."""
        for due in sorted(self.merging):
            self.merge(due)
        if missing := self.needed - self.done:
            self.fail(min(missing)[0] // self.plan.blocks_per_rank, f"the product {_text(missing)} is missing")
        expected: dict[Unit, Products] = defaultdict(set)
        for product, kind in itertools.product(self.done, self.kinds):
            expected[kind, (product[kind == "dkv"],)].add(product)
        for rank in range(self.plan.size):
            for unit in itertools.product(self.kinds, ((block,) for block in self.owned(rank))):
                if absent := expected[unit] - self.results[rank].pop(unit, set()):
                    self.fail(rank, f"{unit_name(unit)} is not home: products {_text(absent)} are not in it")
            for kind, key in self.results[rank]:
                self.fail(rank, f"{kind}{name_of(key)} is left over and never sent home")


def _text(products: Products) -> str:
    return ", ".join(f"q({q})*kv({kv})" for q, kv in sorted(products)[:4]) + ", ..." * (len(products) > 4)

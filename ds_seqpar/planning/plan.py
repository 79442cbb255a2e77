"""A schedule as data: which rank computes which products in which step, and what moves in between.

Blocks are numbered by the inner rank that owns them. A *key* is a sorted tuple of block numbers: one block, or blocks
that were gathered into one operand. Operands are "q" and "kv" (in a backward plan "q" stands for all that a query block
brings: q, the output's gradient, output, lse). Accumulators are "out" in forward and "dq", "dkv" in backward.

One step, on every rank, in this order: gather operands; post the step's operand moves; compute products; merge the
results that are due; post the step's result moves; reduce-scatter; wait for the operands that are due. A move is due
`within` steps, 1 unless a pass says otherwise: operands travel beside the products of their own step and results beside
those of the next.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import PlanError

Key = tuple[int, ...]
Unit = tuple[str, Key]
Needed = Callable[[int, int], bool]  # (q block, kv block) -> whether any query of the one sees any key of the other
ACCUMULATORS = {"forward": ("out",), "backward": ("dq", "dkv")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """One product on `rank`: every query block of `q` with every key/value block of `kv`."""

    rank: int
    q: Key
    kv: Key

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def __str__(self) -> str:
        return f"q{_name(self.q)}*kv{_name(self.kv)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """An operand is copied from `src` to `dst`, or an accumulator leaves `src` and is merged into `dst`'s.

    Posted in step s, an operand can be used from step s + within on, and a result is merged after the products of step
    s + within (or at the end of the plan).
    """

    src: int
    dst: int
    kind: str
    key: Key
    within: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.src, self.dst)

    @property
    def unit(self) -> Unit:
        return self.kind, self.key

    def __str__(self) -> str:
        return f"{self.kind}{_name(self.key)}:{self.src}>{self.dst}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """`ranks[i]` contributes (Gather) or ends with (ReduceScatter) `parts[i]`; the whole is the sorted union."""

    ranks: tuple[int, ...]
    kind: str
    parts: tuple[Key, ...]

    @property
    def whole(self) -> Key:
        return tuple(sorted(block for part in self.parts for block in part))

    def part(self, rank: int) -> Key:
        return self.parts[self.ranks.index(rank)]

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.kind}{_name(self.whole)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather(Collective):
    """Every member ends with the operand `whole`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(Collective):
    """Members' accumulators of `whole` are merged; member i keeps that of `parts[i]`."""


Action = Compute | Move | Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    gathers: tuple[Gather, ...] = ()
    moves: tuple[Move, ...] = ()
    computes: tuple[Compute, ...] = ()
    results: tuple[Move, ...] = ()
    reduces: tuple[ReduceScatter, ...] = ()

    @property
    def actions(self) -> Iterator[Action]:
        for field in dataclasses.fields(self):
            yield from getattr(self, field.name)

    def of(self, rank: int) -> Step:
        """The part of the step that this rank takes part in, in the same order."""
        return Step(
            **{f.name: tuple(a for a in getattr(self, f.name) if rank in a.ranks) for f in dataclasses.fields(self)}
        )


Program = tuple[Step, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole schedule for `size` inner ranks in one direction ("forward" or "backward")."""

    name: str
    direction: str
    size: int
    steps: tuple[Step, ...]

    def program(self, rank: int) -> Program:
        """What one rank executes; the runtime walks it and the validator checks all of them against each other."""
        return tuple(step.of(rank) for step in self.steps)

    def received(self, units: dict[str, int]) -> list[int]:
        """Elements that each rank receives. units: elements of one block of each kind ("q", "kv", "out", ...)."""
        total = Counter()
        for step in self.steps:
            for move in (*step.moves, *step.results):
                total[move.dst] += units[move.kind] * len(move.key)
            for gather in step.gathers:
                for rank in gather.ranks:
                    total[rank] += units[gather.kind] * (len(gather.whole) - len(gather.part(rank)))
            for reduce in step.reduces:
                for rank in reduce.ranks:
                    total[rank] += units[reduce.kind] * len(reduce.part(rank)) * (len(reduce.ranks) - 1)
        return [total[rank] for rank in range(self.size)]

    def table(self) -> str:
        """The plan as text: a row a step, a column a rank; `>` leaves, `<` arrives, `*` is a product."""
        head = ["step", *(f"rank {rank}" for rank in range(self.size))]
        rows = [head]
        programs = [self.program(rank) for rank in range(self.size)]
        for index in range(len(self.steps)):
            rows.append([str(index), *(_cell(programs[rank][index], rank) for rank in range(self.size))])
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{self.name} {self.direction}, {self.size} ranks", *lines])


def last_uses(program: Program, rank: int) -> list[set[Unit]]:
    """For each step, the operands that `rank` never touches again after it (its own blocks too): free them then."""
    frees: list[set[Unit]] = [set() for _ in program]
    arrived = [set() for _ in program]
    for index, step in enumerate(program):
        for move in step.moves:
            if move.dst == rank:
                arrived[min(index + move.within, len(program)) - 1].add(move.unit)
    seen: set[Unit] = set()
    for index in range(len(program) - 1, -1, -1):
        step = program[index]
        touched = arrived[index] | {move.unit for move in step.moves if move.src == rank}
        for compute in step.computes:
            touched |= {("q", compute.q), ("kv", compute.kv)}
        for gather in step.gathers:
            touched |= {(gather.kind, gather.part(rank)), (gather.kind, gather.whole)}
        frees[index] = touched - seen
        seen |= touched
    return frees


def validate(plan: Plan, needed: Iterable[tuple[int, int]], programs: Sequence[Program] | None = None) -> None:
    """Raises PlanError unless the plan is right: every needed (q block, kv block) product exactly once, every operand
    there when it is used, every send received in the same step, members of a collective in agreement on order, every
    accumulator merged on its owner and nowhere else at the end.

    programs: one a rank; default the plan's own. Needs no process group and takes milliseconds.
    """
    programs = [plan.program(rank) for rank in range(plan.size)] if programs is None else programs
    _Validator(plan, frozenset(needed), programs).run()


class _Validator:
    def __init__(self, plan: Plan, needed: frozenset[tuple[int, int]], programs: Sequence[Program]) -> None:
        self.plan, self.needed, self.programs = plan, needed, programs
        self.operands: list[set[Unit]] = [{("q", (r,)), ("kv", (r,))} for r in range(plan.size)]
        # accumulator -> the (q, kv) products that are in it
        self.held: list[dict[Unit, frozenset]] = [{} for _ in range(plan.size)]
        self.results: dict[int, list[tuple[Move, frozenset]]] = {}  # due in step -> on their way
        self.arrivals: dict[int, list[Move]] = {}
        self.frees: list[list[set[Unit]]] = []
        self.done: set[tuple[int, int]] = set()
        self.step = 0

    def fail(self, rank: int, message: str) -> None:
        raise PlanError(f"rank {rank}, step {self.step}: {message}\n{self.plan.table()}")

    def run(self) -> None:
        for rank, program in enumerate(self.programs):
            if len(program) != len(self.plan.steps):
                self.fail(rank, f"its program has {len(program)} steps, the plan {len(self.plan.steps)}")
        every_step = list(zip(*self.programs, strict=True))
        for index, steps in enumerate(every_step):
            self.step = index
            self.matched(steps)
        self.frees = [last_uses(program, rank) for rank, program in enumerate(self.programs)]
        for index, steps in enumerate(every_step):
            self.step = index
            for rank, step in enumerate(steps):
                self.gather(rank, step)
            for rank, step in enumerate(steps):
                self.send_operands(rank, step)
            for rank, step in enumerate(steps):
                for compute in step.computes:
                    self.compute(rank, compute)
            self.finish_results(self.step)
            for rank, step in enumerate(steps):
                self.send_results(rank, step)
            self.reduce(steps)
            self.receive_operands()
        for due in sorted(self.results):
            self.finish_results(due)
        self.all_home()

    def matched(self, steps: Sequence[Step]) -> None:
        """Everything that several ranks do together stands in all their programs, in the same order for each pair and
        each group: then posting in program order cannot deadlock and no message reaches the wrong buffer."""
        everyone = set(range(self.plan.size))
        for field in ("gathers", "moves", "computes", "results", "reduces"):
            lists = [getattr(step, field) for step in steps]
            for rank, actions in enumerate(lists):
                for action in actions:
                    if rank not in action.ranks:
                        self.fail(rank, f"{action} is not its own")
                    if not everyone.issuperset(action.ranks):
                        self.fail(rank, f"{action} names a rank that does not exist")
                    if len(set(action.ranks)) != len(action.ranks):
                        self.fail(rank, f"{action} names a rank twice")
                    if isinstance(action, Move) and action.within < 1:
                        self.fail(rank, f"{action} is due within {action.within} steps, before it was sent")
                    for peer in action.ranks:
                        self.same_order(rank, peer, action, lists)

    def same_order(self, rank: int, peer: int, action: Action, lists: list[tuple]) -> None:
        group = set(action.ranks)
        mine = [a for a in lists[rank] if set(a.ranks) == group]
        theirs = [a for a in lists[peer] if set(a.ranks) == group]
        if action not in theirs:
            self.fail(rank, f"{action} has no counterpart on rank {peer}")
        if mine != theirs:
            self.fail(rank, f"{_words(mine)} does not stand in the order of rank {peer}: {_words(theirs)}")

    def gather(self, rank: int, step: Step) -> None:
        for gather in step.gathers:
            for member in gather.ranks:
                if (gather.kind, gather.part(member)) not in self.operands[member]:
                    self.fail(member, f"{gather} needs {gather.kind}{_name(gather.part(member))}, which is not there")
            if (gather.kind, gather.whole) in self.operands[rank]:
                self.fail(rank, f"{gather} brings what is there already")
            self.operands[rank].add((gather.kind, gather.whole))

    def send_operands(self, rank: int, step: Step) -> None:
        for move in step.moves:
            if move.kind not in ("q", "kv"):
                self.fail(rank, f"{move} moves no operand")
            if move.src == rank:
                if move.unit not in self.operands[rank]:
                    self.fail(rank, f"{move} sends {move.kind}{_name(move.key)}, which is not there")
                due = self.step + move.within - 1
                if due >= len(self.plan.steps):
                    self.fail(rank, f"{move} is due within {move.within} steps, outside the plan")
                self.arrivals.setdefault(due, []).append(move)

    def receive_operands(self) -> None:
        for move in self.arrivals.pop(self.step, []):
            if move.unit in self.operands[move.dst]:
                self.fail(move.dst, f"{move} brings what is there already")
            self.operands[move.dst].add(move.unit)
        for rank, frees in enumerate(self.frees):
            self.operands[rank] -= frees[self.step]

    def compute(self, rank: int, compute: Compute) -> None:
        for unit in (("q", compute.q), ("kv", compute.kv)):
            if unit not in self.operands[rank]:
                self.fail(rank, f"{compute} needs {unit[0]}{_name(unit[1])}, which is not there")
        pairs = frozenset((i, j) for i in compute.q for j in compute.kv)
        if twice := pairs & self.done:
            self.fail(rank, f"{compute} computes {sorted(twice)} a second time")
        self.done |= pairs
        for kind in ACCUMULATORS[self.plan.direction]:
            key = compute.kv if kind == "dkv" else compute.q
            self.held[rank][kind, key] = self.held[rank].get((kind, key), frozenset()) | pairs

    def finish_results(self, due: int) -> None:
        for move, products in self.results.pop(due, []):
            self.held[move.dst][move.unit] = self.held[move.dst].get(move.unit, frozenset()) | products

    def send_results(self, rank: int, step: Step) -> None:
        for move in step.results:
            if move.kind not in ACCUMULATORS[self.plan.direction]:
                self.fail(rank, f"{move} moves no {self.plan.direction} result")
            if move.src == rank:
                if move.unit not in self.held[rank]:
                    self.fail(rank, f"{move} sends {move.kind}{_name(move.key)}, which is not there")
                self.results.setdefault(self.step + move.within, []).append((move, self.held[rank].pop(move.unit)))

    def reduce(self, steps: Sequence[Step]) -> None:
        for reduce in (reduce for rank, step in enumerate(steps) for reduce in step.reduces if rank == reduce.ranks[0]):
            whole = frozenset()
            for rank in reduce.ranks:
                if (reduce.kind, reduce.whole) not in self.held[rank]:
                    self.fail(rank, f"{reduce} needs {reduce.kind}{_name(reduce.whole)}, which is not there")
                whole |= self.held[rank].pop((reduce.kind, reduce.whole))
            side = 1 if reduce.kind == "dkv" else 0
            for rank in reduce.ranks:
                unit = reduce.kind, reduce.part(rank)
                mine = frozenset(pair for pair in whole if pair[side] in reduce.part(rank))
                self.held[rank][unit] = self.held[rank].get(unit, frozenset()) | mine

    def all_home(self) -> None:
        for i, j in sorted(self.needed - self.done):
            self.fail(i, f"the product q({i})*kv({j}) is missing")
        for rank in range(self.plan.size):
            for kind in ACCUMULATORS[self.plan.direction]:
                side = 1 if kind == "dkv" else 0
                want = {pair for pair in self.done if pair[side] == rank}
                if absent := want - self.held[rank].pop((kind, (rank,)), frozenset()):
                    self.fail(rank, f"{kind}({rank}) is not home: products {sorted(absent)} are not in it")
            for kind, key in self.held[rank]:
                self.fail(rank, f"{kind}{_name(key)} is left over and never sent home")


def _name(key: Key) -> str:
    return "(" + ",".join(map(str, key)) + ")"


def _words(actions: Iterable[Action]) -> str:
    return ", ".join(map(str, actions))


def _cell(step: Step, rank: int) -> str:
    words = [f"{gather.kind}{_name(gather.whole)}@" for gather in step.gathers]
    words += map(str, step.computes)
    for move in (*step.moves, *step.results):
        arrow = f">{move.dst}" if move.src == rank else f"<{move.src}"
        words.append(f"{move.kind}{_name(move.key)}{arrow}")
    words += [f"{reduce.kind}{_name(reduce.whole)}%" for reduce in step.reduces]
    return " ".join(words) or "-"

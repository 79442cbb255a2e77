"""Programs: every slot holds what is read from it, every transfer is waited for, and ranks' programs fit each other."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.program import instructions
from ds_seqpar.core.compiler.program.instructions import (
    LOCAL,
    GatherStart,
    Merge,
    Post,
    Product,
    ScatterStart,
    Wait,
    slots_of,
)
from ds_seqpar.core.compiler.program.lower import lower
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.schedules.actions import ACCUMULATORS, OPERANDS
from ds_seqpar.schedules.overlap import overlapped
from tests.grids import examples
from tests.unit.plans import (
    FORMS,
    block_mask,
    build,
    double_ring,
    everything,
    mesh,
    problems,
    ranks,
    ring,
    takes,
    topologies,
)

_forms = pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)
SIZES = {"q": 3, "kv": 4, "out": 5, "dq": 6, "dkv": 7}


class Model:
    """Walks a program, by a method for each kind of instruction, and knows what is in each slot, and which slots a
    transfer still reads or writes."""

    def __init__(self, program):
        self.program, self.rank = program, program.rank
        self.slots = {}  # slot -> (what, unit)
        self.tickets = {}  # ticket -> (slots that are read, {slot: what will be in it})
        self.waited, self.freed, self.added, self.products = set(), set(), set(), Counter()
        self.final = None

    def run(self):
        for at, instruction in enumerate(self.program.code):
            assert not self.freed & set(slots_of(instruction)), f"{instruction} names a slot that was freed"
            DO[type(instruction)](self, instruction)
            for slot in self.program.frees[at]:
                assert slot not in self.reading() | self.writing(), f"slot {slot} is freed under way"
                assert slot not in self.freed
                self.freed.add(slot)
        assert not self.tickets, f"{self.tickets} are never waited for"
        assert self.freed == set(range(len(self.program.slots)))
        assert self.final == ACCUMULATORS[self.program.direction]

    def reading(self):
        return {slot for read, _ in self.tickets.values() for slot in read}

    def writing(self):
        return {slot for _, written in self.tickets.values() for slot in written}

    def read(self, slot, what, unit):
        assert slot not in self.writing(), f"slot {slot} is read before its transfer is waited for"
        assert self.slots.get(slot) == (what, unit), f"slot {slot} holds {self.slots.get(slot)}, not {what} {unit}"
        kind, _, keys, *_ = self.program.slots[slot]
        assert kind == unit[0]
        assert unit[1] in keys or what in ("parts", "others")

    def write(self, slot, what, unit):
        assert slot not in self.reading() | self.writing(), f"slot {slot} is written under way"
        self.slots[slot] = (what, unit)

    def start(self, ticket, read, written):
        assert ticket not in self.waited
        assert ticket not in self.tickets
        for slot in written:
            assert slot not in self.reading() | self.writing() | set(read), f"slot {slot} is received into under way"
            self.slots[slot] = None
        assert len(set(written)) == len(written)
        self.tickets[ticket] = (list(read), written)

    def operand(self, slot, unit):
        if slot == LOCAL:
            assert unit[1] == (self.rank,)
        else:
            self.read(slot, "operand", unit)

    def running(self, slot, unit):
        """A slot that is the accumulator's, or from now on is."""
        if self.slots.get(slot) != ("running", unit):
            assert ("running", unit) not in self.slots.values(), f"{unit} is in two slots"
            self.write(slot, "running", unit)
        self.read(slot, "running", unit)
        assert slot not in self.reading(), f"{unit} is changed while it is sent"
        self.added.add(unit)

    def forget(self, slot):
        self.slots.pop(slot, None)

    def on_Pack(self, one):
        assert one.unit[1] == (self.rank,)
        self.write(one.into, "operand", one.unit)

    def on_Post(self, one):
        assert one.sends or one.receives
        for transfer in one.sends:
            self.read(transfer.slot, "operand" if transfer.unit[0] in OPERANDS else "message", transfer.unit)
        written = {t.slot: ("operand" if t.unit[0] in OPERANDS else "arrived", t.unit) for t in one.receives}
        assert len(written) == len(one.receives)
        self.start(one.ticket, [transfer.slot for transfer in one.sends], written)

    def on_Wait(self, one):
        read, written = self.tickets.pop(one.ticket)
        self.waited.add(one.ticket)
        self.slots.update(written)
        for slot in read:
            if self.slots.get(slot, ("",))[0] in ("message", "others"):
                self.forget(slot)

    def on_GatherStart(self, one):
        kind, whole = one.collective.kind, one.collective.blocks
        self.read(one.sent, "operand", (kind, one.collective.key_of(self.rank)))
        self.start(one.ticket, [one.sent], {one.received: ("gathered", (kind, whole))})

    def on_Assemble(self, one):
        unit = one.collective.kind, one.collective.blocks
        self.read(one.received, "gathered", unit)
        assert one.into != one.received
        self.write(one.into, "operand", unit)

    def on_Product(self, one):
        self.operand(one.q_slot, ("q", one.q))
        self.operand(one.kv_slot, ("kv", one.kv))
        kinds = ACCUMULATORS[self.program.direction]
        assert [unit for unit, _ in one.results] == [(k, one.kv if k == "dkv" else one.q) for k in kinds]
        for unit, slot in one.results:
            self.running(slot, unit)
        self.products.update((i, j) for i in one.q for j in one.kv)

    def on_Merge(self, one):
        self.read(one.arrived, "arrived", one.unit)
        assert one.accumulator == LOCAL or self.slots[one.accumulator] == ("running", one.unit)
        if one.into == one.arrived:
            if one.accumulator != LOCAL:
                self.forget(one.accumulator)
            self.forget(one.arrived)
        self.running(one.into, one.unit)

    def on_Export(self, one):
        self.read(one.accumulator, "running", one.unit)
        self.forget(one.accumulator)
        self.added.discard(one.unit)
        self.write(one.into, "message", one.unit)

    def on_ScatterStart(self, one):
        reduce, kind = one.collective, one.collective.kind
        self.read(one.accumulator, "running", (kind, reduce.blocks))
        self.write(one.sent, "others", (kind, reduce.blocks))
        self.running(one.local_part, (kind, reduce.key_of(self.rank)))
        if one.local_part != one.accumulator:
            self.forget(one.accumulator)
        self.start(one.ticket, [one.sent], {one.received: ("parts", (kind, reduce.key_of(self.rank)))})

    def on_Fold(self, one):
        self.read(one.received, "parts", one.unit)
        self.running(one.accumulator, one.unit)

    def on_Finish(self, one):
        for unit, slot in one.results:
            assert unit[1] == (self.rank,)
            if unit in self.added:
                self.read(slot, "running", unit)
            self.running(slot, unit)
        self.final = tuple(unit[0] for unit, _ in one.results)
        left = {held for held in self.slots.values() if held and held[0] == "running"}
        assert left <= {("running", unit) for unit, _ in one.results}, "a result is left over"


# kind of instruction -> what the model does
DO = {
    getattr(instructions, name.removeprefix("on_")): does
    for name, does in vars(Model).items()
    if name.startswith("on_")
}


def _programs(plan, wide_travel=True, early=0):
    return [
        lower(plan.name, plan.direction, r, plan.size, s, wide_travel, ahead=early) for r, s in enumerate(plan.ranks)
    ]


def _check(plan, pairs, wide_travel, early=0):
    programs, done = _programs(plan, wide_travel, early), Counter()
    for program in programs:
        model = Model(program)
        model.run()
        done += model.products
    assert set(pairs) <= set(done)
    assert set(done.values()) == {1}
    _assert_matched(programs)


def _assert_matched(programs):
    """What one rank sends another receives, for each tag in one order; Ulysses ranks of a group meet in one order
    too."""
    sent, received, groups = defaultdict(list), defaultdict(list), defaultdict(dict)
    for program in programs:
        for one in program.code:
            if isinstance(one, Post):
                for t in one.sends:
                    sent[program.rank, t.peer, t.tag].append(t.unit)
                for t in one.receives:
                    received[t.peer, program.rank, t.tag].append(t.unit)
            if isinstance(one, GatherStart | ScatterStart):
                met = groups[one.collective.ranks].setdefault(program.rank, [])
                met.append((type(one), one.collective))
    assert sent == received
    for ulysses_size, met in groups.items():
        assert set(met) == set(ulysses_size)
        assert all(order == met[ulysses_size[0]] for order in met.values())


@_forms
@examples(12)
@given(data=st.data(), wide_travel=st.booleans(), overlap=st.booleans(), even=st.booleans(), early=st.integers(0, 3))
def test_slots_hold_what_is_read_and_programs_fit_each_other(
    schedule, direction, travels, data, wide_travel, overlap, even, early
):
    topology, pairs = data.draw(problems(schedule, 9))
    plan = build(schedule, topology, direction, travels, pairs, even=even)
    if overlap:
        plan = overlapped(plan, block_mask(plan.size, pairs), SIZES)
    _check(plan, pairs, wide_travel, early)


@_forms
@pytest.mark.parametrize("early", [1, 2])
def test_messages_are_asked_for_before_they_leave_and_nothing_else_changes(schedule, direction, travels, early):
    """So many steps before or more, ahead of whatever leaves in that step; waits stay where they are due."""
    plan = _plan_of_six(schedule, direction, travels)
    for plain, found in zip(_programs(plan), _programs(plan, early=early), strict=True):
        asked, left = ({t: one.step for one in found.code if isinstance(one, Post) for t in transfers(one)}
                       for transfers in (_received, _sent))  # fmt: skip
        then = {t: one.step for one in plain.code if isinstance(one, Post) for t in _received(one)}
        assert set(asked) == set(then)
        assert all(asked[t] <= max(0, step - early) for t, step in then.items())
        assert left == {t: one.step for one in plain.code if isinstance(one, Post) for t in _sent(one)}
        for step in range(len(plan.ranks[0])):
            kinds = [bool(one.sends) for one in found.code if isinstance(one, Post) and one.step == step]
            assert kinds == sorted(kinds)
        alike = [[one for one in program.code if isinstance(one, Product | Merge)] for program in (plain, found)]
        assert [_unplaced(one) for one in alike[0]] == [_unplaced(one) for one in alike[1]]


def _plan_of_six(schedule, direction, travels):
    topology = next(one for one in topologies(schedule, 6))
    pairs = {(i, j) for i, j in everything(6) if j <= i} if schedule == "distflash" else everything(6)
    return build(schedule, topology, direction, travels, pairs)


def _received(post):
    return [(t.peer, t.unit) for t in post.receives]


def _sent(post):
    return [(t.peer, t.unit) for t in post.sends]


def _unplaced(one):
    """Without its slots."""
    return (one.step, one.q, one.kv) if isinstance(one, Product) else (one.step, one.unit)


@pytest.mark.parametrize("wide_travel", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_larger_programs_fit_each_other(direction, wide_travel):
    shapes = [("ring", ring(16)), ("double_ring", double_ring(12, 4)), ("distflash", ring(13)), ("mesh", mesh(3, 2, 2))]
    for schedule, topology in shapes:
        size = ranks(topology)
        pairs = {(i, j) for i, j in everything(size) if j <= i} if schedule == "distflash" else everything(size)
        _check(build(schedule, topology, direction, pairs=pairs), pairs, wide_travel)


def _broken(program):
    """The program with one thing wrong, in each way that the model is there to notice."""
    code = list(program.code)
    for at, one in enumerate(code):
        if isinstance(one, Wait):
            yield [*code[:at], *code[at + 1 :]], "a wait less"
            yield [*code[: at + 1], *code[at:]], "a wait twice"
        if isinstance(one, Product):
            for slot in {*range(len(program.slots))} - {one.kv_slot}:
                yield [*code[:at], one._replace(kv_slot=slot), *code[at + 1 :]], "another slot"


@pytest.mark.parametrize("schedule", ["ring", "mesh", "distflash"])
def test_a_wait_or_a_slot_that_is_wrong_would_be_noticed(schedule):
    topology = mesh(2, 2, 1) if schedule == "mesh" else ring(4)
    (*_, program) = _programs(build(schedule, topology, "backward"))
    ways = Counter()
    for code, way in _broken(program):
        frees = [()] * len(code)
        model = Model(_Changed(program, code, frees))
        with pytest.raises((AssertionError, KeyError)):
            model.run()
        ways[way] += 1
    assert len(ways) == 3


class _Changed:
    def __init__(self, program, code, frees):
        self.rank, self.direction, self.slots = program.rank, program.direction, program.slots
        self.code, self.frees = code, frees


# ---- what people are told


def test_a_place_is_marked_and_shows_what_is_near_and_who_takes_part():
    program = _programs(build("ring", ring(8), "forward"))[3]
    at = next(index for index, one in enumerate(program.code) if one.step == 4)
    assert program.where(at).splitlines() == [
        "ring forward, CP rank 3 of 8, step 4, with ranks 2, 4",
        "   step 2: q(3)*kv(1) kv(0)<2 kv(1)>4",
        "   step 3: q(3)*kv(0) kv(0)>4 kv(7)<2",
        "-> step 4: q(3)*kv(7) kv(6)<2 kv(7)>4",
        "   step 5: q(3)*kv(6) kv(5)<2 kv(6)>4",
        "   step 6: q(3)*kv(5) kv(4)<2 kv(5)>4",
    ]
    assert program.where(0).splitlines()[1].startswith("-> step 0: ")
    assert program.where(len(program.code) - 1).splitlines()[-1].startswith("-> step 7: ")


def test_every_instruction_has_a_place():
    for schedule, topology in (("ring", ring(5)), ("mesh", mesh(2, 2, 2)), ("distflash", ring(6))):
        for program in _programs(build(schedule, topology, "backward")):
            for at, one in enumerate(program.code):
                (marked,) = [line for line in program.where(at).splitlines() if line.startswith("->")]
                assert marked == f"-> step {one.step}: {program.words[one.step]}"


@pytest.mark.parametrize(
    ("schedule", "topology"),
    [("ring", ring(64)), ("mesh", mesh(8, 8, 1)), ("mesh", mesh(64, 1, 1)), ("distflash", ring(64))],
    ids=["ring", "grid", "one gather", "distflash"],
)
@pytest.mark.parametrize("even", [True, False])
def test_a_place_stays_short_on_many_ranks(schedule, topology, even):
    meet = block_mask(64, takes(schedule, 64), even)
    steps = SCHEDULES[schedule].build(topology, meet, "backward", "kv")(40)
    program = lower(schedule, "backward", 40, 64, steps, True)
    for at in (0, len(program.code) // 2, len(program.code) - 1):
        place = program.where(at)
        assert len(place.encode()) < 4096
        assert "CP rank 40 of 64" in place

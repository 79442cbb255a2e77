"""By NCCL's rules all programs end, and every message meets its receiver. Changed ones are refused, or stay exact."""

import copy
import dataclasses
import itertools
import random
from collections import Counter, defaultdict, deque

import pytest

from ds_seqpar.analysis import nccl
from ds_seqpar.base.errors import PlanError
from ds_seqpar.core.compiler.compile import Compiler
from ds_seqpar.core.compiler.program.instructions import GatherStart, Post, ScatterStart, Wait
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.program.ulysses import SavedForBackward, UlyssesGroup
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL
from ds_seqpar.core.runtime.call import CallSettings
from ds_seqpar.core.runtime.kernels import Scores
from ds_seqpar.core.runtime.transport import Message
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.testing import _Ranks, _Receives, _VirtualComm
from tests.grids import cover, each_then_rest
from tests.oracle import dense, errors, tensors
from tests.unit.plans import SINGLE
from tests.unit.test_program import Model

MASKS = {
    "causal": lambda seq: CAUSAL,
    "full": lambda seq: FULL,
    "window": lambda seq: Mask(window=seq // 3),
    "packed": lambda seq: Mask(documents=(0, seq // 4, seq // 2)),
}
SAVED = {"kept": SavedForBackward.QKV_AND_OUT, "again": SavedForBackward.NOTHING}
GRID = {
    "schedule": tuple(sorted(SCHEDULES)),
    "inner": (1, 2, 3, 4, 6, 8, 10, 12),
    "ulysses": (1, 2),
    "head_chunks": (1, 2),
    "heads": (
        (4, 4),
        (5, 5),
        (8, 2),
    ),  # those that Ulysses ranks do not divide may choose what travels Ulysses rank by Ulysses rank
    "mask": tuple(MASKS),
    "overlap": (False, True),
    "kept": tuple(SAVED),
    "rotate": ("kv", "q", "auto"),
}


def _legal(case):
    schedule = SCHEDULES[case["schedule"]]
    if not list(schedule.shapes(case["inner"])):
        return False
    if case["mask"] == "full" and case["schedule"] in ("distflash", "triangle"):
        return False
    if case["rotate"] not in ("auto", *schedule.moving_sides):
        return False
    if case["heads"] == (5, 5) and (case["ulysses"], case["head_chunks"]) != (2, 1):
        return False
    return case["ulysses"] > 1 or (case["head_chunks"], case["kept"]) == (1, "kept")


def _calls(case, own, early=0):
    """What all ranks do, forward and backward. own: settings of the schedule's."""
    names = {name: case[name] for name in ("schedule", "ulysses", "overlap")}
    rotate = {"rotate_forward": case["rotate"], "rotate_backward": case["rotate"]}
    config = SequenceParallelConfig(size=case["inner"] * case["ulysses"], **names, **rotate, **own)
    config = config.resolve(config.size, heads=case["heads"])
    recipe, ulysses_size = config.recipe(config.topology(config.size)), config.ulysses
    seq = 8 * multiple(config.layout, config.size, ulysses_size)
    shards, mask = EvenShards(config.layout, seq, recipe.size), MASKS[case["mask"]](seq)
    shape = shape_of("fp32", "float32", 1, (*case["heads"], 8))
    compilers = [Compiler(recipe, inner, early) for inner in range(recipe.size)]
    options = PLAIN_KERNEL, case["head_chunks"], SAVED[case["kept"]]
    return [
        [
            compiler.bound_call(
                direction, mask, shards, shape, UlyssesGroup(ulysses_size, ulysses_rank), *options
            ).program
            for compiler in compilers
            for ulysses_rank in range(ulysses_size)
        ]
        for direction in ("forward", "backward")
    ]


def _few(schedule):
    """A cover, with one shape of each number of ranks after the other."""
    for number, case in enumerate(cover(_legal, **{**GRID, "schedule": (schedule,), "inner": (2, 3, 4, 6, 8)})):
        shapes = list(SCHEDULES[schedule].shapes(case["inner"]))
        yield case, shapes[number % len(shapes)]


def _many(schedule):
    """For each number of ranks every shape, with each mask, each kind of heads, and whatever else there is."""
    for inner in GRID["inner"]:
        shapes = tuple(tuple(own.items()) for own in SCHEDULES[schedule].shapes(inner))
        for case in cover(_legal, **{**GRID, "schedule": (schedule,), "inner": (inner,), "own": shapes}):
            yield case, dict(case["own"])


@pytest.mark.parametrize("cases", each_then_rest([_few], [_many]))
@pytest.mark.parametrize("schedule", GRID["schedule"])
def test_programs_of_every_schedule_end(schedule, cases):
    for case, own in cases(schedule):
        forward, backward = _calls(case, own)
        nccl.check([forward, forward, backward, backward], case["ulysses"])  # two layers


# ---- what is wrong


def _ring(**changes):
    case = {"schedule": "ring", "inner": 4, "ulysses": 1, "head_chunks": 1, "heads": (4, 4), "mask": "full"}
    return _calls({**case, "overlap": False, "kept": "kept", "rotate": "kv", **changes}, {})


def _with(programs, rank, code):
    return [dataclasses.replace(x, code=tuple(code)) if r == rank else x for r, x in enumerate(programs)]


def test_a_message_nobody_asks_for_is_named():
    forward, _ = _ring()
    at = next(i for i, one in enumerate(forward[1].code) if isinstance(one, Post))
    code = [one._replace(receives=()) if i == at else one for i, one in enumerate(forward[1].code)]
    with pytest.raises(PlanError, match=r"rank 0 sends 3 messages to rank 1, which receives 2"):
        nccl.check([_with(forward, 1, code)])


def test_messages_out_of_order_are_named():
    forward, _ = _ring()
    code = list(forward[1].code)
    first, second, *_ = (i for i, one in enumerate(code) if isinstance(one, Post))
    code[first], code[second] = (code[i]._replace(sends=code[j].sends) for i, j in ((first, second), (second, first)))
    with pytest.raises(PlanError, match=r"no tags: message 0 from rank 1 to rank 2"):
        nccl.check([_with(forward, 1, code)])


def test_ranks_that_wait_for_one_another_are_named():
    forward, _ = _ring()
    programs = []
    for program in forward:  # all receive first
        code = []
        for one in program.code:
            apart = [one._replace(sends=()), one._replace(receives=())] if isinstance(one, Post) else [one]
            code += [part for part in apart if not isinstance(part, Post) or part.sends or part.receives]
        programs.append(dataclasses.replace(program, code=tuple(code)))
    with pytest.raises(PlanError, match=r"wait for ever: rank \d waits in step 0: .* for rank \d, rank \d waits"):
        nccl.check([programs])


def test_rows_and_columns_that_wait_for_one_another_are_named():
    """Of a 2 x 2 grid rank 3 may gather in its column first. Where rank 0 does so too, all four wait in a circle."""
    programs, _ = _ring(schedule="attention2d", inner=4)
    for rank in (3, 0):
        nccl.check([programs])
        code = list(programs[rank].code)
        first, second = (i for i, one in enumerate(code) if isinstance(one, GatherStart))
        code[first], code[second] = code[second], code[first]
        programs = _with(programs, rank, code)
    with pytest.raises(PlanError, match="wait for ever"):
        nccl.check([programs])


def test_ranks_half_a_group_apart_connect_both_ways_at_once_or_neither_does():
    """Of two ranks one receives in a batch of its own, before it sends; its wait is for the first of both."""
    forward, _ = _ring(inner=2)
    nccl.check([forward])
    code = []
    for one in forward[1].code:
        both = isinstance(one, Post) and one.receives and one.sends
        code += [one._replace(sends=()), one._replace(receives=())] if both else [one]
    with pytest.raises(PlanError, match=r"rank 0 first sends to rank 1 and receives from it in one batch and rank 1"):
        nccl.check([_with(forward, 1, code)])


# ---- changed programs over a transport with these rules


class _Operation(_Receives):
    """What a rank started as one."""

    def __init__(self, wire, sends, receives):
        self.wire, self.sends, self.receives, self.left = wire, sends, receives, len(sends) + len(receives)
        self.begun = False

    def ready(self):
        self.wire.go_on()
        return self.begun and not self.left

    def wait(self):
        assert not self.left


class _Wire:
    """One stream a rank. A message is read when it meets its receiver, and no sooner."""

    def __init__(self):
        self.queues, self.lines = defaultdict(deque), defaultdict(lambda: (deque(), deque()))

    def go_on(self):
        again = True
        while again:
            again = False
            for rank, queue in self.queues.items():
                again |= self.advance(rank, queue)

    def advance(self, rank, queue):
        if not queue:
            return False
        where, one = queue[0]
        if not one.begun:
            one.begun = True
            for message in one.sends:
                self.meet((where, rank, message.peer), 0, message, one)
            for message in one.receives:
                self.meet((where, message.peer, rank), 1, message, one)
        if one.left:
            return False
        queue.popleft()
        return True

    def meet(self, line, side, message, one):
        self.lines[line][side].append((message, one))
        sent, received = self.lines[line]
        if sent and received:
            (given, sender), (asked, receiver) = sent.popleft(), received.popleft()
            asked.buffer.copy_(given.buffer)  # fails where the sizes differ
            sender.left -= 1
            receiver.left -= 1


class _Nccl(_VirtualComm):
    def __init__(self, rank, wire):
        super().__init__(rank, None)
        self.wire = wire

    def post(self, sends, receives, where="inner"):
        one = _Operation(self.wire, sends, receives)
        self.wire.queues[self.rank].append((where, one))
        return one

    def _together(self, peers, kind, elements, sent, received, tag=-1):
        pairs = (
            [Message(peer, kind, 0, x, tag) for peer, x in zip(peers, parts, strict=True)] for parts in (sent, received)
        )
        return self.post(*pairs, where=tuple(peers))


def _attend(config, mask, inputs, changed, early=0):
    """(out, dq, dk, dv) of programs that `changed` gives, by direction and rank."""
    shards = EvenShards(config.layout, inputs[0].shape[1], config.size)
    ranks, wire = _Ranks(config, shards, None, {}), _Wire()
    for rank, runtime in enumerate(ranks.runtimes):
        runtime.comm = _Nccl(rank, wire)
        runtime.compiler = _Changed(runtime.compiler.recipe, rank, early)
        runtime.compiler.changed = changed
    q, k, v, do = inputs
    settings = CallSettings(mask, shards, Scores(8**-0.5, 0.0), saves=SavedForBackward.NOTHING, v_dim=8)
    out, grads, _ = ranks.attention((q, k, v), do, settings)
    assert not any(wire.queues.values())
    return out, *grads


class _Changed(Compiler):
    changed = None

    def bound_call(self, direction, *args):
        bound = copy.copy(super().bound_call(direction, *args))
        bound.program = self.changed.get((direction, self.rank), bound.program)
        return bound


STARTS = (Post, GatherStart, ScatterStart)


def _moved(dice, program):
    """Something that is started, or a wait, stands elsewhere."""
    order = list(range(len(program.code)))
    at = dice.choice([i for i in order if isinstance(program.code[i], (*STARTS, Wait))])
    order.remove(at)
    order.insert(min(len(order), max(0, at + dice.choice([-6, -3, -2, -1, 1, 2, 3, 6]))), at)
    code, frees = (tuple(x[i] for i in order) for x in (program.code, program.frees))
    return dataclasses.replace(program, code=code, frees=frees)


def _swapped(dice, program):
    """Two messages change places: in a post, or between two; or two posts do."""
    code = list(program.code)
    posts = [i for i, one in enumerate(code) if isinstance(one, Post)]
    side = dice.choice(["sends", "receives"])
    places = [(i, n) for i in posts for n in range(len(getattr(code[i], side)))]
    if len(places) < 2:
        return program
    (i, n), (j, m) = dice.sample(places, 2)
    first, second = getattr(code[i], side)[n], getattr(code[j], side)[m]
    for at, number, new in ((i, n, second), (j, m, first)):
        messages = list(getattr(code[at], side))
        messages[number] = new
        code[at] = code[at]._replace(**{side: tuple(messages)})
    return dataclasses.replace(program, code=tuple(code))


def _inner(program):
    """Without what begins and ends the one head chunk."""
    inner = [x for x in zip(program.code, program.frees, strict=True) if hasattr(Model, f"on_{type(x[0]).__name__}")]
    code, frees = zip(*inner, strict=True)
    return dataclasses.replace(program, code=code, frees=frees)


def _refused(programs):
    """By what knows slots, or by NCCL's rules."""
    try:
        for program in programs:
            Model(_inner(program)).run()
    except (AssertionError, KeyError):
        return "slots"
    try:
        nccl.check([programs])
    except PlanError:
        return "nccl"
    return None


FORMS = [(s, own) for s in SINGLE for own in SCHEDULES[s].shapes(4)]


@pytest.mark.parametrize("count", [80, pytest.param(600, marks=pytest.mark.slow)])
def test_a_changed_program_is_refused_or_stays_exact(count):
    dice, ended = random.Random(7), Counter()
    for number in range(count):
        schedule, own = FORMS[number % len(FORMS)]
        overlap, early = dice.random() < 0.5, dice.choice([0, 0, 0, 1, 2])
        layout = "contiguous" if schedule == "distflash" else "zigzag"
        config = SequenceParallelConfig(
            size=4, ulysses=1, schedule=schedule, layout=layout, overlap=overlap, **own
        ).resolve(4, heads=(4, 2))
        recipe, mask = config.recipe(config.topology(4)), CAUSAL
        shards, shape = EvenShards(layout, 16, 4), shape_of("fp32", "float64", 1, (4, 2, 8))
        direction = dice.choice(["forward", "backward"])
        given = direction, mask, shards, shape, UlyssesGroup(1, 0), PLAIN_KERNEL
        programs = [Compiler(recipe, rank, early).bound_call(*given).program for rank in range(4)]
        rank = dice.randrange(4)
        if any(isinstance(one, STARTS) for one in programs[rank].code) and dice.random() < 0.9:
            programs[rank] = dice.choice([_moved, _swapped])(dice, programs[rank])
        reason = _refused(programs)
        ended[reason] += 1
        if reason is None:
            inputs = tensors(1, 16, (4, 2), 8)
            changed = {(direction, r): program for r, program in enumerate(programs)}
            assert max(errors(_attend(config, mask, inputs, changed, 0), dense(*inputs))) <= 1e-10, (number, config)
    assert min(ended[reason] for reason in ("slots", "nccl", None)) > count // 20, ended


def test_the_transport_of_these_tests_waits_for_ever_where_the_check_says_so():
    """Every rank asks for a message before it sends its own: fine over gloo, which is told tags, and not here."""
    config = SequenceParallelConfig(size=4, ulysses=1, schedule="ring").resolve(4, heads=(4, 4))
    programs, changed = _ring(mask="causal")[0], {}
    for rank, program in enumerate(programs):
        tickets = itertools.count(1000)
        code, frees = [], []
        for one, freed in zip(program.code, program.frees, strict=True):
            if isinstance(one, Post) and one.receives and one.sends:
                ticket = next(tickets)
                code += [one._replace(sends=()), one._replace(receives=(), ticket=ticket), Wait(one.step, ticket)]
                frees += [(), (), freed]
            else:
                code, frees = [*code, one], [*frees, freed]
        changed["forward", rank] = dataclasses.replace(program, code=tuple(code), frees=tuple(frees))
    with pytest.raises(PlanError, match="wait for ever"):
        nccl.check([[changed["forward", rank] for rank in range(4)]])
    with pytest.raises(AssertionError, match="wait for one another"):
        _attend(config, CAUSAL, tensors(1, 16, (4, 4), 8), changed)

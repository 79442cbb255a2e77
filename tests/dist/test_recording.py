"""A record has what the plan says, each action once and in order, with the bytes that arrive; without one nothing is
kept."""

import itertools
import json
from collections import Counter
from unittest import mock

import pytest

from ds_seqpar.compiler.program.instructions import (
    Assemble,
    Enter,
    ExchangeStart,
    Export,
    Finish,
    Fold,
    GatherStart,
    Leave,
    Merge,
    Pack,
    PackHeads,
    Post,
    Product,
    ScatterStart,
    UnpackHeads,
    Wait,
)
from ds_seqpar.compiler.schedules.actions import Gather
from ds_seqpar.compiler.sharding.masks import CAUSAL
from ds_seqpar.errors import ConfigError
from ds_seqpar.runtime import recorder
from tests import oracle
from tests.dist.ranks import leaves, make
from tests.dist.test_traffic import BATCH, DIM, SEQ, block_units
from tests.launch import on_warm_ranks as on_ranks

KINDS = {
    "copy": (Pack, Assemble, Export, Finish, PackHeads, UnpackHeads, Enter, Leave),
    "post": (Post, GatherStart, ScatterStart, ExchangeStart),
    "merge": (Merge, Fold),
    "wait": (Wait,),
    "product": (Product,),
}
KIND_OF = {instruction: kind for kind, instructions in KINDS.items() for instruction in instructions}
HEADS = (4, 4)
CASES = {
    "ring": ({"ulysses": 1}, False),
    "ring, watched": ({"ulysses": 1, "rotate_forward": "q", "rotate_backward": "kv"}, True),
    "distflash": ({"ulysses": 1, "schedule": "distflash"}, False),
    "attention2d": ({"ulysses": 1, "schedule": "attention2d", "rows": 2}, True),
    "attention2d, overlapped": ({"ulysses": 1, "schedule": "attention2d", "rows": 2, "overlap": True}, False),
    "mesh": ({"ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2]}, False),
    "ulysses": ({"ulysses": 4}, False),
    "ulysses around a ring": ({"ulysses": 2}, False),
    "ulysses around a ring, watched, in head chunks": ({"ulysses": 2, "head_chunks": 2}, True),
}


def step(sp):
    q, k, v, do = oracle.tensors(BATCH, SEQ, HEADS, dim=DIM)
    sp.attention(*leaves(sp, q, k, v)).backward(sp.shard(do, 1))


def recorded(cases):
    """By case: events, bytes received meanwhile, gathered events; of each direction the plan's steps and the code."""
    found = {}
    for name, (config, watch) in cases.items():
        sp = make(**config)
        with sp.record(watch=watch) as record:
            step(sp)
            assert record.events == ()
        received = sp.comm.received_bytes
        found[name] = record.events, received, record.gather().events, planned(sp), sp.rank
    return found


def planned(sp):
    """By direction."""
    shards, plans = sp.runtime.shards(SEQ // sp.runtime.size), {}
    for direction, (_, (bound, _)) in sp.runtime.last_bound.items():
        compiler = sp.runtime.compiler
        plan = compiler.recipe.plan(direction, compiler.block_mask(CAUSAL, shards), bound.shape)
        plans[direction] = plan.ranks[sp.runtime.rank], bound.program.code, sp.runtime.rank
    return plans


@pytest.fixture(scope="module")
def results():
    return on_ranks(4, recorded, CASES)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def walks(events):
    """Each with its own events."""
    starts = [event for event in events if event.kind == "walk"]
    return [(walk, [e for e in events if e.call == walk.call and e is not walk]) for walk in starts]


def head_chunks_of(code):
    """(first, last) instruction of each head chunks."""
    ends = [at for at, one in enumerate(code) if isinstance(one, Enter | Leave)]
    return zip(ends[::2], ends[1::2], strict=True)


def test_products_and_messages_are_those_of_the_plan(results, case):
    ulysses, head_chunks = (CASES[case][0].get(name, 1) for name in ("ulysses", "head_chunks"))
    units = block_units(4 // ulysses, ulysses * head_chunks, HEADS)
    for found in results:
        events, _, _, plans, _ = found[case]
        assert [walk.direction for walk, _ in walks(events)] == ["forward", "backward"]
        for walk, its in walks(events):
            steps, code, rank = plans[walk.direction]
            products = [(e.step, e.label, e.blocks) for e in its if e.kind == "product"]
            messages = [(e.kind, e.step, e.label, e.what, e.blocks, e.peer, e.bytes) for e in its
                        if e.kind in ("move", "send")]  # fmt: skip
            computed, wanted = [], []
            for first, last in head_chunks_of(code):
                asked = {(t.peer, t.unit): one.step - code[first].step for one in code[first:last]
                         if isinstance(one, Post) for t in one.receives}  # fmt: skip
                begin = code[first].step
                for n, one in enumerate(steps):
                    computed += [(begin + n, str(c), (c.q, c.kv)) for c in one.computes]
                    found_here = messages_of(n, one, rank, asked, units[walk.direction])
                    wanted += [(kind, begin + step, *rest) for kind, step, *rest in found_here]
            assert len(list(head_chunks_of(code))) == head_chunks
            assert products == computed
            assert Counter(messages) == Counter(wanted)
            assert [m[1] for m in messages] == sorted(m[1] for m in messages)


def messages_of(number, step, rank, asked, units):
    """What a record has of a step's messages, in bytes of fp64; one that comes stands where it is asked for."""
    for move in (*step.moves, *step.results):
        kind, peer = ("send", move.dst) if move.src == rank else ("move", move.src)
        posted = number if kind == "send" else asked[move.src, move.unit]
        size = 8 * units[move.kind] * len(move.key)
        yield kind, posted, str(move), move.kind, (move.key,), peer, size
    for its in (*step.gathers, *step.reduces):
        mine, others = len(its.key_of(rank)), len(its.ranks) - 1
        blocks = len(its.blocks) - mine if isinstance(its, Gather) else mine * others
        yield "move", number, str(its), its.kind, (its.blocks,), -1, 8 * units[its.kind] * blocks


def test_instructions_are_those_of_the_program_one_after_another(results, case):
    for found in results:
        events, _, _, plans, _ = found[case]
        for walk, its in walks(events):
            done = [e for e in its if e.kind not in ("move", "send", "exchange")]
            assert [(e.kind, e.step) for e in done] == [(KIND_OF[type(x)], x.step) for x in plans[walk.direction][1]]
            assert walk.start == done[0].start
            assert walk.end == done[-1].end
            assert all(e.start <= e.end for e in done)
            assert all(before.end <= after.start for before, after in itertools.pairwise(done))


def test_a_message_ends_when_it_was_waited_for_or_before_that_where_it_is_watched(results, case):
    ends = []
    for found in results:
        for walk, its in walks(found[case][0]):
            waits = {e.start: e for e in its if e.kind == "wait"}
            for message in (e for e in its if e.kind in ("move", "send")):
                wait = waits[message.waited]
                assert walk.start <= message.start <= message.end <= wait.end
                ends.append(message.end >= message.waited)
    assert all(ends) or CASES[case][1]
    assert ends or CASES[case][0]["ulysses"] == 4  # a single CP rank has nobody to send to


def test_bytes_are_those_that_arrived(results, case):
    for found in results:
        events, received, _, _, rank = found[case]
        assert sum(e.bytes for e in events if e.kind in ("move", "exchange")) == received > 0
        assert {e.rank for e in events} == {rank}


def test_exchanges_of_heads_are_part_of_the_walk(results, case):
    for found in results:
        for walk, its in walks(found[case][0]):
            labels = [e.label for e in its if e.kind == "exchange"]
            if CASES[case][0]["ulysses"] == 1:
                assert labels == []
            elif "head_chunks" not in CASES[case][0]:
                wanted = {"forward": ["q k v in", "out out"], "backward": ["do in", "dk dv out", "dq out"]}
                assert labels == wanted[walk.direction]
            for event in its:
                assert walk.start <= event.start <= event.end <= walk.end
        enclosing = [e for e in found[case][0] if e.kind in ("agree", "walk")]
        assert all(before.end <= after.start for before, after in itertools.pairwise(enclosing))


def test_ranks_agree_before_anything_else_is_recorded(results, case):
    assert all(found[case][0][0].kind == "agree" for found in results)


def test_everybody_gathers_what_everybody_has(results, case):
    wanted = tuple(event for found in sorted(results, key=lambda found: found[case][4]) for event in found[case][0])
    assert all(found[case][2] == wanted for found in results)


def without(folder):
    """What happens around a record, on two ranks."""
    sp = make(ulysses=1)
    keeping = [(recorder.HostClock, "mark"), (recorder.Recorder, "timed"), (recorder.Recorder, "span")]
    with sp.record() as record:
        step(sp)
        with pytest.raises(ConfigError, match=r"record.*got a second"), sp.record():
            pass
    once = record.events
    for owner, name in keeping:
        with mock.patch.object(owner, name, side_effect=AssertionError("nobody records")):
            step(sp)
    with pytest.raises(ZeroDivisionError), sp.record() as broken:  # noqa: PT012 - a step is recorded before it
        step(sp)
        1 / 0  # noqa: B018
    step(sp)
    file = folder / f"{sp.rank}.json"
    record.save(file)
    with pytest.raises(ConfigError, match=r"trace.*missing.*No such file"):
        record.save(folder / "missing" / "trace.json")
    assert record.events is once
    return len(once), len(broken.events), json.loads(file.read_text())


def test_nothing_is_kept_outside_of_a_record(tmp_path):
    for count, broken, trace in on_ranks(2, without, tmp_path):
        assert count == broken > 0
        assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == count


def test_what_a_watched_message_fails_with_is_raised_where_it_is_waited_for():
    class Lost:
        def wait(self):
            raise RuntimeError("connection closed by peer")

    work = recorder.WatchedWork(Lost(), recorder.HostClock().mark)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            work.wait()
    assert work.end is None

"""The program of a whole call: exchanges of heads around head chunks, one after the other, or behind one another's
work."""

import functools
from collections import Counter

import pytest

from ds_seqpar.cli.show import exchange_bytes_per_token
from ds_seqpar.core.compiler.compile import Compiler, block_mask_of
from ds_seqpar.core.compiler.program import ulysses as exchanging
from ds_seqpar.core.compiler.program.instructions import (
    Enter,
    ExchangeStart,
    Leave,
    PackHeads,
    Product,
    UnpackHeads,
    Wait,
)
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.program.ulysses import SavedForBackward, UlyssesGroup
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.schedules.simulate import Costs, HeadSplit, programs_of, simulate
from tests.unit.plans import DIRECTIONS

SETTINGS = [{"size": 4, "ulysses": 4}, {"size": 8, "ulysses": 2, "schedule": "mesh"}]


def _call(settings, direction, head_chunks, overlap, saved=SavedForBackward.QKV_AND_OUT, lse=False):
    config = SequenceParallelConfig(**settings, overlap=overlap).resolve(settings["size"], (16, 16))
    recipe = config.recipe(config.topology(config.size))
    shards = EvenShards(config.layout, 16 * config.size, recipe.size)
    own = shape_of("fp32", "float32", 1, (16, 16, 8))
    place = UlyssesGroup(config.ulysses, 0), PLAIN_KERNEL
    return Compiler(recipe, 0).bound_call(direction, CAUSAL, shards, own, *place, head_chunks, saved, lse).program


def _where(code, kind, wanted=lambda one: True):
    return [at for at, one in enumerate(code) if isinstance(one, kind) and wanted(one)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("saved", [SavedForBackward.QKV_AND_OUT, SavedForBackward.NOTHING], ids=["saved", "not saved"])
def test_overlap_exchanges_the_same_and_waits_for_each_once(settings, direction, saved):
    found = [_call(settings, direction, 4, overlap, saved).code for overlap in (False, True)]
    for kind in (ExchangeStart, PackHeads, UnpackHeads):
        first, second = (Counter(one.exchange for one in code if isinstance(one, kind)) for code in found)
        assert first == second
        assert max(first.values()) == 1
    for code in found:
        started = [one.ticket for one in code if hasattr(one, "ticket") and not isinstance(one, Wait)]
        assert sorted(started) == sorted(one.ticket for one in code if isinstance(one, Wait))
        for ticket in started:
            at = [where for where, one in enumerate(code) if getattr(one, "ticket", None) == ticket]
            assert not isinstance(code[at[0]], Wait)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lse", [False, True])
def test_while_a_stage_computes_its_neighbors_travel(settings, direction, lse):
    lse = lse and direction == "forward"
    code = _call(settings, direction, 4, True, lse=lse).code
    waits = {one.ticket: at for at, one in enumerate(code) if isinstance(one, Wait)}
    going = [(at, waits[code[at].ticket], code[at].exchange) for at in _where(code, ExchangeStart)]
    for head_chunk in range(4):
        (enter,), (leave,) = (
            _where(code, kind, lambda one, s=head_chunk: one.head_chunk == s) for kind in (Enter, Leave)
        )
        assert _where(code[enter:leave], Product)
        under_way = {(t.head_chunk, t.inward) for start, end, t in going if start < enter and end > leave}
        wanted = {(head_chunk + 1, True)} if head_chunk < 3 else set()
        assert under_way == wanted | ({(head_chunk - 1, False)} if head_chunk else set())


def test_one_stage_has_nothing_to_hide():
    for direction in DIRECTIONS:
        plain, asked = (_call(SETTINGS[0], direction, 1, overlap) for overlap in (False, True))
        assert plain == asked


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("head_chunks", [2, 4, 8])
def test_a_pipeline_takes_the_longer_of_both_and_a_stage_of_the_shorter(direction, head_chunks):
    """Of Ulysses alone, where exchanging takes as long as computing: 1 + 1 / n of either, without overlap 2."""
    config = SequenceParallelConfig(size=4, ulysses=4).resolve(4, (32, 32))
    recipe, shards = config.recipe(config.topology(4)), EvenShards("contiguous", 64, 1)
    shape = shape_of("fp32", "float32", 1, (8 // head_chunks, 8 // head_chunks, 8))
    plan = recipe.plan(direction, block_mask_of(CAUSAL, shards), shape)
    bytes_each = functools.partial(exchange_bytes_per_token, shape, 4)
    all_bytes = sum(map(bytes_each, _trades(plan, direction)))
    costs = Costs(transfer={}, product=1.0, exchange=lambda exchange: bytes_each(exchange) / all_bytes)
    seconds = [
        simulate(programs_of(plan, HeadSplit(4, head_chunks, overlap=overlap)), costs).seconds
        for overlap in (False, True)
    ]
    assert seconds[0] == pytest.approx(2 * head_chunks)
    assert seconds[1] == pytest.approx(head_chunks + 1, abs=0.5)


def _trades(plan, direction):
    (program,) = programs_of(plan, HeadSplit(4))
    return [one.exchange for one in program.code if isinstance(one, ExchangeStart)]


def test_overlap_keeps_what_stages_alone_send_again():
    alone, overlap = (SequenceParallelConfig(size=4, ulysses=4, overlap=on).resolve(4) for on in (False, True))
    assert alone.kept(2, False, False) == SavedForBackward.NOTHING
    assert overlap.kept(2, False, False) == alone.kept(1, False, False) == SavedForBackward.QKV_AND_OUT
    assert overlap.kept(2, True, True) == alone.kept(1, True, True) == SavedForBackward.QKV
    without = SequenceParallelConfig(size=4, ulysses=1, overlap=True).resolve(4)
    assert without.kept(2, False, False) == SavedForBackward.NOTHING


def test_no_exchange_around_one_member():
    program = _call({"size": 2, "ulysses": 1}, "forward", 2, True)
    assert not _where(program.code, ExchangeStart | PackHeads | UnpackHeads)
    assert exchanging.call_program([program], 1, True, overlap=True).direction == "forward"

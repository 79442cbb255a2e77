"""What a call costs on a machine: examples by hand, and a few ranks alone beside all together."""

import dataclasses
import itertools

import pytest

from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.program.instructions import Enter, Leave
from ds_seqpar.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.config.settings import SequenceParallelConfig
from ds_seqpar.planner import price
from ds_seqpar.planner.machine import Machine, Wire
from ds_seqpar.planner.price import AttentionCall, price_of, simulated_ranks, timeline_of

RATE = 1e12  # flops/s of every product, so that seconds can be counted
TABLE = ((1.0, RATE),)
# 1 byte takes 1 ns inside a node and 8 ns between nodes; nothing but products and transfers takes time
PLAIN = dataclasses.replace(
    Machine.load("h100-ib"),
    per_node=2,
    inside=Wire(latency=0.0, rate=1e9),
    between=Wire(latency=0.0, rate=1.25e8),
    attention={"bfloat16": {way: {"full": TABLE, "causal": TABLE} for way in ("forward", "backward")}},
    memory_rate=1e24,
    instruction=0.0,
)
WAYS = ("forward", "backward")


def _call(size, seq=4096, heads=(4, 4, 64), mask=FULL, world=None, **settings):
    config = SequenceParallelConfig(size=size, **settings).resolve(world or size, heads[:2])
    shards = EvenShards(config.layout, seq, size // config.ulysses)
    return AttentionCall(config=config, world=world or size, mask=mask, shards=shards, heads=heads)


def _seconds(machine, call, way="forward"):
    return timeline_of(machine, call, way).seconds


def _product(call, way="forward"):
    """Seconds of the products of all ranks, shared out equally."""
    q_heads, _, dim = call.heads
    pairs = sum(n for n in (call.shards.tokens("q", (i,)) for i in range(call.shards.size))) ** 2
    return {"forward": 4, "backward": 10}[way] * pairs * q_heads * dim / RATE / call.config.size


def test_a_ring_hides_what_its_links_carry_in_time():
    call = _call(4, ulysses=1)
    kv = 1024 * 2 * 4 * 64 * 2  # bytes of a block of k and v
    fast = dataclasses.replace(PLAIN, per_node=4)
    assert _seconds(fast, call) == pytest.approx(max(_product(call), 3 * kv / 1e9 + _product(call) / 4))
    # between nodes of two ranks 8 times as long: three transfers and the last product
    assert _seconds(PLAIN, call) == pytest.approx(3 * kv / 1.25e8 + _product(call) / 4)


def test_latency_is_there_once_a_hop_and_host_time_once_an_instruction():
    call = _call(4, ulysses=1)
    bare = dataclasses.replace(PLAIN, per_node=4, inside=Wire(latency=1.0, rate=1e24))
    assert _seconds(bare, call) == pytest.approx(3 + _product(call) / 4)
    alone = _call(1, ulysses=1)
    slow = dataclasses.replace(PLAIN, instruction=1.0, ahead=False)
    kinds = [one for one in alone.program("forward", 0).code if not isinstance(one, Enter | Leave)]
    assert _seconds(slow, alone) == pytest.approx(len(kinds) + _product(alone))
    ahead = dataclasses.replace(slow, ahead=True)  # the device works meanwhile
    assert _seconds(ahead, alone) == pytest.approx(len(kinds) - 1 + max(1.0, _product(alone)))


@pytest.mark.parametrize(("settings", "bytes_at_a_rank"), [
    ({"ulysses": 1}, 6 * 1024 * 2 * 4 * 64 * 2),  # k and v of a block, sent and received three times
    ({"ulysses": 4}, 2 * 3 * 1024 * 4 * 64 * 2),  # q, k, v and out: three quarters of each, sent and received
])  # fmt: skip
def test_bytes_take_their_rank_from_its_work_where_processors_carry_them(settings, bytes_at_a_rank):
    fast = dataclasses.replace(PLAIN, per_node=4, inside=Wire(latency=0.0, rate=1e24))
    call = _call(4, **settings)
    slow = dataclasses.replace(fast, stolen=1e-6)
    taken = _seconds(slow, call) - _seconds(fast, call)
    assert taken == pytest.approx(bytes_at_a_rank * 1e-6)


def test_a_node_shares_its_uplink():
    """Two rings of two ranks, one of each in both nodes: side by side on ports of their own, behind one another on one
    that they share."""
    call = _call(4, ulysses=2)
    own = _seconds(dataclasses.replace(PLAIN, uplink=1e24), call)
    shared = _seconds(dataclasses.replace(PLAIN, uplink=1.25e8), call)
    kv = 2048 * 2 * 2 * 64 * 2
    assert shared - own == pytest.approx(kv / 1.25e8)


def test_a_link_that_carries_one_way_at_a_time_takes_twice_as_long():
    call = _call(2, ulysses=1)
    kv = 2048 * 2 * 4 * 64 * 2
    both = dataclasses.replace(PLAIN, inside=Wire(latency=0.0, rate=1e8))
    half = dataclasses.replace(both, duplex=False)
    assert _seconds(both, call) == pytest.approx(kv / 1e8 + _product(call) / 2)
    assert _seconds(half, call) == pytest.approx(2 * kv / 1e8 + _product(call) / 2)


def test_ulysses_exchanges_are_part_of_the_call():
    call = _call(2, ulysses=2)
    head = 2048 * 2 * 64 * 2  # bytes of a rank's tokens of the two heads that the other works on
    assert _seconds(PLAIN, call) == pytest.approx(4 * head / 1e9 + _product(call))
    assert _seconds(PLAIN, call, "backward") == pytest.approx(4 * head / 1e9 + _product(call, "backward"))
    found = price_of(PLAIN, call, "forward")
    assert (found.inside, found.between) == (4 * head, 0)


def test_more_sequences_are_followed_where_they_share_a_node():
    shared = dataclasses.replace(PLAIN, per_node=4, uplink=1e9)
    assert simulated_ranks(shared, _call(2, world=8, ulysses=1)) == 2
    assert simulated_ranks(shared, _call(6, seq=48 * 64, heads=(6, 6, 64), world=12, ulysses=1)) == 12
    assert simulated_ranks(PLAIN, _call(6, seq=48 * 64, heads=(6, 6, 64), world=12, ulysses=1)) == 6


def test_what_a_mask_hides_costs_nothing():
    whole, causal = _call(4, ulysses=1), _call(4, ulysses=1, mask=CAUSAL)
    fast = dataclasses.replace(PLAIN, per_node=4, inside=Wire(latency=0.0, rate=1e24))
    ratio = _seconds(fast, causal) / _seconds(fast, whole)
    assert ratio == pytest.approx(0.5, rel=1e-3)
    window = dataclasses.replace(_call(4, ulysses=1, layout="contiguous"), mask=Mask(window=64))
    assert _seconds(fast, window) < 0.1 * _seconds(fast, causal)


CASES = [
    {"ulysses": 8},
    {"ulysses": 4},
    {"ulysses": 1},
    {"ulysses": 1, "rotate_backward": "q"},
    {"ulysses": 1, "layout": "contiguous"},
    {"ulysses": 1, "schedule": "distflash"},
    {"ulysses": 2, "schedule": "double_ring", "ring_size": 2, "rank_order": "ring_intra"},
    {"ulysses": 1, "schedule": "attention2d"},
    {"ulysses": 1, "schedule": "attention2d", "overlap": True},
    {"ulysses": 1, "schedule": "mesh", "mesh": [2, 2, 2], "rank_order": "collectives_intra"},
    {"ulysses": 1, "schedule": "wallfacer", "team": 2, "rotate_forward": "q"},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("name", ["h100-ib", "modest"])
def test_a_few_ranks_alone_take_about_as_long_as_all_together(monkeypatch, name, settings):
    """Where ranks do not all do the same, those alone miss what they wait for."""
    call = _call(8, seq=65536, heads=(32, 8, 128), mask=CAUSAL, **settings)
    same = not any(word in settings.values() for word in ("distflash", "contiguous"))
    for per_node, way in itertools.product((2, 8), WAYS):
        machine = dataclasses.replace(Machine.load(name), per_node=per_node)
        together = price_of(machine, call, way)
        with monkeypatch.context() as context:
            context.setattr(price, "SIMULATED", 0)
            alone = price_of(machine, call, way)
        assert (together.simulated, alone.simulated) == (True, False)
        assert together.seconds == timeline_of(machine, call, way).seconds
        assert dataclasses.replace(alone, seconds=0, simulated=True) == dataclasses.replace(together, seconds=0)
        near = 0.92 if same else 0.74
        assert near * together.seconds < alone.seconds <= together.seconds * (1 + 1e-9), (per_node, way)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_busiest_rank_receives_what_its_plan_says(settings):
    call = _call(8, mask=CAUSAL, heads=(16, 8, 64), **settings)
    shape, ulysses_size = call.largest_shape, call.config.ulysses
    for way in WAYS:
        plan = dataclasses.replace(call.recipe, overlap=False).plan(way, block_mask_of(call.mask, call.shards), shape)
        tokens = call.shards.tokens("q", (0,))
        units = {kind: size * tokens for kind, size in shape.bytes_per_token(way).items()}
        own = call.shards.tokens("q", (0,)) // ulysses_size * shape.head_dim * 2
        exchanged = (ulysses_size - 1) * own * 2 * (shape.q_heads + shape.kv_heads)
        ends = {plan.received(units)[call.coordinates[rank][1]] for rank in (0, 1, 4, 7)}
        assert price_of(PLAIN, call, way).received == pytest.approx(max(ends) + exchanged)


def test_placement_says_which_bytes_leave_the_node():
    call = _call(4, ulysses=2)
    assert price_of(PLAIN, call, "forward").between > 0
    turned = _call(4, ulysses=2, rank_order="ring_intra")
    found = price_of(PLAIN, turned, "forward")
    kv = 2048 * 2 * 2 * 64 * 2
    assert found.inside == kv
    assert found.between == 4 * 1024 * 2 * 64 * 2

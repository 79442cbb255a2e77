"""What a call costs on a machine: examples by hand, and the closed form beside the simulator."""

import dataclasses
import itertools

import pytest

from ds_seqpar.compiler.program.instructions import Enter, Leave
from ds_seqpar.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.config.settings import SequenceParallelConfig
from ds_seqpar.planner.attention_call import AttentionCall, programs, simulated_sequences
from ds_seqpar.planner.call_costs import call_seconds, simulate_call, simulated_ranks, ulysses_ranks_are_alike
from ds_seqpar.planner.lower_bound import lower_bound
from ds_seqpar.planner.machine import Machine, Wire

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
    return simulate_call(machine, call, way).seconds


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
    kinds = [one for one in programs(slow, alone, "forward")[0].code if not isinstance(one, Enter | Leave)]
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
    found = lower_bound(PLAIN, call, "forward")
    assert (found.inside, found.between) == (4 * head, 0)


def test_more_sequences_are_followed_where_they_share_a_node():
    shared = dataclasses.replace(PLAIN, per_node=4, uplink=1e9)
    assert simulated_sequences(shared, _call(2, world=8, ulysses=1)) == 1
    assert simulated_sequences(shared, _call(6, seq=48 * 64, heads=(6, 6, 64), world=12, ulysses=1)) == 2
    assert simulated_sequences(PLAIN, _call(6, seq=48 * 64, heads=(6, 6, 64), world=12, ulysses=1)) == 1


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
def test_the_closed_form_is_a_lower_bound_and_near(settings):
    machines = [
        Machine.load("h100-ib"),
        Machine.load("modest"),
        dataclasses.replace(Machine.load("modest"), duplex=False),
    ]
    for machine, per_node, seq, heads in itertools.product(
        machines, (2, 8), (4096, 65536), ((8, 8, 128), (32, 8, 128))
    ):
        machine = dataclasses.replace(machine, per_node=per_node)
        call = _call(8, seq=seq, heads=heads, mask=CAUSAL, **settings)
        for way in WAYS:
            found = lower_bound(machine, call, way)
            least = found.overlapped if call.config.overlap else found.seconds
            took = _seconds(machine, call, way)
            near = (0.4 if machine.duplex else 0.3) if seq > 4096 else 0.1  # short ones are latency, not added up
            assert near * took < least <= took * (1 + 1e-9), (machine.name, per_node, seq, heads, way)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_busiest_rank_receives_what_its_plan_says(settings):
    call = _call(8, mask=CAUSAL, heads=(16, 8, 64), **settings)
    shape, ulysses_size = call.shapes[call.busiest_ulysses_rank], call.ulysses_size
    for way in WAYS:
        plan = dataclasses.replace(call.recipe, overlap=False).plan(way, call.block_mask, shape)
        tokens = call.shards.tokens("q", (0,))
        units = {kind: size * tokens for kind, size in shape.bytes_per_token(way).items()}
        own = call.shards.tokens("q", (0,)) // ulysses_size * shape.head_dim * 2
        exchanged = (ulysses_size - 1) * own * 2 * (shape.q_heads + shape.kv_heads)
        ends = {plan.received(units)[call.coordinates[rank][1]] for rank in (0, 1, 4, 7)}
        assert lower_bound(PLAIN, call, way).received == pytest.approx(max(ends) + exchanged)


def test_placement_says_which_bytes_leave_the_node():
    call = _call(4, ulysses=2)
    assert lower_bound(PLAIN, call, "forward").between > 0
    turned = _call(4, ulysses=2, rank_order="ring_intra")
    found = lower_bound(PLAIN, turned, "forward")
    kv = 2048 * 2 * 2 * 64 * 2
    assert found.inside == kv
    assert found.between == 4 * 1024 * 2 * 64 * 2


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_one_member_stands_for_all_where_they_do_the_same(settings):
    machine = Machine.load("h100-ib")
    for per_node in (2, 8):
        nodes = dataclasses.replace(machine, per_node=per_node)
        call = _call(8, seq=65536, heads=(16, 8, 128), mask=CAUSAL, **settings)
        assert ulysses_ranks_are_alike(nodes, call)
        assert simulated_ranks(nodes, call) == 8 // call.ulysses_size
        for way in WAYS:
            assert call_seconds(nodes, call, way) == pytest.approx(_seconds(nodes, call, way), rel=1e-9)


def test_members_do_not_do_the_same_with_other_heads_or_on_other_nodes():
    machine = Machine.load("h100-ib")
    assert not ulysses_ranks_are_alike(machine, _call(4, heads=(6, 6, 64), ulysses=4))
    assert not ulysses_ranks_are_alike(Machine.load("modest"), _call(4, ulysses=2))
    three = dataclasses.replace(machine, per_node=3)
    assert not ulysses_ranks_are_alike(three, _call(6, seq=48 * 64, ulysses=2))

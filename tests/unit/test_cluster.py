"""The parts of the benchmarks of a cluster that need none: how contenders are spelled, what plans say of links, the
tables."""

import argparse

import pytest

from benchmarks.cluster import attention, net
from benchmarks.cluster.plan import bytes_between
from benchmarks.contenders import parse

MHA = {"seq": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "dtype": "fp32"}
ROW = 1024 * 64 * 4  # bytes of one head of the sequence


@pytest.mark.parametrize(("text", "settings"), [
    ("ring", {"ulysses": 1, "schedule": "ring"}),
    ("u16", {"ulysses": 16, "schedule": "ring"}),
    ("u8/ring", {"ulysses": 8, "schedule": "ring"}),
    ("mesh=4,1,4", {"ulysses": 1, "schedule": "mesh", "mesh": [4, 1, 4]}),
    ("u4/attention2d=2,2", {"ulysses": 4, "schedule": "attention2d", "rows": 2, "cols": 2}),
    ("attention2d=4+overlap", {"ulysses": 1, "schedule": "attention2d", "rows": 4, "overlap": True}),
    ("ring+layout=contiguous+overlap=false", {"ulysses": 1, "schedule": "ring", "layout": "contiguous",
                                              "overlap": False}),
    (
        "u2/double_ring=4+rotate_backward=q",
        {"ulysses": 2, "schedule": "double_ring", "ring_size": 4, "rotate_backward": "q"},
    ),
    ("auto+machine=small.json", {"memory": "auto", "machine": "small.json"}),
])  # fmt: skip
def test_configurations_of_ours(text, settings):
    spec = parse(text)
    assert (spec.name, spec.peer, spec.section) == (text, None, settings)


def test_configurations_of_peers():
    assert parse("deepspeed+tile_bytes=64").section == {"tile_bytes": 64}
    assert [parse(name).peer for name in ("deepspeed", "plain")] == ["deepspeed", "plain"]


@pytest.mark.parametrize("text", ["", "u", "u4/", "rings", "mesh=4,4", "ring=2", "attention2d=a", "deepspeed=1"])
def test_what_is_not_spelled_so_is_refused(text):
    with pytest.raises(ValueError, match="got"):
        parse(text)


@pytest.mark.parametrize(("link", "rate"), [("50mbit", 6.25e6), ("1gbit", 1.25e8), ("800kbit", 1e5), ("8bit", 1.0)])
def test_rates(link, rate):
    assert net.rate_of(link) == rate


@pytest.mark.parametrize("link", ["50", "50mb", "0mbit", "mbit", "50 mbit"])
def test_rates_that_are_none(link):
    with pytest.raises(ValueError, match="got"):
        net.rate_of(link)


def between(name, nodes, per_node, **options):
    """Bytes out of and into every node."""
    args = argparse.Namespace(nodes=nodes, ranks_per_node=per_node, world=nodes * per_node, causal=True, **MHA)
    return bytes_between(parse(name), args, **options)


def test_bytes_of_a_ring():
    """k and v go round; in backward once more with their gradients, or q, do, lse, delta and dq in their place."""
    for name, blocks in (("ring+rotate_backward=kv", 2 + 4), ("ring", 2 + 3 + 2 / 64)):
        assert between(name, 16, 1)[0] == pytest.approx([15 * blocks * ROW] * 16)


def test_bytes_of_prefill_are_those_of_forward():
    for name, blocks in (("ring", 15 * 2), ("u16", 4 * 15 / 16), ("deepspeed", 4 * 15 / 16)):
        assert between(name, 16, 1, directions=("forward",))[0] == pytest.approx([blocks * ROW] * 16)


def test_bytes_of_ulysses_are_those_of_deepspeed():
    ours, theirs = (between(name, 16, 1) for name in ("u16", "deepspeed"))
    assert ours == theirs == ([8 * 15 * ROW // 16] * 16,) * 2


def test_neighbors_in_a_node_send_nothing_over_links():
    assert between("u4/ring", 1, 4) == ([0], [0])
    inside, across = between("u4/ring", 4, 4)[0], between("ring", 4, 4)[0]
    assert max(inside) < max(across) * 1.01
    # one ring in four, of which one link in and one out of a node: as much as all heads on four ranks
    assert max(across) == pytest.approx(max(between("ring", 16, 1)[0]))


def test_table():
    row = {"name": "ring", "out": [2e6, 2e6], "in": [2e6, 2.1e6], "seconds": [0.5, 0.4, 0.6],
           "plan": ([2e6, 2e6], [2e6, 2e6])}  # fmt: skip
    other = {**row, "name": "peer", "seconds": [0.25]}
    rows = [row, other, {"name": "more", "cannot": "needs a GPU"}]
    _, _, first, second, *rest = attention.table(rows, argparse.Namespace(nodes=2, link="40mbit")).splitlines()
    assert first == "| ring | 0.500 | 0.400-0.600 | 1.00 | 2.00 | 2.10 | 2.00 | 1.025 | 0.84 |"
    assert second.startswith("| peer | 0.250 | 0.250-0.250 | 2.00 |")
    assert rest[-1] == "more: needs a GPU"
    _, _, unplanned = attention.table([{**row, "plan": None}], argparse.Namespace(nodes=2, link="40mbit")).splitlines()
    assert unplanned == "| ring | 0.500 | 0.400-0.600 | 1.00 | 2.00 | 2.10 | - | - | 0.84 |"
    assert first[:35] + " |" in attention.table(rows, argparse.Namespace(nodes=1, link="40mbit"))  # without links

"""The parts of `benchmarks.cluster` that need no cluster: how configurations are spelled, what plans say of links, the
table."""

import pytest

from benchmarks import cluster_net, cluster_table
from benchmarks.cluster_plan import Problem, critical_path, figures, floor
from benchmarks.cluster_spec import parse

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
    ("u2/double_ring=4+backward=q", {"ulysses": 2, "schedule": "double_ring", "window": 4, "backward": "q"}),
])  # fmt: skip
def test_configurations_of_ours(text, settings):
    spec = parse(text)
    assert (spec.name, spec.peer, spec.section) == (text, None, settings)


def test_configurations_of_peers():
    assert parse("ringmaster=usp,4").section == {"words": ("usp", "4")}
    assert parse("deepspeed").peer == "deepspeed"


@pytest.mark.parametrize("text", ["", "u", "u4/", "rings", "mesh=4,4", "ring=2", "attention2d=a", "deepspeed=1",
                                  "ringmaster+overlap"])  # fmt: skip
def test_what_is_not_spelled_so_is_refused(text):
    with pytest.raises(ValueError, match="got"):
        parse(text)


@pytest.mark.parametrize(("link", "rate"), [("50mbit", 6.25e6), ("1gbit", 1.25e8), ("800kbit", 1e5), ("8bit", 1.0)])
def test_rates(link, rate):
    assert cluster_net.rate_of(link) == rate


@pytest.mark.parametrize("link", ["50", "50mb", "0mbit", "mbit", "50 mbit"])
def test_rates_that_are_none(link):
    with pytest.raises(ValueError, match="got"):
        cluster_net.rate_of(link)


def problem(nodes, per_node, causal=True, **other):
    return Problem(nodes=nodes, per_node=per_node, causal=causal, **{**MHA, **other})


def test_bytes_of_a_ring():
    """k and v go round; in backward once more with their gradients, or q, do, lse, delta and dq in their place."""
    for name, blocks in (("ring+backward=kv", 2 + 4), ("ring", 2 + 3 + 2 / 64)):
        assert figures(parse(name), problem(16, 1)).out == pytest.approx([15 * blocks * ROW] * 16)


def test_bytes_of_ulysses_are_those_of_deepspeed():
    ours, theirs = (figures(parse(name), problem(16, 1)) for name in ("u16", "deepspeed"))
    assert ours.out == pytest.approx(theirs.out)
    assert ours.into == pytest.approx([8 * 15 * ROW / 16] * 16)
    # it sends q, k and v one by one, and the gradients too
    assert (theirs.messages, theirs.rounds) == (8 * 15, 8)
    assert (ours.messages, ours.rounds) == (4 * 15 + 6, 4 + 2)  # and agreement


def test_neighbours_in_a_node_send_nothing_over_links():
    assert figures(parse("u4/ring"), problem(1, 4)).out == (0.0,)
    inside, across = figures(parse("u4/ring"), problem(4, 4)), figures(parse("ring"), problem(4, 4))
    assert max(inside.out) < max(across.out) * 1.01
    # one ring in four, of which one link in and one out of a node: as much as all heads on four ranks
    assert max(across.out) == pytest.approx(max(figures(parse("ring"), problem(16, 1)).out))


@pytest.mark.parametrize(("name", "nodes", "per_node"), [
    ("ring", 16, 1), ("mesh=4,1,4", 16, 1), ("mesh=4,1,4+overlap", 4, 4), ("attention2d=4,4", 4, 4), ("u8/ring", 16, 1),
    ("distflash", 4, 1), ("wallfacer=2", 4, 4), ("double_ring=4", 4, 4), ("u16", 16, 1), ("ring+backward=q", 4, 1),
    ("ring+layout=contiguous", 4, 1),
])  # fmt: skip
@pytest.mark.parametrize("heads", [(16, 16), (16, 2)], ids=["16:16", "16:2"])
def test_no_plan_is_below_the_floor(name, nodes, per_node, heads):
    given = problem(nodes, per_node, heads=heads[0], kv_heads=heads[1])
    found = figures(parse(name), given)
    assert sum(found.out) == pytest.approx(sum(found.into))
    assert floor(given) <= max(*found.out, *found.into) * (1 + 1e-9)
    assert 0 < found.rounds <= found.messages + 16


@pytest.mark.parametrize("nodes", [4, 16])
def test_the_floor_of_full_attention_is_that_of_ulysses(nodes):
    assert floor(problem(nodes, 1, causal=False)) == pytest.approx(8 * 16 * ROW / nodes * (1 - 1 / nodes))


def test_rounds_are_a_chain_of_messages():
    """A ring's are one a step: its bytes go on as they arrive."""
    ring, wide = (figures(parse(name), problem(4, 1)) for name in ("ring", "attention2d=2,2"))
    assert ring.rounds == 1 + 3 + 3 + 1  # agreement, forward, backward, the last gradients' way home
    assert wide.rounds < ring.rounds


@pytest.mark.parametrize("name", ["ring", "u2/ring", "u4", "attention2d=2,2"])
def test_the_critical_path_without_links_and_without_products(name):
    """Zigzag shares products about equally; no schedule is faster than its share of them, nor than its bytes."""
    given, spec, rate = problem(4, 1), parse(name), 1e6
    share = 16 * 1024 * 1025 / 2 / 4 * (1 + 2.5)
    assert critical_path(spec, given, float("inf"), 1e-6) == pytest.approx(share * 1e-6, rel=1e-2)
    alone = critical_path(spec, given, rate, 0.0)
    assert alone >= max(figures(spec, given).into) / rate * (1 - 1e-9)
    both = critical_path(spec, given, rate, alone / share)
    assert alone <= both <= 2 * alone * (1 + 1e-9)


def test_table():
    row = {"name": "ring", "out": [2e6, 2e6], "in": [2e6, 2.1e6], "seconds": [0.5, 0.4, 0.6], "worked": [0.6, 0.5, 0.7],
           "plan": {"out": (2e6, 2e6), "into": (2e6, 2e6), "messages": 3, "rounds": 2}}  # fmt: skip
    other = {**row, "name": "peer", "seconds": [0.25], "plan": None}
    text = cluster_table.table([row, other, {"name": "more", "cannot": "needs a GPU"}], problem(2, 1), "40mbit")
    _, _, first, second, *rest = text.splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:8] == ["ring", "0.500", "0.400-0.600", "1.00", "2.00", "2.10", "2.00", "1.025"]
    assert cells[9:] == ["0.84", "1.20", "3", "2"]
    assert [cell.strip() for cell in second.strip("|").split("|")][:4] == ["peer", "0.250", "0.250-0.250", "2.00"]
    assert rest[-1] == "more: needs a GPU"

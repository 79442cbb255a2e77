"""Machines: the presets and their sources, rates between the figures of a table, and wrong files."""

import copy
import json

import pytest

from ds_seqpar.compiler.tiles.tiles import Tile
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.machine import DEFAULT, Machine, Wire, ZeroCosts, interpolated, machine_of, presets
from tests.words import missing

H100 = presets()["h100-ib"]


@pytest.mark.parametrize("name", presets())
def test_every_figure_of_a_preset_has_a_source(name):
    machine = Machine.load(name)
    assert set(machine.sources) == set(presets()[name]) - {"about", "sources"}
    for field, source in machine.sources.items():
        assert len(source) > 10, field
    assert machine.inside.rate >= machine.between.rate
    assert machine.usable < machine.memory


def test_where_nobody_says_which_everything_is_supposed():
    assert all("supposed" in source for source in Machine.load(DEFAULT).sources.values())


def test_rates_lie_between_neighbours_and_fall_in_proportion_below():
    table = ((512.0, 100.0), (2048.0, 200.0))
    found = [interpolated(table, tokens) for tokens in (256, 512, 1024, 2048, 1 << 20)]
    assert found == pytest.approx([50, 100, 150, 200, 200])


def test_a_tile_takes_the_seconds_of_what_is_visible_in_it():
    machine = Machine.load("h100-ib")
    full = machine.tile_seconds("bfloat16", "forward", Tile(0, 1024, 0, 1024, "full"), 32, 128)
    assert full == pytest.approx(4 * 1024**2 * 32 * 128 / 350e12)
    causal = machine.tile_seconds("bfloat16", "forward", Tile(0, 1024, 0, 1024, "causal"), 32, 128)
    assert causal == pytest.approx(4 * (1024 * 1025 // 2) * 32 * 128 / 260e12)
    band = machine.tile_seconds("bfloat16", "backward", Tile(0, 1024, 0, 1151, "band", 128), 32, 128, batch=2)
    assert band > 2 * 10 * 1024 * 128 * 32 * 128 / machine.best_rate("bfloat16", "backward")


def test_a_causal_tile_beyond_its_table_is_two_halves_and_a_square():
    machine = Machine.load("h100-ib")

    def seconds(kind, tokens):
        return machine.tile_seconds("bfloat16", "forward", Tile(0, tokens, 0, tokens, kind), 1, 128)

    for tokens in (32768, 1 << 20):
        parts = 2 * seconds("causal", tokens // 2) + seconds("full", tokens // 2)
        assert seconds("causal", tokens) == pytest.approx(parts, rel=1e-4)  # but for the diagonal


def test_a_file_of_ones_own_has_the_form_of_a_preset(tmp_path):
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(H100), encoding="utf-8")
    machine, preset = Machine.load(str(file)), Machine.load("h100-ib")
    assert machine.name == "ours"
    assert machine.attention == preset.attention
    assert machine.between == preset.between


LINK = {"latency": 0.001, "rate": 1e9}
ZERO = {"ranks": 4, "gather": LINK, "reduce": LINK, "all_reduce": LINK, "forward": 0.001, "backward": 0.002}


def test_what_zero_takes_is_read():
    costs = machine_of("ours", {**H100, "zero": ZERO}).zero
    assert costs == ZeroCosts(ranks=4, forward=0.001, backward=0.002,
                              **dict.fromkeys(("gather", "reduce", "all_reduce"), Wire(**LINK)))  # fmt: skip


WRONG = [
    (("per_node",), 0, ("per_node", "got 0")),
    (("inside", "rate"), 0, ("inside.rate", "got 0")),
    (("between", "latency"), -1, ("between.latency", "got -1")),
    (("between",), 3, ("between", "got 3")),
    (("uplink",), "fast", ("uplink", 'got "fast"')),
    (("duplex",), 1, ("duplex", "got 1")),
    (("reserve_fraction",), 1, ("reserve_fraction", "got 1")),
    (("attention", "bfloat16", "forward", "full"), [], ("bfloat16.forward.full", "got []")),
    (("attention", "bfloat16", "forward", "full"), [[2, 1], [1, 1]], ("bfloat16.forward.full", "[[2, 1], [1, 1]]")),
    (("attention", "bfloat16", "forward"), {"full": [[1, 1]]}, ("bfloat16.forward", "full and causal", "[[1, 1]]")),
    (("gemm", "bfloat16"), None, ("gemm.bfloat16", "got null")),
    (("between",), {"latency": 0, "rate": 1, "rat": 1}, ("between.rat ", '"rat"', "'rate'")),
    (("host",), {"instruction": 0}, ("host.ahead is needed",)),
    (("sources",), {"memory": 3}, ("sources.memory", "got 3")),
    (("memory",), float("nan"), ("memory", "got NaN")),
    (("memory_rate",), 10**400, ("memory_rate", "got 1000")),
    (("uplink",), 5e-324, ("uplink", "got 5e-324")),
    (("per_node",), 2**70, ("per_node", f"got {2**70}")),
    (("zero",), {"ranks": 4}, ("zero.gather is needed",)),
    (("zero",), {**ZERO, "ranks": 1}, ("zero.ranks", "got 1")),
    (("zero",), {**ZERO, "reduce": {"latency": 0, "rate": 0}}, ("zero.reduce.rate", "got 0")),
    (("zero",), {**ZERO, "forward": -1}, ("zero.forward", "got -1")),
    (("kernels",), {"NVIDIA H100": {"bfloat16 128 full": "cuda_flash"}}, ("NVIDIA H100.bfloat16", 'got "cuda_flash"')),
    (("kernels",), {"NVIDIA H100": {"bfloat16 128 full": [3]}}, ("NVIDIA H100.bfloat16 128 full.0", "got 3")),
    (("kernels",), {"NVIDIA H100": 3}, ("kernels.NVIDIA H100", "got 3")),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_file_is_refused_in_one_sentence(path, value, words):
    content = copy.deepcopy(H100)
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        machine_of("ours", content)
    assert missing(str(caught.value), "machine ours", *words) == []
    assert "\n" not in str(caught.value)


def test_what_is_missing_or_no_machine_at_all_is_named(tmp_path):
    with pytest.raises(ConfigError, match="memory is needed"):
        machine_of("ours", {name: value for name, value in H100.items() if name != "memory"})
    with pytest.raises(ConfigError, match="an object; got 3"):
        machine_of("ours", 3)
    with pytest.raises(ConfigError, match=r"got 'h100'.*'h100-ib'"):
        Machine.load("h100")
    with pytest.raises(ConfigError, match=r"none\.json.*No such file"):
        Machine.load(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"h100-ib.*bfloat16.*float64"):
        Machine.load("h100-ib").rated_dtype("float64")


def test_a_name_of_any_length_is_refused_in_a_sentence():
    with pytest.raises(ConfigError) as caught:
        Machine.load("x" * 100_000)
    assert missing(str(caught.value), "h100-ib", "a JSON file", "xxx") == []
    assert len(str(caught.value)) < 500

"""Machines: the presets and their sources, and wrong files."""

import copy
import json
import re
from pathlib import Path

import pytest

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.planner.machine import DEFAULT, Machine, machine_of, presets
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
    assert machine.rates("float16") == machine.rates("bfloat16") >= machine.rates("float32")


def test_where_nobody_says_which_everything_is_supposed():
    assert all("supposed" in source for source in Machine.load(DEFAULT).sources.values())


def test_ranks_are_in_nodes_one_after_another():
    machine = Machine.load("h100-ib")
    assert machine.is_inside(0, 7)
    assert not machine.is_inside(7, 8)


def test_a_file_of_ones_own_has_the_form_of_a_preset(tmp_path):
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({name: value for name, value in H100.items() if name != "sources"}), encoding="utf-8")
    machine, preset = Machine.load(str(file)), Machine.load("h100-ib")
    assert machine.name == "ours"
    assert machine.attention == preset.attention
    assert machine.between == preset.between


def test_the_file_of_the_page_is_one():
    page = (Path(__file__).resolve().parents[2] / "docs" / "choosing_settings.md").read_text(encoding="utf-8")
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    (content,) = (block for block in blocks if "per_node" in block)
    assert machine_of("page", content).between == Machine.load("h100-ib").between


WRONG = [
    (("per_node",), 0, ("per_node", "got 0")),
    (("inside", "rate"), 0, ("inside.rate", "got 0")),
    (("between", "latency"), -1, ("between.latency", "got -1")),
    (("between",), 3, ("between", "got 3")),
    (("gpus",), 1, ("gpus", "got 1")),
    (("reserve_fraction",), 1, ("reserve_fraction", "got 1")),
    (("attention", "bfloat16"), [], ("attention.bfloat16", "got []")),
    (("matrices", "bfloat16"), None, ("matrices.bfloat16", "got null")),
    (("between",), {"latency": 0, "rate": 1, "rat": 1}, ("between.rat ", '"rat"', "'rate'")),
    (("between",), {"latency": 0}, ("between.rate is needed",)),
    (("sources",), {"memory": 3}, ("sources.memory", "got 3")),
    (("memory",), float("nan"), ("memory", "got NaN")),
    (("host_memory",), 10**400, ("host_memory", "got 1000")),
    (("memory",), 5e-324, ("memory", "got 5e-324")),
    (("per_node",), 2**70, ("per_node", f"got {2**70}")),
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
        Machine.load("h100-ib").rates("float64")


def test_a_name_of_any_length_is_refused_in_a_sentence():
    with pytest.raises(ConfigError) as caught:
        Machine.load("x" * 100_000)
    assert missing(str(caught.value), "h100-ib", "a JSON file", "xxx") == []
    assert len(str(caught.value)) < 500

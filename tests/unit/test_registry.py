"""What every schedule says of itself is true, a user's own too; and nobody else knows a schedule's name."""

import argparse
import ast
import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

import ds_seqpar
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler import schedules
from ds_seqpar.core.compiler.schedules import SCHEDULES, ring
from ds_seqpar.core.compiler.schedules.actions import Collective
from ds_seqpar.core.compiler.schedules.base import MOVING_SIDES, RANK_ORDERS, count
from ds_seqpar.core.compiler.schedules.plan import Plan
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.schedules.validate import validate
from tests.grids import few_then_rest
from tests.unit import toy_schedule
from tests.unit.plans import DIRECTIONS, block_mask, everything, joint, topology
from tests.unit.test_schedule_bytes import UNITS
from tests.words import missing

RANKS = range(1, 17)
ALL = pytest.mark.parametrize("schedule", [*SCHEDULES.values(), toy_schedule.SCHEDULE], ids=lambda its: its.name)


NUMBERS = pytest.mark.parametrize("numbers", few_then_rest((2, 3, 4, 8, 12), RANKS))


def _forms(schedule, numbers):
    """(the schedule as it is with it, topology, direction, what travels) of every shape of these numbers of ranks."""
    shapes = [
        (schedule.at(ranks, own), topology(*schedule.axes(ranks, own)))
        for ranks in numbers
        for own in schedule.shapes(ranks)
    ]
    return [
        (*shape, *way) for shape, way in itertools.product(shapes, itertools.product(DIRECTIONS, schedule.moving_sides))
    ]


def _taken(schedule, ranks):
    """All products that it can compute."""
    return {pair for pair in everything(ranks * schedule.blocks_per_rank) if schedule.can_compute(*pair)}


def _plan(schedule, shape, direction, travels):
    ranks = shape.size(*shape.cp_axes)
    steps = schedule.build(
        shape, block_mask(ranks * schedule.blocks_per_rank, _taken(schedule, ranks)), direction, travels
    )
    return Plan.of(schedule.name, direction, ranks, steps, schedule.blocks_per_rank)


@ALL
def test_help_is_a_line_and_what_is_legal_exists(schedule):
    layouts = {*LAYOUTS, *(layout.name for layout in schedule.extra_layouts)}
    for its in (schedule.at(ranks, own) for ranks in RANKS for own in schedule.shapes(ranks)):
        assert its.default_layout in its.layouts
        assert set(its.layouts) <= layouts
        assert its.blocks_per_rank == schedule.blocks_per_rank
    for line in (schedule.summary, *(setting.help for setting in schedule.settings)):
        assert line
        assert "\n" not in line
    assert schedule.default_layout in schedule.layouts
    assert set(schedule.layouts) <= layouts
    assert set(schedule.moving_sides) <= set(MOVING_SIDES)
    assert set(schedule.rank_orders) <= set(RANK_ORDERS)
    parser = argparse.ArgumentParser(prefix_chars="-")
    for setting in schedule.settings:
        parser.add_argument(f"--{setting.name}", **setting.option)


@ALL
def test_shapes_are_those_that_resolve_to_themselves_and_hold_all_ranks(schedule):
    for ranks in RANKS:
        shapes = list(schedule.shapes(ranks))
        assert len({str(own) for own in shapes}) == len(shapes)
        for own in shapes:
            assert set(own) == {setting.name for setting in schedule.settings}
            assert all(setting.checked(own[setting.name]) == own[setting.name] for setting in schedule.settings)
            assert schedule.resolve(ranks, own, None) == own
            assert math.prod(size for _, size in schedule.axes(ranks, own)) == ranks
        for heads in (None, (8, 8), (8, 1)):
            if shapes:
                assert schedule.resolve(ranks, {}, heads) in shapes
            else:
                with pytest.raises(ConfigError, match=f"CP ranks.*got {ranks}, use"):
                    schedule.resolve(ranks, {}, heads)


@ALL
@NUMBERS
def test_the_closed_form_is_what_a_plan_receives(schedule, numbers):
    for its, shape, direction, travels in _forms(schedule, numbers):
        axes = tuple((name, shape.size(name)) for name in shape.cp_axes)
        plan = _plan(its, shape, direction, travels)
        units = UNITS[direction]
        assert its.received(axes, direction, travels, units) == plan.received(units), (axes, direction, travels)


@ALL
@NUMBERS
def test_its_plans_are_right_and_have_collectives_along_the_axes_it_says(schedule, numbers):
    met = set()
    for its, shape, direction, travels in _forms(schedule, numbers):
        ranks = shape.size(*shape.cp_axes)
        plan = _plan(its, shape, direction, travels)
        validate(plan, _taken(its, ranks))
        groups = {ranks: axis for axis in schedule.collective_axes for ranks in shape.groups(axis) if len(ranks) > 1}
        for action in (action for step in joint(plan) for action in step.actions if isinstance(action, Collective)):
            met.add(groups[action.ranks])
    assert met == set(schedule.collective_axes)


@ALL
@NUMBERS
def test_what_it_cannot_compute_is_refused(schedule, numbers):
    for its, shape, direction, travels in _forms(schedule, numbers):
        ranks = shape.size(*shape.cp_axes)
        every = everything(ranks * its.blocks_per_rank)
        if not all(itertools.starmap(its.can_compute, every)):
            with pytest.raises(ConfigError, match=schedule.name):
                its.build(shape, block_mask(ranks * its.blocks_per_rank, every), direction, travels)


def test_schedules_are_found_by_themselves():
    files = {path.stem for path in Path(schedules.__file__).parent.iterdir()}  # of one or a family, or folders
    homes = {its.build.__module__.rpartition("core.compiler.schedules.")[2] for its in SCHEDULES.values()}
    others = {"ds_seqpar.schedules.distflash", "ds_seqpar.schedules.triangle"}  # which register themselves
    assert homes == (files - {"__init__", "__pycache__", "actions", "base", "plan"}) | others
    assert len(SCHEDULES) == 7
    assert all(schedules.schedule(name) is its and its.name == name for name, its in SCHEDULES.items())
    assert schedules.schedule("auto") is SCHEDULES[schedules.DEFAULT]


def test_a_file_may_import_the_schedule_of_another():
    module = ModuleType("importing")
    module.RING = SCHEDULES["ring"]
    assert schedules.schedules_in([ring, module]) == [SCHEDULES["double_ring"], SCHEDULES["ring"]]


# ---- what cannot be registered


def _changed(**facts):
    return dataclasses.replace(toy_schedule.SCHEDULE, **facts)


REFUSED = {
    "a name that is taken": (_changed(name="ring"), ("names", "got ring")),
    "the name of the default": (_changed(name="auto"), ("names", "got auto")),
    "a setting that is taken": (_changed(settings=(count("team", "a team"),)), ("names", "got team")),
    "an axis that every topology has": (_changed(axes=lambda ranks, own: (("data", ranks),)), ("axes", "got data")),
    "an axis that it has not": (_changed(collective_axes=("row",)), ("axes", "got car, seat", "car, row")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_mistaken_for_something_else_is_not_registered(name):
    before = dict(SCHEDULES)
    schedule, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        schedules.register(schedule)
    assert missing(str(caught.value), *words) == []
    assert before == SCHEDULES


def test_a_setting_that_every_schedule_has_is_refused_with_the_first_configuration():
    schedules.register(_changed(settings=(count("size", "of what?"),)))
    try:
        with pytest.raises(ConfigError, match=r"names.*got size"):
            SequenceParallelConfig()
    finally:
        schedules.remove("carousel")
    assert SequenceParallelConfig().size == "auto"


def test_what_was_not_registered_cannot_be_removed():
    with pytest.raises(ConfigError, match=r"got 'rings'.*'ring'"):
        schedules.remove("rings")


# ---- nobody else knows a schedule's name

# English too: allowed in what is prose
PROSE = {"ring", "mesh"}


def _spelled(path, names):
    """(line, name) wherever a file's code, or what it prints, spells one of the names; docstrings may say `PROSE`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # of fields too
    for node in ast.walk(tree):
        words = {value for value in vars(node).values() if isinstance(value, str)}
        for name in names - (PROSE if id(node) in docstrings else set()):
            if any(re.search(rf"\b{name}\b", word) for word in words):
                yield getattr(node, "lineno", 0), name


def test_no_file_but_its_own_spells_a_schedules_name():
    root = Path(ds_seqpar.__file__).parent
    own = {root / "core" / "compiler" / "schedules", root / "schedules"}
    names = set(SCHEDULES)
    found = {
        path.relative_to(root): set(_spelled(path, names)) for path in root.rglob("*.py") if not own & {*path.parents}
    }
    assert len(found) > 20
    assert {path: spelled for path, spelled in found.items() if spelled} == {}


def test_a_name_that_is_spelled_would_be_found(tmp_path):
    file = tmp_path / "code.py"
    lines = {
        'kind = "ring"': "ring",
        "x = a.mesh": "mesh",
        "from schedules import wallfacer": "wallfacer",
        "def distflash(): return 0": "distflash",
        'raise ValueError(f"use ring or {x}")': "ring",
        "f(mesh=3)": "mesh",
        '"""A double_ring."""': "double_ring",
    }
    for line, name in lines.items():
        file.write_text(line, encoding="utf-8")
        assert {name} == {its for _, its in _spelled(file, set(SCHEDULES))}, line
    file.write_text('"""In a ring."""\nring_intra = "mesh_param"', encoding="utf-8")
    assert not set(_spelled(file, set(SCHEDULES)))

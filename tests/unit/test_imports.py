"""Imports run one way and in no circle, and communication has one door. What they load: `test_installed.py`."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ds_seqpar", "hf_integration")
# A room is a folder; the files at the top of ds_seqpar are the room "top", but for these. A room imports those that
# stand above it in ORDER. The engine is what stands above the line: it runs without what is below.
OWN_ROOM = {
    "ds_seqpar.testing": "analysis",
    "ds_seqpar.__main__": "cli",
    "hf_integration": "hf.names",
}
ENGINE = (
    "base",
    "core.compiler.sharding",
    "core.compiler.schedules",
    "core.compiler.program",
    "core.compiler.tiles",
    "core.compiler",
    "core",
    "core.runtime.kernels",
    "core.runtime",
    "schedules.triangle",
    "schedules",
    "kernels",
    "guards",
    "memory",
    "operators",
    "compiled",
    "data",
    "deepspeed",
    "deepspeed.saving",
    "whole",
    "deepspeed.cpu_launch",
    "top",
)
BELOW = ("analysis", "planner", "doctor", "cli")
HUGGING_FACE = (
    "hf", "hf.look", "hf.media", "hf.memory", "hf.generation", "hf.model", "hf.trainer", "hf.doctor", "hf.names",
)  # fmt: skip
ORDER = (*ENGINE, *BELOW, *HUGGING_FACE)
# the modules of the engine that ask, in functions, what is below the line: for "auto" settings and machines' files, and
# before the first step
DOORS = {"ds_seqpar.planning": "planner", "ds_seqpar.engine": "doctor"}
# what attention does without, imported in functions by whoever needs it. So do commands, torch above all
LATER = {
    "base.compat": "what of it runs before torch is imported, in commands",
    "planning": "types alone, in models",
    "data.batches": "shard_batches, with documents, labels and token ids",
    "data.loader": "sp.loader and sp.sampler",
    "deepspeed.config": "the JSON of a job, of which auto settings are chosen",
    "lengths": "packs of samples of many lengths",
    "data.balance": "lengths that ranks cannot share equally",
    "schedules.overlap": "overlap true, with the simulator",
    "base.hosts": "the command that compiles DeepSpeed's op, which loads no torch of its own",
    "guards.out_of_memory": "a rank out of memory, and what is said of it then",
    "memory.offload": "offload_checkpoints true",
    "kernels.triton_ops": "calls on GPUs, where there is Triton",
}
# what knows nothing of schedules
TRANSPORT = {
    *(f"core.runtime.{name}" for name in ("transport", "groups", "devices", "kernels")),
    *(f"guards.{name}" for name in ("agreement", "consistency", "one_thread", "process_exit", "waits")),
}


def modules():
    """Dotted name -> path of every module; a package goes by its own name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room_of(name):
    if name in OWN_ROOM:
        return OWN_ROOM[name]
    package, *folders = MODULES[name].relative_to(ROOT).parts[:-1]
    if package == "hf_integration":
        return ".".join(["hf", *folders])
    return ".".join(folders) or "top"


def targets(node, name, is_package):
    """Dotted names that an import statement of a module reaches: those of modules where they are, else as written."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
    base = ".".join([*base, *([node.module] if node.module else [])])
    return [inner if (inner := f"{base}.{alias.name}") in MODULES else base for alias in node.names]


def nodes_of(tree, anywhere):
    """Of a module's text; not anywhere: but for those in functions and for type checkers."""
    for node in ast.iter_child_nodes(tree):
        later = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        )
        if anywhere or not later:
            yield node
            yield from nodes_of(node, anywhere)


def imported(name, anywhere=True):
    """What a module imports in its text; not anywhere: what it loads when it is imported itself."""
    is_package = MODULES[name].name == "__init__.py"
    return {x for node in nodes_of(tree_of(name), anywhere) for x in targets(node, name, is_package)} - {name}


@functools.cache
def tree_of(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@functools.cache  # by the first test, and not by every worker that makes a list of tests
def graph():
    return {name: imported(name) for name in MODULES}


@functools.cache
def loaded():
    return {name: imported(name, anywhere=False) for name in MODULES}


def test_the_reading_of_imports_finds_some():
    assert "ds_seqpar.core.runtime.groups" in graph()["ds_seqpar.core.runtime.transport"]  # from .groups import Groups
    assert "ds_seqpar.base.errors" in graph()["ds_seqpar.core.runtime.transport"]  # from ..errors import
    assert "ds_seqpar.core.runtime.groups" in graph()["ds_seqpar.parallel"]  # from .runtime import groups
    assert "ds_seqpar.engine" in graph()["ds_seqpar"]  # in __init__, for type checkers
    assert "ds_seqpar" in graph()["hf_integration.model.patch"]
    assert "deepspeed" in graph()["ds_seqpar.engine"]  # in a function
    assert "argparse" in graph()["ds_seqpar.engine"]  # for type checkers
    assert "deepspeed" not in loaded()["ds_seqpar.engine"]
    assert "argparse" not in loaded()["ds_seqpar.engine"]
    assert "torch" in loaded()["ds_seqpar.engine"]
    assert {room_of(name) for name in MODULES} == set(ORDER)


def ours(names):
    return sorted(name for name in names if name in MODULES)


def test_a_module_imports_rooms_above_its_own():
    for name in MODULES:
        room = room_of(name)
        above = {*ORDER[: ORDER.index(room) + 1]} - ({"analysis", "cli"} if room in HUGGING_FACE else set())
        lazy = {DOORS[name]} if name in DOORS else set()
        assert [x for x in ours(loaded()[name]) if room_of(x) not in above] == [], name
        assert [x for x in ours(graph()[name]) if room_of(x) not in {*above, *lazy}] == [], name


def test_the_engine_imports_nothing_below_the_line_but_by_two_doors():
    crossing = {
        name: found
        for name in MODULES
        if room_of(name) in ENGINE and (found := [x for x in ours(graph()[name]) if room_of(x) in BELOW])
    }
    assert {name: {*map(room_of, found)} for name, found in crossing.items()} == {x: {y} for x, y in DOORS.items()}


def test_the_core_imports_itself_and_the_base():
    """It computes attention of each schedule that follows from a ring or a mesh."""
    core = [name for name in MODULES if short(name).startswith("core.")]
    beside = {x for name in core for x in ours(graph()[name]) if not short(x).startswith(("core", "base"))}
    assert beside == set()
    assert "ds_seqpar.core.runtime.walk" in core


def short(name):
    return name.removeprefix("ds_seqpar.")


def test_an_import_in_a_function_has_its_reason():
    for name in MODULES:
        later = [x for x in ours(graph()[name] - loaded()[name]) if room_of(x) not in BELOW]
        if name != "ds_seqpar" and room_of(name) in ENGINE:  # which imports what it exports once somebody asks for it
            assert {x.removeprefix("ds_seqpar.") for x in later} <= LATER.keys(), name


def test_who_does_not_plan_loads_no_planner():
    for name in MODULES:
        eager = [x for x in ours(loaded()[name]) if room_of(x) == "planner"]
        assert room_of(name) in ("planner", "cli") or {*eager} <= {"ds_seqpar.planner.limits"}, name


def test_no_imports_go_round_in_a_circle():
    """Functions and type checkers included. A package's own __init__, which gathers its modules, is not what they are
    imported for: `from ds_seqpar import X` counts, `import ds_seqpar.x` does not reach it."""
    inside = {name: {target for target in found if target in MODULES} for name, found in graph().items()}
    graphlib.TopologicalSorter(inside).prepare()  # raises CycleError, which names them


def test_plans_are_made_without_a_tensor_a_group_or_the_environment():
    rooms = ("core", "planner", "analysis", *(room for room in ORDER if room.startswith("core.compiler")))
    torchless = [name for name in MODULES if room_of(name) in rooms]
    torchless.remove("ds_seqpar.testing")  # which runs programs
    assert "ds_seqpar.core.compiler.schedules.ring" in torchless
    for name in torchless:
        heads = {target.split(".")[0] for target in graph()[name]}
        assert not heads & {"torch", "numpy", "deepspeed", "transformers", "accelerate", "os"}, name


def test_transport_and_kernels_know_nothing_of_schedules():
    values = {"sharding", "tiles"}
    for name, found in graph().items():
        if short(name) in TRANSPORT or short(name).startswith("core.runtime.kernels."):
            compiled = {target.split(".")[3] for target in found if target.startswith("ds_seqpar.core.compiler.")}
            assert compiled <= values, name


def test_who_asks_for_the_size_of_the_world_asks_a_group():
    """`dist.get_world_size()` without a group; `groups.all_ranks()` and a SequenceParallel's topology have it."""
    for name in MODULES:
        calls = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call) and not node.args]
        assert not [call for call in calls if getattr(call.func, "attr", "") == "get_world_size"], name


def test_ds_seqpar_names_hf_integration_in_one_place():
    said = [name for name, path in MODULES.items() if '"hf_integration' in path.read_text(encoding="utf-8")]
    assert [name for name in said if name.startswith("ds_seqpar")] == ["ds_seqpar.models"]


@pytest.mark.parametrize(
    ("words", "home"),
    [
        ({"new_group", "split_group", "_new_process_group_helper"}, "ds_seqpar.core.runtime.groups"),
        ({"isend", "irecv", "batch_isend_irecv", "P2POp"}, "ds_seqpar.core.runtime.transport"),
    ],
)
def test_communication_has_one_door(words, home):
    callers = set()
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            if names & words:
                callers.add(name)
    assert callers == {home}

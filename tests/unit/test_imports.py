"""Imports run one way and in no circle, communication has one door, and importing the library does nothing."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ds_seqpar", "hf_integration")
# rooms from the inside out; a module imports its own room and those before it
ROOMS = ("errors", "planning", "running", "top", "hf_integration")
# at the top of ds_seqpar, and no more than integers and strings: the rooms inside may import these
PLAIN = {
    "ds_seqpar.errors": "errors",
    "ds_seqpar.handles": "errors",
    "ds_seqpar.limits": "errors",
    "ds_seqpar.config": "planning",
    "ds_seqpar.deepspeed_json": "planning",
}
# what knows nothing of schedules
TRANSPORT = {"comm", "groups", "devices", "agreement", "telling", "leaving", "trusted", "kernels", "merge"}


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
    if name in PLAIN:
        return PLAIN[name]
    parts = name.split(".")
    if parts[0] == "hf_integration":
        return "hf_integration"
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "top"


def targets(node, name, is_package):
    """Dotted names that an import statement of a module reaches: those of modules where they are, else as written."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
    base = ".".join([*base, *([node.module] if node.module else [])])
    return [inner if (inner := f"{base}.{alias.name}") in MODULES else base for alias in node.names]


def imported(name):
    """What a module imports anywhere in its text: in functions and for type checkers too."""
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {target for node in ast.walk(tree) for target in targets(node, name, path.name == "__init__.py")} - {name}


GRAPH = {name: imported(name) for name in MODULES}


def test_the_reading_of_imports_finds_some():
    assert "ds_seqpar.running.groups" in GRAPH["ds_seqpar.running.comm"]  # from .groups import Groups
    assert "ds_seqpar.errors" in GRAPH["ds_seqpar.running.comm"]  # from ..errors import
    assert "ds_seqpar.running.groups" in GRAPH["ds_seqpar.parallel"]  # from .running import groups
    assert "ds_seqpar.engine" in GRAPH["ds_seqpar"]  # in __init__
    assert "ds_seqpar" in GRAPH["hf_integration.patch"]
    assert "deepspeed" in GRAPH["ds_seqpar.engine"]  # in a function
    assert "argparse" in GRAPH["ds_seqpar.engine"]  # for type checkers
    assert {room_of(name) for name in MODULES} == set(ROOMS)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_from_its_own_room_and_those_inside_it(name):
    outside = ROOMS[ROOMS.index(room_of(name)) + 1 :]
    assert [target for target in GRAPH[name] if target in MODULES and room_of(target) in outside] == []


def test_no_imports_go_round_in_a_circle():
    """Functions and type checkers included. A package's own __init__, which gathers its modules, is not what they are
    imported for: `from ds_seqpar import X` counts, `import ds_seqpar.x` does not reach it."""
    inside = {name: {target for target in found if target in MODULES} for name, found in GRAPH.items()}
    graphlib.TopologicalSorter(inside).prepare()  # raises CycleError, which names them


def test_planning_sees_no_tensor_no_group_and_no_environment():
    planning = [name for name in MODULES if room_of(name) == "planning"]
    assert "ds_seqpar.planning.schedules.ring" in planning
    for name in planning:
        heads = {target.split(".")[0] for target in GRAPH[name]}
        assert not heads & {"torch", "numpy", "deepspeed", "transformers", "accelerate", "os"}, name


def test_transport_and_kernels_know_nothing_of_schedules():
    values = {"topology", "layout", "masks", "shards", "tiles"}
    for name, found in GRAPH.items():
        if name.startswith("ds_seqpar.running.") and name.split(".")[2] in TRANSPORT:
            planning = {target.split(".")[2] for target in found if target.startswith("ds_seqpar.planning.")}
            assert planning <= values, name


def test_ds_seqpar_names_hf_integration_in_one_place():
    said = [name for name, path in MODULES.items() if '"hf_integration' in path.read_text(encoding="utf-8")]
    assert [name for name in said if name.startswith("ds_seqpar")] == ["ds_seqpar.models"]


@pytest.mark.parametrize(
    ("words", "home"),
    [
        ({"new_group", "split_group", "_new_process_group_helper"}, "ds_seqpar.running.groups"),
        ({"isend", "irecv", "batch_isend_irecv", "P2POp"}, "ds_seqpar.running.comm"),
    ],
)
def test_communication_has_one_door(words, home):
    callers = set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            if names & words:
                callers.add(name)
    assert callers == {home}


def test_importing_starts_nothing():
    script = (
        "import sys\n"
        "started = []\n"
        "kinds = ('subprocess.Popen', 'os.fork', 'os.forkpty', 'os.posix_spawn', 'os.spawn', 'os.system', 'os.exec')\n"
        "sys.addaudithook(lambda kind, arguments: started.append((kind, arguments)) if kind in kinds else None)\n"
        "import torch\n"
        "import ds_seqpar\n"
        "assert 'torch._dynamo' not in sys.modules, 'the compiler, which takes seconds'\n"
        "assert 'transformers' not in sys.modules, 'a library that only some use'\n"
        "import transformers\n"
        "started.clear()\n"
        "import hf_integration\n"
        "assert not torch.distributed.is_initialized(), 'a process group'\n"
        "assert not torch.cuda.is_initialized(), 'a CUDA context'\n"
        "assert not started, started\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

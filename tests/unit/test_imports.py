"""Imports run one way, communication has one door, and importing the library does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ds_seqpar", "hf_integration")
# each may import those before it
PLANNING = (
    "errors",
    "shapes",
    "deepspeed_json",
    "config",
    "topology",
    "layout",
    "plan",
    "simulate",
    "overlap",
    "schedules",
)
# what plans are looked at with; may import all of planning and one another
READERS = {"cost", "draw", "planner"}
LOW = {"groups", "leaving", "comm", "kernels", "merge"}
OUTER = {"parallel", "batches", "engine", "virtual", "__main__", "__init__", "hf_integration"}


def _files():
    """(room, dotted name, path) of every module. A room is a file or folder of ds_seqpar, or hf_integration."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield package if package == "hf_integration" else parts[1], ".".join(parts), path


def _nodes(node, inside=False):
    """(node, whether inside a function) for all that runs: not what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child, inside
        yield from _nodes(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _targets(node, name):
    """Dotted names that an import statement of module `name` reaches."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    # of a module a.b.c, and of a.b's __init__ which stands here as a.b.__init__, one dot is a.b
    base = name.split(".")[: -node.level] if node.level else []
    base += node.module.split(".") if node.module else []
    return [".".join([*base, alias.name]) for alias in node.names]


def _rooms(include_functions=True):
    """room -> the rooms it imports."""
    found = {}
    names = {room for room, _, _ in _files()}
    for room, name, path in _files():
        mine = found.setdefault(room, set())
        for node, inside in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
            if inside and not include_functions:
                continue
            for target in _targets(node, name):
                parts = target.split(".")
                if parts[0] == "hf_integration":
                    mine.add("hf_integration")
                elif parts[0] == "ds_seqpar":
                    mine.add(parts[1] if len(parts) > 1 and parts[1] in names else "__init__")
        mine.discard(room)
    return found


def test_the_reading_of_imports_finds_some():
    rooms = _rooms()
    assert {"errors", "layout", "plan", "topology"} <= rooms["schedules"]
    assert {"kernels", "plan", "schedules", "comm", "walk"} <= rooms["runtime"]
    assert {"ulysses", "inputs", "runtime"} <= rooms["ops"]
    assert {"__init__", "errors"} <= rooms["hf_integration"]
    assert "hf_integration" in rooms["engine"]


def test_planning_imports_run_one_way():
    rooms = _rooms()
    for index, room in enumerate(PLANNING):
        assert rooms[room] <= set(PLANNING[:index]), room
    for room in READERS & rooms.keys():
        assert rooms[room] <= set(PLANNING) | READERS, room


def test_transport_and_kernels_know_nothing_of_schedules():
    rooms = _rooms()
    for room in LOW:
        assert rooms[room] <= {"errors", "shapes", "config", "topology"} | LOW, room


def test_the_outer_rooms_are_not_imported_from_within():
    rooms = _rooms()
    for room in {"ops", "inputs", "runtime", "walk", "work", "ulysses", "agreement"} | LOW:
        assert not rooms[room] & OUTER, room
    for room, imported in rooms.items():
        if room not in ("__init__", "__main__", "hf_integration"):
            assert "engine" not in imported, room
            assert "__init__" not in imported, room
    # `initialize` patches transformers models by itself, inside a function
    assert not any("hf_integration" in imported for imported in _rooms(include_functions=False).values())


def test_imports_go_round_in_no_circle():
    rooms = _rooms(include_functions=False)
    while rooms:
        free = [room for room, imported in rooms.items() if not imported & rooms.keys()]
        assert free, f"these import each other: {rooms}"
        rooms = {room: imported for room, imported in rooms.items() if room not in free}


def test_planning_sees_no_tensor_no_group_and_no_environment():
    for room, name, path in _files():
        if room in {*PLANNING, *READERS}:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            imported = {target.split(".")[0] for node, _ in _nodes(tree) for target in _targets(node, name)}
            assert not imported & {"torch", "deepspeed", "transformers", "accelerate", "os"}, name


@pytest.mark.parametrize(
    ("words", "home"),
    [({"new_group"}, "groups"), ({"isend", "irecv", "batch_isend_irecv", "P2POp"}, "comm")],
)
def test_communication_has_one_door(words, home):
    callers = set()
    for room, _, path in _files():
        for node, _ in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            if names & words:
                callers.add(room)
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
        "import transformers\n"
        "started.clear()\n"
        "import hf_integration\n"
        "assert not torch.distributed.is_initialized(), 'a process group'\n"
        "assert not torch.cuda.is_initialized(), 'a CUDA context'\n"
        "assert not started, started\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

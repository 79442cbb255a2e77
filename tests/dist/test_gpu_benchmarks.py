"""The benchmarks of GPUs, to their end on stand-ins: what they write, the tables of it, and what they refuse."""

import itertools
import json
import shlex
import sysconfig
from pathlib import Path

import pytest
import torch

from benchmarks.contenders import parse
from benchmarks.gpu import first_hour, node, tables
from benchmarks.gpu.__main__ import SECTIONS, arguments, measure
from benchmarks.gpu.bench import STAND_IN, about
from benchmarks.gpu.layers import features
from benchmarks.memory.peers import unlike
from benchmarks.tables import below
from ds_seqpar.core.runtime.kernels import KERNELS, BlockSpec
from tests.launch import on_engine_ranks

pytestmark = pytest.mark.usefixtures("compiled")


def one_gpu(folder):
    return str(measure(arguments(["--stand-in", "--seconds", "5", "--out", folder])))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """What the command for one GPU writes with little time."""
    return on_engine_ranks(1, one_gpu, str(tmp_path_factory.mktemp("figures")))[0]


def test_one_gpu(file):
    found = tables.load(file)
    assert found["about"]["stand_in"] is True
    said = {sentence.split(",")[0] for sentence in found["left_out"]}
    assert {one["section"] for one in found["records"]} | said == set(SECTIONS)
    assert all("no time" in sentence for sentence in found["left_out"])  # nothing failed
    first = {one["contender"] for one in found["records"] if one["section"] == "kernels" and one["mask"] == "window"}
    spec = BlockSpec("cpu", STAND_IN.dtype, *STAND_IN.heads, STAND_IN.head_dim)
    assert first == {"torch flash", *(name for name, kernel in KERNELS.items() if not kernel.reasons(spec))}
    longest = [one["feature"] for one in found["records"] if one["section"] == "longest"]
    assert longest == [*features(2)][: len(longest)]


def test_page(file):
    folder, found = tables.Path(file), tables.load(file)
    assert folder.with_suffix(".png").stat().st_size > 10_000
    page = folder.with_suffix(".md").read_text()
    assert page.startswith(tables.page(found))
    assert "no figure is a GPU's" in page


def test_docs_are_made_of_files_of_gpus(file, tmp_path):
    with pytest.raises(ValueError, match=r"got .* of a stand-in"):
        tables.docs([file])
    found = json.loads(tables.Path(file).read_text())
    found["about"] |= {"stand_in": False, "device": "a GPU"}
    other = tmp_path / "gpu.json"
    other.write_text(json.dumps(found))
    page = tables.docs([other])
    assert page.startswith("### a GPU, ")
    assert "| window | 128 | torch flash |" in page
    assert "stand-in" not in page
    assert tables.docs([]) == "Not yet measured: nobody has sent in a file.\n"


def test_the_page_of_the_docs_is_up_to_date():
    assert below(tables.PAGE, tables.MARK) == tables.docs(tables.FIGURES.glob("*.json"))


@pytest.mark.parametrize("change", [
    lambda found: found.pop("about"), lambda found: found["about"].pop("device"),
    lambda found: found.update(records=None), lambda found: found["records"][0].pop("seconds"),
])  # fmt: skip
def test_files_that_lack_something(file, tmp_path, change, capsys):
    found = json.loads(tables.Path(file).read_text())
    change(found)
    other = tmp_path / "bad.json"
    other.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="2"):
        tables.main([str(other)])
    assert f"got {other}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", "no JSON"])
def test_files_that_are_no_figures(text, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match="figures must be a"):
        tables.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="can be read"):
        tables.load(tmp_path / "missing.json")


@pytest.mark.parametrize(("read", "words", "said"), [
    (arguments, ["--seconds", "0"], "above 0"), (arguments, ["--sections", "kernel"], "invalid choice"),
    (node.arguments, ["--stand-in", "--ranks", "1"], "2 to 8"), (node.arguments, ["rings"], "a contender must be"),
    (node.arguments, ["--stand-in", "--ranks", "9"], "got 9"), (arguments, ["--room", "0"], "at least 1 MiB"),
    (first_hour.arguments, ["--stand-in", "--minutes", "0"], "above 0"),
])  # fmt: skip
def test_arguments_that_are_refused(read, words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        read(words)
    assert said in capsys.readouterr().err


LACKS = {  # what a machine has -> what is said
    "no driver": ({}, "nvidia-smi lists none"),
    "a torch for CPUs": ({"driver": "570.86"}, "beside driver 570.86"),
    "an old driver": ({"driver": "560.35", "cuda": "13.0"}, "for CUDA 13.0"),
    "no headers": ({"driver": "580.1", "cuda": "13.0", "gpu": True, "include": "/nowhere"}, "-dev"),
    "no compiler": ({"driver": "580.1", "cuda": "13.0", "gpu": True}, "build-essential"),
    "nothing": ({"driver": "580.1", "cuda": "13.0", "gpu": True, "compiler": "cc"}, None),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_a_machine_lacks_is_said_with_the_line_to_run(name, tmp_path, monkeypatch):
    has, said = LACKS[name]
    for file, text in {
        "nvidia-smi": has.get("driver"),
        "cc": has.get("compiler"),
        "include/Python.h": "headers",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        if text is not None:
            path.write_text(f"#!/bin/sh\necho {text}\n")
            path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.version, "cuda", has.get("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has.get("gpu", False))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": has.get("include", str(tmp_path / "include"))})
    found = first_hour.unmet()
    assert found is said is None or said in found


def test_the_node_refuses_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        node.arguments(["--stand-in"])
    assert "starts its ranks itself" in capsys.readouterr().err


def test_links_and_transfers_of_a_node():
    found = on_engine_ranks(2, node.on_rank, True, [parse("u2"), parse("ring")], "links", 1.0)[0]
    assert found["left_out"] == []
    u2, ring = (one for one in found["records"] if one["section"] == "overlap")
    # a rank of a ring gets k and v, and their gradients twice in fp32 or q's side in their place; all is some MiB
    assert 0 < u2["received"] < 2**22
    assert 0 < ring["received"] < 2**22
    assert "| ring |" in tables.page({"about": about(True, 2), **found})


def test_longest_sequence_of_a_node():
    found = [one["records"] for one in on_engine_ranks(2, node.on_rank, True, [], "longest", 1.0)]
    ((row,), _) = found
    assert {**row, "seconds": None} == {**found[1][0], "seconds": None}
    assert (row["section"], row["ranks"]) == ("reach", 2)
    assert row["tokens"] >= STAND_IN.resolution
    assert "| ranks | tokens |" in tables.page({"about": about(True, 2), "records": [row], "left_out": []})


def test_steps_must_be_the_same_work():
    right = [2.0, 1.0], [1.0, 1.0]
    assert unlike(right, ([2.001, 1.0], [1.0, 1.0]), 1e-2) is None
    assert "not the same work: gradient norms" in unlike(right, ([2.0, 1.0], [1.0, 1.1]), 1e-2)


TESTS = """
import pytest
def test_right(): pass
def test_wrong(): raise ValueError
@pytest.mark.skip
def test_later(): pass
"""
# a part that hangs, and a process that it started, which does not end when it is asked
HANGS = "(trap '' INT; exec sleep 600) & echo $! >$1/pid; wait"


def test_an_hour_goes_on_after_parts_that_fail(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(first_hour, "PATIENCE", 1.0)  # in the background processes ignore SIGINT
    (tmp_path / "test_three.py").write_text(TESTS)
    (tmp_path / "hangs").write_text(HANGS)
    pytest_of = "python -m pytest -p no:cacheprovider -c /dev/null --junitxml {folder}/tests.xml"
    commands = {
        "tests": f"{pytest_of} {tmp_path}/test_three.py",
        "hangs": f"sh {tmp_path}/hangs {{folder}}",
        "dies": "sh -c 'echo no memory; kill -9 $$'",
        "cut": "sh -c 'echo {{ >{folder}/cut.json; exit 3'",
        "node": "false",
        "nothing": "true",
        "kernels": f"cp {file} {{folder}}",
    }
    parts = [first_hour.Part(name, 0.2 if name == "hangs" else 1, command, gpus=1 + (name == "node"))
             for name, command in commands.items()]  # fmt: skip
    machine = {**about(True), "stand_in": False, "device": "a GPU"}
    assert first_hour.hour(parts, machine, 60, tmp_path / "out") is False
    (sent,) = (tmp_path / "out").glob("*.json")
    rows = {row["part"]: row for row in tables.load(sent)["parts"]}
    limit = rows["hangs"]["limit"]
    assert {name: row["result"] for name, row in rows.items()} == {
        "tests": "failed with exit status 1", "hangs": f"not done after {limit:.0f} s", "dies": "ended by signal 9",
        "cut": "failed with exit status 3", "node": "left out: needs 2 GPUs; got 1",
        "nothing": "failed: it wrote no figures", "kernels": "done",
    }  # fmt: skip
    wrong = ["test_three.test_wrong"]
    assert rows["tests"]["tests"] == {"passed": 1, "failed": wrong, "skipped": ["test_three.test_later"]}
    assert "ValueError" in rows["tests"]["log"]
    assert rows["dies"]["log"] == "no memory\n"
    (pid,) = (tmp_path / "out").glob("*/hangs/pid")
    running = Path("/proc", pid.read_text().strip(), "cmdline")
    assert not running.exists() or running.read_bytes() == b""  # nobody, or what its parent has yet to look at
    said = capsys.readouterr().out
    assert "3 of 7: dies, ended by signal 9" in said
    assert f"- failed: {wrong[0]}" in said
    page = tables.docs([sent])
    assert "| kernels | done |" in page
    assert f"- cut: figures must be a JSON file that can be read; got {tmp_path}" in page
    assert tables.of(tables.load(sent), "kernels") == tables.of(tables.load(file), "kernels")


def test_commands_of_an_hour_are_understood():
    """Together they measure every section, and run all tests of `make test-gpu`, each once."""
    sections, makefile = [], (Path(tables.PAGE).parents[1] / "Makefile").read_text()
    for part in first_hour.parts(True, 2**24):
        words = [word.format(seconds=9, folder="figures", gpus=2) for word in shlex.split(part.command)]
        if words[2] == "benchmarks.gpu":
            args = arguments(words[3:])
            sections += args.sections
            assert (args.stand_in, args.seconds) == (True, 9)
            assert args.room == (16 if args.sections == ["longest"] else None)
        elif words[2] == "benchmarks.gpu.node":
            assert node.arguments(words[3:]).ranks == 2
    assert sorted(sections) == sorted(SECTIONS)
    on_gpus = {part.name: shlex.split(part.command) for part in first_hour.parts(False, 2**24)}
    (as_made,) = (line for line in makefile.splitlines() if line.startswith("ON_GPU := "))
    assert shlex.split(as_made)[-3:] == ["-m", "gpu", "tests/gpu"]
    files = {str(file) for file in Path("tests/gpu").glob("test_*.py")}
    first, others = (on_gpus[name] for name in ("exact", "tests"))
    ignored = {word for before, word in itertools.pairwise(others) if before == "--ignore"}
    assert ignored == {*first} & files
    assert len(ignored) == len(first_hour.EXACT)
    assert "tests/gpu" in others
    assert all(command[command.index("-m", 3) :][:2] == ["-m", "gpu"] for command in (first, others))
    assert not any("--stand-in" in command for command in on_gpus.values())

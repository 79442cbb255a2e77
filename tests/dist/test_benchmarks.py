"""Every command of the benchmarks, at its smallest size, and what they write, refuse and leave behind.

To add a command, add its words, the columns of its table and the first cells of its rows to `COMMANDS`, or to `SLOW`.
"""

import argparse
import importlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from benchmarks import runner
from benchmarks import tables as printed
from benchmarks.cluster import attention, layers, net, training
from benchmarks.cluster.plan import bytes_between
from benchmarks.contenders import parse
from benchmarks.gpu import first_hour, node, tables
from benchmarks.gpu.__main__ import SECTIONS, arguments, measure
from benchmarks.gpu.bench import STAND_IN, about
from benchmarks.gpu.layers import features
from benchmarks.inference.__main__ import arguments as inference
from benchmarks.memory.peers import Bench, unlike
from benchmarks.sparse import layer
from ds_seqpar.core.runtime.kernels import KERNELS, BlockSpec
from tests import launch
from tests.dist.ranks import is_one_sentence
from tests.launch import on_engine_ranks

pytestmark = pytest.mark.usefixtures("compiled")
needs_network = pytest.mark.skipif(net.refusal() is not None, reason=str(net.refusal()))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Commands set variables and signals. A test worker has one server of ranks, whichever test starts it."""
    monkeypatch.setattr(runner, "PRELOAD", launch.PRELOAD)
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in (15, 1)}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- commands

MODEL = "--hidden 32 --intermediate 32 --heads 4 --kv-heads 2 --layers 1"
TINY = f"--ranks 2 --vocab 64 {MODEL}"
TURNS = ["contender", "s", "spread", "against first"]
PREFERENCES = ["task", "tokens", "words", "ranks", "contender", "s", "to plain", "MiB a rank", "to plain"]
LENGTHS = ["samples", "link", "contender", "ratio", "s", "work", "groups", "MB", "cut", "Ulysses"]
WAYS = ["forward, fp32", "forward, bf16", "backward, fp32", "backward, bf16"]
SPREADS = ["us", "spread", "ratio", "spread"]
SMALL_LENGTHS = ["uniform | 2 ranks | one sample a group | 1.00", *(f"uniform | 2 ranks | {name}" for name in (
    "packs, fixed Ulysses", "packs", "data parallel"))]  # fmt: skip
# words -> columns of the first table, and the first cells of its rows
COMMANDS = {
    "attention.latent --size 2 --tokens 64": (
        ["model", "ulysses", "received: expanded", "latent", "ratio", "kept: expanded", "latent",
         "backward's peak: expanded", "latent"], None),
    "attention.schedules 4": (["contender", *WAYS], None),
    "attention.schedules --causal 6": (["ranks", *WAYS], 3 * ["6"]),
}  # fmt: skip
SLOW = {
    "cluster.attention --nodes 1 --ranks-per-node 2 --seq 64 --rounds 1 --heads 4 --kv-heads 4 --head-dim 8 -- u2 ring":
        (TURNS, ["u2", "ring"]),
    "cluster.layers --nodes 1 --ranks-per-node 2 --layer decay --seq 256 --heads 8 --head-dim 8 --rounds 1 -- ring":
        ([*TURNS, "MiB"], ["ring"]),
    "sparse.layer --nodes 1 --seq 256 --picks 32 --rounds 1 -- fast plain": ([*TURNS, "MiB"], ["fast", "plain"]),
    f"cluster.training --nodes 1 --ranks-per-node 2 --seq 64 --vocab 64 {MODEL} --rounds 1 --steps 1 -- u2":
        (["contender", "tokens/s", "spread", "against first"], ["u2"]),
    f"inference --ranks 3 --vocab 64 {MODEL} --tokens 4 --rounds 1 --prompt 100 --cache 1000":
        (["ranks", "prompt", "contender", "ms", "to one rank", "spread", "to training's forward", "spread"],
         [f"3 | 100 | {name}" for name in ("one rank", "ring", "gathering", "training's forward")]
         + [f"3 | 1,000 | {name}" for name in ("one rank", "ring", "gathering")]),
    **{f"preferences {MODEL} --tasks {task} --lengths 64 --vocabs 96": (
        PREFERENCES, [f"{task} | 64 | 96 | {world}" for world in (1, 2, 2, 2)]) for task in ("dpo", "grpo")},
    f"preferences {MODEL} --tasks dpo --lengths 64 --vocabs 96 --memory 0.01":
        (PREFERENCES, [f"dpo | 64 | 96 | {its} GiB | -" for its in (
            "1 | trl plain, 1 rank | - | - | more than 0.01", "2 | whole logits gathered | - | - | more than 0.005",
            "2 | in parts | - | - | more than 0.005", "2 | in parts, shared prompts | - | - | more than 0.005")]),
    "lengths --real --kinds uniform --scale 256": (LENGTHS, SMALL_LENGTHS),
    "memory.allocation --ranks 2 --tokens 64 --heads 4 -- u2 ring":
        (["", "forward", "kept", "backward", "gradients", "left"], ["bare kernel", "one rank", "u2", "ring"]),
    "memory.endurance --steps 100 --ranks 2 --tokens 64 --accumulation 1":
        (["steps", "MiB", "handles", "threads", "objects", "shared files"],
         [*(f"{10 * x} to {10 * x + 10}" for x in range(10)), "grows"]),
    f"memory.footprint --lengths 64 {TINY} -- u2":
        (["contender", "tokens", "MiB", "predicted", "measured", "error"],
         [f"u2 | 64 | {what}" for what in ("between steps", "forward", "backward", "step", "peak")]),
    f"memory.peers speed --lengths 64 --steps 1 --rounds 1 {TINY} -- deepspeed u2":
        (["contender", "tokens", "s", "to the first"], ["deepspeed | 64", "u2 | 64"]),
    f"memory.peers longest --by tensors --budget 4MiB --resolution 64 --most 512 {TINY} -- u2":
        (["contender", "longest", "MiB of it", "to the first"], ["u2 | 512 or more"]),
    "kernels.overhead --parts Call --tokens 16 --calls 2": (["", *SPREADS], None),
    "media.towers --ranks 2 --images 2 --side 8 --rounds 2":
        (["each rank makes the features", "s", "spread", "of all / these", "spread"],
         ["of all images", "of its own images"]),
}  # fmt: skip


@pytest.mark.parametrize("words", [*COMMANDS, *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW)])
def test_a_command_prints_its_table(words, monkeypatch, capsys):
    """Contenders are compared by the benchmarks themselves, which end where results differ."""
    columns, rows = (COMMANDS | SLOW)[words]
    name, *options = shlex.split(words)
    monkeypatch.setattr(sys, "argv", [name, *options])
    found = importlib.import_module(f"benchmarks.{name}")
    (found if hasattr(found, "main") else importlib.import_module(f"benchmarks.{name}.__main__")).main()
    lines = capsys.readouterr().out.partition(printed.table(columns) + "\n")[2].splitlines()
    lines = [line for line in lines if line.startswith("| ") and not line.startswith("| ranks")]
    assert lines
    for line, cells in zip(lines, rows if rows is not None else [""] * len(lines), strict=True):
        assert line.removeprefix("| ").startswith(cells)
        assert line.count("|") > 2
        assert "nan" not in line


def test_contenders_of_generation_are_ours_on_several_ranks(capsys):
    for words in ("--ranks 1", "-- deepspeed"):
        with pytest.raises(SystemExit):
            inference(words.split())
        assert "contenders must be ours" in capsys.readouterr().err


# ---- contenders, and what plans say of links

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
    args = argparse.Namespace(nodes=2)
    _, _, first, second, *rest = attention.table(rows, args, "40mbit").splitlines()
    assert first == "| ring | 0.500 | 0.400-0.600 | 1.00 | 2.00 | 2.10 | 2.00 | 1.025 | 0.84 |"
    assert second.startswith("| peer | 0.250 | 0.250-0.250 | 2.00 |")
    assert rest[-1] == "more: needs a GPU"
    _, _, unplanned = attention.table([{**row, "plan": None}], args, "40mbit").splitlines()
    assert unplanned == "| ring | 0.500 | 0.400-0.600 | 1.00 | 2.00 | 2.10 | - | - | 0.84 |"
    args.nodes = 1
    assert first[:35] + " |" in attention.table(rows, args, "40mbit")  # without links


# ---- GPUs, on stand-ins


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
    assert printed.below(tables.PAGE, tables.MARK) == tables.docs(tables.FIGURES.glob("*.json"))


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


# ---- clusters


@needs_network
def test_bytes_on_links_are_the_plans():
    contenders = ["attention2d=2,2", "deepspeed"]
    words = "--nodes 2 --ranks-per-node 2 --link 200mbit --rounds 1 --seq 256 --heads 8 --kv-heads 4 --head-dim 32 --"
    args = attention.arguments([*words.split(), *contenders])
    rows = attention.measure(args)
    assert [row["name"] for row in rows] == contenders
    for row in rows:
        assert row["error"] < 1e-4
        assert attention.plan_ratio(row) == pytest.approx(1, rel=0.05), row
    assert all(str(os.getpid()) not in path.name for path in net.FOLDER.glob(f"{net.PREFIX}-*"))


@needs_network
@pytest.mark.slow  # three sets of ranks; bytes of attention are seen above
@pytest.mark.parametrize(("step", "contenders"), [
    ("prefill", ["ring", "attention2d=2,2"]),
    ("continue", ["ring", "ring+rotate_forward=q", "ring+rotate_forward=kv"]),
    ("decode", ["ring", "ring+rotate_forward=kv"]),
])  # fmt: skip
def test_generation_over_links(step, contenders):
    """Results are compared with dense attention by the benchmark itself, which ends where they differ."""
    words = "--nodes 4 --link 200mbit --rounds 1 --seq 128 --kept 512 --heads 8 --kv-heads 4 --head-dim 32"
    args = attention.arguments([*words.split(), "--step", step, "--", *contenders])
    rows = attention.measure(args)
    assert [row["name"] for row in rows] == contenders
    assert [row.get("cannot") for row in rows] == [None] * len(rows)
    sent = {row["name"]: max(row["out"]) for row in rows}
    if step != "prefill":  # 512 keys and values of 4 heads, against fewer queries with results of 8
        assert sent["ring"] < 0.8 * sent["ring+rotate_forward=kv"]


@needs_network
@pytest.mark.slow  # three sets of ranks
@pytest.mark.parametrize(("kind", "contenders"), [
    ("delta", ["u4+recurrent_layers=heads", "ring+recurrent_layers=states"]),
    ("decay", ["u2/ring+recurrent_layers=heads", "ring+layout=contiguous+recurrent_layers=states"]),
])  # fmt: skip
def test_layers_over_links(kind, contenders):
    """Results are compared with those of one process by the benchmark itself, which ends where they differ."""
    words = "--nodes 4 --link 200mbit --rounds 1 --seq 1024 --heads 8 --head-dim 16"
    args = layers.arguments([*words.split(), "--layer", kind, "--", *contenders])
    rows = layers.measure(args)
    assert [row.get("cannot") for row in rows] == [None] * len(rows)
    for row in rows:
        assert max(row["in"]) == pytest.approx(row["counted"], rel=0.1, abs=5e4), row


@needs_network
@pytest.mark.slow
def test_a_layer_that_picks_keys_over_links():
    """Results are compared with those of one process by the benchmark itself. All send the same, `pieces` at once."""
    args = layer.arguments(["--nodes", "4", "--rounds", "1", "--seq", "512", "--picks", "32"])
    rows = layer.measure(args)
    assert [(row["name"], row.get("cannot")) for row in rows] == [(name, None) for name in layer.WAYS[:3]]
    assert len({row["counted"] for row in rows}) == 1
    for row in rows:
        assert max(row["in"]) == pytest.approx(row["counted"], rel=0.1, abs=5e4), row


@needs_network
@pytest.mark.slow  # two trainings over links; bytes of attention are seen above
@pytest.mark.parametrize(("per_node", "ours", "links"), [(1, "ring", "1gbit"), (2, "u2/ring", "200mbit 1gbit")])
def test_training_steps_over_links(per_node, ours, links):
    """Losses are compared by the benchmark itself, which ends where they differ."""
    words = f"--nodes 2 --ranks-per-node {per_node} --seq 512 --layers 1 --hidden 64 --intermediate 64 --heads 4"
    more = f"--kv-heads 4 --vocab 64 --rounds 1 --steps 1 --link {links} -- {ours} deepspeed"
    args = training.arguments([*words.split(), *more.split()])
    rows = training.measure(args)
    assert [row["name"] for row in rows] == [ours, "deepspeed"]
    for row in rows:
        assert [len(row["seconds"][rate]) for rate in links.split()] == [1] * len(args.link)
        assert max(row["zero"]["out"]) > 0
    assert training.attention(rows[0]) == pytest.approx(rows[0]["plan"], rel=0.1)
    # a checkpoint of DeepSpeed's sends twice in forward what ours sends once
    assert training.attention(rows[1]) == pytest.approx(1.5 * rows[1]["plan"], rel=0.1)
    assert f"| {ours} |" in training.table(rows, args, "1gbit")


def test_what_is_planned_of_training_steps():
    """The planner chooses u4 here; what cannot run is said in a sentence below the table, as of other benchmarks."""
    names = ["u4", "auto+checkpointing=false", "u2+checkpointing=false", "u2+head_chunks=auto", "u2+foo=1", "u16"]
    args = training.arguments(["--nodes", "1", "--ranks-per-node", "4", "--seq", "512", "--", *names])
    args.nodes, args.ranks_per_node = 4, 1  # nothing is started
    bench = Bench(args)
    u4, auto, u2, *refused = (training.planned(spec, bench, args) for spec in args.contenders)
    assert auto == u4
    assert u2["plan"] > u4["plan"] > 0
    for found, word in zip(refused, ("head_chunks", "'foo'", "divide"), strict=True):
        assert is_one_sentence(found["cannot"])
        assert word in found["cannot"]
    rows = [{"name": name, **found} for name, found in zip(names[3:], refused, strict=True)]
    assert training.table(rows, args, "1gbit").endswith(f"u16: {refused[-1]['cannot']}")


@needs_network
def test_what_a_killed_run_left_is_removed():
    code = "import os, time; from benchmarks.cluster import net as n; c = n.Network(2, '1mbit').__enter__();"
    left = subprocess.Popen(
        [sys.executable, "-c", f"{code} print(c.names[0], flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    name = left.stdout.readline().strip()
    assert name not in net.sweep()  # its owner lives
    left.kill()
    left.wait()
    left.stdout.close()
    assert net.FOLDER.joinpath(name).exists()
    assert name in net.sweep()
    assert not net.FOLDER.joinpath(name).exists()


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(net.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["cluster"])
    with pytest.raises(SystemExit) as ended:
        attention.main()
    assert ended.value.code == 2
    assert "needs root" in capsys.readouterr().err

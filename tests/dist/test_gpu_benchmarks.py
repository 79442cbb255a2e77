"""The benchmarks of GPUs, to their end on stand-ins: what they write, the tables of it, and what they refuse."""

import json

import pytest

from benchmarks.contenders import parse
from benchmarks.gpu import node, tables
from benchmarks.gpu.__main__ import SECTIONS, arguments, measure
from benchmarks.gpu.bench import STAND_IN, about
from benchmarks.gpu.layers import features
from benchmarks.memory.peers import unlike
from ds_seqpar.runtime.kernels import KERNELS, BlockSpec
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
    assert tables.PAGE.read_text().partition(tables.MARK)[2] == tables.docs(tables.FIGURES.glob("*.json"))


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
    (node.arguments, ["--stand-in", "--ranks", "9"], "got 9"),
])  # fmt: skip
def test_arguments_that_are_refused(read, words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        read(words)
    assert said in capsys.readouterr().err


def test_the_node_refuses_a_launcher(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        node.arguments(["--stand-in"])
    assert "starts its ranks itself" in capsys.readouterr().err


def test_links_and_transfers_of_a_node():
    found = on_engine_ranks(2, node.on_rank, True, [parse("u2"), parse("ring")], "links")[0]
    assert found["left_out"] == []
    u2, ring = (one for one in found["records"] if one["section"] == "overlap")
    # a rank of a ring gets k and v, and their gradients twice in fp32 or q's side in their place; all is some MiB
    assert 0 < u2["received"] < 2**22
    assert 0 < ring["received"] < 2**22
    assert "| ring |" in tables.page({"about": about(True, 2), **found})


def test_steps_must_be_the_same_work():
    right = [2.0, 1.0], [1.0, 1.0]
    assert unlike(right, ([2.001, 1.0], [1.0, 1.0]), 1e-2) is None
    assert "not the same work: gradient norms" in unlike(right, ([2.0, 1.0], [1.0, 1.1]), 1e-2)

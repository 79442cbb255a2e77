"""`python -m ds_seqpar show`: the table of every schedule, its image, and its answer to settings that do not fit."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ds_seqpar.__main__ import main
from ds_seqpar.analysis.draw import COLORS
from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from tests.unit.commands import run
from tests.words import missing

ROOT = Path(__file__).resolve().parents[2]


def _show(capsys, *words):
    return run(capsys, "show", *words)


def _plans(heads=(8, 8), causal=True, **settings):
    """The plans that ranks would walk for bf16 attention with these heads, forward and backward."""
    size = settings.setdefault("size", 4)
    config = SequenceParallelConfig(**{"ulysses": 1, **settings}).resolve(size, heads)
    recipe = config.recipe(config.topology(size))
    of_member = heads[0] // config.ulysses, max(1, heads[1] // config.ulysses), 128
    shape = shape_of(config.comm_dtype, "bfloat16", 1, of_member)
    shards = EvenShards(config.layout, 2 * multiple(config.layout, size, config.ulysses), recipe.size)
    block_mask = block_mask_of(CAUSAL if causal else FULL, shards)
    return [recipe.plan(direction, block_mask, shape) for direction in ("forward", "backward")]


def _tables(out):
    """The parts of what was printed, without the lines on critical paths."""
    return [part.rsplit("\ncritical path: ", 1)[0] for part in out.strip().split("\n\n")]


def _ratios(out):
    """What each direction's critical path takes, relative to the longer of products and transfers."""
    return [float(x) for x in re.findall(r"^critical path: (\d+\.\d\d) times the products alone", out, re.MULTILINE)]


# settings, which stand on the command line as options
SHOWN = [
    {},
    {"schedule": "ring", "size": 3, "layout": "striped"},
    {"schedule": "double_ring", "size": 8, "ring_size": 4, "rotate_backward": "q"},
    {"schedule": "distflash", "size": 5},
    {"schedule": "triangle", "size": 10},
    {"schedule": "triangle", "size": 12, "ulysses": 2, "overlap": True},
    {"schedule": "attention2d", "size": 6, "rows": 2, "cols": 3},
    {"schedule": "attention2d", "overlap": True, "comm_dtype": "bf16"},
    {"schedule": "wallfacer", "size": 8, "team": 2},
    {"schedule": "mesh", "size": 8, "mesh": (2, 1, 2), "ulysses": 2, "rank_order": "ring_intra"},
    {"schedule": "mesh", "mesh": (2, 2, 1), "rank_order": ("y", "x", "z", "ulysses"), "rotate_forward": "q"},
]


def _options(settings):
    for name, value in settings.items():
        yield f"--{name.replace('_', '-')}"
        yield from value if isinstance(value, tuple) else () if value is True else (value,)


@pytest.mark.parametrize("settings", SHOWN, ids=str)
def test_show_prints_what_ranks_would_do_in_both_directions(capsys, settings):
    out, err, code = _show(capsys, *_options(settings))
    assert (err, code) == ("", 0)
    forward, backward = _plans(**settings)
    assert _tables(out) == [forward.table(), backward.table()]
    first, *_ = forward.table().splitlines()
    assert first == forward.head
    ratios = _ratios(out)
    assert len(ratios) == 2
    assert all(1 <= ratio <= 2.01 for ratio in ratios)


def test_every_schedule_is_shown():
    assert {settings.get("schedule") for settings in SHOWN} >= set(SCHEDULES)


def test_one_direction_alone(capsys):
    plans = dict(zip(("forward", "backward"), _plans(), strict=True))
    for direction, plan in plans.items():
        out, _, code = _show(capsys, "--direction", direction)
        assert code == 0
        assert _tables(out) == [plan.table()]


def test_without_a_mask_a_contiguous_ring_computes_everything(capsys):
    for words, causal, products in ((["--full"], False, 4 * 4), ([], True, 4 * 5 // 2)):
        out, _, _ = _show(capsys, "--layout", "contiguous", *words)
        tables = _tables(out)
        assert tables == [plan.table() for plan in _plans(causal=causal, layout="contiguous")]
        assert [table.count("*") for table in tables] == [products] * 2


# with more Ulysses ranks than k/v heads, each has one: fewer queries for each k/v head than the model has
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("ulysses", [1, 2, 8])
def test_what_travels_is_chosen_for_the_heads_of_a_member(capsys, heads, ulysses):
    out, _, code = _show(capsys, "--size", 4 * ulysses, "--ulysses", ulysses, "--heads", *heads, "--comm-dtype", "bf16")
    assert code == 0
    wanted = _plans(heads, size=4 * ulysses, ulysses=ulysses, comm_dtype="bf16")
    assert _tables(out) == [plan.table() for plan in wanted]
    # in backward, queries go round a ring where a Ulysses rank has as many of them as k/v heads
    assert ("dq" in out) == (heads[0] // ulysses == max(1, heads[1] // ulysses))


def test_overlap_brings_the_critical_path_near_the_bound(capsys):
    words = ["--schedule", "mesh", "--size", 8, "--mesh", 2, 2, 2, "--comm-dtype", "bf16", "--full"]
    plain, overlapped = (_ratios(_show(capsys, *words, *more)[0]) for more in ([], ["--overlap"]))
    assert all(ratio <= 1.3 for ratio in overlapped)
    assert all(before > after for before, after in zip(plain, overlapped, strict=True))


def test_all_ranks_of_a_sequence_are_accounted_for(capsys, tmp_path):
    """Ulysses ranks do the same, so a row stands for them; their exchange is drawn."""
    pixels = pytest.importorskip("matplotlib.image")
    file, trace = tmp_path / "plan.png", tmp_path / "trace.json"
    out = _show(capsys, "--size", 8, "--ulysses", 2, "--png", file, "--trace", trace)[0]
    assert "stands for 2 of the 8 that share a sequence" in out
    assert _share(pixels.imread(file)[..., :3], COLORS["exchange"]) > 0.01
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert names >= {f"CP rank {rank}" for rank in range(4)}


def test_a_single_rank_has_a_table_too(capsys):
    out, _, code = _show(capsys, "--size", 1)
    assert code == 0
    assert _tables(out) == [plan.table() for plan in _plans(size=1)]
    assert _ratios(out) == [1, 1]


# ---- images


def _size_of(png):
    """(width, height) from the file's own header."""
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[12:16] == b"IHDR"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule", "ring"],
        ["--schedule", "distflash", "--size", "5"],
        ["--schedule", "mesh", "--size", "8", "--mesh", "2", "2", "2", "--overlap"],
        ["--size", "1"],
    ],
    ids=str,
)
def test_a_figure_is_written(capsys, tmp_path, words):
    matplotlib = pytest.importorskip("matplotlib.image")
    file = tmp_path / "plan.png"
    out, _, code = _show(capsys, *words, "--png", file)
    assert code == 0
    assert out.count(f"wrote {file}\n") == 1
    width, height = _size_of(file)
    assert 800 <= width <= 2000
    assert 100 <= height <= 2000
    # bars of products, and of transfers where there is more than one rank
    pixels = matplotlib.imread(file)[..., :3]
    seen = {kind: _share(pixels, COLORS[kind]) for kind in ("product", "move")}
    assert seen["product"] > 0.02
    assert (seen["move"] > 0.02) == ("1" not in words)


def _share(pixels, color):
    """Of all pixels, those of this color."""
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return (abs(pixels - wanted) < 0.01).all(axis=-1).mean()


def test_a_trace_is_written_of_the_first_direction(capsys, tmp_path):
    file = tmp_path / "trace.json"
    out, _, code = _show(capsys, "--schedule", "ring", "--trace", file)
    assert code == 0
    assert out.count(f"wrote {file}\n") == 1
    events = json.loads(file.read_text())["traceEvents"]
    products = [e["name"] for e in events if e.get("cat") == "product"]
    assert sorted(products) == sorted(re.findall(r"q\(\d\)\*kv\(\d\)", _tables(out)[0]))


def test_more_ranks_make_a_higher_figure(capsys, tmp_path):
    heights = []
    for size in (2, 8):
        assert _show(capsys, "--size", size, "--png", tmp_path / "plan.png")[2] == 0
        heights.append(_size_of(tmp_path / "plan.png")[1])
    assert heights[1] - heights[0] > 200


def test_a_figure_needs_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, err, code = _show(capsys, "--png", tmp_path / "plan.png")
    assert code == 2
    assert missing(err, "matplotlib", "ds_seqpar[plot]") == []
    assert not (tmp_path / "plan.png").exists()


# ---- what does not fit: test_command_refusals.py has the rest


def test_unknown_words_are_refused_by_the_parser(capsys):
    for words in (["show", "--sizes", "4"], ["show", "--size", "four"], ["show", "--mesh", "2", "2"], ["draw"], []):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert "usage: ds-seqpar" in capsys.readouterr().err


def test_it_runs_as_a_module():
    """A refusal: its sentence, and the exit code that `main` returns."""
    command = [sys.executable, "-m", "ds_seqpar", "show", "--size", "2", "--ulysses", "3"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("ds-seqpar: ")

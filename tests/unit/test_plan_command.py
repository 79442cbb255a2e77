"""`python -m ds_seqpar plan`: what it prints, writes and draws, and its answer to what does not fit."""

import json
import re

import pytest

from ds_seqpar.config import SequenceParallelConfig
from tests.unit.commands import assert_refused, run, with_options
from tests.words import missing


def _plan(capsys, place, *words):
    given = {"--model": place, "--seq-len": 16384, "--gpus-per-node": 4, "--machine": "h100-ib"}
    return run(capsys, "plan", *with_options(given, words))


def test_what_is_printed_can_be_pasted(capsys, place):
    out, err, code = _plan(capsys, place, "--set", "size=4")
    assert (err, code) == ("", 0)
    assert missing(out.splitlines()[0], "16384 tokens", "4 ranks of h100-ib") == []
    section = json.loads("{" + re.search(r'^("sequence_parallel": .*)$', out, re.MULTILINE)[1] + "}")
    config = SequenceParallelConfig.from_dict(section["sequence_parallel"]).resolve(4, (8, 2))
    assert config.size == 4
    first = out.split("\n\n")[1].splitlines()[1]
    assert "4 ranks: " in first
    assert missing(out, "bytes/least", "why not others:", "memory: ", "attention forward", "rank hours") == []


def test_what_a_nodes_host_keeps_is_said(capsys, place):
    away = 'zero_optimization.offload_optimizer={"device": "cpu"}'
    out = _plan(capsys, place, "--set", away)[0]
    assert re.search(r"^and \d+\.\d\d GiB of host memory, \d+\.\d GiB a node$", out, re.MULTILINE)
    assert missing(out, "optimiser: its states", "offload: copies to host memory") == []


def test_numbers_for_programs_add_up(capsys, place):
    found = json.loads(_plan(capsys, place, "--json", None, "--nodes", 2)[0])
    assert found["ranked"][0]["section"] == found["section"]
    for one in found["ranked"]:
        step = one["step"]
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        assert one["seconds_a_sequence"] == pytest.approx(step["seconds"] / step["sequences"])
        assert sum(one["memory"]["parts"].values()) == one["memory"]["total"]
    assert found["rejected"]


def test_documents_come_from_a_file(capsys, place, tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1024 1024\n" * 8, encoding="utf-8")
    out, _, code = _plan(capsys, place, "--documents", lengths, "--set", "size=4")
    assert code == 0
    assert missing(out.splitlines()[0], "16384 tokens", "16 documents") == []
    assert _plan(capsys, place, "--documents", lengths, "--seq-len", "-", "--set", "size=4")[0] == out


def test_a_picture_and_a_trace_are_written(capsys, place, tmp_path):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "plan.png", tmp_path / "plan.json"
    out, _, code = _plan(capsys, place, "--png", picture, "--perfetto", trace, "--set", "size=4")
    assert code == 0
    assert f"wrote {picture}\nwrote {trace}\n" in out
    assert picture.stat().st_size > 1000
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(4)) or len({event["pid"] for event in events}) == 4


REFUSED = [
    (["--seq-len", "many"], ("--seq-len", "got 'many'")),
    (["--seq-len", "-"], ("--seq-len", "--documents")),
    (["--nodes", 0], ("--nodes", "got '0'")),
    (["--memory", "none"], ("--memory", "got 'none'")),
    (["--memory", "0.001"], ("16384 tokens", "4 ranks", "GiB")),
    (["--machine", "h100"], ("modest, h100-ib, h200-ib, a100-ib, cpu", "got 'h100'")),
    (["--documents", "/nowhere"], ("--documents", "/nowhere", "No such file")),
    (["--documents", __file__], ("--documents", "lengths")),
    (["--set", "size=3"], ("size 3", "4 ranks", "[1, 2, 4]")),
    (["--set", "ulysses=16"], ("ulysses 16", "size 4", "[1, 2, 4]")),
    (["--set", "bf16.enabled=false"], ("h100-ib", "bfloat16", "float32")),
    (["--seq-len", 16385, "--set", "size=4"], ("16385 tokens", "multiple of 8")),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_is_answered_with_one_sentence(capsys, place, words, said):
    assert_refused(_plan(capsys, place, *words), *said)

"""`python -m ds_seqpar plan`: what it prints, writes and draws, and its answer to what does not fit."""

import json
import re

import pytest

from ds_seqpar.config.deepspeed_json import read_config
from tests.unit.commands import assert_refused, run, with_options
from tests.words import missing


def _plan(capsys, place, *words):
    given = {"--model": place, "--seq-len": 16384, "--gpus-per-node": 4, "--machine": "h100-ib"}
    return run(capsys, "plan", *with_options(given, words))


def test_what_is_printed_can_be_pasted(capsys, place):
    out, err, code = _plan(capsys, place, "--set", "size=4")
    assert (err, code) == ("", 0)
    assert missing(out.splitlines()[0], "16384 tokens", "4 ranks of h100-ib") == []
    content = json.loads(re.search(r"^ds_config\.json:\n\n(\{\n.*?^\})$", out, re.MULTILINE | re.DOTALL)[1])
    config = read_config(content).resolve(4, (8, 2))
    assert config.size == 4
    assert content["zero_optimization"] == {"stage": 3}
    assumed = "bfloat16; ZeRO-3; gradient checkpointing on; AdamW; micro-batch 1; 1 sequence (16,384 tokens) a step"
    assert missing(out.splitlines()[1], assumed, "67.1 of 74.5 GiB for tensors") == []
    assert missing(out, "--gradient_checkpointing True --bf16 True", "--learning_rate 1e-05") == []
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


def test_what_is_assumed_changes_with_what_is_said(capsys, place, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "train_batch_size": 16,
                                "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}))  # fmt: skip
    words = ["--config", file, "--no-checkpointing", None, "--nodes", 2]
    out, _, code = _plan(capsys, place, *words)
    assert code == 0
    said = "ZeRO-1; gradient checkpointing off; SGD; micro-batch 2; 16 sequences (262,144 tokens)"
    assert said in out.splitlines()[1]
    assert missing(out, '"train_batch_size": 16', "--per_device_train_batch_size 2") == []
    assert "gradient_checkpointing_enable" not in out
    found = json.loads(_plan(capsys, place, *words, "--json", None)[0])
    assert found["assumed"]["sequences_a_step"] == 16
    assert not found["assumed"]["gradient_checkpointing"]
    assert found["deepspeed_json"]["sequence_parallel"] == found["section"]


def test_lengths_and_ranks_are_said_one_way_in_both_commands(capsys, place):
    def first(command, *words):
        given = {"--model": place, "--machine": "h100-ib", "--seq-len": "16K", "--set": "size=4"}
        return run(capsys, command, *with_options(given, words))[0].splitlines()[0]

    for command in ("plan", "memory"):
        found = {first(command, *words) for words in (
            ("--ranks", 8), ("--nodes", 1), ("--nodes", 2, "--gpus-per-node", 4), ("--ranks", 8, "--seq-len", 16384),
        )}  # fmt: skip
        assert len(found) == 1
        assert missing(found.pop(), "16384 tokens on 8 ranks") == []
    assert first("plan", "--seq-len", "1m", "--documents", "-").startswith("1048576 tokens")


def test_rates_are_of_all_ranks_and_of_the_peak(capsys, place):
    for machine, half in (("h100-ib", True), ("cpu", False)):
        found = json.loads(_plan(capsys, place, "--machine", machine, "--json", None)[0])["ranked"][0]
        assert found["tokens_per_second"] == pytest.approx(16384 / found["seconds_a_sequence"])
        if half:
            weights = 2 * (2 * 64 * (8 + 2) * 8 + 3 * 64 * 96) + 256 * 64
            flops = 6 * weights * 16384 + 12 * 2 * 8 * 8 * 16384 * 16385 / 2
            assert found["mfu"] == pytest.approx(flops / found["seconds_a_sequence"] / 4 / 989e12)
        else:
            assert found["mfu"] is None
    assert "No MFU" in _plan(capsys, place, "--machine", "cpu")[0]


def test_ranks_that_do_the_same_share_a_row(capsys, place, tmp_path):
    pixels = pytest.importorskip("matplotlib.image")
    heights = []
    for size in (2, 8):
        words = ["--ranks", 8, "--set", f"size={size}", "--png", tmp_path / "plan.png"]
        assert _plan(capsys, place, *words, "--gpus-per-node", 8)[2] == 0
        heights.append(pixels.imread(tmp_path / "plan.png").shape[0])
    assert heights[1] < 2 * heights[0]  # 8 rows would be 3 times as high as 2


REFUSED = [
    (["--seq-len", "many"], ("--seq-len", "got 'many'")),
    (["--seq-len", "-"], ("--seq-len", "--documents")),
    (["--seq-len", "1.5M"], ("--seq-len", "M (1,048,576)", "got '1.5M'")),
    (["--seq-len", f"{2**21}M"], ("--seq-len", "at most")),
    (["--ranks", 4, "--nodes", 1], ("--ranks", "--nodes", "both")),
    (["--nodes", 0], ("--nodes", "got '0'")),
    (["--memory", "none"], ("--memory", "got 'none'")),
    (["--memory", "0.001"], ("16384 tokens", "4 ranks", "GiB")),
    (["--machine", "h100"], ("modest, h100-ib, h200-ib, a100-ib, cpu", "got 'h100'")),
    (["--documents", "/nowhere"], ("--documents", "/nowhere", "No such file")),
    (["--documents", __file__], ("--documents", "lengths")),
    (["--set", "size=3"], ("size 3", "4 ranks", "[1, 2, 4]")),
    (["--set", "ulysses=16"], ("ulysses 16", "size 4", "[1, 2, 4]")),
    (["--set", "zero_optimization.stage=auto"], ("zero_optimization.stage", "auto")),
    (["--set", "bf16.enabled=false"], ("h100-ib", "bfloat16", "float32")),
    (["--seq-len", 16385, "--set", "size=4"], ("16385 tokens", "multiple of 8")),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_is_answered_with_one_sentence(capsys, place, words, said):
    assert_refused(_plan(capsys, place, *words), *said)


def test_a_prompts_first_token_and_cache(capsys, place):
    """A prompt as long as the sequence takes what a training step's forward takes."""
    words = ["--set", "size=4", "--prompt", "16K", "--no-checkpointing", None]
    found = json.loads(_plan(capsys, place, *words, "--json", None)[0])
    assert found["prompt"]["tokens"] == 16384
    for one, prompt in zip(found["ranked"], found["prompt"]["ranked"], strict=True):
        step, parts = one["step"]["parts"], prompt["parts"]
        assert parts["attention"] == pytest.approx(step["attention forward"])
        assert 3 * parts["matrices"] == pytest.approx(step["matrices"])
        assert prompt["cache"] == 2 * 2 * 2 * 8 * 2 * 16384 // 4
    windowed = json.loads(_plan(capsys, place, *words, "--window", 1000, "--json", None)[0])["prompt"]["ranked"]
    assert {prompt["cache"] for prompt in windowed} == {2 * 2 * 2 * 8 * 2 * 1000}
    out = _plan(capsys, place, "--set", "size=4", "--prompt", "1M")[0]
    assert missing(out, "a prompt of 1,048,576 tokens", "first token s", "0.031", "ZeRO: all parameters") == []
    given = ["memory", "--model", place, "--seq-len", 16384, "--ranks", 4, "--prompt", "1M"]
    assert "a prompt of 1,048,576 tokens keeps 0.031 GiB" in run(capsys, *given)[0]
    assert_refused(_plan(capsys, place, "--prompt", "many"), "--prompt", "whole number", "'many'")

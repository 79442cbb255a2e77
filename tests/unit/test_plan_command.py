"""`python -m ds_seqpar plan`: what it prints, and its answer to what does not fit."""

import json
import re

import pytest

from ds_seqpar.deepspeed.config import read_config
from tests.unit.commands import LLAMA, assert_has, golden, run, with_options
from tests.words import missing

# name -> {"model": changes of LLAMA, "words" of the command, "documents": lengths in a file, "best": some of what
# --json prints of the best, "by hand": how a hand finds it}
GOLDEN = golden("plan")


@pytest.mark.parametrize("name", GOLDEN)
def test_the_best_is_that_of_the_golden_file(capsys, tmp_path, name):
    case, files = GOLDEN[name], []
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **case["model"]}), encoding="utf-8")
    if "documents" in case:
        files = ["--documents", tmp_path / "lengths.txt"]
        files[1].write_text("\n".join(map(str, case["documents"])), encoding="utf-8")
    out, err, code = run(capsys, "plan", "--model", tmp_path, "--json", *case["words"], *files)
    assert (err, code) == ("", 0)
    assert_has(json.loads(out)["ranked"][0], case["best"])


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
    assert missing(out, "s a sequence", "GiB a rank", "MiB between", "why not others:", "ds-seqpar tune") == []


def test_numbers_for_programs_add_up(capsys, place):
    found = json.loads(_plan(capsys, place, "--json", None, "--nodes", 2)[0])
    assert found["ranked"][0]["section"] == found["section"]
    for one in found["ranked"]:
        assert one["tokens_per_second"] == pytest.approx(16384 / one["seconds_a_sequence"])
        assert sum(one["memory"]["parts"].values()) == one["memory"]["total"]
        assert set(one["attention"]["forward"]) == {"seconds", "inside", "between", "messages"}
    assert found["rejected"]


def test_documents_come_from_a_file(capsys, place, tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1024 1024\n" * 8, encoding="utf-8")
    out, _, code = _plan(capsys, place, "--documents", lengths, "--set", "size=4")
    assert code == 0
    assert missing(out.splitlines()[0], "16384 tokens", "16 documents") == []
    assert _plan(capsys, place, "--documents", lengths, "--seq-len", "-", "--set", "size=4")[0] == out


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


def test_a_prompts_cache_is_the_memory_commands(capsys, place):
    given = ["memory", "--model", place, "--seq-len", 16384, "--ranks", 4, "--prompt"]
    assert "a prompt of 1,048,576 tokens keeps 0.031 GiB" in run(capsys, *given, "1M")[0]

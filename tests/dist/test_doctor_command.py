"""`ds-seqpar doctor` examines every configuration of the repository, and says what it found in a table or as JSON."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from ds_seqpar.cli.main import main
from tests.hf.test_doctor import FAULTS
from tests.launch import on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
CONFIGS = sorted(x for x in (Path(__file__).parents[2] / "ds_configs").glob("*.json") if "schema" not in x.name)
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 300}


def command(words, fault=None):
    """On a rank: (exit code, stdout, stderr) of the command, with a fault of FAULTS planted."""
    out, err = io.StringIO(), io.StringIO()
    plant = FAULTS[fault][0] if fault else contextlib.nullcontext
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), plant():
        return main(["doctor", *map(str, words)]), out.getvalue(), err.getvalue()


def examined(ranks, *words, fault=None):
    """(exit code, the findings by name), which rank 0 alone prints."""
    outcomes = on_ranks(ranks, command, [*words, "--json"], fault, patience=None, timeout=200)
    assert len({code for code, *_ in outcomes}) == 1
    assert not any(out for _, out, _ in outcomes[1:])
    code, out, err = outcomes[0]
    assert out, err
    return code, {finding["check"]: finding for finding in json.loads(out)}


def assert_sound(code, findings):
    assert code == 0, [finding for finding in findings.values() if finding["status"] == "fail"]
    assert {finding["status"] for finding in findings.values()} <= {"pass", "not tried"}
    for name in ("batches", "loss and gradients", "optimizer step"):
        assert findings[name]["status"] == "pass"


def test_a_model_on_two_ranks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = "--model", tmp_path, "--set", "zero_optimization.stage=1", "--quick"
    assert_sound(*examined(2, *words))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 1])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_of_the_repository_passes(ranks, config):
    assert_sound(*examined(ranks, "--deepspeed_config", config))


@pytest.mark.slow
def test_a_fault_is_in_the_table_and_in_the_exit_code():
    code, findings = examined(2, "--set", "ulysses=1", fault="local position ids")
    assert code == 1
    assert not missing(findings["batches"]["detail"], *FAULTS["local position ids"][2])
    code, out, _ = on_ranks(1, command, [], "wrong divisor", patience=None)[0]
    assert code == 1
    assert not missing(out, "FAIL  batches", "what to do", "FAIL  optimizer step", "gradients are 2 times", "2 failed")


@pytest.mark.slow
def test_what_cannot_be_examined_is_told_by_exit_code_2(tmp_path):
    for words, sentence in (
        (["--set", "size=3"], "size must divide"),
        (["--model", tmp_path / "none"], "there is no"),
        (["--deepspeed_config", tmp_path / "none.json"], "none.json"),
    ):
        outcomes = on_ranks(2, command, words, patience=None)
        assert [code for code, *_ in outcomes] == [2, 2]
        assert sentence in "".join(err for *_, err in outcomes)

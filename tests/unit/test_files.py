"""What users write in files is refused in one sentence, which names the file, the key and the value, or it is right."""

import copy
import json

import pytest

from ds_seqpar.__main__ import main
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.base.files import LARGEST, LARGEST_FILE, parse_json, read_json
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.planner.machine import presets
from tests.unit.commands import LLAMA

DEEP = "[" * 100_000 + "]" * 100_000
TEXTS = {
    "a number of 5,000 digits": (b'{"a": {"b": [0, %s]}}' % (b"7" * 5000), ["777"]),
    "a number of 400 digits": (b'{"a": -%s}' % (b"7" * 400), ["-777"]),
    "no finite number": (b'{"a": NaN}', ["NaN"]),
    "a float beyond all": (b'{"a": 1e999}', ["1e999"]),
    "deep": (b'{"a": %s}' % DEEP.encode(), ["inside one another"]),
    "less deep": (b'{"a": %s}' % (b"[" * 40 + b"]" * 40), ["inside one another"]),
    "twice": (b'{"a": {"b": 1, "b": 2}}', ['"b" twice']),
    "large": (b'{"a": "%s"}' % (b"x" * LARGEST_FILE), [str(LARGEST_FILE)]),
    "no UTF-8": (b'{"a": "\xff"}', ["UTF-8"]),
    "a mark": (b"\xef\xbb\xbf{}", ["BOM"]),
    "no JSON": (b"{", ["line 1 column 2"]),
    "no object": (b"[]", ["list"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_no_reader_should_meet_is_refused(tmp_path, name):
    text, words = TEXTS[name]
    file = tmp_path / "it.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"it\.json|at most") as caught:
        read_json(file, "it")
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_numbers_of_64_bits_are_whole():
    assert parse_json(f"[{LARGEST}, -{LARGEST}, 1e300]", "it", "here") == [LARGEST, -LARGEST, 1e300]
    with pytest.raises(ConfigError, match=str(LARGEST + 1)):
        parse_json(str(LARGEST + 1), "it", "here")


# a file, what is exchanged in it, and what the sentence of the command names
ZERO = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
COMMANDS = {
    "zero_optimization 3": ("ds", {"zero_optimization": 3}, ["ds.json", "zero_optimization", "got 3"]),
    "zero_optimization null": ("ds", {"zero_optimization": None}, ["ds.json", "zero_optimization", "got null"]),
    "zero_optimization true": ("ds", {"zero_optimization": True}, ["ds.json", "zero_optimization", "got true"]),
    "bf16 true": ("ds", {"bf16": True}, ["ds.json", "bf16", "got true"]),
    "bf16 null": ("ds", {"bf16": None}, ["ds.json", "bf16", "got null"]),
    'bf16 "false"': ("ds", {"bf16": {"enabled": "false"}}, ["ds.json", "bf16.enabled", '"false"']),
    "bf16 and fp16": ("ds", {"fp16": {"enabled": True}}, ["ds.json", "16.enabled", "true"]),
    "micro-batch 0": ("ds", {"train_micro_batch_size_per_gpu": 0}, ["ds.json", "micro_batch", "got 0"]),
    "micro-batch -4": ("ds", {"train_micro_batch_size_per_gpu": -4}, ["ds.json", "micro_batch", "got -4"]),
    "micro-batch true": ("ds", {"train_micro_batch_size_per_gpu": True}, ["ds.json", "micro_batch", "got true"]),
    "stage 9": ("ds", {"zero_optimization": {"stage": 9}}, ["ds.json", '"zero_optimization.stage": 9']),
    "stage auto": ("ds", {"zero_optimization": {"stage": "auto"}}, ["zero_optimization.stage", '"auto"']),
    "a bucket": ("ds", {"zero_optimization": {"stage3_max_live_parameters": "3"}}, ["stage3_max_live", '"3"']),
    "a key of ZeRO": ("ds", {"zero_optimization": {"stages": 3}}, ["ds.json", '"zero_optimization.stages": 3']),
    "an optimizer": ("ds", {"optimizer": 3}, ["ds.json", '"optimizer": 3']),
    "heads 0": ("config", {"num_attention_heads": 0}, ["config.json", "num_attention_heads", "0"]),
    'heads "32"': ("config", {"num_attention_heads": "32"}, ["config.json", "num_attention_heads", '"32"']),
    "layers 0": ("config", {"num_hidden_layers": 0}, ["config.json", "num_hidden_layers", "got 0"]),
    "hidden_size null": ("config", {"hidden_size": None}, ["config.json", "hidden_size", "null"]),
    "vocab_size -1": ("config", {"vocab_size": -1}, ["config.json", "vocab_size", "-1"]),
    "head_dim 0": ("config", {"head_dim": 0}, ["config.json", "head_dim", "0"]),
    "hidden_act": ("config", {"hidden_act": "nothing"}, ["config.json", '"hidden_act": "nothing"']),
    "dtype": ("config", {"dtype": "nothing"}, ["config.json", '"dtype": "nothing"']),
    "rope_scaling": ("config", {"rope_scaling": {"rope_type": "x"}}, ["config.json", '"rope_scaling.rope_type": "x"']),
    "model_type": ("config", {"model_type": "lama"}, ["config.json", "model_type", "did you mean 'llama'"]),
    "a rate": ("machine", {"memory": 10**400}, ["machine.json", "1000"]),
    "a rate near 0": ("machine", {"memory": 5e-324}, ["machine.json", "memory", "5e-324"]),
    "a machine's text": ("machine", {"about": 3}, ["machine.json", "about", "got 3"]),
}  # fmt: skip


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Writes the files and runs a command on them; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    contents = {"config": LLAMA, "ds": ZERO, "machine": presets()["h100-ib"]}

    def run(name, *words, **changed):
        for file, content in contents.items():
            text = changed.get(file, {})
            text = text if isinstance(text, str) else json.dumps({**copy.deepcopy(content), **text})
            (tmp_path / f"{file}.json").write_text(text, encoding="utf-8")
        own = {"memory": ["--ranks", "4"], "plan": ["--gpus-per-node", "2", "--machine", "machine.json"]}[name]
        code = main([name, "--model", ".", "--seq-len", "512", "--config", "ds.json", *own, *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_value_is_refused_by_its_name(command, name):
    file, changed, words = COMMANDS[name]
    code, _, err = command("plan" if file == "machine" else "memory", **{file: changed})
    assert (code, err.count("\n")) == (2, 1), err
    assert [word for word in words if word not in err] == [], err


@pytest.mark.parametrize("file", ["config", "ds", "machine"])
def test_a_deep_file_is_refused(command, file):
    code, _, err = command("plan", **{file: f'{{"a": {DEEP}}}'})
    assert (code, err.count("\n")) == (2, 1)
    assert f"{file}.json" in err


WORDS = {
    "memory": [["--ranks", "7" * 400], ["--seq-len", "7" * 5000], ["--set", f"size={'7' * 5000}"],
               ["--set", f"size={DEEP}"], ["--set", "zero_optimization.stage.x=1"]],
    "plan": [["--memory", "1e308"], ["--memory", "1e-400"], ["--window", "7" * 400], ["--documents", "huge"]],
}  # fmt: skip


@pytest.mark.parametrize(("name", "words"), [(name, words) for name in WORDS for words in WORDS[name]],
                         ids=lambda value: str(value)[:30])  # fmt: skip
def test_a_wrong_argument_is_refused_by_its_name(command, tmp_path, name, words):
    (tmp_path / "huge").write_text("7" * 5000)
    code, _, err = command(name, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert words[0] in err
    assert len(err) < 400


@pytest.mark.parametrize("option", ["--seq", "--heads", "--program"])
def test_numbers_of_more_than_64_bits_are_refused(capsys, option):
    assert main(["show", option, *["7" * 400] * (1 + (option == "--heads"))]) == 2
    assert f"{option} must be" in capsys.readouterr().err


AUTO = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}  # fmt: skip


@pytest.mark.parametrize("name", ["memory", "plan"])
def test_what_auto_counts_as_is_said(command, name):
    code, out, err = command(name, ds=AUTO)
    assert (code, err) == (0, "")
    assert "train_micro_batch_size_per_gpu 1, bf16.enabled true, fp16.enabled false" in out
    code, out, _ = command(name, "--json", ds=AUTO)
    found = json.loads(out)["auto"]
    assert found["zero_optimization.reduce_bucket_size"] == LLAMA["hidden_size"] ** 2  # as the Trainer has it
    assert code == 0


def test_the_older_name_of_bf16_counts(command):
    peaks = [json.loads(command("memory", "--json", ds={"bf16": {}, name: {"enabled": True}})[1])["peak"]["total"]
             for name in ("bf16", "fp16")]  # fmt: skip
    content = {key: value for key, value in ZERO.items() if key != "bf16"} | {"bfloat16": {"enabled": True}}
    older = json.loads(command("memory", "--json", ds=json.dumps(content))[1])["peak"]["total"]
    assert older == peaks[0]


def test_a_degree_of_ulysses_leaves_out_sizes_that_it_does_not_divide(command):
    code, out, _ = command("plan", "--json", "--nodes", "3", "--seq-len", "1536", "--set", "ulysses=2")
    assert code == 0
    assert {one["section"]["size"] % 2 for one in json.loads(out)["ranked"]} == {0}


def test_one_token_on_four_ranks_has_a_slope(command):
    code, out, _ = command("memory", "--json", "--seq-len", "1", "--no-checkpointing")
    assert code == 0
    assert json.loads(out)["bytes_a_token"] >= 0


def test_initialize_and_the_trainer_refuse_what_deepspeed_does():
    with pytest.raises(ConfigError, match=r'run\.json.*"zero_optimization\.stage": 9'):
        DeepSpeedJson.read({**ZERO, "zero_optimization": {"stage": 9}}, "run.json").check()
    DeepSpeedJson.read({**ZERO, "sequence_parallel": {"size": 2}}).check()

"""`python -m ds_seqpar memory`: what it counts, prints and draws, and its answer to what does not fit."""

import json
import re

import pytest

from ds_seqpar import models
from ds_seqpar.cli.memory import SHADES
from ds_seqpar.cli.numbers import PLAIN, numbers_of, plain_model
from ds_seqpar.planner.footprint import PARTS
from tests.unit.commands import LLAMA, assert_refused, run, with_options

ENDS, ATTENTION = 256 * 64, 64 * (8 + 2 + 2 + 8) * 8
# config -> (all parameters, those of a layer, the intermediates of a token, tied), by hand
COUNTED = {
    "llama": (LLAMA, ATTENTION + 3 * 64 * 96 + 2 * 64, 96, False),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, ATTENTION + 3 * 64 * 96 + 2 * 64, 96, True),
    "biases and norms of heads": (
        {**LLAMA, "model_type": "qwen3", "head_dim": 8, "attention_bias": True},
        ATTENTION + 3 * 64 * 96 + 2 * 64 + 2 * 8 + (8 + 2 + 2) * 8 + 64,
        96,
        False,
    ),
    "experts": (
        {
            **LLAMA, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
        ATTENTION + 4 * 3 * 64 * 32 + 4 * 64 + 2 * 64 + 2 * 8,
        2 * 32,
        False,
    ),
}  # fmt: skip


def _memory(capsys, place, *words):
    given = {"--model": place, "--seq-len": 512, "--ranks": 4}
    return run(capsys, "memory", *with_options(given, words))


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_counted_on_the_model_itself(tmp_path, name):
    config, layer, intermediate, tied = COUNTED[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = numbers_of(str(tmp_path))
    assert (found.layer_parameters, found.intermediate, found.tied) == (layer, intermediate, tied)
    assert found.parameters == 2 * layer + (1 if tied else 2) * ENDS + 64
    assert (found.layers, found.heads, found.kv_heads, found.head_dim) == (2, 8, 2, 8)


@pytest.mark.parametrize("more", [{}, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}], ids=["", "biases"])
@pytest.mark.parametrize("family", PLAIN)
def test_plain_models_are_counted_from_their_config_as_on_the_model_itself(tmp_path, family, more):
    config = {**LLAMA, "head_dim": 8, **more, "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert plain_model(config) == models.numbers_of(str(tmp_path))


@pytest.mark.parametrize(
    "odd",
    [{"model_type": "gemma2"}, {"hidden_size": None}, {"hidden_size": 65}, {"vocab_size": "256"},
     {"num_key_value_heads": 3}, {"attention_bias": 1}, {"quantization_config": {}}],
    ids=str,
)  # fmt: skip
def test_what_is_odd_in_a_config_is_left_to_transformers(odd):
    assert plain_model({**LLAMA, **odd}) is None


def test_parts_are_printed_with_the_moment_of_the_peak(capsys, place):
    out, err, code = _memory(capsys, place)
    assert (err, code) == ("", 0)
    assert out.startswith("512 tokens on 4 ranks, 4 to a sequence\n")
    shares = [float(x) for x in re.findall(r" (\d+\.\d)%  ", out)]
    assert shares.pop() == 100
    assert sum(shares) == pytest.approx(100, abs=0.6)
    assert re.search(r"^peak +\d+\.\d{3}  100.0%  \w+", out, re.MULTILINE)


def test_help_names_the_units_that_are_printed(capsys):
    """`plan` prints times too."""
    for command, units in (("memory", "JSON; sizes are in bytes"), ("plan", "JSON; times are in seconds, sizes")):
        with pytest.raises(SystemExit):
            run(capsys, command, "--help")
        assert units in " ".join(capsys.readouterr().out.split())


def test_numbers_for_programs_add_up(capsys, place):
    found = json.loads(_memory(capsys, place, "--json", None)[0])
    assert found["peak"] in found["moments"]
    assert found["peak"]["total"] == max(moment["total"] for moment in found["moments"])
    for moment in (found["resting"], *found["moments"]):
        assert moment["total"] == sum(moment["parts"].values())
        assert set(moment["parts"]) <= set(PARTS)


def test_settings_come_from_a_file_and_from_words(capsys, place, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}), encoding="utf-8")

    def parts(*words):
        return json.loads(_memory(capsys, place, "--json", None, "--config", file, *words)[0])["resting"]["parts"]

    assert parts()["buckets"] == 4000  # fp32, since the file does not say bf16
    assert "buckets" not in parts("--set", "zero_optimization.stage=2")
    tiled = json.loads(_memory(capsys, place, "--json", None, "--set", "loss_tiles=4")[0])
    whole = json.loads(_memory(capsys, place, "--json", None)[0])
    assert [4 * one["parts"]["loss"] for one in tiled["moments"] if one["moment"] == "forward: loss"] == [
        one["parts"]["loss"] for one in whole["moments"] if one["moment"] == "backward: loss"
    ]


def test_what_leaves_for_the_host_is_said_with_what_a_node_needs(capsys, place):
    away = "--set", 'zero_optimization.offload_optimizer={"device": "cpu"}'
    out = _memory(capsys, place, *away, "--machine", "h100-ib")[0]
    assert re.search(r"^optimiser +\d+\.\d{3} +\d+\.\d%  its states$", out, re.MULTILINE)
    assert re.search(r"^the host of a node's 4 ranks needs \d+\.\d GiB of 1862.6$", out, re.MULTILINE)
    assert "this fits; the longest sequence that does has" in out
    found = json.loads(_memory(capsys, place, *away, "--machine", "h100-ib", "--memory", 1, "--json", None)[0])
    own = numbers_of(str(place)).parameters // 4
    assert found["host"]["parts"]["optimiser"] == 8 * own
    assert found["room"]["limit"] == 2**30
    assert found["room"]["longest"]["full"] == "rank"


def test_a_picture_is_drawn(capsys, place, tmp_path):
    pixels = pytest.importorskip("matplotlib.image")
    file = tmp_path / "memory.png"
    out, _, code = _memory(capsys, place, "--png", file)
    assert code == 0
    assert f"wrote {file}\n" in out
    seen = pixels.imread(file)[..., :3]
    buckets = [int(SHADES[list(PARTS).index("buckets")][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (abs(seen - buckets) < 0.01).all(axis=-1).mean() > 0.02


REFUSED = [
    (["--seq-len", "many"], ("--seq-len", "got 'many'")),
    (["--ranks", 0], ("--ranks", "got '0'")),
    (["--model", "/nowhere"], ("--model", "no /nowhere")),
    (["--model", "x" * 300], ("--model", "no xxx")),
    (["--model", __file__], ("--model", __file__)),
    (["--config", "/nowhere.json"], ("/nowhere.json", "No such file")),
    (["--set", "ulysses"], ("--set", "KEY=VALUE", "got 'ulysses'")),
    (["--set", "ulises=2"], ("--set", "got 'ulises'", "'ulysses'")),
    (["--set", "zero_optimization.reduce_bucket_size=big"], ("reduce_bucket_size", "big")),
    (["--set", "ulysses=3"], ("ulysses 3", "size 4", "[1, 2, 4]")),
    (["--set", "head_stages=4"], ("head_stages", "got 4", "at most")),
    (["--ranks", 16, "--set", "ulysses=16"], ("ulysses 16", "8 query")),
    (["--machine", "h1000"], ("h1000", "h100-ib")),
    (["--set", "memory=auto"], ("memory", "plan --machine", "loss_tiles")),
    (["--memory", 80], ("--memory", "--machine")),
    (["--set", "zero_optimization.offload_optimizer.device=gpu"], ("offload_optimizer.device", "gpu")),
    (["--set", "zero_optimization.offload_optimizer.super_offload=true"], ("super_offload", "leave it out")),
    (["--png", "missing/memory.png"], ("missing/memory.png", "No such file")),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_is_answered_with_one_sentence(capsys, place, words, said):
    assert_refused(_memory(capsys, place, *words), *said)

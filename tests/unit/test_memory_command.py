"""`python -m ds_seqpar memory`: what it counts, prints and draws, and its answer to what does not fit."""

import dataclasses
import json
import re

import pytest

from ds_seqpar.cli.memory import LIMIT, SHADES
from ds_seqpar.models import numbers_of
from ds_seqpar.planner.footprint import FOOTPRINT_ITEMS
from tests.unit.commands import LLAMA, assert_has, assert_refused, golden, run, with_options
from tests.words import missing

# name -> {"model": changes of LLAMA, "words": of the command, "json": a DeepSpeed JSON that it reads, "numbers": some
# of the model's, "found": some of what --json prints, "by hand": how a hand computes them}
GOLDEN = golden("memory")
EXACT = ("parts", "auto", "sequence_parallel")


def _memory(capsys, place, *words):
    given = {"--model": place, "--seq-len": 512, "--ranks": 4}
    return run(capsys, "memory", *with_options(given, words))


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_are_those_of_the_golden_file(capsys, tmp_path, name):
    case = GOLDEN[name]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **case.get("model", {})}), encoding="utf-8")
    (tmp_path / "ds.json").write_text(json.dumps(case.get("json")), encoding="utf-8")
    numbers = dataclasses.asdict(numbers_of(str(tmp_path)))
    assert_has(numbers, case.get("numbers", {}))
    if "found" in case:
        words = [*case["words"], *(["--config", tmp_path / "ds.json"] if "json" in case else [])]
        out, err, code = run(capsys, "memory", "--model", tmp_path, "--ranks", 4, "--json", *words)
        assert (err, code) == ("", 0)
        found = json.loads(out)
        found["moments"] = {moment["moment"]: moment for moment in found["moments"]}
        found["names"] = sorted(found["moments"])
        found["with a cache"] = [name for name in found["names"] if found["moments"][name]["parts"].get("cache")]
        assert_has(found, case["found"], EXACT)


def test_parts_are_printed_with_the_moment_of_the_peak(capsys, place):
    out, err, code = _memory(capsys, place)
    assert (err, code) == ("", 0)
    assert out.startswith("512 tokens on 4 ranks, 4 to a sequence\n")
    shares = [float(x) for x in re.findall(r" (\d+\.\d)%  ", out)]
    assert shares.pop() == 100
    assert sum(shares) == pytest.approx(100, abs=0.6)
    assert re.search(r"^peak +\d+\.\d{3}  100.0%  \w+", out, re.MULTILINE)


def test_images_are_said_with_the_towers_share_of_a_step(capsys, tmp_path):
    vision = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    config = {
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"model_type": "siglip_vision_model", **vision},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "image_seq_length": 16}), encoding="utf-8")
    out = _memory(capsys, tmp_path, "--images", 8, "--machine", "h100-ib")[0]
    said = "8 of 16 tokens and 16 patches are 25.0% of a sequence, and a rank computes 2 of 8", "time divided,"
    assert missing(out, *said, "forward: tower", "backward: tower") == []
    assert "no images are counted" in _memory(capsys, tmp_path)[0]
    assert "a rank computes 8" in _memory(capsys, tmp_path, "--images", 8, "--set", "divide_media=false")[0]
    assert_refused(_memory(capsys, tmp_path, "--images", 33), "512 tokens", "33 of 16")
    assert_refused(_memory(capsys, tmp_path, "--image-tokens", 4), "no --images")


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
        assert set(moment["parts"]) <= set(FOOTPRINT_ITEMS)


def test_what_leaves_for_the_host_is_said_with_what_a_node_needs(capsys, place):
    away = "--set", 'zero_optimization.offload_optimizer={"device": "cpu"}'
    out = _memory(capsys, place, *away, "--machine", "h100-ib")[0]
    assert re.search(r"^optimizer +\d+\.\d{3} +\d+\.\d%  its states$", out, re.MULTILINE)
    assert re.search(r"^the host of a node's 4 ranks needs \d+\.\d GiB of 1862.6$", out, re.MULTILINE)
    assert "this fits; the longest sequence that does has" in out


def test_a_figure_is_drawn(capsys, place, tmp_path):
    pixels = pytest.importorskip("matplotlib.image")
    file = tmp_path / "memory.png"
    out, _, code = _memory(capsys, place, "--png", file)
    assert code == 0
    assert f"wrote {file}\n" in out

    def share(color):
        wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return (abs(pixels.imread(file)[..., :3] - wanted) < 0.01).all(axis=-1).mean()

    buckets = SHADES[list(FOOTPRINT_ITEMS).index("buckets")]
    assert share(buckets) > 0.02
    assert share(LIMIT) == 0
    for memory, is_drawn in ((0.002, True), (80, False)):  # far more than is needed would leave nothing of the bars
        assert _memory(capsys, place, "--png", file, "--machine", "h100-ib", "--memory", memory)[2] == 0
        assert share(buckets) > 0.02
        assert (share(LIMIT) > 0) == is_drawn


def test_memory_auto_is_what_ranks_would_choose(capsys, place, tmp_path):
    (file := tmp_path / "ds.json").write_text(
        json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}})
    )
    words = ["--config", file, "--machine", "h100-ib", "--set", "memory=auto", "--memory", 0.005]
    out, err, code = _memory(capsys, place, *words, "--seq-len", 8192)
    assert (err, code) == ("", 0)
    assert missing(out, 'sequence_parallel: "auto" for 8192 tokens on 4 ranks', '"loss_tiles": "auto"', "assumed") == []
    found = json.loads(_memory(capsys, place, *words, "--seq-len", 8192, "--json", None)[0])
    section = found["deepspeed_json"]["sequence_parallel"]
    spelled = [word for name, value in section.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    given = ["memory", "--model", place, "--seq-len", 8192, "--ranks", 4, "--json", "--config", file, *spelled]
    assert json.loads(run(capsys, *given)[0])["peak"] == found["peak"]
    assert (
        found["room"]["limit"]
        < json.loads(_memory(capsys, place, "--seq-len", 8192, "--json", None)[0])["peak"]["total"]
    )


def test_a_section_that_asks_for_a_plan_is_planned_where_a_machine_is_known(capsys, place):
    """Ranks would plan; what is counted is theirs."""
    words = ["--seq-len", 8192, "--set", "seq_len=8192"]
    assert "say --machine to plan" in _memory(capsys, place, *words)[0]
    out = _memory(capsys, place, *words, "--machine", "h100-ib")[0]
    assert 'sequence_parallel: "auto" for 8192 tokens' in out
    assert "say --machine" not in out


def test_completions_share_a_prompt_and_generate_before_they_train(capsys, place):
    words = ["--trainer", "grpo", "--seq-len", 9216, "--prompt", 8192, "--completions", 8]
    out, err, code = _memory(capsys, place, *words)
    assert (err, code) == ("", 0)
    assert missing(out, "16383 tokens on 4 ranks", "22.2% of 73,728 tokens", "_train_batch_size 8") == []


def test_what_does_not_fit_has_a_next_step_and_nothing_to_paste(capsys, place, tmp_path):
    zero = {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}), encoding="utf-8")
    words = ["--machine", "h100-ib", "--seq-len", 8192, "--config", file]
    for memory, steps in ((0.007, ["loss_tiles auto", "memory=auto"]), (0.0013, ["16 ranks", "1024 tokens"])):
        out, err, code = _memory(capsys, place, *words, "--memory", memory)
        assert (err, code) == ("", 0)
        assert missing(out, "this does not fit", "next: ", *steps) == []
        assert "ds_config.json" not in out
        assert json.loads(_memory(capsys, place, *words, "--memory", memory, "--json", None)[0])["room"]["next"] in out
    out = _memory(capsys, place, *words)[0]
    assert missing(out, "this fits", "ds_config.json") == []
    assert "next: " not in out


def test_ulysses_stays_in_a_node(capsys, place):
    """Its 8 heads would go over two nodes of 4."""
    for words in (["--machine", "h100-ib", "--gpus-per-node", 4], ["--gpus-per-node", 4]):
        out = _memory(capsys, place, "--ranks", 8, *words)[0]
        assert missing(out, "Ulysses 4 stays in a node", '"size": 8, "ulysses": 4') == []
    assert '"ulysses": 8' in _memory(capsys, place, "--ranks", 8, *words, "--set", "ulysses=8")[0]  # as it is said
    assert '"ulysses": 8' in _memory(capsys, place, "--ranks", 8)[0]

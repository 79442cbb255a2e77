"""Scripts that train with the Trainer: ours in all ways it is started, and a plain one with the documented change."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from tests import scripts
from tests.hf.llama import llama
from tests.hf.trainers import settings
from tests.scripts import EXAMPLE, ROOT, save_texts, set_by_accelerate
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
PLAIN = (Path(__file__).parent / "plain_trainer.py").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "trainer.md").read_text(), re.S)


def added(diff):
    """The line a diff adds."""
    (line,) = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    return line


def moved_over(script):
    """The plain script with the documented line after its last import."""
    last = [line for line in script.splitlines() if line.startswith(("from ", "import "))][-1]
    assert "Trainer, TrainingArguments" in last
    return script.replace(last, f"{last}\n{added(DIFFS[0])}")


def save_model(folder):
    llama(vocab_size=384).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)


def test_two_lines_turn_a_plain_script_into_a_sequence_parallel_one(tmp_path):
    """A plain rank beside two that share its sequences: the same numbers."""
    model = tmp_path / "model"
    save_model(model)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(Path(re.__file__).read_text().splitlines()[:300]))
    plain_json = json.dumps(settings(None, 3), indent=2)
    changed_json = plain_json.replace("{", "{\n" + added(DIFFS[1]), 1)
    assert json.loads(changed_json) == {**json.loads(plain_json), "sequence_parallel": {"size": 2}}
    logs = {}
    for name, script, content, ranks in (
        ("plain", PLAIN, plain_json, 1),
        ("changed", moved_over(PLAIN), changed_json, 2),
    ):
        (tmp_path / f"{name}.py").write_text(script)
        (tmp_path / f"{name}.json").write_text(content)
        arguments = text, model, tmp_path / f"{name}.json", tmp_path / name
        ran = scripts.run(ranks, tmp_path, tmp_path / f"{name}.py", *arguments)
        assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-3000:]
        logs[name] = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
    for figure, rel in (("loss", 1e-4), ("grad_norm", 1e-4), ("eval_loss", 1e-4), ("learning_rate", 0)):
        plain, changed = ([entry[figure] for entry in logs[name] if figure in entry] for name in ("plain", "changed"))
        assert len(plain) >= 1
        assert changed == pytest.approx(plain, rel=rel), figure
    assert logs["changed"][0].keys() == logs["plain"][0].keys()


STEPS = 2


def run(launcher, ranks, config, folder, *more):
    """Runs the example by the launcher, or on forked ranks as it is by the launcher of DeepSpeed or of accelerate."""
    words = ["--output_dir", folder / "out", "--seq_len", 200, "--documents", 12, "--eval_documents", 3]
    words += ["--max_steps", STEPS, "--logging_steps", 1, *more]
    options = "--use_deepspeed", "--deepspeed_config_file", str(config)
    if launcher == "accelerate":
        return scripts.launch(launcher, ranks, folder, *options, EXAMPLE, *words)
    if launcher == "as by accelerate":
        return scripts.run(ranks, folder, EXAMPLE, *words, environment=set_by_accelerate(ranks, *options))
    words += ["--deepspeed", config]
    if launcher == "deepspeed":
        return scripts.launch(launcher, ranks, folder, EXAMPLE, *words)
    return scripts.run(ranks, folder, EXAMPLE, "--local_rank=LOCAL_RANK", *words)


CHECKPOINTED = ["--gradient_checkpointing", "True"]
LORA = ["--lora", "--bf16", "True", *CHECKPOINTED]


# forked ranks go through what a launched process does; both launchers are tried for themselves among the whole, and
# DeepSpeed's in the cover too, by test_readme.py
@pytest.mark.parametrize(
    ("launcher", "ranks", "config", "more"),
    [
        ("forked", 2, "zero2_sp2_dp", ["--model", *CHECKPOINTED]),
        pytest.param("forked", 4, "zero3_sp4_long", ["--model", *CHECKPOINTED], marks=pytest.mark.slow),
        pytest.param("forked", 4, "zero3_sp4_long_offload", CHECKPOINTED, marks=pytest.mark.slow),
        pytest.param("forked", 4, "zero2_sp2_dp", ["--lora"], marks=pytest.mark.slow),
        ("as by accelerate", 2, "zero2_sp2_dp", LORA),
        pytest.param("accelerate", 2, "zero2_sp2_dp", LORA, marks=pytest.mark.slow),
        pytest.param("accelerate", 4, "zero3_sp4", ["--model"], marks=pytest.mark.slow),
        pytest.param("deepspeed", 4, "zero3_sp4", ["--model"], marks=pytest.mark.slow),
        pytest.param("forked", 4, "zero3_sp4", [], marks=pytest.mark.slow),
    ],
)
def test_the_example_trains_evaluates_and_saves(launcher, ranks, config, more, tmp_path, request):
    """--model: a folder that every rank reads its part of, before the Trainer exists."""
    if config.endswith("offload"):
        request.getfixturevalue("compiled_adam")
    if "--model" in more:
        save_model(tmp_path / "model")
        more = ["--model", str(tmp_path / "model"), *more[1:]]
    save_texts(tmp_path / "texts")
    more = [*more, "--data", str(tmp_path / "texts")]
    ran = run(launcher, ranks, ROOT / "ds_configs" / f"{config}.json", tmp_path, *more)
    assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-3000:]
    assert re.search(r"held-out loss \d\.\d{3}, perplexity \d+\.\d", ran.stdout), ran.stdout[-2000:]
    state = json.loads((tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == STEPS
    reported = {name: float(x) for name, x in re.findall(r"'(\w+)': '?([\d.]+)", ran.stdout)}
    assert reported["tokens_per_second"] > 0
    assert reported["memory_gib"] > 0.1
    assert reported["sp_size"] * reported["data_groups"] == ranks
    if "--lora" in more:
        assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    else:
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
        assert losses[-1] < losses[0]


def test_the_example_with_images_trains_and_counts(tmp_path):
    words = ["--deepspeed", ROOT / "ds_configs" / "zero2_sp2_dp.json", "--output_dir", tmp_path]
    words += ["--max_steps", STEPS, "--per_device_train_batch_size", 2]
    ran = scripts.run(2, tmp_path, ROOT / "examples" / "count_shapes.py", *words)
    assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-3000:]
    assert re.search(r"\d+% of 48 held-out images are counted right", ran.stdout), ran.stdout[-2000:]
    assert (tmp_path / "loss.png").is_file()
    assert (tmp_path / "sample.png").is_file()


def started_by_accelerate_alone(launcher, folder):
    words = ["--output_dir", folder, "--documents", 1, "--eval_documents", 1]  # of Python's own
    if launcher == "accelerate":
        return scripts.launch(launcher, 2, folder, "--cpu", EXAMPLE, *words)
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return scripts.run(1, folder, EXAMPLE, *words, environment={**alone, "ACCELERATE_MIXED_PRECISION": "no"})


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["forked", "accelerate"])
def test_accelerate_launch_without_deepspeed_is_told_what_is_missing(launcher, tmp_path):
    ran = started_by_accelerate_alone(launcher, tmp_path)
    assert ran.failed
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("rank 0: ")]
    assert missing(said, "--use_deepspeed", "--num_processes") == []


@pytest.mark.parametrize("launcher", ["forked", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_bad_settings_end_the_example_with_a_sentence(launcher, tmp_path):
    content = json.loads((ROOT / "ds_configs" / "zero3_sp4.json").read_text())
    content["sequence_parallel"]["size"] = 3
    (tmp_path / "ds.json").write_text(json.dumps(content))
    save_texts(tmp_path / "texts")
    ran = run(launcher, 2, tmp_path / "ds.json", tmp_path, "--data", tmp_path / "texts")
    assert ran.failed
    assert "size 3 on 2 ranks" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr

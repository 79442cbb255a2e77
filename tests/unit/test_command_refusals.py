"""What commands cannot take is answered with one sentence that has the wrong value: one table of all.

Settings by themselves: test_config.py. What would cost too much: test_limits.py. To add a row: a command, words that
change those of GIVEN ("-" leaves an option out), and the value.
"""

import json

import pytest

from tests.unit.commands import assert_refused, run, with_options

GIVEN = {
    "show": {},
    "plan": {"--model": "{place}", "--seq-len": 16384, "--gpus-per-node": 4, "--machine": "h100-ib"},
    "memory": {"--model": "{place}", "--seq-len": 512, "--ranks": 4},
}
OFFLOAD = "zero_optimization.offload_optimizer"
# (command, words, what the sentence has)
REFUSED = [
    ("show", ["--ulysses", 3], "ulysses 3"),
    ("show", ["--schedule", "distflash", "--full", None], "causal"),
    ("show", ["--png", "missing/plan.png"], "missing/plan.png"),
    ("show", ["--png", "plan.nonsense"], "plan.nonsense"),
    ("show", ["--trace", "missing/trace.json"], "missing/trace.json"),
    ("show", ["--rotate-forward", "v"], "got 'v'"),
    ("show", ["--comm-dtype", "fp8"], "got 'fp8'"),
    ("plan", ["--seq-len", "many"], "got 'many'"),
    ("plan", ["--seq-len", "-"], "--documents"),
    ("plan", ["--seq-len", "1.5M"], "got '1.5M'"),
    ("plan", ["--seq-len", f"{2**21}M"], "at most"),
    ("plan", ["--ranks", 4, "--nodes", 1], "--nodes"),
    ("plan", ["--nodes", 0], "got '0'"),
    ("plan", ["--memory", "none"], "got 'none'"),
    ("plan", ["--memory", "0.001"], "GiB"),
    ("plan", ["--memory", 80, "--machine", "-"], "--machine"),
    ("plan", ["--machine", "h100"], "got 'h100'"),
    ("plan", ["--documents", "/nowhere"], "/nowhere"),
    ("plan", ["--documents", __file__], "lengths"),
    ("plan", ["--set", "size=3"], "size 3"),
    ("plan", ["--set", "zero_optimization.stage=auto"], "zero_optimization.stage"),
    ("plan", ["--seq-len", 16385, "--set", "size=4"], "multiple of 8"),
    ("memory", ["--completions", 2], "--trainer"),
    ("memory", ["--trainer", "grpo"], "got none"),
    ("memory", ["--trainer", "grpo", "--prompt", 512], "got 512"),
    ("memory", ["--trainer", "dpo", "--prompt", 64, "--completions", 3], "got 3"),
    ("memory", ["--trainer", "reward", "--prompt", 64, "--completions", 2], "got reward"),
    ("memory", ["--prompt", "many"], "'many'"),
    ("memory", ["--lora", "all"], "got 'all'"),
    ("memory", ["--seq-len", "many"], "got 'many'"),
    ("memory", ["--ranks", 0], "got '0'"),
    ("memory", ["--model", "/nowhere"], "no /nowhere"),
    ("memory", ["--model", "x" * 300], "no xxx"),
    ("memory", ["--model", __file__], __file__),
    ("memory", ["--config", "/nowhere.json"], "/nowhere.json"),
    ("memory", ["--set", "ulysses"], "got 'ulysses'"),
    ("memory", ["--set", "ulises=2"], "got 'ulises'"),
    ("memory", ["--set", "zero_optimization.reduce_bucket_size=big"], "big"),
    ("memory", ["--set", "head_chunks=4"], "got 4"),
    ("memory", ["--ranks", 16, "--set", "ulysses=16"], "8 query"),
    ("memory", ["--machine", "h1000"], "h1000"),
    ("memory", ["--set", "memory=auto"], "say --machine"),
    ("memory", ["--seq-len", "-"], "--seq-len"),
    ("memory", ["--ranks", "-"], "--gpus-per-node"),
    ("memory", ["--ranks", "-", "--nodes", 2**18, "--gpus-per-node", 8], "got 2097152"),
    ("memory", ["--memory", 80], "--machine"),
    ("memory", ["--set", f"{OFFLOAD}.device=gpu"], "gpu"),
    ("memory", ["--set", f"{OFFLOAD}.super_offload=true"], "super_offload"),
    ("memory", ["--png", "missing/memory.png"], "missing/memory.png"),
]


@pytest.mark.parametrize(("command", "words", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_command_cannot_take_is_answered_with_one_sentence(capsys, place, command, words, value):
    given = {name: place if x == "{place}" else x for name, x in GIVEN[command].items()}
    ran = run(capsys, command, *with_options(given, words))
    assert ran[0] == "" or words[0] in ("--png", "--trace")  # which are written after the table is printed
    assert_refused(ran, value)


# what a JSON leaves "auto" as a whole, or though no Trainer computes it -> what the sentence has
AUTO = [
    ({"zero_optimization": "auto"}, '"zero_optimization"'),
    ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": "auto"}}, "offload_optimizer"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}}, "offload_param.device"),
    ({"bf16": "auto"}, '"bf16"'),
    ({"fp16": "auto"}, '"fp16"'),
    ({"optimizer": "auto"}, '"optimizer"'),
    ({"optimizer": {"type": "AdamW", "params": "auto"}}, '"optimizer.params"'),
    ({"scheduler": {"type": "WarmupLR", "params": "auto"}}, '"scheduler.params"'),
    ({"sequence_parallel": "auto"}, "sequence_parallel"),
]


@pytest.mark.parametrize(("content", "value"), AUTO, ids=str)
def test_what_no_trainer_fills_in_is_named(capsys, place, tmp_path, content, value):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    words = "memory", "--model", place, "--seq-len", 512, "--ranks", 4, "--config", file
    assert_refused(run(capsys, *words), "auto", value)

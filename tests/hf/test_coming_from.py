"""Scripts and files for DeepSpeed's Ulysses by accelerate train here, changed as docs/get_started.md shows."""

import contextlib
import functools
import json
import os
import re
from pathlib import Path

import pytest
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig
from torch.utils.data import DataLoader

import ds_seqpar
from ds_seqpar.base.errors import ConfigError
from hf_integration import SequenceParallelTrainer
from hf_integration.accelerate_config import joined
from tests import scripts
from tests.dist.ranks import refusal
from tests.hf import trainers
from tests.hf.llama import MODES, norm, one_process, ragged, settings, small
from tests.hf.test_whole_loops import MODEL
from tests.launch import on_engine_ranks as on_ranks
from tests.launch import on_trainer_ranks
from tests.scripts import set_by_accelerate
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
DOCS = (Path(__file__).parents[2] / "docs" / "get_started.md").read_text(encoding="utf-8")
ULYSSES = """
import json
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
args = TrainingArguments(
    "out",
    deepspeed="ds.json",
    parallelism_config=ParallelismConfig(
        sp_size=2,
        sp_backend="deepspeed",
        dp_shard_size=1,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
    ),
    per_device_train_batch_size=2,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
MODEL
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (16, 50))]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    sp = getattr(trainer, "sp", None)
    losses = [[x["loss"], x["grad_norm"]] for x in trainer.state.log_history if "loss" in x]
    print(json.dumps([[losses, sp and [sp.size, sp.config.ulysses]]]))
""".replace("MODEL", MODEL)
IMPORT = "from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed\n"
OURS = "from hf_integration import SequenceParallelTrainer as Trainer\n"
JSON = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "steps_per_print": 2**30,
}
YAML = re.search(r"```yaml\n(.*?)```", DOCS, re.S)[1]


def printed(ran):
    assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-3000:]
    (line,) = re.findall(r"^\[\[.*\]\]$", ran.stdout, re.M)
    return json.loads(line)[0]


def without_config(script):
    """The script that leaves the ParallelismConfig, and the JSON, to accelerate's YAML."""
    return re.sub(r'    deepspeed="ds.json",\n    parallelism_config=.*?\n    \),\n', "", script, flags=re.S)


def changed(script):
    """By the line of the docs."""
    assert f"+{OURS}" in DOCS
    return script.replace(IMPORT, IMPORT + OURS)


@pytest.mark.parametrize("launcher", ["forked", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_ulysses_by_accelerate_is_read_from_a_script_and_from_a_yaml(launcher, tmp_path):
    """The plain script alone, without a ParallelismConfig; changed by its Trainer's class on 2 ranks; without one, as
    accelerate's launcher starts it with a YAML that says it."""
    (tmp_path / "ds.json").write_text(json.dumps(JSON))
    (tmp_path / "accelerate.yaml").write_text(f"{YAML}machine_rank: 0\nuse_cpu: true\n")
    plain = re.sub(r"    parallelism_config=.*?\n    \),\n", "", ULYSSES, flags=re.S)
    texts = {"plain.py": plain, "script.py": changed(ULYSSES), "by_yaml.py": changed(without_config(ULYSSES))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    expected, _ = printed(scripts.run(1, tmp_path, tmp_path / "plain.py"))
    assert len(expected) == 3
    options = "--config_file", str(tmp_path / "accelerate.yaml")
    if launcher == "accelerate":
        ran = [scripts.launch(launcher, 2, tmp_path, *options, tmp_path / "by_yaml.py", threads=1)]
    else:
        environment = set_by_accelerate(2, *options)
        ran = [
            scripts.run(2, tmp_path, tmp_path / "script.py"),
            scripts.run(2, tmp_path, tmp_path / "by_yaml.py", environment=environment),
        ]
    for losses, shape in map(printed, ran):
        assert shape == [2, 2]
        for its, plain_one in zip(losses, expected, strict=True):
            assert its == pytest.approx(plain_one, rel=1e-5)


def of_accelerator(model, args, fields=None, **parts):
    """A Trainer in a script that makes its Accelerator, with a JSON and a ParallelismConfig: of these fields, or
    the launcher's."""
    os.environ |= {"ACCELERATE_USE_PARALLELISM_CONFIG": str(fields is None), "PARALLELISM_CONFIG_SP_SIZE": "2"}
    plugin = DeepSpeedPlugin(hf_ds_config=trainers.settings({"size": "auto" if fields is None else 2}, 2))
    Accelerator(deepspeed_plugin=plugin, parallelism_config=fields and config(**fields))
    return SequenceParallelTrainer(model, args, **parts)


# who says that two ranks share a sequence -> the fields of the script's ParallelismConfig
GIVEN = {"script": {"sp_size": 2, "dp_shard_size": 2}, "launcher": None}
UNFIT = {"size": {"sp_size": 4}, "context parallel": {"sp_size": 1, "cp_size": 2, "dp_shard_size": 2}}


def by_accelerators(folder):
    """(ranks a sequence, losses) by who says the first; what is said of other fields."""
    found = {}
    for name, fields in {**GIVEN, **UNFIT}.items():
        AcceleratorState._reset_state()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # as before the script's Accelerator
        kind = functools.partial(of_accelerator, fields=fields)
        if name in UNFIT:
            found[name] = refusal(trainers.make, folder, 2, kind=kind, deepspeed=None)[1]
            continue
        trainer = trainers.make(folder, 2, kind=kind, deepspeed=None, max_steps=2)
        found[name] = trainer.sp.size, trainers.trained(trainer)["loss"]
    return found


def test_the_parallelism_config_of_a_scripts_own_accelerator_is_read(tmp_path):
    expected = on_trainer_ranks(4, by_json, tmp_path)[0]
    for found in on_trainer_ranks(4, by_accelerators, tmp_path):
        assert found["script"] == found["launcher"] == (2, expected)
        assert missing(found["size"], "size", "got 2 there and 4") == []
        assert missing(found["context parallel"], "got cp_size 2", "sp_size=2") == []


def by_json(folder):
    return trainers.trained(trainers.make(folder, 2, {"size": 2}, max_steps=2))["loss"]


ALST = re.search(r"## ALST's own loop\n\n```diff\n(.*?)```", DOCS, re.S)[1]


def alst_loop(folder):
    """(loss, gradient norm) of a step of the loop that the docs leave of ALST's."""
    lines = [line[1:] for line in ALST.splitlines() if not line.startswith("-")]
    names = {"ds_seqpar": ds_seqpar, "model": small(), "loader": DataLoader(examples(), batch_size=2)}
    with contextlib.chdir(folder):
        exec("\n".join(lines), names)
    return names["sp"].mean_loss(names["loss"]), float(names["engine"].get_global_grad_norm())


def examples():
    rows = ragged(MODES["u2"], 1, 1, sequences=2)[0]
    return [{name: x[row] for name, x in rows.items()} for row in range(2)]


def test_alsts_own_loop(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(settings({"size": 2}, "2", 1, 2)))
    gradients, loss = one_process(small(), ragged(MODES["u2"], 1, 1, sequences=2))
    for found in on_ranks(2, alst_loop, tmp_path):
        assert found == pytest.approx((loss, norm(gradients)), rel=1e-5)


def config(**fields):
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=fields.pop("kernel", None))
    return ParallelismConfig(sp_backend="deepspeed", sp_handler=handler, **fields)


REFUSED = {
    "another size": ({"size": 4}, {"sp_size": 2}, ["size", "got 4 there and 2"]),
    "tensor parallel": ({}, {"sp_size": 2, "tp_size": 2, "dp_shard_size": 2}, ["got tp_size 2"]),
    "context parallel": ({}, {"cp_size": 2}, ["got cp_size 2", "sp_size=2"]),
    "data parallel": ({}, {"sp_size": 2, "dp_shard_size": 2}, ["8 / 2", "got 2"]),
    "a kernel of the hub": (
        {},
        {"sp_size": 2, "kernel": "kernels-community/flash-attn2"},
        ["sdpa, flash_attention_2", "flash-attn2", "sequence_parallel"],
    ),
}


def test_fields_are_mapped_or_refused_by_name():
    assert joined({"ulysses": 2, "size": "auto"}, config(sp_size=4, dp_shard_size=2), 8) == {"ulysses": 2, "size": 4}
    assert joined({"size": 2}, config(dp_shard_size=8), 8) == {"size": 2}
    assert joined({"size": 2}, None, 8) == {"size": 2}
    for name, kernel in (("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_3")):
        assert joined({}, config(sp_size=2, kernel=name), 8) == {"size": 2, "kernel": kernel}
    for name, (section, fields, words) in REFUSED.items():
        with pytest.raises(ConfigError) as refused:
            joined(section, config(**fields), 8)
        assert missing(str(refused.value), *words) == [], name

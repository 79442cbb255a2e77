"""What `plan` and `memory` print is whole: pasted, it trains as they say, in a loop and in the Trainer."""

import contextlib
import io
import json
import re

import pytest
import torch
import torch.distributed as dist
from transformers import HfArgumentParser, TrainingArguments

import ds_seqpar
from ds_seqpar.__main__ import main
from hf_integration import SequenceParallelTrainer
from tests.hf.llama import llama, small
from tests.hf.trainers import collate, documents
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
TRAINERS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}

AUTO = ("--set", "memory=auto", "--set", "size=2")
LOCAL = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
       "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
       "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}  # fmt: skip


def printed(folder, command, *words):
    """(the JSON that a command prints for a small LLaMA on 2 ranks, the flags of a Trainer beside it), by rank 0."""
    found = [None]
    if dist.get_rank() == 0:
        (folder / "model.json").write_text(json.dumps(llama().config.to_dict()), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            given = ["--model", str(folder / "model.json"), "--seq-len", "1K", "--ranks", "2", "--machine", "cpu"]
            assert main([command, *given, *words]) == 0
        content = re.search(r"^ds_config\.json:\n\n(\{\n.*?^\})$", out.getvalue(), re.MULTILINE | re.DOTALL)[1]
        flags = re.search(r"^with it a Trainer takes (.*)$", out.getvalue(), re.MULTILINE)[1]
        found = [(json.loads(content), flags.split())]
    dist.broadcast_object_list(found)
    return found[0]


@on_each_of(2, keep="trainer", timeout=200)
def test_what_is_printed_trains(tmp_path):
    sequences = []
    for words in (
        ("plan", "--sequences", "3", "--no-checkpointing"),  # two groups could not share them
        ("memory", "--config", str(deepspeed_file(tmp_path, LOCAL)), "--memory", "0.002", *AUTO),
    ):
        content, _ = printed(tmp_path, *words)
        model = llama()
        engine, *_ = ds_seqpar.initialize(model=model, model_parameters=list(model.parameters()), config=content)
        sp, steps, losses = engine.sequence_parallel, engine.gradient_accumulation_steps(), []
        assert sp.size == content["sequence_parallel"]["size"]
        sequences.append(steps * sp.data_size)
        ids = torch.randint(0, 64, (1, 1024), generator=torch.Generator().manual_seed(sp.data_rank))
        for batch in sp.shard_batches([{"input_ids": ids, "labels": ids}] * steps, device=engine.device):
            losses.append(engine(**batch).loss)
            engine.backward(losses[-1])
            engine.step()
        assert engine.global_steps == 1
        assert 4 < float(sp.mean_loss(losses)) < 4.5  # log 64 is 4.16
    assert sequences == [3, 2]
    assert content["sequence_parallel"].keys() & {"loss_tiles", "mlp_tiles", "head_chunks", "recompute_attention"}


@on_each_of(2, keep="trainer", timeout=200)
def test_what_is_printed_trains_in_the_trainer(tmp_path):
    """An "auto" of its JSON stays one."""
    content, flags = printed(tmp_path, "plan", "--set", "size=2", "--config", str(deepspeed_file(tmp_path, TRAINERS)))
    assert content["gradient_clipping"] == "auto"
    given = ["--output_dir", str(tmp_path), "--deepspeed", str(deepspeed_file(tmp_path, content)), "--use_cpu", "True",
             "--max_steps", "1", "--report_to", "none", *flags]  # fmt: skip
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(given)
    trainer = SequenceParallelTrainer(small(pad_token_id=0), args, train_dataset=documents(8), data_collator=collate)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.sp.size == 2


def deepspeed_file(folder, content):
    file = folder / f"ds{dist.get_rank()}.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file

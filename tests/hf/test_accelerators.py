"""An Accelerator counts groups of ranks once it is shared, and says so where it is not; so does DeepSpeed."""

import os
import sysconfig

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hf_integration import share_accelerator, share_sequences, whole_sequences
from tests.dist.ranks import lacking, refusal
from tests.fuzz.loops import faults
from tests.hf.llama import small
from tests.hf.test_log import Lines
from tests.hf.trainers import make, trained
from tests.launch import on_each_of, on_ranks, on_trainer_ranks
from tests.words import missing

# member -> its use, of an Accelerator and of an optimizer with a scheduler
COUNTS = {
    "a scheduler": lambda accelerator, both: accelerator.prepare(*both),
    "a scheduler, alone": lambda accelerator, both: accelerator.prepare_scheduler(both[1]),
    "gather": lambda accelerator, _: accelerator.gather(torch.ones(1)),
    "gather_for_metrics": lambda accelerator, _: accelerator.gather_for_metrics(["an object"]),
    "reduce": lambda accelerator, _: accelerator.reduce(torch.ones(1)),
    "split_between_processes": lambda accelerator, _: accelerator.split_between_processes([1, 2]),
    "num_processes": lambda accelerator, _: accelerator.num_processes,
    "LocalSGD's reduce": lambda accelerator, _: LocalSGD(accelerator, small(), 1)._sync_and_avg_model_params(),
}
# what no group can have -> its use, and words of the sentence
WRONG = {
    "a value of each rank": (
        lambda accelerator: accelerator.gather(torch.tensor(1.0 + dist.get_rank())),
        ("InputError", "accelerator.own.gather", "sp.mean_loss"),
    ),
    "a sum of parts": (
        lambda accelerator: accelerator.reduce({"x": torch.tensor([dist.get_rank(), 2])}),
        ("InputError", "accelerator.own.reduce"),
    ),
    "another shape": (
        lambda accelerator: accelerator.gather([torch.ones(1 + dist.get_rank())]),
        ("DisagreementError", "accelerator.gather", "rank 3: [0] '(4,)"),
    ),
}


# fields of a ParallelismConfig -> words of the sentence
OTHER_SIZES = (
    ({"sp_size": 4}, ("size", "got 2 there and 4")),
    ({"cp_size": 2}, ("got cp_size 2", "sp_size=2")),
    ({"dp_shard_size": 2}, ("sp_size", "leave it out")),
)


def fresh(**settings):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


def gathered_by_a_library(accelerator):
    text = "import torch\ndef gathered(accelerator):\n    return accelerator.gather(torch.ones(1)).tolist()"
    scope = {"__name__": "a_library.train"}
    exec(compile(text, os.path.join(sysconfig.get_path("purelib"), "a_library", "train.py"), "exec"), scope)
    return scope["gathered"](accelerator)


@on_each_of(4, keep="accelerate")
def test_what_counts_ranks_raises_until_the_accelerator_is_shared():
    accelerator, model, first = fresh(), small(), dist.get_rank() == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = optimizer, LambdaLR(optimizer, lambda step: 1 - step / 8)
    assert accelerator.gather(torch.ones(1)).tolist() == [1] * 4
    sp = share_sequences(model, size=2)
    for name, use in COUNTS.items():
        assert lacking(refusal(use, accelerator, both), "ConfigError", "share_accelerator(accelerator, sp)") == [], name
    said = Lines()
    assert [gathered_by_a_library(accelerator) for _ in range(2)] == [[1] * 4] * 2
    assert [missing(line, "accelerator.gather counts", "a_library.train") for line in said.lines] == [[]] * first
    assert not accelerator.check_trigger()  # counts nothing
    with whole_sequences(model):  # each rank has sequences of its own
        assert accelerator.gather(torch.ones(1)).tolist() == [1] * 4
    shared = share_accelerator(accelerator, sp)
    assert share_accelerator(shared, sp) is shared
    assert (shared.num_processes, shared.process_index) == (2, dist.get_rank() // 2)
    assert (shared.own.num_processes, shared.is_main_process) == (4, first)
    assert shared.own.reduce(torch.tensor(dist.get_rank())).item() == 6
    ran = []
    shared.on_process(ran.append, process_index=1)(1)
    assert ran == [1] * (dist.get_rank() == 2)
    for name, (use, words) in WRONG.items():
        assert lacking(refusal(use, shared), *words) == [], name
    assert lacking(refusal(share_accelerator, model, sp), "ConfigError", "got LlamaForCausalLM") == []
    other = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank() // 2))
    told = "DisagreementError", "ranks 0-1: SGD groups [0] lr 0.1", "ranks 2-3: SGD groups [0] lr 0.2"
    for given in (model, other), (other,):
        assert lacking(refusal(shared.prepare, *given), *told) == []
    dispatching = share_accelerator(fresh(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), sp)
    assert lacking(refusal(dispatching.prepare, DataLoader([1])), "ConfigError", "dispatch_batches=False") == []


# --- DeepSpeed, whose schedulers and figures count too


def with_deepspeed(size, stage, groups):
    """What a loop with accelerate's DeepSpeed writes down: all but the batch's size is "auto" in its JSON."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=True)
    warmup = {name: "auto" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")}
    content = {
        "train_batch_size": 2 * groups, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "steps_per_print": 2**30,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }  # fmt: skip
    plugin, sizes = DeepSpeedPlugin(hf_ds_config=content), {"sp_size": size, "dp_shard_size": groups}
    parallelism = ParallelismConfig(sp_backend="deepspeed", **sizes) if size > 1 else None
    accelerator, model = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism), small()
    if size > 1:
        sp = share_sequences(model, size=size)
        for sizes, words in OTHER_SIZES:
            accelerator.state.parallelism_config = ParallelismConfig(**sizes)
            assert lacking(refusal(share_accelerator, accelerator, sp), "ConfigError", *words) == [], sizes
        accelerator.state.parallelism_config = parallelism
        accelerator = share_accelerator(accelerator, sp)
    torch.manual_seed(0)
    loader = DataLoader(torch.randint(0, 64, (7 * groups, 16)), batch_size=2, shuffle=True)
    optimizer = DummyOptim(model.parameters(), lr=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=5 * groups, warmup_num_steps=2)
    engine, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert scheduler is accelerator._schedulers[0]
    written = [engine.train_batch_size()]
    for ids in loader:
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rate = optimizer.param_groups[0]["lr"]
        written.append([loss.item(), rate, accelerator.gather_for_metrics(ids[:, 0]).tolist(), engine.global_samples])
    return written


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("stage", "groups"),
    [(2, 1), *(pytest.param(stage, groups, marks=pytest.mark.slow) for stage in (1, 3) for groups in (1, 2))],
)
def test_accelerates_deepspeed_counts_groups(stage, groups):
    """Its Accelerator has a ParallelismConfig, which says the size once more."""
    plain = on_ranks(groups, with_deepspeed, 1, stage, groups)
    assert plain[0][-1][1] < 0.01 == plain[0][3][1]  # the rate falls
    for rank, shared in enumerate(on_ranks(2 * groups, with_deepspeed, 2, stage, groups)):
        assert faults(plain[rank // 2], shared) is None


def trained_with(folder, batch):
    """(losses, the engine's batch and samples) of a Trainer, whose JSON says "train_batch_size"."""
    trainer = make(folder, 2, {"size": 2}, 2, deepspeed_changes={"train_batch_size": batch}, max_steps=2)
    losses = trained(trainer).logs["loss"]
    return losses, (trainer.deepspeed.train_batch_size(), trainer.deepspeed.global_samples)


def batches_of(folder):
    return [trained_with(folder, batch) for batch in (4, 8)] + [
        refusal(make, folder, 2, {"size": 2}, 2, deepspeed_changes={"train_batch_size": batch}) for batch in (2, 6)
    ]


@pytest.mark.usefixtures("compiled")
def test_a_trainers_json_may_count_sequences_or_ranks(tmp_path):
    """2 sequences of a group, twice: 4 in a step, for which transformers wants 8."""
    for by_sequence, by_rank, *refused in on_trainer_ranks(2, batches_of, tmp_path):
        assert by_sequence == by_rank
        assert by_rank[1] == (4, 8)
        for (kind, message), got in zip(refused, ("got 2", "got 6"), strict=True):
            assert kind == "ConfigError"
            assert missing(message, "train_batch_size counts sequences: it must be 4", got) == []

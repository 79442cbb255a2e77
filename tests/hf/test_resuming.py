"""Which checkpoint a run goes on from, where some are damaged, or another run's; and what is said."""

import dataclasses
import json
import os
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.deepspeed.saving.resuming import LoadingRun
from hf_integration import SequenceParallelTrainer
from hf_integration.trainer.resume import LAST, inspect_checkpoint, parse_resume_argument
from tests.dist.ranks import is_one_sentence, refusal
from tests.grids import cover
from tests.hf.trainers import documents, make, trained
from tests.launch import on_ranks, on_trainer_ranks

RUN = LoadingRun(rank=1, ranks=2, stage=2, dtype="float32")
SHARD = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "global_step3/mp_rank_00_model_states.pt"


def write(folder, **written):
    """A checkpoint's files, as the Trainer and DeepSpeed write them on two ranks under ZeRO-2; `written` changes what
    its settings are."""
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}
    optimizer = {"base_optimizer_state": {"state": {0: {"momentum": 0.0}}}}
    states = {"dp_world_size": 2, "ds_config": config, "optimizer_state_dict": optimizer, **written}
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", SHARD, SHARD.replace("rank_1", "rank_0"), MODEL):
        torch.save({**states, "filling": torch.zeros(100)}, folder / name)
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


STATE = "trainer_state.json"
# what is done to a checkpoint -> what is said of it
FAULTS = {
    "state missing": (lambda folder: (folder / STATE).unlink(), f"{STATE} is missing"),
    "state cut": (lambda folder: (folder / STATE).write_text('{"global'), f"{STATE} is damaged"),
    "state without a step": (lambda folder: (folder / STATE).write_text("{}"), f"{STATE} is damaged"),
    "latest missing": (lambda folder: (folder / "latest").unlink(), "latest is missing"),
    "latest empty": (lambda folder: (folder / "latest").write_text(""), "latest is damaged"),
    "what latest names missing": (lambda folder: shutil.rmtree(folder / "global_step3"), "global_step3 is missing"),
    "shard missing": (lambda folder: (folder / SHARD).unlink(), "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"),
    "shard cut": (lambda folder: cut(folder / SHARD), "zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged"),
    "shard of zeros": (lambda folder: (folder / SHARD).write_bytes(bytes(999)), "optim_states.pt is damaged"),
    "model missing": (lambda folder: (folder / MODEL).unlink(), "no model_states.pt"),
    "model cut": (lambda folder: cut(folder / MODEL), "mp_rank_00_model_states.pt is damaged"),
    "scheduler missing": (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
    "nothing there": (shutil.rmtree, "checkpoint-3 is missing"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_checkpoint_that_was_not_written_to_its_end(name, tmp_path):
    spoil, words = FAULTS[name]
    folder = write(tmp_path / "checkpoint-3")
    assert inspect_checkpoint(folder, RUN, True).fault == ""
    spoil(folder)
    assert words in inspect_checkpoint(folder, RUN, True).fault


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"stage": 0}, "ZeRO stage 2, and this run has 0"),
        ({"dtype": "bfloat16"}, "in float32, and this run has bfloat16"),
        ({"dtype": "float16"}, "in float32, and this run has float16"),
        # what rank 0 finds where the files must be converted
        ({"rank": 0, "ranks": 4}, "Adam's states alone, and this optimizer has momentum"),
        ({"rank": 0, "stage": 3}, "Adam's states alone, and this optimizer has momentum"),
    ],
)
def test_a_checkpoint_of_another_run(run, words, tmp_path):
    found = inspect_checkpoint(write(tmp_path / "a folder"), dataclasses.replace(RUN, **run), True)
    assert words in found.mismatch
    assert found.fault == ""


def test_the_dtype_of_a_checkpoint_without_zero(tmp_path):
    """DeepSpeed reads an older name of bf16 too."""
    config = {"zero_optimization": {"stage": 0}, "bfloat16": {"enabled": True}}
    folder, run = write(tmp_path / "a folder", ds_config=config), dataclasses.replace(RUN, stage=0)
    assert "in bfloat16, and this run has float32" in inspect_checkpoint(folder, run, True).mismatch
    found = inspect_checkpoint(folder, dataclasses.replace(run, dtype="bfloat16"), True)
    assert (found.fault, found.mismatch) == ("", "")


CONVERTED = {
    "of Adam": ({}, ""),
    "of amsgrad": ({"states": ["max_exp_avg_sq"]}, "Adam's states alone"),
    "on NVMe": ({"zero": {"offload_optimizer": {"device": "nvme"}}}, "offloaded to NVMe"),
    "on CPUs": ({"zero": {"offload_optimizer": {"device": "cpu"}}}, ""),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_checkpoint_that_deepspeed_converts_or_not(name, tmp_path):
    given, words = CONVERTED[name]
    names = ["step", "exp_avg", "exp_avg_sq", *given.get("states", [])]
    optimizer = {"base_optimizer_state": {"state": {0: dict.fromkeys(names)}}}
    config = {"zero_optimization": {"stage": 2, **given.get("zero", {})}}
    folder = write(tmp_path / "a folder", ds_config=config, optimizer_state_dict=optimizer)
    found = inspect_checkpoint(folder, dataclasses.replace(RUN, rank=0, ranks=3), True)
    assert (words in found.mismatch) if words else found.mismatch == ""
    assert found.fault == ""
    cut(folder / SHARD)
    found = inspect_checkpoint(folder, dataclasses.replace(RUN, rank=0, ranks=3), True)
    assert "rank_1_mp_rank_00_optim_states.pt is damaged" in found.fault


def test_stages_with_the_same_files_and_the_universal_format(tmp_path):
    folder = write(tmp_path / "checkpoint-abc")
    found = inspect_checkpoint(folder, dataclasses.replace(RUN, stage=1), True)
    assert (found.name, found.fault, found.mismatch, found.ranks) == ("global_step3", "", "", 2)
    universal = dataclasses.replace(RUN, ranks=3, universal=True)
    assert inspect_checkpoint(folder, universal, True).fault == "latest_universal is missing"
    (folder / "latest").rename(folder / "latest_universal")
    (folder / MODEL).unlink()  # of DeepSpeed's format alone
    (folder / "scheduler.pt").unlink()
    found = inspect_checkpoint(folder, universal, False)
    assert (found.fault, found.mismatch, found.ranks) == ("", "", 3)


def test_what_is_meant_by_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in (True, "True", "true", "last"):
        assert parse_resume_argument(given) is LAST
    for given in (None, False, "False", "", "None"):
        assert parse_resume_argument(given) is None
    assert parse_resume_argument(tmp_path) == str(tmp_path)
    assert parse_resume_argument("run/checkpoint-3") == "run/checkpoint-3"
    for name in ("True", "last"):
        os.mkdir(name)
        assert parse_resume_argument(name) == name
        assert parse_resume_argument(name) is not LAST
    with pytest.raises(ConfigError, match="got 3"):
        parse_resume_argument(3)


def resumed(folder, given):
    """(losses, or what was refused; warnings of resuming) of a run of three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = {"train_dataset": documents(16)}
        trainer = make(folder, 2, {"size": 2}, 2, parts=parts, max_steps=3, save_strategy="steps", save_steps=1)
        _, message = refusal(lambda: trained(trainer, resume_from_checkpoint=given))
        logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    dist.barrier()
    return message or logs, [str(x.message) for x in caught if "resuming" in str(x.message)]


class Full(SequenceParallelTrainer):
    """On whose rank 1 the disk is full before a checkpoint is whole."""

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if dist.get_rank() == 1:
            raise OSError("no space left")


class NoRoom(SequenceParallelTrainer):
    """On whose rank 0 no file grows beyond a limit, which the model's does."""

    def _save_checkpoint(self, *args):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            super()._save_checkpoint(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def resumed_again(folder):
    """By case what `resumed` gives after a whole run: its last checkpoint loses its end, then all lose it."""
    found, states = {"whole": resumed(folder, None)}, [Path(folder, f"checkpoint-{step}") for step in (3, 2, 1)]

    def on_one(act):
        if dist.get_rank() == 1:
            act()
        dist.barrier()

    on_one((states[0] / "trainer_state.json").unlink)
    on_one((states[1] / "rng_state_1.pth").unlink)
    found["the one before"] = resumed(folder, "True")
    on_one((states[0] / "trainer_state.json").unlink)
    found["a folder"] = resumed(folder, str(states[0]))
    on_one(lambda: [cut(next(x.glob("global_step*/*rank_0_mp_rank_00_optim_states.pt"))) for x in states[1:]])
    found["none"] = resumed(folder, True)
    before = sorted(states[1].rglob("*"))
    found["failed"] = []
    for kind in (Full, NoRoom):
        trainer = make(folder, 2, {"size": 2}, 2, kind=kind, max_steps=3, save_strategy="steps", save_steps=2)
        found["failed"].append(refusal(trainer.train))
        dist.barrier()
    found["as before"] = sorted(states[1].rglob("*")) == before
    found["left"] = [x.name for x in Path(folder).glob(".*")]
    return found


@pytest.mark.usefixtures("compiled")
def test_a_run_goes_on_from_the_last_whole_checkpoint(tmp_path):
    for rank, found in enumerate(on_ranks(2, resumed_again, tmp_path)):
        losses, said = found["the one before"]
        assert losses == found["whole"][0]
        (warning,) = said
        assert ("checkpoint-2, the last", "rng_state_1.pth cannot be read")[rank] in warning
        expected = zip(found["failed"], (1, 0), ("OSError for", ": File too large, with"), strict=True)
        for (kind, message), failed, words in expected:
            assert kind == ("ConfigError" if rank == failed else "DisagreementError")
            assert words in message
            assert "checkpoint-2" in message
        assert (found["as before"], found["left"]) == (True, [])
        for name, words in (("a folder", f"{STATE} is missing"), ("none", "optim_states.pt is damaged (rank 0)")):
            assert words in found[name][0]
            assert is_one_sentence(found[name][0])


OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
DECAY = {name: "auto" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")}
SCHEDULER = {"scheduler": {"type": "WarmupDecayLR", "params": DECAY}}
KEYS = {"none": {}, "optimizer": OPTIMIZER, "scheduler": SCHEDULER, "both": {**OPTIMIZER, **SCHEDULER}}


def gone_on_with(folder, case):
    """The log of a run of two steps, and that of the run which goes on after the first."""
    keys, stage, by_folder, best = case
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "deepspeed_changes": KEYS[keys]}
    changes |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True} if best else {}
    runs = []
    for given in (None, str(folder / "checkpoint-1") if by_folder else True):
        trainer = make(folder, 2, {"size": 2}, stage, parts={"train_dataset": documents(16)}, **changes)
        runs.append(trained(trainer, resume_from_checkpoint=given).logs)
        dist.barrier()
        if given is None and dist.get_rank() == 0:
            shutil.rmtree(folder / "checkpoint-2")
        dist.barrier()
    return runs


ALL = cover(keys=tuple(KEYS), stage=(2, 3), folder=(False, True), best=(False, True))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "cases",
    [
        [("optimizer", 2, False, False), ("scheduler", 3, True, True)],
        pytest.param([tuple(x.values()) for x in ALL], marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_run_goes_on_whoever_has_the_optimizer_and_the_scheduler(cases, tmp_path):
    """DeepSpeed's files hold the scheduler's state where the JSON has either key, scheduler.pt where it has none."""
    for number, case in enumerate(cases):
        for whole, resumed_log in on_trainer_ranks(2, gone_on_with, tmp_path / str(number), case):
            assert len(whole["loss"]) == 2
            assert resumed_log == whole, case

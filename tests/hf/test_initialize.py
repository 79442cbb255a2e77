"""`initialize` takes what users of deepspeed.initialize have where it is right, and says what is not on every rank."""

import argparse
import json
import os
import sys
import warnings

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import ChainDataset

import ds_seqpar
from ds_seqpar.deepspeed.config import DeepSpeedJson
from hf_integration import patch_attention, patched_with, unpatch_attention
from tests.dist.ranks import assert_all_refused, everywhere, is_one_sentence, lacking, make, refusal
from tests.dist.test_unused_sharding import BATCH, Model
from tests.hf.llama import MODES, RATE, array, gap, one_process, part, ragged, settings, small, step, with_lora
from tests.hf.losses import half_loss, local_mean, own_forward, prompt_tuned, unshifted_loss, with_loss
from tests.launch import on_each_of
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 2
SECTION = MODES["r2"]


def good(stage="2", **changes):
    return settings(SECTION, stage, 1, 4, **changes)


def without(key):
    return {name: value for name, value in good().items() if name != key}


def window():
    return ragged(SECTION, 1, 1)


def one_step(engine):
    return step(engine, engine.sequence_parallel.shard_batches(window()))


def assert_right(result, expected=None):
    """A step's gradients and loss are those of one process."""
    gradients, loss = expected or one_process(small(), window())
    assert gap(result["gradients"], gradients) < 1e-5
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


# ---- refused: a row is initialize's arguments, or a function that makes them, with a good JSON and a small model where
# there is none; and what every rank is told


def refused(value, given=None, first_step=False, **more):
    def call(sp, rank):
        arguments = {"config": good(), **(given() if given else {}), **more}
        arguments.setdefault("model", None)
        engine, *_ = ds_seqpar.initialize(**{**arguments, "model": arguments["model"] or small()})
        if first_step:
            one_step(engine)

    return call, everywhere(value, kind="ConfigError")


def json_of(value, **changes):
    return refused(value, config=good(**changes))


def loss_of(value, model, stage="2"):
    return refused(value, lambda: {"model": model(), "config": good(stage)}, first_step=True)


def zero(**changes):
    return {"zero_optimization": {"stage": 2, **changes}}


INSIDE = {**without("sequence_parallel"), **zero(sequence_parallel=SECTION)}
NOT_SET = {
    "sequence_parallel_size": 4, "data_parallel_size": 1, "curriculum_learning": {"enabled": True},
    "data_efficiency": {"enabled": True}, "gradient_allreduce_op": "sum", "tensor_parallel": {"autotp_size": 2},
    "expert_parallel": {"enabled": True, "autoep_size": 2}, "managed_gradient_accumulation": False,
}  # fmt: skip
OTHER_SIZE = "size 1"
REFUSED = {
    # a misspelt section was passed over in silence; "auto" in bf16 trained in fp32; accumulation of one's own took a
    # step for every micro-batch
    "a misspelt section": refused('got "sp"', config={**without("sequence_parallel"), "sp": SECTION}),
    "one beside it": json_of('got "sequence_paralel"', sequence_paralel={"size": 2}),
    "one inside another": refused('inside "zero_optimization"', config=INSIDE),
    **{f"{key}, which is not ours": json_of(f'not set "{key}"', **{key: value}) for key, value in NOT_SET.items()},
    "zenflow": json_of("zero_optimization.zenflow", **zero(zenflow={"topk_ratio": 0.1})),
    "size": json_of("size 3", sequence_parallel={"size": 3}),
    "other batches": json_of("must be 4", train_batch_size=3),
    "bf16 null": json_of("got null", bf16=None),
    "a text": json_of('got "false"', bf16={"enabled": "false"}),
    "auto bf16": json_of("bf16.enabled", bf16={"enabled": "auto"}),
    "auto clipping": json_of("gradient_clipping", gradient_clipping="auto"),
    "auto of a parameter": json_of("optimizer.params.lr", optimizer={"type": "SGD", "params": {"lr": "auto"}}),
    "auto stage": json_of("zero_optimization.stage", **zero(stage="auto", overlap_comm="auto")),
    "auto device": json_of("offload_optimizer.device", **zero(offload_optimizer={"device": "auto"})),
    # mesh_param went on to DeepSpeed: gradients of norm 2.03 and 1.98 on different ranks for 0.708
    "mesh_param": refused("no mesh_param", mesh_param=(2, 2)),
    "mpu": refused("no mpu", mpu="mpu"),  # deepspeed#5248
    "pipeline": refused(
        "no PipelineModule", lambda: {"model": PipelineModule(layers=[nn.Linear(2, 2)] * 4, num_stages=2)}
    ),
    "nothing": refused("got none", config=None),
    "own model": refused("got Linear alone", model=nn.Linear(2, 2)),
    "another sp": refused(OTHER_SIZE, lambda: {"sequence_parallel": make(size=1)}),
    "another sp of an own model": refused(
        OTHER_SIZE, lambda: {"model": nn.Linear(2, 2), "sequence_parallel": make(size=1)}
    ),
    "two sps": refused(
        "another SequenceParallel",
        lambda: {"model": patch_attention(small(), make(**SECTION)), "sequence_parallel": make(**SECTION)},
    ),
    "collate_fn": refused("got it alone", collate_fn=list),
    "a stream": refused("ChainDataset", training_data=ChainDataset([])),
    "typo": refused("'optimizer'", optimzer=None),
    "unknown": refused("argument 'zzz'", zzz=None),
    "two configurations": refused("args.deepspeed_config", args=argparse.Namespace(deepspeed_config="ds.json")),
    "prompt tuning": refused("prompt learning", lambda: {"model": prompt_tuned()}),
    # it trained, on labels shifted inside each shard or on each rank's own mean
    "a loss that ignores shift_labels": loss_of("shift_labels", lambda: with_loss(unshifted_loss)),
    "a loss that ignores num_items_in_batch": loss_of("num_items_in_batch", lambda: with_loss(local_mean)),
    "a loss that takes neither": loss_of("TypeError", lambda: with_loss(lambda logits, labels: labels.sum())),
    "a forward that drops num_items_in_batch": loss_of("num_items_in_batch", own_forward),
    "such a forward under ZeRO-3": loss_of("num_items_in_batch", own_forward, "3"),
}  # fmt: skip


@on_each_of(WORLD, keep="deepspeed")
def test_what_initialize_cannot_take_is_refused_on_every_rank():
    deepspeed.init_distributed()  # which pipelines need
    assert_all_refused(REFUSED, make(**SECTION))


def test_what_ranks_compare_of_a_json_has_no_address():
    """Forked ranks have the same ones; those of launchers have not."""
    resolved = DeepSpeedJson.read(good()).resolved
    assert resolved["optimizer_params"] == good()["optimizer"]["params"]
    assert " at 0x" not in str(resolved)


# ---- taken


@on_each_of(WORLD, keep="deepspeed")
def test_a_json_without_the_section_takes_the_sp_that_is_given():
    """It compared the defaults of fields that the JSON does not name, and refused."""
    expected = one_process(small(), window())
    for section in (None, {"size": 2}, {"schedule": "auto", "overlap": True}):
        sp = make((8, 2), size=2, ulysses=1, layout="striped", overlap=True, kernel="reference")
        config = {**without("sequence_parallel"), **({"sequence_parallel": section} if section else {})}
        engine, *_ = ds_seqpar.initialize(model=small(), config=config, sequence_parallel=sp)
        assert_right(
            step(engine, sp.shard_batches([part(batch, sp.data_rank, sp.data_size) for batch in window()])), expected
        )
        assert engine.sequence_parallel is sp
    call, told = refused("False in the JSON", config=good(sequence_parallel={"overlap": False}), sequence_parallel=sp)
    assert lacking(refusal(call, sp, sp.rank), *told["others"], "overlap True") == []


def read_by(initialize, config):
    """The rows of all batches of the loader that initialize makes, and of a second epoch."""
    data, model = list(torch.arange(10 * 16).view(10, 16)), small()
    parameters = list(model.parameters())
    given = {"model_parameters": parameters, "config": config, "training_data": data, "collate_fn": torch.stack}
    _, _, loader, _ = initialize(model=model, **given)
    return len(loader), [[batch.tolist() for batch in loader] for _ in range(2)]


def plain_data():
    deepspeed.init_distributed()
    return read_by(deepspeed.initialize, without("sequence_parallel"))


def test_training_data_is_dealt_as_deepspeed_deals_it():
    """deepspeed#7484, #5582; axolotl#3920: peers of a sequence got different batches."""
    (plain,) = on_ranks(1, plain_data)
    assert [len(batch) for batch in plain[1][0]] == [4, 4, 2]
    for found in on_ranks(WORLD, read_by, ds_seqpar.initialize, good()):
        assert found == plain


@on_each_of(WORLD, keep="deepspeed")
def test_arguments_that_are_taken():
    """An optimizer, a scheduler and parameters of one's own, and the others."""
    model, args = small(), argparse.Namespace(local_rank=-1, deepspeed_config=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, own, loader, scheduler = ds_seqpar.initialize(
        args=args, model=model, model_parameters=list(model.parameters()), optimizer=optimizer,
        lr_scheduler=lambda its: torch.optim.lr_scheduler.StepLR(its, 1), config_params=without("optimizer"), mpu=None,
        training_data=None, collate_fn=None, mesh_param=None, distributed_port=29501, dist_init_required=True,
    )  # fmt: skip
    assert loader is None
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert own is engine.optimizer
    assert args.local_rank == int(os.environ["LOCAL_RANK"])  # which scripts read afterwards
    assert_right(one_step(engine))


@on_each_of(WORLD, keep="deepspeed")
def test_the_configuration_may_come_with_args_and_clipping_that_is_not_set_is_warned_of(tmp_path):
    """DeepSpeed clips at 1.0 where the JSON says nothing, which hides a wrong scale. The warning names the caller."""
    path = str(tmp_path / f"{dist.get_rank()}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(good(), file)
    args = argparse.Namespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"]))
    engine, *_ = ds_seqpar.initialize(model=small(), args=args)
    assert (engine.sequence_parallel.size, args.deepspeed_config) == (2, path)
    for config, count in ((without("gradient_clipping"), 1), (good(gradient_clipping=0), 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ds_seqpar.initialize(model=small(), config=config)
        found = [(str(w.message), w.filename) for w in seen if "gradient_clipping" in str(w.message)]
        assert len(found) == count
        assert all("clips at 1.0" in message and file == __file__ for message, file in found)


@on_each_of(1, keep=None)  # it ends its groups, which DeepSpeed has noted
def test_one_process_without_a_launcher():
    """As in a notebook. It ended with "No module named 'mpi4py'"."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    engine, *_ = ds_seqpar.initialize(model=small(), config=good(sequence_parallel={}))
    assert_right(one_step(engine))


LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
# launcher -> (the variables that it has set, what the sentence has)
LAUNCHERS = {
    "no LOCAL_RANK": (lambda given: {name: given[name] for name in LAUNCHER[:-1]}, "LOCAL_RANK is not set"),
    "RANK alone": (lambda given: {"RANK": given["RANK"]}, f"{', '.join(LAUNCHER[1:])} is not set"),
    "srun": (lambda given: {"SLURM_PROCID": given["RANK"]}, "slurm.sh"),
    "mpirun": (lambda given: {"OMPI_COMM_WORLD_RANK": given["RANK"]}, "deepspeed, torchrun or accelerate launch"),
}


@on_each_of(2, patience=None)
def test_what_a_launcher_has_not_set_is_named():
    """It ended with "No module named 'mpi4py'". With torch.distributed up, ranks without LOCAL_RANK are told, and one
    without; ranks that have srun's train."""
    given = {name: os.environ.pop(name) for name in LAUNCHER}
    sys.modules["mpi4py"] = None  # which some environments have

    def start():
        return ds_seqpar.initialize(model=small(), config=good(sequence_parallel={"size": 2}))[0]

    for name, (variables, value) in LAUNCHERS.items():
        own = variables(given)
        os.environ.update(own)
        assert lacking(refusal(start), "ConfigError", value) == [], name
        for key in own:
            del os.environ[key]
    os.environ.update({name: given[name] for name in LAUNCHER[:-1]})
    dist.init_process_group("gloo")
    assert lacking(refusal(start), "ConfigError", "every rank; LOCAL_RANK is not set") == []
    told = "ConfigError", "LOCAL_RANK is not set"
    if rank := dist.get_rank():
        os.environ["LOCAL_RANK"] = given["LOCAL_RANK"]
        told = "DisagreementError", "LOCAL_RANK is not set", "rank 0 cannot"
    assert lacking(refusal(start), *told) == []
    os.environ.pop("LOCAL_RANK", None)
    os.environ["SLURM_LOCALID"] = str(rank)
    assert_right(one_step(start()))


@on_each_of(WORLD, keep="deepspeed")
def test_trying_the_loss_changes_nothing():
    """At each stage; and a loss may be meant to be another."""
    expected = one_process(small(), window())
    for stage in ("0", "1", "2", "3"):
        assert_right(one_step(ds_seqpar.initialize(model=small(), config=good(stage))[0]), expected)
    half, *_ = ds_seqpar.initialize(model=with_loss(half_loss), config=good(), check_loss=False)
    whole, _ = one_process(small(pad_token_id=0), window())
    assert gap(one_step(half)["gradients"], {name: g / 2 for name, g in whole.items()}) < 1e-5


# ---- models inside others


def adapted():
    return with_lora(small(), "q_proj", "v_proj")


@on_each_of(WORLD, keep="deepspeed")
def test_lora_is_taken_and_gets_the_gradients_of_the_unsplit_run():
    """It "needs a transformers model", while the Trainer took it."""
    plain, (batch,) = adapted(), window()
    loss = plain(**batch).loss
    loss.backward()
    expected = {name: array(p.grad) for name, p in plain.named_parameters() if p.requires_grad}
    for stage in ("0", "2", "3"):
        engine, *_ = ds_seqpar.initialize(model=adapted(), config=good(stage))
        assert hasattr(engine.module, "peft_config")
        result = one_step(engine)
        assert_right({**result, "gradients": {n: result["gradients"][n] for n in expected}}, (expected, loss.item()))
        assert not any(g.any() for name, g in result["gradients"].items() if name not in expected)
    batch = engine.sequence_parallel.shard_batch(batch)
    del batch["shift_labels"]
    assert lacking(refusal(engine, **batch), "InputError", "no shift_labels") == []


@on_each_of(WORLD, keep="deepspeed")
def test_a_model_inside_torch_compile_or_ddp_is_patched():
    """What torch.compile and peft hold is what is patched, and given back."""
    sp, inner = make(**SECTION), small()
    for model in (torch.compile(inner), torch.compile(adapted()), torch.nn.parallel.DistributedDataParallel(inner)):
        assert patch_attention(model, sp) is model
        assert patched_with(model) is sp
        assert unpatch_attention(model) is model
        assert patched_with(model) is None


@on_each_of(WORLD, keep="deepspeed")
def test_the_first_step_of_a_model_that_takes_a_shard_for_a_whole_sequence_is_refused():
    for attends, reads, word in ((False, True, "no attention"), (True, False, "position_ids"), (True, True, None)):
        sp = make(size=WORLD)
        torch.manual_seed(0)
        engine, *_ = ds_seqpar.initialize(
            model=Model(sp if attends else None, reads), config=good(), sequence_parallel=sp
        )
        said = None
        for _ in range(2):
            [batch] = sp.shard_batches([BATCH])
            engine.backward(engine(**batch))
            said = said or refusal(engine.step)[1]
            if said:
                break
        assert said is None if word is None else (is_one_sentence(said) and word in said)

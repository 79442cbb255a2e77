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
from tests.dist.ranks import is_one_sentence, lacking, make, refusal
from tests.dist.test_unused_sharding import BATCH, Model
from tests.hf.llama import MODES, RATE, array, gap, one_process, part, ragged, settings, small, step, with_lora
from tests.hf.losses import half_loss, local_mean, own_forward, prompt_tuned, unshifted_loss, with_loss
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

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


def all_refused(function, *args):
    """name -> what ranks were told, the same on all of them, one sentence each."""
    by_rank = on_ranks(WORLD, function, *args, timeout=120)
    for found in by_rank:
        for name, (kind, message) in found.items():
            assert kind == "ConfigError", (name, kind, message)
            assert is_one_sentence(message), (name, message)
    return by_rank[0]


def refusals(cases):
    """What initialize says to each: name -> its arguments; a model is made where there is none."""
    found = {}
    for name, given in cases.items():
        given = given() if callable(given) else given
        given = {"config": good(), **given}
        found[name] = refusal(ds_seqpar.initialize, **({"model": small()} if "model" not in given else {}), **given)
    return found


# --- the JSON

MISSPELT = ("sequence_paralel", "SequenceParallel", "sp")
REFUSED_JSON = {
    **{key: ({**without("sequence_parallel"), key: SECTION}, (f'got "{key}"', "rename")) for key in MISSPELT},
    "beside": (good(sequence_paralel={"size": 2}), ('got "sequence_paralel"', "rename")),
    "inside": (
        {**without("sequence_parallel"), "zero_optimization": {"stage": 2, "sequence_parallel": SECTION}},
        ('inside "zero_optimization"', "sequence_parallel"),
    ),
    **{
        key: (good(**{key: value}), (f'not set "{key}"',))
        for key, value in {
            "sequence_parallel_size": 4,
            "data_parallel_size": 1,
            "curriculum_learning": {"enabled": True},
            "data_efficiency": {"enabled": True},
            "gradient_allreduce_op": "sum",
        }.items()
    },
    "size": (good(sequence_parallel={"size": 3}), ("size 3", "2 ranks", "[1, 2]")),
    "other batches": (good(train_batch_size=3), ("train_batch_size", "must be 4", "got 3")),
    "own accumulation, and zenflow": (
        good(managed_gradient_accumulation=False, zero_optimization={"stage": 2, "zenflow": {"topk_ratio": 0.1}}),
        ('not set "managed_gradient_accumulation", "zero_optimization.zenflow"', "accumulation steps", "windows"),
    ),
    "experts": (good(expert_parallel={"enabled": True, "autoep_size": 2}), ('not set "expert_parallel"',)),
    "AutoTP": (good(tensor_parallel={"autotp_size": 2}), ('not set "tensor_parallel"', "AutoTP")),
    "bf16 null": (good(bf16=None), ("bf16", "got null")),
    "a text": (good(bf16={"enabled": "false"}), ("bf16.enabled", 'got "false"')),
    "auto others": (
        good(gradient_clipping="auto", bf16={"enabled": "auto"}, optimizer={"type": "SGD", "params": {"lr": "auto"}}),
        ('"auto" for gradient_clipping', "optimizer.params.lr", "bf16.enabled", "Trainer"),
    ),
    "auto stage": (
        good(zero_optimization={"stage": "auto", "offload_optimizer": {"device": "auto"}, "overlap_comm": "auto"}),
        ("zero_optimization.stage, zero_optimization.offload_optimizer.device without",),
    ),
}


def refused_json():
    return refusals({name: {"config": config} for name, (config, _) in REFUSED_JSON.items()})


def test_a_json_that_means_something_else():
    """A misspelt section was passed over in silence; "auto" in bf16 trained in fp32; accumulation of one's own took a
    step for every micro-batch."""
    for name, (_, message) in all_refused(refused_json).items():
        assert missing(message, *REFUSED_JSON[name][1]) == [], (name, message)


# what a file holds -> what is said of it, beside its name
WHOLE = json.dumps(without("sequence_parallel"))[:-1]
FILES = {
    "size twice": (WHOLE + ', "sequence_parallel": {"size": 2, "ulysses": 1, "size": 4}}', ('"size" twice',)),
    "missing": (None, ("No such file",)),
    "bytes": ("\xff{}", ("UTF-8",)),
}


def refused_files(folder):
    return refusals({name: {"config": folder / f"{name}.json"} for name in FILES})


def test_a_json_that_cannot_be_read_or_gives_a_key_twice(tmp_path):
    """Of two the last one won, in silence."""
    for name, (content, _) in FILES.items():
        if content is not None:
            (tmp_path / f"{name}.json").write_text(content, encoding="latin-1")
    for name, (_, message) in all_refused(refused_files, tmp_path).items():
        assert missing(message, str(tmp_path / f"{name}.json"), *FILES[name][1]) == []


def test_what_ranks_compare_of_a_json_has_no_address():
    """Forked ranks have the same ones; those of launchers have not."""
    resolved = DeepSpeedJson.read(good()).resolved
    assert resolved["optimizer_params"] == good()["optimizer"]["params"]
    assert " at 0x" not in str(resolved)


def other_sections():
    """(U that is chosen, a step's results) for an sp of one's own with settings that the JSON does not name."""
    found = []
    for section in (None, {"size": 2}, {"schedule": "auto", "overlap": True}):
        sp = make((8, 2), size=2, ulysses=1, layout="striped", overlap=True, kernel="reference")
        config = {**without("sequence_parallel"), **({"sequence_parallel": section} if section else {})}
        engine, *_ = ds_seqpar.initialize(model=small(), config=config, sequence_parallel=sp)
        batches = sp.shard_batches([part(batch, sp.data_rank, sp.data_size) for batch in window()])
        found.append(step(engine, batches))
        assert engine.sequence_parallel is sp
    given = refusal(ds_seqpar.initialize, model=small(), config=good(sequence_parallel={"overlap": False}),
                    sequence_parallel=sp)  # fmt: skip
    return found, given


def test_a_json_without_the_section_takes_the_sp_that_is_given():
    """It compared the defaults of fields that the JSON does not name, and refused."""
    gradients, loss = one_process(small(), window())
    for found, (kind, message) in on_ranks(WORLD, other_sections):
        for result in found:
            assert gap(result["gradients"], gradients) < 1e-5
            assert result["loss"] == pytest.approx(loss, rel=1e-5)
        assert kind == "ConfigError"
        assert missing(message, "overlap True", "False in the JSON") == []


# --- arguments

OTHER_SIZE = ("the same settings", "size 1", "2 in the JSON")
REFUSED_ARGUMENTS = {
    "mesh_param": ({"mesh_param": (2, 2)}, ("no mesh_param",)),
    "mpu": ({"mpu": "mpu"}, ("no mpu",)),  # deepspeed#5248
    "pipeline": (
        lambda: {"model": PipelineModule(layers=[nn.Linear(2, 2)] * 4, num_stages=2)},
        ("no PipelineModule", "plain model"),
    ),
    "nothing": ({"config": None}, ("got none", "config=", "--deepspeed_config")),
    "own model": (lambda: {"model": nn.Linear(2, 2)}, ("got Linear alone", "sequence_parallel=sp")),
    "another sp": (lambda: {"sequence_parallel": make(size=1)}, OTHER_SIZE),
    "another sp of an own model": (lambda: {"model": nn.Linear(2, 2), "sequence_parallel": make(size=1)}, OTHER_SIZE),
    "two sps": (
        lambda: {"model": patch_attention(small(), make(**SECTION)), "sequence_parallel": make(**SECTION)},
        ("another SequenceParallel",),
    ),
    "collate_fn": ({"collate_fn": list}, ("collate_fn belongs to training_data", "got it alone")),
    "a stream": (
        lambda: {"training_data": ChainDataset([])},
        ("a length and an index", "ChainDataset", "sp.loader"),
    ),
    "typo": ({"optimzer": None}, ("argument 'optimzer'", "'optimizer'")),
    "unknown": ({"zzz": None}, ("argument 'zzz'",)),
    "two configurations": (
        {"args": argparse.Namespace(deepspeed_config="ds.json")},
        ("one", "config and args.deepspeed_config"),
    ),
    "prompt tuning": (lambda: {"model": prompt_tuned()}, ("prompt learning", "LoRA")),
}


def refused_arguments():
    deepspeed.init_distributed()  # which pipelines need
    return refusals({name: given for name, (given, _) in REFUSED_ARGUMENTS.items()})


def test_arguments_that_are_not_known_to_be_right():
    """mesh_param went on to DeepSpeed: gradients of norm 2.03 and 1.98 on different ranks for 0.708."""
    for name, (_, message) in all_refused(refused_arguments).items():
        assert missing(message, *REFUSED_ARGUMENTS[name][1]) == [], (name, message)


def read_by(initialize, config):
    """The rows of all batches of the loader that initialize makes, and of a second epoch."""
    data, model = list(torch.arange(10 * 16).view(10, 16)), small()
    _, _, loader, _ = initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config,
        training_data=data,
        collate_fn=torch.stack,
    )
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


def every_argument():
    """A step with an optimizer, a scheduler and parameters of one's own, and the other arguments that are taken."""
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
    return one_step(engine)


def test_arguments_that_are_taken():
    gradients, loss = one_process(small(), window())
    for result in on_ranks(WORLD, every_argument):
        assert gap(result["gradients"], gradients) < 1e-5
        assert result["loss"] == pytest.approx(loss, rel=1e-5)


def said_of_clipping(path):
    """(size, what the namespace says afterwards) of initialize by args; by what the JSON says of clipping, None being
    nothing, the warnings (text, file) of it."""
    args, found = argparse.Namespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"])), {}
    engine, *_ = ds_seqpar.initialize(model=small(), args=args)
    for clipping in (None, 0):
        config = without("gradient_clipping") if clipping is None else good(gradient_clipping=clipping)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ds_seqpar.initialize(model=small(), config=config)
        found[clipping] = [(str(w.message), w.filename) for w in seen if "gradient_clipping" in str(w.message)]
    return (engine.sequence_parallel.size, args.deepspeed_config), found


def test_the_configuration_may_come_with_args_and_clipping_that_is_not_set_is_warned_of(tmp_path):
    """DeepSpeed clips at 1.0 where the JSON says nothing, which hides a wrong scale. The warning names the caller."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(good()))
    for by_args, found in on_ranks(WORLD, said_of_clipping, str(path)):
        assert by_args == (2, str(path))
        ((message, file),) = found[None]
        assert missing(message, "clips at 1.0", "0 for none") == []
        assert file == __file__
        assert found[0] == []


def alone():
    """A step in a process that no launcher started, as in a notebook."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    engine, *_ = ds_seqpar.initialize(model=small(), config=good(sequence_parallel={}))
    return one_step(engine)


def test_one_process_without_a_launcher():
    """It ended with "No module named 'mpi4py'"."""
    gradients, loss = one_process(small(), window())
    (result,) = on_ranks(1, alone, keep=None)  # it ends its groups, which DeepSpeed has noted
    assert gap(result["gradients"], gradients) < 1e-5
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
# launcher -> (the variables that it has set, words of the sentence)
LAUNCHERS = {
    "no LOCAL_RANK": (lambda given: {**given, "LOCAL_RANK": None}, ("LOCAL_RANK is not set",)),
    "RANK alone": (lambda given: {"RANK": given["RANK"]}, (f"{', '.join(LAUNCHER[1:])} is not set",)),
    "srun": (lambda given: {"SLURM_PROCID": given["RANK"]}, (f"{', '.join(LAUNCHER)} is not set", "slurm.sh")),
    "mpirun": (lambda given: {"OMPI_COMM_WORLD_RANK": given["RANK"]}, ("deepspeed, torchrun or accelerate launch",)),
}


def of_launchers():
    """What is said under launchers that leave out what DeepSpeed reads; then with torch.distributed up, of ranks
    without LOCAL_RANK, of one without, and the loss of a step of ranks that have srun's."""
    given, found = {name: os.environ.pop(name) for name in LAUNCHER}, {}
    sys.modules["mpi4py"] = None  # which some environments have
    for name, (variables, _) in LAUNCHERS.items():
        own = {key: x for key, x in variables(given).items() if x is not None}
        os.environ.update(own)
        found[name] = refusal(ds_seqpar.initialize, model=small(), config=good())
        for key in own:
            del os.environ[key]
    os.environ.update({name: given[name] for name in LAUNCHER[:-1]})
    dist.init_process_group("gloo")
    found["own"] = refusal(ds_seqpar.initialize, model=small(), config=good(sequence_parallel={"size": 2}))
    if rank := dist.get_rank():
        os.environ["LOCAL_RANK"] = given["LOCAL_RANK"]
    found["one"] = refusal(ds_seqpar.initialize, model=small(), config=good(sequence_parallel={"size": 2}))
    os.environ.pop("LOCAL_RANK", None)
    os.environ["SLURM_LOCALID"] = str(rank)
    engine, *_ = ds_seqpar.initialize(model=small(), config=good(sequence_parallel={"size": 2}))
    return found, one_step(engine)["loss"]


def test_what_a_launcher_has_not_set_is_named():
    """It ended with "No module named 'mpi4py'"."""
    _, loss = one_process(small(), window())
    for rank, (found, of_step) in enumerate(on_ranks(2, of_launchers, patience=None)):
        for name, (_, words) in LAUNCHERS.items():
            assert lacking(found[name], "ConfigError", *words) == [], (name, found[name])
        assert lacking(found["own"], "ConfigError", "every rank; LOCAL_RANK is not set") == [], found["own"]
        kind, words = ("DisagreementError", ("rank 0 cannot",)) if rank else ("ConfigError", ())
        assert lacking(found["one"], kind, "LOCAL_RANK is not set", *words) == [], found["one"]
        assert of_step == pytest.approx(loss, rel=1e-5)


# --- the loss

WRONG_LOSSES = {
    "ignores shift_labels": (lambda: with_loss(unshifted_loss), "loss_function that gives"),
    "ignores num_items_in_batch": (lambda: with_loss(local_mean), "loss_function that gives"),
    "takes neither": (lambda: with_loss(lambda logits, labels: labels.sum()), "(TypeError: "),
    "forward drops num_items_in_batch": (own_forward, "where that is"),
}


def first_step(**given):
    engine, *_ = ds_seqpar.initialize(**given)
    one_step(engine)


def refused_losses():
    cases = {name: (model(), good()) for name, (model, _) in WRONG_LOSSES.items()}
    cases["under ZeRO-3"] = own_forward(), good("3")
    return {name: refusal(first_step, model=model, config=config) for name, (model, config) in cases.items()}


def test_a_loss_that_does_not_use_what_it_is_given():
    """It trained, on labels shifted inside each shard or on each rank's own mean."""
    for name, (_, message) in all_refused(refused_losses).items():
        assert missing(message, "shift_labels", "num_items_in_batch", "initialize check_loss=False") == []
        assert WRONG_LOSSES.get(name, (None, "where that is"))[1] in message


def losses_tried(stages):
    """A step at each stage, and that of a loss that is meant to be another."""
    found = [one_step(ds_seqpar.initialize(model=small(), config=good(stage))[0]) for stage in stages]
    half, *_ = ds_seqpar.initialize(model=with_loss(half_loss), config=good(), check_loss=False)
    return found, one_step(half)


def test_trying_the_loss_changes_nothing():
    stages = ("0", "1", "2", "3")
    gradients, loss = one_process(small(), window())
    whole, _ = one_process(small(pad_token_id=0), window())
    for found, half in on_ranks(WORLD, losses_tried, stages):
        for result in found:
            assert gap(result["gradients"], gradients) < 1e-5
            assert result["loss"] == pytest.approx(loss, rel=1e-5)
        assert gap(half["gradients"], {name: g / 2 for name, g in whole.items()}) < 1e-5


# --- models inside others


def adapted():
    return with_lora(small(), "q_proj", "v_proj")


def adapters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def lora_steps(stages):
    """A step of a LoRA model at each stage; and what it says to labels that nobody shifted."""
    found = []
    for stage in stages:
        engine, *_ = ds_seqpar.initialize(model=adapted(), config=good(stage))
        assert hasattr(engine.module, "peft_config")
        found.append(one_step(engine))
    sp = engine.sequence_parallel
    batch = sp.shard_batch(window()[0])
    del batch["shift_labels"]
    return found, refusal(engine, **batch)


def test_lora_is_taken_and_gets_the_gradients_of_the_unsplit_run():
    """It "needs a transformers model", while the Trainer took it."""
    plain = adapted()
    (batch,) = window()
    loss = plain(**batch).loss
    loss.backward()
    expected = {name: array(p.grad) for name, p in adapters(plain).items()}
    for found, (kind, message) in on_ranks(WORLD, lora_steps, ("0", "2", "3")):
        for result in found:
            assert gap({name: result["gradients"][name] for name in expected}, expected) < 1e-5
            assert not any(g.any() for name, g in result["gradients"].items() if name not in expected)
            assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert kind == "InputError"
        assert "no shift_labels" in message


def compiled_models():
    """Whether what torch.compile and peft hold is what is patched, and given back."""
    sp = make(**SECTION)
    inner = small()
    found = []
    for model in (torch.compile(inner), torch.compile(adapted()), torch.nn.parallel.DistributedDataParallel(inner)):
        assert patch_attention(model, sp) is model
        found += [patched_with(model) is sp, unpatch_attention(model) is model, patched_with(model) is None]
    return found


def test_a_model_inside_torch_compile_or_ddp_is_patched():
    assert on_ranks(WORLD, compiled_models) == [[True] * 9] * WORLD


def own_steps(attends, reads):
    sp = make(size=WORLD)
    torch.manual_seed(0)
    model = Model(sp if attends else None, reads)
    engine, *_ = ds_seqpar.initialize(model=model, config=good(), sequence_parallel=sp)
    for _ in range(2):
        [batch] = sp.shard_batches([BATCH])
        engine.backward(engine(**batch))
        if refused := refusal(engine.step)[1]:
            return refused
    return None


def test_the_first_step_of_a_model_that_takes_a_shard_for_a_whole_sequence_is_refused():
    for attends, reads, words in ((False, True, "no attention"), (True, False, "position_ids")):
        for message in on_ranks(WORLD, own_steps, attends, reads):
            assert is_one_sentence(message)
            assert missing(message, words) == []
    assert on_ranks(WORLD, own_steps, True, True) == [None, None]

"""The doctor finds each fault that is planted in the product, names its cause, and leaves everything else as it was."""

import contextlib
import gc
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from transformers import LlamaForSequenceClassification
from transformers.integrations import is_deepspeed_zero3_enabled

import ds_seqpar
from ds_seqpar import SequenceParallel
from ds_seqpar.data import batches
from ds_seqpar.doctor import Job, data, examine
from ds_seqpar.whole import tensor
from hf_integration.doctor import checks
from tests.dist.ranks import is_one_sentence, make, refusal
from tests.hf.llama import adam, llama, settings, small, step, with_lora
from tests.hf.test_own_heads import ZLossForCausalLM
from tests.hf.trainers import make as trainer_of
from tests.launch import on_each_of, on_engine_ranks, on_trainer_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 4
SECTION = {"size": 2, "ulysses": 1}


@contextlib.contextmanager
def planted(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def changed(change):
    """`batches._shard`, what it returns changed."""
    before = batches._shard

    def shard(sp, batch, device):
        found = before(sp, batch, device)
        return {**found, **change(found)}

    return planted(batches, "_shard", shard)


def local_positions(shard):
    ids = shard["input_ids"]
    return {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


def shifted_late(shard):
    return {"shift_labels": torch.nn.functional.pad(shard["labels"][:, 1:], (0, 1), value=-100)}


def other_divisor():
    before = batches.shard_microbatches

    def sharded(*args, **kwargs):
        return [{**x, "num_items_in_batch": x["num_items_in_batch"] / 2} for x in before(*args, **kwargs)]

    return planted(batches, "shard_microbatches", sharded)


def split_groups():
    by_rank = lambda sp, dataset: DistributedSampler(dataset, dist.get_world_size(), dist.get_rank())  # noqa: E731
    return planted(SequenceParallel, "sampler", by_rank)


def plain_sum(ctx, grad):
    return grad, None


# fault -> (what plants it, the check that finds it, words of its sentence)
FAULTS = {
    "labels shifted after sharding": (lambda: changed(shifted_late), data.batches, ("labels", "after sharding")),
    "local position ids": (lambda: changed(local_positions), data.batches, ("position_ids", "each rank's own")),
    "wrong divisor": (other_divisor, data.batches, ("num_items_in_batch", "2 times")),
    "split groups": (split_groups, data.loaders, ("ranks 0-1 share", "sp.sampler")),
    "wrong gradient scale": (
        lambda: planted(tensor._Sum, "backward", staticmethod(plain_sum)),
        checks.loss_and_gradients,
        ("gradients are 0.5 times",),
    ),
    "padding ignored": (
        lambda: planted(batches, "checked_mask", lambda *_: None),
        checks.loss_and_gradients,
        ("padding is not masked",),
    ),
}


def reversed_rows(model):
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


def permuted(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data[torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))]


def exchanged(model):
    """Two parameters of one shape."""
    attention = model.model.layers[0].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


def another_weight(model):
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 0.5


# what one rank's model has -> words of the sentence
WEIGHTS = {
    "another weight": (another_weight, ("lm_head.weight", "digest", "rank 2")),
    "reversed rows": (reversed_rows, ("lm_head.weight", "rank 2")),
    "permuted rows": (permuted, ("layers.0.self_attn.q_proj.weight", "rank 2")),
    "exchanged": (exchanged, ("layers.0.self_attn.k_proj.weight", "rank 2")),
    "buffer": (lambda model: model.model.rotary_emb.inv_freq.mul_(2), ("rotary_emb.inv_freq", "rank 2")),
    "frozen": (lambda model: model.lm_head.requires_grad_(False), ("lm_head.weight", "rank 2: ", "frozen")),
    "on the meta device": (lambda model: model.lm_head.half(), ("lm_head.weight", "rank 2: ", "float16")),
}


def found_of_faults():
    """On a rank: fault -> the findings of its check; and of all these checks without one."""
    sp, model = make(heads=(8, 2), **SECTION), small()
    job, found = Job(sp=sp, model=model), {}
    for name, (plant, check, _) in FAULTS.items():
        with plant():
            found[name] = examine(job, [(name, check)], str)
    for name, (change, _) in WEIGHTS.items():
        other = small().to("meta" if name == "on the meta device" else "cpu")
        if dist.get_rank() == 2:
            change(other)
        found[name] = examine(Job(sp=sp, model=other), [("weights", checks.weights)], str)
    sound = [("batches", data.batches), ("loaders", data.loaders), ("model", checks.loss_and_gradients)]
    return found, examine(job, [*sound, ("weights", checks.weights)], str)


def test_a_vocabulary_of_special_ids_alone_has_tokens():
    """The doctor failed sound models with one, and a proof refused them."""
    assert {*checks.tokens_for(small(vocab_size=3, pad_token_id=0).config, 2, 20).flatten().tolist()} == {0, 1, 2}


def test_each_planted_fault_is_named():
    (found, sound), *others = on_engine_ranks(WORLD, found_of_faults)
    assert all(words == found for words, _ in others)
    assert {finding.status for finding in sound} == {"pass"}, sound
    expected = {name: words for name, (*_, words) in FAULTS.items()}
    expected |= {name: words for name, (_, words) in WEIGHTS.items()}
    for name, words in expected.items():
        wrong = [finding for finding in found[name] if finding.status == "fail"]
        assert wrong, (name, found[name])
        assert not missing(wrong[0].detail, *words), (name, wrong[0].detail)
        assert wrong[0].advice, name


def groups():
    gc.collect()
    return len(dist.distributed_c10d._world.pg_map)


def steps_of(stage, doctor):
    """On a rank: losses after `initialize`, and what the doctor may have changed of the process."""
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    before = groups()
    model, config = llama(), settings(SECTION, stage, 1, 1, **adam(1e-3))
    engine, *_ = ds_seqpar.initialize(model=model, config=config, doctor=doctor)
    sp = engine.sequence_parallel
    found: list = [sp.sharding.unused.is_met]
    for _ in range(2):
        ids = torch.randint(0, 64, (1, 48))
        found.append(step(engine, sp.shard_batches([{"input_ids": ids, "labels": ids}])))
    drawn = float(torch.rand(())), random.random(), np.random.random()
    return groups() - before, found, drawn, is_deepspeed_zero3_enabled(), dict(sp.comm.received), sp.accumulation_steps


def before_training(stage):
    """On a rank: `steps_of`, without and with the doctor; what `initialize` says of a fault."""
    without, examined = (steps_of(stage, doctor) for doctor in (False, True))
    with changed(local_positions):
        section = {**SECTION, "doctor": True}
        refused = refusal(ds_seqpar.initialize, model=llama(), config=settings(section, stage, 1, 1, **adam(1e-3)))
    return without, examined, refused


@pytest.mark.parametrize("stage", ["2", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("0", "1", "3"))])
def test_it_examines_before_the_first_step_and_changes_nothing(stage):
    for without, examined, (kind, sentence) in on_engine_ranks(2, before_training, stage):
        assert repr(without[1:]) == repr(examined[1:])
        assert examined[0] <= without[0], "groups"  # DeepSpeed's first engine makes one that stays
        assert kind == "ConfigError"
        assert is_one_sentence(sentence)
        assert not missing(sentence, "the doctor", "position_ids count each rank's own tokens")


def trained(stage, fault):
    """On a rank: the losses of a Trainer with the doctor, or what it says of a fault."""
    trainer = trainer_of("unused", 1, {**SECTION, "doctor": True}, stage, max_steps=2)
    with changed(local_positions) if fault else contextlib.nullcontext():
        try:
            trainer.train()
        except ds_seqpar.SeqParError as error:
            return type(error).__name__, str(error)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_losses(stage):
    trainer = trainer_of("unused", 1, SECTION, stage, max_steps=2)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_examines_before_its_first_step(tmp_path, monkeypatch, stage):
    monkeypatch.chdir(tmp_path)
    assert on_trainer_ranks(WORLD, trained, stage, False) == on_trainer_ranks(WORLD, plain_losses, stage)
    for kind, sentence in on_trainer_ranks(WORLD, trained, stage, True):
        assert kind == "ConfigError"
        assert not missing(sentence, "the doctor", "position_ids count each rank's own tokens")


class Own(torch.nn.Module):
    """A model of a user's own, which calls sp.attention."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 16)


# models of other classes -> the status of each check
OTHERS = {
    "own loss": (lambda: ZLossForCausalLM(small().config), ["pass", "pass", "not tried"]),
    "classes": (lambda: LlamaForSequenceClassification(small().config), ["pass", "pass", "not tried"]),
    "three special ids": (lambda: small(vocab_size=3, pad_token_id=0), ["pass", "pass", "pass"]),
    "adapters": (lambda: with_lora(small(), "q_proj"), ["pass", "pass", "pass"]),
}


@pytest.mark.slow
@on_each_of(2, keep="deepspeed")
def test_models_of_other_classes():
    sp, content = make(heads=(8, 2), **SECTION), {"zero_optimization": {"stage": 2}}
    for name, (model, expected) in OTHERS.items():
        findings = examine(Job(sp=sp, model=model(), content=content), checks.CHECKS, str)
        assert [finding.status for finding in findings] == expected, (name, findings)


@pytest.mark.slow
@on_each_of(2, keep="deepspeed")
def test_a_model_of_ones_own_and_another_weight_end_initialize():
    config = settings(SECTION, "2", 1, 1, **adam(1e-3))
    ds_seqpar.initialize(model=Own(), config=config, sequence_parallel=make(**SECTION), doctor=True)
    model = small()
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 0.5 * dist.get_rank()
    kind, sentence = refusal(ds_seqpar.initialize, model=model, config=config, doctor=True)
    assert kind == "ConfigError"
    assert not missing(sentence, "lm_head.weight", "rank 1", "the same checkpoint")

"""Compiled models train as eager ones do: the same numbers, the same refusals, and one graph where that can be."""

import pytest
import torch
from torch._dynamo.utils import counters

import ds_seqpar
from tests.dist.ranks import WRONG, make, refusal
from tests.hf import trainers
from tests.hf.llama import averaged, gap, norm, one_process, part, ragged, settings, small, step, with_lora
from tests.launch import on_each_of
from tests.oracle import error

SECTION = {"size": 2, "ulysses": 2}


def window():
    return ragged({"size": 2}, data_size=1, steps=1, sequences=2)


ALL = {"head_chunks": 2, "overlap": True}


@pytest.mark.parametrize(
    ("degree", "checkpointing", "section"),
    [
        (2, True, ALL),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((1, False, {}), (2, False, {}), (2, False, ALL))),
    ],
)
@on_each_of(2, keep=None, timeout=300)
def test_a_compiled_patched_model_is_one_graph_and_refuses_what_an_eager_one_does(degree, checkpointing, section):
    sp, model = make(ulysses=degree, **section), small()
    expected, loss = one_process(small(), window())
    model.patch_attention(sp)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model.train(), backend="aot_eager", fullgraph=True)
    (batch,) = sp.shard_batches(window())
    batch["position_ids"] = batch["position_ids"] + 0  # as wrong ones come: it is compiled once for both
    mine = compiled(**batch).loss
    mine.backward()
    assert gap(averaged(model), expected) < 1e-5
    assert abs(sp.mean_loss(mine) - loss) < 1e-5
    is_wrong = sp.rank == WRONG
    told = refusal(compiled, **{**batch, "position_ids": batch["position_ids"] + int(is_wrong)})
    assert sum(counters["graph_break"].values()) == 0
    kind, message = told
    assert (kind, "position_ids" in message) == ("InputError" if is_wrong else "DisagreementError", True), told


@on_each_of(2, keep=None, timeout=300)
def test_compiled_layers_draw_alike():
    """Losses of a model with dropout, eager and with its layers compiled, as people compile large models."""
    torch.manual_seed(1)
    model, losses = with_lora(small(), "q_proj", lora_dropout=0.3).train(), []
    model.patch_attention(make())
    for _ in range(2):
        torch.manual_seed(4)
        losses.append(model(**window()[0]).loss.item())
        model.base_model.model.model.layers[0].compile(backend="eager")
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@on_each_of(2, keep=None, timeout=300)
def test_a_compiled_model_refuses_all_that_an_eager_one_does():
    """For each of which it is compiled anew."""
    sp, model = make(), small()
    model.patch_attention(sp)
    compiled = torch.compile(model, backend="eager")
    (batch,) = sp.shard_batches(window())
    for words, wrong in {
        "padding mask": {**batch, "attention_mask": torch.zeros_like(batch["labels"])},
        "no shift_labels": {name: x for name, x in batch.items() if name != "shift_labels"},
        "got none": {**batch, "position_ids": None},
    }.items():
        kind, message = refusal(compiled, **wrong)
        assert (kind, words in message) == ("InputError", True), message


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("stage", "how", "backend"),
    [
        ("2", "model", "eager"),
        pytest.param("2", "engine", "eager", marks=pytest.mark.slow),
        *(pytest.param("2", how, "aot_eager", marks=pytest.mark.slow) for how in ("model", "engine")),
        pytest.param("3", "engine", "aot_eager", marks=pytest.mark.slow),
    ],
)
@on_each_of(2, keep=None, timeout=400)
def test_zero_engines_with_compiled_models(stage, how, backend):
    """A step of a ZeRO engine whose model, or which itself, is compiled."""
    expected, loss = one_process(small(), window())
    model = small()
    given = torch.compile(model, backend=backend) if how == "model" else model
    engine, *_ = ds_seqpar.initialize(
        model=given, model_parameters=list(model.parameters()), config=settings(SECTION, stage, 1, 2),
        check_loss=backend != "eager",  # of another length, for which it would be compiled too
    )  # fmt: skip
    if how == "engine":
        engine.compile(backend=backend)
    sp = engine.sequence_parallel
    found = step(engine, sp.shard_batches([part(b, sp.data_rank, sp.data_size) for b in window()]))
    gradients = {name.removeprefix("_orig_mod."): x for name, x in found["gradients"].items()}
    assert gap(gradients, expected) < 1e-4, norm(gradients) / norm(expected)
    assert abs(found["loss"] - loss) < 1e-4


@pytest.mark.usefixtures("compiled")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@on_each_of(2, keep=None, timeout=500)
def test_the_trainer_takes_torch_compile(stage, tmp_path):
    """Two steps and an evaluation, eager and compiled, of examples of one length: another is compiled anew."""
    found, evaluation = [], {"eval_strategy": "steps", "eval_steps": 2}
    data = [{name: x.repeat(5)[:40] for name, x in example.items()} for example in trainers.documents(8)]
    for name, changes in (("eager", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": "aot_eager"})):
        trainer = trainers.make(
            f"{tmp_path}/{name}", 1, SECTION, stage, max_steps=2, gradient_accumulation_steps=1,
            parts={"train_dataset": data, "eval_dataset": data[:2]}, **evaluation, **changes,
        )  # fmt: skip
        found.append(trainers.trained(trainer).logs)
    eager, compiled = found
    assert compiled.keys() == eager.keys()
    assert {"loss", "grad_norm", "eval_loss"} <= eager.keys()
    for name, values in eager.items():
        assert values == pytest.approx(compiled[name], rel=1e-5), name


@pytest.mark.slow
@on_each_of(2, keep=None, timeout=300)
def test_a_compiled_model_takes_pack_after_pack():
    """Packs that are all different: it must not be compiled for one and used for another."""
    sp, model, eager = make(size=2, ulysses=1), small(), small()
    for one in (model, eager):
        one.patch_attention(sp)
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(5):
        dice = torch.Generator().manual_seed(seed)
        cut = int(torch.randint(1, 23, (1,), generator=dice))
        ids = torch.randint(3, 64, (1, 24 + seed % 3), generator=dice)
        positions = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]
        shard = sp.shard_batch({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})
        with torch.no_grad():
            assert error(compiled(**shard).logits, eager(**shard).logits) < 1e-5

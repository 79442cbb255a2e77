"""Compiled models train as eager ones do: the same numbers, the same refusals, and one graph where that can be."""

import pytest
import torch
from torch._dynamo.utils import counters

import ds_seqpar
from tests.dist.ranks import WRONG, make, refusal
from tests.hf import families, trainers
from tests.hf.llama import averaged, gap, norm, one_process, part, ragged, settings, small, step, with_lora
from tests.launch import on_ranks

SECTION = {"size": 2, "ulysses": 2}


def window():
    return ragged({"size": 2}, data_size=1, steps=1, sequences=2)


def compiled_gradients(degree, checkpointing, section):
    """(difference of gradients, of losses, graph breaks) of a patched and compiled LLaMA and one process; what it says
    of positions that are moved on one rank."""
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
    errors = gap(averaged(model), expected), abs(sp.mean_loss(mine) - loss)
    wrong = refusal(compiled, **{**batch, "position_ids": batch["position_ids"] + int(sp.rank == WRONG)})
    return errors, sum(counters["graph_break"].values()), wrong


ALL = {"head_chunks": 2, "overlap": True}


@pytest.mark.parametrize(
    ("degree", "checkpointing", "section"),
    [
        (2, True, ALL),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((1, False, {}), (2, False, {}), (2, False, ALL))),
    ],
)
def test_a_compiled_patched_model_is_one_graph_and_refuses_what_an_eager_one_does(degree, checkpointing, section):
    for rank, (errors, breaks, (kind, message)) in enumerate(
        on_ranks(2, compiled_gradients, degree, checkpointing, section, timeout=300)
    ):
        assert max(errors) < 1e-5
        assert breaks == 0
        assert kind == ("InputError" if rank == WRONG else "DisagreementError")
        assert "position_ids" in message


def on_whole_batches():
    """What a compiled model says of whole batches; and differences of gradients and loss between a patched LLaMA whose
    layers are compiled and the plain one. Whole logits are part of the loss."""
    plain, model, sp = small(), small(), make()
    model.patch_attention(sp)
    (batch,) = window()
    refused = refusal(torch.compile(model, backend="eager"), **batch)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    losses = []
    for its in (plain, model):
        output = its(**batch)
        losses.append(output.loss + output.logits[:, :-1].logsumexp(-1).pow(2).mean())
        losses[-1].backward()
    return refused, gap(averaged(model), families.gradients(plain)), abs((losses[1] - losses[0]).item())


def test_compiled_layers_take_whole_batches_and_a_compiled_model_refuses_them():
    for (kind, message), *differences in on_ranks(2, on_whole_batches, timeout=300):
        assert kind == "InputError"
        assert "layer.compile()" in message
        assert max(differences) < 1e-5


def layers():
    """Losses of a model with dropout, eager and with its layers compiled, as people compile large models."""
    torch.manual_seed(1)
    model, losses = with_lora(small(), "q_proj", lora_dropout=0.3).train(), []
    model.patch_attention(make())
    for _ in range(2):
        torch.manual_seed(4)
        losses.append(model(**window()[0]).loss.item())
        model.base_model.model.model.layers[0].compile(backend="eager")
    return losses


def test_compiled_layers_draw_alike():
    for losses in on_ranks(2, layers, timeout=300):
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def compiled_refusals():
    """What a compiled model says of wrong inputs, each of which it is compiled for anew."""
    sp, model = make(), small()
    model.patch_attention(sp)
    compiled = torch.compile(model, backend="eager")
    (batch,) = sp.shard_batches(window())
    return {
        "padding mask": refusal(compiled, **{**batch, "attention_mask": torch.zeros_like(batch["labels"])}),
        "no shift_labels": refusal(compiled, **{name: x for name, x in batch.items() if name != "shift_labels"}),
        "got none": refusal(compiled, **{**batch, "position_ids": None}),
    }


@pytest.mark.slow
def test_a_compiled_model_refuses_all_that_an_eager_one_does():
    for told in on_ranks(2, compiled_refusals, timeout=300):
        for words, (kind, message) in told.items():
            assert kind == "InputError"
            assert words in message


def engine_compiled(stage, how, backend):
    """A step of a ZeRO engine whose model, or which itself, is compiled."""
    model = small()
    given = torch.compile(model, backend=backend) if how == "model" else model
    config = settings(SECTION, stage, 1, 2)
    engine, *_ = ds_seqpar.initialize(
        model=given, model_parameters=list(model.parameters()), config=config,
        check_loss=backend != "eager",  # of another length, for which it would be compiled too
    )  # fmt: skip
    if how == "engine":
        engine.compile(backend=backend)
    sp = engine.sequence_parallel
    found = step(engine, sp.shard_batches([part(b, sp.data_rank, sp.data_size) for b in window()]))
    return {name.removeprefix("_orig_mod."): x for name, x in found["gradients"].items()}, found["loss"]


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
def test_zero_engines_with_compiled_models(stage, how, backend):
    expected, loss = one_process(small(), window())
    for gradients, mine in on_ranks(2, engine_compiled, stage, how, backend, timeout=400):
        assert gap(gradients, expected) < 1e-4, norm(gradients) / norm(expected)
        assert abs(mine - loss) < 1e-4


def trainer_compiled(folder, stage):
    """Logs of two steps and an evaluation, eager and compiled, of examples of one length: another is compiled anew."""
    found, evaluation = [], {"eval_strategy": "steps", "eval_steps": 2}
    data = [{name: x.repeat(5)[:40] for name, x in example.items()} for example in trainers.documents(8)]
    for name, changes in (("eager", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": "aot_eager"})):
        trainer = trainers.make(
            f"{folder}/{name}", 1, SECTION, stage, max_steps=2, gradient_accumulation_steps=1,
            parts={"train_dataset": data, "eval_dataset": data[:2]}, **evaluation, **changes,
        )  # fmt: skip
        found.append(trainers.trained(trainer).logs)
    return found


@pytest.mark.usefixtures("compiled")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_takes_torch_compile(stage, tmp_path):
    for eager, compiled in on_ranks(2, trainer_compiled, str(tmp_path), stage, timeout=500):
        assert compiled.keys() == eager.keys()
        assert {"loss", "grad_norm", "eval_loss"} <= eager.keys()
        for name, values in eager.items():
            assert values == pytest.approx(compiled[name], rel=1e-5), name


def compiled_for_many(count):
    """A compiled model on packs that are all different: it must not be compiled for one and used for another."""
    sp, model, eager = make(size=2, ulysses=1), small(), small()
    for one in (model, eager):
        one.patch_attention(sp)
    compiled, errors = torch.compile(model, backend="aot_eager"), []
    for seed in range(count):
        dice = torch.Generator().manual_seed(seed)
        cut = int(torch.randint(1, 23, (1,), generator=dice))
        ids = torch.randint(3, 64, (1, 24 + seed % 3), generator=dice)
        positions = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]
        shard = sp.shard_batch({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})
        with torch.no_grad():
            a, b = compiled(**shard).logits, eager(**shard).logits
        errors.append(((a - b).abs().max() / b.abs().max()).item())
    return max(errors)


@pytest.mark.slow
def test_a_compiled_model_takes_pack_after_pack():
    assert max(on_ranks(2, compiled_for_many, 5, timeout=300)) < 1e-5

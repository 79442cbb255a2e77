"""One step in bf16 on one device, by `initialize` and by the Trainer, beside the plain model in fp32."""

import contextlib

import pytest
import torch

import ds_seqpar
from ds_seqpar.engine import start
from hf_integration import whole_sequences
from tests.gpu import STEPS, both
from tests.hf import test_prompts_once as prompts_once
from tests.hf import trainers
from tests.hf.families import model_of
from tests.hf.llama import IGNORE, SEQ, llama, norm, one_process, settings, small, update
from tests.launch import on_each_of, on_ranks
from tests.oracle import assert_exact, dense, tensors

pytestmark = pytest.mark.usefixtures("compiled")
KINDS = {**STEPS, "experts": STEPS["checkpoints"]}
ON_CPU = ("plain", "experts", "all")  # other tests have the rest there


def window():
    """Two micro-batches of two sequences; the labels of their first tokens do not count."""
    dice, batches = torch.Generator().manual_seed(5), []
    for without in (3, 11):
        ids = torch.randint(0, 64, (2, SEQ), generator=dice)
        labels = ids.clone()
        labels[:, :without] = IGNORE
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def model_for(name):
    return model_of("qwen3_moe", output_router_logits=False, window=SEQ) if name == "experts" else llama()


def steps(stage, names):
    """Of each kind of step: (loss, norm of the gradients, where the engine's parameters are)."""
    found = {}
    for name in names:
        section, keeps = KINDS[name]
        model = model_for(name)
        if keeps:
            model.gradient_checkpointing_enable(keeps)
        config = settings({"size": 1, **section}, stage, 2, 2, bf16={"enabled": True})
        engine, *_ = ds_seqpar.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        batches = engine.sequence_parallel.shard_batches(window(), device=engine.device)
        found[name] = *update(engine, batches), engine.device.type
        engine.destroy()
    return found


@both()
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_step_of_initialize(stage, device):
    names = ON_CPU if device == "cpu" else tuple(KINDS)
    (found,) = on_ranks(1, steps, stage, names, patience=None, timeout=300)
    wanted = {kind: one_process(model_for(kind), window()) for kind in ("plain", "experts")}
    for name, (ours, length, kind) in found.items():
        gradients, loss = wanted.get(name, wanted["plain"])
        assert kind == device, name
        assert ours == pytest.approx(loss, rel=1e-2), name
        assert length == pytest.approx(norm(gradients), rel=3e-2), name


def trained(folder, device):
    """Of a plain Trainer in fp32 and of ours in bf16: losses and norms of two steps, and the loss on held-out data."""
    found = []
    for section, bf16 in ((None, False), ({"size": 1}, True)):
        trainer = trainers.make(
            f"{folder}/{bf16}", 2, section, max_steps=2, bf16=bf16, use_cpu=device == "cpu",
            deepspeed_changes={"bf16": {"enabled": bf16}}, model=small(pad_token_id=0, attn_implementation="eager"),
        )  # fmt: skip
        run = trainers.trained(trainer)
        where = next(trainer.model.parameters()).device.type
        found.append([*run["loss"], *run["grad_norm"], trainer.evaluate()["eval_loss"], where])
    return found


@both()
def test_two_steps_of_the_trainer(device, tmp_path):
    ((plain, ours),) = on_ranks(1, trained, str(tmp_path), device, patience=None)
    assert plain.pop() == ours.pop() == device
    assert ours == pytest.approx(plain, rel=3e-2)


@both()
@on_each_of(1, patience=None)
def test_fp32(device):
    start()
    sp = ds_seqpar.SequenceParallel(ds_seqpar.SequenceParallelConfig(size=1))
    q, k, v, do = (x.to(device) for x in tensors(1, 64, (4, 2), 64, torch.float32))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sp.attention(q, k, v)
    found = out, *torch.autograd.grad(out, (q, k, v), do)
    assert_exact([x.detach().cpu() for x in found], dense(*(x.detach().cpu() for x in (q, k, v, do))), limit=1e-5)


def numbers(device):
    """Of the plain model in fp32, and of the patched one in bf16 with prompts computed once: log-probabilities of
    completions, and the gradient of their mean by the embedding."""
    start()
    found, rows = [], prompts_once.batch()
    ids, mask, labels = (rows[name] for name in ("input_ids", "attention_mask", "labels"))
    for dtype in (torch.float32, torch.bfloat16):
        model = small().to(device, dtype)
        sp = prompts_once.make(shared_prompts=True)
        model.patch_attention(sp)
        with contextlib.nullcontext() if dtype is torch.bfloat16 else whole_sequences(model):
            on_device = {"attention_mask": mask, "labels": labels.to(device)}
            logps = sp.log_probs(model, ids.to(device), **on_device)
        logps.mean().backward()
        found.append([logps.detach().cpu(), model.get_input_embeddings().weight.grad.float().cpu()])
    return [(x, y, device) for x, y in zip(*found, strict=True)]


@both()
def test_numbers_a_token_of_shared_prompts(device):
    (found,) = on_ranks(1, numbers, device, patience=None)
    for expected, ours, _ in found:
        assert float((ours - expected).abs().max() / expected.abs().max()) < 3e-2

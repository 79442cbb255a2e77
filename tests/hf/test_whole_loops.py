"""Loops that know nothing of sequence parallelism train a patched model as they train the plain one."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from tests import scripts
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.llama import array, gap, small
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
DOCS = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text(encoding="utf-8")
# of a script for them: what MODEL stands for in it
MODEL = """model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96,
    num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2,
))"""
DDP = """
import contextlib, json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randint(0, 64, (24, 50))
MODEL
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=2, sampler=sampler)
ddp, steps, losses, norms = DistributedDataParallel(model), 2, [], []
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for number, ids in enumerate(loader):
    last = (number + 1) % steps == 0
    with contextlib.nullcontext() if last else ddp.no_sync():
        loss = ddp(input_ids=ids, labels=ids).loss / steps
        loss.backward()
    losses.append(loss.item() * steps)
    if last:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
print(json.dumps([losses, norms, weights]))
""".replace("MODEL", MODEL)
CHANGES = {
    "from transformers import LlamaConfig": (
        "from hf_integration import share_sequences\nfrom transformers import LlamaConfig"
    ),
    "sampler = DistributedSampler(data, shuffle=False)": (
        "sp = share_sequences(model, size=2)\nsampler = sp.sampler(data, shuffle=False)"
    ),
}
ACCELERATE = """
import json
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
data = torch.randint(0, 64, (23, 50))
MODEL
loader = DataLoader(data, batch_size=2, shuffle=True)
optimizer, losses, norms, rates, seen = torch.optim.SGD(model.parameters(), lr=0.5), [], [], [], []
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
wrapped, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for ids in loader:
    with accelerator.accumulate(wrapped):
        loss = wrapped(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        seen += accelerator.gather_for_metrics(ids[:, 0]).tolist()
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
print(json.dumps([losses, norms, rates, seen, weights]))
""".replace("MODEL", MODEL)
WITH_ACCELERATE = {
    "from transformers import LlamaConfig": (
        "from hf_integration import share_accelerator, share_sequences\nfrom transformers import LlamaConfig"
    ),
    "loader = DataLoader(data, batch_size=2, shuffle=True)": (
        "sp = share_sequences(model, size=2)\n"
        "accelerator = share_accelerator(accelerator, sp)\n"
        "loader = DataLoader(data, batch_size=2, shuffle=True)"
    ),
}


def printed(ran):
    assert not ran.failed, ran.stderr[-3000:]
    return [json.loads(line) for line in re.findall(r"^\[\[.*\]\]$", ran.stdout, re.M)]


@pytest.mark.parametrize(
    ("script", "changes"), [(DDP, CHANGES), (ACCELERATE, WITH_ACCELERATE)], ids=["own loop", "accelerate"]
)
def test_three_lines_make_a_script_sequence_parallel(script, changes, tmp_path):
    """The plain script on 2 ranks, the changed one on 4, of which pairs share a sequence."""
    changed = script
    for line, lines in changes.items():
        assert changed.count(line) == 1
        changed = changed.replace(line, lines)
    new = [line for line in changed.splitlines() if line not in script.splitlines()]
    assert len(new) <= 3
    assert [line for line in new if f"+{line}" not in DOCS] == []
    found = []
    for ranks, text in ((2, script), (4, changed)):
        path = tmp_path / f"on_{ranks}.py"
        path.write_text(text)
        found.append(printed(scripts.run(ranks, tmp_path, path)))
    plain, shared = found
    for rank, run in enumerate(shared):
        (*figures, weights), (*expected, wanted) = run, plain[rank // 2]
        for its, theirs in zip(figures, expected, strict=True):
            assert its == pytest.approx(theirs, rel=1e-6)
        assert np.abs(np.subtract(weights, wanted)).max() <= 1e-6 * np.abs(wanted).max()


# --- FSDP2 that casts what modules are given, for which it rebuilds all dataclasses in their arguments

IDS = torch.randint(0, 64, (2, 47), generator=torch.Generator().manual_seed(1))
CAST = {
    "whole, of odd length": {},
    "sharded packs": {"position_ids": torch.cat([torch.arange(19), torch.arange(28)]).expand(2, -1)},
}


def in_fsdp2(model, dtype):
    policy, mesh = MixedPrecisionPolicy(param_dtype=dtype), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def gradients(dtype, batch, shared):
    """Of a model that two ranks train on the same batch, or on their shares of it."""
    model, sp = small(use_cache=False).train(), make(size=2) if shared else None
    around = in_fsdp2(model if sp is None else model.patch_attention(sp), dtype)
    around(**(sp.shard_batch(batch) if sp is not None and "position_ids" in batch else batch)).loss.backward()
    return {name: array(p.grad.full_tensor()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", each_then_rest(["sharded packs"], ["whole, of odd length"]))
@on_each_of(2, keep="deepspeed")
def test_fsdp2_casts_to_bf16(name):
    """How far bf16's gradients are from fp32's, of a plain model and of a patched one; and the tokens of both."""
    labels = IDS.masked_fill(CAST[name].get("position_ids", IDS.new_ones(())) == 0, -100)
    batch = {"input_ids": IDS, "labels": labels, **CAST[name]}
    exact = gradients(torch.float32, batch, False)
    plain, ours = (gap(gradients(torch.bfloat16, batch, shared), exact) for shared in (False, True))
    assert 1e-4 < plain < 0.1
    assert ours < 1.5 * plain
    mask = torch.ones_like(IDS).index_fill_(1, torch.arange(3), 0)
    mask[0] = 1
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    models = [in_fsdp2(model.eval(), torch.bfloat16) for model in (small(), small().patch_attention(make(size=2)))]
    expected, tokens = (model.generate(input_ids=IDS, **how) for model in models)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("patched_first", [False, True])
@on_each_of(2, keep="deepspeed")
def test_fsdp1_is_refused_by_name(patched_first):
    """Of a model whose layers were in FSDP1 before it was patched, or after that."""
    model, sp = small(use_cache=False), make(size=2)
    if patched_first:
        model.patch_attention(sp)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    told = refusal(model, IDS) if patched_first else refusal(model.patch_attention, sp)
    assert lacking(told, "ConfigError", "FullyShardedDataParallel", "not supported", "fully_shard") == []

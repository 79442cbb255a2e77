"""Loops and models that are not ours to patch: DDP without DeepSpeed, and a model of another family."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, Starcoder2Config, Starcoder2ForCausalLM

import ds_seqpar
from hf_integration import patch_attention
from tests.dist.ranks import is_one_sentence, make, refusal
from tests.hf.llama import MODES, array, gap, one_process, part, ragged, settings, small
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 4
DOCS = Path(__file__).parents[2] / "docs"


def window():
    return ragged(MODES["r2"], 2, 3)


def on_ddp(divisors):
    """Gradients of a window of three micro-batches on DDP, as docs/own_loop.md has it; by what the loss is
    divided by."""
    sp, found = make(**MODES["r2"]), []
    for divisor in divisors:
        model = DistributedDataParallel(patch_attention(small(), sp))
        batches = sp.shard_batches([part(batch, sp.data_rank, sp.data_size) for batch in window()])
        for number, batch in enumerate(batches):
            with contextlib.nullcontext() if number == len(batches) - 1 else model.no_sync():
                (model(**batch).loss / divisor).backward()
        found.append({name: array(p.grad) for name, p in model.module.named_parameters()})
    return found


def test_ddp_with_accumulation_needs_the_loss_divided():
    """Without it gradients are G times too large: nobody divides by G where engine.backward does not."""
    expected, _ = one_process(small(), window())
    for divided, whole in on_ranks(WORLD, on_ddp, (3, 1)):
        assert gap(divided, expected) < 1e-5
        assert gap(whole, {name: g * 3 for name, g in expected.items()}) < 1e-5


def run_snippets(snippet, loop, folder):
    """The loss and the weights after a step of SGD; the gradients of a loop without DeepSpeed on the same model."""
    names = {"DistributedDataParallel": DistributedDataParallel}
    with contextlib.chdir(folder):
        exec(snippet, names)
    after = {name: array(p) for name, p in names["model"].named_parameters()}
    torch.manual_seed(0)
    names["model"] = Starcoder2ForCausalLM(names["config"])
    exec(loop, names)
    return names["loss"], after, {name: array(p.grad) for name, p in names["model"].module.named_parameters()}


def test_another_family_by_its_own_attention_function(tmp_path):
    """What docs/models.md shows, as it stands there, against one process that takes each document alone."""
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    ((snippet, loop),) = re.findall(r"```python\n(# starcoder.py: .*?)```.*?```python\n(.*?)```", page, re.S)
    rate = 1.0
    config = settings(MODES["u2r2"], "2", 2, 1, optimizer={"type": "SGD", "params": {"lr": rate}})
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = starcoder()
    ids = torch.randint(0, 256, (2, 1, 512))
    documents = ids[0], ids[1][:, :300], ids[1][:, 300:]
    gradients, loss = one_process(model, [{"input_ids": x, "labels": x} for x in documents])
    expected = {name: array(p) - rate * gradients[name] for name, p in model.named_parameters()}
    for found, after, without_deepspeed in on_ranks(WORLD, run_snippets, snippet, loop, tmp_path):
        assert found == pytest.approx(loss, rel=1e-5)
        assert gap(after, expected) < 1e-5
        assert gap(without_deepspeed, gradients) < 1e-5


def starcoder(**changes):
    return Starcoder2ForCausalLM(Starcoder2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0, **changes,
    ))  # fmt: skip


def without_cache():
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=256, n_embd=64, n_layer=2, n_head=8, attn_pdrop=0.0))


def never_called():
    sp = make((8, 2), **MODES["u2r2"])
    config = settings(MODES["u2r2"], "2", 1, 1)
    engine, *_ = ds_seqpar.initialize(model=without_cache(), config=config, sequence_parallel=sp)
    ids = torch.arange(32)[None]
    return (
        refusal(engine, **sp.shard_batch({"input_ids": ids, "labels": ids})),
        refusal(ds_seqpar.initialize, model=without_cache(), config=config),
    )


def test_another_family_that_does_not_call_it():
    """Its attention would be that of each shard."""
    for (kind, message), (other_kind, other) in on_ranks(WORLD, never_called):
        assert kind == other_kind == "ConfigError"
        assert missing(message, "sp.attention", "no attention of a SequenceParallel") == []
        assert missing(other, "transformer.h.0.attn", "sp.attention") == []
        assert is_one_sentence(message)
        assert is_one_sentence(other)

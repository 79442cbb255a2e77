"""What takes a rank away while it trains: memory, a kill, a full disk. The others are told, and a run goes on."""

import os

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import ds_seqpar
from tests.dist.ranks import is_one_sentence
from tests.dist.test_ends import prints
from tests.launch import on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
NEEDY, ABSENT = 1, 2**50  # the rank that asks for so many bytes
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "sequence_parallel": {"size": 2},
}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def asks(*_):
    torch.empty(ABSENT, dtype=torch.uint8)


def plant(engine, place):
    """Let the needy rank ask for too much, in the MLP of the second layer or when the optimizer begins."""
    mlp, before = engine.module.model.layers[1].mlp, LlamaMLP.forward

    def forward(self, x):
        if self is mlp and place == "forward":
            asks()
        out = before(self, x)
        if self is mlp:
            out.register_hook(asks)
        return out

    if place == "optimizer":
        engine.optimizer.optimizer.register_step_pre_hook(asks)
    else:
        LlamaMLP.forward = forward


def out_of_memory(folder, place):
    """What the rank that has memory is told, in words; the other prints, and ends as an uncaught error ends it."""
    torch.manual_seed(0)
    engine, *_ = ds_seqpar.initialize(model=LlamaForCausalLM(LlamaConfig(**SIZES)), config=CONFIG)
    sp, ids = engine.sequence_parallel, torch.arange(32)[None] % 64
    for step in range(2):
        if step == 1 and dist.get_rank() == NEEDY:
            plant(engine, place)
        try:
            for batch in sp.shard_batches([{"input_ids": ids, "labels": ids}]):
                engine.backward(engine(**batch).loss)
                engine.step()
        except RuntimeError as error:
            prints(error, folder / "shared")
            if dist.get_rank() == NEEDY:
                os._exit(1)
            return str(error)
    raise AssertionError("nobody ran out of memory")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("forward", "in forward of layer 1 (LlamaMLP)"),
        pytest.param("backward", "in backward", marks=pytest.mark.whole),
        pytest.param("optimizer", "in the optimizer step", marks=pytest.mark.whole),
    ],
)
def test_a_rank_out_of_memory_is_told_on_all(place, words, tmp_path):
    told, (died, *_) = on_ranks(2, out_of_memory, tmp_path, place, check=False)
    assert died == "Died"
    lines = (tmp_path / "shared").read_text().splitlines()
    sentence = next(line for line in lines if "ran out of memory" in line)
    assert lines[-1] == sentence
    assert sum("Error: " in line for line in lines) == 1, lines
    needed = f"rank {NEEDY} ran out of memory {words}", "1.05e+06 GiB", "predicts 1.86 GiB a rank for 32 tokens"
    assert missing(sentence, *needed) == []
    assert is_one_sentence(sentence)
    # DeepSpeed's own calls raise what the backend says; the rank then prints nothing, since the cause is told
    assert ("ran out of memory" in told) == (place != "optimizer"), told

"""A model as wide as those that people train, with one layer: parameters of more than 2^29 numbers, in bf16."""

import gc
import resource

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_seqpar
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import Zero
from ds_seqpar.planner.footprint import footprint
from ds_seqpar.planner.request import TrainingStep
from hf_integration import share_sequences
from hf_integration.look.sizes import config_sizes
from tests.hf.llama import llama
from tests.hf.test_footprint import Within, resting, tensors
from tests.launch import on_ranks

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.slow, pytest.mark.timeout(1800)]
SIZES = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "dtype": torch.bfloat16,
}  # fmt: skip
SECTION = {"size": 2, "ulysses": 1}
RATE, STEPS, SEQ = 0.1, 3, 64
BUCKET = 2**24
GIB = 2**30


def wide():
    torch.set_default_dtype(torch.bfloat16)
    model = llama(**SIZES)
    torch.set_default_dtype(torch.float32)
    assert next(model.parameters()).dtype == torch.bfloat16
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def ids():
    return torch.randint(0, SIZES["vocab_size"], (1, SEQ), generator=torch.Generator().manual_seed(0))


def generated(model):
    model.eval()
    with torch.no_grad():
        new = model.generate(ids()[:, :9], max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.train()
    return new[0, 9:].tolist()


def by_hand(wrapped, optimizer):
    loss = wrapped(input_ids=ids(), labels=ids()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Copies:
    """SGD on fp32 copies of the parameters, as DeepSpeed's."""

    def __init__(self, parameters):
        self.pairs = [(p, p.detach().float()) for p in parameters]

    @torch.no_grad()
    def step(self):
        for p, copy in self.pairs:
            p.copy_(copy.sub_(p.grad, alpha=RATE))

    def zero_grad(self):
        for p, _ in self.pairs:
            p.grad = None


def plain(has_copies):
    """(losses, tokens) of the model on one process."""
    model = wide()
    tokens = generated(model)
    optimizer = Copies(model.parameters()) if has_copies else torch.optim.SGD(model.parameters(), lr=RATE)
    return [by_hand(model, optimizer) for _ in range(STEPS)], tokens


def shared(way):
    """On a rank: losses, tokens, bytes between steps, at the most in a step, those that are predicted, and RSS."""
    before = resting()
    model, stage = wide(), int(way[-1]) if way.startswith("ZeRO") else 0
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # fmt: skip
    if way.startswith("ZeRO"):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
            "sequence_parallel": {**SECTION, "doctor": True},
        }
        engine, *_ = ds_seqpar.initialize(model=model, config=config)
        sp, tokens = engine.sequence_parallel, generated(engine.module)

        def step():
            (batch,) = sp.shard_batches([{"input_ids": ids(), "labels": ids()}])
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            return sp.mean_loss([loss])
    else:
        sp = share_sequences(model, **SECTION)
        tokens = generated(model)
        if way == "FSDP2":
            for layer in model.model.layers:
                fully_shard(layer)
        wrapped = DistributedDataParallel(model) if way == "DDP" else fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step():
            return by_hand(wrapped, optimizer)

    losses = [step()]
    states, peaks = resting() - before, []
    for _ in range(STEPS - 1):  # gloo may let go of what it has sent late
        gc.collect()
        with Within(*tensors()) as seen:
            losses.append(step())
        peaks.append(seen.peak)
    heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    config, numbers = SequenceParallelConfig(**SECTION).resolve(2, heads), config_sizes(model.config)
    said = footprint(
        TrainingStep(model=numbers, config=config, world=2, seq=SEQ, zero=Zero(**zero), optimizer_states=0)
    )
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return losses, tokens, (states, states + min(peaks)), (said.resting.total, said.peak.total), rss


@pytest.mark.parametrize("way", ["ZeRO-0", "ZeRO-2", "ZeRO-3", "DDP", "FSDP2"])
def test_a_model_of_real_width(way):
    """The command `memory` predicts DeepSpeed's steps alone."""
    ((losses, tokens),) = on_ranks(1, plain, way.startswith("ZeRO"), timeout=900)
    for mine, new, taken, said, rss in on_ranks(2, shared, way, timeout=1500):
        figures = [f"{x / GIB:.2f}" for x in (*taken, *said, rss)]
        print(way, mine, losses, "GiB between steps, at the most; as predicted; RSS:", *figures)
        assert mine == pytest.approx(losses, rel=2e-3)
        assert new == tokens
        if way.startswith("ZeRO"):
            assert said[1] == pytest.approx(taken[1], rel=0.1)

"""Under whole_sequences a patched model is the model it was: each rank gives sequences of its own."""

import pytest
import torch
import torch.distributed as dist

import ds_seqpar
import hf_integration
from hf_integration import patch_attention, unpatch_attention, whole_sequences
from tests.dist.ranks import make
from tests.hf.llama import IGNORE, MODES, gap, one_process, ragged, settings, small, step
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 2
SECTION = MODES["r2"]


def own_batch():
    """Sequences of this rank's own, as long as no shard could be, padded on both sides."""
    ids = torch.randint(3, 64, (3, 21), generator=torch.Generator().manual_seed(dist.get_rank()))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 15:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE)}


def outputs(model, batch):
    """Logits, loss, the logits of a forward with a cache, gradients (where a rank can have them) and new tokens."""
    with torch.no_grad():
        out = model(**batch)
        first = model(batch["input_ids"][:, :8], use_cache=True)
        second = model(batch["input_ids"][:, 8:10], past_key_values=first.past_key_values)
        prompt = {name: batch[name][:1] for name in ("input_ids", "attention_mask")}
        new = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return out.logits, out.loss, second.logits, new


def gradients(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def compared(of):
    """Whether a patched model under whole_sequences gives what the model gave before, bit for bit; and whether it is
    sharded again afterwards."""
    sp, batch, model = make(**SECTION), own_batch(), of().eval()
    before = outputs(model, batch), gradients(model, batch)
    patch_attention(model, sp)
    with whole_sequences(model):
        found = [same(outputs(model, batch), before[0]), same(gradients(model, batch), before[1])]
    (shard,) = sp.shard_batches(ragged(SECTION, 1, 1))
    sp.comm.received.clear()
    model(**shard)
    return [*found, sum(sp.comm.received.values()) > 0]


def test_it_is_the_unpatched_model():
    assert on_ranks(WORLD, compared, small) == [[True] * 3] * WORLD


def nested():
    """Whether ranks met in a forward: inside, inside twice, after the inner one, after it, after an exception, where
    the model was unpatched inside, and of a model that is not patched."""
    sp, model, met = make(**SECTION), small(), []
    patch_attention(model, sp)

    def call():
        sp.comm.received.clear()
        model(torch.ones(1, 16, dtype=torch.int64))
        met.append(bool(sp.comm.received))

    with whole_sequences(model):
        call()
        with whole_sequences(model):
            call()
        call()
    call()
    with pytest.raises(KeyError), whole_sequences(model):
        raise KeyError
    call()
    with whole_sequences(model):
        unpatch_attention(model)
    call()
    with whole_sequences(model):
        call()
    return met, model.config._attn_implementation


def test_it_nests_and_ends_with_exceptions():
    assert on_ranks(WORLD, nested) == [([False, False, False, True, True, False, False], "sdpa")] * WORLD


def evaluated(stage):
    """(logits and loss of an engine under whole_sequences, the plain model's, a step after it)"""
    batch = own_batch()
    with torch.no_grad():
        plain = small().eval()(**batch)
    engine, *_ = ds_seqpar.initialize(model=small(), config=settings(SECTION, stage, 1, 4))
    engine.eval()
    with torch.no_grad(), hf_integration.whole_sequences(engine):
        out = engine(**batch)
    engine.train()
    equal = torch.equal(out.logits, plain.logits), torch.equal(out.loss, plain.loss)
    return equal, step(engine, engine.sequence_parallel.shard_batches(ragged(SECTION, 1, 1)))


@pytest.mark.parametrize("stage", [pytest.param("2", marks=pytest.mark.slow), "3"])
def test_an_engine_evaluates_whole_sequences_and_trains_on(stage):
    expected, loss = one_process(small(), ragged(SECTION, 1, 1))
    for equal, result in on_ranks(WORLD, evaluated, stage):
        assert equal == (True, True)
        assert gap(result["gradients"], expected) < 1e-5
        assert result["loss"] == pytest.approx(loss, rel=1e-5)

"""Modules with latents and an index that run once on a rank's tokens: as in pieces, and as the plain model."""

import dataclasses
import itertools

import pytest
import torch

from ds_seqpar.operators import sparse
from ds_seqpar.operators.gathered import KIND, Piece
from hf_integration import gathered_past, patch_attention
from hf_integration.look.known import facts_of
from hf_integration.look.sizes import model_sizes
from hf_integration.model.patch import patch_by
from tests.dist.ranks import make
from tests.grids import each_then_rest
from tests.hf import conformance
from tests.hf.every_type import tiny
from tests.hf.families import batch_of
from tests.launch import on_each_of
from tests.live import Live

pytestmark = pytest.mark.usefixtures("compiled")
TYPES = ("axk2", "dots3_note", "glm_moe_dsa", "hy_v4")  # beside deepseek_v32, which test_gathered_past has
RANKS, TOKENS = 16, 2048


def in_pieces(model, sp):
    return patch_by(model, model, sp, dataclasses.replace(facts_of(model), selects=False))


@pytest.mark.parametrize("names", each_then_rest([TYPES[1:3]], [(TYPES[0], TYPES[3])]))
@on_each_of(2)
def test_models_are_what_they_are_in_pieces_and_plain(names):
    sp = make(prove="never")
    for name in names:
        plain, at_once, pieced = tiny(name), tiny(name), tiny(name)
        assert facts_of(at_once).selects
        patch_attention(at_once, sp)
        in_pieces(pieced, sp)
        for kind in ("plain", "packed"):
            wanted = conformance.plain(plain, kind)
            found, other = (conformance.called("sharded", model, sp, kind) for model in (at_once, pieced))
            for reference in (wanted, other):
                assert conformance.compared(found, reference, plain, kind) == conformance.EXACT, (name, kind)


@on_each_of(2)
def test_latents_and_keys_of_the_index_are_sent_once_and_the_gradients_of_latents():
    sp, model = make(prove="never"), tiny("glm_moe_dsa")
    patch_attention(model, sp)
    shard, config = sp.shard_batch(batch_of("odd")), model.config
    rows, own = shard["input_ids"].shape
    tokens = int(sp.sum_over_ranks(torch.tensor(own)))
    sp.comm.received.clear()
    model(**shard).loss.backward()
    latent, layers = config.kv_lora_rank + config.qk_rope_head_dim, config.num_hidden_layers
    index = config.index_head_dim * [*config.indexer_types].count("full")
    forward, backward = (tokens - own) * (layers * latent + index), own * (sp.size - 1) * layers * latent
    assert sp.comm.received[KIND] == rows * (forward + backward)
    assert model_sizes(model).index.received(tokens, own, sp.size) == (forward, backward)  # as the planner says


def layer():
    """Return (an attention module, its call with the last rank's tokens, pieces, a function that gathers)."""
    model, own = tiny("deepseek_v32"), TOKENS // RANKS
    module, generator = model.base_model.layers[0].self_attn, torch.Generator().manual_seed(0)
    gathered_past.keep_config(module, "eager")
    states = torch.randn(1, own, model.config.hidden_size, generator=generator).requires_grad_()
    positions = torch.arange(TOKENS - own, TOKENS)[None]
    widths = module.kv_lora_rank, module.qk_rope_head_dim, module.indexer.head_dim
    others = torch.randn(1, TOKENS - own, sum(widths), generator=generator)
    given = {
        "hidden_states": states,
        "position_embeddings": model.base_model.rotary_emb(states, positions),
        "attention_mask": torch.zeros(1, 1, own, own),
    }

    def gather(xs):
        """In pieces there are three tensors at a time; at once, both parts of the latent together, then the index."""
        parts = others.split(widths, 2)
        if len(xs) == 1:
            is_index = xs[0].shape[2] == widths[2]
            parts = parts[2:] if is_index else [torch.cat(parts[:2], 2)]
        return [torch.cat([part.view(1, -1, *x.shape[2:]), x], 1) for part, x in zip(parts, xs, strict=True)]

    return module, gathered_past.Pieces(module, None, (), given), [Piece(0, own, TOKENS - own, 0)], gather


def test_a_layer_takes_the_memory_of_latents_and_of_rows_times_tokens(monkeypatch):
    monkeypatch.setattr(sparse, "ELEMENTS", 2**15)
    module, call, pieces, gather = layer()
    states = call.inputs["hidden_states"]
    found = {}
    for way in (gathered_past.in_pieces, gathered_past.at_once):
        module.zero_grad()
        states.grad = None
        with Live(*module.parameters(), states) as live:
            out = way(call, pieces, gather)[0]
            out.square().sum().backward()
            peak = live.peak
        found[way] = [out.detach(), states.grad, *(x.grad for x in module.parameters() if x.grad is not None)]
    for x, y in itertools.zip_longest(*found.values()):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * float(y.abs().max()))
    latents = TOKENS * (module.kv_lora_rank + module.qk_rope_head_dim + module.indexer.head_dim)
    assert peak < 3 * 4 * (latents + TOKENS // RANKS * TOKENS), peak


def test_a_rank_without_tokens_gathers_in_both_directions():
    module, call, _, gather = layer()
    shapes = []

    def gather_none(xs):
        shapes.extend(x.shape[1] for x in xs)
        return gather(xs)

    given = {
        "hidden_states": call.inputs["hidden_states"][:, :0],
        "position_embeddings": tuple(x[:, :0] for x in call.inputs["position_embeddings"]),
        "attention_mask": torch.zeros(1, 1, 0, 0),
    }
    out, *_ = gathered_past.at_once(gathered_past.Pieces(module, None, (), given), [], gather_none)
    out.sum().backward()
    assert (out.shape, shapes) == ((1, 0, module.hidden_size), [0, 0])
    assert module.kv_a_proj_with_mqa.weight.grad is not None

"""In bf16, shared layers with a state round about as the layer on one device does: by transformers' own functions."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.batch_layout import positions_held
from ds_seqpar.operators import recurrence, segments
from ds_seqpar.operators.recurrence import Cell
from hf_integration import mixers
from tests.hf.every_type import tiny
from tests.recurrent import decayed, delta
from tests.threads import on_virtual_ranks

SEQ, HEADS, DIM, RANKS = 512, 4, 16, 4


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rule(q, k, v, g, beta, state):
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, **options)


class Shared:
    """Runs a mixer's recurrence on a virtual rank."""

    def __init__(self, runtime):
        self.recurrence = lambda *given: recurrence.recurrence(runtime, *given)


def exact(kind, tokens):
    tokens = [x.double() for x in tokens]
    if kind == "delta":
        v, q, k, g, beta = tokens
        return delta(F.normalize(q, dim=-1) * DIM**-0.5, F.normalize(k, dim=-1), v, g, beta, None)[0]
    x, dt, keys, readout = tokens
    return decayed([x, dt, keys, readout], [-torch.arange(1.0, HEADS + 1).double() / 8, torch.ones(HEADS)], False).out


def layer(kind, tokens, runtime=None):
    """transformers' function on one device, or shared by virtual ranks."""
    if kind == "delta":
        v, q, k, g, beta = tokens
        if runtime is None:
            return rule(q, k, v, g, beta, None)[0]
        return recurrence.recurrence(runtime, recurrence.delta_rule(rule), tokens, [], Cell(DIM, DIM, False))
    x, dt, keys, readout = tokens
    given = x, dt, -torch.arange(1.0, HEADS + 1) / 8, keys, readout
    if runtime is None:
        return mamba2_chunk_scan(*given, 64, D=torch.ones(HEADS))
    return mixers.SEAMS["mamba2_chunk_scan"](Shared(runtime), mamba2_chunk_scan, *given, 64, D=torch.ones(HEADS))


def errors(found, expected):
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


def with_gradients(run, tokens, do):
    tokens = [x.clone().requires_grad_() for x in tokens]
    out = run(tokens)
    out.backward(do.to(out.dtype))
    return [out.detach(), *(x.grad for x in tokens)]


@pytest.mark.parametrize("kind", ["delta", "decayed"])
def test_shared_layers_round_as_one_device_does(kind, monkeypatch):
    v, q, k, do = (random(seed, 1, SEQ, HEADS, DIM) for seed in range(4))
    gates = random(4, 1, SEQ, HEADS), random(5, 1, SEQ, HEADS)
    if kind == "delta":
        tokens = [
            v.bfloat16(),
            q.bfloat16(),
            k.bfloat16(),
            -F.softplus(gates[0] - 2).float(),
            gates[1].sigmoid().bfloat16(),
        ]
    else:
        tokens = [v.bfloat16(), F.softplus(gates[0] - 2).float(), q.bfloat16(), k.bfloat16()]
    expected = with_gradients(lambda x: exact(kind, x), [x.double() for x in tokens], do)
    alone = errors(with_gradients(lambda x: layer(kind, x), tokens, do), expected)
    for at_once, ulysses, way in ((2**21, 1, "auto"), (0, 1, "auto"), (2**24, 2, "heads")):
        monkeypatch.setattr(segments, "AT_ONCE", at_once)
        held = [positions_held(EvenShards("balanced", SEQ, RANKS // ulysses), ulysses, rank) for rank in range(RANKS)]

        def on_rank(runtime, rank, held=held):
            local = [x[:, held[rank]] for x in tokens]
            return with_gradients(lambda x: layer(kind, x, runtime), local, do[:, held[rank]])

        results, _ = on_virtual_ranks(on_rank, size=RANKS, ulysses=ulysses, layout="balanced", recurrent_layers=way)
        order = torch.cat(held).argsort()
        found = [torch.cat(of_ranks, 1)[:, order] for of_ranks in zip(*results, strict=True)]
        for shared, one in zip(errors(found, expected), alone, strict=True):
            assert shared < 2 * one


class Kept:
    """Runs a recurrence as one that continues a document, and keeps its decay."""

    def recurrence(self, function, tokens, parameters, cell):
        rows = function(tokens, parameters, True)
        self.decay = rows.transition
        return rows.out


def test_decays_of_bf16_modules_are_summed_in_fp32():
    module = next(filter(mixers.is_mixer, tiny("minimax").bfloat16().modules()))
    engine = Kept()
    module.forward = mixers.with_engine(module, lambda keywords: engine)
    with torch.no_grad():
        module(torch.randn(1, SEQ, module.qkv_proj.in_features, dtype=torch.bfloat16))
    expected = (-SEQ * module.slope_rate.double()).exp()
    torch.testing.assert_close(engine.decay[0].double(), expected, rtol=1e-5, atol=0)

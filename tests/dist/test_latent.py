"""Latent attention on real ranks: what is sent, kept, compiled and refused. tests/attention_cases.py draws calls."""

import functools

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.analysis.memory import figures
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime.call import CallSettings
from ds_seqpar.core.runtime.kernels import Scores
from ds_seqpar.operators.latent import LATENT, LatentShape, is_sent
from tests import live, oracle
from tests.dist.ranks import SECONDS, WRONG, lacking, make, refusal
from tests.launch import on_each_of

HEADS, DIM, V_DIM, WIDTH = 6, 12, 8, 10


def tensors(seq, heads=HEADS, dim=DIM, v_dim=V_DIM, width=WIDTH, dtype=torch.float64):
    """(q, latent, expand, do), the same on every rank."""
    generator = torch.Generator().manual_seed(seq)
    shapes = (2, seq, heads, dim), (2, seq, width), (heads, width, dim + v_dim), (2, seq, heads, v_dim)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5).to(dtype) for shape in shapes]


def dense(q, latent, expand, do, **asked):
    """(out, dq, dlatent, dexpand)."""
    leaves = [x.detach().double().requires_grad_() for x in (q, latent, expand)]
    q, latent, expand = leaves
    k, v = torch.einsum("bsr,hre->bshe", latent, expand).split([q.shape[3], do.shape[3]], dim=-1)
    out = oracle.attention(q, k, v, **asked)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def attend(sp, q, latent, expand, do, placement=None, way=None, **asked):
    """The same, each rank working on its own tokens."""
    q, latent = (sp.shard(x, 1, placement).requires_grad_() for x in (q, latent))
    expand = expand.clone().requires_grad_()
    shards = {} if placement is None else {"shards": placement.shards}
    out = (way or sp.latent_attention)(q, latent, expand, **asked, **shards)
    out.backward(sp.shard(do, 1, placement))
    dist.all_reduce(expand.grad)
    local = [x.detach().flatten(2) for x in (out, q.grad, latent.grad)]
    whole = sp.gather(torch.cat(local, dim=2), 1, placement).split([x.shape[2] for x in local], dim=2)
    return *(x.unflatten(2, (q.shape[2], -1)) for x in whole[:2]), whole[2], expand.grad


@on_each_of(4)
def test_what_arrives_is_the_plans():
    """A latent in place of keys and values, in each direction, and for Ulysses ranks once with all heads' gradients."""
    seq, batch = 48, 2
    for ulysses in (1, 2, 4):
        sp = make(size=4, ulysses=ulysses, latent_attention="latent")
        attend(sp, *tensors(seq, heads=8))
        inner, recipe = 8 // ulysses, sp.runtime.compiler.recipe
        shape = shape_of("fp32", "float64", batch, (inner, 1, DIM), LatentShape, latent=WIDTH)
        tokens = seq // recipe.size
        pattern = sp.runtime.compiler.block_mask(CAUSAL, sp.runtime.shards(tokens))
        latent = batch * tokens * WIDTH
        units = {"forward": {"kv": latent}, "backward": {"kv": latent, "dkv": latent}}
        expected = sum(recipe.plan(way, pattern, shape).received(units[way])[sp.runtime.rank] for way in units)
        got = sp.comm.received
        assert got["kv"] + got["dkv"] == expected
        others = batch * seq // 4 * (ulysses - 1)  # tokens of the other Ulysses ranks, or of this one for each of them
        assert got["qkv"] == got["dqkv"] == others * (inner * DIM + WIDTH)


@on_each_of(2)
def test_the_latent_of_deepseek_v3_is_a_twentieth_of_its_keys_at_most():
    heads, dim, v_dim, width = 128, 192, 128, 576
    q, latent = (torch.zeros(1, 1, *shape, requires_grad=True) for shape in ((heads, dim), (width,)))
    expand, received = torch.zeros(heads, width, dim + v_dim), []
    for sent in ("latent", "expanded"):
        sp = make(size=2, ulysses=1, layout="contiguous", latent_attention=sent)
        sp.latent_attention(q, latent, expand, causal=False).sum().backward()
        received.append(sum(sp.comm.received[kind] for kind in ("q", "kv", "out", "dq", "dkv")))
    assert 0 < 20 * received[0] <= received[1]


@pytest.mark.slow
@pytest.mark.parametrize("ulysses", [1, 2, 4])
@on_each_of(4)
def test_memory_is_what_the_program_says(ulysses):
    """Keys and values of one block at a time exist, with their gradients in backward."""
    sp, (q, latent, expand, do) = make(size=4, ulysses=ulysses, latent_attention="latent"), tensors(512, 8, 64, 64, 96)
    seen = live.least(lambda: live.measure(sp.latent_attention, q, latent, expand, do))
    settings = CallSettings(CAUSAL, None, Scores(1.0), operator=LATENT)
    forward, backward = (
        sp.runtime.bound(way, q, [q.shape, (*q.shape[:2], 1, 96), expand.shape], settings)[0]
        for way in ("forward", "backward")
    )
    said = figures(forward, backward, sp.config.kept(1, False, False))
    assert (said.forward, said.saved) == pytest.approx((seen.forward, seen.kept), rel=0.05)
    assert seen.backward == pytest.approx(said.backward, rel=0.1)
    assert seen.left == 0


@on_each_of(2)
def test_a_checkpoint_replays_the_latents_attention():
    for ulysses in (1, 2):
        sp = make(size=2, ulysses=ulysses, latent_attention="latent")
        whole, calls, forward = tensors(24), [], sp.runtime.forward

        def counted(*args, calls=calls, forward=forward):
            calls.append(args)
            return forward(*args)

        sp.runtime.forward = counted
        for reentrant in (False, True):
            way = functools.partial(sp.checkpoint, sp.latent_attention, use_reentrant=reentrant)
            oracle.assert_exact(attend(sp, *whole, way=way), dense(*whole))
        assert len(calls) == 2


@on_each_of(2, timeout=SECONDS * 3, keep=None)
def test_compiled_latent_attention_is_one_graph():
    for ulysses in (1, 2):
        sp, whole = make(size=2, ulysses=ulysses, latent_attention="latent"), tensors(24, dtype=torch.float32)
        way = torch.compile(lambda *x, sp=sp: sp.latent_attention(*x) * 1.0, backend="aot_eager", fullgraph=True)
        oracle.assert_exact(attend(sp, *whole, way=way), dense(*whole), limit=1e-5)


@on_each_of(2, timeout=SECONDS * 2)
def test_what_latent_attention_cannot_take_is_refused_everywhere():
    sp = make(size=2, ulysses=1, latent_attention="latent")
    q, latent, expand, _ = (x[:, :8] if x.dim() == 4 else x for x in tensors(8))
    wrong = sp.rank == WRONG
    mine, both = "InputError" if wrong else "DisagreementError", "DisagreementError"
    for words, kind, *given in (
        (["q (batch, local_seq, heads, head_dim)"], mine, q, latent[..., None] if wrong else latent, expand),
        (["expand (heads, width", "(5, 10, 20)"], mine, q, latent, expand[1:] if wrong else expand),
        (["one dtype", "float32"], mine, q, latent.float() if wrong else latent, expand),
        (["float32"], both, *(x.float() if wrong else x for x in (q, latent, expand))),
        (["expand", "(6, 10, 19)"], both, q, latent, expand[..., 1:] if wrong else expand),
    ):
        refused = refusal(sp.latent_attention, *given)
        assert lacking(refused, kind, *words) == [], refused
    kind, message = refusal(sp.latent_attention, q, latent, expand, shards=[])
    assert (kind, "UnevenShards" in message) == ("InputError", True)
    sp.latent_attention(q, latent, expand)  # nothing was left on its way


def test_head_chunks_and_a_latent_are_refused():
    config = SequenceParallelConfig(size=2, latent_attention="latent", head_chunks=2)
    with pytest.raises(ConfigError, match=r"latent_attention.*head_chunks 1"):
        config.resolve(2, (8, 8))


@pytest.mark.parametrize(
    ("settings", "tokens", "sent"),
    [
        ({"ulysses": 4}, 4, True),  # nothing is expanded twice
        ({"ulysses": 1}, 4 * 576, True),
        ({"ulysses": 1}, 4 * 575, False),
        ({"ulysses": 1, "head_chunks": 2}, 2**20, False),
        ({"size": 1}, 2**20, False),
    ],
)
def test_auto_sends_latents_where_they_are_fewer_bytes_and_their_expansion_no_more_work(settings, tokens, sent):
    config = SequenceParallelConfig(**{"size": 4, **settings}).resolve(4, (128, 128))
    assert is_sent(config, tokens, 128, 576, 320) is sent
    assert not is_sent(config, tokens, 1, 576, 320)

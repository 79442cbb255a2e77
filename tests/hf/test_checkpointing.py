"""Gradient checkpointing: attention, and all that it sends, run once a layer and step; the gradients are the same."""

import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ds_seqpar
from tests.dist.ranks import lacking, make, refusal
from tests.hf.llama import MODES, array, gap, llama, norm, ragged, settings, step
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
LAYERS, STEPS = 2, 2
CHECKPOINTING = {"none": None, "plain": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
SECTIONS = [
    (2, {}),
    (4, {}),
    (4, {"ulysses": 4}),
    (4, {"ulysses": 2, "head_chunks": 2}),
    (4, {"ulysses": 2, "head_chunks": 2, "overlap": True}),
    (4, {"schedule": "distflash"}),
    (4, {"schedule": "attention2d"}),
    (4, {"ulysses": 2, "schedule": "wallfacer"}),
]


def enable(model, how):
    if how == "selective":
        saved = [torch.ops.ds_seqpar.attention.default]
        context = functools.partial(create_selective_checkpoint_contexts, saved)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    elif how is not None:
        model.gradient_checkpointing_enable(how)


def count_forwards(sp):
    """A list that grows with every attention forward on this rank."""
    calls, forward = [], sp.runtime.forward

    def counted(*args):
        calls.append(None)
        return forward(*args)

    sp.runtime.forward = counted
    return calls


def window(section):
    """A micro-batch of whole sequences and one of packed documents, both with ragged labels."""
    plain, packed = ragged(section, 1, STEPS, sequences=2)
    seq = packed["input_ids"].shape[1]
    positions = torch.cat([torch.arange(19), torch.arange(seq - 19)])
    return [plain, {**packed, "position_ids": positions.expand(2, seq)}]


@pytest.mark.parametrize(
    ("ranks", "section"),
    [(4, {"ulysses": 2}), *(pytest.param(*its, marks=pytest.mark.slow) for its in SECTIONS)],
)
@on_each_of("ranks")
def test_attention_runs_once_and_sends_once_unless_it_is_to_run_again(ranks, section):
    """Gradients to the last bit where nothing else than attention's own out is read (delta is that of a rank's own out
    where Ulysses is: another order of sums)."""
    in_chunks, found = "head_chunks" in section, {}
    chunks = 2 if in_chunks and "overlap" not in section else 1  # with overlap all head chunks are one
    for again, (name, how) in itertools.product((False, True), {**CHECKPOINTING, "selective": "selective"}.items()):
        if not in_chunks or (name != "selective" and not again):
            sp, model = make(size=ranks, **section, recompute_attention=again), llama(num_key_value_heads=4)
            calls = count_forwards(sp)
            enable(model.patch_attention(sp).train(), how)
            model(**sp.shard_batches(window({"size": ranks, **section})[1:])[0]).loss.backward()
            arrived = dict(sp.comm.received)
            arrived.pop("delta_heads", None)  # in place of an inner out: a head_dim-th of what do_heads are
            found[again, name] = {n: array(p.grad) for n, p in model.named_parameters()}, len(calls), arrived
    gradients, forwards, arrived = found[False, "none"]
    if "qkv" in arrived:  # without a checkpoint head chunks keep nothing that they have sent
        arrived["qkv"] //= chunks
    assert forwards == LAYERS * chunks
    assert norm(gradients) > 0
    for (again, name), (mine, count, also) in found.items():
        twice = again and name in ("plain", "reentrant")
        assert count == forwards * (1 + twice), (again, name)
        assert gap(mine, gradients) <= (1e-6 if section else 0), (again, name)
        if name != "selective" and not again:
            assert also == arrived, name
        if twice and ranks == 4 and "schedule" not in section:  # some ranks may need no other's keys
            assert sum(also.values()) > sum(arrived.values())


@on_each_of(2)
def test_functions_of_ones_own():
    """`sp.checkpoint` around functions of one's own, with an lse, and twice through a retained graph."""
    sp = make(size=2, ulysses=2)
    torch.manual_seed(sp.rank)
    q, k, v = (torch.randn(1, 8, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    calls, expected = count_forwards(sp), None

    def layer(q, k, v):
        first, lse = sp.attention(2 * q, k, v, return_lse=True)
        return sp.attention(first, k, v) + lse.detach().unsqueeze(-1)

    for reentrant, again in ((None, 0), (False, 2), (True, 2)):  # the second time, what was kept is gone
        out = layer(q, k, v) if reentrant is None else sp.checkpoint(layer, q, k, v, use_reentrant=reentrant)
        before = len(calls)
        for _ in range(2):
            q.grad = k.grad = v.grad = None
            out.square().sum().backward(retain_graph=True)
            found = torch.stack([q.grad, k.grad, v.grad])
            expected = found if expected is None else expected
            assert (found - expected).abs().max() < 1e-12
        assert len(calls) - before == again, reentrant
    told = refusal(lambda: make(size=2, recompute_attention="yes"))
    assert lacking(told, "ConfigError", "recompute_attention", "got 'yes'") == []


@on_each_of(2, keep="deepspeed")
def test_offloaded_checkpoints_come_back():
    """What leaves: a layer's input, attention's out and lse, the inner q, k and v, and what was taken off all keys;
    its memory is used again."""
    tokens, width, heads, kv_width, found = 2 * 48 // 2, 64, 8, 32, {}
    layer = 4 * tokens * (2 * width + heads + width + 2 * kv_width) + 4 * kv_width
    for offload in (False, True):
        model = llama(num_key_value_heads=4)
        model.gradient_checkpointing_enable()
        section = {**MODES["u2"], "offload_checkpoints": offload}
        engine, *_ = ds_seqpar.initialize(model=model, config=settings(section, "3", STEPS, 2))
        sp = engine.sequence_parallel
        batches = sp.shard_batches(window(section))
        if offload:
            loss = engine(**batches[0]).loss
            assert sp.store.bytes_in_use == LAYERS * layer  # at the end of forward
            del loss
        found[offload] = step(engine, batches)["gradients"]
    assert gap(found[True], found[False]) == 0
    assert (sp.store.bytes_allocated, sp.store.bytes_in_use) == (LAYERS * layer, 0)
    step(engine, batches)
    assert (sp.store.bytes_allocated, sp.store.bytes_in_use) == (LAYERS * layer, 0)

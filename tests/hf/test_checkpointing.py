"""Gradient checkpointing: attention, and all that it sends, run once a layer and step; the gradients are the same."""

import functools

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ds_seqpar
from tests.dist.ranks import make, refusal
from tests.grids import each_then_rest
from tests.hf.llama import MODES, array, gap, llama, norm, ragged, settings, step
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
WORLD, LAYERS, STEPS = 4, 2, 2
CHECKPOINTING = {"none": None, "plain": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
CASES = [  # schedule, Ulysses degree, ZeRO's stage, more settings
    ("ring", 2, "3", {}),
    ("ring", 4, "2", {}),
    ("ring", 2, "3", {"head_chunks": 2}),
    ("ring", 2, "3", {"head_chunks": 2, "overlap": True}),
    ("distflash", 1, "2", {}),
    ("attention2d", 1, "3", {}),
    ("wallfacer", 2, "2", {}),
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


def engines(cases):
    """Of every case and way to checkpoint: what a step gave, how often attention ran, and what arrived, by kind."""
    found = []
    for schedule, degree, stage, more in cases:
        section, ways = {"size": WORLD, "ulysses": degree, "schedule": schedule, **more}, {}
        for name, how in CHECKPOINTING.items():
            model = llama(num_key_value_heads=4)
            enable(model, how)
            engine, *_ = ds_seqpar.initialize(model=model, config=settings(section, stage, STEPS, 2))
            sp = engine.sequence_parallel
            calls = count_forwards(sp)
            sp.comm.received.clear()  # of the check of the loss
            done = step(engine, sp.shard_batches(window(section)))
            ways[name] = done, len(calls), dict(sp.comm.received)
        found.append(ways)
    return found


@pytest.mark.slow
def test_engines_attend_once_and_send_once():
    for found in on_ranks(WORLD, engines, CASES, timeout=500):
        for case, ways in zip(CASES, found, strict=True):
            expected, forwards, arrived = ways["none"]
            calls = 2 if case[3] == {"head_chunks": 2} else 1  # with overlap all head chunks are one
            if "qkv" in arrived:  # without a checkpoint head chunks keep nothing that they have sent
                arrived["qkv"] //= calls
            arrived.pop("delta_heads", None)
            assert forwards == LAYERS * STEPS * calls
            assert norm(expected["gradients"]) > 0
            for name in ("plain", "reentrant"):
                done, again, also = ways[name]
                assert again == forwards, (case, name)
                also.pop("delta_heads", None)  # in place of an inner out: a head_dim-th of what do_heads are
                assert also == arrived, (case, name)
                assert gap(done["gradients"], expected["gradients"]) < 1e-6, (case, name)
                assert done["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def ways(section):
    """By whether attention is computed again and the way to checkpoint: gradients of 2 layers, how often attention ran
    forward, and what arrived, by kind."""
    found = {}
    for again in (False, True):
        sp = make(**section, recompute_attention=again)
        calls = count_forwards(sp)
        for name, how in {**CHECKPOINTING, "selective": "selective"}.items():
            calls.clear()
            sp.comm.received.clear()
            model = llama().patch_attention(sp)
            enable(model, how)
            model.train()
            model(**sp.shard_batches(window(section)[1:])[0]).loss.backward()
            gradients = {n: array(p.grad) for n, p in model.named_parameters()}
            found[again, name] = gradients, len(calls), dict(sp.comm.received)
    return found


@pytest.mark.parametrize("mode", each_then_rest(["u2r2"], ["r4", "r2"]))
def test_attention_runs_once_and_sends_once_unless_it_is_to_run_again(mode):
    """Gradients to the last bit where nothing else than attention's own out is read (delta is that of a rank's own out
    where Ulysses is: another order of sums)."""
    for found in on_ranks(MODES[mode]["size"], ways, MODES[mode]):
        gradients, forwards, arrived = found[False, "none"]
        arrived.pop("delta_heads", None)
        assert forwards == LAYERS
        assert norm(gradients) > 0
        for (again, name), (mine, count, also) in found.items():
            twice = again and name in ("plain", "reentrant")
            assert count == LAYERS * (1 + twice), (again, name)
            assert gap(mine, gradients) <= (1e-6 if mode == "u2r2" else 0)
            also.pop("delta_heads", None)  # in place of an inner out: a head_dim-th of what do_heads are
            if name in ("none", "plain", "reentrant") and not again:
                assert also == arrived, name
            if twice and mode != "r2":  # a pack on two ranks may need no other's keys
                assert sum(also.values()) > sum(arrived.values())


def own_layers():
    """`sp.checkpoint` around functions of one's own, with an lse, and twice through a retained graph."""
    sp = make(size=2, ulysses=2)
    torch.manual_seed(sp.rank)
    q, k, v = (torch.randn(1, 8, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    calls, gradients = count_forwards(sp), []

    def layer(q, k, v):
        first, lse = sp.attention(2 * q, k, v, return_lse=True)
        return sp.attention(first, k, v) + lse.detach().unsqueeze(-1)

    for reentrant in (None, False, True):
        out = layer(q, k, v) if reentrant is None else sp.checkpoint(layer, q, k, v, use_reentrant=reentrant)
        found, before = [], len(calls)
        for _ in range(2):
            q.grad = k.grad = v.grad = None
            out.square().sum().backward(retain_graph=True)
            found.append(torch.stack([q.grad, k.grad, v.grad]))
        gradients.append((found, len(calls) - before))
    errors = [float((x - gradients[0][0][0]).abs().max()) for found, _ in gradients for x in found]
    return errors, [again for _, again in gradients], refusal(lambda: make(size=2, recompute_attention="yes"))


def test_functions_of_ones_own():
    for errors, again, (kind, message) in on_ranks(2, own_layers):
        assert max(errors) < 1e-12
        assert again == [0, 2, 2]  # the second time through a retained graph, what was kept is gone
        assert kind == "ConfigError"
        assert "recompute_attention" in message
        assert "got 'yes'" in message


def offloaded(stage):
    """A step with and without offload: difference of gradients, then host bytes (allocated, in use) after one step and
    after two; what was in use at the end of forward."""
    found, in_use = {}, None
    for offload in (False, True):
        model = llama(num_key_value_heads=4)
        model.gradient_checkpointing_enable()
        section = {**MODES["u2"], "offload_checkpoints": offload}
        engine, *_ = ds_seqpar.initialize(model=model, config=settings(section, stage, STEPS, 2))
        sp = engine.sequence_parallel
        batches = sp.shard_batches(window(section))
        if offload:
            loss = engine(**batches[0]).loss
            in_use = sp.store.bytes_in_use
            del loss
        found[offload] = step(engine, batches)["gradients"]
    first = sp.store.bytes_allocated, sp.store.bytes_in_use
    step(engine, batches)
    return gap(found[True], found[False]), in_use, first, (sp.store.bytes_allocated, sp.store.bytes_in_use)


def test_offloaded_checkpoints_come_back():
    """What leaves: a layer's input, attention's out and lse, the inner q, k and v, and what was taken off all keys;
    its memory is used again."""
    tokens, width, heads, kv_width = 2 * 48 // 2, 64, 8, 32
    layer = 4 * tokens * (2 * width + heads + width + 2 * kv_width) + 4 * kv_width
    for difference, in_use, first, second in on_ranks(2, offloaded, "3"):
        assert difference == 0
        assert in_use == LAYERS * layer
        assert first == second == (LAYERS * layer, 0)

"""Patched models with tiled MLPs, a tiled loss and chunks of heads: nothing stands whole, nothing is sent twice, and
what cannot be tiled is refused. Their numbers: test_conformance.py."""

import copy
import itertools
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_seqpar
from hf_integration.memory import tiled_modules
from hf_integration.model import whole_calls
from tests.dist.ranks import lacking, make, refusal
from tests.hf import trainers
from tests.hf.families import batch_of, gradients, model_of
from tests.hf.llama import gap, llama, settings, small
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
TILES = {"mlp_tiles": 5, "loss_tiles": 3}

# --- memory


class Sizes(TorchDispatchMode):
    """The most elements that a tensor within it had."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


LENGTH = 96
WIDE = {"vocab_size": 640, "intermediate_size": 320, "hidden_size": 32}
MANY_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 32}
CHECKPOINTING = (None, False, True)  # none, or whether they are reentrant


def patched(model, reentrant=None, **section):
    sp = make(**{"size": 1, **section})
    model.patch_attention(sp)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return sp, model.train()


def largest_of(sp, model):
    """The most elements that a tensor has in a step, and in a forward for the loss alone."""
    ids = torch.arange(LENGTH)[None] % 64
    batch = sp.shard_batch({"input_ids": ids, "labels": ids.clone()})
    with Sizes() as step:
        model(**batch).loss.backward()
    with Sizes() as evaluation, torch.no_grad(), tiled_modules.evaluating_loss(model):
        model.eval()(**batch)
    return step.most, evaluation.most


@pytest.mark.parametrize("checkpointing", [None, False])
@on_each_of(1, keep="deepspeed")
def test_neither_intermediates_nor_logits_stand_whole(checkpointing):
    """Weights, of 640 x 32, are larger than a tile."""
    inner, logits = LENGTH * WIDE["intermediate_size"], LENGTH * WIDE["vocab_size"]
    weights = WIDE["vocab_size"] * WIDE["hidden_size"]
    assert weights < inner
    for tiles, most in (
        ({"mlp_tiles": 4, "loss_tiles": 6}, weights),
        ({"mlp_tiles": "auto", "loss_tiles": "auto"}, weights),
        ({"mlp_tiles": 4}, logits),
        ({"loss_tiles": 6}, inner),
        ({}, logits),
    ):
        assert largest_of(*patched(llama(**WIDE), checkpointing, **tiles)) == (most, most), tiles


@on_each_of(1)
def test_no_query_of_all_heads_stands():
    for checkpointing in CHECKPOINTING:
        most, in_chunks = (
            largest_of(*patched(llama(**MANY_HEADS), checkpointing, **section))[0]
            for section in ({}, {"head_chunks": 4})
        )
        assert most == LENGTH * 8 * 32, checkpointing
        assert in_chunks <= LENGTH * 96, checkpointing  # an intermediate of the MLP


@on_each_of(1)
def test_a_checkpointed_layer_does_not_compute_its_mlp_a_third_time():
    for checkpointing, times in zip(CHECKPOINTING, (2, 2, 3), strict=True):
        (sp, model), count = patched(llama(), checkpointing, mlp_tiles=4), []
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda *_, count=count: count.append(1))
        model(**sp.shard_batch(batch_of("odd"))).loss.backward()
        assert len(count) == times * 2 * 4, checkpointing  # layers, tiles


def sent(ulysses, checkpointing, **head_chunks):
    """Query and key/value heads of each attention, and what arrived, by kind."""
    sp, model = patched(small(num_key_value_heads=4), checkpointing, size=2, ulysses=ulysses, **head_chunks)
    calls, forward = [], sp.runtime.forward

    def counted(tensors, *args):
        calls.append((tensors[0].shape[2], tensors[1].shape[2]))
        return forward(tensors, *args)

    sp.runtime.forward = counted
    model(**sp.shard_batch(batch_of("odd"))).loss.backward()
    return calls, dict(sp.comm.received)


@on_each_of(2)
def test_head_chunks_attend_once_and_send_once():
    for ulysses, checkpointing in itertools.product((1, 2), CHECKPOINTING):
        whole, expected = sent(ulysses, checkpointing)
        calls, arrived = sent(ulysses, checkpointing, head_chunks=2)
        assert whole == [(8, 4)]
        assert calls == [(4, 2), (4, 2)]
        if ulysses == 2 and checkpointing is None:  # without a checkpoint they keep nothing that they have sent
            expected["qkv"] *= 2
            expected["delta_heads"] = arrived["delta_heads"]
        assert arrived == expected, (ulysses, checkpointing)


HOOKS = {
    "forward": lambda module, see: module.register_forward_hook(lambda module, args, output: see(*args, output)),
    "before": lambda module, see: module.register_forward_pre_hook(
        lambda module, args, kwargs: see(*args, *kwargs.values()), with_kwargs=True
    ),
    "backward": lambda module, see: module.register_full_backward_hook(
        lambda module, grads, given: see(*grads, *given)
    ),
}


def hidden(given):
    """The hidden states, or their gradients, among what a hook is given."""
    return [x.detach().clone() for x in given if torch.is_tensor(x) and x.dim() == 3]


def seen(part, kind, checkpointing, **section):
    """(what a hook on a part of the layer sees, gradients). One of forward is gone before backward."""
    (sp, model), found = patched(small(num_key_value_heads=4), checkpointing, **section), []
    module = model.model.layers[0].get_submodule(part)
    hook = HOOKS[kind](module, lambda *given: found.extend(hidden(given)))
    loss = model(**sp.shard_batch(batch_of("odd"))).loss
    if kind != "backward":
        hook.remove()
    loss.backward()
    return found, gradients(model)


@on_each_of(1)
def test_hooks_see_numbers():
    for part, kind, checkpointing in (
        ("input_layernorm", "forward", None),
        ("post_attention_layernorm", "before", False),
        ("mlp", "forward", False),
        ("mlp", "backward", None),
        ("self_attn", "before", None),
    ):
        plain, right = seen(part, kind, checkpointing)
        mine, grads = seen(part, kind, checkpointing, mlp_tiles=3, head_chunks=2)
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, plain, strict=True)]
        assert errors, (part, kind)
        assert all(error < 1e-5 for error in (*errors, gap(grads, right))), (part, kind)  # NaN is not


# --- what else a model is asked for


@on_each_of(1)
def test_local_forwards_and_copies_are_the_models_own():
    """That they give what the plain model gives, and what unpatching leaves: test_odd_hands.py."""
    sp, model = patched(llama(), **TILES)
    model.eval()
    tiled, shard = [], sp.shard_batch(batch_of("odd"))
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda *_: tiled.append(1))
    model(torch.arange(24).view(2, 12))
    assert len(tiled) == 2  # which is no tile
    with torch.no_grad():
        assert model(**shard).logits.shape == (2, 51, 64)
    assert model(**shard).logits is None
    assert len(model(**shard, return_dict=False)) == 1
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].mlp.down_proj.weight.zero_()
        copied.lm_head.weight.zero_()
    assert copied(**shard).loss.item() == pytest.approx(math.log(64), rel=1e-5)  # its weights are its own


class WithForward(torch.nn.Module):
    def __init__(self, sp):
        super().__init__()
        self.sp, self.weight = sp, torch.nn.Parameter(torch.ones(8, 8))


def shadowed(part):
    model = llama()
    module = part(model)
    module.forward = module.forward
    return model


@on_each_of(1, keep="deepspeed")
def test_what_cannot_be_tiled_is_refused():
    both, mlp, loss, one = (make(size=1, **x) for x in (TILES, {"mlp_tiles": 2}, {"loss_tiles": "auto"}, {}))
    config = settings({"size": 1}, "3", 1, 1)
    had = ds_seqpar.initialize(model=llama(), config=config)[0].module.unpatch_attention()
    tiled, shard = llama().patch_attention(both), both.shard_batch(batch_of("odd"))
    del shard["num_items_in_batch"]
    own = {**config, "sequence_parallel": {"loss_tiles": "auto"}}
    for call, *words in (
        (lambda: model_of("gpt_oss").patch_attention(mlp), "mlp_tiles", "got 2", "'gpt_oss', which has none"),
        (lambda: llama().model.patch_attention(both), "loss_tiles", "got 3", "LlamaModel"),
        (lambda: shadowed(lambda model: model.model.layers[1].mlp).patch_attention(both), "got a LlamaMLP"),
        (lambda: shadowed(lambda model: model).patch_attention(loss), "loss_tiles", "got a LlamaForCausalLM"),
        (lambda: had.patch_attention(both), "ZeRO-3", "patch_attention first"),
        (
            lambda: ds_seqpar.initialize(model=WithForward(one), config=own, sequence_parallel=one),
            "loss_tiles",
            "got 'auto'",
        ),
    ):
        assert lacking(refusal(call), "ConfigError", *words) == [], words
    assert lacking(refusal(lambda: tiled(**shard)), "InputError", "num_items_in_batch", "got none") == []


def not_additive(logits, labels, shift_labels, num_items_in_batch, **_):
    """Right of all tokens, and wrong of any tiles of them."""
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten(), reduction="sum")
    return losses / num_items_in_batch * (1 if logits.shape[1] > 1 else 2)


@on_each_of(1, keep="deepspeed")
def test_a_loss_that_is_no_sum_over_tokens_is_refused():
    """What is tried is the tiled loss."""
    model, ids = llama(), torch.arange(4)[None]  # tiles of one token are among those of the loss
    model.loss_function = not_additive
    for tiles in ({}, TILES):
        engine, *_ = ds_seqpar.initialize(model=copy.deepcopy(model), config=settings({"size": 1, **tiles}, "2", 1, 1))
        refused = refusal(engine, **engine.sequence_parallel.shard_batch({"input_ids": ids, "labels": ids}))
        assert refused == (None, None) if not tiles else lacking(refused, "ConfigError", "check_loss=False") == []


@on_each_of(1)
def test_a_loss_without_logits_is_not_compared_with_tiles_that_it_does_not_have():
    losses = []
    for tiles in ({"mlp_tiles": 2}, {}):
        model = small()
        model.register_forward_hook(lambda model, args, output: type(output)(loss=output.loss))
        model.patch_attention(make(size=1, **tiles))
        losses.append(model(**whole_calls.moved_batch(batch_of("odd"), torch.device("cpu"))).loss.item())
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"mlp_tiles": 2}, TILES], ids=len)
@on_each_of(1, keep=None, timeout=300)
def test_a_compiled_model_has_tiles(asked):
    found, count = [], []
    for tiles in ({}, asked):
        sp, model = make(size=1, **tiles), small()
        model.patch_attention(sp)
        model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: count.append(1))
        run = torch.compile(model, backend="eager") if tiles else model
        output = run(**sp.shard_batch(batch_of("odd")))
        output.loss.backward()
        found.append(gradients(model))
    assert gap(*found) < 1e-5
    assert (output.logits is None) is ("loss_tiles" in asked)
    assert len(count) == 1 + 2 * asked["mlp_tiles"]
    assert counters["stats"]["unique_graphs"] > 1


# --- the Trainer


@on_each_of(2, keep="deepspeed", timeout=300)
def test_a_trainer_trains_evaluates_and_predicts_as_without_tiles(tmp_path):
    """Losses, norms, the loss of evaluation and, with whole logits, of prediction; those logits."""
    found = []
    for section in ({}, TILES):
        how = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        trainer = trainers.make(tmp_path, 4, {"size": 2, **section}, stage=3, **how)
        history = trainers.trained(trainer)
        predicted = trainer.predict(trainers.documents(4, seed=9))
        figures = [*history["loss"], *history["grad_norm"], *history["eval_loss"], predicted.metrics["test_loss"]]
        assert len(figures) == 2 + 2 + 1 + 1
        found.append((figures, torch.as_tensor(predicted.predictions)))
    (figures, logits), (mine, its) = found
    assert mine == pytest.approx(figures, rel=1e-5)
    torch.testing.assert_close(its, logits, rtol=1e-4, atol=1e-5)

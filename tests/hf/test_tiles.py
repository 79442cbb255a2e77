"""Patched models with tiled MLPs and a tiled loss, and all else that saves memory: what they are without, under every
ZeRO stage; and nothing whole."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_seqpar
from hf_integration.memory import tiled_modules
from hf_integration.model import whole_calls
from tests.dist.ranks import lacking, make, refusal
from tests.hf import trainers
from tests.hf.families import batch_of, gradients, model_of
from tests.hf.llama import MODES, adam, gap, llama, one_process, ragged, settings, small, update, with_lora
from tests.launch import on_each_of
from tests.launch import on_engine_ranks as on_ranks

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


def largest(cases, checkpointing):
    """By tiles: the most elements that a tensor has in a step, and in a forward for the loss alone."""
    return [largest_of(tiles, checkpointing) for tiles in cases]


def largest_of(tiles, checkpointing):
    sp, model = make(size=1, **tiles), llama(**WIDE)
    model.patch_attention(sp)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(LENGTH)[None]
    batch = sp.shard_batch({"input_ids": ids, "labels": ids.clone()})
    with Sizes() as step:
        model.train()(**batch).loss.backward()
    with Sizes() as evaluation, torch.no_grad(), tiled_modules.evaluating_loss(model):
        model.eval()(**batch)
    return step.most, evaluation.most


@pytest.mark.parametrize("checkpointing", [False, True])
def test_neither_intermediates_nor_logits_stand_whole(checkpointing):
    """Weights, of 640 x 32, are larger than a tile."""
    inner, logits = LENGTH * WIDE["intermediate_size"], LENGTH * WIDE["vocab_size"]
    weights = WIDE["vocab_size"] * WIDE["hidden_size"]
    assert weights < inner
    cases = (
        ({"mlp_tiles": 4, "loss_tiles": 6}, weights),
        ({"mlp_tiles": "auto", "loss_tiles": "auto"}, weights),
        ({"mlp_tiles": 4}, logits),
        ({"loss_tiles": 6}, inner),
        ({}, logits),
    )
    (found,) = on_ranks(1, largest, [tiles for tiles, _ in cases], checkpointing)
    for (tiles, most), sizes in zip(cases, found, strict=True):
        assert sizes == (most, most), tiles


def calls(checkpointings):
    """By way to checkpoint: how often the MLPs of a model of 2 layers are computed for a tile, in a step."""
    return [calls_of(checkpointing) for checkpointing in checkpointings]


def calls_of(checkpointing):
    sp, model = make(size=1, mlp_tiles=4), llama()
    model.patch_attention(sp)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    count = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda *_: count.append(1))
    model.train()(**sp.shard_batch(batch_of("odd"))).loss.backward()
    return len(count) / 8


def test_a_checkpointed_layer_does_not_compute_its_mlp_a_third_time():
    assert on_ranks(1, calls, (None, False, True)) == [[2, 2, 3]]


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


def seen(part, kind, checkpointing, section):
    """(what a hook on a part of the layer sees, gradients). One of forward is gone before backward."""
    sp, model, found = make(size=1, **section), small(num_key_value_heads=4), []
    model.patch_attention(sp)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard = sp.shard_batch(batch_of("odd"))
    module = model.model.layers[0].get_submodule(part)
    hook = HOOKS[kind](module, lambda *given: found.extend(hidden(given)))
    loss = model.train()(**shard).loss
    if kind != "backward":
        hook.remove()
    loss.backward()
    return found, gradients(model)


@on_each_of(1)
def test_hooks_see_numbers():
    for part, kind, checkpointing in (
        ("input_layernorm", "forward", False),
        ("post_attention_layernorm", "before", True),
        ("mlp", "forward", True),
        ("mlp", "backward", False),
        ("self_attn", "before", False),
    ):
        (plain, right), (mine, grads) = (
            seen(part, kind, checkpointing, section) for section in ({}, {"mlp_tiles": 3, "head_chunks": 2})
        )
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, plain, strict=True)]
        assert errors, (part, kind)
        assert all(error < 1e-5 for error in (*errors, gap(grads, right))), (part, kind)  # NaN is not


# --- under ZeRO

OPTIMIZER = adam(3e-3, gradient_clipping=1.0)
STEPS = 2


MODELS = {
    "plain": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "lora": lambda: with_lora(llama(), "gate_proj", "down_proj"),  # the first MLP's input wants no gradient
    "lora attention": lambda: with_lora(llama(), "q_proj", "v_proj", "o_proj"),
    "lora head": lambda: with_lora(llama(), "q_proj", "lm_head"),
}


SHORT, LONG = 20, 140  # tokens: with "auto" 1 and 3 tiles of 64
AUTO = {"mlp_tiles": "auto", "loss_tiles": "auto"}
STAGES = {"head_chunks": 2}
AWAY = {"offload_checkpoints": True}
AGAIN = {"recompute_attention": True}
CASES = {  # (model, ZeRO's stage, how layers are checkpointed)
    ("tied", 2, None): TILES,
    ("plain", 3, False): {**AUTO, **STAGES, **AWAY, **AGAIN},
    ("lora", 3, None): {**TILES, **STAGES},
}
REST = {
    ("plain", 2, None): STAGES,
    ("plain", 3, None): AUTO,
    ("plain", 3, True): {**AUTO, **STAGES, **AWAY},
    ("tied", 2, True): {**TILES, **AGAIN},
    ("tied", 3, False): {**AUTO, **AWAY},
    ("tied", 3, True): TILES,
    ("lora", 2, None): TILES,
    ("lora", 3, False): {**TILES, **STAGES, **AWAY},
    ("lora", 3, True): AUTO,
    ("lora attention", 2, False): STAGES,
    ("lora attention", 3, True): {**STAGES, **AUTO},
    ("lora head", 2, False): AUTO,
    ("lora head", 3, None): TILES,
}


def engine_of(name, stage, checkpointing, section, steps):
    model = MODELS[name]()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if checkpointing and name.startswith("lora"):
        model.enable_input_require_grads()  # torch's reentrant checkpoint has no gradients otherwise
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}  # or all is kept whole
    config = settings(section, str(stage), steps, 2, zero_optimization=zero, **OPTIMIZER)
    return ds_seqpar.initialize(model=model, config=config)[0]


def curves(cases):
    """By case: (losses, gradient norms) of some steps. Of several ranks one half has short sequences and the other long
    ones; one rank alone has all of them, in twice as many micro-batches."""
    found, groups = {}, min(2, dist.get_world_size())
    for case, tiles in cases.items():
        engine = engine_of(*case, {"size": dist.get_world_size() // groups, **tiles}, 4 // groups)
        sp, losses, norms = engine.sequence_parallel, [], []
        for _ in range(STEPS):
            short, long = (ragged(MODES["r2"], 1, 2, sequences=2, seq=seq) for seq in (SHORT, LONG))
            mine = [*short, *long] if groups == 1 else (short, long)[sp.data_rank]
            loss, norm = update(engine, sp.shard_batches(mine))
            losses.append(loss)
            norms.append(norm)
        found[case] = losses, norms
    return found


@pytest.mark.parametrize(
    ("cases", "ranks"), [(CASES, 2), pytest.param(REST, 4, marks=pytest.mark.slow)], ids=["few", "rest"]
)
def test_training_is_that_of_one_process_that_saves_no_memory(cases, ranks):
    """kernels-community#1000: under ZeRO-3 gradients reduced twice, and ranks with other numbers of tiles hung; #1081:
    parameters marked as ready twice."""
    (alone,) = on_ranks(1, curves, {case: {} for case in cases}, timeout=300)
    for found in on_ranks(ranks, curves, cases, timeout=300):
        for case, (losses, norms) in found.items():
            assert losses == pytest.approx(alone[case][0], rel=1e-5), case
            assert norms == pytest.approx(alone[case][1], rel=1e-5), case
    for losses, norms in alone.values():
        assert losses[1] < losses[0]
        assert min(norms) > 0.1


@on_each_of(2)
def test_ddp_is_given_each_gradient_once():
    """kernels-community#1081: "marked as ready twice". With tied embeddings."""
    sp, model = make(size=2, ulysses=1, **TILES), llama(tie_word_embeddings=True)
    window = ragged(MODES["r2"], 1, 2)
    expected, _ = one_process(llama(tie_word_embeddings=True), window)
    model.patch_attention(sp)
    data_parallel = torch.nn.parallel.DistributedDataParallel(model)
    for batch in sp.shard_batches(window):
        (data_parallel(**batch).loss / len(window)).backward()
    assert gap(gradients(model), expected) < 1e-5


# --- what else a model is asked for


@on_each_of(1)
def test_local_forwards_and_copies_are_the_models_own():
    """That they give what the plain model gives, and what unpatching leaves: test_odd_hands.py."""
    sp, model = make(size=1, **TILES), llama().eval()
    model.patch_attention(sp)
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
    patched, shard = llama().patch_attention(both), both.shard_batch(batch_of("odd"))
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
    assert lacking(refusal(lambda: patched(**shard)), "InputError", "num_items_in_batch", "got none") == []


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


@on_each_of(1)
def test_bf16_is_as_near_as_without_tiles():
    found, values = [], llama().bfloat16().state_dict()
    for dtype, tiles in (
        (torch.float64, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"mlp_tiles": 20, "loss_tiles": 20}),
    ):
        sp, model = make(size=1, **tiles), llama().to(dtype)
        model.load_state_dict(values)
        model.patch_attention(sp)
        model(**sp.shard_batch(batch_of("odd"))).loss.backward()
        found.append(gradients(model))
    assert gap(found[2], found[0]) < 2 * gap(found[1], found[0]) < 0.2


def compiled(asked):
    """(difference of gradients from those of one that is neither compiled nor tiled, whether there are no logits, tiles
    of an MLP, graphs)."""
    found, count = [], []
    for tiles in ({}, asked):
        sp, model = make(size=1, **tiles), small()
        model.patch_attention(sp)
        model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: count.append(1))
        run = torch.compile(model, backend="eager") if tiles else model
        output = run(**sp.shard_batch(batch_of("odd")))
        output.loss.backward()
        found.append(gradients(model))
    return gap(*found), output.logits is None, len(count), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"mlp_tiles": 2}, TILES], ids=len)
def test_a_compiled_model_has_tiles(asked):
    ((difference, no_logits, tiles, graphs),) = on_ranks(1, compiled, asked, timeout=300)
    assert difference < 1e-5
    assert no_logits is ("loss_tiles" in asked)
    assert tiles == 1 + 2 * asked["mlp_tiles"]
    assert graphs > 1


# --- the Trainer


def runs(folder, sections):
    """By section: losses, norms, the loss of evaluation and, with whole logits, of prediction; those logits."""
    found = []
    for section in sections:
        sizes = {"size": dist.get_world_size(), **section}
        how = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        trainer = trainers.make(folder, 4, sizes, stage=3, **how)
        history = trainers.trained(trainer)
        predicted = trainer.predict(trainers.documents(4, seed=9))
        figures = [*history["loss"], *history["grad_norm"], *history["eval_loss"], predicted.metrics["test_loss"]]
        found.append((figures, torch.as_tensor(predicted.predictions)))
    return found


def test_a_trainer_trains_evaluates_and_predicts_as_without_tiles(tmp_path):
    for (figures, logits), (mine, found) in on_ranks(2, runs, tmp_path, ({}, TILES), timeout=300):
        assert len(figures) == 2 + 2 + 1 + 1
        assert mine == pytest.approx(figures, rel=1e-5)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)

"""Every forward of a patched model is local, sharded or whole, whatever forwards, errors and threads are around it: its
outputs are what its mode makes of the plain model's, and so are its gradients."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ds_seqpar.data.batch_layout import EQUAL
from ds_seqpar.whole import WholeTensor
from hf_integration import patch_attention, unpatch_attention, whole_sequences
from hf_integration.context import LOCAL as LOCAL_CONTEXT
from hf_integration.context import set_current
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.families import gradients, model_of
from tests.hf.llama import averaged, gap, llama, small, with_lora
from tests.launch import on_each_of

LOCAL, SHARDED, WHOLE = MODES = "local", "sharded", "whole"
CACHED = "cached"  # whole, with a kv cache in parts, and without gradients
TILES = {"mlp_tiles": 2, "loss_tiles": 2}
CHUNKS = {"mlp_tiles": 2, "head_chunks": 2}
HOW = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
OUTPUTS = ("loss", "aux_loss", "logits", "last_hidden_state")
USES = {}
REST = []  # names of uses for `make test-all` alone


def use(name, *args, rest=False):
    """Registers a function, with these arguments, as a use of this name."""

    def register(function):
        assert name not in USES
        USES[name] = functools.partial(function, *args)
        REST.extend([name] if rest else [])
        return function

    return register


def batch(seed=0, tokens=16):
    ids = torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def own(sp, tokens=9):
    """Another batch on each rank, of another length."""
    return batch(10 + sp.rank, tokens + 4 * sp.rank)


def off(found, expected):
    """The greatest difference, beside the greatest number that is expected."""
    found, expected = (torch.as_tensor(x).detach().float() for x in (found, expected))
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def outputs_of(output):
    output = dict(zip(("loss", "logits"), output, strict=False)) if isinstance(output, tuple) else output
    return {name: output[name] for name in OUTPUTS if output.get(name) is not None}


def within(model, mode):
    return whole_sequences(model) if mode == LOCAL else contextlib.nullcontext()


def of_batch(model, given):
    return model(**given)


@dataclasses.dataclass
class Twins:
    """A patched model and the plain one, which are asked the same."""

    sp: Any
    plain: nn.Module
    model: nn.Module
    exact: float = 1e-5
    forwards: ClassVar[int] = 0

    def forward(self, mode, how=of_batch, given=None):
        """(the patched model's loss, the plain one's), once the outputs are found to be those of the mode."""
        sp, local = self.sp, mode == LOCAL
        given, how = given or (own(sp) if local else batch()), prefilled if mode == CACHED else how
        expected = outputs_of(how(self.plain, given))
        shard = sp.shard_batch(given) if mode == SHARDED else given
        Twins.forwards = number = Twins.forwards + 1
        before = sum(sp.comm.received.values())
        with within(self.model, mode):
            found = outputs_of(how(self.model, shard))
        if Twins.forwards == number:  # none inside, which may have sent
            assert (sum(sp.comm.received.values()) > before) == (not local)
        assert found.keys() | {"logits"} == expected.keys() | {"logits"}  # a loss in tiles makes no logits
        for name, x in found.items():
            wanted = expected[name]
            assert isinstance(x, WholeTensor) == (mode in (WHOLE, CACHED) and x.dim() == 3), (mode, name)
            if mode == SHARDED:
                wanted = sp.shard(wanted, 1, shard.get("placement")) if x.dim() else wanted
                x = sp.mean_loss(x) if name == "loss" else x
            assert off(x, wanted) < self.exact, (mode, name)
        return tuple(x["loss"] if "loss" in x else [*x.values()][-1].float().exp().mean() for x in (found, expected))

    def backward(self, *losses):
        """Compares the gradients of the sum of losses, averaged over ranks as a training loop does."""
        for loss in map(sum, zip(*losses, strict=True)):
            loss.backward()
        assert gap(averaged(self.model), averaged(self.plain)) < self.exact
        self.forget()

    def forget(self):
        self.model.zero_grad(), self.plain.zero_grad()

    def train(self, *how, modes=MODES):
        """A step of a forward of each mode."""
        self.backward(*[self.forward(mode, *how) for mode in modes])

    @contextlib.contextmanager
    def evaluating(self):
        self.model.eval(), self.plain.eval()
        yield
        self.model.train(), self.plain.train()


def twins(build=small, checkpoints=None, sp=None, **settings):
    """checkpoints: whether those of the patched model are reentrant; None: it has none."""
    plain, model = build().train(), build().train()
    sp = sp or make(size=2, **settings)
    patch_attention(model, sp)
    if checkpoints is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        model.enable_input_require_grads()  # torch's reentrant checkpoint has no gradients otherwise
    return Twins(sp, plain, model)


def on(module, function):
    """Calls a function before each forward of a module, but for those inside of it; returns the hook's handle."""
    running = []

    def hook(*_):
        if not running:
            running.append(True)
            function()
            running.clear()

    return module.register_forward_pre_hook(hook)


# --- arguments


def assert_sharded(t, found, ids, placement=None):
    """Logits of this rank's tokens of the ids."""
    assert not isinstance(found, WholeTensor)
    assert off(found, t.sp.shard(t.plain(ids).logits, 1, placement)) < t.exact


def prefilled(model, given):
    with torch.no_grad():
        return model(given["input_ids"], use_cache=True)


def by_position(model, given):
    first = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels")
    return model(*map(given.get, first), **{name: x for name, x in given.items() if name not in first})


def base_by_position(model, given):
    placement = {name: x for name, x in given.items() if name == "placement"}
    return model.base_model(given["input_ids"], None, given.get("position_ids"), **placement)


def of_base(model, given):
    return model.base_model(**{name: x for name, x in given.items() if name != "labels"})


def embedded(model, given):
    rest = {name: x for name, x in given.items() if name != "input_ids"}
    return model(inputs_embeds=model.get_input_embeddings()(given["input_ids"]), **rest)


def without_gradients(model, given):
    with torch.no_grad():
        return model(**given)


def as_tuple(model, given):
    return model(**given, return_dict=False)[:2]


def with_positions(model, given):
    """Positions of a tensor of the user's own."""
    positions = given.get("position_ids", torch.arange(given["input_ids"].shape[1])[None])
    return model(**{**given, "position_ids": positions.clone()})


@use("arguments by position", by_position)
@use("arguments of the base model by position", base_by_position, rest=True)
@use("the base model", of_base, rest=True)
@use("inputs_embeds", embedded, rest=True)
@use("a tuple", as_tuple, rest=True)
@use("positions of a user's own", with_positions, rest=True)
def arguments(how):
    twins().train(how)


@use("evaluation, and no gradients in training mode", rest=True)
def evaluated():
    t = twins()
    for mode in MODES:
        t.forward(mode, without_gradients)
    with t.evaluating():
        for mode in (*MODES, CACHED, WHOLE):
            t.forward(mode, without_gradients)
    t.train()


@use("autocast", False, rest=True)
@use("autocast and checkpoints", True, rest=True)
def autocast(checkpointed):
    t = twins(checkpoints=False if checkpointed else None)
    t.exact = 0.05
    with torch.autocast("cpu", torch.bfloat16):
        losses = [t.forward(mode) for mode in MODES]
    t.backward(*losses)


@use("a dict that is used again", rest=True)
def a_dict_used_again():
    t = twins()
    whole, mine = batch(), own(t.sp)
    shard = t.sp.shard_batch(whole)
    before = [dict(x) for x in (whole, mine, shard)]
    losses = []
    for _ in range(2):
        losses += [t.forward(WHOLE, given=whole), t.forward(LOCAL, given=mine)]
        losses.append((t.model(**shard).loss, t.plain(**whole).loss))
    for now, then in zip((whole, mine, shard), before, strict=True):
        assert now.keys() == then.keys()
        assert all(now[name] is x for name, x in then.items())
    t.backward(*losses)


@use("tensors of a batch that are used again in another mode", rest=True)
def tensors_used_again():
    """The ids and positions of a shard, then of whole sequences."""
    t = twins(layout="contiguous")
    shard = t.sp.shard_batch(batch())
    mine = {name: shard[name] for name in ("input_ids", "labels", "position_ids")}
    losses = [(t.model(**shard).loss, t.plain(**batch()).loss)]
    losses.append(t.forward(LOCAL, given=mine))
    losses.append((t.model(**shard).loss, t.plain(**batch()).loss))
    t.backward(*losses)


@use("positions that on one rank fit a shard and whole sequences", rest=True)
def ambiguous_positions():
    t = twins(layout="contiguous")
    ids, positions = batch()["input_ids"], torch.arange(8)[None]
    found = t.model(input_ids=ids[:, :8], position_ids=positions).logits
    assert off(found, t.plain(ids[:, :8]).logits) < t.exact
    places = positions + 8 * t.sp.rank
    found = t.model(input_ids=t.sp.shard(ids, 1), position_ids=places, placement=EQUAL).logits
    assert_sharded(t, found, ids)


@use("a shard that its user has made", rest=True)
def shard_by_hand():
    t = twins()
    ids = batch()["input_ids"]
    for call in (t.model, t.model.eval()):
        places = t.sp.position_ids(16, EQUAL)[None]
        found = call(input_ids=t.sp.shard(ids, 1, EQUAL), position_ids=places, placement=EQUAL).logits
        assert_sharded(t, found, ids)


@use("a placement, with labels and without", rest=True)
def a_placement():
    t, given = twins(), batch(tokens=13)
    losses = [t.forward(mode, given=given) for mode in MODES]
    shard = t.sp.shard_batch(given)
    without = {name: shard[name] for name in ("input_ids", "position_ids", "placement")}
    found = t.model(**without).logits
    assert_sharded(t, found, given["input_ids"], shard["placement"])
    t.backward(*losses)


@use("the last logits", rest=True)
def last_logits():
    t = twins()
    for mode in (LOCAL, WHOLE):
        t.forward(mode, lambda model, given: model(given["input_ids"], logits_to_keep=3))


# --- a kv cache


def continued(model, ids, keyword, base):
    """Logits, or hidden states, of tokens behind a cache."""
    model = model.base_model if base else model
    first = model(ids[:, :6], use_cache=True).past_key_values
    second = (ids[:, 6:], None, None, first)
    output = model(ids[:, 6:], past_key_values=first) if keyword else model(*second)
    return output[0]


@use("a cache by keyword", True, False, small, rest=True)
@use("a cache by position", False, False, small, rest=True)
@use("a cache by position, of the base model", False, True, small, rest=True)
@use("a cache by position, of experts with router logits", False, False, lambda: experts())
def cached(keyword, base, build):
    t = twins(build)
    with torch.no_grad():
        ids = batch()["input_ids"]
        assert off(*(continued(model, ids, keyword, base) for model in (t.model, t.plain))) < t.exact
        if t.sp.rank == 1:
            with whole_sequences(t.model):
                ids = own(t.sp)["input_ids"]
                assert off(*(continued(model, ids, keyword, base) for model in (t.model, t.plain))) == 0
    t.train()


@use("use_cache by position")
def use_cache_by_position():
    t = twins(experts)
    with torch.no_grad():
        ids = batch()["input_ids"]
        found, expected = (model(ids, None, None, None, None, None, True) for model in (t.model, t.plain))
    assert found.past_key_values is not None
    assert off(found.logits, expected.logits) < t.exact
    t.train()


@use("a cache in training", rest=True)
def cache_in_training():
    t = twins()
    for given in (batch(), t.sp.shard_batch(batch())):
        assert lacking(refusal(t.model, **given, use_cache=True), "InputError", "no kv cache") == []
        t.train()


def experts():
    return model_of("qwen3_moe", num_hidden_layers=1)


@use("a cache between forward and backward, of experts with checkpoints", rest=True)
def cached_experts():
    t = twins(experts, checkpoints=False)
    losses = [t.forward(mode) for mode in MODES]
    with t.evaluating():
        t.forward(CACHED)
    t.backward(*losses)


# --- an exception in a forward


class Interruption(BaseException):
    pass


def fail(error):
    def hook(*_):
        raise error

    return hook


def in_layer(model, hook):
    return model.model.layers[0].mlp.register_forward_pre_hook(hook)


PLACES = {
    "a layer": in_layer,
    "the embeddings": lambda model, hook: model.get_input_embeddings().register_forward_hook(hook),
    "a pre-hook before ours": lambda model, hook: model.register_forward_pre_hook(hook, prepend=True),
    "a pre-hook after ours": lambda model, hook: model.register_forward_pre_hook(hook),
    "a pre-hook of the base model": lambda model, hook: model.model.register_forward_pre_hook(hook),
    "a forward hook before ours": lambda model, hook: model.register_forward_hook(hook, prepend=True),
    "a forward hook after ours": lambda model, hook: model.register_forward_hook(hook),
    "a forward hook of the base model": lambda model, hook: model.model.register_forward_hook(hook),
}


@use("an exception in a layer, which is no Exception", in_layer, Interruption)
@use("an exception in tiles", in_layer, KeyError, TILES)
def exception(place, error=KeyError, settings=None):
    t, losses = twins(**(settings or {})), []
    for mode in MODES:
        handle = place(t.model, fail(error()))
        with pytest.raises(error), within(t.model, mode):
            t.model(**(t.sp.shard_batch(batch()) if mode == SHARDED else own(t.sp) if mode == LOCAL else batch()))
        handle.remove()
        losses += [t.forward(other) for other in MODES if other != mode]
    t.backward(*losses)
    set_current(None)  # torch calls no hooks after what is no Exception, and other tests run on these ranks


for place in PLACES:
    use(f"an exception in {place}", PLACES[place], rest=place != "a pre-hook after ours")(exception)


@use("an exception when a checkpoint computes a layer again", rest=True)
def exception_in_recomputation():
    t = twins(checkpoints=False)
    for mode in MODES:
        loss = t.forward(mode)[0]
        handle = in_layer(t.model, fail(KeyError()))
        with pytest.raises(KeyError):
            loss.backward()
        handle.remove()
        t.forget()
        t.train(modes=[other for other in MODES if other != mode])


@use("a forward that is refused", rest=True)
def refused():
    t = twins()
    for wrong in (batch(seed=t.sp.rank), {**batch(), "position_ids": torch.arange(5, 21)[None]}):
        assert refusal(t.model, **wrong)[0] is not None
        t.train()


# --- dropout: each forward has its numbers, also where layers are computed again


def dropping():
    return model_of("phi3", num_hidden_layers=1, resid_pdrop=0.3, attn_implementation="sdpa").train()


def noisy(sp, mode, checkpoints=None, between=None, inside=None):
    """(loss, gradients) of one forward from the same seed. between: is called before backward; inside: in the forward,
    between attention's dropout and the MLP's."""
    model = patch_attention(dropping(), sp)
    if checkpoints is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        model.enable_input_require_grads()
    given = own(sp) if mode == LOCAL else sp.shard_batch(batch()) if mode == SHARDED else batch()
    if inside is not None:
        on(model.model.layers[0].mlp, lambda: inside(sp, model))
    torch.manual_seed(4)
    with within(model, mode):
        loss = model(**given).loss
    if between is not None:
        between(sp, model)
    loss.backward()
    return loss, gradients(model)


def assert_same(found, expected):
    assert off(found[0], expected[0]) < 1e-6
    assert gap(found[1], expected[1]) < 1e-6


def others_between(sp, model):
    with torch.no_grad(), whole_sequences(model):
        model(**own(sp))
    model(**batch(1))
    model(**sp.shard_batch(batch(2)))
    model.eval()(**batch(1))
    model(batch()["input_ids"], use_cache=True)
    model.train()


@use("dropout of a local forward, before others", LOCAL, rest=True)
@use("dropout of a sharded forward, before others", SHARDED, rest=True)
@use("dropout of a whole forward, before others", WHOLE, rest=True)
def dropout_again(mode):
    sp = make(size=2)
    expected = noisy(sp, mode)
    for checkpoints in (False, True):
        assert_same(noisy(sp, mode, checkpoints, between=others_between), expected)


@use("dropout of a local forward is the plain model's, after others", rest=True)
def local_dropout():
    sp, plain, losses = make(size=2), dropping(), []
    model = patch_attention(dropping(), sp)
    for other in (batch(), sp.shard_batch(batch()), None):
        if other is not None:
            model(**other)
        torch.manual_seed(4)
        losses.append(plain(**own(sp)).loss)
        torch.manual_seed(4)
        with whole_sequences(model):
            assert off(model(**own(sp)).loss, losses[-1]) < 1e-6
    assert off(losses[0], losses[-1]) == 0


@use("dropout of sharded and whole forwards is the same, after an exception too", rest=True)
def shared_dropout():
    sp, found = make(size=2), []
    model, shard = patch_attention(dropping(), sp), sp.shard_batch(batch())
    for _ in range(2):
        torch.manual_seed(4)
        found.append(sp.mean_loss(model(**shard).loss))
        torch.manual_seed(4)
        found.append(float(model(**batch()).loss))
        handle = in_layer(model, fail(KeyError()))
        with pytest.raises(KeyError):
            model(**batch())
        handle.remove()
    assert found == pytest.approx(found[:1] * 4, rel=1e-6)


# --- a forward inside another


SETTINGS = {
    "in tiles": TILES,
    "in chunks of heads": CHUNKS,
    "in reentrant checkpoints": {"checkpoints": True},
}


def inside(outer, inner, where):
    t = twins(llama, **SETTINGS.get(where, {}))
    other, losses = twins(sp=t.sp) if where == "of another model" else t, []
    how = without_gradients if "checkpoints" in where else of_batch  # they would save the inner forward's tensors
    handle = on(t.model.model.layers[0].self_attn, lambda: losses.append(other.forward(inner, how)))
    loss = t.forward(outer)
    if how is of_batch:
        handle.remove()
    for its, pair in ((t, loss), (other, losses[0])):
        if pair[0].requires_grad:
            its.backward(pair)


FEW = [(CACHED, WHOLE, "of the same model"), (LOCAL, WHOLE, "of another model"), (WHOLE, SHARDED, "of another model")]
FEW += [
    (SHARDED, WHOLE, "in chunks of heads"),
    (WHOLE, SHARDED, "in reentrant checkpoints"),
    (SHARDED, LOCAL, "in tiles"),
]
PAIRS = itertools.permutations((*MODES, CACHED), 2)
MORE = [(*pair, where) for pair in PAIRS for where in ("of another model", "of the same model")]
for outer, inner, where in dict.fromkeys(FEW + MORE):
    if (outer, where) != (LOCAL, "of the same model"):  # in whose whole_sequences all are local
        rest = (outer, inner, where) not in FEW
        use(f"a {inner} forward inside a {outer} one {where}", outer, inner, where, rest=rest)(inside)


@use("a model called in its own forward hook")
def in_own_hook():
    t = twins()
    losses, running = [], []

    def hook(*_):
        if not running:
            running.append(True)
            losses.extend(t.forward(mode) for mode in (LOCAL, SHARDED, WHOLE))
            running.clear()

    for mode in (SHARDED, WHOLE):
        handle = t.model.register_forward_hook(hook, prepend=mode == WHOLE)
        losses.append(t.forward(mode))
        handle.remove()
    t.backward(*losses)


@use("a local forward inside a checkpointed layer, which is computed again with it", rest=True)
def inside_a_checkpoint():
    for mode, reentrant in ((SHARDED, False), (WHOLE, True)):
        t, calls = twins(checkpoints=reentrant), []
        on(t.model.model.layers[0].mlp, lambda t=t, calls=calls: calls.append(t.forward(LOCAL, without_gradients)))
        loss = t.forward(mode)
        assert len(calls) == 1
        t.backward(loss)
        assert len(calls) == 2


@use("dropout around a forward of another model")
def dropout_around_another():
    other = twins()
    for mode, inner in ((LOCAL, WHOLE), (SHARDED, LOCAL), (WHOLE, SHARDED)):
        found = noisy(other.sp, mode, inside=lambda *_, inner=inner: other.forward(inner))
        assert_same(found, noisy(other.sp, mode))


@use("dropout around a local forward of the same model")
def dropout_around_itself():
    def again(sp, model):
        model.eval()
        with torch.no_grad(), whole_sequences(model):
            model(**own(sp))
        model.train()

    sp = make(size=2)
    for mode in (SHARDED, WHOLE):
        expected = noisy(sp, mode)
        for checkpoints in (None, False, True):
            assert_same(noisy(sp, mode, checkpoints, inside=again), expected)


# --- between forward and backward


def before_others(mode, reentrant, settings):
    t = twins(checkpoints=reentrant, **settings)
    for other in MODES:
        loss = t.forward(mode)
        t.forward(other)
        t.backward(loss)


for mode, reentrant, tiles in itertools.product(MODES, (False, True), (False, True)):
    name = f"a {mode} forward before others, {'reentrant ' * reentrant}checkpoints{' and tiles' * tiles}"
    quick = (mode, reentrant, tiles) in ((LOCAL, False, True), (SHARDED, True, False), (WHOLE, False, True))
    use(name, mode, reentrant, TILES if tiles else {}, rest=not quick)(before_others)


@use("tiles of MLP and loss, a local forward between", TILES, rest=True)
@use("chunks of heads, a local forward between", CHUNKS, rest=True)
def tiles_between(settings):
    t = twins(**settings)
    for mode in (SHARDED, WHOLE):
        loss = t.forward(mode)
        t.forward(LOCAL)
        t.backward(loss)
    t.train()


@use("backward in the other order", rest=True)
def other_order():
    t = twins(checkpoints=False)
    for loss in reversed([t.forward(mode) for mode in MODES]):
        t.backward(loss)


@use("evaluation between forward and backward", rest=True)
def evaluation_between():
    t = twins(checkpoints=False)
    losses = [t.forward(mode) for mode in MODES]
    with t.evaluating():
        for mode in MODES:
            t.forward(mode, without_gradients)
    t.backward(*losses)


@use("generate between forward and backward")
def generate_between():
    t = twins(checkpoints=False)
    losses = [t.forward(mode) for mode in MODES]
    with t.evaluating():
        found, expected = (model.generate(batch()["input_ids"], **HOW) for model in (t.model, t.plain))
    assert torch.equal(found, expected)
    if t.sp.rank == 1:
        with t.evaluating(), whole_sequences(t.model):
            assert torch.equal(t.model.generate(batch()["input_ids"], **HOW), expected)
    t.backward(*losses)
    t.train()


@use("whole_sequences between forward and backward, nested, left by an exception", rest=True)
def whole_sequences_between():
    t = twins(checkpoints=False)
    for mode in (SHARDED, WHOLE):
        loss = t.forward(mode)
        with whole_sequences(t.model), whole_sequences(t.model):
            t.backward(loss)
        with pytest.raises(KeyError), whole_sequences(t.model), whole_sequences(t.model):
            raise KeyError
        t.train()
    with whole_sequences(t.model):
        loss = t.forward(LOCAL)
        local = t.forward(LOCAL)  # the inner one has ended
        found = t.model(**own(t.sp)).loss
    assert off(found, local[1]) < t.exact
    t.backward(loss, local)


@use("a copy between forward and backward", None, rest=True)
@use("a copy between forward and backward, with checkpoints", False)
def copy_between(checkpoints):
    t = twins(checkpoints=checkpoints)
    losses = [t.forward(mode) for mode in MODES]
    with whole_sequences(t.model):
        twin = Twins(t.sp, copy.deepcopy(t.plain), copy.deepcopy(t.model))
    of_copy = [twin.forward(mode) for mode in MODES]
    t.backward(*losses)
    twin.backward(*of_copy)


@use("a model that is patched again between forward and backward")
def patched_again():
    t = twins(checkpoints=False)
    losses = {mode: t.forward(mode) for mode in MODES}
    patch_attention(unpatch_attention(t.model), t.sp)
    t.backward(losses[LOCAL])
    for mode in (SHARDED, WHOLE):
        assert lacking(refusal(losses[mode][0].backward), "ConfigError", "unpatch_attention after backward") == []
    t.forget()
    t.train()


@use("a local forward in a function that torch checkpoints", LOCAL, False, rest=True)
@use("a whole forward in a function that torch checkpoints", WHOLE, False, rest=True)
@use("a whole forward in a function that torch checkpoints, reentrant", WHOLE, True, rest=True)
def in_a_checkpointed_function(mode, reentrant):
    def how(model, given):
        def function(x):
            with within(model, mode):
                return model(inputs_embeds=x, labels=given["labels"]).loss

        x = model.get_input_embeddings()(given["input_ids"])
        return {"loss": checkpoint(function, x, use_reentrant=reentrant)}

    t = twins()
    loss = t.forward(mode, how)
    others = [t.forward(other) for other in MODES]
    t.backward(loss)
    t.backward(*others)


# --- several models


@use("two models of one sp, in turn")
def two_models():
    first = twins(checkpoints=False)
    second = twins(functools.partial(small, seed=1), sp=first.sp)
    losses = [(t, t.forward(mode)) for mode in MODES for t in (first, second)]
    with whole_sequences(first.model):
        losses += [(second, second.forward(WHOLE)), (second, second.forward(SHARDED))]
    for t, loss in reversed(losses):
        t.backward(loss)


def headed(t, kind, **changes):
    """Twins of another head around the base models of t."""
    made = []
    for model in (t.plain, t.model):
        torch.manual_seed(2)
        config = copy.deepcopy(t.plain.config)
        config.update(changes)
        head = kind(config)
        head.model = model.model
        made.append(head.train())
    patch_attention(made[1], t.sp)
    return Twins(t.sp, *made)


@use("one base model under two causal heads", rest=True)
def two_causal_heads():
    t = twins()
    second = headed(t, LlamaForCausalLM)
    losses = [(its, its.forward(mode)) for mode in MODES for its in (second, t)]
    for its, loss in losses:
        its.backward(loss)


def classified(sp, mode):
    return {**(own(sp) if mode == LOCAL else batch()), "labels": torch.tensor([0, 2])}


def assert_takes_no_shards(t):
    shard = t.sp.shard_batch(batch())
    said = refusal(t.model, **{name: shard[name] for name in ("input_ids", "position_ids", "placement")})
    assert lacking(said, "InputError", "needs whole batches") == []


@use("one base model under a causal head and a classifier")
def classifier_beside():
    t = twins()
    second = headed(t, LlamaForSequenceClassification, num_labels=3, pad_token_id=0)
    for mode in (LOCAL, WHOLE):
        loss = second.forward(mode, given=classified(t.sp, mode))
        t.forward(SHARDED)
        second.backward(loss)
        assert_takes_no_shards(second)
    t.train()


@use("a classifier", rest=True)
def classifier():
    def build():
        torch.manual_seed(2)
        return LlamaForSequenceClassification(small(num_labels=3, pad_token_id=0).config)

    t = twins(build)
    for mode in (WHOLE, LOCAL, WHOLE):
        t.backward(t.forward(mode, given=classified(t.sp, mode)))
        assert_takes_no_shards(t)


class Penalised(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        output.loss = output.loss + 0.1 * output.logits.float().logsumexp(-1).pow(2).mean()
        return output


def penalised():
    torch.manual_seed(0)
    return Penalised(small().config)


@use("a forward of a user's own, around a local one and a whole one", rest=True)
def of_own():
    t = twins(penalised)
    for mode in (LOCAL, WHOLE):
        handle = in_layer(t.model, fail(KeyError()))
        with pytest.raises(KeyError), within(t.model, mode):
            t.model(**batch())
        handle.remove()
        t.train(modes=(WHOLE, LOCAL, WHOLE))


def adapted_by_position(model, given):
    rest = {name: x for name, x in given.items() if name not in ("input_ids", "labels")}
    return model(given["input_ids"], None, None, given["labels"], **rest)


@use("adapters of peft's", rest=True)
def adapters():
    t = twins(lambda: with_lora(small(), "q_proj", "v_proj"))
    t.train(of_base)
    t.train(adapted_by_position)


# --- RoPE whose frequencies follow the longest position


def dynamic():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return small(max_position_embeddings=10, rope_parameters=rope)


@use("dynamic RoPE, a longer local forward between", rest=True)
def dynamic_between():
    t = twins(dynamic)
    for mode in (SHARDED, WHOLE):
        losses = [t.forward(mode), t.forward(LOCAL, given=batch(5, 13)), t.forward(mode), t.forward(CACHED)]
        losses += [t.forward(LOCAL, given=batch(6, 24)), t.forward(mode)]
        t.backward(*[loss for loss in losses if loss[0].requires_grad])


@use("dynamic RoPE, a local forward inside another one, before RoPE")
def dynamic_inside():
    """The plain model makes the same forwards, since its frequencies follow the longest of them."""
    for mode in (SHARDED, WHOLE):
        t, losses = twins(dynamic), []

        def again(model, losses=losses):
            with whole_sequences(model):
                losses.append(model(**batch(5, 12)).loss)

        for model in (t.plain, t.model):
            embeddings = model.get_input_embeddings()
            on(embeddings, functools.partial(again, model))
        loss = t.forward(mode)
        t.backward(loss, losses[::-1])


@use("dynamic RoPE, called by itself")
def dynamic_alone():
    """After a forward, and after one that an exception has ended."""
    t = twins(dynamic)
    x, positions = torch.zeros(1, 6, 64), torch.arange(6)[None]  # RoPE that is not scaled

    def compare():
        found, expected = (model.model.rotary_emb(x, positions) for model in (t.model, t.plain))
        assert all(off(*pair) < t.exact for pair in zip(found, expected, strict=True))

    for mode in (SHARDED, WHOLE):
        t.forward(mode)
        compare()
        handle = in_layer(t.model, fail(KeyError()))
        with pytest.raises(KeyError):
            t.model(**(t.sp.shard_batch(batch()) if mode == SHARDED else batch()))
        handle.remove()
        compare()


@use("a layer that is called by itself", rest=True)
def layer_alone():
    t = twins()
    x, positions = torch.ones(1, 8, 64), torch.arange(8)[None]
    for mode in MODES:
        t.forward(mode)
        around = t.model.model.rotary_emb(x, positions)
        said = refusal(t.model.model.layers[0], x, position_embeddings=around)
        assert lacking(said, "InputError", "past its model's forward") == []


# --- threads


def in_threads(*functions):
    """What functions return that run at once, each in a thread; raises what one of them raised."""
    found, errors = [None] * len(functions), []

    def run(number, function):
        try:
            found[number] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def alone(t):
    """A local forward and its backward, without other ranks."""
    loss, expected = t.forward(LOCAL)
    loss.backward(), expected.backward()
    assert gap(gradients(t.model), gradients(t.plain)) < t.exact
    t.forget()


@use("a local forward in a thread of one rank", rest=True)
def local_in_a_thread():
    t = twins(checkpoints=False)
    if t.sp.rank == 1:
        in_threads(lambda: alone(t))
    t.train()


@use("a local forward in a thread, in whole_sequences of the main thread", rest=True)
def local_in_whole_sequences_of_another_thread():
    t = twins()
    given = own(t.sp)
    with whole_sequences(t.model):
        (found,) = in_threads(lambda: t.model(**given).loss)
    assert off(found, t.plain(**given).loss) < t.exact
    t.train()


@use("local forwards in two threads at once")
def two_threads():
    """Each in a whole_sequences of its own: the first one ends while the second one's forward is still to come."""
    t, given = twins(), own(twins().sp)
    both, first_left = threading.Barrier(2, timeout=20), threading.Event()

    def first():
        with whole_sequences(t.model):
            both.wait()
            loss = t.model(**given).loss
        first_left.set()
        return loss

    def second():
        with whole_sequences(t.model):
            both.wait()
            assert first_left.wait(20)
            return t.model(**given).loss

    expected = t.plain(**given).loss
    for found in in_threads(first, second):
        assert off(found, expected) < t.exact
    t.train()


@use("local attention in a thread, while another thread is inside of it")
def attention_in_attention():
    """That thread's module had read the name of our attention, and now the one before is asked for."""
    t, seen = twins(functools.partial(small, attn_implementation="eager")), []
    attention = t.model.model.layers[0].self_attn

    def own(module, *args, **kwargs):
        if not seen and module.q_proj is attention.q_proj:  # not the plain model's
            seen.extend([module.config._attn_implementation, attention.config])
            seen.extend(in_threads(lambda: ours(attention, *args, sequence_parallel=LOCAL_CONTEXT, **kwargs)))
        return eager(module, *args, **kwargs)

    eager, ours = modeling_llama.eager_attention_forward, ALL_ATTENTION_FUNCTIONS["ds_seqpar"]
    modeling_llama.eager_attention_forward = own
    try:
        loss, expected = t.forward(LOCAL, without_gradients)
    finally:
        modeling_llama.eager_attention_forward = eager
    assert off(loss, expected) < t.exact
    assert seen[0] == "eager"
    assert seen[1]._attn_implementation == "ds_seqpar"
    assert attention.config is seen[1] is t.model.config
    t.train()


@use("local forwards with a cache in two threads at once", rest=True)
def cached_in_two_threads():
    t = twins()
    both, batches = threading.Barrier(2, timeout=20), [batch(seed, 9 + seed) for seed in (1, 2)]

    def hook(*_):
        both.wait()

    handle = in_layer(t.model, hook)
    with t.evaluating(), whole_sequences(t.model):
        found = in_threads(*[lambda given=given: prefilled(t.model, given).logits for given in batches])
        handle.remove()
        for logits, given in zip(found, batches, strict=True):
            assert off(logits, prefilled(t.plain, given).logits) < t.exact
    t.train()


@use("a local forward in a thread, inside a sharded one", rest=True)
def thread_inside():
    for mode in (SHARDED, WHOLE):
        t = twins(checkpoints=False)
        handle = on(t.model.model.layers[0].mlp, lambda t=t: in_threads(lambda: t.forward(LOCAL, without_gradients)))
        loss = t.forward(mode)
        t.backward(loss)
        handle.remove()


@use("dropout around a local forward in a thread", rest=True)
def dropout_around_a_thread():
    other = twins()
    for mode in (SHARDED, WHOLE):
        found = noisy(other.sp, mode, inside=lambda *_: in_threads(lambda: other.forward(LOCAL, without_gradients)))
        assert_same(found, noisy(other.sp, mode))


@use("a forward that is shared, in a thread of one rank")
def shared_in_a_thread():
    t = twins()
    shard = t.sp.shard_batch(batch())
    for given in (batch(), shard):
        if t.sp.rank == 1:
            (said,) = in_threads(lambda given=given: refusal(t.model, **given))
            assert lacking(said, "ConfigError", "in one thread", "sp.bind_to_thread()") == []
        t.train()


@use("a training step in a thread that is bound, with checkpoints", rest=True)
def bound_thread():
    t = twins(checkpoints=False)
    expected = noisy(t.sp, WHOLE, False)
    in_threads(lambda: (t.sp.bind_to_thread(), t.train(), assert_same(noisy(t.sp, WHOLE, False), expected)))
    t.sp.bind_to_thread()
    t.train()


# --- one rank a sequence


@use("one rank a sequence, batches of shard_batches between local ones", rest=True)
def one_rank():
    sp = make(size=1, **TILES)
    t = Twins(sp, small().train(), patch_attention(small().train(), sp))
    t.model.gradient_checkpointing_enable({"use_reentrant": False})
    shard, losses = sp.shard_batch(batch()), []
    for given in (shard, batch(), shard):
        losses += [(t.model(**given).loss, t.plain(**batch()).loss), t.forward(LOCAL)]
    assert all(off(*pair) < t.exact for pair in losses)
    t.backward(*losses)


@pytest.mark.parametrize("name", each_then_rest([name for name in USES if name not in REST], REST))
@on_each_of(2, timeout=40)
def test_the_mode_is_right(name):
    USES[name]()

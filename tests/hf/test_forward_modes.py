"""Every forward of a patched model is local, sharded or whole, whatever forwards, errors, threads, copies and patches
are around it: its outputs are what its mode makes of the plain model's, and so are its gradients.

`Twins` asks a patched model and the plain one the same and compares outputs, what was sent, and gradients. A test draws
a sequence of EVENTS for twins of one of SETTINGS: with each seed an event comes in one setting. To add an event,
decorate a function (run, *arguments) with `event`: it calls `run.t` and hands losses to `run.keep`, whose backward
comes some events later. An error lists the events before it.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
OUTPUTS = ("loss", "aux_loss", "logits", "last_hidden_state")


def batch(seed=0, tokens=16):
    ids = torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


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


def stack(model):
    """The model of layers inside."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model


# --- ways to call a model


def of_batch(model, given):
    return model(**given)


def prefilled(model, given):
    with torch.no_grad():
        return model(given["input_ids"], use_cache=True)


def by_position(model, given):
    names = [*inspect.signature(type(model).forward).parameters][1:]
    first = names[: names.index("labels") + 1]
    return model(*map(given.get, first), **{name: x for name, x in given.items() if name not in first})


def without_gradients(model, given):
    with torch.no_grad():
        return model(**given)


def without(given, *names):
    return {name: x for name, x in given.items() if name not in names}


def with_positions(model, given):
    """Positions of a tensor of the user's own."""
    positions = given.get("position_ids", torch.arange(given["input_ids"].shape[1])[None])
    return model(**{**given, "position_ids": positions.clone()})


HOWS = {
    "of a batch": of_batch,
    "by position": by_position,
    "of the base model": lambda model, given: model.base_model(**without(given, "labels")),
    "of the base model by position": lambda model, given: model.base_model(
        given["input_ids"], None, given.get("position_ids"), **{x: given[x] for x in given if x == "placement"}
    ),
    "of embeddings": lambda model, given: model(
        inputs_embeds=model.get_input_embeddings()(given["input_ids"]), **without(given, "input_ids")
    ),
    "of a tuple": lambda model, given: model(**given, return_dict=False)[:2],
    "with positions of a user's own": with_positions,
    "without labels": lambda model, given: model(**without(given, "labels", "shift_labels")),
    "of the last logits": lambda model, given: model(given["input_ids"], logits_to_keep=3),
}


# --- the judge


@dataclasses.dataclass
class Twins:
    """A patched model and the plain one, which are asked the same."""

    sp: Any
    plain: nn.Module
    model: nn.Module
    exact: float = 1e-5
    autocast: bool = False
    checkpoints: bool | None = None  # whether those of the patched model are reentrant; None: it has none
    modes: tuple = (*MODES, CACHED)  # in place of others it has a whole forward
    shards: dict = dataclasses.field(default_factory=dict)  # by tokens: batches that are given again and again
    forwards: ClassVar[int] = 0
    in_backward: ClassVar[bool] = False

    def given(self, mode, tokens=None):
        """(the batch of the plain model, that of the patched one). A local forward has another one on each rank."""
        if tokens is None:
            tokens = 11 + 4 * self.sp.rank if mode == LOCAL else 16  # more than RoPE that is not scaled has
        if (mode, tokens) not in self.shards:
            whole = batch(10 + self.sp.rank if mode == LOCAL else 0, tokens)
            self.shards[mode, tokens] = whole, self.sp.shard_batch(whole) if mode == SHARDED else whole
        return self.shards[mode, tokens]

    def expected(self, mode, how, given):
        return outputs_of(how(self.plain, given))

    def forward(self, mode, how=of_batch, tokens=None, given=None):
        """(the patched model's loss, the plain one's), once the outputs are found to be those of the mode."""
        mode = mode if mode in self.modes else WHOLE
        how = prefilled if mode == CACHED else how
        whole, mine = (given, given) if given else self.given(mode, tokens)
        before, sent = dict(mine), sum(self.sp.comm.received.values())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            expected = self.expected(mode, how, whole)
            Twins.forwards = number = Twins.forwards + 1
            with within(self.model, mode):
                found = outputs_of(how(self.model, mine))
        if Twins.forwards == number:  # none inside, which may have sent
            is_first = self.sp.rank == 0 and self.sp.config.layout == "contiguous"  # whose tokens see no others
            may_lack = mode != LOCAL and (is_first or Twins.in_backward)  # where attention may be replayed
            assert (sum(self.sp.comm.received.values()) > sent) == (mode != LOCAL) or may_lack
        assert mine.keys() == before.keys()
        assert all(mine[name] is x for name, x in before.items())
        assert found.keys() | {"logits"} == expected.keys() | {"logits"}  # a loss in tiles makes no logits
        for name, x in found.items():
            assert isinstance(x, WholeTensor) == (mode in (WHOLE, CACHED) and x.dim() == 3), (mode, name)
            if (wanted := expected.get(name)) is not None:
                if mode == SHARDED:
                    wanted = self.sp.shard(wanted, 1, mine.get("placement")) if x.dim() else wanted
                    x = self.sp.mean_loss(x) if name == "loss" else x
                assert off(x, wanted) < self.exact, (mode, name)
        if "loss" in found:
            return found["loss"], expected["loss"]
        name = [*found][-1]  # of a shard, its part of the mean over all tokens
        scale = (self.sp.size if mode == SHARDED else 1) / expected[name].numel()
        return found[name].float().exp().sum() * scale, expected[name].float().exp().mean()

    def backward(self, *losses, gradients_of=averaged):
        """Compares the gradients of the sum of losses, averaged over ranks as a training loop does."""
        Twins.in_backward = True
        for loss in map(sum, zip(*losses, strict=True)):
            loss.backward()
        Twins.in_backward = False
        assert gap(gradients_of(self.model), gradients_of(self.plain)) < self.exact
        self.forget()

    def forget(self):
        self.model.zero_grad(), self.plain.zero_grad()

    def train(self):
        """A step of a forward of each mode."""
        self.backward(*map(self.forward, MODES))

    @contextlib.contextmanager
    def evaluating(self):
        before = self.model.training
        self.model.eval(), self.plain.eval()
        yield
        self.model.train(before), self.plain.train(before)

    def silent(self):
        """A context in which a forward draws no random numbers, and may have a cache."""
        return contextlib.nullcontext() if self.checkpoints is None else self.evaluating()


@dataclasses.dataclass
class Noisy(Twins):
    """A model with dropout. Forwards that are shared have noise of their own, so they are judged by one of a fresh
    model from the same seed, with nothing before its backward. The noise of sharded and whole batches is the same."""

    silent = Twins.evaluating

    def __post_init__(self):
        self.alone, losses = {}, []
        for mode in MODES:
            model = dropping() if mode == LOCAL else patch_attention(dropping(), self.sp)
            torch.manual_seed(4)
            loss = model(**self.given(mode)[1]).loss
            loss.backward()
            self.alone[mode] = self.sp.mean_loss(loss) if mode == SHARDED else loss.item(), gradients(model)
            losses.append(self.alone[mode][0])
        assert losses[1] == pytest.approx(losses[2], rel=1e-6)

    def forward(self, mode, how=of_batch, tokens=None, given=None):
        if not self.model.training or mode == CACHED:
            with self.evaluating():
                return super().forward(mode, how, tokens, given)
        torch.manual_seed(4)
        return super().forward(mode, how if how is without_gradients else of_batch)

    def expected(self, mode, how, given):
        if not self.model.training:
            return super().expected(mode, how, given)
        loss, its = self.alone[mode]
        linear = sum((p * torch.from_numpy(its[name])).sum() for name, p in self.plain.named_parameters())
        return {"loss": loss + linear - linear.detach()}  # with the gradients of the other model


class Classifier(Twins):
    """Takes no shards."""

    def given(self, mode, tokens=None):
        whole, _ = super().given(mode)
        return ({**whole, "labels": torch.tensor([0, 2])},) * 2

    def forward(self, mode, how=of_batch, tokens=None, given=None):
        if mode == SHARDED:
            shard = self.sp.shard_batch(batch())
            said = refusal(self.model, **{x: shard[x] for x in ("input_ids", "position_ids", "placement")})
            assert lacking(said, "InputError", "needs whole batches") == []
        return super().forward(mode, how if how is without_gradients else of_batch)


# --- settings


class Penalised(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **{**kwargs, "return_dict": True})
        if labels is not None:
            output.loss = output.loss + 0.1 * output.logits.float().logsumexp(-1).pow(2).mean()
        return output


def built(kind, seed=0, **changes):
    torch.manual_seed(seed)
    return kind(small(**changes).config)


def experts():
    return model_of("qwen3_moe", num_hidden_layers=1)


def dropping():
    return model_of("phi3", num_hidden_layers=1, resid_pdrop=0.3, attn_implementation="sdpa").train()


def dynamic():
    """RoPE whose frequencies follow the longest position."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return small(max_position_embeddings=10, rope_parameters=rope)


def beside(t, kind, made=Twins, **changes):
    """Twins of another head around the base models of t."""
    heads = [built(kind, 2, pad_token_id=0, num_labels=3).train() for _ in range(2)]
    for head, model in zip(heads, (t.plain, t.model), strict=True):
        head.model = model.model
    patch_attention(heads[1], t.sp)
    return made(t.sp, *heads, **changes)


def twins(build=small, checkpoints=None, sp=None, made=Twins, settings=None, **changes):
    plain, model = build().train(), build().train()
    sp = sp or make(size=2, **(settings or {}))
    patch_attention(model, sp)
    if checkpoints is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        model.enable_input_require_grads()  # torch's reentrant checkpoint has no gradients otherwise
    return made(sp, plain, model, checkpoints=checkpoints, **changes)


OWN = {"build": functools.partial(built, Penalised), "modes": (LOCAL, WHOLE, CACHED)}
CLASSIFIER = functools.partial(built, LlamaForSequenceClassification, 2, num_labels=3, pad_token_id=0)
# name -> the arguments of `twins`; "beside": makes other twins, which are asked in turn with these
SETTINGS = {
    "plain": {},
    "contiguous": {"settings": {"layout": "contiguous"}},
    "checkpoints": {"checkpoints": False},
    "reentrant checkpoints": {"checkpoints": True},
    "tiles": {"build": llama, "settings": TILES},
    "tiles, checkpoints": {"checkpoints": False, "settings": TILES},
    "tiles, reentrant checkpoints": {"checkpoints": True, "settings": TILES},
    "chunks of heads": {"build": llama, "settings": CHUNKS},
    "autocast": {"autocast": True, "exact": 0.05},
    "autocast, checkpoints": {"autocast": True, "exact": 0.05, "checkpoints": False},
    "experts, checkpoints": {"build": experts, "checkpoints": False},
    "adapters": {"build": lambda: with_lora(small(), "q_proj", "v_proj")},
    "dynamic RoPE": {"build": dynamic},
    "a forward of a user's own": OWN,
    "dropout": {"build": dropping, "made": Noisy, "exact": 1e-6},
    "dropout, checkpoints": {"build": dropping, "made": Noisy, "exact": 1e-6, "checkpoints": False},
    "dropout, reentrant checkpoints": {"build": dropping, "made": Noisy, "exact": 1e-6, "checkpoints": True},
    "two models of one sp": {
        "checkpoints": False,
        "beside": lambda t: twins(functools.partial(small, seed=1), sp=t.sp),
    },
    "two causal heads of one base model": {"beside": lambda t: beside(t, LlamaForCausalLM)},
    "a classifier": {"build": CLASSIFIER, "made": Classifier, "modes": (LOCAL, WHOLE)},
    "a causal head and a classifier of one base model": {
        "beside": lambda t: beside(t, LlamaForSequenceClassification, Classifier, modes=(LOCAL, WHOLE))
    },
}
NOISY = [name for name in SETTINGS if "dropout" in name]
CLASSES = [name for name in SETTINGS if "classifier" in name]
SHARED_BASE = [name for name in SETTINGS if "of one base" in name]
TILED = [name for name, its in SETTINGS.items() if "settings" in its]
CHECKPOINTED = [name for name, its in SETTINGS.items() if "checkpoints" in its and "beside" not in its]


# --- events


@dataclasses.dataclass
class Run:
    """Twins, and the losses whose backward is still to come."""

    pairs: list
    other: Twins  # whose forwards are inside of those of others
    t: Any = None
    waiting: list = dataclasses.field(default_factory=list)

    def keep(self, *losses, of=None):
        self.waiting += [(of or self.t, loss) for loss in losses if loss[0].requires_grad]

    def backward(self, in_turn=False):
        """in_turn: the last forward's first, and each by itself."""
        if in_turn:
            for t, loss in reversed(self.waiting):
                t.backward(loss)
        for t in () if in_turn else (*self.pairs, self.other):
            if its := [loss for owner, loss in self.waiting if owner is t]:
                t.backward(*its)
        self.waiting.clear()


@dataclasses.dataclass(frozen=True)
class Event:
    function: Callable
    arguments: tuple
    without: tuple  # settings in which it cannot happen

    def __str__(self):
        return " ".join([self.function.__name__, *map(str, self.arguments)])


EVENTS = []


def event(*arguments, without=(), only=tuple(SETTINGS)):
    """Registers a function as events, one for each of these tuples of arguments."""

    def register(function):
        missing = (*without, *(name for name in SETTINGS if name not in only))
        EVENTS.extend(Event(function, its, missing) for its in arguments or [()])
        return function

    return register


def but_inside(function):
    """A hook that calls a function, but for forwards inside of it."""
    running = []

    def hook(*_):
        if not running:
            running.append(True)
            function()
            running.clear()

    return hook


def on(module, function):
    return module.register_forward_pre_hook(but_inside(function))


@event(*itertools.product(MODES, [how for how in HOWS if "last" not in how and "tuple" not in how]))
@event(*((mode, "of a tuple") for mode in MODES), without=["experts, checkpoints"])
@event((LOCAL, "of the last logits"), (WHOLE, "of the last logits"), (LOCAL, "of a batch", 24))
@event(*((mode, how, 13) for mode in MODES for how in ("of a batch", "without labels")))
@event((WHOLE, "with positions of a user's own", 8))  # on one rank these fit a shard and whole sequences
def forward(run, mode, how, tokens=None):
    run.keep(run.t.forward(mode, HOWS[how], tokens))


@event((LOCAL, False), (WHOLE, False), (WHOLE, True), without=NOISY)
def forward_in_a_function_that_torch_checkpoints(run, mode, reentrant):
    def how(model, given):
        def function(x):
            with within(run.t.model, mode):
                return model(inputs_embeds=x, labels=given["labels"]).loss

        embeddings = model.get_input_embeddings()(given["input_ids"])
        return {"loss": checkpoint(function, embeddings, use_reentrant=reentrant)}

    run.keep(run.t.forward(mode, how))


@event(*itertools.product((*MODES, CACHED), (False, True)))
def forward_without_gradients(run, mode, in_training):
    with contextlib.nullcontext() if in_training else run.t.evaluating():
        run.t.forward(mode, without_gradients)


@event(without=CLASSES)
def generate(run):
    t, ids, how = run.t, batch()["input_ids"], {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with t.evaluating():
        found, expected = (model.generate(ids, **how) for model in (t.model, t.plain))
        assert torch.equal(found, expected)
        if t.sp.rank == 1:
            with whole_sequences(t.model):
                assert torch.equal(t.model.generate(ids, **how), expected)


@event(without=CLASSES)
def shard_by_hand(run):
    t, ids = run.t, batch()["input_ids"]
    given = {"position_ids": t.sp.position_ids(16, EQUAL)[None], "placement": EQUAL}
    for now in (t.silent, t.evaluating):
        with now():
            found = t.model(input_ids=t.sp.shard(ids, 1, EQUAL), **given).logits
            assert not isinstance(found, WholeTensor)
            assert off(found, t.sp.shard(t.plain(ids).logits, 1, EQUAL)) < t.exact


@event(only=["contiguous"])
def tensors_of_a_shard_in_a_local_forward(run):
    _, shard = run.t.given(SHARDED)
    given = {name: shard[name] for name in ("input_ids", "labels", "position_ids")}
    run.keep(run.t.forward(SHARDED), run.t.forward(LOCAL, given=given), run.t.forward(SHARDED))


def continued(model, ids, keyword, base):
    """Logits, or hidden states, of tokens behind a cache."""
    model = model.base_model if base else model
    first = model(ids[:, :6], use_cache=True).past_key_values
    second = (ids[:, 6:], None, None, first)
    output = model(ids[:, 6:], past_key_values=first) if keyword else model(*second)
    return output[0]


@event((True, False), (False, False), (False, True), without=(*CLASSES, "adapters"))
def forward_behind_a_cache(run, keyword, base):
    t, mine = run.t, run.t.given(LOCAL)[0]["input_ids"]
    with torch.no_grad(), t.silent():
        ids = batch()["input_ids"]
        assert off(*(continued(model, ids, keyword, base) for model in (t.model, t.plain))) < t.exact
        if t.sp.rank == 1:
            with whole_sequences(t.model):
                assert off(*(continued(model, mine, keyword, base) for model in (t.model, t.plain))) == 0


@event(without=(*CLASSES, "adapters", "a forward of a user's own"))
def use_cache_by_position(run):
    t = run.t
    with torch.no_grad(), t.silent():
        ids = batch()["input_ids"]
        found, expected = (model(ids, None, None, None, None, None, True) for model in (t.model, t.plain))
    assert found.past_key_values is not None
    assert off(found.logits, expected.logits) < t.exact


@event(without=CLASSES)
def cache_in_training(run):
    for given in run.t.given(SHARDED):
        assert lacking(refusal(run.t.model, **given, use_cache=True), "InputError", "no kv cache") == []


@event((True,), (False,))
def refused_forward(run, other_batches):
    t = run.t
    wrong = batch(seed=t.sp.rank) if other_batches else {**batch(), "position_ids": torch.arange(5, 21)[None]}
    assert refusal(t.model, **wrong)[0] is not None


# --- errors in a forward


class Interruption(BaseException):
    pass


def fail(error):
    def hook(*_):
        raise error

    return hook


def in_layer(model, hook):
    return stack(model).layers[0].mlp.register_forward_pre_hook(hook)


PLACES = {
    "a layer": in_layer,
    "the embeddings": lambda model, hook: model.get_input_embeddings().register_forward_hook(hook),
    "a pre-hook before ours": lambda model, hook: model.register_forward_pre_hook(hook, prepend=True),
    "a pre-hook after ours": lambda model, hook: model.register_forward_pre_hook(hook),
    "a pre-hook of the base model": lambda model, hook: stack(model).register_forward_pre_hook(hook),
    "a forward hook before ours": lambda model, hook: model.register_forward_hook(hook, prepend=True),
    "a forward hook after ours": lambda model, hook: model.register_forward_hook(hook),
    "a forward hook of the base model": lambda model, hook: stack(model).register_forward_hook(hook),
}


@event(*itertools.product(MODES, PLACES), *((mode, "a layer", Interruption) for mode in MODES))
def error(run, mode, place, kind=KeyError):
    """In both models, since RoPE may remember a forward's length. The next two forwards are of other modes."""
    mode = mode if mode in run.t.modes else WHOLE
    for model, given in zip((run.t.plain, run.t.model), run.t.given(mode), strict=True):
        handle = PLACES[place](model, fail(kind()))
        with pytest.raises(kind), within(run.t.model, mode):
            model(**given)
        handle.remove()
    set_current(None)  # torch calls no hooks after what is no Exception
    run.keep(*(run.t.forward(other) for other in MODES if other != mode))


@event(*((mode,) for mode in MODES), only=CHECKPOINTED)
def error_when_a_checkpoint_computes_a_layer_again(run, mode):
    run.backward()
    loss = run.t.forward(mode)[0]
    handle = in_layer(run.t.model, fail(KeyError()))
    with pytest.raises(KeyError):
        loss.backward()
    handle.remove()
    run.t.forget()
    run.keep(*(run.t.forward(other) for other in MODES if other != mode))


@event(*((kind,) for kind in (False, True)))
def whole_sequences_around_backward(run, by_error):
    """Nested, and left by an exception."""
    if by_error:
        with pytest.raises(KeyError), whole_sequences(run.t.model), whole_sequences(run.t.model):
            raise KeyError
    with whole_sequences(run.t.model), whole_sequences(run.t.model):
        run.backward()
    with whole_sequences(run.t.model):
        run.keep(run.t.forward(LOCAL), run.t.forward(LOCAL))  # the inner one of the first has ended


@event()
def shared_forwards_in_whole_sequences_of_another_model(run):
    with whole_sequences(run.other.model):
        run.keep(run.t.forward(SHARDED), run.t.forward(WHOLE))


# --- forwards inside others


@event(*((*pair, where) for pair in itertools.permutations((*MODES, CACHED), 2) for where in ("another", "the same")))
def forward_inside(run, outer, inner, where):
    """Of another model, or of the same: before attention, or between attention's dropout and the MLP's."""
    if (outer, where) == (LOCAL, "the same"):  # in whose whole_sequences all are local
        return
    run.backward()
    t, other = run.t, run.other if where == "another" else run.t
    how = of_batch if t.checkpoints is None else without_gradients  # they would save the inner forward's tensors

    def call():
        with other.evaluating() if isinstance(other, Noisy) else contextlib.nullcontext():
            run.keep(other.forward(inner, how), of=other)

    layer = stack(t.model).layers[0]
    handle = on(layer.mlp if isinstance(t, Noisy) else layer.self_attn, call)
    run.keep(t.forward(outer))
    if t.checkpoints is not None:
        run.backward()  # which calls it again
    handle.remove()


@event((SHARDED,), (WHOLE,), without=(*NOISY, *CLASSES))
def local_forward_inside_before_rope(run, mode):
    """In both models, since RoPE may remember the longest of them."""
    losses, handles = [], []

    def again(model):
        with whole_sequences(run.t.model):
            losses.append(model(**batch(5, 12)).loss)

    for model in (run.t.plain, run.t.model):
        handles.append(on(model.get_input_embeddings(), functools.partial(again, model)))
    loss = run.t.forward(mode)
    for handle in handles:
        handle.remove()
    run.keep(loss, losses[::-1])


@event((SHARDED,), (WHOLE,))
def forwards_in_the_models_own_hook(run, mode):
    hook = but_inside(lambda: run.keep(*map(run.t.forward, MODES)))
    handle = run.t.model.register_forward_hook(hook, prepend=mode == WHOLE)
    run.keep(run.t.forward(mode))
    handle.remove()


@event(*itertools.product((SHARDED, WHOLE), (False, True)), without=TILED)
def local_forward_inside_a_layer(run, mode, in_thread):
    """Which a checkpoint computes again with it."""
    run.backward()
    t, other, calls = run.t, run.other if isinstance(run.t, Noisy) else run.t, []

    def call():
        function = functools.partial(other.forward, LOCAL, without_gradients)
        calls.append(in_threads(function) if in_thread else function())

    handle = on(stack(t.model).layers[0].mlp, call)
    loss = t.forward(mode)
    assert len(calls) == 1
    t.backward(loss)
    assert len(calls) == 1 + (t.checkpoints is not None)
    handle.remove()


# --- copies, patches, parts


@event(without=SHARED_BASE)
def copied(run):
    t = run.t
    run.keep(*map(t.forward, MODES))
    with whole_sequences(t.model):
        twin = dataclasses.replace(t, plain=copy.deepcopy(t.plain), model=copy.deepcopy(t.model))
    losses = [*map(twin.forward, MODES)]
    run.backward()
    twin.backward(*losses)


@event(only=["checkpoints", "tiles, checkpoints", "autocast, checkpoints", "dropout, checkpoints"])
def patched_again(run):
    run.backward()
    t = run.t
    losses = {mode: t.forward(mode) for mode in MODES}
    patch_attention(unpatch_attention(t.model), t.sp)
    t.backward(losses[LOCAL])
    for mode in (SHARDED, WHOLE):
        assert lacking(refusal(losses[mode][0].backward), "ConfigError", "unpatch_attention after backward") == []
    t.forget()


@event()
def rope_by_itself(run):
    """With few enough positions for RoPE that is not scaled."""
    x, positions = torch.zeros(1, 6, 64), torch.arange(6)[None]
    found, expected = (stack(model).rotary_emb(x, positions) for model in (run.t.model, run.t.plain))
    assert all(off(*pair) < run.t.exact for pair in zip(found, expected, strict=True))


@event()
def layer_by_itself(run):
    x, positions = torch.ones(1, 8, 64), torch.arange(8)[None]
    _, around = (stack(model).rotary_emb(x, positions) for model in (run.t.plain, run.t.model))
    said = refusal(stack(run.t.model).layers[0], x, position_embeddings=around)
    assert lacking(said, "InputError", "past its model's forward") == []


# --- threads


def in_threads(*functions):
    """What functions return that run at once, each in a thread; raises what one of them raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result() for each in [pool.submit(function) for function in functions]]


@event()
def local_step_in_a_thread_of_one_rank(run):
    run.backward()
    if run.t.sp.rank == 1:
        in_threads(lambda: run.t.backward(run.t.forward(LOCAL), gradients_of=gradients))


@event(without=NOISY)
def local_forwards_in_threads(run):
    """One in whole_sequences of the main thread. Two at once, each in a whole_sequences of its own: the first one ends
    while the second one's forward is still to come."""
    t, given = run.t, run.t.given(LOCAL)[0]
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
    with whole_sequences(t.model):
        found = in_threads(lambda: t.model(**given).loss)
    for loss in (*found, *in_threads(first, second)):
        assert off(loss, expected) < t.exact


@event(without=CLASSES)
def local_forwards_with_a_cache_in_two_threads_at_once(run):
    t, both, batches = run.t, threading.Barrier(2, timeout=20), [batch(seed, 9 + seed) for seed in (1, 2)]
    with t.evaluating():
        expected = [prefilled(t.plain, given).logits for given in batches]
        handle = in_layer(t.model, lambda *_: (both.wait(), None)[1])
        with whole_sequences(t.model):
            found = in_threads(*[lambda given=given: prefilled(t.model, given).logits for given in batches])
        handle.remove()
    assert all(off(*pair) < t.exact for pair in zip(found, expected, strict=True))


@event((SHARDED,), (WHOLE,), without=CLASSES)
def shared_forward_in_a_thread_of_one_rank(run, mode):
    given = run.t.given(mode)[1]
    if run.t.sp.rank == 1:
        (said,) = in_threads(lambda: refusal(run.t.model, **given))
        assert lacking(said, "ConfigError", "in one thread", "sp.bind_to_thread()") == []


@event()
def step_in_a_thread_that_is_bound(run):
    run.backward()
    in_threads(lambda: (run.t.sp.bind_to_thread(), run.t.train()))
    run.t.sp.bind_to_thread()


def happening(setting, seed):
    """The events of a setting in their order. With each seed an event is dealt to one setting; with 0 half of them."""
    draw = random.Random(seed)
    dealt = [(each, draw.choice([name for name in SETTINGS if name not in each.without])) for each in EVENTS]
    mine = [each for each, name in dealt if name == setting and (seed or draw.random() < 0.5)]
    draw.shuffle(mine)
    return mine


@pytest.mark.parametrize("seed", each_then_rest([0], range(1, 6)))
@pytest.mark.parametrize("setting", SETTINGS)
@on_each_of(2, timeout=120)
def test_outputs_and_gradients_are_those_of_the_mode(setting, seed):
    given = dict(SETTINGS[setting])
    also, first = given.pop("beside", None), twins(**given)
    run, draw, before = Run([first, *([also(first)] if also else [])], twins(sp=first.sp)), random.Random(seed), []
    if setting == "dynamic RoPE":
        first.forward(WHOLE)  # ranks compare frequencies once, before they may differ
    for number, each in enumerate(happening(setting, seed)):
        before.append(str(each))
        run.t = run.pairs[number % len(run.pairs)]
        try:
            each.function(run, *each.arguments)
            if draw.random() < 0.4:
                run.backward(in_turn=draw.random() < 0.5)
        except BaseException as error:
            error.add_note(f"events: {before}")
            raise
    run.backward()


@on_each_of(2)
def test_local_attention_in_a_thread_while_another_thread_is_inside_of_it():
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
        t.forward(LOCAL, without_gradients)
    finally:
        modeling_llama.eager_attention_forward = eager
    assert seen[0] == "eager"
    assert seen[1]._attn_implementation == "ds_seqpar"
    assert attention.config is seen[1] is t.model.config
    t.train()


@on_each_of(2)
def test_one_rank_a_sequence_has_batches_of_shard_batches_between_local_ones():
    t = twins(checkpoints=False, sp=make(size=1, **TILES))
    shard, losses = t.sp.shard_batch(batch()), []
    for given in (shard, batch(), shard):
        losses += [(t.model(**given).loss, t.plain(**batch()).loss), t.forward(LOCAL)]
    assert all(off(*pair) < t.exact for pair in losses)
    t.backward(*losses)

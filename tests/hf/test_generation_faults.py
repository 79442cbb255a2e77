"""What cannot be generated together is a sentence on all ranks, and a rank that ends or fails ends the others."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache, LogitsProcessor, StaticCache

from hf_integration import patch_attention, unpatch_attention, whole_sequences
from tests.dist.ranks import SECONDS, differ, everywhere, is_one_sentence, lacking, make, only_one, refusal
from tests.grids import each_then_rest
from tests.hf.generation import build
from tests.launch import on_engine_ranks, on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
IDS = torch.arange(3, 43).view(2, 20)
NEXT = torch.tensor([[5], [6]])
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
ALONE = "hf_integration.whole_sequences(model)"


class Raised(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + 1


def filled(model, ids=IDS, mask=None):
    return model(ids, attention_mask=mask, use_cache=True).past_key_values


def filled_alone(model):
    with whole_sequences(model):
        return filled(model)


def step(model, cache, ids=NEXT, **more):
    return model(ids, past_key_values=cache, use_cache=True, **more)


def with_mask(model, changed):
    """A step after a prompt with padding, whose mask has changed."""
    return step(model, filled(model, mask=MASK), attention_mask=torch.cat([changed, torch.ones(2, 1).long()], 1))


def older(model, rank):
    cache = filled(model)
    before = copy.deepcopy(cache)
    step(model, cache)
    step(model, before if rank else cache)


def in_another_order(model, rank):
    cache = filled(model)
    if rank:
        cache.reorder_cache(torch.tensor([1, 0]))
    step(model, cache)


def after_a_failure(model):
    cache = filled(model)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, cache)
    handle.remove()
    step(model, cache)


def of_another_model(model, sp):
    step(model, filled(patch_attention(build("mistral"), sp)))


def in_whole_sequences(model):
    cache = filled(model)
    with whole_sequences(model):
        step(model, cache)


def after_unpatching(model, sp):
    cache = filled(model)
    unpatch_attention(model)
    try:
        step(model, cache)
    finally:
        patch_attention(model, sp)


def cropped(model):
    filled(model).crop(-1)


def moved():
    """MASK with as much padding elsewhere."""
    return torch.cat([MASK[:, 3:], MASK[:, :3]], 1)


STATIC = {"max_cache_len": 40}
# name -> (call(model, sp, rank), what ranks are told)
GENERATE = {
    "other prompts": (lambda m, sp, rank: m.generate(IDS + rank, max_new_tokens=2), differ("other prompts", ALONE)),
    "a shorter prompt": (lambda m, sp, rank: m.generate(IDS[:, rank:], max_new_tokens=2), differ("(2, 19)")),
    "fewer rows": (lambda m, sp, rank: m.generate(IDS[rank:], max_new_tokens=2), differ("(1, 20)")),
    "another temperature": (
        lambda m, sp, rank: m.generate(IDS, do_sample=True, temperature=1.0 + rank, max_new_tokens=2),
        differ("temperature 2.0"),
    ),
    "other sampling": (lambda m, sp, rank: m.generate(IDS, do_sample=bool(rank)), differ("do_sample True")),
    "more new tokens": (lambda m, sp, rank: m.generate(IDS, max_new_tokens=2 + rank), differ("max_new_tokens 3")),
    "a processor on one rank": (
        lambda m, sp, rank: m.generate(IDS, max_new_tokens=2, logits_processor=[Raised()] * rank),
        differ("'Raised'"),
    ),
    "a forward on one rank": (
        lambda m, sp, rank: filled(m) if rank else m.generate(IDS, max_new_tokens=2),
        differ("calls", "whole batch"),
    ),
}
FORWARDS = {
    "other prompts": (lambda m, sp, rank: filled(m, IDS + rank), differ("input_ids")),
    "other positions": (
        lambda m, sp, rank: m(IDS, position_ids=torch.arange(20)[None] + rank, use_cache=True),
        differ("position_ids"),
    ),
    "a cache on one rank": (lambda m, sp, rank: m(IDS, use_cache=bool(rank)), differ("use_cache True")),
    "another token": (lambda m, sp, rank: step(m, filled(m), NEXT + rank), differ("decode step", "input_ids")),
    "another position": (
        lambda m, sp, rank: step(m, filled(m), position_ids=torch.full((2, 1), 20 + rank)),
        differ("position_ids"),
    ),
    "more tokens": (lambda m, sp, rank: step(m, filled(m), NEXT.repeat(1, 1 + rank)), differ("decode step")),
    "other logits": (
        lambda m, sp, rank: step(m, filled(m), NEXT.repeat(1, 4), logits_to_keep=1 + rank),
        differ("logits_to_keep 2"),
    ),
    "an older cache": (lambda m, sp, rank: older(m, rank), differ("cache 'of 2 rows of 20 tokens'")),
    "a cache in another order": (lambda m, sp, rank: in_another_order(m, rank), differ("order")),
    "a new cache on one rank": (
        lambda m, sp, rank: step(m, (filled(m), DynamicCache())[rank]),
        differ("cache 'empty'"),
    ),
    "a cache that one rank filled": (
        lambda m, sp, rank: step(m, (filled(m), filled_alone(m))[rank]),
        only_one("20 tokens that this rank filled by itself", ALONE),
    ),
    "a cache that each rank filled": (
        lambda m, sp, rank: step(m, filled_alone(m)),
        everywhere("20 tokens that this rank filled by itself", ALONE),
    ),
    "a static cache": (
        lambda m, sp, rank: step(m, StaticCache(config=m.config, **STATIC), IDS),
        everywhere("needs a DynamicCache", "StaticCache"),
    ),
    "a static cache on one rank": (
        lambda m, sp, rank: step(m, (DynamicCache(), StaticCache(config=m.config, **STATIC))[rank], IDS),
        only_one("needs a DynamicCache", "StaticCache"),
    ),
    "another model's cache": (lambda m, sp, rank: of_another_model(m, sp), everywhere("of another model")),
    "another number of rows": (
        lambda m, sp, rank: step(m, filled(m), NEXT.repeat(2, 1)),
        everywhere("got 4", "of 2 rows of 20 tokens"),
    ),
    "a forward that failed": (lambda m, sp, rank: after_a_failure(m), everywhere("one that failed")),
    "a step by itself": (lambda m, sp, rank: in_whole_sequences(m), everywhere("a forward of a rank by itself")),
    "a step unpatched": (lambda m, sp, rank: after_unpatching(m, sp), everywhere("a forward of a rank by itself")),
    "no mask after padding": (lambda m, sp, rank: step(m, filled(m, mask=MASK)), everywhere("(2, 21)", "NoneType")),
    "other padding": (lambda m, sp, rank: with_mask(m, moved()), everywhere("begins as before")),
    "labels with padding": (
        lambda m, sp, rank: m(IDS, attention_mask=MASK, labels=IDS, use_cache=True),
        everywhere("takes no labels"),
    ),
    "fewer tokens": (lambda m, sp, rank: cropped(m), everywhere("loses no tokens", kind="ConfigError")),
}


TABLES = {"generate": GENERATE, "forward": FORWARDS}


@torch.no_grad()
def told(name):
    """On a rank: {name: what was raised} of calls that are refused otherwise than a table says; and whether a
    generation gives the same after them as before."""
    sp = make(size=dist.get_world_size(), ulysses=1)
    model, wrong = patch_attention(build("llama"), sp), {}
    expected = model.generate(IDS, max_new_tokens=3)
    for case, (call, words) in TABLES[name].items():
        refused = refusal(call, model, sp, sp.rank)
        if lacking(refused, *words.get(sp.rank, words["others"])):
            wrong[case] = refused
    return wrong, model.generate(IDS, max_new_tokens=3).equal(expected)


@pytest.mark.parametrize("name", TABLES)
def test_what_ranks_cannot_do_together_is_a_sentence(name):
    assert on_engine_ranks(2, told, name) == [({}, True)] * 2


@torch.no_grad()
def padded_within(family, window):
    """A prompt with padding between tokens of a row."""
    sp, mask = make(size=2, ulysses=1), MASK.clone()
    mask[1, 5:8] = 0
    filled(patch_attention(build(family, window), sp), mask=mask)


def test_padding_between_tokens_is_refused_where_a_window_would_count_it():
    for refused in on_engine_ranks(2, refusal, padded_within, "mistral", 8):
        assert lacking(refused, "InputError", "windows or chunks of 8 tokens", "padding between") == []


GONE, CALLS = 1, {"prompt": 1, "step": 3}  # the rank that ends or fails, in which of a layer's calls


@torch.no_grad()
def interrupted(call, end):
    """Generate; one rank ends or has no memory in a layer."""
    model, calls = patch_attention(build("llama"), make(size=dist.get_world_size(), ulysses=1)), []

    def hook(*_):
        calls.append(None)
        if dist.get_rank() == GONE and len(calls) == call:
            end()

    model.model.layers[1].register_forward_pre_hook(hook)
    model.generate(IDS, max_new_tokens=5)


def ended():
    os._exit(1)


def without_memory():
    raise torch.OutOfMemoryError("no memory")


ENDS = {"step": ended, "prompt": without_memory, "step, memory": without_memory, "prompt, killed": ended}


@pytest.mark.parametrize("case", each_then_rest([*ENDS][:2], [*ENDS][2:]))
def test_a_rank_that_ends_or_has_no_memory_ends_the_others(case):
    place = case.partition(",")[0]
    outcomes = on_ranks(3, interrupted, CALLS[place], ENDS[case], timeout=SECONDS, check=False)
    kind, message, _ = outcomes.pop(GONE)
    assert (kind, message) in [("Died", "exit code 1"), ("OutOfMemoryError", "no memory")]
    for kind, message, _ in outcomes:
        assert kind == "CommunicationError"
        assert missing(message, "another rank ended or gave up", "decode step" if place == "step" else "") == []
        assert is_one_sentence(message)

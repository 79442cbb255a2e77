"""Prompts on several ranks: cached forwards and `generate` of every family are those of the plain model on one."""

import copy
import itertools

import pytest
import torch

from hf_integration import patch_attention
from tests import oracle
from tests.dist.ranks import make
from tests.grids import cover, few_then_rest
from tests.hf.generation import FAMILIES, SECTIONS, Case, build, compared, has_windows, prompts, whole
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
FORWARDS, GENERATED = 1e-5, 1e-6  # limits for logits: in fp32, and in fp64, which `generate` returns in fp32
TURNS = (1, 2, 5, 37, 1)  # tokens of further forwards on a kept cache
PROMPTS = {"one": (1,), "seven": (7,), "long": (70,), "ragged": (1, 29, 12)}
WINDOWS = (5, 20, 29, 200)  # shorter than prompts and turns, between them, as long as a prompt, longer than all


def assert_exact(world, cases):
    for found in on_ranks(world, compared, cases, timeout=600):
        assert found.keys() == {*cases}
        wrong = {case: error for case, error in found.items() if not is_exact(case, error)}
        assert wrong == {}


def is_exact(case, error):
    return isinstance(error, float) and error < (GENERATED if case.new else FORWARDS)


def forwards(world):
    """Cases that meet every pair of a family, a way to share sequences, a prompt and a window."""
    axes = {"family": [*FAMILIES], "section": [*SECTIONS[world]], "window": [*WINDOWS], "lengths": [*PROMPTS.values()]}
    points = cover(lambda point: point["window"] == WINDOWS[0] or has_windows(point["family"]), **axes)
    return [Case(**point, turns=TURNS, positions=index % 2 == 1) for index, point in enumerate(points)]


def tokens(world):
    """Cases in which families generate from each prompt, on 2 or on 4 ranks, 200 tokens from one of their prompts."""
    sections, found = itertools.cycle(SECTIONS[world]), []
    for number, family in enumerate(FAMILIES):
        for index, lengths in enumerate(PROMPTS.values()):
            if (number + index) % 2 == (world == 4):
                shape = {"window": WINDOWS[index % 3], "lengths": lengths, "sample": (number + index) % 3 == 0}
                new = 200 if index == number // 2 % 4 else 16
                found.append(Case(family=family, section=next(sections), new=new, **shape))
    return found


# once each: positions by the mask, sinks with windows, chunks, other sizes of values, another layer's keys
FEW = ("opt", "gpt_oss", "llama4_text", "deepseek_v3", "gemma4_text")
REST = tuple(family for family in FAMILIES if family not in FEW)


@pytest.mark.parametrize("families", few_then_rest(FEW, REST))
def test_families_on_two_ranks(families):
    sections, shape = itertools.cycle(SECTIONS[2]), {"window": 5, "lengths": (13, 4), "turns": (6, 1)}
    assert_exact(2, [Case(family=family, section=next(sections), **shape) for family in families])


@pytest.mark.parametrize("cases", few_then_rest([("gpt_oss", (30, 8))], [("llama", (3, 11)), ("gemma2", (9,))]))
def test_conversations(cases):
    turns = {"turns": (5, 2, 37), "new": 16, "window": 20}
    assert_exact(2, [Case(family=family, section="u2", lengths=x, sample=True, **turns) for family, x in cases])


@pytest.mark.slow
def test_nothing_changes_on_one_rank():
    assert_exact(1, [Case(family=family, section="alone", lengths=(9, 30), turns=(5, 1), new=8) for family in FAMILIES])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_families_by_schedules_and_windows(world):
    assert_exact(world, forwards(world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_of_every_family(world):
    assert_exact(world, tokens(world))


LONG = 4096


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_after_a_long_prompt(world):
    sections = itertools.cycle(SECTIONS[world])
    cases = [
        Case(family=family, section=next(sections), window=300, lengths=(LONG,), new=12, chunk=500 + 300 * (at % 2))
        for at, family in enumerate(FAMILIES)
        if at % 2 == (world == 4)
    ]
    assert_exact(world, cases)


def reordered(cache):
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    return [2, 0, 0]


def selected(cache):
    cache.batch_select_indices(torch.tensor([2, 1]))
    return [2, 1]


def selected_by_mask(cache):
    """A mask that does not fit leaves the cache alone."""
    with pytest.raises(IndexError):
        cache.batch_select_indices(torch.tensor([True, False]))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    return [0, 2]


def selected_by_list(cache):
    cache.batch_select_indices([-1, 1])
    return [2, 1]


def repeated(cache):
    cache.batch_repeat_interleave(2)
    return [0, 0, 1, 1, 2, 2]


def copied(cache):
    """A copy's use leaves the cache alone."""
    copy.deepcopy(cache).reorder_cache(torch.tensor([1, 1, 1]))
    return [0, 1, 2]


CHANGES = (reordered, selected, selected_by_mask, selected_by_list, repeated, copied)


def other_rows(model, lengths, change):
    """Logits of a turn and of two steps after a cache's rows have changed."""
    case = Case(family="", lengths=lengths, turns=(1, 5, 1, 1))
    ids, mask = prompts(case)
    begin, end = case.prompt, case.prompt + 1
    cache = model(ids[:, :begin], attention_mask=mask[:, :begin], use_cache=True).past_key_values
    model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
    rows, logits = change(cache), []
    for count in case.turns[1:]:
        begin, end = end, end + count
        given = {"input_ids": ids[rows, begin:end], "attention_mask": mask[rows, :end]}
        logits.append(whole(model(**given, past_key_values=cache, use_cache=True).logits))
    return torch.cat(logits, 1)


def padded_between(model):
    """Logits of two turns of rows that are padded on their left in both."""
    ids, mask = prompts(Case(family="", lengths=(20, 14, 9), turns=(14, 1)))
    mask[1, 20:31], mask[2, 20:23] = 0, 0
    cache, logits = None, []
    for begin, end in ((0, 20), (20, 34), (34, 35)):
        output = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(whole(output.logits))
    return torch.cat(logits, 1) * mask[..., None]


def last_states(model):
    """The last hidden states of the base model."""
    ids, _ = prompts(Case(family="", lengths=(33,)))
    first = model.base_model(ids[:, :30], use_cache=True)
    second = model.base_model(ids[:, 30:], past_key_values=first.past_key_values)
    return torch.cat([whole(first.last_hidden_state), whole(second.last_hidden_state)], 1)


def last_logits(model):
    """The last logits of rows of which some have padding there."""
    ids, mask = prompts(Case(family="", lengths=(3, 33)))
    mask[1, 31:] = 0
    return whole(model(ids, attention_mask=mask, use_cache=True, logits_to_keep=4).logits) * mask[:, -4:, None]


def begun_in_inference_mode(model):
    """Logits of further tokens on a cache that was copied in inference mode."""
    ids, _ = prompts(Case(family="", lengths=(20, 20), turns=(2, 1)))
    with torch.inference_mode():
        cache = copy.deepcopy(model(ids[:, :20], use_cache=True).past_key_values)
    return torch.cat([whole(model(x, past_key_values=cache).logits) for x in ids[:, 20:].split((2, 1), 1)], 1)


RAGGED, EQUAL = (20, 3, 11), (20, 20, 20)
USES = {
    **{
        f"{change.__name__} rows of {lengths}": (other_rows, lengths, change)
        for lengths in (RAGGED, EQUAL)
        for change in CHANGES
    },
    "the base model": (last_states,),
    "logits_to_keep": (last_logits,),
    "padding between tokens": (padded_between,),
    "inference mode": (begun_in_inference_mode,),
}
OFTEN = [
    ("gemma2", use)
    for use, (function, *args) in USES.items()
    if RAGGED in args or function in (last_logits, begun_in_inference_mode)
]
SELDOM = [
    (family, use)
    for family in ("gemma2", "llama", "opt")
    for use in USES
    if (family, use) not in OFTEN and (use != "padding between tokens" or not has_windows(family))
]


@torch.no_grad()
def used(uses):
    """On a rank: {(family, use): the error}."""
    sp, found, twins = make(size=2, ulysses=1, prove="never"), {}, {}
    for family, name in uses:
        if family not in twins:
            twins[family] = build(family), patch_attention(build(family), sp)
        function, *args = USES[name]
        expected, logits = (function(model, *args) for model in twins[family])
        found[family, name] = oracle.error(logits, expected)
    return found


@pytest.mark.parametrize("uses", few_then_rest(OFTEN, SELDOM))
def test_uses_of_a_cache(uses):
    for found in on_ranks(2, used, uses):
        assert found.keys() == {*uses}
        assert {use: error for use, error in found.items() if not error < FORWARDS} == {}

"""What `generate` cannot share is refused on all ranks, before anything is sent; and a rank may generate alone."""

import contextlib
import copy
import functools
import io
import os
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ds_seqpar.base.errors import InputError
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.guards import waits
from hf_integration import patch_attention, unpatch_attention, whole_sequences
from hf_integration.generation import generate
from tests.dist.ranks import WRONG, differ, everywhere, lacking, make, only_one, refusal
from tests.hf.generation import build
from tests.hf.llama import MODES, small
from tests.launch import on_each_of, on_ranks
from tests.words import missing

IDS = torch.arange(24).view(2, 12)
NEW = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def asks(wrong=None, **given):
    """Every rank generates with what is given; the wrong rank with what is wrong too."""
    return lambda model, rank: model.generate(IDS, **{**NEW, **given, **((rank == WRONG and wrong) or {})})


def warmers(temperature):
    return LogitsProcessorList([TemperatureLogitsWarper(temperature)])


ALL_TOLD, ONE_TOLD = (functools.partial(told, kind="ConfigError") for told in (everywhere, only_one))
BEHIND = (torch.arange(12) < 12 - 3 * torch.arange(2)[:, None]).long()  # a mask with padding behind the second prompt
ENDS_IN_PADDING = ALL_TOLD("padding behind a prompt", "whole_sequences(model)")
# what is called, with a model and a rank -> what the ranks are told
TABLE = {
    "other prompts": (lambda model, rank: model.generate(IDS + rank), differ("other prompts", "input_ids")),
    "longer prompts": (
        lambda model, rank: model.generate(inputs=IDS[:, rank:], **NEW), differ("other prompts", "input_ids")
    ),
    "other masks": (
        lambda model, rank: model.generate(IDS, attention_mask=(rank < IDS).long(), **NEW), differ("attention_mask")
    ),
    "other settings": (asks({"max_new_tokens": 4}), differ("max_new_tokens 4")),
    "a setting of the model's": (
        lambda model, rank: warm(model, rank).generate(IDS, **NEW), differ("repetition_penalty 2.0")
    ),
    "other processors": (
        asks({"logits_processor": warmers(2.5)}, logits_processor=warmers(1.5)), differ("[0] temperature 2.5")
    ),
    "a forward on some ranks": (
        lambda model, rank: (model if rank == WRONG else model.generate)(IDS), differ("calls", "arguments of generate")
    ),
    "no config on some ranks": (asks({"generation_config": 5}), only_one("AttributeError")),
    "a tuple for a cache on some ranks": (asks({"past_key_values": (1,)}), ONE_TOLD("a tuple")),
    "a streamer beside beams on one rank": (asks({"streamer": BaseStreamer()}, num_beams=2), ONE_TOLD("streamer")),
    "a tokenizer on one rank": (
        asks({"tokenizer": "letters"}, stop_strings=["a"], tokenizer=None), differ("tokenizer")
    ),
    "assistants": (asks(assistant_model=small()), ALL_TOLD("an assistant_model")),
    "lookup": (asks(prompt_lookup_num_tokens=2), ALL_TOLD("assisted generation")),
    "contrastive": (asks(penalty_alpha=0.6, top_k=4), ALL_TOLD("contrastive search")),
    "functions": (asks(custom_generate=print), ALL_TOLD("custom_generate")),
    "static": (asks(cache_implementation="static"), ALL_TOLD("'static'")),
    "quantized": (asks(cache_implementation="quantized"), ALL_TOLD("'quantized'")),
    "paged": (asks(cache_implementation="paged"), ALL_TOLD("'paged'")),
    "a static one": (asks(past_key_values=StaticCache(small().config, 32)), ALL_TOLD("a StaticCache")),
    "an offloaded one": (asks(past_key_values=DynamicCache(offloading=True)), ALL_TOLD("with offloading")),
    "weights": (asks(output_attentions=True), ALL_TOLD("output_attentions")),
    "images": (asks(pixel_values=torch.ones(2, 3, 4, 4)), ALL_TOLD("pixel_values")),
    "padding behind": (asks(attention_mask=BEHIND), ENDS_IN_PADDING),
    "padding behind beams": (asks(attention_mask=BEHIND, num_beams=2, use_cache=False), ENDS_IN_PADDING),
    "padding behind embeddings": (
        lambda model, rank: model.generate(
            inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=BEHIND, **NEW
        ),
        ENDS_IN_PADDING,
    ),
    "padding behind, by the token": (lambda model, rank: model.generate(IDS.flip(1), **NEW), ENDS_IN_PADDING),
    "batches that go on": (lambda model, rank: model.generate_batch([[1, 2]]), ALL_TOLD("continuous batching")),
}  # fmt: skip


def warm(model, rank):
    """A copy, which on one rank prefers new tokens."""
    model = copy.deepcopy(model)
    model.generation_config.repetition_penalty = 1.0 + (rank == WRONG)
    return model


@on_each_of(2)
def test_what_ranks_cannot_share_is_refused_on_all_of_them():
    sp = make(**MODES["r2"])
    model, expected, wrong = patch_attention(small().eval(), sp), small().eval().generate(IDS, **NEW), {}
    for name, (call, told) in TABLE.items():
        sp.comm.received.clear()
        refused = refusal(call, model, sp.rank)
        if lacking(refused, *told.get(sp.rank, told.get("others"))) or sum(sp.comm.received.values()):
            wrong[name] = refused
    assert torch.equal(model.generate(IDS, **NEW), expected)
    assert wrong == {}, wrong


@on_each_of(2, keep=None)
def test_a_rank_that_generates_alone_says_what_it_waits_for():
    waits.PATIENCE = 0.4
    sp = make(**MODES["r2"])
    model = patch_attention(small().eval(), sp)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        if sp.rank:
            time.sleep(1.5)
        model.generate(IDS, **NEW)
    if not sp.rank:
        assert missing(said.getvalue(), "has waited 0.4 s in generate", "whole_sequences(model)", "for rank 1") == []


class Ends(LogitsProcessor):
    """On one rank it calls a function, in the second step."""

    def __init__(self, rank, function):
        self.rank, self.function, self.steps = rank, function, 0

    def __call__(self, input_ids, scores):
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == self.rank:
            self.function()
        return scores


def gone(model, function):
    """What this rank is told where another one ends a generation in this way."""
    given = {"logits_processor": LogitsProcessorList([Ends(WRONG, function)]), **NEW}
    return refusal(model.generate, IDS, **given)


def stop():
    raise InputError("no more")


@on_each_of(2)
def test_a_rank_that_stops_in_the_middle_is_told_of_when_it_goes_on():
    sp = make(**MODES["r2"])
    model = patch_attention(small().eval(), sp)
    told = gone(model, stop)
    if sp.rank == WRONG:
        assert told == ("InputError", "no more")
        told = refusal(model.generate, IDS, **NEW)
    assert lacking(told, "DisagreementError", "calls", f"rank {WRONG}: arguments of generate", "decode step") == []
    assert torch.equal(model.generate(IDS, **NEW), small().eval().generate(IDS, **NEW))


def left_by_another():
    return gone(patch_attention(small().eval(), make(**MODES["r2"])), functools.partial(os._exit, 0))


def test_a_rank_that_is_gone_in_the_middle_is_named():
    told, (kind, *_) = on_ranks(2, left_by_another, timeout=60, check=False)
    assert lacking(told, "CommunicationError", "a forward of a model", f"rank {WRONG} did not take part") == []
    assert kind == "Died"


@on_each_of(2)
def test_a_model_generates_alone_where_it_should_and_is_given_back():
    sp, model, plain = make(**MODES["r2"]), small().eval(), small().eval()
    before, own = sorted(vars(model)), IDS + sp.rank
    patch_attention(model, sp)
    patch_attention(model, sp)
    copied = copy.deepcopy(model)
    assert copied.generate.__self__ is copied
    for x in (model, copied):
        sp.comm.received.clear()
        with whole_sequences(x):
            assert torch.equal(x.generate(own, **NEW), plain.generate(own, **NEW))
        assert not sum(sp.comm.received.values())
        assert torch.equal(x.generate(IDS, **NEW), plain.generate(IDS, **NEW))
        assert sum(sp.comm.received.values())
        assert lacking(refusal(x.generate, own), "DisagreementError", "other prompts") == []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if not sp.rank:  # which alone has written
            assert torch.equal(type(model).from_pretrained(folder).generate(own, **NEW), plain.generate(own, **NEW))
    for x in (model, copied):
        unpatch_attention(x)
        assert sorted(vars(x)) == before
        assert torch.equal(x.generate(own, **NEW), plain.generate(own, **NEW))
    model.generate = lambda ids, **kwargs: "own"
    assert patch_attention(model, sp).generate(IDS) == "own"
    assert unpatch_attention(model).generate(IDS) == "own"


CHUNKS = {
    "two rows": ({}, [4, 4, 4]),
    "four rows": ({"num_return_sequences": 2, "do_sample": True}, [2] * 6),
    "the user's": ({"prefill_chunk_size": 7}, [7, 5]),
    "a config": ({"generation_config": GenerationConfig(max_new_tokens=1)}, [4, 4, 4]),
    "no cache": ({"use_cache": False}, [12]),
}


@on_each_of(2)
def test_long_prompts_are_computed_in_chunks():
    """Of so many tokens as each rank computes at a time, in all rows together; unless the user says how many."""
    sp, generate.MOST, lengths = make(**MODES["r2"]), 4, []
    model, plain = small().eval(), small().eval()
    model.register_forward_pre_hook(lambda _, args, x: lengths.append(x["input_ids"].shape[1]), with_kwargs=True)
    patch_attention(model, sp)
    for name, (given, expected) in CHUNKS.items():
        lengths.clear()
        torch.manual_seed(1)
        found = model.generate(IDS, max_new_tokens=1, **given)
        torch.manual_seed(1)
        assert torch.equal(found, plain.generate(IDS, max_new_tokens=1, **given)), name
        assert lengths == expected, name


@on_each_of(2, keep=None)
def test_a_mask_that_is_read_later_is_refused_in_the_next_step():
    ValueChecks.reads = lambda checks, x: False  # as on a device
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :3] = 0
    moved, hidden = mask.clone(), torch.cat([mask, torch.tensor([[1], [0]])], 1)
    moved[0, 0] = 0
    with make() as sp, torch.no_grad():
        model = patch_attention(small(pad_token_id=0).eval(), sp)

        def steps(second):
            cache, lengths = DynamicCache(config=model.config), (12, 1, 1)
            given = mask, second, torch.cat([second, second.new_ones(2, 1)], 1)
            for count, seen in zip(lengths, given, strict=True):
                model(input_ids=torch.full((2, count), 5), attention_mask=seen, past_key_values=cache, use_cache=True)

        for second, row in ((hidden, 1), (torch.cat([moved, torch.ones_like(mask[:, :1])], 1), 0)):
            assert lacking(refusal(steps, second), "InputError", "begins as before", f"row {row}") == []
        assert refusal(steps, torch.cat([mask, torch.ones_like(mask[:, :1])], 1)) == (None, None)


@on_each_of(2, keep=None)
def test_padding_between_tokens_is_refused_once_it_leaves_the_window():
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 1, 1]])
    with make() as sp, torch.no_grad():
        model = patch_attention(build("mistral", window=8), sp)
        for read in (ValueChecks.reads, lambda checks, x: False):  # at once, and later, as on a device
            ValueChecks.reads, seen, cache = read, mask, None
            for count in (3, 3, 1, 1, 1):
                seen = (
                    torch.cat([seen, seen.new_ones(2, count)], 1)
                    if cache and count == 1
                    else mask[:, : 3 + 3 * bool(cache)]
                )
                given = {"input_ids": torch.full((2, count), 5), "attention_mask": seen, "past_key_values": cache}
                if seen.shape[1] > 8:
                    words = "windows or chunks of 8 tokens", "put all padding"
                    assert lacking(refusal(model, **given, use_cache=True), "InputError", *words) == []
                else:
                    cache = model(**given, use_cache=True).past_key_values

"""`generate` with images over a cache in parts gives the tokens of the unpatched model, on all ranks."""

import copy

import pytest
import torch
from torch.nn.functional import pad

from hf_integration import patch_attention
from hf_integration.generation.cache import ShardedLayer
from hf_integration.inputs import TYPES
from hf_integration.look.in_fp64 import fp64
from hf_integration.look.media import media_batch, padded
from hf_integration.look.small import small_copy
from tests.dist.ranks import lacking, make, refusal
from tests.hf.conformance import _outcome
from tests.hf.every_type import enlivened
from tests.hf.in_fp64 import throughout
from tests.hf.media_types import model_of
from tests.launch import on_warm_ranks

pytestmark = pytest.mark.usefixtures("compiled")
# positions of three axes; features for several layers too; blocks, with windows; plain; tiles
KINDS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "idefics3")
SECTIONS = {2: {"size": 2, "ulysses": 1}, 4: {"size": 4, "ulysses": 2, "layout": "zigzag"}}
NEW = {"max_new_tokens": 3, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 2, "do_sample": False},
    "two of each": {"num_return_sequences": 2, "do_sample": True},
    "without a cache": {"use_cache": False, "do_sample": False},
    "own loop": {},
}
TURNS = ("greedy", "sampled")
GIVEN = ("input_ids", "attention_mask", *TYPES)


def made(name):
    """A model in fp64 whose tokens vary, and the batches of two turns: padded on the left, rows with no, one and two
    images of two sizes."""
    torch.manual_seed(0)
    model = enlivened(small_copy(model_of(name))[0])
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape) * 0.3)  # else a token is followed by itself
    model = fp64(model).eval()
    model.generation_config.eos_token_id = None
    first, second = (media_batch(model, rows)[0] for rows in (((), (0,), (1, 0)), ((0,), (), (1,))))
    first = padded(model, first, (0, 1, 2))
    first["attention_mask"][2] = 1
    batches = [{key: x.double() if x.is_floating_point() else x for key, x in b.items()} for b in (first, second)]
    return model, *({key: x for key, x in batch.items() if key != "labels"} for batch in batches)


@throughout
def generated(model, first, second, way):
    """Tokens and logits, where a way has turns of three on one cache: with images, of text, and with further ones."""
    torch.manual_seed(3)
    if way == "own loop":
        return forwards(model, second)
    output = model.generate(**first, **NEW, **WAYS[way])
    logits, given = [*output.logits], {key: x for key, x in first.items() if key in GIVEN}
    text = {key: x[:, -4:] * (key not in TYPES) for key, x in given.items()}
    for turn in (text, second) if way in TURNS else ():
        begin = output.sequences.shape[1]
        given = {key: pad(x, (0, begin - x.shape[1]), value=key == "attention_mask") for key, x in given.items()}
        given["input_ids"] = output.sequences
        given = {key: torch.cat([x, turn.get(key, torch.ones_like(turn["input_ids"]))], 1) for key, x in given.items()}
        media = {key: x for key, x in turn.items() if key not in GIVEN}
        if media and hasattr(model.model, "get_rope_index"):  # which wants the images of all turns, row by row
            (one, *two), (before, behind) = first["image_grid_thw"], second["image_grid_thw"]
            grids = torch.stack([before, one, *two, behind])
            media["position_ids"] = model.model.get_rope_index(**given, image_grid_thw=grids)[0]
        output = model.generate(**given, **media, past_key_values=output.past_key_values, **NEW, **WAYS[way])
        logits += output.logits
    return output.sequences, torch.stack([whole(x) for x in logits]), output.past_key_values


def forwards(model, batch):
    """The logits of a prompt with images, of single tokens and of further text, whose positions the model makes."""
    output = model(**batch, use_cache=True)
    logits, ids = [output.logits], batch["input_ids"]
    for count in (1, 1, 3, 1):
        output = model(input_ids=ids[:, :count] % 40 + 3, past_key_values=output.past_key_values)
        logits.append(output.logits)
    return ids, torch.cat([whole(x) for x in logits], 1), output.past_key_values


def whole(x):
    return x.whole() if hasattr(x, "whole") else x


def compared(section, names, ways):
    """On a rank: for each type and way the largest error of logits, or what is wrong."""
    sp, found = make(**section, prove="never"), {}
    for name in names:
        model, *batches = made(name)
        shared = patch_attention(copy.deepcopy(model), sp)
        for way in ways:
            with torch.no_grad():
                tokens, logits, _ = generated(model, *batches, way)
                error, outcome = _outcome(generated, shared, *batches, way)
            if error is None and not torch.equal(outcome[0], tokens):
                error = f"other tokens: {outcome[0].tolist()}"
            if error is None and way != "without a cache" and not isinstance(outcome[2].layers[0], ShardedLayer):
                error = "a cache of one rank"
            found[name, way] = error or float((outcome[1] - logits).abs().max())
    return found


def wrong(world, names, ways):
    found = on_warm_ranks(world, compared, SECTIONS[world], names, ways)
    return [{case: x for case, x in rank.items() if isinstance(x, str) or not x < 1e-9} for rank in found]


@pytest.mark.parametrize(
    ("names", "way"),
    [(KINDS[1:2], "sampled"), *(pytest.param(KINDS, way, marks=pytest.mark.slow) for way in TURNS)],
)
def test_turns_with_images_go_on_with_the_cache(names, way):
    assert wrong(2, names, [way]) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_it_is_so_on_four_ranks(name):
    assert wrong(4, [name], ["sampled"]) == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_other_ways_to_choose_tokens(name):
    assert wrong(2, [name], [way for way in WAYS if way not in TURNS]) == [{}, {}]


@pytest.mark.slow
def test_layers_with_a_state_generate_without_a_cache():
    assert wrong(2, ["qwen3_5"], ["without a cache"]) == [{}, {}]


def refused():
    """What a rank is told where ranks have other images, and where a prompt with images is to be cut."""
    sp = make(size=2, ulysses=1, prove="never")
    model, first, _ = made("llava")
    patch_attention(model, sp)
    other = first | {"pixel_values": first["pixel_values"] + sp.rank}
    told = refusal(model.generate, **other, **NEW), refusal(model.generate, **first, cache_implementation="static")
    return *told, model.generate(**first, **NEW).sequences.tolist()


def test_wrong_prompts_end_in_a_sentence_on_every_rank():
    first, second = on_warm_ranks(2, refused)
    assert first[2] == second[2]
    for images, cache, _ in (first, second):
        assert lacking(images, "DisagreementError", "pixel_values by row") == []
        assert lacking(cache, "ConfigError", "'static'", "whole_sequences") == []

"""`generate` with pictures over a cache in parts gives the tokens of the unpatched model, on all ranks."""

import copy
import sys

import pytest
import torch
from torch.nn.functional import pad

from hf_integration import patch_attention
from hf_integration.generation.cache import ShardedLayer
from hf_integration.inputs import TYPES
from hf_integration.look.media import media_batch, padded
from hf_integration.look.small import small_copy
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.conformance import _outcome
from tests.hf.every_type import enlivened
from tests.hf.in_fp64 import fp64, throughout
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
}
GIVEN = ("input_ids", "attention_mask", *TYPES)


def made(name):
    """A model in fp64 whose tokens vary, and the batches of two turns: padded on the left, rows with no, one and two
    pictures of two sizes."""
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
def turns(model, first, second, options):
    """Tokens and logits of three turns on one cache: with pictures, of text, and with further pictures."""
    torch.manual_seed(3)
    output = model.generate(**first, **NEW, **options)
    logits = [*output.logits]
    text = {key: x[:, -4:] * (key not in TYPES) for key, x in first.items() if key in GIVEN}
    given = {key: x for key, x in first.items() if key in GIVEN}
    for turn in (text, second):
        length = output.sequences.shape[1]
        given = {key: longer(key, x, length) for key, x in given.items()}
        given["input_ids"] = output.sequences
        given = {key: torch.cat([x, turn.get(key, torch.ones_like(turn["input_ids"]))], 1) for key, x in given.items()}
        media = {key: x for key, x in turn.items() if key not in GIVEN}
        if media and hasattr(model.model, "get_rope_index"):  # which wants the pictures of all turns, row by row
            (_, one, *two), (third, fourth) = first["image_grid_thw"][[0, *range(3)]], second["image_grid_thw"]
            grids = torch.stack([third, one, *two, fourth])
            media["position_ids"] = model.model.get_rope_index(**given, image_grid_thw=grids)[0]
        output = model.generate(**given, **media, past_key_values=output.past_key_values, **NEW, **options)
        logits += output.logits
    return output.sequences, torch.stack([x.whole() if hasattr(x, "whole") else x for x in logits]), output


def longer(key, x, length):
    """What a turn was given, for the tokens that it has chosen too."""
    return pad(x, (0, length - x.shape[1]), value=int(key == "attention_mask"))


@throughout
def one_turn(model, first, second, options):
    torch.manual_seed(3)
    output = model.generate(**first, **NEW, **options)
    return output.sequences, torch.stack(output.logits), output


def compared(section, names, ways, function=turns):
    """On a rank: for each type and way the errors of logits, or what is wrong."""
    sp, found = make(**section, prove="never"), {}
    for name in names:
        model, *batches = made(name)
        shared = patch_attention(copy.deepcopy(model), sp)
        for way in ways:
            tokens, logits, _ = function(model, *batches, WAYS[way])
            error, outcome = _outcome(function, shared, *batches, WAYS[way])
            if error is None:
                is_shared = isinstance(outcome[2].past_key_values.layers[0], ShardedLayer)
                error = (
                    float((outcome[1] - logits).abs().max()) if is_shared or "cache" in way else "a cache of one rank"
                )
                error = error if torch.equal(outcome[0], tokens) else f"other tokens: {outcome[0]} {tokens}"
            found[name, way] = error
    return found


def wrong_of(world, names, ways, function=turns):
    found = on_warm_ranks(world, compared, SECTIONS[world], names, ways, function)
    return [{case: x for case, x in rank.items() if isinstance(x, str) or not x < 1e-9} for rank in found]


def test_turns_with_pictures_go_on_with_the_cache():
    assert wrong_of(2, KINDS, ("greedy", "sampled")) == [{}, {}]


if __name__ == "__main__":
    world, names = int(sys.argv[1]), sys.argv[2].split(",")
    for rank in on_warm_ranks(
        world, compared, SECTIONS[world], names, sys.argv[3].split(","), turns if len(sys.argv) < 5 else one_turn
    )[:2]:
        for case, x in rank.items():
            print(case, x)

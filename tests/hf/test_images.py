"""Models that share sequences take images and audio: exact, or refused in a sentence on every rank."""

import pytest
import torch
import transformers

from docs.model_types import PAGE, media_states, rows_of, tables_of, version_of
from hf_integration import patch_attention
from hf_integration.look.media import media_batch
from hf_integration.look.small import call, small_copy
from tests.dist.ranks import is_one_sentence, lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.images import KINDS, SECTIONS, outcomes
from tests.hf.llama import small
from tests.hf.media_types import ALL, NO_BATCH, TYPES, model_of
from tests.launch import on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
# positions of three axes and features for several layers; blocks that see themselves, with windows; plain; sound
FEW = ("qwen3_vl", "gemma3", "llava", "voxtral")
QUICK = FEW[:1]
EXACT, TOLD = "exact", ("exact", "refused", "plain")
MEDIA = tables_of(PAGE.read_text(encoding="utf-8"))[1]
TABLE = rows_of(MEDIA)


def by_kind(found):
    return {name: {kind: words[kind] for kind in KINDS} for name, words in found.items()}


def test_a_type_of_each_kind_is_exact():
    assert by_kind(outcomes(QUICK)) == {name: dict.fromkeys(KINDS, EXACT) for name in QUICK}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in (*TYPES, *NO_BATCH) if name not in QUICK])
def test_every_type_does_what_the_table_says(model_type):
    words = by_kind(outcomes([model_type]))[model_type]
    assert {kind: found for kind, found in words.items() if not found.startswith(TOLD)} == {}
    assert media_states(words) == TABLE[model_type].split(" | ")[3:7]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("model_type", FEW)
def test_it_is_so_on_four_ranks(model_type, layout):
    found = outcomes([model_type], world=4, section={**SECTIONS[4], "layout": layout})
    assert by_kind(found) == {model_type: dict.fromkeys(KINDS, EXACT)}


def test_the_table_is_of_this_transformers():
    """Else: python docs/model_types.py media"""
    assert (version_of(MEDIA), sorted(TABLE)) == (transformers.__version__, [*ALL])


def text_of(batch):
    return {name: x for name, x in batch.items() if name not in ("pixel_values", "image_grid_thw")}


def shifted(batch, name, rank):
    return batch | {name: batch[name].roll(1, 0) if rank else batch[name]}


def noisy(model, sp, batch):
    """A tower with noise, of other seeds on the ranks."""
    torch.manual_seed(sp.rank)
    hook = model.model.visual.register_forward_pre_hook(lambda module, args: (args[0] + torch.rand(1), *args[1:]))
    try:
        return call(model, **batch)
    finally:
        hook.remove()
        torch.manual_seed(0)


def fewer(batch, rank):
    """The last image is missing on one rank."""
    sizes = batch["image_grid_thw"].prod(1).tolist()
    kept = {"image_grid_thw": batch["image_grid_thw"][:-1], "pixel_values": batch["pixel_values"][: sum(sizes[:-1])]}
    return batch | (kept if rank else {})


def with_video(batch, rank):
    """What are images on one rank are videos on another one."""
    videos = {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": batch["image_grid_thw"]}
    return text_of(batch) | videos if rank else batch


def of_text_model(model, sp, batch):
    return patch_attention(small(vocab_size=300), sp)(**batch)


def packed(model, cut, skipped=0, **given):
    """Two documents, of which the second begins behind so many tokens of an image, at another position than 0."""
    pack, _ = media_batch(model, rows=((0,),))
    ids = pack["input_ids"]
    first = int((ids[0] == model.config.image_token_id).nonzero()[cut])
    positions = torch.cat([torch.arange(first), skipped + torch.arange(ids.shape[1] - first)])[None]
    call(model, **pack, **given, position_ids=positions.expand(4, 1, -1))


def compiled(model, sp, batch):
    try:
        return torch.compile(model, backend="eager")(**batch)
    finally:
        torch._dynamo.reset()


# what is wrong -> (a call(model, sp, batch), words that every rank is told)
WRONG = {
    "images on one rank": (
        lambda model, sp, batch: call(model, **(text_of(batch) if sp.rank else batch)),
        ["same whole batch", "rank 1: ", "no pixel_values"],
    ),
    "the same images in another order": (
        lambda model, sp, batch: call(model, **shifted(batch, "pixel_values", sp.rank)),
        ["same whole batch", "pixel_values by row"],
    ),
    "other sizes": (
        lambda model, sp, batch: call(model, **shifted(batch, "image_grid_thw", sp.rank)),
        ["same whole batch", "image_grid_thw"],
    ),
    "images in shard_batches": (lambda model, sp, batch: sp.shard_batch(batch), ["pixel_values", "whole batch"]),
    "images beside a shard": (
        lambda model, sp, batch: model(**sp.shard_batch(text_of(batch)), pixel_values=batch["pixel_values"]),
        ["needs whole batches", "got a sharded one"],
    ),
    "noise in the tower": (noisy, ["same", "random"]),
    "a cache in training": (lambda model, sp, batch: model(**batch, use_cache=True), ["no kv cache", "use_cache"]),
    "fewer tokens than features": (
        lambda model, sp, batch: call(model, **batch | {"input_ids": batch["input_ids"].clamp(max=3)}),
        ["tokens"],
    ),
    "rows that are cut inside an image": (
        lambda model, sp, batch: call(
            model,
            **{name: x[:, :20] for name, x in batch.items() if name in text_of(batch)},
            pixel_values=batch["pixel_values"],
            image_grid_thw=batch["image_grid_thw"],
        ),
        ["tokens"],
    ),
    "fewer images on one rank": (
        lambda model, sp, batch: call(model, **fewer(batch, sp.rank)),
        ["same whole batch", "pixel_values"],
    ),
    "videos on one rank": (
        lambda model, sp, batch: call(model, **with_video(batch, sp.rank)),
        ["same whole batch", "pixel_values_videos"],
    ),
    "sizes of other images": (
        lambda model, sp, batch: call(model, **batch | {"image_grid_thw": batch["image_grid_thw"] * 2}),
        ["making features of images failed"],
    ),
    "no sizes": (
        lambda model, sp, batch: call(model, **{name: x for name, x in batch.items() if name != "image_grid_thw"}),
        ["image_grid_thw", "got none"],
    ),
    "a pack that is cut inside an image": (lambda model, sp, batch: packed(model, 2), ["whole images", "at token"]),
    "documents that do not begin at 0": (
        lambda model, sp, batch: packed(model, 0, skipped=3),
        ["position_ids must count", "got 3"],
    ),
    "other documents in what says it too": (
        lambda model, sp, batch: packed(model, 0, cu_seq_lens_q=torch.tensor([0, 4, 16])),
        ["documents must be the same", "cu_seq_lens_q"],
    ),
    "a mask of tokens x tokens": (
        lambda model, sp, batch: call(model, **batch, attention_mask=torch.ones(3, 1, 27, 27)),
        ["attention_mask"],
    ),
    "other values of images on one rank": (
        lambda model, sp, batch: call(model, **batch | {"pixel_values": batch["pixel_values"] + sp.rank}),
        ["same whole batch", "pixel_values by row"],
    ),
    "a rank that is not told which tokens are of images": (
        lambda model, sp, batch: call(
            model, **{name: x for name, x in batch.items() if not sp.rank or name != "mm_token_type_ids"}
        ),
        ["same whole batch", "mm_token_type_ids"],
    ),
    "more tokens than features": (
        lambda model, sp, batch: call(
            model,
            **batch | {"input_ids": batch["input_ids"].where(batch["input_ids"] > 40, model.config.image_token_id)},
        ),
        ["tokens"],
    ),
    "images without tokens": (
        lambda model, sp, batch: model(pixel_values=batch["pixel_values"], image_grid_thw=batch["image_grid_thw"]),
        ["input_ids or inputs_embeds", "got neither"],
    ),
    "images for a model of text": (of_text_model, ["llama", "text alone", "pixel_values"]),
    "a model in torch.compile": (compiled, ["layer.compile()"]),
    "log-probabilities": (
        lambda model, sp, batch: sp.log_probs(model, **batch),
        ["log_probs needs", "whole logits"],
    ),
}


def wrong_uses():
    sp = make(size=2, ulysses=1, prove="never")
    model = small_copy(model_of("qwen3_vl"))[0].train()
    batch, found = media_batch(model)[0], {}
    patch_attention(model, sp)
    for name, (use, _) in WRONG.items():
        try:
            found[name] = refusal(use, model, sp, batch)
        except ValueError as error:
            found[name] = type(error).__name__, str(error)
    return found, bool(call(model.train(), **batch).loss.isfinite())


def test_wrong_uses_end_in_a_sentence_on_every_rank():
    for found, goes_on in on_ranks(2, wrong_uses):
        assert goes_on
        assert {
            name: found[name] for name, (_, words) in WRONG.items() if lacking(found[name], found[name][0], *words)
        } == {}


SEEN = [0.0]  # whether there were images


def sees(module, args, output):
    SEEN[0] = 1.0


def has_seen_none(module, args, output):
    SEEN[0] = 0.0


def mixes(module, args):
    """A layer that mixes tokens once there were images, which text alone does not show."""
    return (args[0] + SEEN[0] * args[0].mean(1, keepdim=True), *args[1:])


def refused_types(names):
    sp, found = make(size=2, ulysses=1), {}
    for name in names:
        model = small_copy(model_of(name))[0].train()
        if name == "llava":
            model.model.language_model.layers[0].register_forward_pre_hook(mixes)
            model.get_input_embeddings().register_forward_hook(has_seen_none)  # each forward begins with it
            model.model.vision_tower.register_forward_hook(sees)
        patch_attention(model, sp)
        ids = torch.arange(32).view(2, 16) + 3
        found[name] = (
            refusal(call, model, ids, pixel_values=torch.ones(1, 3, 16, 16)),
            bool(call(model, ids, labels=ids).loss.isfinite()),
        )
    return found


@pytest.mark.parametrize("names", each_then_rest([["llava"]], [["mllama"]]))
def test_types_that_are_not_proved_take_text_alone(names):
    for found in on_ranks(2, refused_types, names):
        for (kind, sentence), takes_text in found.values():
            assert kind == "ConfigError"
            assert is_one_sentence(sentence)
            assert missing(sentence, "pixel_values", "text alone") == []
            assert takes_text

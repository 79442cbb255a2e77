"""Compares small copies of models that share sequences with plain ones, in batches with images, videos or audio.

python -m tests.hf.images [TYPES]: a line for each type, "exact", "refused: SENTENCE" or "wrong: ...".
"""

import argparse
import copy

import numpy as np
import torch
from torch.nn import functional as F

from hf_integration import patch_attention
from hf_integration.inputs import MEDIA
from hf_integration.inputs import TYPES as TYPES_OF_TOKENS
from hf_integration.look.in_fp64 import fp64
from hf_integration.look.media import joined, media_batch, padded
from hf_integration.look.small import call, small_copy, tokens_for
from hf_integration.media import towers
from hf_integration.trainer.samples import positions_of
from tests.dist.ranks import make
from tests.hf.conformance import _gradients, _merged, _outcome, _whole, beyond
from tests.hf.in_fp64 import throughout
from tests.hf.llama import IGNORE, array
from tests.hf.media_types import TYPES, model_of
from tests.launch import on_ranks

KINDS = ("media", "left", "right", "packed", "text")
LIMIT = 1e-5
SECTIONS = {2: {"size": 2, "ulysses": 1}, 4: {"size": 4, "ulysses": 2, "layout": "zigzag"}}
TAKES, DIVIDED = "takes", "divided"  # what is said of a type beside the outcomes of kinds


def batches_of(model):
    """Return what makes batches for a small copy, by kind: rows with no, one and two images, padded, packed, and text
    alone; and why there are none with images. It makes two: for the plain model, and for one that shares sequences.
    """
    batch, reason = media_batch(model)
    ids = tokens_for(model.config, 2, 21, seed=3)
    made = {"text": lambda: {"input_ids": ids, "labels": ids}}
    if batch is not None:
        made |= {
            "media": lambda: batch,
            "left": lambda: padded(model, batch, (1,)),
            "right": lambda: padded(model, batch, (0, 2)),
        }
    found = {kind: lambda make=make: (make(),) * 2 for kind, make in made.items()}
    return (found if batch is None else found | {"packed": lambda: packed(model)}), reason


def packed(model):
    """Return documents with two and three images, and the pack of them."""
    documents = [media_batch(model, rows=(row,))[0] for row in ((1, 0), (0, 1, 0))]  # one alone may be of another class
    for document in documents:
        document["labels"][:, 0] = IGNORE  # which no token predicts
    by_token = {name for name, x in documents[0].items() if x.shape == documents[0]["input_ids"].shape}
    pack = {name: torch.cat([x[name] for x in documents], 1) for name in by_token}
    pack |= joined([{name: x for name, x in each.items() if name not in by_token} for each in documents])
    positions = torch.cat([positions_of(model, document) for document in documents], -1)
    # some place tokens on several axes where there is a mask
    alone = [document | {"attention_mask": torch.ones_like(document["input_ids"])} for document in documents]
    return alone, pack | {"position_ids": positions if len(positions) > 1 else positions[0]}


@throughout
def outcome(model, documents, world=1):
    """Return ([logits of real tokens], [loss], gradients averaged over ranks) for a batch, or for documents alone."""
    model.zero_grad()
    documents = documents if isinstance(documents, list) else [documents]
    counts = [int((document["labels"][:, 1:] != IGNORE).sum()) for document in documents]
    logits, losses = [], 0.0
    for document, count in zip(documents, counts, strict=True):
        double = model.dtype == torch.float64
        document = {name: x.double() if double and x.is_floating_point() else x for name, x in document.items()}
        output = call(model, **document)
        loss = output.loss * (count / sum(counts))
        loss.backward()
        real = document.get("attention_mask", torch.ones_like(document["input_ids"]))[..., None]
        logits.append(array(_whole(output.logits) * real))
        losses += loss.item()
    return [np.concatenate(logits, 1)], [losses], _gradients(model, world)


def compared(model, shared, batches, sp):
    """Return whether a shared model does with a batch what the plain one does, as `conformance.outcomes` says it."""
    error, made = _outcome(batches)
    if error is not None:
        return error
    error, wanted = _outcome(outcome, model, made[0])
    if error is not None:
        return "plain: " + error.partition(": ")[2]
    error, found = _outcome(outcome, shared, made[1], sp.size)
    if error is not None:
        return error
    wrong = beyond(
        found, wanted, model.dtype, lambda: _outcome(outcome, fp64(copy.deepcopy(model)), made[0])[1], times=2
    )
    return "wrong: " + ", ".join(f"{name} by {error:.0e}" for name, (error, _) in wrong.items()) if wrong else "exact"


def media_of(model):
    """Return what a patched model takes, and what of it ranks divide."""
    names = {"get_image_features": "images", "get_video_features": "videos", "get_audio_features": "audio"}
    owners = {word: (name, towers.owner_of(model, name)) for name, word in names.items()}
    taken = {word: name in vars(owner) for word, (name, owner) in owners.items() if owner is not None}
    return {TAKES: ", ".join(taken), DIVIDED: ", ".join(word for word, is_divided in taken.items() if is_divided)}


def tried(names, kinds, section):
    """On a rank: the outcome of each type in each kind of batch, and `media_of`."""
    sp, found = make(**section, prove="never"), {}
    for name in names:
        error, model = _outcome(lambda name=name: small_copy(model_of(name))[0].train())
        batches, reason = ({}, "") if error else batches_of(model)
        shared = copy.deepcopy(model)
        error = error or _outcome(patch_attention, shared, sp)[0]
        found[name] = media_of(shared) if shared is not None else {TAKES: "", DIVIDED: ""}
        for kind in kinds:
            missing = f"refused: {reason}" if kind not in batches else ""
            found[name][kind] = error or missing or compared(model, shared, batches[kind], sp)
        if found[name].get("packed", "").startswith("wrong") and not found[name][DIVIDED]:
            found[name]["packed"] = "plain: the features of an image or an audio clip are others where it is alone"
        if any(words.startswith(("crash", "hang")) for words in found[name].values()):
            break
    return found


def outcomes(names, world=2, kinds=KINDS, section=None):
    """Return {type: {kind: outcome on all ranks}}, and what it takes and divides."""
    found, rest = {}, [*names]
    while rest:
        given = rest, kinds, section or SECTIONS[world]
        ranks = on_ranks(world, tried, *given, timeout=120 + 60 * len(rest), patience=60, check=False)
        if lost := [rank for rank in ranks if isinstance(rank, tuple)]:  # nobody knows at which type
            if len(rest) == 1:
                return found | {rest[0]: dict.fromkeys(kinds, f"hang: {lost[0][1]}") | {TAKES: "", DIVIDED: ""}}
            return found | {name: outcomes([name], world, kinds, section)[name] for name in rest}
        done = [name for name in rest if all(name in rank for rank in ranks)]
        for name in done:
            found[name] = {kind: _merged([rank[name][kind] for rank in ranks]) for kind in (*kinds, TAKES, DIVIDED)}
        rest = rest[len(done) :]
    return found


def examples(model, rows):
    """Return examples of a row each, of other texts and with other images."""
    found = []
    for number, images in enumerate(rows):
        batch = media_batch(model, rows=(images or (0,),))[0]
        is_text = batch["labels"] != IGNORE
        ids = batch["input_ids"].where(is_text, 3) if not images else batch["input_ids"].clone()
        ids[0, :3] = number + 3
        labels = batch["labels"] if images else ids.clone()
        labels[0, : number % 4 + 3] = IGNORE
        batch |= {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if not images:
            batch = {name: x * 0 if name in TYPES_OF_TOKENS else x for name, x in batch.items() if name not in MEDIA}
        found.append({k: x.roll(number, -1) if k == "pixel_values" else x for k, x in batch.items()})
    return found


def batched(batches):
    """Return examples as a batch: rows are padded on the right, images to the most tiles."""
    found = {}
    for name in {name: None for batch in batches for name in batch}:
        given = [batch[name] for batch in batches if name in batch]
        by_token = name in TYPES_OF_TOKENS or name in ("input_ids", "labels", "attention_mask")
        if by_token or given[0].dim() > 4:
            longest = max(x.shape[1] for x in given)
            sides = [[0, 0] * (x.dim() - 2) + [0, longest - x.shape[1]] for x in given]
            given = [
                F.pad(x, side, value=IGNORE if name == "labels" else 0) for x, side in zip(given, sides, strict=True)
            ]
        found[name] = torch.cat(given)
    return found


def projections(model):
    """Return the names of linear layers of the stack and of towers."""
    names = {name.rpartition(".")[2] for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)}
    return sorted(name for name in names - {"lm_head"} if not name.isdigit())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument("--ranks", type=int, default=2, choices=SECTIONS)
    parser.add_argument("--layout", default=None)
    given = parser.parse_args()
    section = SECTIONS[given.ranks] | ({"layout": given.layout} if given.layout else {})
    for model_type in given.types:
        words = outcomes([model_type], given.ranks, section=section)[model_type]
        kinds = {kind: word for kind, word in words.items() if kind in KINDS}
        print(f"{model_type:24}", words["media"] if len({*kinds.values()}) == 1 else kinds, flush=True)

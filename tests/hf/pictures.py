"""Compares small copies of models that share sequences with plain ones, in batches with pictures, films or sounds.

python -m tests.hf.pictures [TYPES]: a line for each type, "exact", "refused: SENTENCE" or "wrong: ...".
"""

import copy
import sys

import torch

from hf_integration import patch_attention
from hf_integration.look.in_fp64 import fp64
from hf_integration.look.media import media_batch, padded
from hf_integration.look.small import call, small_copy, tokens_for
from tests.dist.ranks import make
from tests.hf.conformance import _errors, _gradients, _merged, _outcome, _whole
from tests.hf.in_fp64 import limit_beside, throughout
from tests.hf.llama import array
from tests.hf.media_types import TYPES, model_of
from tests.launch import on_ranks

KINDS = ("media", "left", "right", "text")
LIMIT = 1e-5
SECTIONS = {2: {"size": 2, "ulysses": 1}, 4: {"size": 4, "ulysses": 2, "layout": "zigzag"}}


def batches_of(model):
    """Return batches for a small copy by kind: rows with no, one and two pictures, padded, and text alone."""
    batch, reason = media_batch(model)
    if batch is None:
        return {}, reason
    ids = tokens_for(model.config, 2, 21, seed=3)
    return {
        "media": batch,
        "left": padded(model, batch, (1,)),
        "right": padded(model, batch, (0, 2)),
        "text": {"input_ids": ids, "labels": ids},
    }, ""


@throughout
def outcome(model, batch, world=1):
    """Return (logits of real tokens, loss, gradients averaged over the ranks) for a batch."""
    model.zero_grad()
    double = model.dtype == torch.float64
    batch = {name: x.double() if double and x.is_floating_point() else x for name, x in batch.items()}
    output = call(model, **batch)
    output.loss.backward()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None]
    return array(_whole(output.logits) * real), output.loss.item(), _gradients(model, world)


def compared(model, shared, batch, sp):
    """Return whether a shared model does with a batch what the plain one does, as `conformance.outcomes` says it."""
    error, wanted = _outcome(outcome, model, batch)
    if error is not None:
        return "plain: " + error.partition(": ")[2]
    error, found = _outcome(outcome, shared, batch, sp.size)
    if error is not None:
        return error
    errors, limits = _errors(found, wanted), {}
    if max(errors.values()) >= LIMIT:  # or twice of what rounding makes
        error, truth = _outcome(outcome, fp64(copy.deepcopy(model)), batch)
        if error is None:
            errors = _errors(found, truth)
            limits = {name: limit_beside(own, LIMIT, times=2) for name, own in _errors(wanted, truth).items()}
    wrong = {name: error for name, error in errors.items() if not error < limits.get(name, LIMIT)}
    return "wrong: " + ", ".join(f"{name} by {error:.0e}" for name, error in wrong.items()) if wrong else "exact"


def tried(names, kinds, section):
    """On a rank: the outcome of each type in each kind of batch."""
    sp, found = make(**section, prove="never"), {}
    for name in names:
        error, model = _outcome(lambda name=name: small_copy(model_of(name))[0].train())
        batches, reason = ({}, error) if error else batches_of(model)
        shared = copy.deepcopy(model)
        error = error or _outcome(patch_attention, shared, sp)[0] or (None if batches else f"refused: {reason}")
        found[name] = {kind: error or compared(model, shared, batches[kind], sp) for kind in kinds}
        if any(words.startswith(("crash", "hang")) for words in found[name].values()):
            break
    return found


def outcomes(names, world=2, kinds=KINDS, section=None):
    """Return {type: {kind: outcome on all ranks}}."""
    found, rest = {}, [*names]
    while rest:
        ranks = on_ranks(
            world, tried, rest, kinds, section or SECTIONS[world], timeout=60 + 20 * len(rest), patience=30
        )
        done = [name for name in rest if all(name in rank for rank in ranks)]
        found |= {name: {kind: _merged([rank[name][kind] for rank in ranks]) for kind in kinds} for name in done}
        rest = rest[len(done) :]
    return found


if __name__ == "__main__":
    for model_type in sys.argv[1:] or TYPES:
        words = outcomes([model_type])[model_type]
        same = len({*words.values()}) == 1
        print(f"{model_type:24}", words["media"] if same else words, flush=True)

"""Compares models that share sequences with plain ones: loss, whole logits, all gradients, in batches of each kind."""

import copy
import itertools

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ds_seqpar.base.errors import ConfigError, InputError
from hf_integration import patch_attention
from hf_integration.look.in_fp64 import fp64
from tests.dist.ranks import make
from tests.hf.every_type import BY_PADDING, tiny
from tests.hf.families import PACKS, SEQ, batch_of, collated, real
from tests.hf.in_fp64 import limit_beside, throughout
from tests.hf.llama import array
from tests.launch import on_ranks

KINDS = ("plain", "right", "left", "packed")
NAMES = {"plain": "odd"}  # of kinds, to what makes batches
CALLS = ("whole", "sharded")
SECTIONS = {2: {"size": 2, "ulysses": 1}, 4: {"size": 4, "ulysses": 2}}
EXACT, LIMITS = "exact", {torch.float32: 1e-5, torch.float64: 1e-9}
PATIENCE = 20  # seconds that a rank waits for another


def outcomes(types, world=2, kinds=KINDS, patch=patch_attention, build=tiny, section=None, calls=CALLS):
    """Compare each of these types, shared by `world` ranks, with the plain model in one process.

    Models in fp64 compute all in it, and must agree to 1e-9. Others must agree to 1e-5, or to twice of what the plain
    model itself differs from one in fp64.

    Args:
        types: Names of models.
        world: How many ranks share each sequence.
        kinds: Of batches.
        patch: `patch(model, sp)`, which makes a model share sequences.
        build: `build(name)`, which makes a model.
        section: The settings, if not those of `SECTIONS`.
        calls: What each kind of batch is called with.

    Returns:
        {type: {(kind, call): outcome}}. An outcome is "exact", "refused: SENTENCE" (on every rank), "wrong: ...",
        "crash: ...", "hang", or "plain: ERROR" where the plain model fails.
    """
    types, cases, section = list(types), [*itertools.product(kinds, calls)], section or SECTIONS[world]
    given, options = (types, kinds, patch, build, section, calls), (world, kinds, patch, build, section, calls)
    ranks = on_ranks(world, _tried, *given, timeout=40 + 8 * len(types), patience=PATIENCE, check=False)
    if any(isinstance(rank, tuple) for rank in ranks):  # ended without a result: nobody knows at which type
        if len(types) == 1:
            return {types[0]: dict.fromkeys(cases, f"hang: {ranks[0][1]}")}
        return {name: outcomes([name], *options)[name] for name in types}
    done = types[: min(map(len, ranks))]
    found = {name: {case: _merged([rank[name][case] for rank in ranks]) for case in cases} for name in done}
    rest = types[len(done) :]
    return found | (outcomes(rest, *options) if rest else {})


def _merged(outcomes):
    """Return what the outcomes of the ranks say together."""
    words = [outcome.partition(":")[0] for outcome in outcomes]
    for worst in ("crash", "hang"):  # a rank hangs where another crashed
        if worst in words:
            return outcomes[words.index(worst)]
    if len({*words}) > 1:
        return "wrong: " + "; ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))
    return outcomes[0]


def _tried(types, kinds, patch, build, section, calls):
    """On a rank: the outcomes of types up to the first that crashed, which may leave messages on their way."""
    sp, found = make(**section), {}
    for name in types:
        found[name] = dict(_cases(sp, name, kinds, patch, build, calls))
        if any(outcome.startswith(("crash", "hang")) for outcome in found[name].values()):
            break
    return found


def _cases(sp, name, kinds, patch, build, calls):
    cases, broken = [*itertools.product(kinds, calls)], None
    model = build(name)
    shared = copy.deepcopy(model)
    if (error := _error(patch, shared, sp)) is not None:
        yield from ((case, error) for case in cases)
        return
    mine = {kind: _outcome(plain, model, kind) for kind in kinds[sp.rank :: sp.size]}
    expected = [None] * sp.size
    dist.all_gather_object(expected, mine)
    expected = {kind: outcome for each in expected for kind, outcome in each.items()}
    for kind, call in cases:
        error, wanted = expected[kind]
        if error is not None:
            yield (kind, call), "plain: " + error.partition(": ")[2]
        elif broken is not None:
            yield (kind, call), broken
        else:
            error, found = _outcome(CALL[call], shared, sp, kind)
            broken = error if error is not None and error.startswith(("crash", "hang")) else None
            yield (kind, call), error or compared(found, wanted, model, kind)


def _error(function, *args):
    return _outcome(function, *args)[0]


def _outcome(function, *args):
    """Return (None, what a function returned), or (the outcome that its error is, None)."""
    try:
        return None, function(*args)
    except (ConfigError, InputError) as error:
        return f"refused: {error}", None
    except Exception as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        line = " ".join(str(error).split())[:300]
        return f"{'hang' if 'imed out' in line else 'crash'}: {type(error).__name__}: {line} ({place})", None


def compared(found, wanted, model, kind):
    """Return "exact", or what is wrong on this rank of what `CALL` and `plain` have given."""
    limit, errors = LIMITS[model.dtype], _errors(found, wanted)
    limits = dict.fromkeys(errors, limit)
    if not all(error < limit for error in errors.values()) and model.dtype == torch.float32:
        error, truth = _outcome(plain, fp64(copy.deepcopy(model)), kind)
        if error is None:
            limits = {name: limit_beside(error, limit, times=2) for name, error in _errors(wanted, truth).items()}
            errors = _errors(found, truth)
    wrong = {name: error for name, error in errors.items() if not error < limits[name]}
    return "wrong: " + ", ".join(f"{name} by {error:.0e}" for name, error in wrong.items()) if wrong else EXACT


def _errors(found, wanted):
    return {
        "loss": abs(found[1] - wanted[1]) / abs(wanted[1]),
        "logits": np.abs(found[0] - wanted[0]).max() / np.abs(wanted[0]).max(),
        "gradients": _gap(found[2], wanted[2]),
    }


def _gap(found, wanted):
    """Return the greatest error of a gradient, measured by its own greatest number.

    Or by a hundredth of all gradients' greatest where that is more: those of the biases of keys are 0 but for rounding.
    """
    floor = 0.01 * max(np.abs(x).max() for x in wanted.values())
    return max(np.abs(found[name] - x).max() / max(np.abs(x).max(), floor) for name, x in wanted.items())


@throughout
def plain(model, kind):
    """Return (logits of real tokens, loss, gradients) of the plain model.

    Of packs, each document by itself; where the plain model counts blocks from padding on, each row without it.
    """
    _balance(model, kind)
    batch = collated(NAMES.get(kind, kind))
    by_padding = kind == "left" and model.config.model_type in BY_PADDING
    if kind != "packed" and not by_padding:
        output = model(**padded(model, batch), use_cache=False)
        loss, logits = output.loss, output.logits * real(batch)
    else:
        losses, rows, number = [], [], 0
        padding = SEQ - batch["attention_mask"].sum(1) if by_padding else [0] * len(PACKS)
        for ids, lengths, first in zip(batch["input_ids"], PACKS, padding, strict=True):
            cut = ids[first:].split([SEQ - first] if by_padding else lengths)
            documents = [model(input_ids=document[None], use_cache=False).logits[0] for document in cut]
            rows.append(F.pad(torch.cat(documents), (0, 0, int(first), 0)))
            for one, document in zip(documents, cut, strict=True):
                losses.append(F.cross_entropy(one[:-1].float(), document[1:], reduction="sum"))
                number += len(document) - 1
        loss, logits = sum(losses) / number, torch.stack(rows)
    loss.backward()
    return array(logits), loss.item(), _gradients(model)


@throughout
def whole(model, sp, kind):
    """The same of a model that shares sequences, called with a whole batch."""
    _balance(model, kind)
    batch = collated(NAMES.get(kind, kind))
    output = model(**padded(model, batch), use_cache=False)
    output.loss.backward()
    return array(_whole(output.logits) * real(batch)), output.loss.item(), _gradients(model, dist.get_world_size())


@throughout
def sharded(model, sp, kind):
    """The same, called with a sharded batch."""
    _balance(model, kind)
    batch = batch_of(NAMES.get(kind, kind))
    shard = sp.shard_batch(padded(model, batch))
    output = model(**shard)
    output.loss.backward()
    logits = sp.gather(output.logits.detach(), 1, shard.get("placement"))
    return array(logits * real(batch)), sp.mean_loss(output.loss), _gradients(model, dist.get_world_size())


CALL = {"whole": whole, "sharded": sharded}


def _whole(logits):
    return logits.whole().detach() if hasattr(logits, "whole") else logits.detach()


def padded(model, batch):
    """Return the batch with the model's own token in the place of padding, which some positions are counted by."""
    if "attention_mask" not in batch:
        return batch
    token = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, token)}


def _balance(model, kind):
    """Leave the balance of experts out for packs: it is none of documents by themselves."""
    model.zero_grad()
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "output_router_logits"):
        by_row = kind == "left" and config.model_type in BY_PADDING
        config.output_router_logits = kind != "packed" and not by_row


def _gradients(model, world=1):
    """Return the mean over ranks of each parameter's gradient, 0 where it has none, in one message."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    if world > 1:
        dist.all_reduce(flat)
    parts = (flat / world).split([p.numel() for p in parameters])
    return {name: array(part) for name, part in zip(names, parts, strict=True)}

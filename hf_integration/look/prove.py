"""Prove before training that sequence parallelism is exact for a model of an untested family.

The proof compares runs of a small copy of the model with and without sequence parallelism.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.base.log import log_once
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.guards.agreement import assert_ranks_agree
from ds_seqpar.operators.precision import all_digits
from ds_seqpar.whole import whole_of
from ds_seqpar.whole.shard_spec import ShardSpec

from ..families import is_causal_lm, set_balance_weight
from ..inputs import MEDIA
from .facts import Facts, base_module, text_config
from .in_fp64 import InFP64, fp64
from .look import tensors_in
from .media import media_batch, padded
from .small import call, layers_of, small_copy, tokens_for

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # maximum relative difference by message dtype
MOST_OWN = 1e-4  # the largest error of a plain fp32 copy, compared with fp64, that widens the tolerance
FLOOR = 3e-2  # gradients are compared relative to at least this fraction of the largest gradient


Batch = dict[str, Tensor]
LOSS, OUTPUT, GRADIENT = "loss", "output", "gradient of "
PROOF = "proof of a model"  # the name of the compared values in errors
AROUND = "padding around"  # the numbers of padding tokens before and after a document, for which no output is compared


@dataclasses.dataclass
class _Outcome:
    """A model's results for a batch."""

    values: dict[str, Tensor]  # loss, output and parameter gradients, by the names used in error messages
    layers: list[Tensor]  # each layer's output, or this rank's part of it
    spec: ShardSpec | None  # the spec of this rank's part
    by_row: bool  # whether a head returns one output per row instead of one per token


def prove(
    model: PreTrainedModel,
    sp: SequenceParallel,
    facts: Facts,
    patch: Callable[[Any], object],
    unpatch: Callable[[Any], object],
) -> str:
    """Compare a small copy of a model, patched and unpatched, in fp32. The call is collective across the ranks of `sp`.

    Loss, outputs and all parameter gradients must agree to 1e-5 for a plain, a padded and a packed batch. A
    classifier's result for a row may come from padding or from one document of a pack. For padded and packed batches,
    only the classifier's base model is therefore compared. If all results agree, a model that takes media is also
    compared on batches with media.

    Args:
        model: An unwrapped transformers model. The model's tensors are not read.
        sp: The SequenceParallel with which to patch the copy.
        facts: The model's facts.
        patch: Patches the copy.
        unpatch: Restores the copy.

    Returns:
        A clause that explains why the model must not be called with media, or "" if media are supported.

    Raises:
        ConfigError: On all ranks, if the results do not agree or the copy does not run. The message names the first
            layer that differs.
    """
    began, error = time.monotonic(), None
    text, no_media = compared(model, sp, facts, patch, unpatch), facts.no_media
    if wrong := text.wrong:
        error = ConfigError(
            f"a {type(model).__name__} must be exact in a small copy before it is trained; got one {wrong}, "
            "call sp.attention from a model of your own (docs/models.md)"
        )
    assert_ranks_agree(sp.groups.control, PROOF, None, error=error)
    if not no_media and (wrong := compared(model, sp, facts, patch, unpatch, _media_batches).wrong):
        no_media = f"a small copy of it with media was one {wrong}"
    seconds = time.monotonic() - began
    log_once(f"{model.config.model_type}: checked against an unsplit copy, of few small layers, in {seconds:.1f} s")
    return no_media


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The difference between a small copy's results with and without sequence parallelism."""

    wrong: str = ""  # a clause that describes and locates the first error; "" if there is none
    kind: str = ""  # the kind of batch with the error: "plain", "padded" or "packed"
    largest: float = 0.0  # the largest relative difference


def compared(
    model: Any,
    sp: SequenceParallel,
    facts: Facts,
    patch: Callable[[Any], object],
    unpatch: Callable[[Any], object],
    batches: Callable[[Any, SequenceParallel], dict[str, Batch]] | None = None,
) -> Comparison:
    """Return the changes to a small copy's results that patching causes.

    Args:
        model: See `prove`.
        sp: See `prove`.
        facts: See `prove`.
        patch: See `prove`.
        unpatch: See `prove`.
        batches: A function that returns batches by kind, given the copy and `sp`, or None for text batches.
    """
    with _in_fp32(sp):
        try:
            return _compared(model, sp, facts, patch, unpatch, batches or _batches)
        except _Failed as reason:
            return Comparison(str(reason))


def _compared(
    model: Any,
    sp: SequenceParallel,
    facts: Facts,
    patch: Callable[[Any], object],
    unpatch: Callable[[Any], object],
    batches: Callable[[Any, SequenceParallel], dict[str, Batch]],
) -> Comparison:
    small = called = _on_all(sp, lambda: small_copy(model, sp.device)[0].train())
    tolerance, largest, by_row = TOLERANCE[sp.config.comm_dtype], 0.0, False
    for kind, batch in _on_all(sp, lambda: batches(small, sp)).items():
        if kind == "packed" and sp.size == 1:  # a single rank runs the plain model, which may mix documents
            continue
        # in the plain model, an index may count blocks from the start of a row's padding
        in_documents = kind == "packed" or (kind == "padded" and facts.gathered and not facts.counts_padding)
        if in_documents and facts.balance:  # the expert balance depends on all documents together
            set_balance_weight(small, 0.0)
        alone, place = _documents(batch) if in_documents else [batch], f", in a {kind} batch"
        if by_row:
            called = base_module(small, facts)
        expected = _on_all(sp, functools.partial(_outcome, called, alone), place)
        by_row = expected.by_row
        patch(small)
        got = _on_all(sp, functools.partial(_outcome, called, [batch], sp), place)
        unpatch(small)
        wrong, gap = difference(expected.values, got.values, tolerance)
        if _number_on_all(sp, bool(wrong)):  # unless the plain copy differs from its fp64 results by about as much
            try:
                truth = _on_all(sp, functools.partial(_in_fp64, called, alone))
                wrong, gap = difference(truth, got.values, tolerance, plain=expected.values)
            except _Failed as reason:  # without fp64 results, every difference counts as an error
                wrong = wrong and f"{wrong} (beside a plain copy in fp64 {reason})"
        largest = max(largest, gap)
        if _number_on_all(sp, bool(wrong)):
            wrong = f"whose {wrong or 'outcome differs'}{_unlike_layer(expected, got, tolerance)}{place}"
            return Comparison(wrong, kind, largest)
    return Comparison(largest=largest)


def _in_fp64(model: Any, batches: list[Batch]) -> dict[str, Tensor]:
    """Return a plain model's results without fp32 rounding."""
    given = [{name: x.double() if x.is_floating_point() else x for name, x in batch.items()} for batch in batches]
    with InFP64():
        return _outcome(fp64(copy.deepcopy(model)), given).values


class _Failed(Exception):
    """Raised on all ranks if a part of the proof fails on any rank."""


def _on_all(sp: SequenceParallel, compute: Callable[[], Any], place: str = "") -> Any:
    """Return a function's result once the function has succeeded on all ranks.

    Raise _Failed on all ranks if the function fails on any rank.
    """
    result, raised = None, ""
    try:
        result = compute()
    except Exception as reason:
        raised = f"that raised {type(reason).__name__}: {' '.join(str(reason).split()):.300}"
    if _number_on_all(sp, bool(raised)):
        raise _Failed(f"{raised or 'that raised an error on another rank'}{place}")
    return result


def _number_on_all(sp: SequenceParallel, number: int) -> int:
    return assert_ranks_agree(sp.groups.control, PROOF, None, number=int(number))


def _batches(model: Any, sp: SequenceParallel) -> dict[str, Batch]:
    tokens = max(23, 2 * sp.multiple + 5)
    tokens += tokens == model.config.num_labels  # otherwise a row's scores could be mistaken for one number per token
    ids = tokens_for(model.config, 2, tokens)
    mask, at = torch.ones_like(ids), torch.arange(tokens)
    mask[0, : tokens // 4] = mask[1, -(tokens // 3) :] = 0
    padded = ids.masked_fill(mask == 0, getattr(text_config(model.config), "pad_token_id", None) or 0)
    unseen = (mask == 0) | (at == tokens // 4)  # padding predicts no token
    rows = ((tokens // 3, 1, tokens - tokens // 3 - 1), (tokens // 2, tokens - tokens // 2))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    batches = {
        "plain": {"input_ids": ids, "labels": ids},
        "padded": {"input_ids": padded, "attention_mask": mask, "labels": ids.masked_fill(unseen, IGNORE)},
        "packed": {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORE)},
    }
    return {kind: {name: x.to(sp.device) for name, x in batch.items()} for kind, batch in batches.items()}


def _media_batches(model: Any, sp: SequenceParallel) -> dict[str, Batch]:
    batch, reason = media_batch(model)
    if batch is None:
        raise ValueError(f"no batch with media was found for it: {reason}")
    return {"media": batch, "padded media": padded(model, batch, (0, len(batch["input_ids"]) - 1))}


def _documents(batch: Batch) -> list[Batch]:
    """Return each document of a packed batch, or each unpadded row of a padded batch, as a separate batch."""
    documents = []
    for row, ids in enumerate(batch["input_ids"]):
        if "position_ids" in batch:
            spans = [*itertools.pairwise([*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), len(ids)])]
        else:
            real = batch["attention_mask"][row].nonzero().flatten().tolist()
            spans = [(real[0], real[-1] + 1)]
        for begin, end in spans:
            document = {name: batch[name][row : row + 1, begin:end] for name in ("input_ids", "labels")}
            around = (begin, len(ids) - end) if "attention_mask" in batch else (0, 0)
            documents.append({**document, AROUND: torch.tensor(around)})
    return documents


def _outcome(model: Any, batches: list[Batch], sp: SequenceParallel | None = None) -> _Outcome:
    """Return a model's results for a batch, or for the batch's documents one by one.

    Args:
        sp: The SequenceParallel of a patched model, or None for an unpatched model.
    """
    model.zero_grad()
    seen: list[list[Tensor]] = []
    hooks = []
    for layer in layers_of(model):
        seen.append([])
        hooks.append(
            layer.register_forward_hook(lambda _, args, out, to=seen[-1]: to.append(tensors_in(out)[0].detach()))
        )
    outputs: list[list[Tensor]] = []
    losses, by_row, total = [], False, _predicted(batches)
    has_loss = is_causal_lm(model) or any(name in MEDIA for batch in batches for name in batch)
    for batch in batches:
        number, around = _predicted([batch]), tuple(batch.get(AROUND, torch.zeros(2, dtype=torch.long)).tolist())
        given = {name: x for name, x in batch.items() if name != AROUND}
        output = call(model, **{name: x for name, x in given.items() if name != "labels" or (has_loss and number)})
        found = [x for x in _outputs(output.logits if has_loss else output) if x.dim() > 1]
        by_token = [_without_padding(x, batch) for x in found if x.shape[:2] == batch["input_ids"].shape]
        by_token = [F.pad(x, (*[0] * (2 * x.dim() - 4), *around)) if any(around) else x for x in by_token]
        by_row = bool(found) and not by_token and not has_loss
        outputs.append(by_token or found[:1])  # tiled losses do not compute logits
        if not has_loss:
            losses.append(torch.stack([_weighted(x) for x in outputs[-1]]).sum() / total)
        elif number:  # a document with a single token predicts nothing
            losses.append(output.loss * (number / total))
    loss = torch.stack(losses).sum()
    loss.backward()
    for hook in hooks:
        hook.remove()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    flat = torch.cat(gradients)
    parts = (flat if sp is None else sp.sum_over_ranks(flat) / sp.size).split([x.numel() for x in gradients])
    values = {f"{GRADIENT}{name}": part for name, part in zip(names, parts, strict=True)}
    layers = [torch.cat(x, dim=1) if len(x) > 1 and x[0].dim() == 3 else x[0] for x in seen if x]
    whole = {
        f"{OUTPUT} {index}" if index else OUTPUT: torch.cat([x.detach().flatten(0, 1) for x in each])
        for index, each in enumerate(zip(*outputs, strict=True))
    }
    spec = getattr(outputs[0][0], "shard_spec", None) if outputs[0] else None
    # if the model returns no loss, `loss` is our own sum, whose terms may cancel out
    of_head = {LOSS: loss.detach()} if has_loss else {}
    return _Outcome({**of_head, **whole, **values}, layers, spec, by_row)


def _outputs(output: Any) -> list[Tensor]:
    """Return an output's tensors, excluding tuples of per-layer tensors."""
    return [x for x in output.values() if isinstance(x, Tensor)] if isinstance(output, Mapping) else tensors_in(output)


def _weighted(output: Tensor) -> Tensor:
    """Return a weighted sum of an output, with a different weight for each channel."""
    if output.dim() < 3:
        return output.sum()
    return (output * torch.linspace(0.5, 1, output.shape[-1], device=output.device)).sum()


def _predicted(batches: list[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in batches)


def _without_padding(output: Tensor, batch: Batch) -> Tensor:
    """Return an output with zeros at padding, since values at padding are arbitrary."""
    mask = batch.get("attention_mask")
    return output if mask is None else output * mask.reshape(*mask.shape, *(1 for _ in output.shape[2:]))


def difference(
    expected: Mapping[str, Tensor],
    got: Mapping[str, Tensor],
    tolerance: float,
    order: float = math.inf,
    plain: Mapping[str, Tensor] | None = None,
) -> tuple[str, float]:
    """Return (a clause that describes the first difference, or "" if there is none; the largest difference).

    If all gradients are wrong by the same factor, the clause names the factor.

    Args:
        expected: Values by name. Gradients are named "gradient of ...".
        got: The values to test, with the same names.
        tolerance: The largest allowed relative difference.
        order: The order of the norm for measuring differences.
        plain: The plain model's values, if the `expected` values are more exact. Differences of up to twice the plain
            model's error are then also allowed.
    """
    gradients = {name: x for name, x in expected.items() if name.startswith(GRADIENT)}
    floor = FLOOR * max([float(x.norm(order)) for x in gradients.values()], default=0.0)
    floors = {name: floor if name in gradients else 0.0 for name in expected}
    gaps = {name: _gap(expected[name], x, floors[name], order) for name, x in got.items()}
    own = {name: _gap(expected[name], x, floors[name], order) for name, x in (plain or {}).items()}
    limits = {name: tolerance + 2 * min(own.get(name, 0.0), MOST_OWN) for name in got}
    first = next((name for name, gap in gaps.items() if not gap <= limits[name]), "")
    if first in gradients:
        products = [((got[name] * x).sum(), x.square().sum()) for name, x in gradients.items()]
        factor = float(sum(product for product, _ in products) / sum(square for _, square in products))
        scaled = {name: _gap(factor * x, got[name], abs(factor) * floor, order) for name, x in gradients.items()}
        if all(gap <= limits[name] for name, gap in scaled.items()):
            return f"gradients are {factor:.4g} times what they must be", max(gaps.values())
    return f"{first} differs by {gaps[first]:.1e}" if first else "", max(gaps.values())


def _gap(expected: Tensor, got: Tensor, floor: float = 0.0, order: float = math.inf) -> float:
    return float((got - expected).norm(order)) / max(float(expected.norm(order)), floor, 1e-30)


def _unlike_layer(expected: _Outcome, got: _Outcome, tolerance: float) -> str:
    """Return " from layer N on" for the first layer whose output differs.

    The call is collective across the ranks that share the sequence.
    """
    for number, (whole, local) in enumerate(zip(expected.layers, got.layers, strict=True)):
        if got.spec is None or local.shape[:2] != got.spec.lead:
            return ""
        shared = whole_of(local, got.spec).whole()
        if shared.numel() != whole.numel():  # only one of the two has padding
            return ""
        if not _gap(whole, shared.reshape(whole.shape)) <= tolerance:
            return f" from layer {number} on"
    return ""


@contextlib.contextmanager
def _in_fp32(sp: SequenceParallel) -> Iterator[None]:
    """Context manager in which devices compute gradients in fp32, not TF32, with a kernel that runs on any device."""
    runtime, config = sp.runtime, sp.runtime.config
    latent = "latent" if config.latent_attention == "auto" else config.latent_attention  # as in long sequences
    runtime.config = dataclasses.replace(config, kernel="chunked", latent_attention=latent)
    runtime.last_bound.clear()
    try:
        with torch.inference_mode(False), torch.enable_grad(), all_digits(sp.device.type):
            yield
    finally:
        runtime.config = config
        runtime.last_bound.clear()

"""The proof, before training, that a model of an untested family is exact: a small copy of it, whole and shared."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.errors import ConfigError, SeqParError
from ds_seqpar.runtime.agreement import all_reduce_sum, assert_ranks_agree
from ds_seqpar.runtime.log import log_once
from ds_seqpar.whole import whole_of
from ds_seqpar.whole.shard_spec import ShardSpec

from ..families import BALANCE, is_causal_lm
from .facts import Facts, text_config
from .look import tensors_in
from .small import call, layers_of, small_copy, tokens_for

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # by the dtype of messages
FLOOR = 3e-2  # a gradient is measured against this share of the greatest one at least


Batch = dict[str, Tensor]


@dataclasses.dataclass
class _Outcome:
    """What a model gives for a batch."""

    values: dict[str, Tensor]  # by what error messages call them
    gradients: dict[str, Tensor]  # by parameter
    layers: list[Tensor]  # what each layer gave, or this rank's part of it
    spec: ShardSpec | None = None  # of that part


def prove(
    model: PreTrainedModel,
    sp: SequenceParallel,
    facts: Facts,
    patch: Callable[[Any], object],
    unpatch: Callable[[Any], object],
) -> None:
    """Compare a small copy of a model, patched, with the same copy unpatched, in fp32. Collective over `sp`.

    Loss, outputs and the gradients of all parameters must agree to 1e-5, for a plain, a padded and a packed batch.

    Args:
        model: A transformers model, unwrapped. Its tensors are not read.
        sp: What it is to be patched with.
        facts: What is known of it.
        patch: Patches the copy.
        unpatch: Restores what it had.

    Raises:
        ConfigError: They do not agree, or the copy does not run; on all ranks. The sentence names the first layer that
            differs.
    """
    began, error = time.monotonic(), None
    with _in_fp32(sp):
        try:
            error = _compared(model, sp, facts, patch, unpatch)
        except SeqParError as reason:
            error = ConfigError(_sentence(model, f"that raised: {reason}"))
        except Exception as reason:
            error = ConfigError(
                _sentence(model, f"that raised {type(reason).__name__}: {' '.join(str(reason).split()):.300}")
            )
    assert_ranks_agree(sp.groups.control, "proof of a model", None, error=error)
    log_once(
        f"{model.config.model_type}: not among the tested families; proved on a small copy in "
        f"{time.monotonic() - began:.1f} s"
    )


def _sentence(model: Any, got: str) -> str:
    return (
        f"a {type(model).__name__}, which is not among the tested families, must be exact in a small copy before it is "
        f"trained; got one {got}, call sp.attention from a model of your own (docs/other_models.md)"
    )


def _compared(
    model: Any, sp: SequenceParallel, facts: Facts, patch: Callable[..., object], unpatch: Callable[..., object]
) -> ConfigError | None:
    small, _ = small_copy(model, sp.device)
    control: Any = sp.groups.control
    small.train()
    for kind, batch in _batches(small, sp).items():
        if kind == "packed" and facts.balance:  # a mean over all documents
            for owner, name in itertools.product((small, small.config, text_config(small.config)), BALANCE):
                if hasattr(owner, name):
                    setattr(owner, name, 0.0)
        expected = _outcome(small, _documents(batch) if kind == "packed" else [batch])
        patch(small)
        try:
            got = _outcome(small, [batch], sp)
            wrong = _difference(expected, got, TOLERANCE[sp.config.comm_dtype])
            if any(all_reduce_sum(control, [bool(wrong)], "proof of a model")):
                layer = _unlike_layer(expected, got, TOLERANCE[sp.config.comm_dtype])
                return ConfigError(_sentence(model, f"whose {wrong or 'outcome differs'}{layer}, in a {kind} batch"))
        finally:
            unpatch(small)
    return None


def _batches(model: Any, sp: SequenceParallel) -> dict[str, Batch]:
    tokens = max(23, 2 * sp.multiple + 5)
    ids = tokens_for(model.config, 2, tokens)
    mask, at = torch.ones_like(ids), torch.arange(tokens)
    mask[0, : tokens // 4] = mask[1, -(tokens // 3) :] = 0
    padded = ids.masked_fill(mask == 0, getattr(text_config(model.config), "pad_token_id", None) or 0)
    unseen = (mask == 0) | (at == tokens // 4)  # from padding no token is predicted
    rows = ((tokens // 3, 1, tokens - tokens // 3 - 1), (tokens // 2, tokens - tokens // 2))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    batches = {
        "plain": {"input_ids": ids, "labels": ids},
        "padded": {"input_ids": padded, "attention_mask": mask, "labels": ids.masked_fill(unseen, IGNORE)},
        "packed": {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORE)},
    }
    return {kind: {name: x.to(sp.device) for name, x in batch.items()} for kind, batch in batches.items()}


def _documents(batch: Batch) -> list[Batch]:
    """Return each document of a packed batch as a batch of its own."""
    documents = []
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for begin, end in itertools.pairwise(starts):
            documents.append({name: batch[name][row : row + 1, begin:end] for name in ("input_ids", "labels")})
    return documents


def _outcome(model: Any, batches: list[Batch], sp: SequenceParallel | None = None) -> _Outcome:
    """Return what a model gives for a batch, or for its documents one by one.

    Args:
        sp: What it is patched with; None: it is not.
    """
    model.zero_grad()
    layers = layers_of(model)
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_hook(lambda _, args, output, to=to: to.append(_states(output)))
        for layer, to in zip(layers, seen, strict=True)
    ]
    outputs, loss, total = [], torch.zeros((), device=batches[0]["input_ids"].device), _predicted(batches)
    try:
        for batch in batches:
            number, has_loss = _predicted([batch]), is_causal_lm(model)
            output = call(model, **{name: x for name, x in batch.items() if name != "labels" or (has_loss and number)})
            outputs.append(next(x for x in tensors_in(output) if x.dim() > 1))
            if not has_loss:
                loss = loss + _any_loss(outputs[-1], batch) / total
            elif number:  # a document of one token predicts nothing
                loss = loss + output.loss * (number / total)
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if sp is not None:
        gradients = _averaged(gradients, sp)
    return _Outcome(
        {
            "loss": loss.detach(),
            "output": _rows([x.detach() * _real(batch, x) for x, batch in zip(outputs, batches, strict=True)]),
        },
        gradients,
        [_rows(x) if x[0].dim() == 3 else x[0] for x in seen if x],
        getattr(outputs[0], "shard_spec", None),
    )


def _states(output: Any) -> Tensor:
    return tensors_in(output)[0].detach()


def _predicted(batches: list[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in batches)


def _any_loss(output: Tensor, batch: Batch) -> Tensor:
    """Return a loss of an output that has none: all of its numbers, each with another weight."""
    weights = torch.arange(1, output.shape[-1] + 1, device=output.device) / output.shape[-1]
    return (output * _real(batch, output) * weights).sum()


def _real(batch: Batch, output: Tensor) -> Tensor | float:
    """Return 0 for padding, which may be anything, and else 1."""
    mask = batch.get("attention_mask")
    return 1.0 if mask is None or mask.shape != output.shape[:2] else mask[..., None].to(output.dtype)


def _rows(parts: list[Tensor]) -> Tensor:
    """Join what documents gave, in the order of their rows, as one row; a whole batch's stays as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _averaged(gradients: dict[str, Tensor], sp: SequenceParallel) -> dict[str, Tensor]:
    flat = torch.cat([x.flatten() for x in gradients.values()])
    parts = (sp.sum_over_ranks(flat) / sp.size).split([x.numel() for x in gradients.values()])
    return {name: part.view_as(gradients[name]) for name, part in zip(gradients, parts, strict=True)}


def _difference(expected: _Outcome, got: _Outcome, tolerance: float) -> str:
    """Return what differs first, "" where nothing does."""
    for name, value in expected.values.items():
        if not (gap := _gap(value, got.values[name].reshape(value.shape), 0.0)) <= tolerance:
            return f"{name} differs by {gap:.1e}"
    floor = FLOOR * max((float(x.abs().max()) for x in expected.gradients.values()), default=0.0)
    if missing := expected.gradients.keys() ^ got.gradients.keys():
        return f"gradient of {min(missing)} is missing"
    gaps = {name: _gap(x, got.gradients[name], floor) for name, x in expected.gradients.items()}
    worst = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf, default="")
    return f"gradient of {worst} differs by {gaps[worst]:.1e}" if worst and not gaps[worst] <= tolerance else ""


def _gap(expected: Tensor, got: Tensor, floor: float) -> float:
    return float((got - expected).abs().max()) / max(float(expected.abs().max()), floor, 1e-30)


def _unlike_layer(expected: _Outcome, got: _Outcome, tolerance: float) -> str:
    """Return " from layer N on" for the first layer whose output differs. Collective over the sequence's ranks."""
    for number, (whole, local) in enumerate(zip(expected.layers, got.layers, strict=True)):
        if got.spec is None or local.shape[:2] != got.spec.lead:
            return ""
        shared = whole_of(local, got.spec).whole().reshape(whole.shape)
        if not _gap(whole, shared, 0.0) <= tolerance:
            return f" from layer {number} on"
    return ""


@contextlib.contextmanager
def _in_fp32(sp: SequenceParallel) -> Iterator[None]:
    """Context manager in which devices compute in fp32, not in TF32, with a kernel that takes it everywhere."""
    precision, runtime, config = torch.get_float32_matmul_precision(), sp.runtime, sp.runtime.config
    torch.set_float32_matmul_precision("highest")
    runtime.config = dataclasses.replace(config, kernel="chunked")
    runtime.last_bound.clear()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        runtime.config = config
        runtime.last_bound.clear()

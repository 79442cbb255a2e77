"""Prepare batches for sequence-parallel training: shift labels, shard tensors, and compute the divisor of the loss.

The correct gradient is d(sum of all token losses) / N, where N is the number of non-ignored labels in one optimizer
step, counted over all ranks and micro-steps. ZeRO averages gradients over all ranks, and `engine.backward` divides by
the G micro-steps. Each rank must therefore divide its local sum by `num_items_in_batch = N / (world * G)`, and N must
be known before the first backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import InputError
from ..base.fingerprint import Fingerprint
from ..base.log import log_once
from ..base.on_devices import to_device
from ..core.compiler.sharding.masks import Mask
from ..guards import mismatch_hints
from ..guards.agreement import all_reduce_sum, assert_ranks_agree, together
from .batch_layout import EQUAL, BatchLayout
from .checks import IGNORE, check_range, labels_of, predicted_from_padding, warn_of_left_padding
from .documents import READ, Lengths, documents_of
from .inputs import INPUTS, InputSpec
from .part import Part
from .sharding import Sharding
from .shared_prompts import SharedPrompts
from .value_checks import ValueChecks, describe, fingerprint_of


def shard_microbatches(
    sp: Sharding,
    microbatches: Sequence[Mapping[str, Any]],
    causal: bool,
    steps: int | None,
    device: torch.device | str | None = None,
    inputs: Mapping[str, InputSpec] | None = None,
) -> list[dict[str, Any]]:
    """Return this rank's shard of every micro-batch of an optimizer step.

    All ranks that share sequences must pass the same micro-batches. Every rank in the job must call this function.

    The loss that a rank computes from its shard is only the rank's part of the loss. `sp.mean_loss` returns the loss
    over all ranks. The local loss yields G times the gradient, and `engine.backward` divides by G. Without DeepSpeed,
    call `(loss / G).backward()` and average gradients over all ranks, as DDP does.

    Args:
        sp: The SequenceParallel.
        microbatches: G mappings of names to values: - `labels`: unshifted labels, int64 (B, S), with -100 for tokens
            that do not count;
            - `input_ids` (B, S) or `inputs_embeds` (B, S, hidden);
            - `attention_mask`: (B, S), with 0 for padding, which may be before or after a row's tokens but not between
              tokens;
            - document boundaries in a format that `documents.documents_of` reads: `position_ids` that restart from 0,
              cumulative lengths, or `seq_idx`;
            - other tensors that `inputs` or a patched model declares;
            - non-tensors and 0-dim tensors, which are returned unchanged.
        causal: Whether attention is causal.
        steps: Number of micro-batches (G), if known.
        device: Device to which this rank's tensors are copied. If None, each tensor stays on its device.
        inputs: Declarations of additional tensors, by name (see `data.inputs`).

    Returns:
        A dict for each micro-batch: - this rank's part of every input, as declared. Inputs with an entry per token are
            (B, local tokens, ...);
            - `shift_labels`: labels, moved before sharding to the tokens that predict them. The last token of a
              document gets -100;
            - `position_ids`: int64 (B, local tokens), with global positions, or positions within documents if there are
              any;
            - `num_items_in_batch`: a float, by which transformers models divide the local sum of token losses;
            - `placement`: a `BatchLayout`, or `EQUAL` if none is needed. Patched models recognize shards by this entry.
              Documents, left padding (any padding with causal=False), and lengths that ranks cannot share equally
              require a `BatchLayout`. With documents or left padding, rows are concatenated in tensors of shape (1,
              local tokens, ...).

    Raises:
        InputError: Raised before training on a rank whose micro-batches cannot be sharded or contain an undeclared
            tensor.
        DisagreementError: Raised on the other ranks, and on all ranks if the number of micro-batches differs or ranks
            that share a sequence have different micro-batches.
    """
    advice = functools.partial(mismatch_hints.of_batches, began=sp.calls.count > 0)
    with together(
        sp.control_world, "making the micro-batches of a step", "batches", peers=sp.groups.control, among_peers=True,
        call="shard_batches", advice=advice,
    ) as agreed:  # fmt: skip
        microbatches = list(microbatches) if isinstance(microbatches, Iterable) else [microbatches]
        table = sp.inputs_with(inputs)
        sharded, counts, agreed.value = _prepare(sp, microbatches, causal, steps, device, table)
    number, remedy = {"micro-batches": len(sharded)}, "some have fewer: give every rank those of whole steps"
    assert_ranks_agree(sp.control_world, "step", number, call="shard_batches", advice=lambda by_rank: remedy)
    total, from_padding = all_reduce_sum(sp.control_world, counts, "shard_batches")
    if from_padding and dist.get_rank() == 0:
        warn_of_left_padding()
    sp.unused.begin()
    for batch in sharded:
        batch["num_items_in_batch"] = max(total, 1) / (sp.size * sp.data_size * len(microbatches))
        batch.setdefault("placement", EQUAL)
        if not sp.vocabularies:  # patched models always read positions
            batch["position_ids"] = sp.unused.watch(batch["position_ids"])
    return sharded


def _prepare(
    sp: Sharding,
    microbatches: list[Mapping[str, Any]],
    causal: bool,
    steps: int | None,
    device: torch.device | str | None,
    table: Mapping[str, InputSpec],
) -> tuple[list[dict[str, Any]], list[int], list[dict[str, str]]]:
    """Prepare this rank's micro-batches without communication.

    Returns:
        This rank's shard of each micro-batch, a list of two label counts, and a fingerprint of each whole micro-batch.
        The first count is the number of non-ignored labels in the shards. The second count is the number of labels in
        the whole micro-batches that only left padding could predict. Ranks that share a sequence compare the
        fingerprints.
    """
    checked = [check_batch(sp, batch, causal) for batch in microbatches]
    sharded = [_shard(batch, table, batch.inputs["labels"].device) for batch in checked]
    if not microbatches or (steps is not None and len(microbatches) != steps):
        raise InputError(
            f"shard_batches needs the {steps or 'at least 1'} micro-batches of an optimizer step "
            f"(gradient_accumulation_steps); got {len(microbatches)}, give it all micro-batches of an optimizer step"
        )
    count = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in sharded)
    from_padding = sum(int(batch.from_padding) for batch in checked if batch.from_padding is not None)
    on_device = [_on_device(batch, device) for batch in sharded]
    return on_device, [count, from_padding], [fingerprint(batch) for batch in microbatches]


def shard_call(
    sp: Sharding,
    batch: Mapping[str, Any],
    checks: ValueChecks,
    on_cpu: Mapping[str, Tensor] | None = None,
    table: Mapping[str, InputSpec] = INPUTS,
    end_to_end: bool = False,
) -> tuple[dict[str, Any], float | Tensor]:
    """Return this rank's shard of a whole batch that is passed to a model's `forward`.

    No communication takes place. The host reads only padding and document boundaries from devices, since these
    determine how tokens are sharded.

    Args:
        sp: The SequenceParallel.
        batch: Batch as in `shard_microbatches`. `labels` are optional, and `inputs_embeds` (B, S, hidden) may replace
            `input_ids`.
        checks: Collector of checks on the batch's values.
        on_cpu: CPU copies, by name, of tensors on a device.
        table: Declarations of all inputs, by name.
        end_to_end: Whether rows must be concatenated because their masks differ.

    Returns:
        The shard (without `num_items_in_batch`) on the tokens' device, and the number of non-ignored labels in the
        whole batch. The number is a float, or a 0-dim tensor if labels are counted on a device.

    Raises:
        InputError: The batch cannot be sharded.
    """
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    whole = {name: x for name, x in batch.items() if x is not None}
    known = {**whole, **(on_cpu or {})}
    known |= {name: _read(name, known[name]) for name in READ & known.keys()}
    shape = (labels_of(whole) if "labels" in whole else tokens).shape[:2]
    checked = _checked(sp, whole, known, True, shape, checks, end_to_end)
    if checked.from_padding is not None:
        checks.require(checked.from_padding, _warn_if_any)
    return _on_device(_shard(checked, table, tokens.device), tokens.device), checked.counted


def shard_shared_prompts(
    sp: Sharding,
    batch: Mapping[str, Tensor],
    shared: SharedPrompts,
    checks: ValueChecks,
    on_cpu: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Any], float | Tensor]:
    """Return this rank's shard of a batch whose repeated prompts are merged.

    No communication takes place.

    Args:
        sp: The SequenceParallel.
        batch: `input_ids` and `labels`, int64 (rows, tokens).
        shared: The batch's merged prompts.
        checks: Collector of checks on the batch's values.
        on_cpu: CPU copies, by name, of tensors on a device.

    Returns:
        The shard and the number of non-ignored labels, as in `shard_call`. The position_ids count the padding before a
        row's tokens, and the mask contains the number of rows that share each token.
    """
    tensors = {**batch, **check_range({**batch, **(on_cpu or {})}, sp.vocabulary, checks)}
    placement: Any = sp.place(len(shared.tokens), shared.documents, parents=shared.parents)
    shifted, device = torch.nn.functional.pad(tensors["labels"][:, 1:], (0, 1), value=IGNORE), batch["input_ids"].device
    whole = {"input_ids": shared.joined(tensors["input_ids"]), "shift_labels": shared.joined(shifted)}
    shard: dict[str, Any] = {name: sp.shard(x, 1, placement) for name, x in whole.items()}
    shard |= {"labels": shard["shift_labels"], "placement": placement}
    positions = sp.local_positions(placement, device)[None]
    offsets = 0 if shared.offsets is None else sp.shard(shared.offsets[None], 1, placement).to(device)
    shard["position_ids"] = positions + offsets
    if sp.keeps_masks:
        shard["attention_mask"] = sp.shard(shared.weights[None], 1, placement).to(device)
    counts = whole["shift_labels"] != IGNORE
    return _on_device(shard, device), float(counts.sum()) if checks.reads(counts) else counts.sum()


def _read(name: str, x: Any) -> Any:
    """Copy a tensor that determines the sharding to the CPU."""
    if not isinstance(x, Tensor) or x.device.type == "cpu":
        return x
    log_once(
        f"sequence_parallel: {name} on {x.device} is read by the host in each forward, which waits for the device: "
        "leave it on the CPU, or leave it out where nothing is padding and each row is one document"
    )
    return x.cpu()


def counted_labels(sp: Sharding, batch: Mapping[str, Any]) -> Tensor:
    """Return a whole batch's labels, int64 (B, S), with -100 for labels that do not count.

    The first label of each row does not count. Labels predicted from another document or from padding do not count
    either. No communication takes place.

    Raises:
        InputError: The batch cannot be sharded.
    """
    checked = check_batch(sp, {name: x for name, x in batch.items() if name in INPUTS}, causal=True)
    if checked.from_padding is not None:
        _warn_if_any(checked.from_padding.tolist())
    return torch.nn.functional.pad(checked.inputs["shift_labels"][:, :-1], (1, 0), value=IGNORE)


@dataclasses.dataclass(frozen=True)
class CheckedBatch:
    """A whole batch that has passed all checks."""

    # tensors by name; shift_labels are the labels, if any, moved to the tokens that predict them, with -100 for the
    # last token of each document
    inputs: dict[str, Any]
    mask: Tensor | None  # bool (B, S), False for padding; None: no padding
    part: Part  # selects this rank's tokens
    counted: float | Tensor  # number of non-ignored labels: a float if labels are on the CPU
    from_padding: Tensor | None  # number of labels that only left padding could predict, int64 (1,); None: no padding


def check_batch(sp: Sharding, batch: Mapping[str, Any], causal: bool) -> CheckedBatch:
    """Check a whole batch without communication, or raise InputError if the batch cannot be sharded."""
    return _checked(sp, batch, batch, causal, labels_of(batch).shape, ValueChecks())


def _checked(
    sp: Sharding,
    batch: Mapping[str, Any],
    known: Mapping[str, Any],
    causal: bool,
    shape: tuple[int, ...],
    checks: ValueChecks,
    end_to_end: bool = False,
) -> CheckedBatch:
    """Check a whole batch of shape (rows, tokens); `known` is the batch with some of its tensors on the CPU."""
    rows, seq = shape
    if not rows or not seq:
        raise InputError(
            f"a batch needs at least one row and one token; got {rows} rows of {seq} tokens, leave it out on all "
            "ranks, or give a group that has no sequence left one whose labels are all -100"
        )
    if isinstance(ids := known.get("input_ids"), Tensor) and ids.shape != shape:
        got = f"input_ids {tuple(ids.shape)} and labels {tuple(shape)}"
        raise InputError(f"a batch needs a label for each token, -100 where it does not count; got {got}, give as many")
    usable = check_range(known, sp.vocabulary, checks)
    inputs, labels = {**batch, **usable}, {**known, **usable}.get("labels")
    mask, segments, placement = _layout_of(sp, known, rows, seq, causal, end_to_end)
    part, from_padding = Part(sp, rows, seq, segments, placement), None
    counted: float | Tensor = 0.0
    if labels is not None:
        inputs["shift_labels"] = part.shifted(inputs["labels"], 1, IGNORE)
        counts = (inputs["shift_labels"] if labels is inputs["labels"] else part.shifted(labels, 1, IGNORE)) != IGNORE
        counted = float(counts.sum()) if checks.reads(counts) else counts.sum()
        if mask is not None:
            mask = to_device(mask, labels.device)
            checks.require(counts.masked_fill(mask, False).sum()[None], _padding_error)
            from_padding = predicted_from_padding(labels, mask)
    return CheckedBatch(inputs, mask, part, counted, from_padding)


def _layout_of(
    sp: Sharding, batch: Mapping[str, Any], rows: int, seq: int, causal: bool, end_to_end: bool
) -> tuple[Tensor | None, Lengths | None, BatchLayout | None]:
    """Return a batch's padding mask, the lengths of its documents and runs of padding, and its layout.

    The mask, the lengths and the layout are computed on the host. The mask is None if there is no padding. The lengths
    are None if each row is one document. The layout is None if the configured layout suffices.
    """
    mask = checked_mask(batch.get("attention_mask"), (rows, seq))
    on_left = mask is not None and not bool(mask[:, 0].all())
    documents = documents_in(batch, mask, rows, seq)
    segments = documents or ((seq,) * rows if end_to_end else None)
    if mask is not None and (on_left or not causal):  # a causal mask alone would not hide the padding
        segments = _padding_as_documents(documents or (seq,) * rows, mask)
    placement = sp.place(rows * seq, segments, causal=causal) if segments else sp.place(seq, causal=causal)
    if segments and placement is not None:
        placement = dataclasses.replace(placement, rows=rows, restarts=Mask.documents_of(documents or (seq,) * rows))
    return mask, segments, placement


def _padding_error(values: list[int]) -> InputError | None:
    if not values[0]:
        return None
    # the label of the first padding token, which is often an end-of-text token, is predicted from a real token
    return InputError(
        "labels must not count where they are predicted from padding, whose attention mask is dropped; got "
        f"{values[0]} such labels, set labels to -100 where attention_mask is 0"
    )


def lengths_of(batch: Mapping[str, Any]) -> Lengths:
    """Return the number of unpadded tokens in each document of a whole batch.

    Each row is one document unless the batch marks document boundaries. The batch must contain input_ids (B, S) or
    inputs_embeds (B, S, hidden), and needs no labels.

    Raises:
        InputError: The batch's documents or padding cannot be read.
    """
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise InputError(
            f"a batch needs input_ids (batch, seq) or inputs_embeds (batch, seq, hidden); got {describe(tokens)}, "
            "give one of them"
        )
    rows, seq = tokens.shape[:2]
    mask = checked_mask(batch.get("attention_mask"), tokens.shape[:2])
    documents = documents_in(batch, mask, rows, seq) or (seq,) * rows
    return documents if mask is None else tuple(int(document.sum()) for document in mask.flatten().split(documents))


def labels_without(batch: Mapping[str, Any], left_out: Tensor) -> Tensor:
    """Return a whole batch's labels, with -100 for the left-out examples.

    Args:
        batch: Whole batch whose rows are examples, or packs of examples.
        left_out: bool (examples,), with True for examples whose labels must not count.

    Raises:
        InputError: Examples are packed, but the batch does not mark the boundaries between examples.
    """
    labels = batch["labels"]
    lengths: Lengths = (labels.shape[1],) * len(labels)
    if len(lengths) != len(left_out):
        if bool((left_out == left_out[0]).all()):
            return labels.masked_fill(left_out[0].to(labels.device), IGNORE)
        lengths = documents_of(batch, *labels.shape) or lengths
    if len(lengths) != len(left_out):
        raise InputError(
            f"evaluation of packs needs to know whose tokens are whose, where the last batch repeats some; got "
            f"{len(left_out)} examples in {len(lengths)} documents, set per_device_eval_batch_size=1, or "
            "dataloader_drop_last=True"
        )
    by_token = left_out.repeat_interleave(torch.tensor(lengths, device="cpu")).view(labels.shape)
    return labels.masked_fill(by_token.to(labels.device), IGNORE)


def documents_in(batch: Mapping[str, Any], mask: Tensor | None, rows: int, seq: int) -> Lengths | None:
    """Return the lengths of the documents that the batch marks, including padding, or None if no documents are
    marked.
    """
    continued = dict(batch)
    if mask is not None and isinstance(positions := continued.get("position_ids"), Tensor):
        continued["position_ids"] = _continued_through_padding(positions, mask)
    return documents_of(continued, rows, seq)


def checked_mask(mask: object, shape: tuple[int, ...]) -> Tensor | None:
    """Return an attention mask as bool on the CPU, or None if there is no padding.

    Raises:
        InputError: The mask has another shape, values other than 0 and 1, or padding between tokens.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != shape:
        raise InputError(f"attention_mask must be of shape {tuple(shape)} (0 for padding); got {describe(mask)}")
    mask = mask.detach().cpu()
    if bool((invalid := (mask != 0) & (mask != 1)).any()):
        row, token = invalid.nonzero()[0].tolist()
        raise InputError(
            f"attention_mask must be 0 for padding and 1 for every token; got {mask[row, token].item():g} at token "
            f"{token} of row {row}, give numbers of documents as seq_idx, or positions that begin again"
        )
    mask = mask.bool()
    if bool(mask.all()):
        return None
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0), value=False)
    if bool((begins.sum(1) > 1).any()):
        raise InputError(
            "padding must be before or after a row's tokens; got attention_mask with zeros between ones, leave it out "
            "and give documents by position_ids that begin again at 0, or by seq_idx, with labels of -100 at the zeros"
        )
    return mask


def _continued_through_padding(positions: Tensor, mask: Tensor) -> Tensor:
    """Return position_ids with new values for padding, since collators use arbitrary values for padding.

    Positions continue in the padding after a row's tokens, and start at 0 in the padding before the tokens.
    """
    rows, seq = mask.shape
    if positions.shape not in ((seq,), (1, seq), (rows, seq)):
        return positions  # documents_of raises an error for this shape
    token = torch.arange(seq, device="cpu")
    last = torch.where(mask, token, -1).cummax(1).values  # index of the last real token at or before each token
    by_row = positions.cpu().expand(rows, seq)
    return torch.where(last < 0, token, by_row.gather(1, last.clamp(min=0)) + token - last)


def _padding_as_documents(lengths: Lengths, mask: Tensor) -> Lengths:
    """Return the document lengths of concatenated rows, with each run of padding as a separate document."""
    flat = mask.flatten()
    edges = ((flat[1:] != flat[:-1]).nonzero().flatten() + 1).tolist()
    cuts = sorted({*Mask.documents_of(lengths), *edges, flat.numel()})
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def _shard(batch: CheckedBatch, table: Mapping[str, InputSpec], device: torch.device) -> dict[str, Any]:
    """Return this rank's shard of a batch. Positions and mask are on `device`."""
    part, sp, placement = batch.part, batch.part.sp, batch.part.placement
    sharded = part.of(table, batch.inputs)
    positions = sp.local_positions(part.seq if placement is None else placement, device).clone()[None]
    if placement is None or placement.rows is None:
        positions = positions.expand(part.rows, -1)
    sharded["position_ids"] = positions
    if sp.keeps_masks and batch.mask is not None:
        sharded["attention_mask"] = to_device(sp.shard(batch.mask.long(), 1, placement), device)
    return sharded if placement is None else {**sharded, "placement": placement}


def _warn_if_any(values: list[int]) -> None:
    """Warn on the first rank about labels that only left padding could predict. `values` contains the number of such
    labels.
    """
    if values[0] and dist.get_rank() == 0:
        warn_of_left_padding()


def _on_device(batch: dict[str, Any], device: torch.device | str | None) -> dict[str, Any]:
    """Return the batch with its tensors on a device, or unchanged if `device` is None."""
    if device is None:
        return batch
    return {name: to_device(x, device) if isinstance(x, Tensor) else x for name, x in batch.items()}


def fingerprint(batch: Mapping[str, Any] | list[Any]) -> dict[str, str]:
    """Return fingerprints that must be equal on all ranks that share a sequence.

    A tensor's fingerprint consists of its dtype, its shape and a digest of its values. A list of rows has a single
    digest.
    """
    if isinstance(batch, list):  # an object's repr may contain its address
        return {"rows": f"{len(batch)} {Fingerprint.of(re.sub(' at 0x[0-9a-fA-F]+', '', repr(batch)))}"}
    return {name: fingerprint_of(x) for name, x in sorted(batch.items()) if isinstance(x, Tensor)}

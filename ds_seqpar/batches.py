"""Batches for sequence parallel training: shifted, then sharded, with the divisor that keeps the gradient contract.

The gradient wanted is d(sum of all token losses) / N, N the label tokens of one optimiser step over all ranks and all
its micro-steps. ZeRO averages gradients over the world and `engine.backward` divides by the G micro-steps, so each rank
divides its local sum by `num_items_in_batch = N / (world * G)`. That needs N before the first backward of the window.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .documents import Lengths, documents_of, without_documents
from .errors import InputError, as_error
from .placement import Placement, starts_of
from .runtime import causes, trusted
from .runtime.agreement import Alike, agree, in_words, sums
from .runtime.groups import Groups
from .tokens import IGNORE, Vocabulary, check_range, describe, labels_of, predicted_from_padding, warn_of_left_padding


class Sharing(Protocol):
    """What a batch needs of the SequenceParallel that it is sharded with."""

    data_rank: int
    groups: Groups

    @property
    def keeps_masks(self) -> bool: ...

    @property
    def control_world(self) -> dist.ProcessGroup: ...

    @property
    def vocabulary(self) -> Vocabulary | None: ...

    def place(self, seq: int, documents: Lengths | None = None, *, causal: bool = True) -> Placement | None: ...

    def position_ids(self, seq: int, placement: Placement | None = None) -> Tensor: ...

    def shard(self, x: Tensor, dim: int, placement: Placement | None = None) -> Tensor: ...


def shard_window(
    sp: Sharing,
    window: Sequence[Mapping[str, Any]],
    causal: bool,
    steps: int | None,
    device: torch.device | str | None = None,
) -> list[dict[str, Any]]:
    """This rank's part of every micro-batch of one accumulation window, given the same window on all ranks that share
    its sequences. Collective over the world; raises InputError or DisagreementError on every rank, before training.

    Each batch: labels int64 (B, S), with -100 for tokens that do not count, and tensors of shape (B, S, ...) such as
    input_ids. Packed documents as `documents.documents_of` reads them (`position_ids` that begin again, cumulative
    lengths, `seq_idx`); rows may differ. attention_mask (B, S), 0 for padding before or after a row's tokens, not
    between them. Values that are not tensors pass through. steps: the window's length, where it is known. device: where
    this rank's tensors go; None leaves each where it is.

    Returns for each batch: its tensors sharded; `labels` sharded, and `shift_labels`: labels shifted to the token they
    are predicted from *before* sharding, none across a document's end; `position_ids`: global, or within documents
    where there are some; `num_items_in_batch`: divide the local sum of token losses by it (transformers models do).
    Where the configured layout does not say all (documents, left padding, with causal=False any padding, a length that
    ranks cannot share equally), also `placement`: see `Placement`. Rows with documents or left padding lie end to end
    in it, and tensors then are (1, this rank's tokens, ...).

    The loss a rank then sees is its own part: `sp.mean_loss` gives the loss. G times the gradient is in it, which
    `engine.backward` divides by G: without DeepSpeed call `(loss / G).backward()`, and average gradients over the
    world, as DDP does.
    """
    sharded: list[dict[str, Any]] = []
    counts, value, error = [0, 0], None, None
    try:
        window = list(window) if isinstance(window, Iterable) else [window]
        sharded, counts, value = _prepare(sp, window, causal, steps, device)
    except Exception as reason:  # also of a generator that makes the batches, and of tensors that cannot be sliced
        error = as_error("making the batches of a window failed", reason)
    peers = Alike(sp.data_rank, sp.groups.control)
    how: dict[str, Any] = {"alike": peers, "call": "shard_batches", "advice": causes.of_batches}
    most = agree(sp.control_world, "batches", value, error=error, number=len(sharded), **how)
    world = dist.get_world_size()
    total, from_padding, batches = sums(sp.control_world, [*counts, len(sharded)], "shard_batches")
    if batches != most * world:
        lengths = in_words(sp.control_world, len(sharded), "shard_batches")
        raise InputError(f"all ranks must be given as many micro-batches; got {lengths}, give every rank whole windows")
    if from_padding and dist.get_rank() == 0:
        warn_of_left_padding()
    for batch in sharded:
        batch["num_items_in_batch"] = max(total, 1) / (world * len(window))
    return sharded


def _prepare(
    sp: Sharing,
    window: list[Mapping[str, Any]],
    causal: bool,
    steps: int | None,
    device: torch.device | str | None,
) -> tuple[list[dict[str, Any]], list[int], list[dict[str, str]]]:
    """(this rank's part of each batch; how many labels count in it, and how many of the whole would be predicted from
    padding on the left; what peers compare)."""
    checked = [check_batch(sp, batch, causal) for batch in window]
    sharded = [_shard(sp, batch) for batch in checked]
    if not window or (steps is not None and len(window) != steps):
        raise InputError(
            f"shard_batches needs one accumulation window of {steps or 'at least 1'} micro-batches "
            f"(gradient_accumulation_steps); got {len(window)}, give it all micro-batches of an optimiser step"
        )
    count = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in sharded)
    from_padding = sum(predicted_from_padding(batch.tensors["labels"], batch.mask) for batch in checked)
    on_device = [_moved(batch, device) for batch in sharded]
    return on_device, [count, from_padding], [fingerprint(batch) for batch in window]


def shard_call(sp: Sharing, given: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """(this rank's part of a whole batch that a model is called with, how many labels count in all of it). As
    `shard_window` has it, but that labels may be missing, and that nobody has counted what to divide by. Local."""
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    batch = dict(given)
    if batch.get("labels") is None:
        batch["labels"] = torch.full(tokens.shape[:2], IGNORE, device="cpu")
    checked = check_batch(sp, batch, causal=True)
    _warn(checked)
    shard = _shard(sp, checked)
    if given.get("labels") is None:
        del shard["labels"], shard["shift_labels"]
    return _moved(shard, tokens.device), int((_shifted(checked) != IGNORE).sum())


def counted_labels(sp: Sharing, batch: Mapping[str, Any]) -> Tensor:
    """The labels of a whole batch, with -100 for those that do not count: a row's first, and those that would be
    predicted across a document's end or from padding. Raises InputError where the batch cannot be sharded. Local."""
    checked = check_batch(sp, batch, causal=True)
    _warn(checked)
    return torch.nn.functional.pad(_shifted(checked)[:, :-1], (1, 0), value=IGNORE)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A whole batch that can be sharded. tensors: all but its mask, positions and documents. ends (B, S): whether a
    token is the last of its document, or of its row. mask: None where nothing is padding."""

    tensors: dict[str, Any]
    ends: Tensor
    mask: Tensor | None
    placement: Placement | None


def check_batch(sp: Sharing, batch: Mapping[str, Any], causal: bool) -> Checked:
    """Raises InputError where a batch cannot be sharded."""
    labels = labels_of(batch)
    rows, seq = labels.shape
    rest = without_documents({name: x for name, x in batch.items() if name != "attention_mask"})
    for name, value in rest.items():
        if isinstance(value, Tensor) and value.shape[:2] != labels.shape:
            raise InputError(
                f"every tensor of a batch must begin with labels' shape {tuple(labels.shape)}; got {name} "
                f"{tuple(value.shape)}, take it out and shard it with sp.shard(x, dim) or pass it to the model yourself"
            )
    check_range(batch, sp.vocabulary)
    mask = _checked_mask(batch.get("attention_mask"), labels)
    on_left = mask is not None and not bool(mask[:, 0].all())
    documents = apart = _documents_of(batch, mask, rows, seq)
    if mask is not None and (on_left or not causal):  # what a causal mask does not keep apart
        apart = _padding_apart(documents or (seq,) * rows, mask)
    placement = sp.place(rows * seq, apart, causal=causal) if apart else sp.place(seq, causal=causal)
    if apart and placement is not None:
        placement = dataclasses.replace(placement, rows=rows, restarts=starts_of(documents or (seq,) * rows))
    starts = torch.zeros(rows * seq + 1, dtype=torch.bool, device="cpu")
    starts[[*starts_of(apart or (seq,) * rows), rows * seq]] = True
    checked = Checked(
        tensors=rest,
        ends=starts[1:].view(rows, seq),
        mask=mask,
        placement=placement,
    )
    # a label on the first padding token, often the end of the text, is predicted from a real one
    if mask is not None and (count := int(((_shifted(checked) != IGNORE) & ~mask.to(labels.device)).sum())):
        raise InputError(
            "labels must not count where they are predicted from padding, whose attention mask is dropped; got "
            f"{count} such labels, set labels to -100 where attention_mask is 0"
        )
    return checked


def lengths_of(batch: Mapping[str, Any]) -> Lengths:
    """Tokens of the documents of a whole batch, without padding. Raises InputError where it cannot be sharded."""
    labels = labels_of({"labels": batch.get("input_ids"), **batch})
    rows, seq = labels.shape
    mask = _checked_mask(batch.get("attention_mask"), labels)
    documents = _documents_of(batch, mask, rows, seq) or (seq,) * rows
    return documents if mask is None else tuple(int(part.sum()) for part in mask.flatten().split(documents))


def is_whole(batch: Mapping[str, Any], rows: int, seq: int) -> bool:
    """Whether a batch's position_ids count through whole sequences of `seq` tokens, or through documents in them."""
    try:
        mask = _checked_mask(batch.get("attention_mask"), torch.empty(rows, seq))
        _documents_of(batch, mask, rows, seq)
    except InputError:
        return False
    return True


def _documents_of(batch: Mapping[str, Any], mask: Tensor | None, rows: int, seq: int) -> Lengths | None:
    given = dict(batch)
    if mask is not None and isinstance(positions := given.get("position_ids"), Tensor):
        given["position_ids"] = _counting_through(positions, mask)
    return documents_of(given, rows, seq)


def _checked_mask(mask: object, labels: Tensor) -> Tensor | None:
    """On the CPU, as bool."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        raise InputError(f"attention_mask must be of shape {tuple(labels.shape)} (0 for padding); got {describe(mask)}")
    mask = mask.detach().cpu().bool()
    if bool(mask.all()):
        return None
    if _pieces(mask) > 1:
        raise InputError(
            "padding must be before or after a row's tokens; got attention_mask with zeros between ones, give the "
            "pieces as documents of their own"
        )
    return mask


def _counting_through(positions: Tensor, mask: Tensor) -> Tensor:
    """Positions that go on through the padding of rows, where they may be anything: from 0 before a row's tokens."""
    rows, seq = mask.shape
    if positions.shape not in ((seq,), (1, seq), (rows, seq)):
        return positions  # which is said to be wrong where they are read
    at = torch.arange(seq, device="cpu")
    last = torch.where(mask, at, -1).cummax(1).values  # of the tokens up to each, the last that is not padding
    given = positions.cpu().expand(rows, seq)
    return torch.where(last < 0, at, given.gather(1, last.clamp(min=0)) + at - last)


def _pieces(mask: Tensor) -> int:
    """The most stretches of ones that a row has."""
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=False)
    return int((mask & ~before).sum(1).max())


def _padding_apart(lengths: Lengths, mask: Tensor) -> Lengths:
    """The documents with padding, a stretch each, as documents of their own."""
    flat = mask.flatten()
    edges = ((flat[1:] != flat[:-1]).nonzero().flatten() + 1).tolist()
    cuts = sorted({*starts_of(lengths), *edges, flat.numel()})
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def _shard(sp: Sharing, batch: Checked) -> dict[str, Any]:
    placement, (rows, seq) = batch.placement, batch.tensors["labels"].shape
    whole = {**batch.tensors, "shift_labels": _shifted(batch)}
    sharded = {name: sp.shard(x, 1, placement) if isinstance(x, Tensor) else x for name, x in whole.items()}
    positions = sp.position_ids(seq, placement)[None]
    if placement is None or placement.rows is None:
        positions = positions.expand(rows, -1)
    # they are right with this placement only, so that one that is left out later shows
    maker = sp if placement is None else placement
    sharded["position_ids"] = trusted.remember(positions.to(batch.tensors["labels"].device), maker)
    if sp.keeps_masks and batch.mask is not None:
        mask = sp.shard(batch.mask.long(), 1, placement).to(batch.tensors["labels"].device)
        sharded["attention_mask"] = trusted.remember(mask, sp)
    return sharded if placement is None else {**sharded, "placement": placement}


def _warn(batch: Checked) -> None:
    if predicted_from_padding(batch.tensors["labels"], batch.mask) and dist.get_rank() == 0:
        warn_of_left_padding()


def _moved(batch: dict[str, Any], device: torch.device | str | None) -> dict[str, Any]:
    """The batch on a device. What was made here is remembered there too."""
    if device is None:
        return batch
    moved = {name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in batch.items()}
    for name in {"position_ids", "attention_mask"} & batch.keys():
        trusted.keep(batch[name], moved[name])
    return moved


def _shifted(batch: Checked) -> Tensor:
    """Each label at the token that it is predicted from, none at the last token of a document."""
    labels = batch.tensors["labels"]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    return shifted.masked_fill(batch.ends.to(labels.device), IGNORE)


def fingerprint(batch: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks of a sequence: shapes, dtypes and a digest of the values."""
    found = {}
    for name, x in sorted(batch.items()):
        if isinstance(x, Tensor):
            content = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            found[name] = f"{describe(x)} {hashlib.blake2b(content, digest_size=4).hexdigest()}"
    return found

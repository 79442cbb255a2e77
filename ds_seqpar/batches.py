"""Batches for sequence parallel training: shifted, then sharded, with the divisor that keeps the gradient contract.

The gradient wanted is d(sum of all token losses) / N, N the label tokens of one optimiser step over all ranks and all
its micro-steps. ZeRO averages gradients over the world and `engine.backward` divides by the G micro-steps, so each rank
divides its local sum by `num_items_in_batch = N / (world * G)`. That needs N before the first backward of the window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InputError, as_error
from .running import trusted
from .running.agreement import Alike, agree, in_words, sums
from .running.groups import Groups

IGNORE = -100


class Sharing(Protocol):
    """What a batch needs of the SequenceParallel that it is sharded with."""

    data_rank: int
    groups: Groups
    keeps_masks: bool

    @property
    def control_world(self) -> dist.ProcessGroup: ...

    def check_length(self, seq: int) -> None: ...

    def position_ids(self, seq: int) -> Tensor: ...

    def shard(self, x: Tensor, dim: int) -> Tensor: ...


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
    input_ids. attention_mask (B, S) may pad on the right: padding that follows all real tokens is never seen by them
    under a causal mask, so the mask is checked here, whole, and dropped (causal=False refuses padding, and so do labels
    that would be predicted from it). Values that are not tensors pass through. steps: the window's length, where it is
    known. device: where this rank's tensors go; None leaves each where it is.

    Returns for each batch: its tensors sharded; `labels` sharded, and `shift_labels`: labels shifted to the token they
    are predicted from *before* sharding; `position_ids`: global; `num_items_in_batch`: divide the local sum of token
    losses by it (transformers models do). The loss a rank then sees is its own part: `sp.mean_loss` gives the loss.
    G times the gradient is in it, which `engine.backward` divides by G: without DeepSpeed call `(loss / G).backward()`,
    and average gradients over the world, as DDP does.
    """
    sharded: list[dict[str, Any]] = []
    count, value, error = 0, None, None
    try:
        window = list(window) if isinstance(window, Iterable) else [window]
        sharded, count, value = _prepare(sp, window, causal, steps, device)
    except Exception as reason:  # also of a generator that makes the batches, and of tensors that cannot be sliced
        error = as_error("making the batches of a window failed", reason)
    peers = Alike(sp.data_rank, sp.groups.control)
    most = agree(
        sp.control_world, "batches", value, error=error, number=len(sharded), alike=peers, call="shard_batches"
    )
    world = dist.get_world_size()
    total, batches = sums(sp.control_world, [count, len(sharded)], "shard_batches")
    if batches != most * world:
        lengths = in_words(sp.control_world, len(sharded), "shard_batches")
        raise InputError(f"all ranks must be given as many micro-batches; got {lengths}, give every rank whole windows")
    for batch in sharded:
        batch["num_items_in_batch"] = max(total, 1) / (world * len(window))
    return sharded


def _prepare(
    sp: Sharing,
    window: list[Mapping[str, Any]],
    causal: bool,
    steps: int | None,
    device: torch.device | str | None,
) -> tuple[list[dict[str, Any]], int, list[dict[str, str]]]:
    """(this rank's part of each batch, the labels that count in it, what peers compare)."""
    checked = [check_batch(sp, batch, causal) for batch in window]
    sharded = [_shard(sp, batch, whole) for batch, whole in zip(checked, window, strict=True)]
    if not window or (steps is not None and len(window) != steps):
        raise InputError(
            f"shard_batches needs one accumulation window of {steps or 'at least 1'} micro-batches "
            f"(gradient_accumulation_steps); got {len(window)}, give it all micro-batches of an optimiser step"
        )
    count = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in sharded)
    on_device = [_moved(batch, device) for batch in sharded]
    return on_device, count, [_fingerprint(batch) for batch in window]


def check_batch(sp: Sharing, batch: Mapping[str, Any], causal: bool) -> dict[str, Any]:
    """The batch without its mask and positions, which are checked. Raises InputError where it cannot be sharded."""
    labels = _labels(batch)
    sp.check_length(labels.shape[1])
    rest = dict(batch)
    mask, positions = rest.pop("attention_mask", None), rest.pop("position_ids", None)
    if mask is not None:
        _check_mask(mask, labels, causal)
    if positions is not None and not _is_range(positions, labels.shape[1]):
        raise InputError(
            "position_ids must count 0, 1, 2, ... through every sequence; got others (packed documents are not "
            "supported yet), leave them out and shard_batches makes them"
        )
    for name, value in rest.items():
        if isinstance(value, Tensor) and value.shape[:2] != labels.shape:
            raise InputError(
                f"every tensor of a batch must begin with labels' shape {tuple(labels.shape)}; got {name} "
                f"{tuple(value.shape)}, take it out and shard it with sp.shard(x, dim) or pass it to the model yourself"
            )
    return rest


def _labels(batch: Mapping[str, Any]) -> Tensor:
    """What a batch must have. Raises InputError where it has not."""
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch must be a mapping of names to tensors; got {_describe(batch)}")
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.dtype != torch.int64:
        raise InputError(
            "a batch needs labels of shape (batch, seq), int64, -100 where a token does not count; "
            f"got {_describe(labels)}, for a language model pass labels=input_ids.clone()"
        )
    if "shift_labels" in batch:
        raise InputError(
            "a batch needs labels that are not shifted; got shift_labels, leave the shift to shard_batches"
        )
    return labels


def _check_mask(mask: Tensor, labels: Tensor, causal: bool) -> None:
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        raise InputError(
            f"attention_mask must be of shape {tuple(labels.shape)} (0 for padding); got {_describe(mask)}"
        )
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise InputError(
            "padding must be on the right, after all real tokens; got attention_mask with padding before a real token, "
            "set tokenizer.padding_side = 'right'"
        )
    if not causal and not bool(mask.all()):
        raise InputError("attention without a causal mask takes no padding; got attention_mask with zeros")
    # a label on the first padding token, often the end of the text, is predicted from a real one
    if count := int(((_shifted(labels) != IGNORE) & ~mask).sum()):
        raise InputError(
            "labels must not count where they are predicted from padding, whose attention mask is dropped; got "
            f"{count} such labels, set labels to -100 where attention_mask is 0"
        )


def _shard(sp: Sharing, batch: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    labels = batch["labels"]
    whole = {**batch, "shift_labels": _shifted(labels)}
    sharded = {name: sp.shard(x, 1) if isinstance(x, Tensor) else x for name, x in whole.items()}
    positions = sp.position_ids(labels.shape[1]).to(labels.device).expand(labels.shape[0], -1)
    mask = given.get("attention_mask")
    if sp.keeps_masks and mask is not None and not bool(mask.bool().all()):
        sharded["attention_mask"] = trusted.remember(sp.shard(mask, 1), sp)
    return {**sharded, "position_ids": trusted.remember(positions, sp)}


def _moved(batch: dict[str, Any], device: torch.device | str | None) -> dict[str, Any]:
    """The batch on a device. What was made here is remembered there too."""
    if device is None:
        return batch
    moved = {name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in batch.items()}
    for name in {"position_ids", "attention_mask"} & batch.keys():
        trusted.keep(batch[name], moved[name])
    return moved


def _shifted(labels: Tensor) -> Tensor:
    """Each label at the token that it is predicted from."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def _is_range(positions: object, seq: int) -> bool:
    if not isinstance(positions, Tensor) or not positions.dim() or positions.shape[-1] != seq:
        return False
    return bool((positions == torch.arange(seq, device=positions.device)).all())


def _fingerprint(batch: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks of a sequence: shapes, dtypes and a digest of the values."""
    found = {}
    for name, x in sorted(batch.items()):
        if isinstance(x, Tensor):
            content = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            found[name] = f"{_describe(x)} {hashlib.blake2b(content, digest_size=4).hexdigest()}"
    return found


def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return "none" if x is None else type(x).__name__

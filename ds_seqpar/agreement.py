"""Ranks check that they agree before they communicate, so that a mistake on one is a sentence on all and not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .errors import CommunicationError, DisagreementError, SeqParError


def agree(
    group: dist.ProcessGroup,
    what: str,
    value: object,
    *,
    error: SeqParError | None = None,
    number: int = 0,
    colors: Sequence[int] | None = None,
) -> list[int]:
    """One all-gather of three integers over a group that carries CPU tensors. Returns every rank's `number`.

    value: must have the same repr on all ranks of the group; with `colors` (one a group rank), on those of one color.
    error: what keeps this rank from going on; it is raised here, and a DisagreementError that quotes it on the others.
    """
    size = dist.get_world_size(group)
    colors = colors or [0] * size
    digest = hashlib.blake2b(repr((what, value)).encode(), digest_size=7).digest()
    mine = torch.tensor([error is not None, int.from_bytes(digest, "big"), number], dtype=torch.int64)
    gathered = torch.empty(size, 3, dtype=torch.int64)
    try:
        dist.all_gather(list(gathered.unbind()), mine, group=group)
    except RuntimeError as reason:
        raise CommunicationError(
            f"ranks could not compare their {what} before going on, mostly because another rank ended: {reason}"
        ) from reason
    flags, digests, numbers = gathered.t().tolist()
    # decided from what everybody has, so that all ranks take the slow path or none
    if any(flags) or len(set(zip(colors, digests, strict=True))) > len(set(colors)):
        _explain(group, what, value, error, colors)
    return numbers


def _explain(
    group: dist.ProcessGroup, what: str, value: object, error: SeqParError | None, colors: Sequence[int]
) -> None:
    """Gathers the sentences (slow) and raises, on every rank."""
    seen: list[tuple[str, str, str | None]] = [("", "", None)] * len(colors)
    dist.all_gather_object(seen, (what, repr(value), error and str(error)), group=group)
    if error:
        raise error
    names = [dist.get_global_rank(group, rank) for rank in range(len(colors))]
    for name, (_, _, sentence) in zip(names, seen, strict=True):
        if sentence:
            raise DisagreementError(f"rank {name} cannot go on: {sentence}")
    for color in sorted(set(colors)):
        members = [rank for rank in range(len(colors)) if colors[rank] == color]
        if len({seen[rank][:2] for rank in members}) > 1:
            given = "; ".join(f"rank {names[rank]}: {seen[rank][0]} {seen[rank][1]}" for rank in members)
            raise DisagreementError(f"all ranks that share a sequence must be given the same; got {given}")

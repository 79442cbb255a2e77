"""Ranks check that they agree before they communicate, so that a mistake on one is a sentence on all and not a hang."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..errors import DisagreementError, SeqParError
from .comm import failing
from .telling import told_by

Fields = dict[str, str]
SHOWN = 4  # differing fields, groups of ranks and runs of rank numbers that a sentence holds at most


def agree(
    group: dist.ProcessGroup,
    what: str,
    value: object,
    *,
    error: SeqParError | None = None,
    number: int = 0,
    colors: Sequence[int] | None = None,
    call: str = "",
) -> list[int]:
    """One all-gather of three integers over a group that carries CPU tensors. Returns every rank's `number`.

    value: must be the same, by repr, on all ranks of the group; with `colors` (one a group rank), on those of one
    color. A mapping, a dataclass, a list or a tuple of such is compared field by field, and where ranks differ only
    those fields are named that do.
    error: what keeps this rank from going on; it is raised here, and a DisagreementError that quotes it on the others.
    call: what users call to come here, named where a rank does not come.
    """
    size = dist.get_world_size(group)
    fields = fields_of(value)
    digest = hashlib.blake2b(repr((what, sorted(fields.items()))).encode(), digest_size=7).digest()
    mine = torch.tensor([error is not None, int.from_bytes(digest, "big"), number], dtype=torch.int64)
    gathered = torch.empty(size, 3, dtype=torch.int64)
    with failing(call or f"the comparison of {what}", group):
        dist.all_gather(list(gathered.unbind()), mine, group=group)
    flags, digests, numbers = gathered.t().tolist()
    colors = colors or [0] * size
    # decided from what everybody has, so that all ranks take the slow path or none
    if any(flags) or len(set(zip(colors, digests, strict=True))) > len(set(colors)):
        _explain(group, what, fields, error, colors)
    return numbers


def fields_of(value: object) -> Fields:
    """Name -> repr of all that may differ by itself. A tuple inside is a whole, as shapes are."""
    return dict(_fields(value))


def _fields(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list):
        value = {f"[{number}]": part for number, part in enumerate(value)}
    if isinstance(value, tuple) and not name and not all(isinstance(part, int) for part in value):
        value = {str(number): part for number, part in enumerate(value)}  # not shown: see _named
        yield from ((name, part) for name, part in value.items() if isinstance(part, str))  # as "causal=True"
        value = {name: part for name, part in value.items() if not isinstance(part, str)}
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _fields(part, f"{name} {key}".strip())
    else:
        yield name, repr(value)


def _explain(
    group: dist.ProcessGroup, what: str, fields: Fields, error: SeqParError | None, colors: Sequence[int]
) -> None:
    """Gathers the sentences (slow) and raises, on every rank; one of them prints it if nobody catches it."""
    seen: list[tuple[str, Fields, str | None]] = [("", {}, None)] * len(colors)
    with failing(f"the comparison of {what}", group):
        dist.all_gather_object(seen, (what, fields, error and str(error)), group=group)
    names = dist.get_process_group_ranks(group)
    sentences = [sentence for _, _, sentence in seen]
    key = f"{group.group_name}/{hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()}"
    if any(sentences):
        first = sentences.index(str(error)) if error else next(rank for rank, said in enumerate(sentences) if said)
        cause = names[first]
        raise told_by(
            error or DisagreementError(f"rank {cause} cannot go on: {sentences[first]}"), cause, f"{key}/{cause}"
        )
    for color in sorted(set(colors)):
        members = [rank for rank, its in enumerate(colors) if its == color]
        if given := differences({names[rank]: seen[rank][:2] for rank in members}):
            who = "all ranks" if len(members) == dist.get_world_size() else "all ranks that share a sequence"
            raise told_by(DisagreementError(f"{who} must be given the same {given}"), names[members[0]], key)


def differences(given: Mapping[int, tuple[str, Fields]]) -> str:
    """What differs between ranks, in words, given rank -> (what it compares, its fields); "" if nothing does.

    Ranks that gave the same stand together: "ranks 0-2: size 4; rank 3: size 2".
    """
    if len({what for what, _ in given.values()}) > 1:
        by_call = {rank: what for rank, (what, _) in given.items()}
        return f"calls; got {_grouped(by_call)}"
    first = next(iter(given.values()))
    names = {name: None for _, fields in given.values() for name in fields}  # in order
    differing = [name for name in names if len({fields.get(name) for _, fields in given.values()}) > 1]
    if not differing:
        return ""
    more = [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
    by_rank = {
        rank: ", ".join([_named(name, fields.get(name)) for name in differing[:SHOWN]] + more)
        for rank, (_, fields) in given.items()
    }
    return f"{first[0]}; got {_grouped(by_rank)}"


def _named(name: str, value: str | None) -> str:
    name = name.lstrip("0123456789 ")
    return f"{name} {value}".strip() if value is not None else f"no {name}"


def _grouped(by_rank: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    shown = [f"{ranks_in_words(ranks)}: {value}" for value, ranks in list(groups.items())[:SHOWN]]
    return "; ".join(shown + ([f"and {len(groups) - SHOWN} other values"] if len(groups) > SHOWN else []))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`; many scattered ones are cut short."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:SHOWN])
    rest = sum(len(run) for run in runs[SHOWN:])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {rest} more" if rest else "")

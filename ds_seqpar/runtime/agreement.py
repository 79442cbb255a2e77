"""Ranks check that they agree before they communicate, so that a mistake on one is a sentence on all and not a hang."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DisagreementError, SeqParError
from .comm import failing, greatest
from .telling import told_by

Fields = dict[str, str]
Advice = Callable[[Mapping[int, Fields]], str]  # rank -> its fields, of ranks that differ; to a clause, or ""
SHOWN = 4  # differing fields, groups of ranks and runs of rank numbers that a sentence holds at most


def agree(
    group: dist.ProcessGroup | None,
    what: str,
    value: object,
    *,
    error: SeqParError | None = None,
    number: int = 0,
    alike: Alike | None = None,
    call: str = "",
    advice: Advice | None = None,
) -> int:
    """Over a group that carries CPU tensors (None: this rank alone), in log4(ranks) steps of four integers. Returns
    the greatest `number` of any rank.

    value: must be the same, by repr, on all ranks of the group; with `alike`, on those of its part. A mapping, a
    dataclass, a list or a tuple of such is compared field by field, and where ranks differ only those fields are named
    that do. What is compared often may be given as `Compared`.
    error: what keeps this rank from going on; it is raised here, and a DisagreementError that quotes it on the others.
    call: what users call to come here, named where a rank does not come.
    advice: says why ranks differ, and what to do, where that can be told.
    """
    value = value if isinstance(value, Compared) else Compared(what, value)
    failed, digest, doing = int(error is not None), value.digest, call or f"the comparison of {what}"
    # known to everybody, so that all ranks take the slow path or none
    if alike is None or _size(alike.group) == _size(group):
        wrong, most = _compare(group, failed, digest, number, doing)
    else:
        wrong, most = _compare(group, failed, _digest(what), number, doing)  # do all ranks make this call?
        if not wrong:
            differs, _ = _compare(alike.group, 0, digest, 0, doing)
            wrong, _ = _compare(group, differs, 0, 0, doing)
    if wrong:
        _explain(group, what, value.fields, error, alike.number if alike else 0, advice)
    return most


def _digest(*content: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=7).digest(), "big")


class Compared:
    """A value in the form in which ranks compare it, for what is compared often."""

    def __init__(self, what: str, value: object) -> None:
        self.fields = fields_of(value)
        self.digest = _digest(what, sorted(self.fields.items()))


@dataclasses.dataclass(frozen=True)
class Alike:
    """A part of a larger group in which ranks must have the same. number: that of the part; group: its ranks."""

    number: int
    group: dist.ProcessGroup | None


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _compare(group: dist.ProcessGroup | None, wrong: int, digest: int, number: int, doing: str) -> tuple[int, int]:
    """(whether anything is wrong or any digest another, the greatest number) on any rank of the group."""
    if group is None or _size(group) == 1:
        return wrong, number
    with failing(doing, group):
        wrong, most, least, number = greatest((wrong, digest, -digest, number), group)
    return int(wrong or most != -least), number


def sums(group: dist.ProcessGroup, numbers: Sequence[float], call: str) -> list[float]:
    """The sum over ranks of each number, in double precision: the same bits on all of them, since gloo adds up each
    element in one place. After an agreement, so that all ranks come."""
    total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    with failing(call, group):
        dist.all_reduce(total, group=group)
    return total.tolist()


def in_words(group: dist.ProcessGroup, value: object, call: str) -> str:
    """What each rank has (slow), for a sentence: "ranks 0-2: 4; rank 3: 2". After an agreement, so that all come."""
    everyones = gathered(group, (call, str(value)))
    return _grouped({rank: theirs for rank, (_, theirs) in enumerate(everyones)})


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
    group: dist.ProcessGroup | None,
    what: str,
    fields: Fields,
    error: SeqParError | None,
    part: int,
    advice: Advice | None,
) -> None:
    """Gathers the sentences (slow) and raises, on every rank; one of them prints it if nobody catches it."""
    seen = gathered(group, (what, fields, error and str(error), part))
    names = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    sentences = [sentence for _, _, sentence, _ in seen]
    key = f"{group and group.group_name}/{hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()}"
    if any(sentences):
        first = sentences.index(str(error)) if error else next(rank for rank, said in enumerate(sentences) if said)
        cause = names[first]
        raise told_by(
            error or DisagreementError(f"rank {cause} cannot go on: {sentences[first]}"), cause, f"{key}/{cause}"
        )
    calls_differ = len({what for what, *_ in seen}) > 1
    parts = [0 if calls_differ else part for *_, part in seen]
    for part in sorted(set(parts)):
        members = [rank for rank, theirs in enumerate(parts) if theirs == part]
        why = advice({names[rank]: seen[rank][1] for rank in members}) if advice and not calls_differ else ""
        if given := differences({names[rank]: seen[rank][:2] for rank in members}, why):
            who = "all ranks" if len(members) == dist.get_world_size() else "all ranks that share a sequence"
            raise told_by(DisagreementError(f"{who} must be given the same {given}"), names[members[0]], key)


def gathered(group: dist.ProcessGroup | None, mine: Any) -> list[Any]:
    """What every rank has given, by rank."""
    if group is None or _size(group) == 1:
        return [mine]
    seen: list[Any] = [None] * _size(group)
    with failing(f"the comparison of {mine[0]}", group):
        dist.all_gather_object(seen, mine, group=group)
    return seen


def differences(given: Mapping[int, tuple[str, Fields]], why: str = "") -> str:
    """What differs between ranks, in words, given rank -> (what it compares, its fields); "" if nothing does. why: the
    cause and what to do, where they are known.

    Ranks that gave the same stand together: "ranks 0-2: size 4; rank 3: size 2".
    """
    if len({what for what, _ in given.values()}) > 1:
        by_call = {rank: what for rank, (what, _) in given.items()}
        return f"calls; got {_grouped(by_call)}"
    first = next(iter(given.values()))
    names = differing({rank: fields for rank, (_, fields) in given.items()})
    if not names:
        return ""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    by_rank = {
        rank: ", ".join([_named(name, fields.get(name)) for name in names[:SHOWN]] + more)
        for rank, (_, fields) in given.items()
    }
    return f"{first[0]}{why and f', but {why}'}; got {_grouped(by_rank)}"


def differing(given: Mapping[int, Fields]) -> list[str]:
    """The names of the fields that ranks do not all have alike, in order."""
    names = {name: None for fields in given.values() for name in fields}
    return [name for name in names if len({fields.get(name) for fields in given.values()}) > 1]


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

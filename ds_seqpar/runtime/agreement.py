"""Ranks check that they agree before they communicate, so that an error of one rank is raised on all and none hangs."""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .. import compat
from ..errors import MOST_SHOWN, DisagreementError, SeqParError, ranks_in_words
from . import profiling
from .comm import all_reduce_max, end_unfinished, explaining_failure

Fields = dict[str, str]
# (fields by rank, of ranks that differ) -> a clause of a sentence, or ""; None: the difference is no error
Advice = Callable[[Mapping[int, Fields]], str | None]
BACKWARD = "backward"  # what ranks compare before a backward that communicates; see `backward.py`
LEFT_OUT = "add 0 * out.sum() where a rank's loss leaves attention out"
ALL = "on all ranks"  # in the remedy of calls that no step needs, as those of a rank that prints


def assert_ranks_agree(
    group: dist.ProcessGroup | None,
    name: str,
    value: object,
    *,
    error: SeqParError | None = None,
    number: int = 0,
    peers: dist.ProcessGroup | None = None,
    among_peers: bool = False,
    call: str = "",
    advice: Advice | None = None,
) -> int:
    """Raise on all ranks of a group unless all pass the same value and none passes an error.

    Ranks send four integers, directly or through a tree.

    Args:
        group: a group that carries CPU tensors; None for this rank alone.
        name: of the value, in errors; the same on all ranks.
        value: what must be the same, by repr, on all ranks of the group, or with `among_peers` on those of `peers`.
            Mappings, dataclasses, and lists and tuples of them are compared field by field, and an error names the
            fields that differ. A value that is compared often may be passed as `Compared`.
        error: why this rank cannot go on. This rank raises it; the others raise a DisagreementError that quotes it.
        number: a number whose maximum is needed.
        peers: this rank's part of the group, whose ranks first check that all of them make this call, and that none is
            in a backward, for which it would wait there. None: this rank alone.
        among_peers: whether values may differ between parts of the group.
        call: the function that users call to come here, named where a rank does not make the call.
        advice: returns why ranks differ, and what to do, where that is known.

    Returns:
        The greatest `number` of any rank.

    Raises:
        SeqParError: `error`, on the rank that passed it.
        DisagreementError: on all other ranks, and on all if values differ.
        CommunicationError: if a rank does not make the call.
    """
    for owner in sorted(journals):
        journals[owner].settle_before(group)
    entry, has_error = Entry.of(name, value, call, advice), int(error is not None)
    digest = entry.compared.digest
    among_peers &= peers is not group
    # all ranks get the same result, so either all of them take the slow path or none
    if 1 < _size(peers) < _size(group) and Comparison(peers, 0, digest_of(name), 0, entry.subject).result()[0]:
        raise_difference(peers, [entry], error)
    compared = digest_of(name) if among_peers else digest
    wrong, greatest = Comparison(group, has_error, compared, number, entry.subject).result()
    if among_peers and not wrong:
        differs, _ = Comparison(peers, 0, digest, 0, entry.subject).result()
        wrong, _ = Comparison(group, differs, 0, 0, entry.subject).result()
    if wrong:
        raise_difference(group, [entry], error, ranks_of(peers)[0] if among_peers else 0)
    return greatest


class Settles(Protocol):
    def settle_before(self, group: dist.ProcessGroup | None) -> None: ...


journals: weakref.WeakValueDictionary[int, Settles] = weakref.WeakValueDictionary()  # by the number of their groups


def digest_of(*content: object) -> int:
    """Return a hash of the contents' repr that is the same in every process, of 56 bits."""
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=7).digest(), "big")


class Compared:
    """A value in the form in which ranks compare it: its fields and their digest."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self._fields = name, fields_of(value)
        self.digest = digest_of(name, sorted(self._fields.items()))

    @property
    def fields(self) -> Fields:
        """The fields by name, read only where ranks differ."""
        return self._fields


class Entry(NamedTuple):
    """A value that ranks compare, and how errors speak of it. For `call` and `advice` see `assert_ranks_agree`."""

    compared: Compared
    call: str
    advice: Advice | None

    @classmethod
    def of(cls, name: str, value: object, call: str = "", advice: Advice | None = None) -> Entry:
        return cls(value if isinstance(value, Compared) else Compared(name, value), call, advice)

    @property
    def remedy(self) -> str:
        """What to do where a rank does not make the call, which stands in parentheses in `call`."""
        return self.call.partition(" (")[2].removesuffix(")")

    @property
    def subject(self) -> str:
        return self.call or f"the comparison of {self.compared.name}"


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, by group rank."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


class Comparison:
    """A comparison of numbers between the ranks of a group, which runs beside what follows until `result`.

    Args:
        group: a group that carries CPU tensors; None for this rank alone.
        wrong: 1 if this rank has an error, else 0.
        digest: must be the same on all ranks.
        number: a number whose maximum is needed.
        subject: what compares, for errors.
    """

    def __init__(self, group: dist.ProcessGroup | None, wrong: int, digest: int, number: int, subject: str) -> None:
        end_unfinished()
        self.group, self.subject, self.numbers = group, subject, [wrong, digest, -digest, number]
        # a selective checkpoint would look for the tensors' operations among those that it saved
        span = profiling.span(f"agree on {subject}")
        with span, compat.without_dispatch_modes(), explaining_failure(subject, group) as wait:
            self.end = all_reduce_max(self.numbers, group, wait) if group is not None and _size(group) > 1 else None

    def result(self) -> tuple[int, int]:
        """Wait for the other ranks. Return (1 if any is wrong or digests differ, else 0; the greatest number)."""
        if self.end is not None:
            span = profiling.span(f"agreed on {self.subject}")
            with span, compat.without_dispatch_modes(), explaining_failure(self.subject, self.group) as wait:
                self.numbers = self.end(wait)
        wrong, greatest, negated_least, number = self.numbers
        return int(wrong or greatest != -negated_least), number


def all_reduce_sum(group: dist.ProcessGroup, numbers: Sequence[float], call: str) -> list[float]:
    """Return the sum over ranks of each number, in fp64.

    It has the same bits on all ranks, since gloo adds up each element in one place. Collective; call it after an
    agreement, so that all ranks make the call.

    Args:
        group: a group that carries CPU tensors.
        numbers: this rank's summands, as many as on every other rank.
        call: the user's call, for errors.
    """
    total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    with explaining_failure(call, group):
        dist.all_reduce(total, group=group)
    return total.tolist()


def rank_values(group: dist.ProcessGroup, value: object, call: str) -> str:
    """Return the value of each rank, for a sentence: "ranks 0-2: 4; rank 3: 2".

    Collective and slow; call it after an agreement, so that all ranks make the call.
    """
    values = all_gather_objects(group, (call, str(value)))
    return _grouped({rank: text for rank, (_, text) in enumerate(values)})


def fields_of(value: object) -> Fields:
    """Return the repr of each field that is compared by itself, by name. A tuple inside is one field, as shapes are."""
    return dict(_fields(value))


def _fields(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list):
        value = {f"[{number}]": item for number, item in enumerate(value)}
    if isinstance(value, tuple) and not name and not all(isinstance(item, int) for item in value):
        value = {str(number): item for number, item in enumerate(value)}  # not shown: see _named
        yield from ((name, item) for name, item in value.items() if isinstance(item, str))  # as "causal=True"
        value = {name: item for name, item in value.items() if not isinstance(item, str)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _fields(item, f"{name} {key}".strip())
    else:
        yield name, repr(value)


def raise_difference(
    group: dist.ProcessGroup | None, entries: Sequence[Entry], error: SeqParError | None, part: int = 0,
    before: int | None = None,
) -> None:  # fmt: skip
    """Gather errors and fields (slow), and raise one sentence on every rank; if uncaught, one rank prints it.

    Args:
        group: as for `Comparison`.
        entries: what this rank has compared since ranks agreed last, this call's own at the end.
        error: why this rank cannot go on.
        part: the part of the group among whose ranks values must be the same.
        before: how many calls of the step were compared before these; None where an error comes out of its own call.
    """
    values = [(entry.compared.name, entry.compared.fields, entry.remedy) for entry in entries]
    reports = all_gather_objects(group, (entries[-1].compared.name, values, error and str(error), part))
    if group is not None:
        failures[group] = failures.get(group, 0) + 1
    global_ranks = ranks_of(group)
    sentences = [sentence for *_, sentence, _ in reports]
    if any(sentences):
        first = sentences.index(str(error)) if error else next(rank for rank, text in enumerate(sentences) if text)
        failed_rank = global_ranks[first]
        raise error or DisagreementError(f"rank {failed_rank} cannot go on: {sentences[first]}")
    for place in range(max(len(values) for _, values, *_ in reports)):
        at_place = [values[place] if place < len(values) else ("no call", Fields(), "") for _, values, *_ in reports]
        calls_differ = len({name for name, *_ in at_place}) > 1
        parts = [0 if calls_differ else part for *_, part in reports]
        where = "" if before is None else f" (call {before + place + 1} of the step)"
        for part in sorted(set(parts)):
            members = {global_ranks[rank]: at_place[rank] for rank, number in enumerate(parts) if number == part}
            advice = None if calls_differ else entries[place].advice
            why = advice({rank: fields for rank, (_, fields, _) in members.items()}) if advice else ""
            why = _why_other_calls(members) if calls_differ else why
            if why is not None and (difference := differences(members, why, where)):
                audience = "all ranks" if len(members) == dist.get_world_size() else "all ranks that share a sequence"
                sentence = f"{audience} must be given the same {difference}"
                raise DisagreementError(sentence)


# how often all ranks of a group found a difference
failures: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def all_gather_objects(group: dist.ProcessGroup | None, local: Any) -> list[Any]:
    """Return the objects of all ranks, by group rank. Collective over the group.

    Args:
        group: a group that carries CPU tensors; None for this rank alone.
        local: this rank's object, a tuple whose first item is a name for errors.
    """
    if group is None or _size(group) == 1:
        return [local]
    objects: list[Any] = [None] * _size(group)
    with explaining_failure(f"the comparison of {local[0]}", group):
        dist.all_gather_object(objects, local, group=group)
    return objects


def _why_other_calls(by_rank: Mapping[int, tuple[str, Fields, str]]) -> str:
    """Return why some ranks make other calls, and what to do, "" where nothing tells. by_rank: rank -> (name, fields,
    remedy)."""
    remedies = dict.fromkeys(remedy for name, _, remedy in by_rank.values() if remedy and name != BACKWARD)
    if asides := [remedy for remedy in remedies if ALL in remedy]:
        return f"some ranks alone make one: {', or '.join(asides)}"
    ahead = [rank for rank, (name, *_) in by_rank.items() if name != BACKWARD]
    if len(ahead) == len(by_rank):
        return ""
    is_ahead = f"{ranks_in_words(ahead)} {'is' if len(ahead) == 1 else 'are'} one call ahead"
    return f"{is_ahead}: skip a step on all ranks or on none, {'; '.join([LEFT_OUT, *remedies])}"


def differences(by_rank: Mapping[int, tuple], why: str = "", where: str = "") -> str:
    """Return what differs between ranks, in words, or "" if nothing does.

    Ranks with the same fields are named together: "ranks 0-2: size 4; rank 3: size 2".

    Args:
        by_rank: rank -> (name of what it compares, its fields, ...).
        why: the cause and what to do, where they are known.
        where: which of several calls it is, in words.
    """
    if len({compared for compared, *_ in by_rank.values()}) > 1:
        by_call = {
            rank: f"{compared} through {next(iter(fields))}" if compared == BACKWARD and fields else compared
            for rank, (compared, fields, *_) in by_rank.items()
        }
        return f"calls{where}{why and f', but {why}'}; got {_grouped(by_call)}"
    first = next(iter(by_rank.values()))
    names = differing({rank: fields for rank, (_, fields, *_) in by_rank.items()})
    if not names:
        return ""
    omitted = [f"and {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
    shown = {
        rank: ", ".join([_named(name, fields.get(name)) for name in names[:MOST_SHOWN]] + omitted)
        for rank, (_, fields, *_) in by_rank.items()
    }
    return f"{first[0]}{where}{why and f', but {why}'}; got {_grouped(shown)}"


def differing(by_rank: Mapping[int, Fields]) -> list[str]:
    """Return the names of the fields in which ranks differ, in order."""
    names = {name: None for fields in by_rank.values() for name in fields}
    return [name for name in names if len({fields.get(name) for fields in by_rank.values()}) > 1]


def _named(name: str, value: str | None) -> str:
    name = name.lstrip("0123456789 ")
    return f"{name} {value}".strip() if value is not None else f"no {name}"


def _grouped(by_rank: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    shown = [f"{ranks_in_words(ranks)}: {value}" for value, ranks in list(groups.items())[:MOST_SHOWN]]
    return "; ".join(shown + ([f"and {len(groups) - MOST_SHOWN} other values"] if len(groups) > MOST_SHOWN else []))

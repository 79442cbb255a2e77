"""Let ranks agree before they communicate, so that an error on one rank is raised on all and no rank hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import compat, profiling
from ..base.errors import MOST_SHOWN, DisagreementError, SeqParError, as_seqpar_error, ranks_in_words
from ..base.fingerprint import Compared, Fields, Fingerprint
from ..core.runtime.groups import all_ranks
from ..core.runtime.transport import Communication, receive, send
from .waits import explaining_failure

# (fields by rank, of ranks that differ) -> a clause of a sentence, or ""; None: the difference is no error
Advice = Callable[[Mapping[int, Fields]], str | None]
BACKWARD = "backward"  # what ranks compare before a backward that communicates; see `backward_order.py`
LEFT_OUT = "add 0 * out.sum() where a rank's loss leaves attention out"
ALL = "on all ranks"  # in the remedy of calls that no step needs, as those of a rank that prints


def assert_ranks_agree(
    group: dist.ProcessGroup | None,
    name: str,
    value: object,
    *,
    error: SeqParError | None = None,
    number: int | None = None,
    peers: dist.ProcessGroup | None = None,
    among_peers: bool = False,
    call: str = "",
    advice: Advice | None = None,
) -> int:
    """Raise on all ranks of a group unless all pass the same value and none passes an error.

    Args:
        group: a group that carries CPU tensors; None for this rank alone.
        name: of the value, in errors; the same on all ranks.
        value: the value that must have the same repr on all ranks of the group, or with `among_peers` on the ranks of
            `peers`. Mappings, dataclasses and lists of them are compared field by field, and an error names the fields
            that differ. A value that is compared often may be passed as `Compared`.
        error: why this rank cannot go on. This rank raises it; the others raise a DisagreementError that quotes it.
        number: a number whose maximum is needed, on all ranks or on none.
        peers: this rank's part of the group. Its ranks first check that all of them make this call and that none is in
            a backward, where it would wait. None: this rank alone.
        among_peers: whether values may differ between parts of the group.
        call: the user's call, which is named in the error if a rank does not make it.
        advice: returns why ranks differ and what to do, if known.

    Returns:
        The greatest `number` of any rank; 0 if no rank has one.

    Raises:
        SeqParError: `error`, on the rank that passed it.
        DisagreementError: on all other ranks, and on all if values differ.
        CommunicationError: if a rank does not make the call.
    """
    for owner in sorted(checkers):
        checkers[owner].flush_before(group)
    entry, has_error = Entry.of(name, value, call, advice), error is not None
    compared, kind = entry.compared.fingerprint, Fingerprint.of(name)
    among_peers &= peers is not group
    # all ranks get the same result, so either all of them take the slow path or none
    if 1 < _size(peers) < _size(group) and differ(peers, compared if among_peers else kind, entry.subject):
        raise_difference(peers, [entry], error, values_may_differ=True)
        has_error = True  # of these ranks, whose values differ
    if differ(group, kind if among_peers else compared, entry.subject, has_error):
        raise_difference(group, [entry], error, ranks_of(peers)[0] if among_peers else 0)
    return 0 if number is None else maximum(group, number, entry.subject)


@dataclasses.dataclass
class Agreed:
    """A rank's contribution to an agreement, and the result that it receives."""

    value: object = None  # as for `assert_ranks_agree`
    number: int | None = None  # as for `assert_ranks_agree`; then the greatest of any rank


@contextlib.contextmanager
def together(
    group: dist.ProcessGroup | None, action: str, name: str = "", *, error: SeqParError | None = None,
    passing: tuple[type[Exception], ...] = (), **options: Any,
) -> Iterator[Agreed]:  # fmt: skip
    """Context manager at whose end ranks agree: if an exception leaves it on one rank, all ranks raise.

    Args:
        group: as for `assert_ranks_agree`.
        action: what is done in the context, such as "loading data", for errors.
        name: name of the value that ranks compare; "": the action.
        error: as for `assert_ranks_agree`, for an earlier error.
        passing: exceptions that leave it without an agreement, because ranks have already agreed on them, or cannot.
        **options: further arguments of `assert_ranks_agree`.

    Yields:
        An object that takes the value and the number to compare.

    Raises:
        SeqParError: as `assert_ranks_agree` does.
    """
    agreed = Agreed()
    try:
        yield agreed
    except passing:
        raise
    except Exception as reason:  # the other ranks wait for this one
        error = error or as_seqpar_error(f"{action} failed", reason)
    agreed.number = assert_ranks_agree(
        group, name or action, agreed.value, error=error, number=agreed.number, **options
    )


class Checker(Protocol):
    """The values of a set of groups that ranks have not compared yet; see `consistency`."""

    def flush_before(self, group: dist.ProcessGroup | None) -> None: ...

    def forget(self, group: dist.ProcessGroup | None) -> None: ...


checkers: weakref.WeakValueDictionary[int, Checker] = weakref.WeakValueDictionary()  # by the number of their groups


class Entry(NamedTuple):
    """A value that ranks compare, and its description in errors. For `call` and `advice` see `assert_ranks_agree`."""

    compared: Compared
    call: str
    advice: Advice | None

    @classmethod
    def of(cls, name: str, value: object, call: str = "", advice: Advice | None = None) -> Entry:
        return cls(value if isinstance(value, Compared) else Compared(name, value), call, advice)

    @property
    def remedy(self) -> str:
        """The remedy if a rank does not make the call; it is in parentheses in `call`."""
        return self.call.partition(" (")[2].removesuffix(")")

    @property
    def subject(self) -> str:
        return self.call or f"the comparison of {self.compared.name}"


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, by group rank."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


FAILED = 2**63 - 1  # no fingerprint, nor the negative of one


def differ(group: dist.ProcessGroup | None, compared: int, subject: str, failed: bool = False) -> bool:
    """Return whether the ranks' fingerprints differ or any rank has failed. Collective over the group.

    Args:
        group: a group that carries CPU tensors; None for this rank alone.
        compared: this rank's fingerprint.
        subject: the name of the comparison, for errors.
        failed: whether this rank has an error.
    """
    greatest, negated_least = _maxima(group, (FAILED, FAILED) if failed else (compared, -compared), subject)
    return greatest != -negated_least


def maximum(group: dist.ProcessGroup | None, number: int, subject: str) -> int:
    """Return the greatest number of any rank. Collective; call it after an agreement, so that all ranks call it."""
    return _maxima(group, (number,), subject)[0]


def _maxima(group: dist.ProcessGroup | None, numbers: Sequence[int], subject: str) -> Sequence[int]:
    if group is None or _size(group) == 1:
        return numbers
    # a selective checkpoint would look for the tensors' operations among those that it saved
    span = profiling.span(f"agree on {subject}")
    with span, compat.without_dispatch_modes(), explaining_failure(subject, group) as wait:
        return all_reduce_max(numbers, group, wait)


AGREEMENT_TAG = 0x5EA9  # of `all_reduce_max`; unusual, since users may send in the group of all ranks too
DIRECT = 4  # ranks that tell one another, so that each knows which one does not


def all_reduce_max(numbers: Sequence[int], group: dist.ProcessGroup, communication: Communication) -> list[int]:
    """Return the maximum over ranks of each number.

    Three or four ranks send to one another. Otherwise ranks send to the first rank, which answers, because two ranks
    that send at once slow each other down over gloo. `dist.all_reduce` is not used, since it could pair with a user's
    all-reduce in the group of all ranks.

    Args:
        numbers: integers of at most 63 bits, the same number on all ranks.
        group: a group that carries CPU tensors.
        communication: receives the rank that is waited for.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    direct = 2 < size <= DIRECT
    answers = rank == 0 and not direct
    peers = [(rank - distance) % size for distance in range(1, size)] if direct or answers else [0]
    maxima = torch.tensor([numbers] * (len(peers) + 1), dtype=torch.int64, device="cpu")

    def await_(peer: int) -> None:  # the first of more may wait for any other
        communication.awaited = (peer, 1) if answers or size <= DIRECT else None

    def start_receive(x: Tensor, peer: int) -> Any:
        await_(peer)  # it fails at once where that rank has ended
        return receive(x, group, peer, AGREEMENT_TAG)

    def send_to_all(x: Tensor) -> list[Any]:
        return [send(x, group, peer, AGREEMENT_TAG) for peer in reversed(peers)]

    receives = [start_receive(x, peer) for x, peer in zip(maxima[1:], peers, strict=True)]
    sends = [] if answers else send_to_all(maxima[0])
    for peer, work in zip(peers, receives, strict=True):
        await_(peer)
        work.wait()
    found = maxima.amax(0)
    for work in sends or send_to_all(found):  # a send completes once its receiver takes part
        work.wait()
    return found.tolist()


def all_reduce_sum(group: dist.ProcessGroup, numbers: Sequence[float], call: str) -> list[float]:
    """Return the sum over ranks of each number, in fp64.

    It is bitwise the same on all ranks, since gloo adds up each element in one place. Collective; call it after an
    agreement, so that all ranks make the call.

    Args:
        group: a group that carries CPU tensors.
        numbers: this rank's summands, the same number on every rank.
        call: the user's call, for errors.
    """
    total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    with explaining_failure(call, group):
        dist.all_reduce(total, group=group)
    return total.tolist()


def raise_difference(
    group: dist.ProcessGroup | None, entries: Sequence[Entry], error: SeqParError | None, part: int = 0,
    before: int | None = None, values_may_differ: bool = False,
) -> None:  # fmt: skip
    """Gather errors and fields (slow), and raise one sentence on every rank. If it is not caught, one rank prints it.

    Args:
        group: as for `differ`.
        entries: the entries that this rank has compared since ranks last agreed, this call's at the end.
        error: why this rank cannot go on.
        part: the part of the group in which values must be the same.
        before: number of calls of the step that were compared before these; None if an error is raised by its own call.
        values_may_differ: whether to raise only if a rank makes another call.
    """
    if found := _difference(group, entries, error, part, before, values_may_differ):
        for checker in list(checkers.values()):
            checker.forget(group)
        raise found


def _difference(
    group: dist.ProcessGroup | None, entries: Sequence[Entry], error: SeqParError | None, part: int,
    before: int | None, values_may_differ: bool,
) -> SeqParError | None:  # fmt: skip
    """Return the error that `raise_difference` raises, or None if ranks may differ in this way."""
    values = [(entry.compared.name, entry.compared.fields, entry.remedy) for entry in entries]
    reports = all_gather_objects(group, (entries[-1].compared.name, values, error and str(error), part))
    global_ranks = ranks_of(group)
    sentences = [sentence for *_, sentence, _ in reports]
    if any(sentences) and not values_may_differ:
        first = sentences.index(str(error)) if error else next(rank for rank, text in enumerate(sentences) if text)
        failed_rank = global_ranks[first]
        return error or DisagreementError(f"rank {failed_rank} cannot go on: {sentences[first]}")
    for place in range(max(len(values) for _, values, *_ in reports)):
        at_place = [values[place] if place < len(values) else ("no call", Fields(), "") for _, values, *_ in reports]
        calls_differ = len({name for name, *_ in at_place}) > 1
        if values_may_differ and not calls_differ:
            continue
        parts = [0 if calls_differ else part for *_, part in reports]
        where = "" if before is None else f" (call {before + place + 1} of the step)"
        for part in sorted(set(parts)):
            members = {global_ranks[rank]: at_place[rank] for rank, number in enumerate(parts) if number == part}
            advice = None if calls_differ else entries[place].advice
            why = advice({rank: fields for rank, (_, fields, _) in members.items()}) if advice else ""
            why = _why_other_calls(members) if calls_differ else why
            if why is not None and (difference := differences(members, why, where)):
                audience = "all ranks" if len(members) == all_ranks().size() else "all ranks that share a sequence"
                sentence = f"{audience} must be given the same {difference}"
                return DisagreementError(sentence)
    return None


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
    """Return why some ranks make other calls and what to do; "" if unknown. by_rank: rank -> (name, fields,
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
        by_rank: rank -> (name of the compared value, its fields, ...).
        why: the cause and what to do, if known.
        where: which of several calls this is, in words.
    """
    if len({compared for compared, *_ in by_rank.values()}) > 1:
        by_call = {
            rank: f"{compared} through {next(iter(fields.values()))}" if compared == BACKWARD and fields else compared
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

"""Make ranks agree before they communicate. If one rank has an error, all ranks raise an error and no rank hangs."""

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

# maps the fields of differing ranks, by rank, to a clause for the error, or ""; None: the difference is not an error
Advice = Callable[[Mapping[int, Fields]], str | None]
BACKWARD = "backward"  # name of the comparison before a backward pass that communicates; see `backward_order.py`
LEFT_OUT = "add 0 * out.sum() where a rank's loss leaves attention out"
ALL = "on all ranks"  # part of the remedy for calls outside training steps, such as calls for printing


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
    """Raise an error on all ranks in a group unless every rank passes the same value and no rank passes an error.

    Args:
        group: Process group for CPU tensors; None for a single rank.
        name: Name of the value in errors, the same on all ranks.
        value: Value whose repr must be the same on all ranks in the group, or on the ranks in `peers` if `among_peers`
            is set. Mappings, dataclasses, and lists of mappings or dataclasses are compared field by field, and the
            error names the fields that differ. A frequently compared value may be passed as `Compared`.
        error: Reason why this rank cannot continue. This rank raises the error, and the other ranks raise a
            DisagreementError that quotes the error.
        number: Number whose maximum over ranks is returned. Pass a number on all ranks or on no rank.
        peers: This rank's part of the group. The ranks in `peers` first check that all of them make this call outside a
            backward pass. None means that the part contains only this rank.
        among_peers: Whether values may differ between parts of the group.
        call: Name of the user's call, which is shown in the error if a rank does not make the call.
        advice: Function that returns the cause of a difference and its remedy, if known.

    Returns:
        The maximum of `number` over ranks, or 0 if no number is passed.

    Raises:
        SeqParError: Raised on the rank that passed `error`.
        DisagreementError: Raised on all other ranks, or on all ranks if values differ.
        CommunicationError: A rank does not make the call.
    """
    for owner in sorted(checkers):
        checkers[owner].flush_before(group)
    entry, has_error = Entry.of(name, value, call, advice), error is not None
    compared, kind = entry.compared.fingerprint, Fingerprint.of(name)
    among_peers &= peers is not group
    # all ranks get the same result, so all or none of them take the slow path
    if 1 < _size(peers) < _size(group) and differ(peers, compared if among_peers else kind, entry.subject):
        raise_difference(peers, [entry], error, values_may_differ=True)
        has_error = True  # values differ among these ranks
    if differ(group, kind if among_peers else compared, entry.subject, has_error):
        raise_difference(group, [entry], error, ranks_of(peers)[0] if among_peers else 0)
    return 0 if number is None else maximum(group, number, entry.subject)


@dataclasses.dataclass
class Agreed:
    """A rank's contribution to an agreement, and the agreement's result."""

    value: object = None  # see `assert_ranks_agree`
    number: int | None = None  # see `assert_ranks_agree`; after the agreement, the maximum over ranks


@contextlib.contextmanager
def together(
    group: dist.ProcessGroup | None, action: str, name: str = "", *, error: SeqParError | None = None,
    passing: tuple[type[Exception], ...] = (), **options: Any,
) -> Iterator[Agreed]:  # fmt: skip
    """Return a context manager that makes all ranks raise an error if its body raises an exception on one rank.

    Args:
        group: Process group for CPU tensors; None for a single rank.
        action: Description of the body for error messages, such as "loading data".
        name: Name of the value that ranks compare. Defaults to `action`.
        error: This rank's error from an earlier step, if any.
        passing: Exceptions that propagate without an agreement, because ranks have already agreed on them or cannot
            agree on them.
        **options: Further arguments for `assert_ranks_agree`.

    Yields:
        An object in which the body stores the value and the number to compare.

    Raises:
        SeqParError: Under the same conditions as in `assert_ranks_agree`.
    """
    agreed = Agreed()
    try:
        yield agreed
    except passing:
        raise
    except Exception as reason:  # other ranks are waiting for this rank
        error = error or as_seqpar_error(f"{action} failed", reason)
    agreed.number = assert_ranks_agree(
        group, name or action, agreed.value, error=error, number=agreed.number, **options
    )


class Checker(Protocol):
    """Deferred comparisons for a set of groups; see `consistency`."""

    def flush_before(self, group: dist.ProcessGroup | None) -> None: ...

    def forget(self, group: dist.ProcessGroup | None) -> None: ...


# keyed by the number of the set of groups
checkers: weakref.WeakValueDictionary[int, Checker] = weakref.WeakValueDictionary()


class Entry(NamedTuple):
    """A value that ranks compare, with its description for errors. `assert_ranks_agree` explains `call` and
    `advice`.
    """

    compared: Compared
    call: str
    advice: Advice | None

    @classmethod
    def of(cls, name: str, value: object, call: str = "", advice: Advice | None = None) -> Entry:
        return cls(value if isinstance(value, Compared) else Compared(name, value), call, advice)

    @property
    def remedy(self) -> str:
        """The remedy if a rank does not make the call, taken from the parentheses in `call`."""
        return self.call.partition(" (")[2].removesuffix(")")

    @property
    def subject(self) -> str:
        return self.call or f"the comparison of {self.compared.name}"


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in order of group rank."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


FAILED = 2**63 - 1  # a value that never equals a fingerprint or a negated fingerprint


def differ(group: dist.ProcessGroup | None, compared: int, subject: str, failed: bool = False) -> bool:
    """Return whether fingerprints differ between ranks or any rank has an error.

    All ranks in the group must call this function.

    Args:
        group: Process group for CPU tensors; None for a single rank.
        compared: Fingerprint of this rank's value.
        subject: Name of the comparison in errors.
        failed: Whether this rank has an error.
    """
    greatest, negated_least = _maxima(group, (FAILED, FAILED) if failed else (compared, -compared), subject)
    return greatest != -negated_least


def maximum(group: dist.ProcessGroup | None, number: int, subject: str) -> int:
    """Return the maximum of `number` over ranks.

    Call `maximum` only after an agreement, so that every rank in the group calls it.
    """
    return _maxima(group, (number,), subject)[0]


def _maxima(group: dist.ProcessGroup | None, numbers: Sequence[int], subject: str) -> Sequence[int]:
    if group is None or _size(group) == 1:
        return numbers
    # a selective checkpoint would search its saved operations for the operations that run here
    span = profiling.span(f"agree on {subject}")
    with span, compat.without_dispatch_modes(), explaining_failure(subject, group) as wait:
        return all_reduce_max(numbers, group, wait)


AGREEMENT_TAG = 0x5EA9  # unusual tag for `all_reduce_max`, since users may also send in the group of all ranks
DIRECT = 4  # up to this number of ranks send to each other directly, so that each rank can tell which rank is missing


def all_reduce_max(numbers: Sequence[int], group: dist.ProcessGroup, communication: Communication) -> list[int]:
    """Return the maximum of each number over ranks.

    Three or four ranks send to each other directly. In groups of other sizes, all ranks send to the first rank, which
    replies. Two ranks do not send to each other directly, because simultaneous sends over gloo slow each other down.
    `dist.all_reduce` is not used because the call could be paired with a user's all-reduce in the group of all ranks.

    Args:
        numbers: Integers of at most 63 bits, with the same count on all ranks.
        group: Process group for CPU tensors.
        communication: Object that records the rank being waited for.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    direct = 2 < size <= DIRECT
    answers = rank == 0 and not direct
    peers = [(rank - distance) % size for distance in range(1, size)] if direct or answers else [0]
    maxima = torch.tensor([numbers] * (len(peers) + 1), dtype=torch.int64, device="cpu")

    def await_(peer: int) -> None:  # in larger groups, the first rank may be waiting for any rank
        communication.awaited = (peer, 1) if answers or size <= DIRECT else None

    def start_receive(x: Tensor, peer: int) -> Any:
        await_(peer)  # a receive fails immediately if the peer's process has ended
        return receive(x, group, peer, AGREEMENT_TAG)

    def send_to_all(x: Tensor) -> list[Any]:
        return [send(x, group, peer, AGREEMENT_TAG) for peer in reversed(peers)]

    receives = [start_receive(x, peer) for x, peer in zip(maxima[1:], peers, strict=True)]
    sends = [] if answers else send_to_all(maxima[0])
    for peer, work in zip(peers, receives, strict=True):
        await_(peer)
        work.wait()
    found = maxima.amax(0)
    for work in sends or send_to_all(found):  # a send completes only when its receiver takes part
        work.wait()
    return found.tolist()


def all_reduce_sum(group: dist.ProcessGroup, numbers: Sequence[float], call: str) -> list[float]:
    """Return the sum of each number over ranks, in fp64.

    All ranks receive bitwise identical sums, because gloo adds up each element on a single rank. Call this function
    only after an agreement, so that every rank in the group calls it.

    Args:
        group: Process group for CPU tensors.
        numbers: The numbers that this rank contributes. Every rank must contribute the same count of numbers.
        call: Name of the user's call in errors.
    """
    total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    with explaining_failure(call, group):
        dist.all_reduce(total, group=group)
    return total.tolist()


def raise_difference(
    group: dist.ProcessGroup | None, entries: Sequence[Entry], error: SeqParError | None, part: int = 0,
    before: int | None = None, values_may_differ: bool = False,
) -> None:  # fmt: skip
    """Gather errors and fields from all ranks, and raise the same error on every rank if they disagree.

    Gathering is slow, and happens only after a disagreement between ranks was found. An uncaught error is printed by a
    single rank.

    Args:
        group: Process group for CPU tensors; None for a single rank.
        entries: Entries that this rank has compared since ranks last agreed, up to and including the current call.
        error: Reason why this rank cannot continue.
        part: Part of the group in which values must be the same.
        before: Number of calls in the step that were compared before `entries`; None if each call raises its own
            errors.
        values_may_differ: Whether to raise an error only if ranks make different calls, but not if values differ.
    """
    if found := _difference(group, entries, error, part, before, values_may_differ):
        for checker in list(checkers.values()):
            checker.forget(group)
        raise found


def _difference(
    group: dist.ProcessGroup | None, entries: Sequence[Entry], error: SeqParError | None, part: int,
    before: int | None, values_may_differ: bool,
) -> SeqParError | None:  # fmt: skip
    """Return the error for `raise_difference`, or None if the difference between ranks is allowed."""
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
    """Return the objects of all ranks, in order of group rank.

    All ranks in the group must call this function.

    Args:
        group: Process group for CPU tensors; None for a single rank.
        local: This rank's object, which must be a tuple whose first item is a name for errors.
    """
    if group is None or _size(group) == 1:
        return [local]
    objects: list[Any] = [None] * _size(group)
    with explaining_failure(f"the comparison of {local[0]}", group):
        dist.all_gather_object(objects, local, group=group)
    return objects


def _why_other_calls(by_rank: Mapping[int, tuple[str, Fields, str]]) -> str:
    """Explain why ranks make different calls and name the remedy, or return "" if the cause is unknown.

    `by_rank` contains the name, the fields and the remedy for each rank's call.
    """
    remedies = dict.fromkeys(remedy for name, _, remedy in by_rank.values() if remedy and name != BACKWARD)
    if asides := [remedy for remedy in remedies if ALL in remedy]:
        return f"some ranks alone make one: {', or '.join(asides)}"
    ahead = [rank for rank, (name, *_) in by_rank.items() if name != BACKWARD]
    if len(ahead) == len(by_rank):
        return ""
    is_ahead = f"{ranks_in_words(ahead)} {'is' if len(ahead) == 1 else 'are'} one call ahead"
    return f"{is_ahead}: skip a step on all ranks or on none, {'; '.join([LEFT_OUT, *remedies])}"


def differences(by_rank: Mapping[int, tuple], why: str = "", where: str = "") -> str:
    """Describe the differences between ranks, or return "" if there are none.

    Ranks with the same fields are grouped, as in "ranks 0-2: size 4; rank 3: size 2".

    Args:
        by_rank: Name of the compared value, its fields and further items, by rank.
        why: Cause and remedy, if known.
        where: Description of the call's position among several calls.
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
    """Return the names of the fields that differ between ranks, in order."""
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

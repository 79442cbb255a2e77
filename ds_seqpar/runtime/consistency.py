"""What the ranks of a sequence are about to do, and what a device has still to say of it, compared between the ranks.

Where ranks compute on CPUs, each call is compared before anything of it is sent, or at the latest before its first
message is waited for. Where they compute on accelerators, hosts run ahead of their devices, and must not wait for one
another in every call. So a call like one that they agreed on before is noted, which sends nothing. What was noted is
compared in one go with the next call that is unlike all before, and at the end of each step. A rank that cannot go on
compares at once. The others come to a comparison too, since no host waits for its device before it.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compat
from ..errors import SeqParError, as_seqpar_error
from .agreement import Advice, Comparison, Entry, checkers, digest_of, failures, raise_difference
from .comm import SALTS, Agreement, end_later, end_unfinished
from .devices import communicator_device
from .groups import Groups
from .process_exit import IDLE_TIMEOUT

# called with a tensor's values on the CPU -> an error of this rank, or fields that ranks compare
Judge = Callable[[Tensor], SeqParError | Mapping[str, object]]
MOST_NOTED = 512  # calls, which are then compared although the step has not ended, as in evaluation
MOST_KNOWN = 1024  # values that ranks have agreed on, and that may be noted
NOTHING, END = Entry.of("", {}), Entry.of("end of the step", {})


class _Look(NamedTuple):
    """A tensor that is copied to the CPU."""

    after: Entry  # what was compared last when the copy began
    copy: Tensor
    arrived: Any  # an event of the device; None: the copy is there
    judge: Judge


class ConsistencyChecker(Agreement):
    """The comparisons of the ranks that share a sequence.

    Args:
        groups: This rank's groups; None for ranks of one process, which need not agree.
        agreement: The setting.
    """

    def __init__(self, groups: Groups | None, agreement: str = "auto") -> None:
        self.groups, at_once = groups, agreement == "always"
        device = None if groups is None or groups.sp is None else communicator_device(groups.sp)
        # the type of the devices on which calls like earlier ones are noted; None: nothing is noted
        self.notes_on = None if device is None or at_once else device.type
        self.overlaps = device is None and not at_once  # whether a comparison may run beside the packing of messages
        self.defers = self.overlaps and agreement == "deferred"  # and beside their sending
        self._entries: list[Entry] = []  # what was noted since ranks agreed or failed last
        self._before = 0  # how many calls of the step were compared before those
        self._failures = 0  # of the group, when those were noted
        self._known: dict[int, None] = {}  # digests of what ranks agreed on, the oldest first; the same on all ranks
        self._last = NOTHING
        self._looks: list[_Look] = []
        self._at_exit: weakref.finalize | None = None
        if groups is not None:
            checkers[groups.number] = self

    def check_now(
        self, name: str, value: object, *, error: SeqParError | None = None, number: int = 0, call: str = "",
        advice: Advice | None = None,
    ) -> int:  # fmt: skip
        """Compare a value between the ranks, and wait for them. For the arguments see `assert_ranks_agree`."""
        entry = Entry.of(name, value, call, advice)
        return self._begin(entry, self._prepare(entry) or error, number)()

    def check_deferred(
        self, name: str, value: object, *, error: SeqParError | None = None, call: str = "",
        advice: Advice | None = None, overlap: bool = False, device: torch.device | None = None, like: object = None,
    ) -> None:  # fmt: skip
        """Compare a value between the ranks, without waiting for them where that is possible.

        A value that may differ by its `advice` must be given to `agree`.

        Args:
            name: As for `assert_ranks_agree`, and so are the others.
            overlap: Whether all that is sent next is sent by `TorchComm`, which ends the comparison in time.
            device: Where the tensors are that are sent next; None where accelerators' ranks have theirs.
            like: What of the value must be as in an earlier call, to be noted; None: all of it.
        """
        entry = Entry.of(name, value, call, advice)
        error = self._prepare(entry) or error
        key = entry.compared.digest if like is None else Entry.of(name, like).compared.digest
        notes = self.notes_on is not None and (device is None or device.type == self.notes_on)
        if notes and error is None and key in self._known:
            self._entries.append(entry)
            if len(self._entries) >= MOST_NOTED:
                self._begin(END)()
            return
        end = self._begin(entry, error, 0, key)
        if overlap and self.overlaps and error is None:
            end_later(end)
        else:
            end()

    def check_values(self, x: Tensor, judge: Judge) -> None:
        """Copy a tensor to the CPU, and judge its values once they are there.

        It happens when what was compared last is compared again, as in the next forward, and else in the last `settle`
        or at exit. All ranks must call this alike.

        Args:
            x: The tensor.
            judge: Gets the copy. It must not refer to the SequenceParallel, which would then live until exit.
        """
        copy = x.detach().to("cpu", non_blocking=True)
        on_its_way = x.device.type != "cpu" and not compat.is_fake(copy)
        arrived = torch.accelerator.current_stream(x.device).record_event() if on_its_way else None
        self._looks.append(_Look(self._last, copy, arrived, judge))
        self._at_exit = self._at_exit or weakref.finalize(self, _say, self._looks)

    def flush(self, *, last: bool = False) -> None:
        """Compare what was noted, and wait for the other ranks. Call it on all of them at the end of a step.

        Args:
            last: Whether no forward follows. Then it waits for the device too, and judges what that has still to say.
        """
        end_unfinished()
        self._forget_failed()
        judges = last and bool(self._looks)
        error = self._judge() if judges else None
        if self._entries or judges:
            self._begin(END, error)()
        self._before = 0

    def flush_after_backward(self) -> None:
        """Call `settle` when the graph task ends in which this is called, where calls are noted."""
        if self.notes_on is not None and compat.graph_task() >= 0:
            compat.after_backward(self.flush)

    def flush_before(self, group: dist.ProcessGroup | None) -> None:
        """Call `settle` before a comparison in another group, where some ranks would wait for those that wait here."""
        if self._entries and self.groups is not None and self.groups.control is not group:
            self.flush()

    def before_sending(self) -> None:
        """End the comparison that was begun, where messages must not leave before."""
        if not self.defers:
            end_unfinished()

    def before_waiting(self) -> None:
        """End the comparison that was begun."""
        end_unfinished()

    def _prepare(self, entry: Entry) -> SeqParError | None:
        """Prepare to compare an entry, or to note it. Return this rank's error of tensors that are looked at now."""
        self._forget_failed()
        error = self._judge(entry)
        self._last = entry
        return error

    def _forget_failed(self) -> None:
        """Forget what was noted before all ranks of the group raised, whatever they compared then."""
        if self.notes_on is not None and self.groups is not None and self.groups.control is not None:
            found = failures.get(self.groups.control, 0)
            if found != self._failures:
                self._failures, self._entries, self._before = found, [], 0

    def _begin(
        self, entry: Entry, error: SeqParError | None = None, number: int = 0, key: int | None = None
    ) -> Callable[[], int]:
        """Begin to compare what was noted and one entry more. Return what ends that; it returns the greatest number."""
        group = None if self.groups is None else self.groups.control
        before, entries, self._entries = self._before, [*self._entries, entry], []
        self._before = before + len(entries)
        digests = [entry.compared.digest for entry in entries]
        digest = digests[0] if len(digests) == 1 else digest_of(digests)
        comparison = Comparison(group, int(error is not None), digest, number, entry.subject)
        if self.defers and group is not None:  # no message of a call that failed is ever taken for another call's
            self.salt = digest_of(failures.get(group, 0), digest) % SALTS

        def end() -> int:
            differs, greatest = comparison.result()
            if differs:
                if self.defers and group is not None:  # digests differ, and calls without a comparison may follow
                    self.salt = digest_of(failures.get(group, 0) + 1) % SALTS
                raise_difference(group, entries, error, before=None if self.notes_on is None else before)
            elif self.notes_on is not None:
                self._known[entry.compared.digest if key is None else key] = None
                if len(self._known) > MOST_KNOWN:
                    del self._known[next(iter(self._known))]
            return greatest

        return end

    def _judge(self, again: Entry | None = None) -> SeqParError | None:
        """Judge what was left for the next comparison like this one, None: whatever was left. Note the fields that
        ranks compare, and return this rank's error."""
        if not self._looks:
            return None
        ready = [x for x in self._looks if again is None or x.after.compared.name in ("", again.compared.name)]
        self._looks[:] = [x for x in self._looks if not any(x is other for other in ready)]
        error = None
        for look, found in _found(ready):
            if isinstance(found, SeqParError):
                error = error or found
            elif found:
                name = f"{look.after.compared.name} in the call before".strip()
                self._entries.append(Entry.of(name, found, look.after.call, look.after.advice))
        return error


def _found(looks: Iterable[_Look]) -> Iterable[tuple[_Look, SeqParError | Mapping[str, object]]]:
    """Yield what there is to say of each tensor, once it has arrived."""
    for look in looks:
        if look.arrived is not None:
            look.arrived.synchronize()
        if compat.is_fake(look.copy):
            continue
        try:
            yield look, look.judge(look.copy)
        except Exception as error:  # a rank that raised alone would leave its peers waiting
            yield look, as_seqpar_error("a check of a tensor's values failed", error)


def _say(looks: list[_Look]) -> None:
    """Print this rank's errors that nobody looked at, at exit. A device that does not get there is not waited for."""
    deadline = time.monotonic() + IDLE_TIMEOUT
    while any(look.arrived is not None and not look.arrived.query() for look in looks):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    for _, found in _found(looks):
        if isinstance(found, SeqParError):
            print(f"ds_seqpar: the last call that looked right was not: {found}", file=sys.stderr, flush=True)

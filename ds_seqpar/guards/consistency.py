"""Check that all ranks that share a sequence make the same calls.

On CPUs, each call is compared before anything is sent, because hosts wait for each other in every call anyway. On
accelerators, hosts run ahead of their devices and must not wait for each other in every call. The comparison of a call
is therefore deferred if ranks have already agreed on a similar call. All deferred calls are compared together at the
next new kind of call or at the end of the step. A rank that cannot continue starts a comparison immediately. The other
ranks also reach a comparison, because no host waits for its device before comparing.
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

from ..base import compat
from ..base.errors import SeqParError, as_seqpar_error
from ..base.fingerprint import Fingerprint
from ..core.runtime.devices import communicator_device
from ..core.runtime.groups import Groups
from ..core.runtime.seams import ATTENTION, Guard, Inputs
from . import mismatch_hints
from .agreement import Advice, Entry, checkers, differ, maximum, raise_difference
from .process_exit import IDLE_TIMEOUT

# maps a tensor's values on the CPU to this rank's error, or to fields that ranks compare
Judge = Callable[[Tensor], SeqParError | Mapping[str, object]]
MOST_DEFERRED = 512  # maximum number of deferred calls, for long steps such as an evaluation
MOST_KNOWN = 1024  # maximum number of remembered values on which ranks have agreed
NOTHING, END = Entry.of("", {}), Entry.of("end of the step", {})


class _Look(NamedTuple):
    """A tensor that is being copied to the CPU for a check."""

    after: Entry  # last entry compared before the copy began
    copy: Tensor
    arrived: Any  # device event; None: the copy is complete
    judge: Judge


class InputAgreement(Guard):
    """Guard that compares each call's inputs across the ranks that share a sequence.

    If one rank finds an error in its inputs, all ranks raise an error.
    """

    def __init__(self, checker: ConsistencyChecker) -> None:
        self.checker = checker

    def admit(self, inputs: Inputs, error: SeqParError | None) -> SeqParError | None:
        if self.checker.group is None:
            return error
        advice = mismatch_hints.of_attention if inputs.call == ATTENTION else None
        # a torch.func transform blocks all messages, even the message with the error that rejects the transform
        with compat.without_torch_func():
            self.checker.check_deferred(
                inputs.compared.name, inputs.compared, error=error, call=inputs.call, advice=advice,
                device=getattr(inputs.operands["q"], "device", None),
            )  # fmt: skip
        return None


class ConsistencyChecker:
    """Comparisons between the ranks that share a sequence.

    Args:
        groups: This rank's groups; None for virtual ranks in one process, which need not agree.
        agreement: Value of the `agreement` setting.
    """

    def __init__(self, groups: Groups | None, agreement: str = "auto") -> None:
        self.groups = groups
        device = None if groups is None or groups.sp is None else communicator_device(groups.sp)
        # type of the devices on which repeated calls are deferred; None: nothing is deferred
        self.defers_on = None if device is None or agreement == "always" else device.type
        self._entries: list[Entry] = []  # entries deferred since the last comparison
        self._before = 0  # number of calls in the step that have already been compared
        # fingerprints of the values on which ranks have agreed, oldest first; the same on all ranks
        self._known: dict[int, None] = {}
        self._last = NOTHING
        self._looks: list[_Look] = []
        self._at_exit: weakref.finalize | None = None
        if groups is not None:
            checkers[groups.number] = self

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.groups is None else self.groups.control

    def check_now(
        self, name: str, value: object, *, error: SeqParError | None = None, number: int | None = None, call: str = "",
        advice: Advice | None = None,
    ) -> int:  # fmt: skip
        """Compare a value across ranks immediately. `assert_ranks_agree` explains the arguments and the result."""
        entry = Entry.of(name, value, call, advice)
        self._compare(entry, self._judge(entry) or error)
        return 0 if number is None else maximum(self.group, number, entry.subject)

    def check_deferred(
        self, name: str, value: object, *, error: SeqParError | None = None, call: str = "",
        advice: Advice | None = None, device: torch.device | None = None, like: object = None,
    ) -> None:  # fmt: skip
        """Compare a value across ranks at the end of the step if deferral is allowed, and immediately otherwise.

        If the `advice` for a value may allow differences, use `check_now` instead.

        Args:
            name: Name of the value. `assert_ranks_agree` explains the arguments up to `advice`.
            device: Device of the tensors that will be sent next; None for the devices on which calls are deferred.
            like: Part of the value that must match an earlier call so that the comparison can be deferred; None for the
                whole value.
        """
        entry = Entry.of(name, value, call, advice)
        error = self._judge(entry) or error
        key = entry.compared.fingerprint if like is None else Entry.of(name, like).compared.fingerprint
        defers = self.defers_on is not None and (device is None or device.type == self.defers_on)
        if not defers or error is not None or key not in self._known:
            self._compare(entry, error, key)
            return
        self._entries.append(entry)
        if len(self._entries) >= MOST_DEFERRED:
            self._compare(END)

    def check_values(self, x: Tensor, judge: Judge) -> None:
        """Copy a tensor to the CPU, and check its values when the copy is complete.

        Values are checked at the next comparison of the same kind, for example in the next forward pass. Remaining
        values are checked in the last `flush` or at exit. All ranks must make the same calls to `check_values`.

        Args:
            x: Tensor to check.
            judge: Function that receives the copy. `judge` must not reference the SequenceParallel, which would
                otherwise stay alive until exit.
        """
        copy = x.detach().to("cpu", non_blocking=True)
        on_its_way = x.device.type != "cpu" and not compat.is_fake(copy)
        arrived = torch.accelerator.current_stream(x.device).record_event() if on_its_way else None
        self._looks.append(_Look(self._last, copy, arrived, judge))
        self._at_exit = self._at_exit or weakref.finalize(self, _say, self._looks)

    def flush(self, *, last: bool = False) -> None:
        """Compare deferred values across ranks. Ranks wait for each other.

        Call `flush` on all ranks at the end of a step.

        Args:
            last: Whether this is the last `flush`, after which no forward pass follows. The last `flush` also waits for
                the device and checks the remaining values.
        """
        judges = last and bool(self._looks)
        error = self._judge() if judges else None
        if self._entries or judges:
            self._compare(END, error)
        self._before = 0

    def flush_before(self, group: dist.ProcessGroup | None) -> None:
        """Call `flush` before a comparison in another group, because the ranks could otherwise deadlock."""
        if self._entries and self.group is not group:
            self.flush()

    def forget(self, group: dist.ProcessGroup | None) -> None:
        """Drop deferred values after all ranks in the group have raised an error."""
        if self._entries and self.group is group:
            self._entries, self._before = [], 0

    def _compare(self, entry: Entry, error: SeqParError | None = None, key: int | None = None) -> None:
        """Compare the deferred entries and one more entry.

        `key` identifies similar calls and defaults to the fingerprint of the whole entry.
        """
        before, entries, self._entries = self._before, [*self._entries, entry], []
        self._before = before + len(entries)
        compared = entry.compared.fingerprint
        if len(entries) > 1:
            compared = Fingerprint.of([int(each.compared.fingerprint) for each in entries])
        if differ(self.group, compared, entry.subject, error is not None):
            raise_difference(self.group, entries, error, before=None if self.defers_on is None else before)
        elif self.defers_on is not None:
            self._known[entry.compared.fingerprint if key is None else key] = None
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def _judge(self, again: Entry | None = None) -> SeqParError | None:
        """Check the values whose copies are complete, and return this rank's error.

        Only values of the same kind as the current comparison `again` are checked, or all values if `again` is None.
        Fields that ranks must compare are added to the deferred entries.
        """
        self._last = again or self._last
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
    """Wait for each tensor's copy, and yield the error or the fields that the check returns."""
    for look in looks:
        if look.arrived is not None:
            look.arrived.synchronize()
        if compat.is_fake(look.copy):
            continue
        try:
            yield look, look.judge(look.copy)
        except Exception as error:  # if only one rank raised, its peers would keep waiting
            yield look, as_seqpar_error("a check of a tensor's values failed", error)


def _say(looks: list[_Look]) -> None:
    """At exit, print this rank's errors that were never raised, without waiting for a stuck device."""
    deadline = time.monotonic() + IDLE_TIMEOUT
    while any(look.arrived is not None and not look.arrived.query() for look in looks):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    for _, found in _found(looks):
        if isinstance(found, SeqParError):
            print(f"ds_seqpar: the last call that looked right was not: {found}", file=sys.stderr, flush=True)

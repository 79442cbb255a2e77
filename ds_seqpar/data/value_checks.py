"""Read the values of a batch that must be checked: at once if they are on the CPU, one call later on a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InputError, SeqParError
from ..base.fingerprint import Fingerprint
from ..guards.consistency import ConsistencyChecker

Judge = Callable[[list[int]], SeqParError | None]  # values -> the error that they are; None where all is right


class ValueChecks:
    """Checks of a batch's values, and the digests that ranks compare.

    The host would have to wait to read a value on a device. So such values are kept until `post`, and read in the next
    comparison of ranks, by when the device has computed them.

    Args:
        at_once: device types whose values are read at once; None: all.
    """

    def __init__(self, at_once: Collection[str] | None = None) -> None:
        self.at_once = at_once
        self.fields: dict[str, str] = {}  # what ranks compare now
        self._later: list[tuple[Tensor, Judge | str]] = []  # or how ranks call a digest

    def reads(self, x: Tensor) -> bool:
        """Whether the tensor's values are read at once."""
        return self.at_once is None or x.device.type in self.at_once

    def require(self, values: Tensor, judge: Judge) -> None:
        """Judge values, at once or later.

        Args:
            values: int64, (count,).
            judge: returns the error that the values show; None if there is none.

        Raises:
            SeqParError: the error, if the values are read at once.
        """
        if not self.reads(values):
            self._later.append((values, judge))
        elif error := judge(values.tolist()):
            raise error

    def compare(self, inputs: Mapping[str, Any], on_cpu: Mapping[str, Tensor] | None = None) -> None:
        """Let ranks compare dtypes, shapes and values of tensors; no values of floating point tensors with several
        dims.

        Args:
            inputs: tensors by name; 0-dim tensors and anything else are left out.
            on_cpu: name -> the same values on the CPU, for tensors on a device.
        """
        for name, x in sorted(inputs.items()):
            if not isinstance(x, Tensor) or not x.dim():
                continue
            x = (on_cpu or {}).get(name, x)
            if x.is_floating_point() and x.dim() > 1:
                self.fields[name] = describe(x)
            elif self.reads(x):
                self.fields[name] = fingerprint_of(x)
            else:
                self.fields[name] = f"{describe(x)} on {x.device.type}"
                self._later.append((device_digest(x)[None], name))

    def post(self, checker: ConsistencyChecker) -> None:
        """Give values on devices to the checker, with one copy per device."""
        by_device: dict[torch.device, list[tuple[Tensor, Judge | str]]] = {}
        for values, judge in self._later:
            by_device.setdefault(values.device, []).append((values, judge))
        self._later = []
        for entries in by_device.values():
            checker.check_values(torch.cat([values for values, _ in entries]), _Judgement(entries))


class _Judgement:
    """Judges values that several checks have concatenated."""

    def __init__(self, entries: list[tuple[Tensor, Judge | str]]) -> None:
        self.parts = [(len(values), judge) for values, judge in entries]

    def __call__(self, values: Tensor) -> SeqParError | dict[str, str]:
        numbers, fields = values.tolist(), dict[str, str]()
        for count, judge in self.parts:
            part, numbers = numbers[:count], numbers[count:]
            if isinstance(judge, str):
                fields[judge] = f"with values {part[0] % 2**64:016x}"
            elif error := judge(part):
                return InputError(f"{error} (in an earlier forward: on a device it is seen one later)")
        return fields


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
# the constants of splitmix64, as signed numbers
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def device_digest(x: Tensor) -> Tensor:
    """Return a hash of a tensor's values and their places, 0-dim int64, on its device.

    The host does not wait for it. It does not cover dtype and shape.
    """
    x = x.detach().resolve_conj().resolve_neg().reshape(-1)
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    bits = x.view(INTEGERS[x.dtype.itemsize]).to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    # the sum of hashes of (value, place), in integers that wrap around
    mixed = torch.add(bits, places, alpha=STEP).mul_(FIRST)
    mixed = (mixed ^ (mixed >> 31)).mul_(SECOND)
    return (mixed ^ (mixed >> 29)).sum()


def fingerprint_of(x: Tensor) -> str:
    """Return the dtype and shape of a tensor, and a digest of its values. It reads the values."""
    content = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{describe(x)} {Fingerprint.of_bytes(content)}"


def describe(x: object) -> str:
    """Return the dtype and shape of a tensor, "none" for None, and the type's name for anything else, for messages."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return "none" if x is None else type(x).__name__

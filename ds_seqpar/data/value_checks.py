"""Check a batch's values, immediately on the CPU and one call later on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InputError, SeqParError
from ..base.fingerprint import Fingerprint
from ..guards.consistency import ConsistencyChecker

Judge = Callable[[list[int]], SeqParError | None]  # maps values to an error, or to None if they are valid


class ValueChecks:
    """Checks of a batch's values, and digests that ranks compare.

    Reading a value from a device would make the host wait. Device values are therefore kept until `post` and read in
    the ranks' next comparison. By then, the device has already computed the values.

    Args:
        at_once: Device types from which values are read immediately; None for all types.
    """

    def __init__(self, at_once: Collection[str] | None = None) -> None:
        self.at_once = at_once
        self.fields: dict[str, str] = {}  # entries that ranks compare in this call
        self._later: list[tuple[Tensor, Judge | str]] = []  # values and their check, or a digest and its name

    def reads(self, x: Tensor) -> bool:
        """Return whether a tensor's values are read immediately."""
        return self.at_once is None or x.device.type in self.at_once

    def require(self, values: Tensor, judge: Judge) -> None:
        """Check values immediately or, if they are on a device, keep them for a later check.

        Args:
            values: int64 tensor of shape (count,).
            judge: Function that returns an error for invalid values and None for valid values.

        Raises:
            SeqParError: The error from `judge`, if the values are read immediately.
        """
        if not self.reads(values):
            self._later.append((values, judge))
        elif error := judge(values.tolist()):
            raise error

    def compare(self, inputs: Mapping[str, Any], on_cpu: Mapping[str, Tensor] | None = None) -> None:
        """Compare the dtypes, shapes and values of tensors across ranks.

        Values of floating-point tensors with several dimensions are not compared.

        Args:
            inputs: Tensors by name; 0-dim tensors and non-tensors are skipped.
            on_cpu: CPU copies, by name, of tensors on a device.
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
        """Pass the collected device values to the checker, with one copy per device."""
        by_device: dict[torch.device, list[tuple[Tensor, Judge | str]]] = {}
        for values, judge in self._later:
            by_device.setdefault(values.device, []).append((values, judge))
        self._later = []
        for entries in by_device.values():
            checker.check_values(torch.cat([values for values, _ in entries]), _Judgement(entries))


class _Judgement:
    """Applies several checks to one list of their concatenated values."""

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


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
# constants of splitmix64 as signed integers
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def device_digest(x: Tensor) -> Tensor:
    """Return a 0-dim int64 hash of a tensor's values and their positions, computed on the tensor's device.

    The host does not wait for the hash. Dtype and shape are not hashed.
    """
    x = x.detach().resolve_conj().resolve_neg().reshape(-1)
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    bits = x.view(INTEGERS[x.dtype.itemsize]).to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    # sum of the hashes of all (value, place) pairs, in integers that wrap around
    mixed = torch.add(bits, places, alpha=STEP).mul_(FIRST)
    mixed = (mixed ^ (mixed >> 31)).mul_(SECOND)
    return (mixed ^ (mixed >> 29)).sum()


def fingerprint_of(x: Tensor) -> str:
    """Return a tensor's dtype, shape and value digest. The host reads the values."""
    content = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{describe(x)} {Fingerprint.of_bytes(content)}"


def describe(x: object) -> str:
    """Return a tensor's dtype and shape, "none" for None, or the type name of any other object, for error messages."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return "none" if x is None else type(x).__name__

"""What the ranks of a sequence are about to do, and what a device is still to say of it, compared between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import SeqParError
from .agreement import Advice, assert_ranks_agree
from .groups import Groups

# called with a tensor's values on the CPU -> an error of this rank, or fields that ranks compare
Judge = Callable[[Tensor], SeqParError | Mapping[str, object]]


class Journal:
    """The comparisons of the ranks that share a sequence.

    Args:
        groups: This rank's groups; None for ranks of one process, which need not agree.
    """

    def __init__(self, groups: Groups | None) -> None:
        self.groups = groups
        self._later: list[tuple[Tensor, Judge]] = []
        self._arrived: torch.cuda.Event | None = None

    def agree(
        self, name: str, value: object, *, error: SeqParError | None = None, number: int = 0, call: str = "",
        advice: Advice | None = None,
    ) -> int:  # fmt: skip
        """Compare a value between the ranks, and wait for them. See `assert_ranks_agree`."""
        found = self._judge()
        error = error or next((x for x in found if isinstance(x, SeqParError)), None)
        fields = [x for x in found if not isinstance(x, SeqParError)]
        value = [value, *fields] if fields else value
        group = None if self.groups is None else self.groups.control
        return assert_ranks_agree(group, name, value, error=error, number=number, call=call, advice=advice)

    def note(
        self, name: str, value: object, *, error: SeqParError | None = None, call: str = "",
        advice: Advice | None = None,
    ) -> None:  # fmt: skip
        """Compare a value between the ranks, without waiting for them where that is possible."""
        self.agree(name, value, error=error, call=call, advice=advice)

    def later(self, x: Tensor, judge: Judge) -> None:
        """Copy a tensor to the CPU, and judge its values in the next `agree` or `note`, when the device has made it."""
        self._later.append((x.to("cpu", non_blocking=True), judge))
        if x.is_cuda and torch.cuda.is_available():
            self._arrived = torch.cuda.current_stream(x.device).record_event()

    def _judge(self) -> list[SeqParError | Mapping[str, object]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        later, self._later, self._arrived = self._later, [], None
        return [judge(x) for x, judge in later]

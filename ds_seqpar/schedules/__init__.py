"""Register additional schedules, support for plan files, and the overlap pass."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.compiler.schedules import READERS, register, schedules_in
from ..core.compiler.schedules.plan import PASSES, BlockMask, Plan
from . import distflash, text, triangle


def _overlapped(plan: Plan, needed: BlockMask, sizes: Mapping[str, float]) -> Plan:
    from .overlap import overlapped  # imported here, since the simulator imports programs, which in turn import plans

    return overlapped(plan, needed, sizes)


for _schedule in schedules_in([distflash, triangle]):
    register(_schedule)
READERS[text.FILE] = text.read
PASSES["overlap"] = _overlapped

"""Schedules: one pure function a file, `builder(topology, needed, direction, travels) -> Plan`.

needed(q block, kv block) says whether any query of the one sees any key of the other; a schedule may leave out products
*and moves* that nobody needs. A new schedule is one file and one line in SCHEDULES (and its axes in ds_seqpar.shapes).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from ..layout import LAYOUTS, visible
from ..overlap import overlapped
from ..plan import Needed, Plan, validate
from ..topology import Topology
from .distflash import distflash
from .double_ring import double_ring
from .mesh import mesh
from .ring import ring

SCHEDULES: dict[str, Callable[[Topology, Needed, str, str], Plan]] = {
    "attention2d": mesh,
    "distflash": distflash,
    "double_ring": double_ring,
    "mesh": mesh,
    "ring": ring,
    "wallfacer": mesh,
}
Sizes = tuple[tuple[str, float], ...]  # bytes of one block of each kind, or anything in that proportion


@functools.lru_cache(maxsize=256)
def build(
    schedule: str,
    topology: Topology,
    layout: str,
    seq: int,
    causal: bool,
    direction: str,
    travels: str = "kv",
    overlap: bool = False,
    sizes: Sizes | None = None,
) -> Plan:
    """The validated plan for these settings and a sequence of `seq` tokens, made once.

    travels "auto" takes what makes the busiest rank receive less; it and `overlap` need `sizes`.
    """
    pairs = _needed_pairs(layout, seq, topology.size(*topology.inner_axes), causal)
    return _build(schedule, topology, pairs, direction, travels, overlap, sizes)


@functools.lru_cache(maxsize=64)
def _needed_pairs(layout: str, seq: int, size: int, causal: bool) -> frozenset[tuple[int, int]]:
    blocks = [LAYOUTS[layout](seq, size, rank) for rank in range(size)]
    return frozenset((i, j) for i in range(size) for j in range(size) if visible(blocks[i], blocks[j], causal))


@functools.lru_cache(maxsize=64)
def _build(
    schedule: str,
    topology: Topology,
    pairs: frozenset[tuple[int, int]],
    direction: str,
    travels: str,
    overlap: bool,
    sizes: Sizes | None,
) -> Plan:
    def needed(i: int, j: int) -> bool:
        return (i, j) in pairs

    choices = (
        ("kv", "q") if travels == "auto" and schedule != "distflash" else ("kv" if travels == "auto" else travels,)
    )
    plans = [SCHEDULES[schedule](topology, needed, direction, choice) for choice in choices]
    plan = min(plans, key=lambda plan: max(plan.received(dict(sizes)))) if len(plans) > 1 else plans[0]
    plan = dataclasses.replace(plan, name=schedule)  # not the family's
    if overlap:
        plan = overlapped(plan, needed, dict(sizes))
    validate(plan, pairs)
    return plan

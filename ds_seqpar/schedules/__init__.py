"""Schedules: one pure function a file, `builder(topology, needed, direction) -> Plan`.

needed(q block, kv block) says whether any query of the one sees any key of the other; a schedule may leave out products
*and moves* that nobody needs. A new schedule is one file and one line in SCHEDULES.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..layout import LAYOUTS, visible
from ..plan import Needed, Plan, validate
from ..topology import Topology
from .ring import ring

SCHEDULES: dict[str, Callable[[Topology, Needed, str], Plan]] = {"ring": ring}


@functools.lru_cache(maxsize=256)
def build(schedule: str, topology: Topology, layout: str, seq: int, causal: bool, direction: str) -> Plan:
    """The validated plan for these settings and a sequence of `seq` tokens, made once."""
    pairs = _needed_pairs(layout, seq, topology.size(*topology.inner_axes), causal)
    return _build(schedule, topology, pairs, direction)


@functools.lru_cache(maxsize=64)
def _needed_pairs(layout: str, seq: int, size: int, causal: bool) -> frozenset[tuple[int, int]]:
    blocks = [LAYOUTS[layout](seq, size, rank) for rank in range(size)]
    return frozenset((i, j) for i in range(size) for j in range(size) if visible(blocks[i], blocks[j], causal))


@functools.lru_cache(maxsize=64)
def _build(schedule: str, topology: Topology, pairs: frozenset[tuple[int, int]], direction: str) -> Plan:
    plan = SCHEDULES[schedule](topology, lambda i, j: (i, j) in pairs, direction)
    validate(plan, pairs)
    return plan

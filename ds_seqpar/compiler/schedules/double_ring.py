"""BurstAttention's double ring (section 3.2): most hops stay inside a window of ranks, a node."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import SECTION, ConfigError
from ..plan import Counted, Pattern
from ..topology import Axes, Topology, divisors
from .base import Heads, Own, Schedule, blocks_received, count
from .rotation import Round, rotation


def double_ring(topology: Topology, pattern: Pattern, direction: str, travels: str = "kv") -> Counted:
    """A block visits the W ranks of a window, then crosses to the next window and visits its W, and so on: A/W - 1 of
    its A - 1 hops leave a node, and so does the last hop of its gradient, straight home."""
    window, windows = topology.size("window"), topology.size("windows")

    def at(rank: int, t: int, sign: int) -> int:
        """The rank t hops on (sign 1) or back (-1). W - 1 hops inside a window make a crossing's shift."""
        crossed, inside = divmod(t, window)
        w = (rank % window + sign * (crossed * (window - 1) + inside)) % window
        return w + window * ((rank // window + sign * crossed) % windows)

    way = Round(
        size=window * windows,
        there=lambda unit, t: at(unit, t, 1),
        here=lambda rank, t: at(rank, t, -1),
        keys=lambda rank: ((rank,), (rank,)),
    )
    return rotation(way.facing(travels), window * windows, direction, travels, pattern)


def shapes(ranks: int) -> list[Own]:
    return [{"window": window} for window in divisors(ranks)]


def resolve(ranks: int, given: Own, heads: Heads | None) -> Own:
    """A window that is not given: the divisor of `ranks` nearest to its square root."""
    fitting = divisors(ranks)
    window = given.get("window") or min(reversed(fitting), key=lambda w: abs(w * w - ranks))
    if window not in fitting:
        raise ConfigError(
            f"{SECTION}.window must divide the {ranks} ranks of the double ring; got {window}, use one of {fitting}"
        )
    return {"window": window}


def axes(ranks: int, own: Own) -> Axes:
    return (("window", own["window"]), ("windows", ranks // own["window"]))


def received(axes: Axes, direction: str, travels: str, units: Mapping[str, float]) -> list[float]:
    """A - 1 foreign blocks of what travels, whatever the window."""
    (_, window), (_, windows) = axes
    foreign = window * windows - 1
    queries, keys = (0, foreign) if travels == "kv" else (foreign, 0)
    return blocks_received(foreign + 1, queries, keys, direction, units)


SCHEDULE = Schedule(
    name="double_ring",
    summary="BurstAttention's: most hops of a ring stay inside a window of ranks, a node",
    build=double_ring,
    axes=axes,
    received=received,
    settings=(count("window", "ranks of the inner ring, a node's"),),
    shapes=shapes,
    resolve=resolve,
    ring_axes=("window",),
)

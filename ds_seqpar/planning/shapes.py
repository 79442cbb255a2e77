"""Shapes of schedules: which axes the inner ranks have, chosen where the user says "auto". Pure integers."""

from __future__ import annotations

from ..errors import ConfigError

Axes = tuple[tuple[str, int], ...]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def ring(ranks: int) -> Axes:
    return (("ring", ranks),)


def double_ring(ranks: int, window: int | str) -> Axes:
    """window "auto": the divisor of `ranks` nearest to its square root."""
    if window == "auto":
        window = min(reversed(divisors(ranks)), key=lambda w: abs(w * w - ranks))
    if ranks % window:
        raise ConfigError(
            f"sequence_parallel.window must divide the {ranks} ranks of the double ring; got {window}, "
            f"use one of {divisors(ranks)}"
        )
    return (("window", window), ("windows", ranks // window))


def attention2d(ranks: int, rows: int | str, cols: int | str, heads: tuple[int, int] | None) -> Axes:
    """q is gathered along `cols` ranks, k/v along `rows`. "auto": the fewest elements received for these heads, forward
    and backward together: (cols - 1) 5 Hq and (rows - 1) 6 Hkv for every token and D."""
    if rows == "auto" and cols == "auto":
        q_heads, kv_heads = heads or (1, 1)
        cols = min(divisors(ranks), key=lambda a: 5 * (a - 1) * q_heads + 6 * (ranks // a - 1) * kv_heads)
    if rows == "auto" and ranks % cols == 0:
        rows = ranks // cols
    if cols == "auto" and ranks % rows == 0:
        cols = ranks // rows
    if "auto" in (rows, cols) or rows * cols != ranks:
        shapes = [(ranks // a, a) for a in divisors(ranks)]
        raise ConfigError(
            f"sequence_parallel.rows x cols must be the {ranks} ranks of attention2d; got rows {rows}, cols {cols}, "
            f"use one of (rows, cols) = {shapes}"
        )
    return _mesh(cols, rows, 1)


def wallfacer(ranks: int, team: int | str) -> Axes:
    """Teams of C: q and k/v are gathered over C ranks each, ranks / C^2 go round. "auto": the largest that fits."""
    fitting = [c for c in divisors(ranks) if ranks % (c * c) == 0]
    if team == "auto":
        team = fitting[-1]
    if team not in fitting:
        raise ConfigError(
            f"sequence_parallel.team must be a number whose square divides the {ranks} ranks of wallfacer; "
            f"got {team}, use one of {fitting}"
        )
    return _mesh(team, team, ranks // team**2)


def mesh(ranks: int, shape: tuple[int, int, int] | str, heads: tuple[int, int] | None) -> Axes:
    """shape (a, b, R). "auto": as attention2d, but k/v in a ring, not gathered: the same elements, less memory."""
    if shape == "auto":
        (_, a), (_, b), _ = attention2d(ranks, "auto", "auto", heads)
        shape = (a, 1, b)
    a, b, r = shape
    if a * b * r != ranks:
        raise ConfigError(
            f"sequence_parallel.mesh [a, b, R] must multiply to the {ranks} inner ranks; "
            f"got {list(shape)} = {a * b * r}, use for example {[1, 1, ranks]}"
        )
    return _mesh(a, b, r)


def _mesh(a: int, b: int, r: int) -> Axes:
    return (("x", a), ("y", b), ("z", r))


def place(axes: Axes, placement: tuple[str, ...] | str) -> tuple[str, ...]:
    """The order of "ulysses", the inner axes and "data" over ranks, the fastest first: its ranks are neighbours.

    Presets: "ulysses_intra" ("auto") keeps Ulysses' all-to-all inside a node; "collectives_intra" the gathers of a mesh
    and "ring_intra" its ring or a double ring's window (WallFacer's two placements).
    """
    inner = tuple(name for name, _ in axes)
    first = {
        "auto": ("ulysses",),
        "ulysses_intra": ("ulysses",),
        "collectives_intra": ("x", "y"),
        "ring_intra": tuple(name for name in ("z", "window", "ring") if name in inner),
    }
    every = ("ulysses", *inner, "data")
    if isinstance(placement, str):
        wanted = first[placement]
        if not set(wanted) <= set(every):
            raise ConfigError(
                f'sequence_parallel.placement "{placement}" needs a schedule with collectives (attention2d, wallfacer, '
                f'mesh); got one with axes {", ".join(inner)}, use "ulysses_intra" or "ring_intra"'
            )
    else:
        wanted = placement
        if sorted({*wanted, "data"}) != sorted(every) or len(set(wanted)) != len(wanted):
            raise ConfigError(
                f"sequence_parallel.placement must order the axes {', '.join(every[:-1])} (data is last unless named); "
                f"got {list(wanted)}"
            )
    return (*wanted, *(name for name in every if name not in wanted))

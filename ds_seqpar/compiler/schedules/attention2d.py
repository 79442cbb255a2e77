"""Attention2D: ranks as a grid. A mesh without a ring: q is gathered along its rows, k/v along its columns."""

from __future__ import annotations

from ...errors import SECTION, ConfigError
from ..topology import divisors
from .base import Heads, Own, Schedule, count
from .mesh import mesh, mesh_axes, received, sides


def shapes(ranks: int) -> list[Own]:
    return [{"rows": ranks // cols, "cols": cols} for cols in divisors(ranks)]


def resolve(ranks: int, given: Own, heads: Heads | None) -> Own:
    """One side gives the other; neither: the fewest elements received for these heads."""
    rows, cols = given.get("rows"), given.get("cols")
    if not (rows or cols):
        cols, rows = sides(ranks, heads)
    rows = ranks // cols if cols and not rows else rows
    cols = ranks // rows if rows and not cols else cols
    if {"rows": rows, "cols": cols} not in shapes(ranks):
        fitting = [(shape["rows"], shape["cols"]) for shape in shapes(ranks)]
        raise ConfigError(
            f"{SECTION}.rows x cols must be the {ranks} ranks of attention2d; got "
            f"{', '.join(f'{side} {value}' for side, value in given.items())}, use one of (rows, cols) = {fitting}"
        )
    return {"rows": rows, "cols": cols}


SCHEDULE = Schedule(
    name="attention2d",
    summary="Attention2D: q is gathered along the rows of a grid, k/v along its columns",
    build=mesh,
    axes=lambda ranks, own: mesh_axes(own["cols"], own["rows"], 1),
    received=received,
    settings=(
        count("rows", "ranks that k/v is gathered over"),
        count("cols", "ranks that q is gathered over"),
    ),
    shapes=shapes,
    resolve=resolve,
    collective_axes=("x", "y"),
    ring_axes=("z",),
)

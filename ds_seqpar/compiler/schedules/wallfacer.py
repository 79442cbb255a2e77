"""WallFacer: a mesh (C, C, A / C^2), whose teams of C gather q and k/v and pass one of them on."""

from __future__ import annotations

from ...errors import SECTION, ConfigError
from ..topology import divisors
from .base import Heads, Own, Schedule, count
from .mesh import mesh, mesh_axes, received


def shapes(ranks: int) -> list[Own]:
    return [{"team": team} for team in divisors(ranks) if ranks % (team * team) == 0]


def resolve(ranks: int, given: Own, heads: Heads | None) -> Own:
    """A team that is not given: the largest that fits."""
    fitting = [shape["team"] for shape in shapes(ranks)]
    team = given.get("team") or fitting[-1]
    if team not in fitting:
        raise ConfigError(
            f"{SECTION}.team must be a number whose square divides the {ranks} ranks of wallfacer; "
            f"got {team}, use one of {fitting}"
        )
    return {"team": team}


SCHEDULE = Schedule(
    name="wallfacer",
    summary="WallFacer: q and k/v are gathered over teams of C, and A / C^2 teams go round",
    build=mesh,
    axes=lambda ranks, own: mesh_axes(own["team"], own["team"], ranks // own["team"] ** 2),
    received=received,
    settings=(count("team", "the size C of a team"),),
    shapes=shapes,
    resolve=resolve,
    collective_axes=("x", "y"),
    ring_axes=("z",),
)

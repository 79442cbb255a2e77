"""A schedule from a file of its own, as a user would write one: all there is to know of it, and nothing elsewhere."""

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.schedules.actions import Gather, ReduceScatter
from ds_seqpar.core.compiler.schedules.base import Schedule, blocks_received, count
from ds_seqpar.core.compiler.schedules.ring import Rotation, Round
from ds_seqpar.core.compiler.sharding.layout import Layout, Run, divisors


def carousel(topology, block_mask, direction, moving_side="kv"):
    """Rank p = seat + seats * car. k/v is gathered over the seats of a car, and what travels goes from car to car, the
    other way round than in a ring: in step t rank p holds what car + t brought."""
    seats, cars = topology.size("seat"), topology.size("car")
    ranks = seats * cars

    def car(rank):
        return tuple(range(rank // seats * seats, (rank // seats + 1) * seats))

    def together(cls, kind, rank):
        return (cls(ranks=car(rank), kind=kind, keys=tuple((p,) for p in car(rank))),) if seats > 1 else ()

    way = Round(
        size=ranks,
        there=lambda unit, t: (unit - seats * t) % ranks,
        here=lambda rank, t: (rank + seats * t) % ranks,
        keys=lambda rank: ((rank,), car(rank)),
        gathers=lambda rank: together(Gather, "kv", rank),
        reduces=lambda rank: together(ReduceScatter, "dkv", rank) if direction == "backward" else (),
    )
    return Rotation(way, cars, direction, moving_side, block_mask)


def backwards(tokens, ranks, rank):
    """The last tokens go to the first rank."""
    first, end = (tokens * slices // ranks for slices in (ranks - 1 - rank, ranks - rank))
    return (Run(first, 1, end - first),)


def shapes(ranks):
    return [{"seats": seats} for seats in divisors(ranks)]


def resolve(ranks, given, heads):
    """Two seats where they are even."""
    seats = given.get("seats") or (2 if ranks % 2 == 0 else 1)
    if ranks % seats:
        raise ConfigError(
            f"sequence_parallel.seats must divide the {ranks} ranks of the carousel; got {seats}, "
            f"use one of {divisors(ranks)}"
        )
    return {"seats": seats}


def axes(ranks, options):
    return (("seat", options["seats"]), ("car", ranks // options["seats"]))


def received(axes, direction, moving_side, units):
    (_, seats), (_, cars) = axes
    queries, keys = (0, seats * cars - 1) if moving_side == "kv" else (cars - 1, seats - 1)
    return blocks_received(seats * cars, queries, keys, direction, units)


SCHEDULE = Schedule(
    name="carousel",
    summary="k/v is gathered over the seats of a car, and cars go round backwards",
    build=carousel,
    axes=axes,
    received=received,
    settings=(count("seats", "ranks that k/v is gathered over"),),
    shapes=shapes,
    resolve=resolve,
    extra_layouts=(Layout(name="backwards", runs=backwards),),
    layouts=("striped", "zigzag", "backwards"),
    default_layout="striped",
    collective_axes=("seat",),
    ring_axes=("car",),
)

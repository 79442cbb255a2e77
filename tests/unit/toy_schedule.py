"""A schedule from a file of its own, as a user would write one: all there is to know of it, and nothing elsewhere."""

from ds_seqpar.errors import ConfigError
from ds_seqpar.planning.plan import Gather, ReduceScatter
from ds_seqpar.planning.schedules.base import Schedule, blocks_received, count
from ds_seqpar.planning.schedules.rotation import rotation
from ds_seqpar.planning.topology import divisors


def carousel(topology, needed, direction, travels="kv"):
    """Rank p = seat + seats * car. k/v is gathered over the seats of a car, and what travels goes from car to car, the
    other way round than in a ring: in step t rank p holds what car + t brought."""
    seats, cars = topology.size("seat"), topology.size("car")
    groups = [tuple(range(car * seats, (car + 1) * seats)) for car in range(cars)]
    together = groups if seats > 1 else []
    return rotation(
        "carousel",
        direction,
        travels,
        [((rank,), groups[rank // seats]) for rank in range(seats * cars)],
        [[(rank - seats * t) % (seats * cars) for t in range(cars)] for rank in range(seats * cars)],
        needed,
        gathers=tuple(_of(Gather, "kv", group) for group in together),
        reduces=tuple(_of(ReduceScatter, "dkv", group) for group in together if direction == "backward"),
    )


def _of(cls, kind, group):
    return cls(ranks=group, kind=kind, parts=tuple((rank,) for rank in group))


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


def axes(ranks, own):
    return (("seat", own["seats"]), ("car", ranks // own["seats"]))


def received(axes, direction, travels, units):
    (_, seats), (_, cars) = axes
    queries, keys = (0, seats * cars - 1) if travels == "kv" else (cars - 1, seats - 1)
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
    layouts=("striped", "zigzag"),
    default_layout="striped",
    collective_axes=("seat",),
    ring_axes=("car",),
)

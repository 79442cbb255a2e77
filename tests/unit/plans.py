"""Plans for tests: every shape of every schedule, which blocks meet, and plans with one action changed."""

import dataclasses
import itertools
import random

from hypothesis import strategies as st

from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.schedules.actions import Step
from ds_seqpar.core.compiler.schedules.plan import BlockMask, Plan
from ds_seqpar.core.compiler.sharding.layout import Topology

DIRECTIONS = ("forward", "backward")
# those whose ranks own a block each, as many tests take for granted; test_triangle.py has what they say of the other
SINGLE = tuple(name for name, schedule in SCHEDULES.items() if schedule.blocks_per_rank == 1)
# (schedule, direction, what travels)
FORMS = tuple(
    (name, direction, travels)
    for name in SINGLE
    for direction, travels in itertools.product(DIRECTIONS, SCHEDULES[name].moving_sides)
)

# settings of each with more than one rank on every axis that 4 ranks leave room for; the triangle has no 4
SHAPES = {
    "ring": {},
    "double_ring": {"ring_size": 2},
    "distflash": {},
    "attention2d": {"rows": 2},
    "wallfacer": {"team": 2},
    "mesh": {"mesh": (2, 1, 2), "overlap": True},
    "triangle": {"size": 3},
}


def topology(*axes):
    return Topology(axes=(("ulysses", 1), *axes, ("data", 1)))


def shaped(schedule, size, **own):
    """The ranks of a schedule, with these settings of its own; what is not given is chosen."""
    return topology(*SCHEDULES[schedule].axes(size, SCHEDULES[schedule].resolve(size, own, None)))


def ring(size):
    return shaped("ring", size)


def mesh(a, b, r):
    return shaped("mesh", a * b * r, mesh=(a, b, r))


def double_ring(size, ring_size):
    return shaped("double_ring", size, ring_size=ring_size)


def topologies(schedule, size):
    """Every shape that `size` CP ranks can take for this schedule."""
    return [shaped(schedule, size, **own) for own in SCHEDULES[schedule].shapes(size)]


def ranks(topology):
    return topology.size(*topology.cp_axes)


def everything(size):
    """All products needed, as without a mask."""
    return frozenset(itertools.product(range(size), repeat=2))


def causal_contiguous(size):
    return frozenset((i, j) for i, j in everything(size) if j <= i)


def block_mask(size, pairs, even=True):
    """Blocks of which these (q, kv) pairs meet."""
    rows = [0] * size
    for i, j in pairs:
        rows[i] |= 1 << j
    return BlockMask(tuple(rows), even=even)


def blocks(schedule, size):
    """How many the ranks own together."""
    return size * SCHEDULES[schedule].blocks_per_rank


def takes(schedule, size, shape=None):
    """All products that a schedule can compute on so many ranks, in this shape of them."""
    its = SCHEDULES[schedule] if shape is None else at(schedule, shape)
    return frozenset(pair for pair in everything(blocks(schedule, size)) if its.can_compute(*pair))


def at(schedule, shape):
    """The schedule as it is with this topology."""
    its, size = SCHEDULES[schedule], ranks(shape)
    owns = (own for own in its.shapes(size) if topology(*its.axes(size, own)) == shape)
    return next((its.at(size, own) for own in owns), its)


def build(schedule, topology, direction, travels="kv", pairs=None, even=True):
    """The schedule's plan for these pairs; default: all that it can take."""
    size = ranks(topology)
    meet = block_mask(blocks(schedule, size), takes(schedule, size, topology) if pairs is None else pairs, even)
    return built(schedule, topology, direction, travels, meet)


def built(schedule, topology, direction, travels, meet):
    """The schedule's plan for a BlockMask."""
    steps = SCHEDULES[schedule].build(topology, meet, direction, travels)
    return Plan.of(schedule, direction, ranks(topology), steps, SCHEDULES[schedule].blocks_per_rank)


@st.composite
def problems(draw, schedule, most):
    """(topology, pairs): up to `most` ranks in any shape, and which products are needed; always the diagonal, for every
    query sees its own key."""
    size = draw(st.integers(1, most))
    shape = draw(st.sampled_from(topologies(schedule, size)))
    kind = draw(st.sampled_from(["random", "random", "all", "causal contiguous", "window", "diagonal"]))
    possible = causal_contiguous(size) if kind == "causal contiguous" else takes(schedule, size)
    if kind in ("all", "causal contiguous"):
        return shape, possible
    if kind == "window":
        far = draw(st.integers(1, size))
        return shape, frozenset((i, j) for i, j in possible if 0 <= i - j <= far)
    density = draw(st.floats(0, 1)) if kind == "random" else 0
    dice = random.Random(draw(st.integers(0, 2**32)))
    return shape, frozenset((i, j) for i, j in sorted(possible) if i == j or dice.random() < density)


# ---- a plan as steps of all ranks together, each action once

FIELDS = tuple(field.name for field in dataclasses.fields(Step))


def joint(plan):
    """The plan's steps, each with the actions of all ranks: as the first rank that they name has them."""
    return tuple(
        Step(**{
            field: tuple(
                action for rank, step in enumerate(steps) for action in getattr(step, field) if action.ranks[0] == rank
            )
            for field in FIELDS
        })
        for steps in zip(*plan.ranks, strict=True)
    )  # fmt: skip


def by_hand(size, *steps, direction="forward", name="hand"):
    """The plan whose ranks each have those actions of the joint steps that name them."""

    def of(rank):
        return tuple(
            Step(**{field: tuple(a for a in getattr(step, field) if rank in a.ranks) for field in FIELDS})
            for step in steps
        )

    return Plan.of(name, direction, size, of)


def places(steps):
    """(step, field, index, action) of every action of some steps: joint ones, or a rank's."""
    for number, step in enumerate(steps):
        for field in FIELDS:
            for index, action in enumerate(getattr(step, field)):
                yield number, field, index, action


def replaced(steps, place, *actions):
    """The steps with the action at `place` replaced by `actions`."""
    number, field, index, _ = place
    old = getattr(steps[number], field)
    new = dataclasses.replace(steps[number], **{field: (*old[:index], *actions, *old[index + 1 :])})
    return (*steps[:number], new, *steps[number + 1 :])


def added(steps, number, field, action):
    """The steps with one action more, at the end of a field of step `number`."""
    new = dataclasses.replace(steps[number], **{field: (*getattr(steps[number], field), action)})
    return (*steps[:number], new, *steps[number + 1 :])


def rejoined(plan, steps):
    """The plan with these joint steps."""
    return by_hand(plan.size, *steps, direction=plan.direction, name=plan.name)


def changed(plan, place, *actions):
    """The plan with the action at a place of its joint steps replaced on every rank that it names."""
    return rejoined(plan, replaced(joint(plan), place, *actions))


def changed_on(plan, rank, change):
    """The plan with the steps of one rank changed, and of no other."""
    mine = change(plan.ranks[rank])
    return dataclasses.replace(plan, ranks=(*plan.ranks[:rank], mine, *plan.ranks[rank + 1 :]))

"""Plans for tests: every shape of every schedule, relations of needed products, and plans with one action changed."""

import dataclasses
import itertools
import random

from hypothesis import strategies as st

from ds_seqpar.planning.schedules import SCHEDULES
from ds_seqpar.planning.topology import Topology

DIRECTIONS = ("forward", "backward")
# (schedule, direction, what travels)
FORMS = tuple(
    (name, direction, travels)
    for name, schedule in SCHEDULES.items()
    for direction, travels in itertools.product(DIRECTIONS, schedule.travellers)
)


def topology(*axes):
    return Topology(axes=(("ulysses", 1), *axes, ("data", 1)))


def shaped(schedule, size, **own):
    """The ranks of a schedule, with these settings of its own; what is not given is chosen."""
    return topology(*SCHEDULES[schedule].axes(size, SCHEDULES[schedule].resolve(size, own, None)))


def ring(size):
    return shaped("ring", size)


def mesh(a, b, r):
    return shaped("mesh", a * b * r, mesh=(a, b, r))


def double_ring(size, window):
    return shaped("double_ring", size, window=window)


def topologies(schedule, size):
    """Every shape that `size` inner ranks can take for this schedule."""
    return [shaped(schedule, size, **own) for own in SCHEDULES[schedule].shapes(size)]


def ranks(topology):
    return topology.size(*topology.inner_axes)


def everything(size):
    """All products needed, as without a mask."""
    return frozenset(itertools.product(range(size), repeat=2))


def causal_contiguous(size):
    return frozenset((i, j) for i, j in everything(size) if j <= i)


def build(schedule, topology, direction, travels="kv", pairs=None):
    """The schedule's plan for these pairs; default: all that it can take."""
    if pairs is None:
        pairs = {pair for pair in everything(ranks(topology)) if SCHEDULES[schedule].takes(*pair)}
    return SCHEDULES[schedule].build(topology, lambda i, j: (i, j) in pairs, direction, travels)


@st.composite
def problems(draw, schedule, most):
    """(topology, pairs): up to `most` ranks in any shape, and which products are needed; always the diagonal, for every
    query sees its own key."""
    size = draw(st.integers(1, most))
    shape = draw(st.sampled_from(topologies(schedule, size)))
    kind = draw(st.sampled_from(["random", "random", "all", "causal contiguous", "diagonal"]))
    if schedule == "distflash" or kind == "causal contiguous":
        return shape, causal_contiguous(size)
    if kind == "all":
        return shape, everything(size)
    density = draw(st.floats(0, 1)) if kind == "random" else 0
    dice = random.Random(draw(st.integers(0, 2**32)))
    return shape, frozenset((i, j) for i, j in sorted(everything(size)) if i == j or dice.random() < density)


def places(plan):
    """(step, field, index, action) of every action."""
    for number, step in enumerate(plan.steps):
        for field in dataclasses.fields(step):
            for index, action in enumerate(getattr(step, field.name)):
                yield number, field.name, index, action


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


def changed(plan, place, *actions):
    return dataclasses.replace(plan, steps=replaced(plan.steps, place, *actions))

"""Plans for tests: relations of needed products, and plans with one action changed."""

import dataclasses
import itertools

from ds_seqpar.topology import Topology


def topology(size):
    return Topology(axes=(("ulysses", 1), ("ring", size), ("data", 1)))


def everything(size):
    """All products needed, as without a mask."""
    return frozenset(itertools.product(range(size), repeat=2))


def causal_contiguous(size):
    return frozenset((i, j) for i, j in everything(size) if j <= i)


def build(builder, size, direction, pairs=None):
    """A schedule's plan for these pairs; default: all."""
    pairs = everything(size) if pairs is None else pairs
    return builder(topology(size), lambda i, j: (i, j) in pairs, direction)


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

"""Ranks and coordinates are two names for the same thing, and groups along axes partition the world."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.sharding.layout import Topology
from ds_seqpar.core.settings import SequenceParallelConfig
from tests import grids
from tests.grids import examples

NAMES = ("ulysses", "x", "y", "z", "data")


@st.composite
def _topologies(draw):
    names = draw(st.permutations(NAMES))
    sizes = draw(st.lists(st.integers(1, 3 if grids.quick else 4), min_size=len(names), max_size=len(names)))
    return Topology(axes=tuple(zip(names, sizes, strict=True)))


_axes = st.sets(st.sampled_from(NAMES))


@examples(100)
@given(_topologies())
def test_ranks_and_coordinates_are_a_bijection(topology):
    assert topology.world_size == math.prod(size for _, size in topology.axes)
    seen = set()
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert topology.rank(at) == rank
        assert all(0 <= at[name] < size for name, size in topology.axes)
        seen.add(tuple(at.items()))
    assert len(seen) == topology.world_size


@examples(100)
@given(_topologies())
def test_neighbors_on_the_first_axis_are_neighboring_ranks(topology):
    (first, size), *_ = topology.axes
    for rank in range(topology.world_size - 1):
        if topology.coordinates(rank)[first] + 1 < size:
            assert topology.coordinates(rank + 1) == {
                **topology.coordinates(rank),
                first: topology.coordinates(rank)[first] + 1,
            }


@examples(100)
@given(_topologies(), _axes)
def test_groups_partition_the_world_and_are_the_same_from_every_member(topology, names):
    groups = topology.groups(*names)
    assert sorted(itertools.chain(*groups)) == list(range(topology.world_size))
    assert groups == sorted(groups)
    for group in groups:
        assert len(group) == topology.size(*names)
        for rank in group:
            assert topology.group(rank, *names) == group


@examples(100)
@given(_topologies(), _axes)
def test_members_of_a_group_stand_in_the_order_of_their_index(topology, names):
    for group in topology.groups(*names):
        assert [topology.index(rank, *names) for rank in group] == list(range(len(group)))
        fixed = {name for name, _ in topology.axes} - names
        assert len({tuple(topology.coordinates(rank)[name] for name in sorted(fixed)) for rank in group}) == 1


@examples(100)
@given(_topologies())
def test_inner_axes_are_all_but_ulysses_and_data_in_their_order(topology):
    assert set(topology.cp_axes) == {"x", "y", "z"}
    assert list(topology.cp_axes) == [name for name, _ in topology.axes if name in topology.cp_axes]


def test_a_mesh_numbers_its_inner_ranks_with_the_first_axis_fastest():
    topology = Topology(axes=(("ulysses", 2), ("x", 2), ("y", 3), ("z", 2), ("data", 2)))
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert topology.index(rank, "x", "y", "z") == at["x"] + 2 * (at["y"] + 3 * at["z"])


# deepspeed#7672: fewer ranks share a sequence than there are, and a rank looks itself up in the wrong group
def test_a_config_makes_ulysses_fastest_then_the_ring_then_data():
    config = SequenceParallelConfig(size=4, ulysses=2).resolve(8)
    topology = config.topology(8)
    assert topology.groups("ulysses") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert topology.groups("ring") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert topology.groups("ulysses", *topology.cp_axes) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [topology.index(rank, "data") for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [topology.index(rank, "ulysses", "ring") for rank in range(8)] == [0, 1, 2, 3] * 2

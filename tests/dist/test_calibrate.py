"""A machine is measured on real ranks; what is found is a machine's file, the same on all of them."""

import json
import os

import pytest

from ds_seqpar.cli import calibrate, calibration
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.machine import Machine
from tests.launch import RankFailure, on_ranks


def small(per_node):
    """Of tiny tensors, on ranks that are told how many share a node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node[int(os.environ["RANK"])])
    for sizes, size in ((calibration.TILES, (32, 64)), (calibration.HEADS, (1, 16)), (calibration.MATRIX, 64),
                        (calibration.LONG, 2**16), (calibration.MOVED, 2**16), (calibration.WINDOW, 0.0)):  # fmt: skip
        sizes["cpu"] = size
    calibration.MODULES, calibration.HOOKED = 2, 1
    return calibrate.calibrate()


@pytest.mark.parametrize(
    ("world", "per_node"),
    [(2, 2), (2, 1), *(pytest.param(4, per_node, marks=pytest.mark.whole) for per_node in (4, 2, 1))],
)
def test_a_calibration_is_a_machine(tmp_path, world, per_node):
    first, *others = on_ranks(world, small, [per_node] * world)
    assert all(other == first for other in others)
    place = tmp_path / "machine.json"
    place.write_text(json.dumps(first))
    machine = Machine.load(str(place))
    assert machine.per_node == per_node
    assert set(machine.attention) == set(machine.gemm) == {"float32", "bfloat16"}
    assert machine.sources["inside"].startswith("measured" if per_node > 1 else "not measured")
    assert machine.sources["between"].startswith("measured" if per_node < world else "not measured")
    assert not machine.ahead
    assert machine.zero.ranks == world
    assert min(machine.zero.forward, machine.zero.backward) > 0
    assert "GB/s each way" in calibrate.table(first)


def test_unequal_nodes_are_refused():
    with pytest.raises(RankFailure, match=r"ConfigError: .*nodes of \[1, 3\]"):
        on_ranks(4, small, [3, 3, 3, 1])


def test_one_rank_has_no_links():
    with pytest.raises(RankFailure, match=r"ConfigError: .*two ranks.*got 1"):
        on_ranks(1, small, [1])


def test_it_needs_ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"calibrate.*RANK,"):
        calibrate.run(None)

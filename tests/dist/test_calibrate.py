"""A machine is measured on real ranks; what is found is a machine's file, the same on all of them, by which kernels are
chosen."""

import copy
import json
import os

import pytest
import torch

from ds_seqpar import SequenceParallel
from ds_seqpar.cli import calibrate, calibration
from ds_seqpar.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.machine import Machine, presets
from ds_seqpar.runtime.kernels import KERNELS
from tests.dist.ranks import SECONDS, is_one_sentence, make, refusal
from tests.launch import RankFailure, on_ranks
from tests.words import missing


def small(per_node):
    """Of tiny tensors, on ranks that are told how many share a node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node[int(os.environ["RANK"])])
    for sizes, size in ((calibration.TILES, (32, 64)), (calibration.HEADS, (1, 16)),
                        (calibration.HEAD_DIMS, (16,)), (calibration.MATRIX, 64),
                        (calibration.LONG, 2**16), (calibration.MOVED, 2**16), (calibration.WINDOW, 0.0)):  # fmt: skip
        sizes["cpu"] = size
    calibration.MODULES, calibration.HOOKED = 2, 1
    return calibrate.calibrate()


@pytest.mark.parametrize(
    ("world", "per_node"),
    [(2, 1), *(pytest.param(4, per_node, marks=pytest.mark.whole) for per_node in (4, 2))],
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
    assert len(machine.kernels["cpu"]) == 12
    for case, order in machine.kernels["cpu"].items():
        assert sorted(order) == ["chunked", "cpu_flash"], case


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


FAST, SLOW = ["cpu_flash"], ["reference", "cpu_flash"]
MEASURED = {"float64 8 causal": SLOW, "float64 8 window": FAST, "float64 8 documents": SLOW, "float32 8 causal": FAST}
MASKS = CAUSAL, FULL, Mask(window=5), Mask(window=5, documents=(0, 7))


def chosen(sp, dtype=torch.float64):
    """The kernel of each mask, both ways."""
    names = []
    for mask in MASKS:
        q, k, v = (torch.zeros(1, 8, 2, 8, dtype=dtype, requires_grad=True) for _ in range(3))
        sp.attention(q, k, v, mask=mask).sum().backward()
        names.append({kernel.name for _, (_, kernel) in sp.runtime.last_bound.values()})
    return names


def by_file(folder):
    rank, found = int(os.environ["RANK"]), {}
    machine = {**copy.deepcopy(presets()["cpu"]), "kernels": {"cpu": MEASURED, "NVIDIA H100": {"float64 8 full": SLOW}}}

    def with_file(name, **more):
        place = folder / f"{rank}-{name}" / "machine.json"  # each rank's own, as each node may have one
        place.parent.mkdir()
        place.write_text(json.dumps(machine))
        os.chdir(place.parent)
        return {"machine": "machine.json", "size": 2, "ulysses": 1, "schedule": "ring", **more}

    with make(**with_file("same")) as sp:
        found["chosen"] = chosen(sp), chosen(sp, torch.float32)
    with make(**with_file("named", kernel="chunked")) as sp:
        found["named"] = chosen(sp)
    if rank:
        machine["kernels"]["cpu"]["float64 8 causal"] = FAST
    found["other order"] = refusal(make, **with_file("other"))
    if rank:
        machine["kernels"]["cpu"]["float64 8 causal"] = ["chuncked"]
    found["no kernel"] = refusal(make, **with_file("none"))
    if rank:
        KERNELS["chunked"].reasons = lambda spec: ["is not installed here"]
    found["not installed"] = refusal(SequenceParallel)
    with make(kernel="cpu_flash") as sp:
        found["named where another is missing"] = chosen(sp)
    return found


def test_kernels_are_chosen_by_the_file_that_the_settings_name_and_by_all_ranks_alike(tmp_path):
    for found in on_ranks(2, by_file, tmp_path, timeout=SECONDS):
        double, single = found["chosen"]
        assert double == [{"reference"}, {"cpu_flash"}, {"cpu_flash"}, {"reference"}]
        assert single == [{"cpu_flash"}] * 4
        assert found["named"] == [{"chunked"}] * 4
        assert found["named where another is missing"] == [{"cpu_flash"}] * 4
        words = {
            "other order": ("DisagreementError", "machine.json", "float64 8 causal", "name a", "rank 1: "),
            "no kernel": ("ConfigError", "cpu.float64 8 causal", "chuncked", "cpu_flash"),
            "not installed": ("DisagreementError", "kernels here", "rank 0: ", "chunked", "same packages"),
        }  # fmt: skip
        for name, (kind, *parts) in words.items():
            assert found[name][0] in (kind, "DisagreementError")
            assert is_one_sentence(found[name][1])
            assert missing(found[name][1], *parts) == []

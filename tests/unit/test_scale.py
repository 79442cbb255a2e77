"""What a rank makes does not grow with the world: 1,024 ranks on torch's fake backend, one after another."""

import json
import subprocess
import sys
from pathlib import Path

from ds_seqpar.core.compiler.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
WORLD = 1024
SCRIPT = """
import json
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests.unit.test_scale import shapes

world, found = int(1024), {}
for name, config in shapes(world).items():
    for rank in (0, 1, 8, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        sp = SequenceParallel(SequenceParallelConfig(**config))
        groups = sp.groups
        found.setdefault(name, []).append({
            "rank": rank,
            "sizes": sorted(dist.get_world_size(group) for group in groups.made),
            "sp_is_all": groups.sp is dist.group.WORLD and groups.control is dist.group.WORLD,
            "names": [group.group_name.split("/", 2)[2] for group in groups.made],
        })
        sp.close()
        dist.destroy_process_group()
print(json.dumps(found))
"""


def shapes(world):
    """Name -> settings for all ranks of the world, with 8 Ulysses ranks of Ulysses."""
    every = {name: {"ulysses": 8, "schedule": name} for name, its in SCHEDULES.items() if list(its.shapes(world // 8))}
    return every | {"default, 16 groups": {"ulysses": 8, "size": world // 16}}


def made():
    """Shape -> what each of some ranks made."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_rank_makes_its_own_groups_only():
    found = made()
    assert set(found) == set(shapes(WORLD))
    for rank in found["ring"]:
        assert rank["sizes"] == [8, 128]
        assert rank["sp_is_all"]
    for rank in found["default, 16 groups"]:
        assert rank["sizes"] == [8, 8, 64]
        assert not rank["sp_is_all"]
    names = [rank["names"] for rank in found["ring"]]
    assert names[0] == ["inner/0", "ulysses/0"]
    assert names[1] == ["inner/1", "ulysses/0"]  # with rank 0 in one of them
    assert names[2] == ["inner/0", "ulysses/8"]

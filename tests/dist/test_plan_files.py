"""A schedule from a file, over real gloo processes."""

import contextlib

import torch.distributed as dist

from ds_seqpar import SequenceParallel
from ds_seqpar.deepspeed.config import read_config
from tests import oracle
from tests.dist.ranks import SECONDS, assert_all_refused, assert_exact, differ, make, planned
from tests.launch import on_each_of
from tests.unit.plan_files import STAR, file_of, plans_of, save

HEADS = (4, 2)


@contextlib.contextmanager
def in_folder_with(tmp_path, content, name):
    """A folder for each rank, as nodes have, with a file of this content."""
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    with contextlib.chdir(folder):
        yield save(folder, content, name).replace(f"{folder}/", "")


@on_each_of(3)
def test_a_plan_by_hand_is_exact_and_sends_what_it_says(tmp_path):
    with in_folder_with(tmp_path, STAR, "star.plan") as setting:
        section = {"size": 3, "ulysses": 1, "schedule": setting}
        config = read_config({"train_batch_size": 3, "sequence_parallel": section})
        sp = SequenceParallel(config)
    assert_exact(sp, oracle.tensors(1, 24, HEADS))
    kv = 2 * 8 * HEADS[1] * 8  # elements of a block
    units = {"forward": {"kv": kv}, "backward": {"kv": kv, "dkv": kv}}
    assert sum(sp.comm.received.values()) == sum(planned(sp, 24, HEADS, units)) == 2 * 3 * kv


@on_each_of(4)
def test_a_plan_with_collectives_has_their_groups(tmp_path):
    content = file_of(plans_of("attention2d", 4, {"rows": 2}))
    with in_folder_with(tmp_path, content, "grid.plan") as setting:
        sp = make(size=4, ulysses=1, schedule=setting)
    assert len(sp.groups.collectives) == 2
    assert_exact(sp, oracle.tensors(1, 16, HEADS))


@on_each_of(3, timeout=SECONDS)
def test_plans_that_differ_between_nodes_are_refused(tmp_path):
    content = STAR if dist.get_rank() != 1 else STAR.replace("q(0)*kv(1) q(0)*kv(2)", "q(0)*kv(2) q(0)*kv(1)")
    with in_folder_with(tmp_path, content, "other.plan") as setting:
        call, told = (lambda sp, rank: make(size=3, ulysses=1, schedule=setting)), differ("ranks 0, 2: plan", "plan")
        assert_all_refused({"other plans": (call, told)}, make(size=3, ulysses=1))

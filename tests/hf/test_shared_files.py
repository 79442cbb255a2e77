"""DeepSpeed's shared memory files: none stays once a run is over, and none that is another's is touched."""

import os
import signal
import sys
from pathlib import Path

import deepspeed
import pytest

import ds_seqpar
from ds_seqpar.deepspeed.cpu_launch import op_lock, shared_memory
from tests.hf.llama import settings, small
from tests.launch import Ranks, free_port, on_ranks

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm"),
    pytest.mark.usefixtures("compiled"),
]
PREFIX = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1"


def launched(port):
    """As DeepSpeed's launcher starts a rank of two on one machine."""
    os.environ.update(LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def start(port):
    """DeepSpeed alone: it maps the files of all ranks and never removes one."""
    launched(port)
    deepspeed.init_distributed(dist_backend="gloo")
    return mapped(port)


def mapped(port):
    """Of this process: whether each mapped file still has its name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(not line.endswith("(deleted)") for line in lines if f"{PREFIX}_{port}_" in line)


def files(port):
    return sorted(shared_memory.FOLDER.glob(f"{PREFIX}_{port}_*"))


def test_files_stay_while_a_rank_lives_and_go_when_it_was_killed():
    port, said = free_port(), []
    with Ranks(2) as ranks:
        results, errors = ranks.call(start, port)
        assert not errors
        assert results == {0: [True, True], 1: [True, True]}
        shared_memory.remove_left_behind(said.append)
        assert len(files(port)) == 2  # both are open
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        ranks.processes[0].join()
        shared_memory.remove_left_behind(said.append)
        assert len(files(port)) == 2  # the other rank has them both open
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        ranks.processes[1].join()
    said.clear()
    shared_memory.remove_left_behind(said.append)
    assert files(port) == []
    assert "MiB" in said[0]
    assert len(said) == 1


@pytest.fixture
def left():
    """Makes a file in /dev/shm as a run leaves it, and removes it after the test."""
    made = []

    def make(name):
        made.append(shared_memory.FOLDER / name)
        made[-1].write_bytes(bytes(4096))
        return made[-1]

    yield make
    for file in made:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}_{{port}}_0_of_another",
        f"{PREFIX}_{{port}}_",
        f"x{PREFIX}_{{port}}_0",
        f"deepspeed_allreduce_buffer_{os.getuid() + 1}_127.0.0.1_{{port}}_0",
        "psm_{port}",
    ],
)
def test_a_file_of_another_name_stays(name, left):
    port = free_port()
    theirs, ours = left(name.format(port=port)), left(f"{PREFIX}_{port}_0")
    shared_memory.remove_left_behind(print)
    assert (theirs.exists(), ours.exists()) == (True, False)


def test_a_link_stays_and_so_does_what_it_leads_to(left, tmp_path):
    file, aim = left(f"{PREFIX}_{free_port()}_0"), tmp_path / "aim"
    aim.write_text("kept")
    file.unlink()
    file.symlink_to(aim)
    shared_memory.remove_left_behind(print)
    assert file.is_symlink()
    assert aim.exists()


@pytest.mark.parametrize("reason", ["the own run's", "another user's", "another system"])
def test_a_file_that_may_be_in_use_stays(reason, left, monkeypatch):
    port = free_port()
    file = left(f"{PREFIX}_{port}_1")
    if reason == "the own run's":  # other ranks of it may be opening them
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
    elif reason == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root may give a file away")
        os.chown(file, 12345, 12345)
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
    shared_memory.remove_left_behind(print)
    assert file.exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_of_a_machine_removes_them(rank, left, monkeypatch):
    file = left(f"{PREFIX}_{free_port()}_0")
    monkeypatch.setenv("LOCAL_RANK", rank)
    op_lock.prepare_start()
    assert file.exists() is (rank == "1")


def initialized(port):
    launched(port)
    ds_seqpar.initialize(model=small(), config=settings({"size": 2}, "2", 1, 1))
    return mapped(port), len(files(port))


def test_initialize_leaves_memory_without_names():
    """Which is freed when the ranks end, by whatever signal."""
    assert on_ranks(2, initialized, free_port()) == [([False, False], 0)] * 2

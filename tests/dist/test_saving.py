"""A checkpoint is whole or not there, at whichever of its file operations a save is killed."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from ds_seqpar.deepspeed.saving.atomic import ASIDE, FORMER, recover, written_aside
from tests.dist.ranks import refusal
from tests.launch import on_warm_ranks as on_ranks

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
FILES = ("model.pt", "zero_pp_rank_0_optim.pt", "text.json")


def save(folder, name, content):
    """What a rank that is alone does."""
    with written_aside(None, folder, name, leads=True, latest=True) as aside:
        for file in FILES[:2]:
            torch.save(content, aside.path / file)
        (aside.path / FILES[2]).write_text(content)


def killed_at(folder, name, count):
    """Whether a process that saves is killed, before it does its file operation of this number."""
    child = os.fork()
    if child == 0:
        done = 0

        def kill(event, arguments):
            nonlocal done
            if event in CHANGES and (event != "open" or str(folder) in str(arguments[0])):
                done += 1
                if done > count:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            save(folder, name, "new")
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def contents(folder, name):
    files = [folder / name / file for file in FILES]
    return {torch.load(files[0]), torch.load(files[1]), files[2].read_text()}


def killed_everywhere(folder, name):
    """(after each kill: what the checkpoint before and the last one hold, and which are there; how many kills)."""
    found, count, killed = [], 0, True
    while killed:
        place = folder / str(count)
        save(place, "first", "old")
        save(place, "last", "old")
        killed = killed_at(place, name, count)
        recover(place, remove=count % 2 == 0)  # before a save, or before loading
        last = (place / "latest").read_text()
        there = {x.name for x in place.iterdir() if x.is_dir()} - {ASIDE, FORMER}
        found.append((contents(place, "first"), contents(place, last), {x: contents(place, x) for x in there}, last))
        count += 1
    return found, count


@pytest.mark.parametrize("name", ["next", "last"])
def test_a_kill_leaves_whole_checkpoints_alone(name, tmp_path):
    """`last` is the name of one that is there already."""
    found, count = on_ranks(1, killed_everywhere, tmp_path, name)[0]
    assert count > 15
    for first, last, there, latest in found:
        assert first == {"old"}
        assert last in ({"old"}, {"new"})
        assert there.keys() <= {"first", "last", name}
        assert all(len(x) == 1 for x in there.values())
        assert there[latest] == last
    assert found[0][1:] == ({"old"}, {"first": {"old"}, "last": {"old"}}, "last")
    assert found[-1][3] == name
    assert found[-1][1] == {"new"}


def failing(folder):
    """What is there after saves that fail, of the writer, of a file that is cut and of a folder that is none."""
    save(folder, "first", "old")
    (folder / "file").write_text("")

    def saving(place, spoil):
        with written_aside(None, place, "next", leads=True) as aside:
            spoil(aside.path)

    said = [
        refusal(saving, folder, lambda path: path.mkdir()),
        refusal(saving, folder, lambda path: (path / "cut.pt").write_bytes(b"PK")),
        refusal(saving, folder / "file", lambda path: pytest.fail("it has begun")),
    ]
    return said, sorted(x.name for x in Path(folder).iterdir())


def test_a_save_that_fails_leaves_nothing(tmp_path):
    said, names = on_ranks(1, failing, tmp_path)[0]
    for (kind, message), words in zip(
        said, ("FileExistsError", "cut.pt is not complete", "NotADirectory"), strict=True
    ):
        assert kind == "ConfigError"
        assert words in message
    assert names == ["file", "first", "latest"]
    assert not {ASIDE, FORMER} & {*names}

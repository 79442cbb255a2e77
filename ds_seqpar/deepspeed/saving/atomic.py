"""Write a checkpoint so that it is complete or absent, even if a rank is killed. Ranks write into a folder next to it,
sync their files to the disk and agree that every file is complete. Then one rename makes that folder the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...base import compat
from ...base.errors import ConfigError, SeqParError
from ...guards.agreement import assert_ranks_agree

UNFINISHED, FORMER = ".unfinished", ".former"  # folders, beside checkpoints, of one that is written and one it replaces
RANK = re.compile(r"(?:pp_rank|rng_state|parallel_rank)_(\d+)")  # in the name of a file that belongs to one rank
ARCHIVES = (".pt", ".pth")
TRIAL = 1 << 20  # bytes that are written to learn why others could not be


class AtomicCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        path: The folder to write into. It becomes `folder / name`.
        error: The error of this rank's write, if any.
        needed: Number of bytes to write; 0 if unknown.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.path = folder, name, folder / UNFINISHED / name
        self.error: Exception | None = None
        self.needed = 0

    @contextlib.contextmanager
    def keeping_errors(self, *written: Any) -> Iterator[None]:
        """Context manager that holds back an exception until the end, because other ranks continue and wait for this
        one.

        Args:
            *written: What is being written: tensors, or objects that contain some.
        """
        try:
            yield
        except SeqParError:
            raise  # on all ranks
        except Exception as reason:
            self.error = self.error or reason
            self.needed += sum(x.nbytes for x in compat.tree_leaves(written) if isinstance(x, torch.Tensor))

    def sentence(self) -> ConfigError | None:
        if self.error is None:
            return None
        reason, room = " ".join(str(self.error).split()), ""
        with contextlib.suppress(OSError):
            room = f", with {shutil.disk_usage(self.folder).free >> 20:,} MiB free there"
            room += f" for some {-(-self.needed >> 20):,} MiB of this rank" if self.needed else ""
        wrong = ConfigError(
            f"a checkpoint is saved once every rank has written its files; got {type(self.error).__name__} for "
            f"{self.folder / self.name}: {_why_nothing_can_be_written(self.path) or reason}{room}, mend that or name "
            "another folder (what was saved before is whole)"
        )
        wrong.__cause__ = self.error
        return wrong

    def sync(self, rank: int, leads: bool) -> None:
        """Sync this rank's files to the disk. Raises OSError if that fails or a file is incomplete."""
        for path in sorted(self.path.rglob("*")):
            match = RANK.search(path.name)
            if not path.is_file() or not (int(match[1]) == rank if match else leads):
                continue
            _sync(path)
            if path.suffix in ARCHIVES and not is_whole(path):
                raise OSError(f"{path.name} is not complete")

    def publish(self, latest: bool) -> None:
        """Make the folder a checkpoint; with `latest`, the one that DeepSpeed loads by default."""
        target, former = self.folder / self.name, self.folder / FORMER / self.name
        if target.exists():  # which no rename replaces at once; `recover` puts it back
            former.parent.mkdir(exist_ok=True)
            target.rename(former)
        _sync(self.path)
        self.path.rename(target)
        _sync(self.folder)
        if latest:
            _write_at_once(self.folder / "latest", self.name)


@contextlib.contextmanager
def atomic_checkpoint(
    group: dist.ProcessGroup, folder: Path, name: str, leads: bool, latest: bool = False
) -> Iterator[AtomicCheckpoint]:
    """Context manager in which ranks write a checkpoint; the checkpoint appears when the context ends. Collective over
    all ranks.

    Args:
        group: The group of all ranks.
        folder: The folder of checkpoints.
        name: The checkpoint's name in it.
        leads: Whether this rank renames; one of the ranks that see the same folder.
        latest: Whether DeepSpeed loads it by default from then on.

    Raises:
        ConfigError: On every rank, if one could not write. Nothing has changed then.
    """
    checkpoint = AtomicCheckpoint(folder, name)
    with checkpoint.keeping_errors():
        if leads:
            recover(folder)
            checkpoint.path.mkdir(parents=True)
    _agree(group, checkpoint)
    if not checkpoint.path.is_dir():
        checkpoint.error = FileNotFoundError(
            "this rank does not see the folder that rank 0 has made, as all ranks do in a folder that machines share"
        )
    try:
        with checkpoint.keeping_errors():
            yield checkpoint
        with checkpoint.keeping_errors():
            checkpoint.sync(dist.get_rank(), leads)
        _agree(group, checkpoint)
        with checkpoint.keeping_errors():
            if leads:
                checkpoint.publish(latest)
                with contextlib.suppress(OSError):
                    recover(folder)  # before others look into the folder, as when this save is part of another
        _agree(group, checkpoint)
    finally:
        if leads:
            with contextlib.suppress(OSError):
                recover(folder)


def _agree(group: dist.ProcessGroup, checkpoint: AtomicCheckpoint) -> None:
    assert_ranks_agree(group, "checkpoint to write", {"name": checkpoint.name}, error=checkpoint.sentence())


def recover(folder: Path, remove: bool = True) -> None:
    """Restore the files that a killed save was about to replace in a folder of checkpoints, and remove its other files.
    Only the run that saves there may do so: others may look at a folder while a checkpoint is being written.
    """
    for former in sorted((folder / FORMER).glob("*")):
        if not (folder / former.name).exists():
            former.rename(folder / former.name)
    for name in (UNFINISHED, FORMER) if remove else ():
        shutil.rmtree(folder / name, ignore_errors=True)


def _write_at_once(path: Path, text: str) -> None:
    """Write a text file such that readers see either the old text or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


def _why_nothing_can_be_written(folder: Path) -> str:
    """Return why no file can be written in a folder, such as "No space left on device"; "" if one can.

    torch, safetensors and numpy hide this reason: on a full disk they report an unexpected position or a failed stream.
    The partial files still take up space.
    """
    if folder.is_dir():
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(TRIAL))
                os.fsync(file.fileno())
        except OSError as reason:
            return os.strerror(reason.errno or errno.EIO)
    return ""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as reason:
        if reason.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # else a file system that syncs no folders, as some that reach a network do
    finally:
        os.close(descriptor)


def is_whole(path: Path) -> bool:
    """Return whether a file was written to its end: a zip archive, such as torch.save's, has its directory there."""
    if path.suffix in ARCHIVES:
        return path.is_file() and zipfile.is_zipfile(path)
    try:
        return bool(json.loads(path.read_bytes()) if path.suffix == ".json" else path.stat().st_size)
    except (OSError, ValueError):
        return False

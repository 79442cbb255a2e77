"""Write checkpoints that are either complete or absent, even if a rank is killed.

Ranks write into a temporary folder next to the checkpoint, sync their files to disk, and agree that all files are
complete. A single rename then turns the temporary folder into the checkpoint.
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

UNFINISHED, FORMER = ".unfinished", ".former"  # suffixes of the folders for new and replaced checkpoints during a save
RANK = re.compile(r"(?:pp_rank|rng_state|parallel_rank)_(\d+)")  # matches names of files that belong to one rank
ARCHIVES = (".pt", ".pth")
TRIAL = 1 << 20  # size in bytes of a test write that reveals why earlier writes failed


class AtomicCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        path: The folder to write to, which later becomes `folder / name`.
        error: The error of this rank's write, if any.
        needed: The number of bytes that this rank could not write, or 0 if unknown.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.path = folder, name, folder / UNFINISHED / name
        self.error: Exception | None = None
        self.needed = 0

    @contextlib.contextmanager
    def keeping_errors(self, *written: Any) -> Iterator[None]:
        """Context manager that stores an exception for later, because all other ranks continue and wait for this rank.

        Args:
            *written: The tensors being written, or objects that contain tensors.
        """
        try:
            yield
        except SeqParError:
            raise  # raised on all ranks
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
        """Sync this rank's files to disk. Raises OSError if syncing fails or a file is incomplete."""
        for path in sorted(self.path.rglob("*")):
            match = RANK.search(path.name)
            if not path.is_file() or not (int(match[1]) == rank if match else leads):
                continue
            _sync(path)
            if path.suffix in ARCHIVES and not is_whole(path):
                raise OSError(f"{path.name} is not complete")

    def publish(self, latest: bool) -> None:
        """Turn the folder into a checkpoint. With `latest`, DeepSpeed loads this checkpoint by default."""
        target, former = self.folder / self.name, self.folder / FORMER / self.name
        if target.exists():  # a rename cannot replace a folder, but `recover` restores the old folder if needed
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
    """Context manager in which ranks write a checkpoint, which becomes visible on exit.

    The call is collective across all ranks.

    Args:
        group: The group of all ranks.
        folder: The folder that contains checkpoints.
        name: The name of the checkpoint in `folder`.
        leads: Whether this rank renames folders, which is true for one rank per file system.
        latest: Whether DeepSpeed loads this checkpoint by default from then on.

    Raises:
        ConfigError: A rank could not write. Earlier checkpoints are unchanged. Raised on every rank.
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
                    recover(folder)  # before other ranks read the folder, for example in a nested save
        _agree(group, checkpoint)
    finally:
        if leads:
            with contextlib.suppress(OSError):
                recover(folder)


def _agree(group: dist.ProcessGroup, checkpoint: AtomicCheckpoint) -> None:
    assert_ranks_agree(group, "checkpoint to write", {"name": checkpoint.name}, error=checkpoint.sentence())


def recover(folder: Path, remove: bool = True) -> None:
    """Restore checkpoints that a killed save was about to replace, and remove the killed save's files.

    Only the run that saves to a folder may remove files there, since another run may be reading the folder during a
    save.
    """
    for former in sorted((folder / FORMER).glob("*")):
        if not (folder / former.name).exists():
            former.rename(folder / former.name)
    for name in (UNFINISHED, FORMER) if remove else ():
        shutil.rmtree(folder / name, ignore_errors=True)


def _write_at_once(path: Path, text: str) -> None:
    """Replace a text file atomically, so that readers see either the old or the new text."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


def _why_nothing_can_be_written(folder: Path) -> str:
    """Return the reason why files cannot be written to a folder, such as "No space left on device", or "" if they can.

    torch, safetensors and numpy hide the reason. On a full disk, these libraries report an unexpected position or a
    failed stream. Partially written files still occupy the disk, so a test write fails for the same reason.
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
            raise  # some network file systems cannot sync folders
    finally:
        os.close(descriptor)


def is_whole(path: Path) -> bool:
    """Return whether a file is complete. A complete zip archive, as written by torch.save, ends with its directory."""
    if path.suffix in ARCHIVES:
        return path.is_file() and zipfile.is_zipfile(path)
    try:
        return bool(json.loads(path.read_bytes()) if path.suffix == ".json" else path.stat().st_size)
    except (OSError, ValueError):
        return False

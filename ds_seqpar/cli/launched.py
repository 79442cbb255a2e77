"""Run a command on the ranks started by a launcher."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from ..base.errors import ConfigError, SeqParError, as_seqpar_error
from ..base.hosts import set_device
from ..guards import process_exit
from .options import Told


@contextlib.contextmanager
def launched(command: str, alone: bool = False) -> Iterator[bool]:
    """Context manager that initializes torch.distributed, and yields whether this is the first rank.

    Args:
        command: The command's name.
        alone: Whether the command also runs as a single process without a launcher.

    Raises:
        ConfigError: No launcher started the ranks.
        SeqParError: The ranks could not connect.
        Told: The command raised an error on this rank.
    """
    alone &= not {"RANK", "WORLD_SIZE"} & os.environ.keys()
    if not alone:
        _check_launcher(command)
    backend = "gloo" if set_device() is None else None
    try:
        if alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        raise as_seqpar_error(f"ranks could not meet for {command}", error) from None
    process_exit.wait_at_exit()
    try:
        yield dist.get_rank() == 0
    except SeqParError as error:
        process_exit.print_once(error, f"ds-seqpar: {error}")
        raise Told from error
    finally:
        dist.destroy_process_group()


def _check_launcher(command: str) -> None:
    start = f"start it with `deepspeed --module ds_seqpar {command}` or torchrun -m"
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"{command} runs on ranks that a launcher starts; {', '.join(missing)} is not set, {start}")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not (value := os.environ[name]).isdecimal() or len(value) > 9:
            raise ConfigError(f"{command} needs a whole number in {name}; got {value!r:.60}, {start}")
    if not (rank := int(os.environ["RANK"])) < (world := int(os.environ["WORLD_SIZE"])):
        raise ConfigError(f"{command} needs a RANK below WORLD_SIZE; got {rank} and {world}, {start}")


def file_error(option: str, file: str) -> ConfigError | None:
    """Return the reason why an option's file cannot be written, or None.

    Call this function before long computations.
    """
    if os.path.isdir(file) or not os.access(Path(file).parent, os.W_OK | os.X_OK):
        return ConfigError(f"{option} must be a file in a folder that can be written to; got {file!r}")
    return None

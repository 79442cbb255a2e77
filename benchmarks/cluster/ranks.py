"""What `benchmarks.cluster.attention` runs on a rank: it enters its node, makes every contender, and takes turns.

No byte of the harness goes over a link: ranks find one another by a file, and are told by pipes when to begin.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.peers import Attend, made, step
from benchmarks.cluster import net
from benchmarks.cluster.plan import Problem
from benchmarks.contenders import Spec
from ds_seqpar.cli import calibrate

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass
class Contender:
    """attend: of this rank's tokens, (1, local_seq, heads, head_dim) each, at `positions` of the sequence."""

    attend: Attend
    inputs: list[Tensor]  # q, k, v, do: this rank's
    positions: Tensor


ROWS: list[Contender] = []


def enter(names: list[str], per_node: int, folder: str, patience: float) -> None:
    """Puts this process into its node before it has a socket or a second thread, and brings torch.distributed up."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody is left in a node whose run was killed
    with Path(net.FOLDER, names[rank // per_node]).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"entering a network namespace failed: {os.strerror(number)}")
    os.environ.update(
        GLOO_SOCKET_IFNAME=net.PORT,
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node),
    )
    store = dist.FileStore(str(Path(folder, "cluster")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))


def build(spec: Spec, problem: Problem, file: str) -> str | None:
    """Makes the next row, on all ranks; None, or why it cannot run here, which is said before anything is sent. file:
    where q, k, v, the gradient of out, and what is right are."""
    whole = torch.load(file, mmap=True)
    try:
        found = made(spec, problem.seq, (problem.heads, problem.kv_heads), problem.causal)
    except (ValueError, ImportError) as reason:
        return str(reason).splitlines()[0]
    inputs = [whole[name][:, found.positions].to(DTYPES[problem.dtype]).contiguous() for name in ("q", "k", "v", "do")]
    ROWS.append(Contender(found.attend, inputs, found.positions))
    return None


def turn(index: int, start: float) -> tuple[float, float]:
    """One call of a row, begun by all ranks at `start` of the machine's clock: seconds from then to its end here, and
    those that processors worked for this rank, all its threads and what the kernel did for them."""
    time.sleep(max(0.0, start - time.monotonic()))
    worked = time.process_time()
    step(ROWS[index].attend, *ROWS[index].inputs)
    return time.monotonic() - start, time.process_time() - worked


def calibrated() -> dict[str, Any]:
    """This machine, as the planner is told of it."""
    return calibrate.calibrate()


def errors(index: int, file: str) -> list[float]:
    """max|a - b| / max|b| of out, dq, dk and dv against dense attention, on this rank's tokens."""
    whole, row = torch.load(file, mmap=True), ROWS[index]
    found = []
    for value, name in zip(step(row.attend, *row.inputs), ("out", "dq", "dk", "dv"), strict=True):
        dense = whole[name]
        found.append(((value.double() - dense[:, row.positions]).abs().max() / dense.abs().max()).item())
    return found


def drop() -> None:
    """Forgets the last row."""
    ROWS.pop()


def counters() -> tuple[int, int]:
    """(bytes out, bytes in) of this rank's node so far."""
    return net.counters()

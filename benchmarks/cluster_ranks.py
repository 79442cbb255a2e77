"""What `benchmarks.cluster` runs on a rank: it enters its node, makes every configuration once, and takes turns.

No byte of the harness goes over a link: ranks find one another by a file, and are told by pipes when to begin.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import cluster_net, cluster_peers
from benchmarks.cluster_spec import Spec
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.cli import calibrate
from ds_seqpar.compiler.tiles import Tile
from ds_seqpar.runtime.kernels import KERNELS
from ds_seqpar.runtime.kernels.reference import Reference

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One call of attention on one sequence; file: where its tensors are, q, k, v and the gradient of out."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    file: str


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
    with Path(cluster_net.FOLDER, names[rank // per_node]).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"entering a network namespace failed: {os.strerror(number)}")
    os.environ.update(
        GLOO_SOCKET_IFNAME=cluster_net.PORT,
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node),
    )
    store = dist.FileStore(str(Path(folder, "cluster")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))


def build(spec: Spec, task: Task) -> str | None:
    """Makes the next row, on all ranks; None, or why it cannot run here, which is said before anything is sent."""
    whole = torch.load(task.file, mmap=True)
    try:
        attend, positions = (ours if spec.peer is None else cluster_peers.PEERS[spec.peer])(spec, task)
    except (ValueError, ImportError) as reason:
        return str(reason).splitlines()[0]
    inputs = [whole[name][:, positions].to(DTYPES[task.dtype]).contiguous() for name in ("q", "k", "v", "do")]
    ROWS.append(Contender(attend, inputs, positions))
    return None


def ours(spec: Spec, task: Task) -> tuple[Attend, Tensor]:
    """A SequenceParallel of these settings over all ranks."""
    config = SequenceParallelConfig.from_dict({"size": dist.get_world_size(), **spec.section})
    sp = SequenceParallel(config, heads=(task.heads, task.kv_heads))
    positions = sp.shard(torch.arange(task.seq), 0)
    return (lambda q, k, v: sp.attention(q, k, v, causal=task.causal)), positions


def step(row: Contender) -> list[Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    *inputs, do = row.inputs
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = row.attend(*leaves)
    out.backward(do)
    grads = [x.grad for x in leaves]
    assert None not in grads
    return [out.detach(), *grads]  # type: ignore[list-item]


def turn(index: int, start: float) -> tuple[float, float]:
    """One call of a row, begun by all ranks at `start` of the machine's clock: seconds from then to its end here, and
    those that processors worked for this rank, all its threads and what the kernel did for them."""
    time.sleep(max(0.0, start - time.monotonic()))
    worked = time.process_time()
    step(ROWS[index])
    return time.monotonic() - start, time.process_time() - worked


def calibrated() -> dict[str, Any]:
    """This machine, as the planner is told of it."""
    return calibrate.calibrate()


def errors(index: int, task: Task) -> list[float]:
    """max|a - b| / max|b| of out, dq, dk and dv against dense attention, on this rank's tokens."""
    whole, row = torch.load(task.file, mmap=True), ROWS[index]
    found = []
    for value, name in zip(step(row), ("out", "dq", "dk", "dv"), strict=True):
        dense = whole[name]
        found.append(((value.double() - dense[:, row.positions]).abs().max() / dense.abs().max()).item())
    return found


class Sleeping(Reference):
    """Products that compute nothing, and take `unit` seconds for each (query, key) pair of a head that is visible, in
    backward `BACKWARD` times as many. done: such pairs so far."""

    BACKWARD = 2.5
    unit = done = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self.sleep(q, k, causal, 1.0)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.sleep(q, k, causal, self.BACKWARD)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def sleep(self, q: Tensor, k: Tensor, causal: bool, weight: float) -> None:
        pairs = Tile(0, q.shape[1], 0, k.shape[1], "causal" if causal else "full").products
        self.done += (amount := q.shape[0] * q.shape[2] * pairs * weight)
        time.sleep(amount * self.unit)


def fall_asleep() -> None:
    """From now on kernel "reference" is one that sleeps."""
    KERNELS["reference"] = Sleeping()


def asleep(index: int, unit: float, start: float) -> tuple[float, float]:
    """`turn` of a row whose kernel sleeps: seconds, and the pairs of heads that this rank slept for."""
    kernel = KERNELS["reference"]
    assert isinstance(kernel, Sleeping)
    kernel.unit, kernel.done = unit, 0.0
    return turn(index, start)[0], kernel.done


def drop() -> None:
    """Forgets the last row."""
    ROWS.pop()


def counters() -> tuple[int, int]:
    """(bytes out, bytes in) of this rank's node so far."""
    return cluster_net.counters()

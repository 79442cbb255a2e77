"""Joins programs, kernels and comm: what one rank needs to take part in attention, found again by a number."""

from __future__ import annotations

import contextlib

from torch import Tensor

from ..compiler.compile import Bound, Compiler
from ..compiler.masks import Mask
from ..compiler.memory import fewest_stages
from ..compiler.shape import shape_of
from ..compiler.shards import EvenShards, Shards
from ..compiler.topology import Topology
from ..config import SequenceParallelConfig
from ..errors import CommunicationError
from ..handles import handle_of
from .buffers import Tensors
from .comm import Comm, Sizes
from .kernels import BlockSpec, Kernel, Scores, select
from .recorder import Recorder
from .walk import Walk
from .work import Backward, Forward

NOT_RECORDED = contextlib.nullcontext()


class Runtime:
    """Settings, this rank's place and its transport. rank: the inner rank; member: its place among the Ulysses members,
    None where one process is all of them. checked, staged: what was found fit, and staged, last. recorder: who writes
    down when this rank does what, while somebody asks for it."""

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm, member: int | None = None
    ) -> None:
        self.member = member
        self.checked: object = None
        self.recorder: Recorder | None = None
        self.staged: tuple[tuple, int] | None = None
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.compiler = Compiler(config.recipe(topology), rank, comm.early)
        self.size = self.compiler.recipe.size
        self.last: dict[str, tuple[tuple, tuple[Bound, Kernel]]] = {}  # by direction: what was asked for last
        self.handle = handle_of(self)

    def recorded(self, kind: str, label: str, bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """Whatever is inside is one event of the record, if there is one."""
        return NOT_RECORDED if self.recorder is None else self.recorder.span(kind, label, bytes)

    def exchange_heads(self, kind: str, sent: Tensor, sizes: Sizes) -> Tensor:
        """`Comm.exchange_heads`."""
        assert self.member is not None  # None is for virtual ranks
        arriving = (sum(sizes[1]) - sizes[1][self.member]) * sent.element_size()
        with self.recorded("exchange", kind, arriving):
            return self.comm.exchange_heads(kind, sent, sizes)

    def shards(self, tokens: int) -> Shards:
        """The configured layout of a sequence of which every inner rank holds `tokens`."""
        return EvenShards(self.config.layout, tokens * self.size, self.size)

    def bound(
        self, direction: str, q: Tensor, k: Tensor, mask: Mask, shards: Shards, softcap: float = 0.0
    ) -> tuple[Bound, Kernel]:
        """The program for inner tensors q (B, n, Hq, D), k (B, m, Hkv, D), and the kernel that it calls."""
        key = q.shape, k.shape, q.dtype, q.device, mask, shards, softcap
        last = self.last.get(direction)
        if last is None or last[0] != key:
            last = self.last[direction] = key, self._bound(direction, q, k, mask, shards, softcap)
        return last[1]

    def _bound(
        self, direction: str, q: Tensor, k: Tensor, mask: Mask, shards: Shards, softcap: float
    ) -> tuple[Bound, Kernel]:
        dtype, heads = str(q.dtype).removeprefix("torch."), (q.shape[2], k.shape[2], q.shape[3])
        kernel = select(self.config.kernel, BlockSpec(q.device.type, q.dtype, *heads, softcap))
        shape = shape_of(self.config.travel_dtype, dtype, q.shape[0], heads)
        return self.compiler.bound(direction, mask, shards, shape, kernel.takes), kernel

    def fewest_stages(self, q: Tensor, k: Tensor, mask: Mask, shards: Shards) -> int:
        """Of heads, given a rank's own q and k: as few that attention takes no more than its q, k, v and out, in the
        program of the first inner rank, which all know."""
        key, dtype = (q.shape, k.shape, q.dtype, mask, shards), str(q.dtype).removeprefix("torch.")
        own = shape_of(self.config.travel_dtype, dtype, q.shape[0], (q.shape[2], k.shape[2], q.shape[3]))
        if self.staged is None or self.staged[0] != key:
            settings = self.config.ulysses, self.config.travel_dtype
            self.staged = key, fewest_stages(self.compiler.recipe, *settings, own, mask, shards)
        return self.staged[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, shards: Shards, scores: Scores) -> Walk:
        """A walk that ends with (out as q, lse (B, n, Hq))."""
        bound, kernel = self.bound("forward", q, k, mask, shards, scores.softcap)
        return Walk(bound, Forward(kernel, scores.scale, *map(_readable, (q, k, v))), self.comm, self.recorder)

    def backward(self, tensors: Tensors, mask: Mask, shards: Shards, scores: Scores) -> Walk:
        """The same of (do, q, k, v, out, lse), which ends with (dq, dk, dv)."""
        do, q, k, v, out, lse = map(_readable, tensors)
        bound, kernel = self.bound("backward", q, k, mask, shards, scores.softcap)
        return Walk(bound, Backward(kernel, scores.scale, do, q, k, v, out, lse), self.comm, self.recorder)


def run(walk: Walk) -> Tensors:
    """Walks to the end. An error says where it happened: step, what comes before and after, and with whom."""
    try:
        return walk.run()
    except CommunicationError as error:
        place = walk.program.place(walk.at)
        raise CommunicationError(f"inner rank {walk.program.rank}, {error}\n{place}") from error
    except Exception as error:
        error.add_note(walk.program.place(walk.at))
        raise


def _readable(x: Tensor) -> Tensor:
    """Kernels read a head's elements side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()

"""Joins programs, kernels and comm: what one rank needs to take part in attention, found again by a number."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..compiler.compile import BoundProgram, Compiler
from ..compiler.exchange import SAVE_ALL, Members, SaveChoice
from ..compiler.heads import heads_of_member
from ..compiler.layout import Topology
from ..compiler.masks import Mask
from ..compiler.shape import Shape, shape_of
from ..compiler.shards import EvenShards, Shards
from ..config import SequenceParallelConfig
from ..errors import CommunicationError
from ..handles import handle_of
from .call import BackwardCall, ForwardCall, Saved
from .comm import Comm
from .kernels import BlockSpec, Kernel, Scores, is_deterministic, select
from .walk import Recorder, Walk

NOT_RECORDED = contextlib.nullcontext()


class Runtime:
    """Settings, this rank's place and its transport. rank: the inner rank; members: of Ulysses. fit: what `inputs`
    found fit last, and how ranks compare it; staged: what was staged last. recorder: who writes down when this rank
    does what, while somebody asks for it. measured: the order of kernels of each `BlockSpec.case` that was measured."""

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm, member: int = 0,
        measured: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.members = Members(config.ulysses, member)
        self.fit: tuple | None = None
        self.recorder: Recorder | None = None
        self.staged: tuple[tuple, int] | None = None
        self.measured = measured or {}
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.compiler = Compiler(config.recipe(topology), rank, comm.early)
        self.size = self.compiler.recipe.size
        self.last: dict[str, tuple[tuple, tuple[BoundProgram, Kernel]]] = {}  # by direction: what was asked for last
        self.handle = handle_of(self)

    def recorded(self, kind: str, label: str, bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """Whatever is inside is one event of the record, if there is one."""
        return NOT_RECORDED if self.recorder is None else self.recorder.span(kind, label, bytes)

    def shards(self, tokens: int) -> Shards:
        """The configured layout of a sequence of which every inner rank holds `tokens`."""
        return EvenShards(self.config.layout, tokens * self.size, self.size)

    def bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards, softcap: float = 0.0, *more: Any
    ) -> tuple[BoundProgram, Kernel]:
        """The program for a rank's own tensors, q (B, s, Hq, D), k and v of kv_heads, and the kernel that it calls.
        more: stages, kept and lse, as `Compiler.bound_call` takes them."""
        key = q.shape, kv_heads, q.dtype, q.device, mask, shards, softcap, more, is_deterministic()
        last = self.last.get(direction)
        if last is None or last[0] != key:
            last = self.last[direction] = key, self._bound(direction, q, kv_heads, mask, shards, softcap, more)
        return last[1]

    def _bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards, softcap: float, more: tuple
    ) -> tuple[BoundProgram, Kernel]:
        own = self.own_shape(q, kv_heads)
        inner = own.of_heads(*heads_of_member(own.q_heads, own.kv_heads, *self.members))
        spec = BlockSpec(q.device.type, q.dtype, inner.q_heads, inner.kv_heads, own.head_dim, softcap)
        kernel = select(self.config.kernel, spec, self.measured.get(spec.case(mask), ()), is_deterministic())
        return self.compiler.bound_call(direction, mask, shards, own, self.members, kernel.support, *more), kernel

    def own_shape(self, q: Tensor, kv_heads: int) -> Shape:
        """The shape of a rank's own tensors."""
        dtype = str(q.dtype).removeprefix("torch.")
        return shape_of(self.config.travel_dtype, dtype, q.shape[0], (q.shape[2], kv_heads, q.shape[3]))

    def fewest_stages(self, q: Tensor, k: Tensor, mask: Mask, shards: Shards) -> int:
        """`memory.fewest_stages` of heads for a rank's own q and k."""
        key = q.shape, k.shape, q.dtype, mask, shards
        if self.staged is None or self.staged[0] != key:
            from ..compiler.memory import fewest_stages  # which only "auto" asks for

            settings = self.config.ulysses, self.config.travel_dtype, self.own_shape(q, k.shape[2])
            self.staged = key, fewest_stages(self.compiler.recipe, *settings, mask, shards)
        return self.staged[1]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, shards: Shards, scores: Scores,
        stages: int = 1, keep: int = 2, lse: bool = False,
    ) -> Walk:  # fmt: skip
        """A walk of a rank's own tensors; ends as `ForwardCall` does. keep: 0 nothing; 1 the inner q, k and v; 2 the
        inner out too."""
        bound, kernel = self.bound("forward", q, k.shape[2], mask, shards, scores.softcap, stages, SAVE_ALL, lse)
        own = _readable({"q": q, "k": k, "v": v})
        return Walk(bound, ForwardCall(bound, kernel, scores, own, sinks, keep, lse), self.comm, self.recorder)

    def backward(
        self, own: dict[str, Tensor], kv_heads: int, sinks: Tensor | None, saved: Saved, mask: Mask, shards: Shards,
        scores: Scores,
    ) -> Walk:  # fmt: skip
        """The same of what forward left; ends as `BackwardCall` does. own: do, and q, k, v and out where they are
        needed."""
        do, kept = own["do"], SaveChoice(bool(saved.arrived), bool(saved.outs))
        more = len(saved.lses), kept if self.members.degree > 1 else SAVE_ALL
        bound, kernel = self.bound("backward", do, kv_heads, mask, shards, scores.softcap, *more)
        call = BackwardCall(bound, kernel, scores, _readable(own), sinks, *saved)
        return Walk(bound, call, self.comm, self.recorder)


def run(walk: Walk) -> list[Tensor]:
    """Walks to the end. An error says where it happened: step, what comes before and after, and with whom."""
    try:
        return walk.run()
    except CommunicationError as error:
        place = walk.program.where(walk.at)
        raise CommunicationError(f"inner rank {walk.program.rank}, {error}\n{place}") from error
    except Exception as error:
        error.add_note(walk.program.where(walk.at))
        raise


def _readable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Kernels read a head's elements side by side."""
    return {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}

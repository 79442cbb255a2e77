"""Joins programs, kernels and communication: what one rank needs to take part in attention."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..compiler.compile import BoundProgram, Compiler
from ..compiler.program.shape import Shape, shape_of
from ..compiler.program.ulysses import SavedForBackward, UlyssesGroup
from ..compiler.sharding.handles import handle_of
from ..compiler.sharding.heads import heads_of_ulysses_rank
from ..compiler.sharding.layout import Topology
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import EvenShards, Shards
from ..config.settings import SequenceParallelConfig
from ..errors import CommunicationError
from .backward import Calls
from .call_io import BackwardCall, ForwardCall, Saved
from .comm import Comm, TorchComm
from .kernels import BlockSpec, Kernel, Scores, is_deterministic, select
from .walk import Recorder, Walk

NOT_RECORDED = contextlib.nullcontext()


class Runtime:
    """Settings, this rank's place and its transport.

    rank: the CP rank. ulysses: this rank's place in its Ulysses group. calls: those whose backward ranks
    agree on. checked: the key of the inputs that `inputs` checked last, and the form in which ranks compare them.
    last_bound, last_head_chunks: the arguments and the result of the last `bound` of each direction, and of the last
    `fewest_head_chunks`. recorder: records when this rank does what, while somebody asks for it. measured: the order of
    kernels of each `BlockSpec.case` that was measured. handle: of this object, for ops."""

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm, ulysses_rank: int = 0,
        measured: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.calls = Calls(comm.groups if isinstance(comm, TorchComm) else None)
        self.ulysses = UlyssesGroup(config.ulysses, ulysses_rank)
        self.checked: tuple | None = None
        self.recorder: Recorder | None = None
        self.last_head_chunks: tuple[tuple, int] | None = None
        self.measured = measured or {}
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.compiler = Compiler(config.recipe(topology), rank, comm.early)
        self.size = self.compiler.recipe.size
        self.last_bound: dict[str, tuple[tuple, tuple[BoundProgram, Kernel]]] = {}
        self.handle = handle_of(self)

    def recorded(self, kind: str, label: str, bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """A context that is one event of the record, if there is one."""
        return NOT_RECORDED if self.recorder is None else self.recorder.span(kind, label, bytes)

    def shards(self, tokens: int) -> Shards:
        """The configured layout of a sequence of which every CP rank holds `tokens`."""
        return EvenShards(self.config.layout, tokens * self.size, self.size)

    def bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards, softcap: float = 0.0, *around: Any
    ) -> tuple[BoundProgram, Kernel]:
        """The program for a rank's local tensors, q (B, s, Hq, D), k and v of kv_heads, and the kernel that it calls.
        around: head_chunks, kept and lse, as `Compiler.bound_call` takes them."""
        key = q.shape, kv_heads, q.dtype, q.device, mask, shards, softcap, around, is_deterministic()
        last = self.last_bound.get(direction)
        if last is None or last[0] != key:
            last = key, self._bound(direction, q, kv_heads, mask, shards, softcap, around)
            self.last_bound[direction] = last
        return last[1]

    def _bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards, softcap: float, around: tuple
    ) -> tuple[BoundProgram, Kernel]:
        local = self.local_shape(q, kv_heads)
        inner = local.of_heads(*heads_of_ulysses_rank(local.q_heads, local.kv_heads, *self.ulysses))
        spec = BlockSpec(q.device.type, q.dtype, inner.q_heads, inner.kv_heads, local.head_dim, softcap)
        kernel = select(self.config.kernel, spec, self.measured.get(spec.case(mask), ()), is_deterministic())
        return self.compiler.bound_call(direction, mask, shards, local, self.ulysses, kernel.support, *around), kernel

    def local_shape(self, q: Tensor, kv_heads: int) -> Shape:
        """The shape of a rank's local tensors."""
        dtype = str(q.dtype).removeprefix("torch.")
        return shape_of(self.config.comm_dtype, dtype, q.shape[0], (q.shape[2], kv_heads, q.shape[3]))

    def fewest_head_chunks(self, q: Tensor, k: Tensor, mask: Mask, shards: Shards) -> int:
        """`memory.fewest_head_chunks` of heads for a rank's local q and k."""
        key = q.shape, k.shape, q.dtype, mask, shards
        if self.last_head_chunks is None or self.last_head_chunks[0] != key:
            from ..compiler.memory import fewest_head_chunks  # which only "auto" asks for

            settings = self.config.ulysses, self.config.comm_dtype, self.local_shape(q, k.shape[2])
            self.last_head_chunks = key, fewest_head_chunks(self.compiler.recipe, *settings, mask, shards)
        return self.last_head_chunks[1]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, shards: Shards, scores: Scores,
        head_chunks: int = 1, saves: int = SavedForBackward.QKV_AND_OUT, lse: bool = False,
        common: Tensor | None = None,
    ) -> Walk:  # fmt: skip
        """A walk over a rank's local tensors, which returns what `ForwardCall` does. head_chunks: of heads. saves, lse,
        common: as `ForwardCall` takes them."""
        bound, kernel = self.bound(
            "forward", q, k.shape[2], mask, shards, scores.softcap, head_chunks, SavedForBackward.QKV_AND_OUT, lse
        )
        local = _readable({"q": q, "k": k, "v": v})
        return Walk(
            bound, ForwardCall(bound, kernel, scores, local, sinks, common, saves, lse), self.comm, self.recorder
        )

    def backward(
        self, local: dict[str, Tensor], kv_heads: int, sinks: Tensor | None, saved: Saved, mask: Mask, shards: Shards,
        scores: Scores, common: Tensor | None = None,
    ) -> Walk:  # fmt: skip
        """A walk over a rank's local tensors, which returns what `BackwardCall` does. local: do, and q, k, v and out
        where forward did not save the inner ones. saved: what forward saved. common: as forward had it."""
        do, kept = local["do"], SavedForBackward(bool(saved.operands) + bool(saved.outs))
        around = len(saved.lses), kept if self.ulysses.size > 1 else SavedForBackward.QKV_AND_OUT
        bound, kernel = self.bound("backward", do, kv_heads, mask, shards, scores.softcap, *around)
        call = BackwardCall(bound, kernel, scores, _readable(local), sinks, common, saved)
        return Walk(bound, call, self.comm, self.recorder)


def run(walk: Walk) -> list[Tensor]:
    """The call's results, after a walk to the end. An error says where in the program it happened: the step, the
    instructions before and after it, and with which ranks."""
    try:
        return walk.run()
    except CommunicationError as error:
        place = walk.program.where(walk.at)
        raise CommunicationError(f"CP rank {walk.program.rank}, {error}\n{place}") from error
    except Exception as error:
        error.add_note(walk.program.where(walk.at))
        raise


def _readable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with each head's elements side by side, as kernels read them."""
    return {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}

"""The runtime of one rank, which joins programs, kernels and communication."""

from __future__ import annotations

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
from .walk import Walk


class Runtime:
    """The settings of one rank, its ranks in the groups, and its communication.

    Attributes:
        rank: The CP rank.
        size: cp_size.
        ulysses: ulysses_size and this rank's Ulysses rank.
        calls: The calls whose backward the ranks agree on.
        checked: The key of the inputs that `input_checks` checked last, and what ranks compare of them.
        last_bound: For each direction, the arguments and the result of the last `bound`.
        last_head_chunks: The arguments and the result of the last `fewest_head_chunks`.
        measured: For each `BlockSpec.case` that was measured, the names of kernels, the fastest first.
        handle: The handle of this object, for ops.
    """

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm, ulysses_rank: int = 0,
        measured: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.calls = Calls(comm.groups if isinstance(comm, TorchComm) else None)
        self.ulysses = UlyssesGroup(config.ulysses, ulysses_rank)
        self.checked: tuple | None = None
        self.last_head_chunks: tuple[tuple, int] | None = None
        self.measured = measured or {}
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.compiler = Compiler(config.recipe(topology), rank, comm.early)
        self.size = self.compiler.recipe.size
        self.last_bound: dict[str, tuple[tuple, tuple[BoundProgram, Kernel]]] = {}
        self.handle = handle_of(self)

    def shards(self, tokens: int) -> Shards:
        """Return the shards of the configured layout for a sequence of which every CP rank has `tokens`."""
        return EvenShards(self.config.layout, tokens * self.size, self.size)

    def bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards, softcap: float = 0.0, *options: Any
    ) -> tuple[BoundProgram, Kernel]:
        """Return the program for a rank's local tensors, and the kernel that it calls.

        Args:
            direction: "forward" or "backward".
            q: The local q (B, s, Hq, D), of which only shape, dtype and device are read.
            kv_heads: The heads of k and v.
            mask: The mask.
            shards: The shards of all CP ranks.
            softcap: The bound of scores, 0 for none.
            options: head_chunks, saved and lse of `Compiler.bound_call`.
        """
        key = q.shape, kv_heads, q.dtype, q.device, mask, shards, softcap, options, is_deterministic()
        last = self.last_bound.get(direction)
        if last is None or last[0] != key:
            last = key, self._bound(direction, q, kv_heads, mask, shards, softcap, options)
            self.last_bound[direction] = last
        return last[1]

    def _bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards, softcap: float, options: tuple
    ) -> tuple[BoundProgram, Kernel]:
        local = self.local_shape(q, kv_heads)
        inner = local.of_heads(*heads_of_ulysses_rank(local.q_heads, local.kv_heads, *self.ulysses))
        spec = BlockSpec(q.device.type, q.dtype, inner.q_heads, inner.kv_heads, local.head_dim, softcap)
        kernel = select(self.config.kernel, spec, self.measured.get(spec.case(mask), ()), is_deterministic())
        return self.compiler.bound_call(direction, mask, shards, local, self.ulysses, kernel.support, *options), kernel

    def local_shape(self, q: Tensor, kv_heads: int) -> Shape:
        """Return the shape of a rank's local tensors."""
        dtype = str(q.dtype).removeprefix("torch.")
        return shape_of(self.config.comm_dtype, dtype, q.shape[0], (q.shape[2], kv_heads, q.shape[3]))

    def fewest_head_chunks(self, q: Tensor, k: Tensor, mask: Mask, shards: Shards) -> int:
        """Return `compiler.memory.fewest_head_chunks` for a rank's local q and k."""
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
        """Return a walk over a rank's local tensors, with the results of `ForwardCall`.

        Args:
            head_chunks: The number of head chunks.
            saves: As in `ForwardCall`.
            lse: As in `ForwardCall`.
            common: As in `ForwardCall`.
        """
        bound, kernel = self.bound(
            "forward", q, k.shape[2], mask, shards, scores.softcap, head_chunks, SavedForBackward.QKV_AND_OUT, lse
        )
        local = _readable({"q": q, "k": k, "v": v})
        return Walk(bound, ForwardCall(bound, kernel, scores, local, sinks, common, saves, lse), self.comm)

    def backward(
        self, local: dict[str, Tensor], kv_heads: int, sinks: Tensor | None, saved: Saved, mask: Mask, shards: Shards,
        scores: Scores, common: Tensor | None = None,
    ) -> Walk:  # fmt: skip
        """Return a walk over a rank's local tensors, with the results of `BackwardCall`.

        Args:
            local: do, and q, k, v and out where forward did not save the inner ones.
            saved: What forward saved.
            common: The same as in `forward`.
        """
        do, saves = local["do"], SavedForBackward(bool(saved.operands) + bool(saved.outs))
        options = len(saved.lses), saves if self.ulysses.size > 1 else SavedForBackward.QKV_AND_OUT
        bound, kernel = self.bound("backward", do, kv_heads, mask, shards, scores.softcap, *options)
        call = BackwardCall(bound, kernel, scores, _readable(local), sinks, common, saved)
        return Walk(bound, call, self.comm)


def run(walk: Walk) -> list[Tensor]:
    """Execute a walk to its end and return the call's results.

    An error then says where in the program it happened: the step, the instructions before and after it, and with which
    ranks.
    """
    try:
        return walk.run()
    except CommunicationError as error:
        place = walk.program.where(walk.at)
        raise CommunicationError(f"CP rank {walk.program.rank}, {error}\n{place}") from error
    except Exception as error:
        error.add_note(walk.program.where(walk.at))
        raise


def _readable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a stride of 1 in head_dim, as kernels read them."""
    return {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}

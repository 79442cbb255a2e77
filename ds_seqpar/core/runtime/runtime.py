"""The runtime of one rank, which joins programs, kernels and communication."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base import compat
from ...base.log import log_once
from ...guards.agreement import Compared
from ...guards.backward_order import Calls
from ...guards.consistency import ConsistencyChecker
from ...guards.finite import Finite, LooksAtWalks
from ..compiler.compile import BoundProgram, Compiler, Recipe
from ..compiler.program.shape import Shape, shape_of
from ..compiler.program.ulysses import SavedForBackward, UlyssesGroup
from ..compiler.sharding.handles import handle_of
from ..compiler.sharding.heads import heads_of_ulysses_rank
from ..compiler.sharding.layout import Topology
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import EvenShards, Shards
from ..compiler.tiles.workspace import planned_kernel
from ..settings import SequenceParallelConfig
from .call import BackwardCall, ForwardCall, Saved
from .dense import common_part, has_common, moments, takes_common_off
from .kernels import BlockSpec, Kernel, Scores, is_deterministic, select, slowness
from .transport import Comm, OneRing, TorchComm
from .walk import Observer, Walk

ATTENTION = "attention"  # the name of a call in errors
SUM = "the sum of keys over ranks"
MOST_ADMITTED = 16  # keys of inputs that were checked


class CallSettings(NamedTuple):
    """All that decides how a call is computed, but its tensors."""

    mask: Mask
    shards: Shards | None  # None: those of the configured layout
    scores: Scores
    head_chunks: int = 1
    saves: SavedForBackward = SavedForBackward.QKV_AND_OUT
    lse: bool = False  # whether forward sends the lse of local tokens back too; needs other Ulysses ranks
    # head_dim of v in latent attention, whose latent is in the place of k, and the matrix that expands it in that of v;
    # else 0
    latent: int = 0


class Runtime:
    """The settings of one rank, its ranks in the groups, and its communication.

    Attributes:
        rank: The CP rank.
        size: cp_size.
        ulysses: ulysses_size and this rank's Ulysses rank.
        calls: The calls whose backward the ranks agree on.
        checker: What the ranks compare.
        admitted: By key, what ranks compare of inputs that `admit` has checked.
        last_bound: For each direction, the arguments and the result of the last `bound`.
        last_head_chunks: The arguments and the result of the last `head_chunks`, where the setting is "auto".
        handle: The handle of this object, for ops.
        observers: Those that are told of walks.
        finite: What looks for NaN and inf; None where `check_finite` is not set.
        differentiable: Whether there is a backward.
        fewest_head_chunks: What chooses the head chunks of "auto", by their memory: a function of (the recipe, ulysses,
            the local shape, the mask, the shards, the kernel whose workspace counts).
    """

    differentiable = True
    fewest_head_chunks: Callable[[Recipe, int, Shape, Mask, Shards, str], int] = staticmethod(lambda *_: 1)

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm, ulysses_rank: int = 0
    ) -> None:
        self.checker = ConsistencyChecker(comm.groups if isinstance(comm, TorchComm) else None, config.agreement)
        self.calls = Calls(self.checker)
        self.ulysses = UlyssesGroup(config.ulysses, ulysses_rank)
        self.admitted: dict[tuple, Compared] = {}
        self.last_head_chunks: tuple[tuple, int] | None = None
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.compiler = Compiler(config.recipe(topology), rank, comm.early)
        self.size = self.compiler.recipe.size
        self.last_bound: dict[str, tuple[tuple, tuple[BoundProgram, Kernel]]] = {}
        self.handle = handle_of(self)
        self.finite = finite = Finite() if config.check_finite else None
        self.observers: list[Observer] = [] if finite is None else [LooksAtWalks(finite)]

    @property
    def call_name(self) -> str:
        """The name of the next call in errors."""
        layer = self.calls.layer
        return ATTENTION if layer is None else f"{ATTENTION} of layer {layer}"

    @functools.cached_property
    def one_ring(self) -> Runtime:
        """The runtime of this rank among all that share the sequence, as one ring without Ulysses, for forward only.

        It shares the checker and the calls.
        """
        other, size = copy.copy(self), self.size * self.ulysses.size
        other.config = dataclasses.replace(
            self.config, size=size, ulysses=1, schedule="auto", schedule_options=(), layout="contiguous",
            rank_order="auto", rotate_forward="auto", overlap=False, head_chunks=1,
        )  # fmt: skip
        other.topology, other.rank = other.config.topology(size), self.ulysses.rank + self.ulysses.size * self.rank
        other.ulysses, other.size, other.differentiable = UlyssesGroup(1, 0), size, False
        other.comm = OneRing(self.comm) if isinstance(self.comm, TorchComm) and size > 1 else self.comm
        other.compiler = Compiler(other.config.recipe(other.topology), other.rank, other.comm.early)
        other.admitted, other.last_bound, other.handle = {}, {}, handle_of(other)
        return other

    def admit(self, key: tuple, compared: Compared) -> None:
        """Keep what ranks compare of inputs that were checked, for those of the latest keys."""
        self.admitted[key] = compared
        if len(self.admitted) > MOST_ADMITTED:
            del self.admitted[next(iter(self.admitted))]

    def shards(self, tokens: int) -> Shards:
        """Return the shards of the configured layout for a sequence of which every CP rank has `tokens`."""
        return EvenShards(self.config.layout, tokens * self.size, self.size)

    def bound(
        self, direction: str, q: Tensor, kv_heads: int, mask: Mask, shards: Shards | None, softcap: float = 0.0,
        *options: Any, latent: int = 0,
    ) -> tuple[BoundProgram, Kernel]:  # fmt: skip
        """Return the program for a rank's local tensors, and the kernel that it calls.

        Args:
            direction: "forward" or "backward".
            q: The local q (B, s, Hq, D), of which only shape, dtype and device are read.
            kv_heads: The heads of k and v.
            mask: The mask.
            shards: The shards of all CP ranks; None for those of the configured layout.
            softcap: The bound of scores, 0 for none.
            options: head_chunks, saved and lse of `Compiler.bound_call`.
            latent: The width of a latent, which is in the place of k and v; 0 for none.
        """
        key = q.shape, kv_heads, latent, q.dtype, q.device, mask, shards, softcap, options, is_deterministic()
        last = self.last_bound.get(direction)
        if last is None or last[0] != key:
            local, shards = self.local_shape(q, kv_heads, latent), shards or self.shards(q.shape[1] * self.ulysses.size)
            inner = local.of_heads(*heads_of_ulysses_rank(local.q_heads, local.kv_heads, *self.ulysses))
            kv_heads = inner.q_heads if latent else inner.kv_heads
            spec = BlockSpec(q.device.type, q.dtype, inner.q_heads, kv_heads, local.head_dim, softcap)
            kernel = select(self.config.kernel, spec, is_deterministic())
            if self.config.kernel == "auto" and (missed := slowness(kernel, spec)):
                log_once(missed)
            program = self.compiler.bound_call(direction, mask, shards, local, self.ulysses, kernel.support, *options)
            if check_keys := getattr(kernel, "check_keys", None):  # before anything is sent
                check_keys(program.shape.q_heads, spec.head_dim, program.most_keys())
            last = self.last_bound[direction] = key, (program, kernel)
        return last[1]

    def local_shape(self, q: Tensor, kv_heads: int, latent: int = 0) -> Shape:
        """Return the shape of a rank's local tensors."""
        dtype = str(q.dtype).removeprefix("torch.")
        return shape_of(self.config.comm_dtype, dtype, q.shape[0], (q.shape[2], kv_heads, q.shape[3]), latent)

    def head_chunks(self, q: Tensor, kv_heads: int, mask: Mask, shards: Shards | None) -> int:
        """Return the number of head chunks: the setting, or with "auto" the fewest that save memory.

        Args:
            q: As in `bound`.
            kv_heads: As in `bound`.
            mask: As in `bound`.
            shards: As in `bound`.
        """
        if self.config.head_chunks != "auto":
            return self.config.head_chunks
        if torch.compiler.is_compiling():
            return 1  # an estimate of memory needs numbers, and the compiler may have symbols
        key = q.shape, kv_heads, q.dtype, mask, shards
        if self.last_head_chunks is None or self.last_head_chunks[0] != key:
            shards, local = shards or self.shards(q.shape[1] * self.ulysses.size), self.local_shape(q, kv_heads)
            # not of the kernel that is chosen, since packages may differ between ranks
            workspace = planned_kernel(self.config.kernel, local.dtype, local.head_dim, q.is_cuda)
            count = self.fewest_head_chunks(self.compiler.recipe, self.ulysses.size, local, mask, shards, workspace)
            self.last_head_chunks = key, count
        return self.last_head_chunks[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: CallSettings) -> list[Tensor]:
        """Compute forward of a rank's local tensors.

        Returns:
            The results of `ForwardCall`, and in fp32 the keys' common part, 0 where nothing is taken off (see `dense`).
        """
        name = self.call_name
        self.calls.follow(name)
        if self.finite is not None:
            tensors = {"q": q, "k": k, "v": v}
            self.finite.begin(f"{name} (call {self.calls.count})", tensors, settings.scores, sinks)
        common = None
        if self.takes_common_off(q.dtype, settings):
            common = common_part(self.comm.parts_of_all(moments(k), SUM), k.shape[2])
        results = self.forward_walk(q, k, v, sinks, settings, common).run()
        self.agree_on_finite()
        return [*results, k.new_zeros(k.shape[2:]) if common is None else common] if has_common(q.dtype) else results

    def backward(
        self, local: dict[str, Tensor], kv_heads: int, sinks: Tensor | None, saved: Saved, settings: CallSettings,
        common: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Compute backward of a rank's local tensors.

        Args:
            local: do, and q, k, v and out where forward did not save the inner ones.
            saved: What forward saved.
            common: The common part that forward returned.

        Returns:
            [dq, dk, dv], and with sinks their gradient.
        """
        self.calls.enter()
        if self.finite is not None:
            self.finite.begin(self.calls.name_of_current(), local, settings.scores, sinks)
        common = common if self.takes_common_off(local["do"].dtype, settings) else None
        results = self.backward_walk(local, kv_heads, sinks, saved, settings, common).run()
        self.agree_on_finite()
        return results

    def agree_on_finite(self) -> None:
        """Raise what the ranks of the sequence have found that is not finite, on all of them. Collective over them.

        In training an engine raises it on the ranks of all sequences, before or after its backward.
        """
        if self.finite is not None and self.checker.groups is not None:
            trains = torch.is_grad_enabled() or compat.graph_task() >= 0
            others = self.finite.engine is not None and self.topology.size("data") > 1
            self.finite.agree(self.checker.groups.control, later=trains and others)

    def takes_common_off(self, dtype: torch.dtype, settings: CallSettings) -> bool:
        if settings.latent:  # keys do not exist before they are computed with
            return False
        return takes_common_off(dtype, settings.scores.softcap, self.size, settings.mask, settings.shards)

    def forward_walk(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: CallSettings, common: Tensor | None
    ) -> Walk:
        """Return a walk over a rank's local tensors, with the results of `ForwardCall`. For `common` see there."""
        mask, shards, scores, head_chunks, saves, lse, latent = settings
        options, width = (head_chunks, SavedForBackward.QKV_AND_OUT, lse), k.shape[3] if latent else 0
        bound, kernel = self.bound("forward", q, k.shape[2], mask, shards, scores.softcap, *options, latent=width)
        local, expansion = _operands({"q": q, "k": k, "v": v}, latent)
        call = ForwardCall(bound, kernel, scores, local, sinks, common, saves, lse, expansion)
        return Walk(bound, call, self.comm, self.observers)

    def backward_walk(
        self, local: dict[str, Tensor], kv_heads: int, sinks: Tensor | None, saved: Saved, settings: CallSettings,
        common: Tensor | None,
    ) -> Walk:  # fmt: skip
        """Return a walk over a rank's local tensors, with the results of `BackwardCall`. For `common` see there."""
        mask, shards, scores, head_chunks, saves, _, latent = settings
        options = head_chunks, saves if self.ulysses.size > 1 else SavedForBackward.QKV_AND_OUT
        do, width = local["do"], local["v"].shape[1] if latent else 0
        bound, kernel = self.bound("backward", do, kv_heads, mask, shards, scores.softcap, *options, latent=width)
        local, expansion = _operands(local, latent)
        call = BackwardCall(bound, kernel, scores, local, sinks, common, saved, expansion)
        return Walk(bound, call, self.comm, self.observers)


def _operands(local: dict[str, Tensor], latent: int) -> tuple[dict[str, Tensor], tuple[Tensor, int] | None]:
    """Return a rank's local tensors by field, and the expansion of latent attention."""
    if not latent:
        return readable(local), None
    fields = {"latent" if field == "k" else field: x for field, x in local.items() if field != "v"}
    return readable(fields), (local["v"], latent)


def readable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a stride of 1 in head_dim, as kernels read them."""
    return {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}

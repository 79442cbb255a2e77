"""The runtime of one rank, which connects programs, kernels and communication."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...base.errors import SeqParError
from ...base.fingerprint import Compared
from ...base.log import log_once
from ..compiler.compile import BoundProgram, Compiler, Recipe
from ..compiler.program.shape import Shape
from ..compiler.program.ulysses import UlyssesGroup
from ..compiler.sharding.heads import heads_of_ulysses_rank
from ..compiler.sharding.layout import Topology
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.op_handles import handle_of
from ..compiler.sharding.shards import EvenShards, Shards
from ..settings import SequenceParallelConfig
from .buffers import Tensors
from .call import BackwardCall, CallSettings, ForwardCall, Saved
from .dense import common_part, moments
from .kernels import BlockSpec, Kernel, is_deterministic, select, slowness
from .operator import DENSE
from .seams import ATTENTION, Guard, GuardedCall, Inputs
from .transport import Comm, OneRing, TorchComm
from .walk import Observer, Walk

SUM = "the sum of keys over ranks"
MOST_ADMITTED = 16  # number of checked inputs to remember


class Runtime:
    """One rank's settings, ranks within its groups, and communication.

    Args:
        of: Runtime whose guards and observers this runtime shares. If None, new lists are created.

    Attributes:
        rank: The CP rank.
        size: cp_size.
        ulysses: Tuple (ulysses_size, this rank's Ulysses rank).
        admitted: The fields that ranks compare, for each key of checked inputs.
        last_bound: The arguments and result of the last call of `bound`, for each direction.
        last_head_chunks: The arguments and result of the last call of `head_chunks`, if the setting is "auto".
        handle: This object's handle for custom ops.
        guards: Guards that are notified of calls.
        observers: Observers that are notified of program executions.
        fewest_head_chunks: Function that picks the number of head chunks for "auto" on the basis of memory. The
            arguments are the recipe, the Ulysses size, the local shape, the mask, the shards, the kernel setting, and
            whether tensors are on a GPU.
    """

    fewest_head_chunks: Callable[[Recipe, int, Shape, Mask, Shards, str, bool], int] = staticmethod(lambda *_: 1)

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm, ulysses_rank: int = 0,
        of: Runtime | None = None,
    ) -> None:  # fmt: skip
        self.guards: list[Guard] = [] if of is None else of.guards
        self.observers: list[Observer] = [] if of is None else of.observers
        self.ulysses = UlyssesGroup(config.ulysses, ulysses_rank)
        self.admitted: dict[tuple, Compared] = {}
        self.last_head_chunks: tuple[tuple, int] | None = None
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.compiler = Compiler(config.recipe(topology), rank, comm.early)
        self.size = self.compiler.recipe.size
        self.last_bound: dict[str, tuple[tuple, tuple[BoundProgram, Kernel]]] = {}
        self.handle = handle_of(self)

    @functools.cached_property
    def one_ring(self) -> Runtime:
        """A second runtime for this rank, used only for the forward pass: one ring of all ranks that share the
        sequence, without Ulysses.

        The second runtime shares this runtime's guards and observers.
        """
        size = self.size * self.ulysses.size
        config = dataclasses.replace(
            self.config, size=size, ulysses=1, schedule="auto", schedule_options=(), layout="contiguous",
            rank_order="auto", rotate_forward="auto", overlap=False, head_chunks=1,
        )  # fmt: skip
        rank = self.ulysses.rank + self.ulysses.size * self.rank
        comm = OneRing(self.comm) if isinstance(self.comm, TorchComm) and size > 1 else self.comm
        return Runtime(config, config.topology(size), rank, comm, of=self)

    def admit(self, inputs: Inputs, error: SeqParError | None) -> None:
        """If a call cannot be computed, raise this rank's error or an error from a guard. Collective."""
        for guard in self.guards:
            error = guard.admit(inputs, error)
        if error is not None:
            raise error

    def guarded(self, call: GuardedCall) -> contextlib.ExitStack:
        """Return a context manager for a call's forward or backward pass that combines the context managers of all
        guards.
        """
        with contextlib.ExitStack() as stack:
            for guard in self.guards:
                stack.enter_context(guard.around(call))
            return stack.pop_all()

    def remember(self, key: tuple, compared: Compared) -> None:
        """Store the fields that ranks compare for checked inputs, evicting the oldest key if there are too many."""
        self.admitted[key] = compared
        if len(self.admitted) > MOST_ADMITTED:
            del self.admitted[next(iter(self.admitted))]

    def shards(self, tokens: int) -> Shards:
        """Return the shards of the configured layout for a sequence with `tokens` tokens on every CP rank."""
        return EvenShards(self.config.layout, tokens * self.size, self.size)

    def bound(
        self, direction: str, q: Tensor, shapes: Sequence[Sequence[int]], settings: CallSettings
    ) -> tuple[BoundProgram, Kernel]:
        """Return the program for a rank's local tensors and the kernel that the program calls.

        Args:
            direction: "forward" or "backward".
            q: The local q (B, s, Hq, D), of which only the length, dtype and device are used.
            shapes: Shapes of all of the operator's prepared tensors.
            settings: The call's settings.
        """
        key = shapes, q.dtype, q.device, settings._replace(layer=None), is_deterministic()
        last = self.last_bound.get(direction)
        if last is None or last[0] != key:
            mask, shards, scores, head_chunks, saves, lse, operator, *_ = settings
            local = operator.shape(self.config.comm_dtype, q.dtype, shapes)
            shards = shards or self.shards(q.shape[1] * self.ulysses.size)
            inner = local.of_heads(*heads_of_ulysses_rank(local.q_heads, local.kv_heads, *self.ulysses))
            heads = inner.q_heads, inner.kernel_kv_heads, local.head_dim
            spec = BlockSpec(q.device.type, q.dtype, *heads, scores.softcap)
            kernel = select(self.config.kernel, spec, is_deterministic())
            if self.config.kernel == "auto" and (missed := slowness(kernel, spec)):
                log_once(missed)
            options = kernel.support, head_chunks, saves, lse and direction == "forward"
            program = self.compiler.bound_call(direction, mask, shards, local, self.ulysses, *options)
            if check_keys := getattr(kernel, "check_keys", None):  # before anything is sent
                check_keys(program.shape.q_heads, spec.head_dim, program.most_keys())
            last = self.last_bound[direction] = key, (program, kernel)
        return last[1]

    def head_chunks(self, q: Tensor, kv_heads: int, mask: Mask, shards: Shards | None) -> int:
        """Return the configured number of head chunks, or for "auto" the smallest number that saves memory.

        Args:
            q: The local q (B, s, Hq, D).
            kv_heads: Number of key/value heads.
            mask: The mask.
            shards: Shards of all CP ranks; None for the configured layout.
        """
        if self.config.head_chunks != "auto":
            return self.config.head_chunks
        if torch.compiler.is_compiling():
            return 1  # a memory estimate needs concrete numbers, but torch.compile may pass symbols
        key = q.shape, kv_heads, q.dtype, mask, shards
        if self.last_head_chunks is None or self.last_head_chunks[0] != key:
            shapes = q.shape, (*q.shape[:2], kv_heads, q.shape[3])
            local = DENSE.shape(self.config.comm_dtype, q.dtype, shapes)
            shards = shards or self.shards(q.shape[1] * self.ulysses.size)
            kernel = self.config.kernel, q.is_cuda
            count = self.fewest_head_chunks(self.compiler.recipe, self.ulysses.size, local, mask, shards, *kernel)
            self.last_head_chunks = key, count
        return self.last_head_chunks[1]

    def forward(self, tensors: Tensors, sinks: Tensor | None, settings: CallSettings) -> list[Tensor]:
        """Compute the forward pass for a rank's local tensors, and return `AttentionResults` as a list."""
        common, keys = None, tensors[1]
        named = dict(zip(settings.operator.inputs, tensors, strict=True))
        with self.guarded(guarded_call("forward", settings, named, sinks)):
            if settings.takes_common_off(keys.dtype, self.size):
                common = common_part(self.comm.parts_of_all(moments(keys), SUM), keys.shape[2])
            return self.forward_walk(tensors, sinks, settings, common).run()

    def backward(
        self, local: dict[str, Tensor], shapes: Sequence[Sequence[int]], sinks: Tensor | None, saved: Saved,
        settings: CallSettings, common: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Compute the backward pass for a rank's local tensors.

        Args:
            local: The gradient `do` and the operator's parameters, plus the operator's operands and out if the forward
                pass did not save inner tensors.
            shapes: Shapes of all tensors of the operator.
            sinks: The sinks passed to the forward pass.
            saved: Tensors saved by the forward pass.
            settings: The settings passed to the forward pass.
            common: The common part returned by the forward pass.

        Returns:
            The gradients of the operator's tensors, and of the sinks if there are any.
        """
        with self.guarded(guarded_call("backward", settings, local, sinks)):
            common = common if settings.takes_common_off(local["do"].dtype, self.size) else None
            return self.backward_walk(local, shapes, sinks, saved, settings, common).run()

    def forward_walk(
        self, tensors: Tensors, sinks: Tensor | None, settings: CallSettings, common: Tensor | None
    ) -> Walk:
        """Return a `Walk` that computes a `ForwardCall` on a rank's local tensors, with `common` subtracted from the
        keys.
        """
        bound, kernel = self.bound("forward", tensors[0], [x.shape for x in tensors], settings)
        local = dict(zip(settings.operator.inputs, tensors, strict=True))
        call = ForwardCall(bound, kernel, settings, local, sinks, common, Saved([], [], []))
        return Walk(bound, call, self.comm, self.observers)

    def backward_walk(
        self, local: dict[str, Tensor], shapes: Sequence[Sequence[int]], sinks: Tensor | None, saved: Saved,
        settings: CallSettings, common: Tensor | None,
    ) -> Walk:  # fmt: skip
        """Return a `Walk` that computes a `BackwardCall` on a rank's local tensors, with `common` subtracted from the
        keys.
        """
        bound, kernel = self.bound("backward", local["do"], shapes, settings)
        call = BackwardCall(bound, kernel, settings, local, sinks, common, saved)
        return Walk(bound, call, self.comm, self.observers)


def guarded_call(direction: str, settings: CallSettings, local: dict[str, Tensor], sinks: Tensor | None) -> GuardedCall:
    """Return the description of an attention forward or backward pass that is passed to guards."""
    operands = {**local, "sinks": sinks, **settings.scores._asdict()}
    return GuardedCall(direction, ATTENTION, settings.layer, operands=operands)

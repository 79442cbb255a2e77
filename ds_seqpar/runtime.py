"""Joins plan, kernels and comm: attention over a sequence shared by many ranks, as custom ops with autograd.

Three ops, so that checkpointing can save the result of `ds_seqpar::attention` and recompute the rest: a torch.library
op is visible to selective checkpointing, a bare autograd.Function is not (DistFlashAttn, section 3.3).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from . import ulysses
from .comm import Comm
from .config import SequenceParallelConfig
from .errors import CommunicationError
from .kernels import BlockSpec, select
from .layout import LAYOUTS
from .plan import Plan
from .schedules import build
from .topology import Topology
from .walk import walk
from .work import Backward, Forward, Problem, Tensors, Work, bytes_per_token, travel_dtype


class Runtime:
    """What one rank needs to take part: settings, its place and its transport. `rank` is the inner rank."""

    def __init__(self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm) -> None:
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.handle = next(_numbers)
        _RUNTIMES[self.handle] = self

    def forward(self, q: Tensor, kv: Tensor, causal: bool, scale: float) -> Iterator[int]:
        """Walks the forward plan; the iterator's return value is (out, lse). See Forward for shapes."""
        return self._run("forward", q, kv, (), causal, scale)

    def backward(
        self, do: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Iterator[int]:
        """Walks the backward plan; the iterator's return value is (dq, dkv)."""
        return self._run("backward", q, kv, (do, out, lse), causal, scale)

    def plan(self, q: Tensor, kv: Tensor, causal: bool, direction: str) -> Plan:
        """The plan for blocks of these shapes on every inner rank; what travels is chosen by their bytes."""
        seq = q.shape[1] * self.topology.size(*self.topology.inner_axes)
        settings = self.config.schedule, self.topology, self.config.layout, seq, causal, direction
        travels = self.config.forward if direction == "forward" else self.config.backward
        travel = travel_dtype(self.config.travel_dtype, q.dtype)
        sizes = tuple(bytes_per_token(direction, q, kv, travel).items())
        return build(*settings, travels=travels, overlap=self.config.overlap, sizes=sizes)

    def check_plans(self, tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, causal: bool) -> None:
        """Makes the plans for `tokens` on every inner rank, with (query heads, kv heads, head_dim): raises where the
        schedule has none, before anything is sent."""
        q_heads, kv_heads, dim = heads
        q = torch.empty(1, tokens, q_heads, dim, dtype=dtype, device="meta")
        kv = torch.empty(1, tokens, 2, kv_heads, dim, dtype=dtype, device="meta")
        for direction in ("forward", "backward"):
            self.plan(q, kv, causal, direction)

    def _run(self, direction: str, q: Tensor, kv: Tensor, saved: Tensors, causal: bool, scale: float) -> Iterator[int]:
        plan = self.plan(q, kv, causal, direction)
        seq = q.shape[1] * plan.size
        problem = Problem(
            rank=self.rank,
            blocks=tuple(LAYOUTS[self.config.layout](seq, plan.size, rank) for rank in range(plan.size)),
            causal=causal,
            scale=scale,
            kernel=select(self.config.kernel, BlockSpec.of(q, kv.shape[3])),
            travel=travel_dtype(self.config.travel_dtype, q.dtype),
        )
        program = plan.program(self.rank)
        q_travels = any(move.kind == "q" for step in program for move in (*step.moves, *step.gathers))
        work: Work = Backward(problem, q, kv, *saved, q_travels) if saved else Forward(problem, q, kv)
        step = 0
        try:
            for step in walk(program, work, self.comm):
                yield step
        except CommunicationError as error:
            raise CommunicationError(f"inner rank {self.rank}, step {step}: {error}\n{plan.table()}") from error
        except Exception as error:
            error.add_note(f"inner rank {self.rank}, step {step} of this plan:\n{plan.table()}")
            raise
        return work.result()


# A custom op takes no objects, so it takes a number; this is the one place that turns it back into a Runtime.
_RUNTIMES: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def attention(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """q (B, s, Hq, D), k and v (B, s, Hkv, D) of this rank's tokens -> out as q. Differentiable."""
    if runtime.config.ulysses == 1:
        out, _ = _attention(q, torch.stack([k, v], dim=2), runtime.handle, causal, scale)
        return out
    q, kv = _scatter_heads(q, k, v, runtime.handle)
    out, _ = _attention(q, kv, runtime.handle, causal, scale)
    return _gather_heads(out, runtime.handle)


def _finish(walking: Iterator[int]) -> Tensors:
    """Runs a walk to its end on a real rank, where the waits inside block by themselves."""
    while True:
        try:
            next(walking)
        except StopIteration as end:
            return end.value


@torch.library.custom_op("ds_seqpar::attention", mutates_args=())
def _attention(q: Tensor, kv: Tensor, handle: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _finish(_RUNTIMES[handle].forward(q, kv, causal, scale))


@_attention.register_fake
def _(q: Tensor, kv: Tensor, handle: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)


def _save_attention(ctx: object, inputs: tuple, output: tuple) -> None:
    q, kv, handle, ctx.causal, ctx.scale = inputs
    ctx.runtime = _RUNTIMES[handle]  # backward needs it even where the caller has let go of it
    ctx.save_for_backward(q, kv, *output)


def _attention_backward(ctx: object, do: Tensor, _: Tensor) -> tuple:
    q, kv, out, lse = ctx.saved_tensors
    grads = _finish(ctx.runtime.backward(do.contiguous(), q, kv, out, lse, ctx.causal, ctx.scale))
    return *grads, None, None, None


_attention.register_autograd(_attention_backward, setup_context=_save_attention)


def _inward(runtime: Runtime, kind: str, tensors: list[Tensor]) -> list[Tensor]:
    """All-to-all from all heads of some tokens to some heads of all the inner rank's tokens."""
    members = runtime.config.ulysses
    buffer = runtime.comm.exchange_heads(kind, ulysses.pack_in(tensors, members))
    heads = [max(1, x.shape[2] // members) for x in tensors]
    return ulysses.unpack_in(buffer, tensors[0].shape[0], heads, tensors[0].shape[3])


def _outward(runtime: Runtime, kind: str, tensors: list[Tensor], heads: list[int]) -> list[Tensor]:
    """The way back; `heads` of each result."""
    buffer = runtime.comm.exchange_heads(kind, ulysses.pack_out(tensors, runtime.config.ulysses))
    per_member = [x.shape[2] for x in tensors]
    return ulysses.unpack_out(buffer, tensors[0].shape[0], heads, per_member, tensors[0].shape[3])


@torch.library.custom_op("ds_seqpar::scatter_heads", mutates_args=())
def _scatter_heads(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    q, k, v = _inward(_RUNTIMES[handle], "qkv", [q, k, v])
    return q, torch.stack([k, v], dim=2)


@_scatter_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    members = _RUNTIMES[handle].config.ulysses
    batch, tokens, dim = q.shape[0], members * q.shape[1], q.shape[3]
    kv_heads = max(1, k.shape[2] // members)
    return q.new_empty(batch, tokens, q.shape[2] // members, dim), k.new_empty(batch, tokens, 2, kv_heads, dim)


def _save_scatter(ctx: object, inputs: tuple, output: tuple) -> None:
    q, k, _, handle = inputs
    ctx.runtime = _RUNTIMES[handle]
    ctx.heads = [q.shape[2], k.shape[2], k.shape[2]]


def _scatter_backward(ctx: object, dq: Tensor, dkv: Tensor) -> tuple:
    return *_outward(ctx.runtime, "dqkv", [dq, *dkv.unbind(2)], ctx.heads), None


_scatter_heads.register_autograd(_scatter_backward, setup_context=_save_scatter)


@torch.library.custom_op("ds_seqpar::gather_heads", mutates_args=())
def _gather_heads(out: Tensor, handle: int) -> Tensor:
    runtime = _RUNTIMES[handle]
    return _outward(runtime, "out_heads", [out], [out.shape[2] * runtime.config.ulysses])[0]


@_gather_heads.register_fake
def _(out: Tensor, handle: int) -> Tensor:
    members = _RUNTIMES[handle].config.ulysses
    return out.new_empty(out.shape[0], out.shape[1] // members, out.shape[2] * members, out.shape[3])


def _save_gather(ctx: object, inputs: tuple, output: Tensor) -> None:
    _, handle = inputs
    ctx.runtime = _RUNTIMES[handle]


def _gather_backward(ctx: object, do: Tensor) -> tuple:
    return _inward(ctx.runtime, "do_heads", [do])[0], None


_gather_heads.register_autograd(_gather_backward, setup_context=_save_gather)

"""Joins plan, kernels and comm: what one rank needs to walk its part of attention, found again by a number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import SequenceParallelConfig
from ..errors import CommunicationError
from ..planning.layout import LAYOUTS
from ..planning.plan import Plan
from ..planning.schedules import build
from ..planning.topology import Topology
from .comm import Comm
from .handles import handle_of
from .kernels import BlockSpec, select
from .walk import walk
from .work import Backward, Forward, Problem, Tensors, Work, bytes_per_token, travel_dtype


class Runtime:
    """What one rank needs to take part: settings, its place and its transport. `rank` is the inner rank."""

    def __init__(self, config: SequenceParallelConfig, topology: Topology, rank: int, comm: Comm) -> None:
        self.config, self.topology, self.rank, self.comm = config, topology, rank, comm
        self.handle = handle_of(self)

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
        q = q if q.stride(-1) == 1 else q.contiguous()  # kernels read a head's elements side by side
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

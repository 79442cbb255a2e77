"""Pass recurrent states between ranks, so that each rank receives the state before each of its runs of tokens.

A run of consecutive tokens maps the previous state S to the next state M S + S'. By default, a rank receives M and S'
for all runs on which its own runs depend, and combines these maps. If the total size of the maps is large, ranks
instead pass states along. Each run's rank then maps the state, and sends the result to the rank of the next run.
Backward works the same way, with the runs in reverse order and M transposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base import profiling
from ..core.compiler.program import instructions as op
from ..core.runtime import replay
from ..core.runtime.runtime import Runtime
from ..core.runtime.seams import GuardedCall
from ..core.runtime.transport import Message
from .precision import all_digits
from .segments import Segments, go_in_order, partners

Context: TypeAlias = Any  # autograd's ctx
KIND = "states"  # the name under which statistics count exchanged elements


class Entering(torch.autograd.Function):
    """Compute the states before this rank's runs from the states and maps of runs (B, runs, ...)."""

    @staticmethod
    def forward(
        ctx: Context, states: Tensor, maps: Tensor, peers: Runtime, segments: Segments, reach: int, name: str
    ) -> Tensor:
        def compute() -> tuple[Tensor]:
            with peers.guarded(GuardedCall("forward", name)):
                return (entering_states(peers, segments, reach, states, maps, reverse=False),)

        replayed = GuardedCall("forward", name, sends=False)
        (entering,) = replay.current().once(compute, lambda: peers.guarded(replayed).close())
        ctx.peers, ctx.segments, ctx.reach, ctx.name = peers, segments, reach, name
        ctx.save_for_backward(maps, entering)
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple:
        maps, entering = ctx.saved_tensors
        with ctx.peers.guarded(GuardedCall("backward", ctx.name)):
            after, d_maps = entering_states(ctx.peers, ctx.segments, ctx.reach, grad, maps.mT, reverse=True), None
        if ctx.needs_input_grad[1]:
            with all_digits(after.device.type):
                d_maps = after @ entering.mT if maps.shape[-1] > 1 else (after * entering).sum((-2, -1), keepdim=True)
        return after, d_maps, None, None, None, None


class Tied(torch.autograd.Function):
    """Return x unchanged. The backward pass also visits `others` on each rank, because their backward communicates."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*(other.new_zeros(()).expand(other.shape) for other in others))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple:
        return grad, *ctx.saved_tensors


def entering_states(
    peers: Runtime, segments: Segments, reach: int, states: Tensor, maps: Tensor, reverse: bool
) -> Tensor:
    """Return the state before each of this rank's runs. The call is collective across `peers`.

    Args:
        peers: The runtime of the ranks that share the runs.
        segments: The runs of all ranks.
        reach: Maximum number of previous runs on which a run depends.
        states: S' for each of this rank's runs (B, runs, ..., K, V).
        maps: M for each of this rank's runs (B, runs, ..., K, K), or (B, runs, ..., 1, 1) for scalars.
        reverse: Whether states are passed from the last run to the first.

    Returns:
        The state before each run, in the shape of `states`.
    """
    messages = _Messages(peers, "backward" if reverse else "forward", states.device)
    run_bytes = len(states) * (states.shape[2:].numel() + maps.shape[2:].numel()) * states.element_size()
    pass_on = _in_order if go_in_order(reach, segments.most_runs, run_bytes) else _at_once
    with all_digits(states.device.type), profiling.span("states of layers"):
        entering = pass_on(messages, segments, reach, states, maps, -1 if reverse else 1)
    messages.end()
    return entering


def _at_once(messages: _Messages, segments: Segments, reach: int, states: Tensor, maps: Tensor, step: int) -> Tensor:
    """Combine the maps of all runs on which this rank's runs depend. `step` is 1, or -1 for reverse order."""
    mine = messages.peers.rank
    sources, targets = partners(segments, mine, reach)[::step]
    local = torch.cat([states.flatten(2), maps.flatten(2)], 2)
    arrived = {rank: local.new_empty(len(local), len(segments.numbers[rank]), local.shape[2]) for rank in sources}
    messages.exchange([(rank, local) for rank in targets], [*arrived.items()])
    known: dict[int, tuple[Tensor, Tensor]] = {}  # (state, map) by run number
    for rank, x in (arrived | {mine: local}).items():
        flat = x.split([states.shape[2:].numel(), maps.shape[2:].numel()], 2)
        of_runs = (y.unflatten(2, like.shape[2:]).unbind(1) for y, like in zip(flat, (states, maps), strict=True))
        known.update(zip(segments.numbers[rank], zip(*of_runs, strict=True), strict=True))
    entering = torch.zeros_like(states)
    for place, number in enumerate(segments.numbers[mine]):
        before = entering[:, place]
        for other in range(number - step * reach, number, step):
            if other in known:  # fewer than `reach` runs exist near the ends
                before = _mapped(*known[other], before)
        entering[:, place] = before
    return entering


def _in_order(messages: _Messages, segments: Segments, reach: int, states: Tensor, maps: Tensor, step: int) -> Tensor:
    """Map the state received for each run, and send the result to the rank of the next run."""
    entering = torch.zeros_like(states)
    for (src, before), (dst, place) in itertools.pairwise(segments.places[::step]):
        if src == messages.peers.rank:
            behind = _mapped(states[:, before], maps[:, before], entering[:, before])
            messages.exchange([(dst, behind.contiguous())], [])
        elif dst == messages.peers.rank:
            arrived = torch.empty_like(states[:, place], memory_format=torch.contiguous_format)
            messages.exchange([], [(src, arrived)])
            entering[:, place] = arrived
    return entering


def _mapped(state: Tensor, transition: Tensor, before: Tensor) -> Tensor:
    """Return the state after a run."""
    return state + (transition * before if transition.shape[-1] == 1 else transition @ before)


class _Messages:
    """The messages in one call. Each message is awaited immediately.

    Attributes:
        code: The work queued on a device, for the watchdog. Empty if hosts wait.
        batches: The communication handles for each wait in `code`.
    """

    def __init__(self, peers: Runtime, direction: str, device: torch.device) -> None:
        self.peers, self.direction, self.device = peers, direction, device
        self.code: list[op.Instruction] = []
        self.batches: list[Any] = []

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send contiguous tensors to other ranks, and receive tensors in place."""
        if not sends and not receives:
            return
        outgoing, incoming = (
            [Message(rank, KIND, x.numel(), x.view(-1).view(torch.uint8), 0) for rank, x in messages]
            for messages in (sends, receives)
        )
        handle = self.peers.comm.post(outgoing, incoming)
        handle.wait()
        if self.peers.observers and self.device.type != "cpu":
            number = len(self.batches)
            sent = tuple(op.Transfer(x.peer, (KIND, (self.peers.rank,)), 0, 0) for x in outgoing)
            received = tuple(op.Transfer(x.peer, (KIND, (x.peer,)), 0, 0) for x in incoming)
            self.code += [op.Post(number, number, sent, received), op.Wait(number, number)]
            self.batches.append(getattr(handle, "batch", None))

    def end(self) -> None:
        """Report the work queued on the device to observers."""
        if self.batches:
            program = op.Program(
                name=KIND, direction=self.direction, rank=self.peers.rank, size=self.peers.size, code=tuple(self.code),
                slots=(), frees=(), words=(),
            )  # fmt: skip
            for observer in self.peers.observers:
                observer.sent(self.device, program, self.batches, self.peers.comm)

"""Runs a plan, and the all-to-all around it, for all ranks of one sequence in one process.

The walker, kernels and packing are those of the real ranks; only the transport is a mailbox. For tests, and to measure
on one device. Takes global tensors and returns global ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..config import SequenceParallelConfig
from ..errors import ConfigError, InputError
from ..planning.layout import positions
from ..planning.topology import Topology
from . import inputs, ulysses
from .comm import Handle, Message, Sizes
from .runtime import Runtime
from .work import Tensors


@dataclasses.dataclass(frozen=True)
class Result:
    """Global out (B, S, Hq, D), and the gradients where `do` was given. received: elements by kind, an SP rank."""

    out: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    received: list[Counter]


class _Mailbox:
    """The transport of one Ulysses member's inner ranks."""

    def __init__(self) -> None:
        self.letters: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)


class _VirtualComm:
    def __init__(self, rank: int, mailbox: _Mailbox) -> None:
        self.rank, self.mailbox, self.received = rank, mailbox, Counter()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        for message in sends:
            self.mailbox.letters[self.rank, message.peer, message.tag].append(message.tensor.clone())
        for message in receives:
            self.received[message.kind] += message.tensor.numel()
        return _Waiting(self, receives)

    def all_gather(self, ranks: tuple[int, ...], kind: str, tensor: Tensor, received: list[Tensor]) -> Handle:
        return self.all_to_all(ranks, kind, [tensor] * len(ranks), received)

    def all_to_all(self, ranks: tuple[int, ...], kind: str, sent: list[Tensor], received: list[Tensor]) -> Handle:
        sends, receives = (
            [Message(peer, kind, tensor, -1) for peer, tensor in zip(ranks, tensors, strict=True)]
            for tensors in (sent, received)
        )
        handle = self.post(sends, receives)
        self.received[kind] -= received[ranks.index(self.rank)].numel()  # the own part did not travel
        return handle

    def exchange_heads(self, kind: str, sent: Tensor, sizes: Sizes) -> Tensor:
        raise AssertionError("the virtual runner exchanges heads for all members at once")


@dataclasses.dataclass
class _Waiting:
    comm: _VirtualComm
    receives: Sequence[Message]

    def wait(self) -> None:
        for message in self.receives:
            letters = self.comm.mailbox.letters[message.peer, self.comm.rank, message.tag]
            message.tensor.copy_(letters.popleft())  # IndexError: the peer has not posted, so ranks would hang here


def attention(
    config: SequenceParallelConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> Result:
    """q (B, S, Hq, D), k and v (B, S, Hkv, D), do as q; config.size virtual ranks.

    Raises what `SequenceParallel` and its attention raise for these settings and tensors.
    """
    inputs.check_arguments(q, k, v, causal, scale)
    if not isinstance(config.size, int):
        raise ConfigError(f"virtual ranks need a size that is a number; got size {config.size!r}")
    if do is not None and inputs.describe(do) != inputs.describe(q):
        raise InputError(f"the output's gradient must be like q, {inputs.describe(q)}; got {inputs.describe(do)}")
    config = config.resolve(config.size, heads=(q.shape[2], k.shape[2]))
    inputs.check_length(config, q.shape[1])
    ranks = _Ranks(config)
    inputs.check_shares(ranks.runtimes[0], ranks.shard(q)[0], k.shape[2], causal)
    return ranks.attention(q, k, v, do, causal, q.shape[3] ** -0.5 if scale is None else float(scale))


class _Ranks:
    """All SP ranks. Lists of tensors are indexed by SP rank = u + U * inner."""

    def __init__(self, config: SequenceParallelConfig) -> None:
        self.config = config
        self.members = config.ulysses
        topology = Topology.of(config, config.size)
        inner = config.size // config.ulysses
        self.mailboxes = [_Mailbox() for _ in range(self.members)]
        self.comms = [_VirtualComm(i // self.members, self.mailboxes[i % self.members]) for i in range(config.size)]
        self.runtimes = [Runtime(config, topology, i // self.members, self.comms[i]) for i in range(config.size)]
        assert inner * self.members == config.size

    def attention(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, causal: bool, scale: float) -> Result:
        seq, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
        sharded = zip(*(self.shard(x) for x in (q, k, v)), strict=True)
        inward = self.inward("qkv", [list(tensors) for tensors in sharded])
        operands = [(x[0], torch.stack(x[1:], dim=2)) for x in inward]
        results = self.together([r.forward(*x, causal, scale) for r, x in zip(self.runtimes, operands, strict=True)])
        tokens = [seq // self.config.size] * self.config.size
        outs = self.outward("out_heads", [[out] for out, _ in results], [heads], tokens)
        out = self.unshard([x[0] for x in outs], seq)
        if do is None:
            return Result(out, None, None, None, [comm.received for comm in self.comms])
        dos = self.inward("do_heads", [[x] for x in self.shard(do)])
        grads = self.together(
            [
                runtime.backward(d.contiguous(), *operand, *result, causal, scale)
                for runtime, (d,), operand, result in zip(self.runtimes, dos, operands, results, strict=True)
            ]
        )
        split = [[dq, *dkv.unbind(2)] for dq, dkv in grads]
        local = self.outward("dqkv", split, [heads, kv_heads, kv_heads], tokens)
        dq, dk, dv = (self.unshard([x[i] for x in local], seq) for i in range(3))
        return Result(out, dq, dk, dv, [comm.received for comm in self.comms])

    def together(self, walks: list[Iterator[int]]) -> list[Tensors]:
        """Ranks take turns from yield to yield, so that each finds posted what it waits for."""
        results: list[Tensors | None] = [None] * len(walks)
        while any(result is None for result in results):
            for rank, walking in enumerate(walks):
                try:
                    next(walking)
                except StopIteration as end:
                    results[rank] = end.value
        assert not any(queue for box in self.mailboxes for queue in box.letters.values()), "a message nobody received"
        return results

    def _index(self, seq: int, rank: int) -> Tensor:
        return torch.tensor(positions(self.config.layout, seq, self.config.size, self.members, rank))

    def shard(self, x: Tensor) -> list[Tensor]:
        return [x[:, self._index(x.shape[1], rank)] for rank in range(self.config.size)]

    def unshard(self, parts: list[Tensor], seq: int) -> Tensor:
        whole = torch.empty_like(parts[0]).new_empty(parts[0].shape[0], seq, *parts[0].shape[2:])
        for rank, part in enumerate(parts):
            whole[:, self._index(seq, rank)] = part
        return whole

    def all_to_all(self, kind: str, buffers: list[Tensor], sizes: list[Sizes]) -> list[Tensor]:
        """`exchange_heads` of all ranks."""
        parts = [x.flatten().split(list(outgoing)) for x, (outgoing, _) in zip(buffers, sizes, strict=True)]
        swapped = []
        for rank, (_, incoming) in enumerate(sizes):
            first, member = rank - rank % self.members, rank % self.members
            swapped.append(torch.cat([parts[first + peer][member] for peer in range(self.members)]))
            assert swapped[rank].numel() == sum(incoming)
            self.comms[rank].received[kind] += sum(incoming) - incoming[member]
        return swapped

    def inward(self, kind: str, tensors: list[list[Tensor]]) -> list[list[Tensor]]:
        buffers = [ulysses.pack_in(x, self.members) for x in tensors]
        counts = [self.counts(rank, [x[0].shape[1] for x in tensors]) for rank in range(len(tensors))]
        found = self.all_to_all(kind, buffers, [ulysses.sizes_in(*x) for x in zip(buffers, counts, strict=True)])
        heads = [ulysses.heads_of_member(x.shape[2], self.members) for x in tensors[0]]
        return [ulysses.split_in(x.view(-1, *buffers[0].shape[2:]), heads) for x in found]

    def outward(
        self, kind: str, tensors: list[list[Tensor]], heads: list[int], tokens: list[int]
    ) -> list[list[Tensor]]:
        """tokens: of every rank, as it gave them to `inward`."""
        joined = [ulysses.join_out(x).contiguous() for x in tensors]
        sizes = [ulysses.sizes_out(x, self.counts(rank, tokens), tokens[rank]) for rank, x in enumerate(joined)]
        found = self.all_to_all(kind, joined, sizes)
        return [
            ulysses.unpack_out(x.view(self.members, own, *joined[0].shape[1:]), heads)
            for x, own in zip(found, tokens, strict=True)
        ]

    def counts(self, rank: int, tokens: list[int]) -> list[int]:
        """The tokens of the members of a rank's inner rank."""
        first = rank - rank % self.members
        return tokens[first : first + self.members]

"""Runs a plan, and the all-to-all around it, for all ranks of one sequence in one process.

The walker, kernels and packing are those of the real ranks; only the transport is a mailbox. For tests, and to measure
on one device. Takes global tensors and returns global ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from .compiler.masks import Mask
from .compiler.program import Wait
from .compiler.shards import EvenShards, Shards, members_positions, tokens_of
from .config import SequenceParallelConfig
from .errors import ConfigError, InputError
from .runtime import inputs, ulysses
from .runtime import sinks as sink
from .runtime.buffers import Tensors
from .runtime.comm import Message, Sizes
from .runtime.kernels import Scores
from .runtime.runtime import Runtime
from .runtime.walk import Walk
from .runtime.work import rowsum


@dataclasses.dataclass(frozen=True)
class Result:
    """Global out (B, S, Hq, D), and the gradients where `do` was given. received: elements by kind, an SP rank."""

    out: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    received: list[Counter[str]]


class _Mailbox:
    """The transport of one Ulysses member's inner ranks."""

    def __init__(self) -> None:
        self.letters: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)


class _VirtualComm:
    def __init__(self, rank: int, mailbox: _Mailbox) -> None:
        self.rank, self.mailbox, self.early = rank, mailbox, 0  # who takes from a mailbox gains nothing by asking
        self.received: Counter[str] = Counter()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Waiting:
        for message in sends:
            self.mailbox.letters[self.rank, message.peer, message.tag].append(message.buffer.clone())
        for message in receives:
            self.received[message.kind] += message.elements
        return _Waiting(self, receives)

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks[1:] + ranks[:1]  # any: real groups count their members as torch does

    def all_gather(self, ranks: tuple[int, ...], sent: Message, received: Tensor) -> _Waiting:
        sizes = [sent.buffer.numel()] * len(ranks)
        return self._together(
            ranks, sent.kind, sent.elements * (len(ranks) - 1), [sent.buffer] * len(ranks), received.split(sizes)
        )

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> _Waiting:
        return self._together(ranks, kind, elements, sent.split(list(sizes[0])), received.split(list(sizes[1])))

    def _together(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Sequence[Tensor], received: Sequence[Tensor]
    ) -> _Waiting:
        sends, receives = (
            [Message(peer, kind, 0, tensor, -1) for peer, tensor in zip(self.order(ranks), tensors, strict=True)]
            for tensors in (sent, received)
        )
        handle = self.post(sends, receives)
        self.received[kind] += elements
        return handle

    def exchange_heads(self, kind: str, sent: Tensor, sizes: Sizes) -> Tensor:
        raise AssertionError("the virtual runner exchanges heads for all members at once")


@dataclasses.dataclass
class _Waiting:
    comm: _VirtualComm
    receives: Sequence[Message]

    def _letters(self, message: Message) -> deque[Tensor]:
        return self.comm.mailbox.letters[message.peer, self.comm.rank, message.tag]

    def ready(self) -> bool:
        """Whether all peers have posted what this waits for."""
        return all(self._letters(message) for message in self.receives)

    def wait(self) -> None:
        for message in self.receives:
            message.buffer.copy_(self._letters(message).popleft())


def attention(
    config: SequenceParallelConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: Mask | None = None,
    shards: Shards | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Result:
    """q (B, S, Hq, D), k and v (B, S, Hkv, D), do as q; config.size virtual ranks. mask: in place of causal. shards:
    what every inner rank holds, in place of the configured layout; then k and v may have another length than q.
    softcap, sinks: as `SequenceParallel.attention` takes them.

    Raises what `SequenceParallel` and its attention raise for these settings and tensors.
    """
    meant = inputs.mask_of(causal, mask)
    inputs.check_arguments(q, k, v, meant, scale, lengths_differ=shards is not None)
    if not isinstance(config.size, int):
        raise ConfigError(f"virtual ranks need a size that is a number; got size {config.size!r}")
    if do is not None and inputs.describe(do) != inputs.describe(q):
        raise InputError(f"the output's gradient must be like q, {inputs.describe(q)}; got {inputs.describe(do)}")
    config = config.resolve(config.size, heads=(q.shape[2], k.shape[2]))
    if shards is None:
        inputs.check_length(config, q.shape[1])
        inputs.check_documents(meant, q.shape[1])
        shards = EvenShards(config.layout, q.shape[1], config.size // config.ulysses)
    else:
        inputs.check_shards(shards, config.size // config.ulysses, config.layout)
        _check_whole(shards, q, k)
    inputs.check_softcap(softcap)
    inputs.check_sinks(sinks, q)
    scores = Scores(q.shape[3] ** -0.5 if scale is None else float(scale), softcap or 0.0)
    ranks = _Ranks(config, shards, meant, scores, sinks, k.shape[2])
    inputs.check_shares(ranks.runtimes[0], q, k, meant, shards, scores.softcap)
    return ranks.attention(q, k, v, do)


def _check_whole(shards: Shards, q: Tensor, k: Tensor) -> None:
    held = [sum(tokens_of(shards, side, rank) for rank in range(shards.size)) for side in ("q", "kv")]
    if held != [q.shape[1], k.shape[1]]:
        raise InputError(
            f"attention needs shards that hold all {q.shape[1]} tokens of q and {k.shape[1]} of k and v; got some of "
            f"{held[0]} and {held[1]}"
        )


class _Ranks:
    """All SP ranks. Lists of tensors are indexed by SP rank = u + U * inner."""

    def __init__(
        self, config: SequenceParallelConfig, shards: Shards, mask: Mask, scores: Scores, sinks: Tensor | None,
        kv_heads: int,
    ) -> None:  # fmt: skip
        self.config, self.shards, self.mask, self.scores, self.sinks = config, shards, mask, scores, sinks
        self.members, self.kv_heads = config.ulysses, kv_heads
        topology = config.topology(config.size)
        self.mailboxes = [_Mailbox() for _ in range(self.members)]
        self.comms = [_VirtualComm(i // self.members, self.mailboxes[i % self.members]) for i in range(config.size)]
        self.runtimes = [Runtime(config, topology, i // self.members, self.comms[i]) for i in range(config.size)]
        held = [self.positions(side) for side in ("q", "kv")]
        self.index = {"q": held[0], "kv": held[1]}

    def positions(self, side: str) -> list[Tensor]:
        """The global positions of every SP rank's tokens."""
        return [
            torch.tensor(held, dtype=torch.int64)
            for inner in range(self.config.size // self.members)
            for held in members_positions(self.shards, side, inner, self.members)
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None) -> Result:
        heads, kv_heads = q.shape[2], self.kv_heads
        operands = self.operands(q, k, v)
        settings = self.mask, self.shards, self.scores
        results = self.together([r.forward(*x, *settings) for r, x in zip(self.runtimes, operands, strict=True)])
        for rank, (out, lse) in enumerate(results):
            self.merge_sinks(rank, out, lse)
        outs = self.outward("out_heads", "q", [[out] for out, _ in results], [heads])
        out = self.unshard("q", [x[0] for x in outs], q.shape[1])
        if do is None:
            return Result(out, None, None, None, None, [comm.received for comm in self.comms])
        dos = self.inward("do_heads", "q", [[x] for x in self.shard("q", do)])
        saved = [(*d, *x, *result) for d, x, result in zip(dos, operands, results, strict=True)]
        grads = self.together([r.backward(x, *settings) for r, x in zip(self.runtimes, saved, strict=True)])
        (dq,), (dk, dv) = (
            [self.unshard(side, list(x), whole.shape[1]) for x in zip(*local, strict=True)]
            for side, whole, local in (
                ("q", q, self.outward("dqkv", "q", [[dq] for dq, _, _ in grads], [heads])),
                ("kv", k, self.outward("dqkv", "kv", [list(x[1:]) for x in grads], [kv_heads, kv_heads])),
            )
        )
        sinks = self.sink_gradient([(x[0], *result) for x, result in zip(dos, results, strict=True)])
        return Result(out, dq, dk, dv, sinks, [comm.received for comm in self.comms])

    def own_heads(self, rank: int, heads: int) -> slice:
        return ulysses.heads_of(heads, self.kv_heads, self.members, rank % self.members)[0]

    def merge_sinks(self, rank: int, out: Tensor, lse: Tensor) -> None:
        if self.sinks is not None:
            sink.merge_(out, lse, self.sinks[self.own_heads(rank, len(self.sinks))])

    def sink_gradient(self, results: list[Tensors]) -> Tensor | None:
        """The sum of all ranks'. results: (do, out, lse) of each."""
        if self.sinks is None:
            return None
        total = torch.zeros_like(self.sinks)
        for rank, (do, out, lse) in enumerate(results):
            own = self.own_heads(rank, len(total))
            total[own] += sink.gradient(rowsum(do, out, lse.dtype), lse, self.sinks[own])
        return total

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of every inner rank and Ulysses member."""
        queries = self.inward("qkv", "q", [[x] for x in self.shard("q", q)])
        pairs = [list(x) for x in zip(self.shard("kv", k), self.shard("kv", v), strict=True)]
        return [(x, y, z) for (x,), (y, z) in zip(queries, self.inward("qkv", "kv", pairs), strict=True)]

    def together(self, walks: list[Walk]) -> list[Tensors]:
        """Each rank goes on until it waits for what its peers have not posted yet, and then the next."""
        while any(walk.at < len(walk.program.code) for walk in walks):
            assert any([_go_on(walk) for walk in walks]), "ranks wait for one another"
        assert not any(queue for box in self.mailboxes for queue in box.letters.values()), "a message nobody received"
        return [walk.result for walk in walks]

    def shard(self, side: str, x: Tensor) -> list[Tensor]:
        return [x[:, held] for held in self.index[side]]

    def unshard(self, side: str, parts: list[Tensor], seq: int) -> Tensor:
        whole = parts[0].new_empty(parts[0].shape[0], seq, *parts[0].shape[2:])
        for held, part in zip(self.index[side], parts, strict=True):
            whole[:, held] = part
        return whole

    def all_to_all(self, kind: str, buffers: list[Tensor], sizes: Sequence[Sizes]) -> list[Tensor]:
        """`exchange_heads` of all ranks."""
        parts = [x.flatten().split(list(outgoing)) for x, (outgoing, _) in zip(buffers, sizes, strict=True)]
        swapped = []
        for rank, (_, incoming) in enumerate(sizes):
            first, member = rank - rank % self.members, rank % self.members
            swapped.append(torch.cat([parts[first + peer][member] for peer in range(self.members)]))
            assert swapped[rank].numel() == sum(incoming)
            self.comms[rank].received[kind] += sum(incoming) - incoming[member]
        return swapped

    def inward(self, kind: str, side: str, tensors: list[list[Tensor]]) -> list[list[Tensor]]:
        its = ulysses.deal(tuple(x.shape[2] for x in tensors[0]), self.kv_heads, self.members)
        batch, _, _, dim = tensors[0][0].shape
        buffers = [ulysses.pack_in(x, its) for x in tensors]
        found = self.all_to_all(kind, buffers, self.sizes(its, side, batch * dim))
        heads = [ulysses.own_heads(tensors[0], self.kv_heads, self.members, u) for u in range(self.members)]
        return [
            ulysses.split_in(x.view(-1, batch, sum(mine), dim), mine)
            for x, mine in zip(found, heads * (len(found) // self.members), strict=True)
        ]

    def outward(self, kind: str, side: str, tensors: list[list[Tensor]], heads: list[int]) -> list[list[Tensor]]:
        its = ulysses.deal(tuple(heads), self.kv_heads, self.members)
        batch, _, _, dim = tensors[0][0].shape
        joined = [ulysses.join_out(x).contiguous() for x in tensors]
        sizes = [(outgoing, incoming) for incoming, outgoing in self.sizes(its, side, batch * dim)]
        found = self.all_to_all(kind, joined, sizes)
        return [
            ulysses.unpack_out(x, its, batch, len(held), dim) for x, held in zip(found, self.index[side], strict=True)
        ]

    def sizes(self, its: ulysses.Deal, side: str, token: int) -> list[Sizes]:
        """Inward, of every rank."""
        ranks = range(self.config.size)
        return [ulysses.sizes(its, self.counts(side, rank), rank % self.members, token) for rank in ranks]

    def counts(self, side: str, rank: int) -> list[int]:
        """The tokens of the members of a rank's inner rank."""
        first = rank - rank % self.members
        return [len(held) for held in self.index[side][first : first + self.members]]


def _go_on(walk: Walk) -> bool:
    """Whether it got further."""
    start = walk.at
    while walk.at < len(walk.program.code):
        instruction = walk.program.code[walk.at]
        if isinstance(instruction, Wait):
            waiting = walk.tickets[instruction.ticket]
            assert isinstance(waiting, _Waiting)  # of a _VirtualComm
            if not waiting.ready():
                break
        walk.advance()
    return walk.at > start

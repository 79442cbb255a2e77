"""Runs the programs of all ranks of one sequence in one process.

The walker, the kernels and the exchange of heads are those of the real ranks; only the transport is a mailbox. For
tests, and to measure on one device. Takes global tensors and returns global ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .compiler.compile import Compiler
from .compiler.masks import Mask
from .compiler.program import Wait
from .compiler.shards import EvenShards, Shards, members_positions, tokens_of
from .config import SequenceParallelConfig, check_heads, check_length
from .errors import ConfigError, InputError
from .runtime import inputs
from .runtime.buffers import Tensors
from .runtime.call import Saved
from .runtime.comm import EXCHANGE, Message, Sizes
from .runtime.kernels import Scores
from .runtime.runtime import Runtime
from .runtime.walk import Walk


@dataclasses.dataclass(frozen=True)
class Result:
    """Global out (B, S, Hq, D), and the gradients where `do` was given. received: elements by kind, an SP rank."""

    out: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    received: list[Counter[str]]

    def of_head_dims(self, qk: int, v: int) -> Result:
        """Without what was filled up."""
        dims = {"out": v, "dq": qk, "dk": qk, "dv": v}
        found = {name: getattr(self, name) for name in dims}
        return dataclasses.replace(self, **{name: x[..., : dims[name]] for name, x in found.items() if x is not None})


# the transport of one Ulysses member's inner ranks, or of one inner rank's members: by (from, to, tag)
Mailbox = defaultdict[tuple[int, int, int], deque[Tensor]]


class _VirtualComm:
    """members: the same for the exchange with Ulysses' members."""

    def __init__(self, rank: int, mailbox: Mailbox, members: _VirtualComm | None = None) -> None:
        self.rank, self.mailbox, self.early = rank, mailbox, 0  # who takes from a mailbox gains nothing by asking
        self.members = members or self
        self.received: Counter[str] = Counter()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Waiting:
        for message in sends:
            self.mailbox[self.rank, message.peer, message.tag].append(message.buffer.clone())
        for message in receives:
            self.received[message.kind] += message.elements
        return _Waiting(self, receives)

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks[1:] + ranks[:1]  # any: real groups count their members as torch does

    def all_gather(self, ranks: tuple[int, ...], sent: Message, received: Tensor) -> _Waiting:
        count, size = len(ranks), sent.buffer.numel()
        parts = [sent.buffer] * count, received.split([size] * count)
        return self._together(self.order(ranks), sent.kind, sent.elements * (count - 1), *parts)

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> _Waiting:
        return self._together(
            self.order(ranks), kind, elements, sent.split(list(sizes[0])), received.split(list(sizes[1]))
        )

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> _Waiting:
        peers, own = range(len(sizes[0])), sizes[1][self.members.rank]
        parts = sent.split(list(sizes[0])), received.split(list(sizes[1]))
        return self._together(peers, kind, sum(sizes[1]) - own, *parts, EXCHANGE)

    def _together(
        self, peers: Sequence[int], kind: str, elements: int, sent: Sequence[Tensor], received: Sequence[Tensor],
        tag: int = -1,
    ) -> _Waiting:  # fmt: skip
        """elements: that this rank receives from others."""
        sends, receives = (
            [Message(peer, kind, 0, tensor, tag) for peer, tensor in zip(peers, tensors, strict=True)]
            for tensors in (sent, received)
        )
        self.received[kind] += elements
        return (self.members if tag == EXCHANGE else self).post(sends, receives)


@dataclasses.dataclass
class _Waiting:
    comm: _VirtualComm
    receives: Sequence[Message]

    def _letters(self, message: Message) -> deque[Tensor]:
        return self.comm.mailbox[message.peer, self.comm.rank, message.tag]

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
    compilers: dict[Hashable, Compiler] | None = None,
) -> Result:
    """q (B, S, Hq, D), k and v (B, S, Hkv, D), do as q; config.size virtual ranks. mask: in place of causal. shards:
    what every inner rank holds, in place of the configured layout; then k and v may have another length than q.
    softcap, sinks: as `SequenceParallel.attention` takes them. compilers: a dict, empty at first, that keeps what one
    call compiled for the next one. Kernel "auto" goes by the built-in order: no file that `machine` names is read.

    Raises what `SequenceParallel` and its attention raise for these settings and tensors.
    """
    meant = inputs.mask_of(causal, mask)
    inputs.check_arguments(q, k, v, meant, scale, lengths_differ=shards is not None)
    if not isinstance(config.size, int):
        raise ConfigError(f"virtual ranks need a size that is a number; got size {config.size!r}")
    like = f"{(*q.shape[:3], v.shape[3])} {q.dtype}"
    if do is not None and inputs.describe(do) != like:
        raise InputError(f"the output's gradient must be like the output, {like}; got {inputs.describe(do)}")
    config = config.resolve(config.size, heads=(q.shape[2], k.shape[2]))
    if shards is None:
        check_length(config, q.shape[1])
        inputs.check_documents(meant, q.shape[1])
        shards = EvenShards(config.layout, q.shape[1], config.size // config.ulysses)
    else:
        inputs.check_shards(shards, config.size // config.ulysses, config.layout)
        _check_whole(shards, q, k)
    inputs.check_softcap(softcap)
    inputs.check_sinks(sinks, q)
    scores = Scores(q.shape[3] ** -0.5 if scale is None else float(scale), softcap or 0.0)
    check_heads(config.ulysses, q.shape[2], k.shape[2], size=config.size, stages=config.head_stages)
    stages = 1 if config.head_stages == "auto" else config.head_stages
    dims, kept = (q.shape[3], v.shape[3]), {} if compilers is None else compilers
    ranks = _Ranks(config, shards, meant, scores, sinks, kept)
    if dims[0] == dims[1]:
        return ranks.attention(q, k, v, do, stages)
    q, k, v, *dos = inputs.of_one_head_dim(q, k, v, *(() if do is None else (do,)))
    return ranks.attention(q, k, v, dos[0] if dos else None, stages).of_head_dims(*dims)


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
        compilers: dict[Hashable, Compiler],
    ) -> None:  # fmt: skip
        self.shards, self.mask, self.scores, self.sinks = shards, mask, scores, sinks
        count, topology, ranks = config.ulysses, config.topology(config.size), range(config.size)
        among_inner = [Mailbox(deque) for _ in range(count)]
        among_members = [Mailbox(deque) for _ in range(config.size // count)]
        self.mailboxes = among_inner + among_members
        self.comms = [
            _VirtualComm(r // count, among_inner[r % count], _VirtualComm(r % count, among_members[r // count]))
            for r in ranks
        ]
        self.runtimes = [Runtime(config, topology, r // count, self.comms[r], r % count) for r in ranks]
        for runtime in self.runtimes:
            runtime.compiler = compilers.setdefault((config, runtime.rank), runtime.compiler)
        self.index = {side: self.positions(side, count) for side in ("q", "kv")}

    def positions(self, side: str, members: int) -> list[Tensor]:
        """The global positions of every SP rank's tokens."""
        return [
            torch.tensor(held, dtype=torch.int64)
            for inner in range(self.shards.size)
            for held in members_positions(self.shards, side, inner, members)
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, stages: int) -> Result:
        local = list(zip(self.shard("q", q), self.shard("kv", k), self.shard("kv", v), strict=True))
        settings, keep = (self.mask, self.shards, self.scores), 0 if self.runtimes[0].members.degree == 1 else 2
        for runtime, (mine, its, _) in zip(self.runtimes, local, strict=True):
            inputs.check_programs(runtime, mine, its, self.mask, self.shards, self.scores.softcap)
        walks = [
            runtime.forward(*own, self.sinks, *settings, stages, keep)
            for runtime, own in zip(self.runtimes, local, strict=True)
        ]
        results = self.together(walks)
        out = self.unshard("q", [x[0] for x in results], q.shape[1])
        received = [comm.received for comm in self.comms]
        if do is None:
            return Result(out, None, None, None, None, received)
        walks = [
            self.backward(runtime, mine, own, found, stages, settings)
            for runtime, mine, own, found in zip(self.runtimes, self.shard("q", do), local, results, strict=True)
        ]
        grads = self.together(walks)
        dq, dk, dv = (
            self.unshard(side, [x[index] for x in grads], whole.shape[1])
            for index, (side, whole) in enumerate((("q", q), ("kv", k), ("kv", v)))
        )
        dsinks = None if self.sinks is None else torch.stack([x[3] for x in grads]).sum(0)
        return Result(out, dq, dk, dv, dsinks, received)

    def backward(
        self, runtime: Runtime, do: Tensor, own: Tensors, found: list[Tensor], stages: int, settings: tuple
    ) -> Walk:
        out, (lses, rest) = found[0], (found[1 : 1 + stages], found[1 + stages :])
        alone = runtime.members.degree == 1
        arrived, outs = (rest[: len(rest) - stages], rest[len(rest) - stages :]) if rest else ([], [])
        given = {"do": do, "out": out, **dict(zip(("q", "k", "v"), own, strict=True))} if alone else {"do": do}
        return runtime.backward(given, own[1].shape[2], self.sinks, Saved(lses, arrived, outs), *settings)

    def together(self, walks: list[Walk]) -> list[list[Tensor]]:
        """Each rank goes on until it waits for what its peers have not posted yet, and then the next."""
        while any(walk.at < len(walk.program.code) for walk in walks):
            assert any([_go_on(walk) for walk in walks]), "ranks wait for one another"
        assert not any(queue for box in self.mailboxes for queue in box.values()), "a message nobody received"
        return [walk.call.results() for walk in walks]

    def shard(self, side: str, x: Tensor) -> list[Tensor]:
        return [x[:, held] for held in self.index[side]]

    def unshard(self, side: str, parts: list[Tensor], seq: int) -> Tensor:
        whole = parts[0].new_empty(parts[0].shape[0], seq, *parts[0].shape[2:])
        for held, part in zip(self.index[side], parts, strict=True):
            whole[:, held] = part
        return whole


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

"""Simulate all ranks that share a sequence in a single process, for tests and measurements on one device.

The walk (the executor of a program), the kernels and the exchange of heads are the same as on real ranks. A mailbox
replaces the transport. Inputs and outputs are global tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from .base.errors import ConfigError, InputError
from .core.compiler.compile import Compiler
from .core.compiler.program.instructions import Wait
from .core.compiler.program.ulysses import SavedForBackward
from .core.compiler.sharding.heads import check_heads
from .core.compiler.sharding.masks import Mask
from .core.compiler.sharding.shards import EvenShards, Shards, tokens_of
from .core.runtime import admit
from .core.runtime.buffers import Tensors
from .core.runtime.call import AttentionResults, CallSettings
from .core.runtime.dense import common_part, moments
from .core.runtime.kernels import Scores
from .core.runtime.operator import DENSE, Operator, describe, padded
from .core.runtime.runtime import Runtime
from .core.runtime.transport import EXCHANGE_TAG, Message, Sizes
from .core.runtime.walk import Walk
from .core.settings import SequenceParallelConfig, check_length
from .data.batch_layout import positions_held


@dataclasses.dataclass(frozen=True)
class Result:
    """The output from all virtual ranks, with gradients if `do` was passed."""

    out: Tensor  # (B, S, Hq, D), global
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None  # for another operator, dk and dv belong to the operator's second and third tensor
    dsinks: Tensor | None
    received: list[Counter[str]]  # number of received elements by kind, for each SP rank


# messages by (from, to, tag), between the CP ranks of one Ulysses rank or the Ulysses ranks of one CP rank
Mailbox = defaultdict[tuple[int, int, int], deque[Tensor]]


class _VirtualComm:
    """The transport of one virtual rank, backed by a mailbox. `ulysses` is the transport to all other Ulysses ranks."""

    def __init__(self, rank: int, mailbox: Mailbox, ulysses: _VirtualComm | None = None) -> None:
        self.rank, self.mailbox, self.ulysses = rank, mailbox, ulysses or self
        self.early = 0  # posting a receive early has no benefit, since a mailbox stores all messages
        self.received: Counter[str] = Counter()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Receives:
        for message in sends:
            self.mailbox[self.rank, message.peer, message.tag].append(message.buffer.clone())
        for message in receives:
            self.received[message.kind] += message.elements
        return _Receives(self, receives)

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks[1:] + ranks[:1]  # may differ from `ranks`, as in a real group

    def all_gather(self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor) -> _Receives:
        buffers = [sent] * len(ranks), received.split(sent.numel())
        return self._collective(self.order(ranks), kind, elements, *buffers)

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> _Receives:
        return self._collective(
            self.order(ranks), kind, elements, sent.split(list(sizes[0])), received.split(list(sizes[1]))
        )

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> _Receives:
        peers, local_elements = range(len(sizes[0])), sizes[1][self.ulysses.rank]
        buffers = sent.split(list(sizes[0])), received.split(list(sizes[1]))
        return self._collective(peers, kind, sum(sizes[1]) - local_elements, *buffers, EXCHANGE_TAG)

    def parts_of_all(self, x: Tensor, what: str, shares: bool = False) -> Tensor:
        raise NotImplementedError("virtual ranks are given the common part of their keys")

    def _collective(
        self, peers: Sequence[int], kind: str, elements: int, sent: Sequence[Tensor], received: Sequence[Tensor],
        tag: int = -1,
    ) -> _Receives:  # fmt: skip
        """Send to each peer, and receive from each peer.

        `elements` is the number of elements received from other ranks.
        """
        sends, receives = (
            [Message(peer, kind, 0, tensor, tag) for peer, tensor in zip(peers, tensors, strict=True)]
            for tensors in (sent, received)
        )
        self.received[kind] += elements
        return (self.ulysses if tag == EXCHANGE_TAG else self).post(sends, receives)


@dataclasses.dataclass
class _Receives:
    """The messages for which a rank waits after a post."""

    comm: _VirtualComm
    receives: Sequence[Message]

    def _queue(self, message: Message) -> deque[Tensor]:
        return self.comm.mailbox[message.peer, self.comm.rank, message.tag]

    def ready(self) -> bool:
        """Return whether all awaited messages have been posted."""
        return all(self._queue(message) for message in self.receives)

    def wait(self) -> None:
        for message in self.receives:
            message.buffer.copy_(self._queue(message).popleft())


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
    operator: Operator = DENSE,
    compilers: dict[Hashable, Compiler] | None = None,
) -> Result:
    """Compute attention on config.size virtual ranks.

    The kernel setting "auto" selects kernels in the built-in order, without reading a `machine` file.

    Args:
        q: (B, S, Hq, D).
        k: (B, S, Hkv, D). With `shards`, the sequence lengths of k and q may differ.
        v: Values with the same shape as k.
        do: The gradient of the output, in the output's shape.
        mask: The mask, which replaces `causal`.
        shards: The tokens of every CP rank, in place of the configured layout.
        softcap: See `SequenceParallel.attention`.
        sinks: See `SequenceParallel.attention`.
        operator: The operator to compute. For operators other than attention, pass the second and third tensor as k and
            v.
        compilers: An initially empty dict that caches compiled programs between calls.

    Raises:
        SeqParError: See `SequenceParallel` and its `attention` for the errors.
    """
    visible = admit.mask_of(causal, mask)
    given = q, k, v
    admit.check_arguments(given, visible, scale, shards is not None, operator)
    with torch.enable_grad():  # a graph that propagates gradients back to the given tensors
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
        prepared, v_dim = operator.prepare(leaves)
    if not isinstance(config.size, int):
        raise ConfigError(f"virtual ranks need a size that is a number; got size {config.size!r}")
    scores = Scores(q.shape[3] ** -0.5 if scale is None else float(scale), softcap or 0.0)
    q, k, *_ = tensors = tuple(x.detach() for x in prepared)
    like = f"{(*q.shape[:3], v_dim)} {q.dtype}"
    if do is not None and describe(do) != like:
        raise InputError(f"the output's gradient must be like the output, {like}; got {describe(do)}")
    config = config.resolve(config.size, heads=(q.shape[2], k.shape[2]))
    if shards is None:
        check_length(config, q.shape[1])
        admit.check_documents(visible, q.shape[1])
        shards = EvenShards(config.layout, q.shape[1], config.size // config.ulysses)
    else:
        admit.check_shards(shards, config.size // config.ulysses, config.layout)
        _check_whole(shards, q, k)
    admit.check_softcap(softcap)
    admit.check_sinks(sinks, q)
    check_heads(config.ulysses, q.shape[2], k.shape[2], size=config.size, head_chunks=config.head_chunks)
    head_chunks = 1 if config.head_chunks == "auto" else config.head_chunks
    ranks = _Ranks(config, shards, sinks, {} if compilers is None else compilers)
    saves = SavedForBackward.NOTHING if config.ulysses == 1 else SavedForBackward.QKV_AND_OUT
    settings = CallSettings(visible, shards, scores, head_chunks, saves, operator=operator, v_dim=v_dim)
    gradient = None if do is None else padded(do, q.shape[3])
    out, grads, dsinks = ranks.attention(tensors, gradient, settings)
    each = zip(prepared, leaves, grads, strict=True) if grads else ()
    of_given = [grad if x is leaf else torch.autograd.grad(x, leaf, grad)[0] for x, leaf, grad in each]
    dq, dk, dv = of_given or (None, None, None)
    return Result(out[..., :v_dim], dq, dk, dv, dsinks, [comm.received for comm in ranks.comms])


def _check_whole(shards: Shards, q: Tensor, k: Tensor) -> None:
    tokens = [sum(tokens_of(shards, side, rank) for rank in range(shards.size)) for side in ("q", "kv")]
    if tokens != [q.shape[1], k.shape[1]]:
        raise InputError(
            f"attention needs shards that hold all {q.shape[1]} tokens of q and {k.shape[1]} of k and v; got some of "
            f"{tokens[0]} and {tokens[1]}"
        )


class _Ranks:
    """All virtual ranks. Lists have one element per SP rank. Rank `u + U * r` is Ulysses rank u of CP rank r."""

    def __init__(
        self, config: SequenceParallelConfig, shards: Shards, sinks: Tensor | None, compilers: dict[Hashable, Compiler]
    ) -> None:
        self.sinks = sinks
        count, topology, ranks = config.ulysses, config.topology(config.size), range(config.size)
        among_inner = [Mailbox(deque) for _ in range(count)]
        among_ulysses = [Mailbox(deque) for _ in range(config.size // count)]
        self.mailboxes = among_inner + among_ulysses
        self.comms = [
            _VirtualComm(r // count, among_inner[r % count], _VirtualComm(r % count, among_ulysses[r // count]))
            for r in ranks
        ]
        self.runtimes = [Runtime(config, topology, r // count, self.comms[r], r % count) for r in ranks]
        for runtime in self.runtimes:
            runtime.compiler = compilers.setdefault((config, runtime.rank), runtime.compiler)
        self.common: Tensor | None = None  # subtracted by all ranks from their keys
        self.positions = {side: [positions_held(shards, count, r, side) for r in ranks] for side in ("q", "kv")}

    def attention(
        self, tensors: Tensors, do: Tensor | None, settings: CallSettings
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return the output, the gradients of the operator's tensors (empty without `do`), and the gradient of the
        sinks.
        """
        operator = settings.operator
        sides = ["q", *["kv"] * (len(operator.operands) - 1), *[""] * len(operator.parameters)]
        local = list(zip(*(self.shard(side, x) for side, x in zip(sides, tensors, strict=True)), strict=True))
        for runtime, mine in zip(self.runtimes, local, strict=True):
            for direction in ("forward", "backward"):
                runtime.bound(direction, mine[0], [x.shape for x in mine], settings)
        if settings.takes_common_off(tensors[0].dtype, self.runtimes[0].size):
            self.common = common_part(torch.stack([moments(mine[1]) for mine in local]), tensors[1].shape[2])
        results = self.walk_all(
            [runtime.forward_walk(mine, self.sinks, settings, self.common) for runtime, mine in self.each(local)]
        )
        out = self.unshard("q", [x[0] for x in results], tensors[0].shape[1])
        if do is None:
            return out, [], None
        each = zip(self.runtimes, self.shard("q", do), local, results, strict=True)
        grads = self.walk_all([self.backward(*of_rank, settings) for of_rank in each])
        whole = [
            self.unshard(side, [x[index] for x in grads], tensors[index].shape[1]) for index, side in enumerate(sides)
        ]
        return out, whole, None if self.sinks is None else torch.stack([x[-1] for x in grads]).sum(0)

    def each(self, local: list[Tensors]) -> Iterator[tuple[Runtime, Tensors]]:
        return zip(self.runtimes, local, strict=True)

    def backward(
        self, runtime: Runtime, do: Tensor, local: Tensors, result: list[Tensor], settings: CallSettings
    ) -> Walk:
        """Return the walk for a rank's backward pass.

        Args:
            local: The rank's tensors for the operator.
            result: The result of the rank's forward pass.
        """
        operator, saves = settings.operator, settings.saves
        found = AttentionResults.of(result, do.dtype, settings)
        names = operator.parameters if saves.qkv else operator.inputs
        tensors = {"do": do, **dict(zip(names, local[len(local) - len(names) :], strict=True))}
        if not saves.out:
            tensors["out"] = found.out
        shapes = [x.shape for x in local]
        return runtime.backward_walk(tensors, shapes, self.sinks, found.saved, settings, self.common)

    def walk_all(self, walks: list[Walk]) -> list[list[Tensor]]:
        """Return the results of all ranks. Ranks take turns, and each turn lasts until a message is missing."""
        while any(walk.at < len(walk.program.code) for walk in walks):
            assert any([_advance(walk) for walk in walks]), "ranks wait for one another"
        assert not any(queue for box in self.mailboxes for queue in box.values()), "a message nobody received"
        return [walk.call.results() for walk in walks]

    def shard(self, side: str, x: Tensor) -> list[Tensor]:
        """Return each rank's tokens for a side ("q" or "kv"). If `side` is empty, each rank gets the whole tensor."""
        return [x[:, positions] for positions in self.positions[side]] if side else [x] * len(self.runtimes)

    def unshard(self, side: str, shards: list[Tensor], seq: int) -> Tensor:
        """Assemble the whole tensor from all ranks' tokens. If `side` is empty, return the sum over ranks."""
        if not side:
            return torch.stack(shards).sum(0)
        whole = shards[0].new_empty(shards[0].shape[0], seq, *shards[0].shape[2:])
        for positions, shard in zip(self.positions[side], shards, strict=True):
            whole[:, positions] = shard
        return whole


def _advance(walk: Walk) -> bool:
    """Execute instructions until a message is missing or the program ends.

    Return whether any instruction was executed.
    """
    start = walk.at
    while walk.at < len(walk.program.code):
        instruction = walk.program.code[walk.at]
        if isinstance(instruction, Wait):
            receives = walk.tickets[instruction.ticket]
            assert isinstance(receives, _Receives)  # a _VirtualComm returned the handle
            if not receives.ready():
                break
        walk.advance()
    return walk.at > start

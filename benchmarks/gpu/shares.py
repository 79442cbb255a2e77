"""Measure one rank's share of attention on a single device, and compare the share with a dense call.

Programs, executor, kernels, merging and packing are the same as on a real rank. Received data is copied from noise in
the device's memory, so that the time includes no communication.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.peers import dense
from benchmarks.contenders import parse
from benchmarks.gpu.bench import Bench
from benchmarks.turns import in_turns, of_device
from ds_seqpar import SequenceParallelConfig, testing
from ds_seqpar.core.compiler.program.ulysses import SavedForBackward
from ds_seqpar.core.compiler.sharding.layout import multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.runtime.call import CallSettings
from ds_seqpar.core.runtime.kernels import Scores
from ds_seqpar.core.runtime.transport import Message

# contender -> number of ranks; the triangle does not support 8
CONTENDERS = {"ring": 8, "u2/ring": 8, "attention2d=2": 8, "triangle": 6}


class _Noise:
    """A communication handle, and random bytes. The bytes are bf16 numbers, and pairs of them are random fp32 numbers
    too.
    """

    bytes: dict[torch.device, Tensor] = {}  # noqa: RUF012

    @classmethod
    def fill(cls, buffer: Tensor) -> None:
        flat = buffer.view(-1).view(torch.uint8)
        have = cls.bytes.get(flat.device)
        if have is None or len(have) < len(flat):
            have = torch.randn(len(flat) // 2 + 1, device=flat.device).bfloat16().view(torch.uint8)
            cls.bytes[flat.device] = have
        flat.copy_(have[: len(flat)])

    def ready(self) -> bool:
        return True

    def wait(self) -> None: ...


class Alone(testing._VirtualComm):
    """A transport without communication: sent data is dropped, and received data is noise."""

    def __init__(self, rank: int, ulysses: testing._VirtualComm | None = None) -> None:
        super().__init__(rank, testing.Mailbox(deque), ulysses)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        for message in receives:
            _Noise.fill(message.buffer)
        return _Noise()

    def parts_of_all(self, x: Tensor, what: str, shares: bool = False) -> Tensor:
        return x[None]


class Share:
    """The attention calls of a single rank in a group of `ranks` ranks.

    The group shares `tokens` tokens; `given` are the rank's local q, k, v and do.
    """

    def __init__(
        self, section: dict[str, Any], ranks: int, rank: int, tokens: int, mask: Mask, given: Sequence[Tensor]
    ) -> None:
        *local, self.do = given
        self.local = tuple(local)
        heads = self.local[0].shape[2], self.local[1].shape[2]
        config = SequenceParallelConfig(size=ranks, **{"ulysses": 1, **section}).resolve(ranks, heads)
        shards = EvenShards(config.layout, tokens, ranks // config.ulysses)
        scores = Scores(self.local[0].shape[3] ** -0.5)
        saves = SavedForBackward.NOTHING if config.ulysses == 1 else SavedForBackward.QKV_AND_OUT
        self.settings = CallSettings(mask, shards, scores, saves=saves)
        self.all = testing._Ranks(config, shards, None, {})
        self.runtime, (cp_rank, ulysses_rank) = self.all.runtimes[rank], divmod(rank, config.ulysses)
        self.runtime.comm = Alone(cp_rank, Alone(ulysses_rank))

    def forward(self) -> list[Tensor]:
        self.found = self.runtime.forward_walk(self.local, None, self.settings, None).run()
        return self.found[:1]

    def backward(self) -> list[Tensor]:
        return self.all.backward(self.runtime, self.do, self.local, self.found, self.settings).run()


class Bare:
    """A direct call of torch's attention. `attend` maps q, k and v to a list of outputs."""

    def __init__(self, attend: Callable[..., list[Tensor]], given: Sequence[Tensor]) -> None:
        *local, self.do = given
        self.attend, self.local = attend, [x.detach().requires_grad_() for x in local]

    def forward(self) -> list[Tensor]:
        self.outs = self.attend(*self.local)
        return [self.outs[0].detach().reshape(self.do.shape)]

    def backward(self) -> list[Tensor]:
        grads = [self.do.reshape(out.shape) for out in self.outs]
        return [*torch.autograd.grad(self.outs, self.local, grads, retain_graph=True)]


def ranks(bench: Bench) -> None:
    clock = of_device(bench.device)
    for tokens in bench.sizes.shares:
        whole = Bare(lambda *inputs: [dense(*inputs)], bench.attended(tokens))
        for name, count in CONTENDERS.items():
            what = f"{name} of {count}, {tokens} tokens"
            if bench.has_time(what):
                bench.tried(what, lambda given=(name, count, tokens, whole): _compared(bench, *given, clock))


def _compared(bench: Bench, name: str, count: int, tokens: int, whole: Bare, clock: Any) -> None:
    """Record 1 / count of a dense call's time, relative to the slowest rank's time for as many pairs."""
    section = parse(name).section
    config = SequenceParallelConfig(size=count, **section).resolve(count, bench.sizes.heads)
    cp_size = count // config.ulysses
    near = tokens - tokens % (config.ulysses * multiple(config.layout, cp_size, 1))
    given = bench.attended(near // count)
    shares = [Share(section, count, rank, near, CAUSAL, given) for rank in range(count)]
    for way in ("forward", "backward"):
        steps = {"dense": getattr(whole, way), **{str(r): getattr(share, way) for r, share in enumerate(shares)}}
        found = in_turns(steps, 15, clock, seconds=bench.seconds / (4 * len(CONTENDERS) * len(bench.sizes.shares)))
        once = found.pop("dense")
        slowest = [max(turn) for turn in zip(*found.values(), strict=True)]
        part = (near / tokens) ** 2 / count
        bench.note(
            contender=name, ranks=count, tokens=tokens, way=way, seconds=statistics.median(slowest),
            dense=statistics.median(once),
            efficiency=statistics.median(a * part / b for a, b in zip(once, slowest, strict=True)),
        )  # fmt: skip

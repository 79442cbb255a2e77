"""One rank's part of attention, walked on one device by itself; and the section "ranks": parts beside a dense call.

Programs, walker, kernels, merging and packing are those of the real rank. What it would receive is copied from noise in
the device's own memory, so no link is in the time.
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
from ds_seqpar.core.runtime.kernels import Scores
from ds_seqpar.core.runtime.runtime import CallSettings
from ds_seqpar.core.runtime.transport import Message

# of which a rank's part is measured -> ranks; no triangle has 8
CONTENDERS = {"ring": 8, "u2/ring": 8, "attention2d=2": 8, "triangle": 6}


class _Noise:
    """A handle, and the bytes of random bf16 numbers; two of them read as fp32 are a random number too."""

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
    """A transport that carries nothing: what is sent is dropped, and what is received is noise."""

    def __init__(self, rank: int, ulysses: testing._VirtualComm | None = None) -> None:
        super().__init__(rank, testing.Mailbox(deque), ulysses)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        for message in receives:
            _Noise.fill(message.buffer)
        return _Noise()

    def parts_of_all(self, x: Tensor, what: str, shares: bool = False) -> Tensor:
        return x[None]


class Share:
    """The calls of one rank of `ranks`. q, k, v, do: of its tokens, of a sequence of `tokens`."""

    def __init__(
        self, section: dict[str, Any], ranks: int, rank: int, tokens: int, mask: Mask, given: Sequence[Tensor]
    ) -> None:
        *self.local, self.do = given
        heads = self.local[0].shape[2], self.local[1].shape[2]
        config = SequenceParallelConfig(size=ranks, **{"ulysses": 1, **section}).resolve(ranks, heads)
        shards = EvenShards(config.layout, tokens, ranks // config.ulysses)
        scores = Scores(self.local[0].shape[3] ** -0.5)
        saves = SavedForBackward.NOTHING if config.ulysses == 1 else SavedForBackward.QKV_AND_OUT
        self.settings = CallSettings(mask, shards, scores, saves=saves)
        self.all = testing._Ranks(config, shards, mask, scores, None, {})
        self.runtime, (cp_rank, ulysses_rank) = self.all.runtimes[rank], divmod(rank, config.ulysses)
        self.runtime.comm = Alone(cp_rank, Alone(ulysses_rank))

    def forward(self) -> list[Tensor]:
        self.found = self.runtime.forward_walk(*self.local, None, self.settings, None).run()
        return self.found[:1]

    def backward(self) -> list[Tensor]:
        return self.all.backward(self.runtime, self.do, self.local, self.found, self.settings).run()


class Bare:
    """torch's own call. attend: q, k and v to the outs that it makes of them."""

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
    """Notes the slowest rank's share beside 1 / count of the dense call, of as many pairs."""
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

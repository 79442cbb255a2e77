"""The part of `benchmarks.lengths` that runs on ranks: steps of one layer with simulated computation, and a small
LLaMA.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.memory.ranks import Model
from benchmarks.runner import STEPS
from benchmarks.turns import in_turns, together
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.core.compiler.program.instructions import Product
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.compiler.tiles.launches import KernelSupport
from ds_seqpar.core.runtime import kernels
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.core.runtime.walk import Observer
from ds_seqpar.kernels.varlen import joined
from ds_seqpar.planner.estimate import FLOPS_PER_PAIR, Work
from ds_seqpar.whole import whole_loss
from hf_integration import share_sequences

BY_ULYSSES: dict[int, SequenceParallel] = {}


class Pack(NamedTuple):
    """A micro-batch.

    Attributes:
        lengths: Lengths of documents that ranks share, or a tuple of lengths for each rank.
        ulysses: The Ulysses size; 0 for plain data parallelism without attention calls.
    """

    lengths: tuple[Any, ...]
    ulysses: int = 0


class Nothing:
    """A kernel without computation, with one launch per product."""

    name = "nothing"
    support = KernelSupport(windows=2, segments=True, join=joined)
    tolerance: dict[torch.dtype, float] = {}  # noqa: RUF012
    ran_on = "CPU"

    def reasons(self, spec: object) -> list[str]:
        return []

    def forward(self, q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Clock(Observer):
    """Sleeps for the time that a machine would compute, by the pairs of each product."""

    def __init__(self, work: Work, heads: int) -> None:
        self.work, self.heads, self.slept, self.owed = work, heads, 0.0, 0.0
        self.share = {name: flops / sum(FLOPS_PER_PAIR.values()) for name, flops in FLOPS_PER_PAIR.items()}

    def after(self, walk: Any, instruction: Any) -> None:
        if isinstance(instruction, Product):
            pairs = sum(tile.pairs for tile in walk.bound.tiles(instruction.q, instruction.kv))
            share = self.share[walk.program.direction] * walk.bound.shape.q_heads / self.heads
            self.sleep(pairs * share * self.work.pair)

    def sleep(self, seconds: float) -> None:
        """Sleep, and compensate for earlier sleeps that took too long."""
        began, self.slept, self.owed = time.perf_counter(), self.slept + seconds, self.owed + seconds
        time.sleep(max(0.0, self.owed))
        self.owed -= time.perf_counter() - began


class Step:
    """An optimizer step of one layer."""

    def __init__(self, packs: Sequence[Pack], clock: Clock, heads: tuple[int, int, int]) -> None:
        self.packs, self.clock, self.heads = packs, clock, heads

    def __call__(self) -> float:
        """Return the seconds of this rank's work."""
        self.clock.slept = self.clock.owed = 0.0
        work = self.clock.work
        for pack in self.packs:
            if pack.ulysses:
                self.shared(pack)
            else:
                lengths = pack.lengths[dist.get_rank()]
                self.clock.sleep(sum(n * (n + 1) / 2 * work.pair + n * work.token for n in lengths))
        return self.clock.slept

    def shared(self, pack: Pack) -> None:
        sp, (heads, kv_heads, dim) = BY_ULYSSES[pack.ulysses], self.heads
        documents = pack.lengths
        if isinstance(documents[0], tuple):
            each = [sum(own) for own in documents]
            documents = tuple(itertools.chain(*documents))
            starts = [0, *itertools.accumulate(each)]
            runs = [(Run(start, 1, count),) for start, count in zip(starts, each, strict=False)]
            sp.sharding.shards_of[documents] = UnevenShards(runs)
        is_shared, placement = documents is pack.lengths, sp.place(sum(documents), documents)
        tokens = len(sp.position_ids(sum(documents), placement))
        q, k, v = (torch.zeros(1, tokens, n, dim, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
        self.clock.sleep(tokens * self.clock.work.token / 3)
        options = AttentionOptions(placement.mask, placement.shards, None, backward=True)
        out = sp.attention_agreed(*(x.requires_grad_() for x in (q, k, v)), options)
        if is_shared:
            whole_loss(sp.sharding, torch.zeros(()))
        out.backward(torch.zeros_like(out))
        self.clock.sleep(tokens * self.clock.work.token * 2 / 3)


def build(steps: Sequence[Sequence[Pack]], work: Work, heads: tuple[int, int, int], sizes: Sequence[int]) -> None:
    """Create the steps of contenders."""
    clock = Clock(work, heads[0])
    if not BY_ULYSSES:
        kernels.register(Nothing())
    for ulysses in sizes:
        if ulysses not in BY_ULYSSES:
            config = SequenceParallelConfig(size=dist.get_world_size(), ulysses=ulysses, kernel="nothing")
            BY_ULYSSES[ulysses] = SequenceParallel(config)
            BY_ULYSSES[ulysses].runtime.guards.clear()  # skip comparisons on hosts, which run ahead of accelerators
        others = [x for x in BY_ULYSSES[ulysses].runtime.observers if not isinstance(x, Clock)]
        BY_ULYSSES[ulysses].runtime.observers[:] = [*others, clock]
    STEPS[:] = [Step(packs, clock, heads) for packs in steps]


# ---- real computing


def real(model: Model, lengths: Sequence[int], cap: int, dealt: Sequence[Sequence[int]], rounds: int) -> Any:
    """Return the seconds of LLaMA steps, forward and backward, by contender."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = [model.tokens(n) for n in lengths]
    data = [{"input_ids": x[0], "labels": x[0]} for x in ids]

    def fixed() -> None:
        for x in ids:  # pad to a multiple of the group
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
            padded(input_ids=x, labels=x, use_cache=False).loss.backward()

    def alone() -> None:
        for sample in dealt[rank]:
            single(input_ids=ids[sample], labels=ids[sample], use_cache=False).loss.backward()

    def packed(of: Any, sp: SequenceParallel) -> Any:
        loader = DataLoader(data, batch_size=len(data), collate_fn=lambda x: {k: v[None] for k, v in x[0].items()})
        packs = sp.packs(loader)

        def step() -> None:
            for batch in next(iter(packs)):
                of(**batch, use_cache=False).loss.backward()

        return step

    padded, single = model.make(), model.make()
    share_sequences(padded, size=size)
    steps = {"one sample a group": fixed}
    for name, given in (("packs, fixed Ulysses", {"ulysses": size}), ("packs", {})):
        of = model.make()
        steps[name] = packed(of, share_sequences(of, size=size, tokens_per_rank=cap, **given))
    if max(lengths) <= cap:
        steps["data parallel"] = alone
    return in_turns(steps, rounds, together())

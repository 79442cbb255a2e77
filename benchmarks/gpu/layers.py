"""Sections with LLaMA layers, forward and backward: "checkpoints", "host" and "longest".

The steps have no optimizer. Our contender is the same model, patched, on one rank or (in `reach`) several ranks. Losses
are compared.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.memory.peers import search
from benchmarks.memory.ranks import LONGEST, Model
from benchmarks.turns import Clock, in_turns, of_host, slowest, until_done, wall
from hf_integration import share_sequences

OVER = 2**62  # bytes
CHECKPOINTED = "checkpoints"  # a feature of transformers; the other features are ours


def features(kv_heads: int) -> dict[str, dict[str, Any] | None]:
    """Return the features of `longest`, each enabled in addition to all previous ones; None for the plain model."""
    return {
        "nothing": None,
        CHECKPOINTED: None,
        "ours": {},
        "loss_tiles": {"loss_tiles": "auto"},
        "mlp_tiles": {"mlp_tiles": "auto"},
        "recompute_attention true": {"recompute_attention": True},
        f"head_chunks {kv_heads}": {"head_chunks": kv_heads},
        "offload_checkpoints": {"offload_checkpoints": True},
    }


def shape_of(bench: Bench, vocab: int, zero: Sequence[tuple[str, Any]] = ()) -> Model:
    sizes = bench.sizes
    heads, kv_heads = sizes.heads
    return Model(
        vocab=vocab, hidden=heads * sizes.head_dim, intermediate=sizes.intermediate, layers=sizes.layers, heads=heads,
        kv_heads=kv_heads, bf16=sizes.dtype == torch.bfloat16, zero=zero,
    )  # fmt: skip


class Layers:
    """A model. `settings` are our settings, on all ranks, or None for the plain model.

    `checkpoints` determines whether layers are checkpointed.
    """

    def __init__(self, bench: Bench, shape: Model, settings: dict[str, Any] | None, checkpoints: bool = True) -> None:
        self.device, self.ids = bench.device, shape.tokens(LONGEST)
        with torch.device(bench.device):
            self.model = shape.make().to(bench.sizes.dtype)
        if checkpoints:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.sp = None if settings is None else share_sequences(self.model, size=dist.get_world_size(), **settings)
        if self.sp is None:
            self.ids = self.ids.to(self.device)

    def step(self, tokens: int) -> Tensor:
        """Run forward and backward of one sequence, accumulating gradients, and return the loss."""
        ids = self.ids[:, :tokens]
        if self.sp is None:
            batch = {"input_ids": ids, "labels": ids}
        else:
            batch = self.sp.shard_batch({"input_ids": ids, "labels": ids}, device=self.device)
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def close(self) -> None:
        if self.sp is not None:
            self.model.unpatch_attention()
            self.sp.close()
        del self.model


def checkpoints(bench: Bench) -> None:
    """Compare plain checkpoints with ours, which compute attention once."""
    clock = until_done(bench.device)
    for tokens, found in _contest(bench, (CHECKPOINTED, "ours"), bench.sizes.checkpoints, clock, 10):
        plain, ours = found.values()
        bench.note(
            tokens=tokens, plain=statistics.median(plain), ours=statistics.median(ours), rounds=len(ours),
            speedup=statistics.median(a / b for a, b in zip(plain, ours, strict=True)),
        )  # fmt: skip


def host(bench: Bench) -> None:
    """Measure the host time per layer, with so few tokens that the device waits for the host."""
    names = "nothing", CHECKPOINTED, "ours"
    for tokens, found in _contest(bench, names, (bench.sizes.host,), of_host(bench.device), 30):
        for name, seconds in found.items():
            bench.note(what=name, tokens=tokens, seconds=statistics.median(seconds) / bench.sizes.layers)


def _contest(
    bench: Bench, names: Sequence[str], lengths: Sequence[int], clock: Clock, rounds: int
) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Yield (tokens, seconds by model) for each length that fits the remaining time.

    The models have a small vocabulary, so that its cost does not hide the layers.
    """
    shape = shape_of(bench, 1024 if bench.sizes.vocab > 1024 else 64)
    models = {name: Layers(bench, shape, {} if name == "ours" else None, name != "nothing") for name in names}
    for tokens in lengths:
        steps = {name: functools.partial(layers.step, tokens) for name, layers in models.items()}
        if bench.has_time(f"{tokens} tokens") and bench.tried(f"{tokens} tokens", lambda s=steps: _alike(bench, s)):
            yield tokens, in_turns(steps, rounds, clock, warm=0, seconds=bench.seconds / len(lengths) / 2)
        bench.free()
    while models:
        models.popitem()[1].close()


def _alike(bench: Bench, steps: dict[str, Callable[[], Tensor]]) -> list[float]:
    """Return the losses of the first steps. Raise ArithmeticError if losses differ."""
    losses = [step().item() for step in steps.values()]
    if max(losses) - min(losses) > bench.sizes.tolerance * max(map(abs, losses)):
        raise ArithmeticError(f"losses differ: {', '.join(f'{n} {x:.6f}' for n, x in zip(steps, losses, strict=True))}")
    return losses


def longest(bench: Bench) -> None:
    """Find the longest sequence for each added feature.

    A step may take `room` bytes in addition to parameters and gradients, or the device's free memory if that is less.
    """
    settings, all_ = dict[str, Any](), features(bench.sizes.heads[1])
    for number, (name, more) in enumerate(all_.items()):
        settings |= more or {}
        if bench.has_time(name):
            share = bench.left / (len(all_) - number)
            given = None if more is None else dict(settings)
            found = bench.tried(name, lambda g=given, n=name, s=share: reach(bench, g, n != "nothing", s))
            if found:
                bench.note(feature=name, **found)
            bench.free()


def reach(bench: Bench, settings: dict[str, Any] | None, checkpoints: bool, seconds: float) -> dict[str, Any]:
    """Find the longest sequence of a model that all ranks share, in at most `seconds`. Collective."""
    sizes = bench.sizes
    layers = Layers(bench, shape_of(bench, sizes.vocab), settings, checkpoints)
    took = dict[int, float]()

    def taken(tokens: int) -> int:
        size, spent = peak_of(bench, layers, tokens)
        size = int(slowest(size, bench.device))
        if spent is not None:
            took[tokens] = slowest(spent, bench.device)
        return size

    def most() -> int:
        """Return the tokens of a step that fits the remaining time, assuming that time grows quadratically."""
        last, spare = max(took, default=0), seconds - sum(took.values())
        bound = last * math.sqrt(max(0.0, spare) / took[last]) if last else sizes.most
        return min(sizes.most, int(bound // sizes.resolution) * sizes.resolution)

    try:
        layers.step(sizes.resolution)  # allocates gradients
        room = -int(slowest(-min(sizes.room, bench.unused()), bench.device))
        known = search(taken, room, sizes.resolution, most, OVER)
    finally:
        layers.close()
    fits = max(tokens for tokens, size in known.items() if size <= room)
    measured = sorted(tokens for tokens, size in known.items() if tokens and size < OVER)
    if not measured:
        raise MemoryError(f"no sequence fits, not even one of {min(filter(None, known))} tokens")
    first, last = measured[0], measured[-1]
    slope = (known[last] - known[first]) / (last - first) if last > first else known[last] / last
    return {"tokens": fits, "at_least": max(known) == fits, "room": room, "bytes_a_token": slope,
            "seconds": took.get(fits), "layers": sizes.layers, "vocab": sizes.vocab}  # fmt: skip


def peak_of(bench: Bench, layers: Layers, tokens: int) -> tuple[int, float | None]:
    """Return (peak bytes of a step beyond the bytes between steps, seconds); (OVER, None) if memory is exhausted."""
    step = functools.partial(layers.step, tokens)
    if bench.device == "cpu":
        from tests.live import Live

        held = [*layers.model.parameters(), *layers.model.buffers(), layers.ids]
        with Live(*held, *(x.grad for x in held if x.grad is not None)) as live:
            seconds = wall(step)
        return live.peak, seconds
    module = torch.get_device_module(bench.device)
    bench.free()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    try:
        seconds = until_done(bench.device)(step)
    except torch.OutOfMemoryError:
        return OVER, None
    return module.max_memory_allocated() - before, seconds

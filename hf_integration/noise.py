"""Noise of training - dropout, NEFTune - by sample and global token, so that it is the same at any degree.

A number hangs on what it is drawn for and on nothing else: the forward, the module, the sample, the token, the channel.
It is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) at the place that these
count to. So a rank draws for its own tokens alone, and a layer or tile that is computed again draws what it drew.

A forward's seed is one number of torch's generator on the CPU: `torch.manual_seed` sets it, checkpoints restore it. The
ranks of a sequence take their first one's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ds_seqpar import SequenceParallel
from ds_seqpar.errors import ConfigError, InputError
from ds_seqpar.placement import Placement

from .graphs import between_graphs

GOLDEN, *FACTORS = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # as int64
SAMPLE = 2**32  # more than a sequence has tokens
STEPS = 2**16  # that a number of 16 bits can take; one of 64 bits is four of them
NEFTUNE = "neftune_post_forward_hook"  # transformers' hook on the embedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """What one forward draws. tokens (rows, own tokens) int64: sample * SAMPLE + place of each. length: of a sequence.
    again: it is drawn for what is computed again."""

    seed: int
    tokens: Tensor
    length: int
    again: bool = False

    def numbers(self, module: Any, x: Tensor) -> Tensor:
        """One for each element of x (rows, own tokens, ...), or (rows * own tokens, ...): uniform int16."""
        if not self.again and torch._C._current_graph_task_id() != -1:  # inside of a backward
            raise InputError(
                "dropout in layers that are computed again needs the checkpoints of transformers; got others, call "
                "model.gradient_checkpointing_enable()"
            )
        tokens = self.tokens if x.shape[:2] == self.tokens.shape else self.tokens.flatten()
        if x.shape[: tokens.dim()] != tokens.shape:
            raise InputError(
                f"dropout of a patched model needs all of a rank's tokens, {tuple(self.tokens.shape)}; got "
                f"{tuple(x.shape)} in a {type(module).__name__}, set its p to 0"
            )
        channels = x.numel() // tokens.numel()
        words = -(-channels // 4)
        counts = (tokens * words)[..., None] + torch.arange(words, device=tokens.device)
        seed = int(split_mix(torch.tensor([module.noise_number], device="cpu"), self.seed))
        return split_mix(counts, seed).view(torch.int16)[..., :channels].reshape(x.shape)


_now: ContextVar[Draw | None] = ContextVar("hf_integration_noise", default=None)  # None: torch's own noise
now = _now.get


def split_mix(x: Tensor, seed: int) -> Tensor:
    """SplitMix64's numbers at the places x (int64), in place."""
    x.mul_(GOLDEN).add_(seed)
    for shift, factor in zip((30, 27, 31), (*FACTORS, None), strict=True):
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if factor is not None:
            x.mul_(factor)
    return x


@contextlib.contextmanager
def drawing(draw: Draw | None) -> Iterator[None]:
    """A context in which a part of a forward is computed again, and draws what the forward has drawn."""
    with _drawing(draw and dataclasses.replace(draw, again=True)):
        yield


@contextlib.contextmanager
def _drawing(draw: Draw | None) -> Iterator[None]:
    token = _now.set(draw)
    try:
        yield
    finally:
        _now.reset(token)


def by_tile(compute: Callable[[Tensor, slice], Tensor]) -> Callable[[Tensor, slice], Tensor]:
    """A function of a tile, and of the tokens that it has, that draws for these."""

    def run(x: Tensor, cut: slice) -> Tensor:
        draw = now()
        with _drawing(draw and dataclasses.replace(draw, tokens=draw.tokens[:, cut])):
            return compute(x, cut)

    return run


def sources(model: nn.Module) -> list[Any]:
    """The modules that draw in a forward for training."""
    return [module for module in model.modules() if module.training and _draws(module)]


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    hooks = module._forward_hooks
    return bool(hooks) and any(_is_theirs(hook) or _is_ours(hook) for hook in hooks.values())


def _is_theirs(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == NEFTUNE


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _neftune


def in_words(found: list[Any]) -> str:
    """What draws, and how much: the same on all ranks of a sequence."""
    kinds = Counter("NEFTune" if not isinstance(m, _DropoutNd) else f"{_kind(m)} p {m.p}" for m in found)
    return ", ".join(f"{count} of {kind}" for kind, count in kinds.items())


def _kind(module: nn.Module) -> str:
    return (nn.Dropout if type(module) is ByToken else type(module)).__name__


def seed_of(found: list[Any], shared: bool) -> int:
    """A new seed for a forward, and these `sources` made to draw by token; 0 where there are none. shared: several
    ranks share a sequence. Raises ConfigError for dropout of another kind."""
    for number, module in enumerate(found):
        if type(module) is nn.Dropout and "forward" not in vars(module):
            module.__class__ = ByToken
        elif isinstance(module, _DropoutNd) and type(module) is not ByToken:
            raise ConfigError(
                "dropout of a patched model needs modules of type nn.Dropout, with its own forward; got a "
                f"{type(module).__name__} with p {module.p}, set that to 0"
            )
        theirs = {key: hook for key, hook in module._forward_hooks.items() if _is_theirs(hook)}
        module._forward_hooks.update({key: functools.partial(_neftune, hook) for key, hook in theirs.items()})
        module.noise_number, module.noise_shared = number, shared
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(1, 2**62)) if found else 0


def begin(sp: SequenceParallel, seed: int, tokens: Tensor, placement: Placement | None, local: bool) -> None:
    """What is drawn from here on is drawn for a forward of these tokens (rows, own tokens, ...). seed 0: by torch.
    local: they are whole sequences."""
    if not seed:
        _now.set(None)
        return
    rows, own = tokens.shape[:2]
    length = own * sp.size if placement is None else placement.tokens // (placement.rows or 1)
    held = torch.arange(own, device="cpu") if local else sp.held(length, placement, sp.rank)
    if placement is None or placement.rows is None:
        row = torch.arange(rows, device="cpu")[:, None]
    else:
        rows, row, held = placement.rows, (held // length)[None], held % length
    found = (sp.data_rank * rows + row) * SAMPLE + held  # rows of a step are dealt to groups in their order
    _now.set(Draw(seed=seed, tokens=found.to(tokens.device, non_blocking=True), length=length))


def release(model: nn.Module) -> None:
    """Has a model's modules draw as they did before they were made to draw by token."""
    for module in model.modules():
        if type(module) is ByToken:
            module.__class__ = nn.Dropout  # type: ignore[assignment]
        hooks: dict[int, Any] = module._forward_hooks
        hooks.update({key: hook.args[0] for key, hook in hooks.items() if _is_ours(hook)})
        vars(module).pop("noise_number", None), vars(module).pop("noise_shared", None)


class ByToken(nn.Dropout):
    """Dropout of own tokens. Its p is rounded to a number of 65,536ths."""

    noise_shared: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or (torch.compiler.is_compiling() and not self.noise_shared):
            return super().forward(x)
        return self._dropped(x)

    @between_graphs
    def _dropped(self, x: Tensor) -> Tensor:
        draw = now()
        if draw is None or self.p == 1:
            return super().forward(x)
        dropped = min(round(self.p * STEPS), STEPS - 1)
        return x * (draw.numbers(self, x) >= dropped - STEPS // 2) * (STEPS / (STEPS - dropped))


def _neftune(theirs: Callable[..., Tensor], module: Any, args: tuple, output: Tensor) -> Tensor:
    """NEFTune's noise for own tokens, whose size hangs on the length of whole sequences."""
    if not module.training or (torch.compiler.is_compiling() and not module.noise_shared):
        return theirs(module, args, output)
    return _noisy(theirs, module, args, output)


@between_graphs
def _noisy(theirs: Callable[..., Tensor], module: Any, args: tuple, output: Tensor) -> Tensor:
    draw = now()
    if draw is None:
        return theirs(module, args, output)
    size = module.neftune_noise_alpha / math.sqrt(draw.length * output.shape[2])
    return output + (draw.numbers(module, output).to(output.dtype) + 0.5) * (size * 2 / STEPS)

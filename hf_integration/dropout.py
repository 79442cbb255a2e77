"""Noise in training (dropout, NEFTune) by sample and global token, so that it does not depend on the number of ranks.

A random number depends on the forward, the module, the sample, the token and the channel that it is drawn for, and on
nothing else. These make a counter, and the number is SplitMix64's for that counter (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, 2014). So a rank draws numbers for its own tokens alone, and a layer or tile that is
recomputed draws the same numbers.

The seed of a forward is drawn from torch's CPU generator: `torch.manual_seed` sets it, and checkpoints restore it. All
ranks of a sequence use the seed of their first rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_seqpar import SequenceParallel
from ds_seqpar.compat import graph_task
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.errors import ConfigError, InputError

from . import compat
from .context import Noise, current, entered
from .graph_breaks import between_graphs

GOLDEN, *FACTORS = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # as int64
SAMPLE = 2**32  # the counter's distance between samples: more than a sequence has tokens
STEPS = 2**16  # values of a 16-bit number; one 64-bit number is cut into four of them
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _numbers(noise: Noise, module: Any, x: Tensor) -> Tensor:
    """Draw uniform int16 numbers in the shape of x, (rows, local tokens, ...) or (rows * local tokens, ...)."""
    tokens = noise.tokens if x.shape[:2] == noise.tokens.shape else noise.tokens.flatten()
    if x.shape[: tokens.dim()] != tokens.shape:
        raise InputError(
            f"dropout of a patched model needs all of a rank's tokens, {tuple(noise.tokens.shape)}; got "
            f"{tuple(x.shape)} in a {type(module).__name__}, set its p to 0"
        )
    channels = x.numel() // tokens.numel()
    words_per_token = -(-channels // 4)
    counts = (tokens * words_per_token)[..., None] + torch.arange(words_per_token, device=tokens.device)
    seed = int(split_mix(torch.tensor([module.noise_number], device="cpu"), noise.seed))
    return split_mix(counts, seed).view(torch.int16)[..., :channels].reshape(x.shape)


def split_mix(x: Tensor, seed: int) -> Tensor:
    """Replace the counters x (int64) by SplitMix64's numbers for them, in place."""
    x.mul_(GOLDEN).add_(seed)
    for shift, factor in zip((30, 27, 31), (*FACTORS, None), strict=True):
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if factor is not None:
            x.mul_(factor)
    return x


def drawing_by_tile(compute: Callable[[Tensor, slice], Tensor]) -> Callable[[Tensor, slice], Tensor]:
    """Wrap a function of a tile (x, slice of tokens), so that it draws the numbers of those tokens."""

    def run(x: Tensor, cut: slice) -> Tensor:
        context = current()
        if context is None or context.noise is None:
            return compute(x, cut)
        noise = dataclasses.replace(context.noise, tokens=context.noise.tokens[:, cut])
        with entered(context.replace(noise=noise)):
            return compute(x, cut)

    return run


def _noise() -> Noise | None:
    """Return the numbers of the forward that runs; None where modules draw torch's."""
    context = current()
    if context is None and graph_task() >= 0:  # in a backward, which no checkpoint of ours has told what forward it was
        raise InputError(
            "dropout in layers that are computed again needs the checkpoints of transformers; got others, call "
            "model.gradient_checkpointing_enable()"
        )
    return None if context is None else context.noise


def noisy_modules(model: nn.Module) -> list[Any]:
    """Return the modules that draw random numbers in a training forward."""
    return [module for module in model.modules() if module.training and _draws(module)]


def _draws(module: nn.Module) -> bool:
    if isinstance(module, DROPOUTS):
        return module.p > 0
    hooks = compat.forward_hooks(module)
    return bool(hooks) and any(_is_transformers_hook(hook) or _is_our_hook(hook) for hook in hooks.values())


def _is_transformers_hook(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == compat.NEFTUNE


def _is_our_hook(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _neftune


def describe_modules(modules: list[Any]) -> str:
    """Return the types of modules that draw, with their numbers, for ranks to compare."""
    counts = Counter("NEFTune" if not isinstance(m, DROPOUTS) else f"{_type_name(m)} p {m.p}" for m in modules)
    return ", ".join(f"{count} of {description}" for description, count in counts.items())


def _type_name(module: nn.Module) -> str:
    return (nn.Dropout if type(module) is TokenDropout else type(module)).__name__


def prepare_and_seed(modules: list[Any], shared: bool) -> int:
    """Make modules draw by token, and return a new seed for a forward.

    Args:
        modules: What `noisy_modules` returns.
        shared: Whether several ranks share a sequence.

    Returns:
        The seed; 0 where there are no modules.

    Raises:
        ConfigError: A type of dropout cannot draw by token.
    """
    for number, module in enumerate(modules):
        if type(module) is nn.Dropout and "forward" not in vars(module):
            module.__class__ = TokenDropout
        elif isinstance(module, DROPOUTS) and type(module) is not TokenDropout:
            raise ConfigError(
                "dropout of a patched model needs modules of type nn.Dropout, with its own forward; got a "
                f"{type(module).__name__} with p {module.p}, set that to 0"
            )
        hooks = compat.forward_hooks(module)
        neftune_hooks = {key: hook for key, hook in hooks.items() if _is_transformers_hook(hook)}
        hooks.update({key: functools.partial(_neftune, hook) for key, hook in neftune_hooks.items()})
        module.noise_number, module.noise_shared = number, shared
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(1, 2**62)) if modules else 0


def noise_of(sp: SequenceParallel, seed: int, tokens: Tensor, layout: BatchLayout | None, local: bool) -> Noise | None:
    """Return the numbers of a forward; None where modules draw torch's.

    Args:
        seed: The forward's seed; 0: modules draw torch's numbers.
        tokens: (rows, local tokens, ...).
        layout: The batch's layout; None: sequences are shared equally.
        local: Whether the tokens are whole sequences, not this rank's shard.
    """
    if not seed:
        return None
    rows, local_tokens = tokens.shape[:2]
    length = local_tokens * sp.size if layout is None else layout.tokens // (layout.rows or 1)

    def counters() -> Tensor:
        positions = torch.arange(local_tokens, device="cpu") if local else sp.held(length, layout, sp.rank)
        if layout is None or layout.rows is None:
            count, row = rows, torch.arange(rows, device="cpu")[:, None]
        else:
            count, row, positions = layout.rows, (positions // length)[None], positions % length
        # rows of a step are dealt to groups in their order
        return (sp.data_rank * count + row) * SAMPLE + positions

    key = "counters", rows, local_tokens, layout, local
    return Noise(seed=seed, tokens=sp.layout_tensors.get(key, tokens.device, counters), length=length)


def restore_modules(model: nn.Module) -> None:
    """Undo `prepare_and_seed`: the model's modules draw torch's numbers again."""
    for module in model.modules():
        if type(module) is TokenDropout:
            module.__class__ = nn.Dropout  # type: ignore[assignment]
        hooks: dict[int, Any] = compat.forward_hooks(module)
        hooks.update({key: hook.args[0] for key, hook in hooks.items() if _is_our_hook(hook)})
        vars(module).pop("noise_number", None), vars(module).pop("noise_shared", None)


class TokenDropout(nn.Dropout):
    """nn.Dropout that draws by token. Its p is rounded to a multiple of 1/65536."""

    noise_shared: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or (torch.compiler.is_compiling() and not self.noise_shared):
            return super().forward(x)
        return self._dropped(x)

    @between_graphs
    def _dropped(self, x: Tensor) -> Tensor:
        noise = _noise()
        if noise is None or self.p == 1:
            return super().forward(x)
        dropped = min(round(self.p * STEPS), STEPS - 1)
        return x * (_numbers(noise, self, x) >= dropped - STEPS // 2) * (STEPS / (STEPS - dropped))


def _neftune(hook: Callable[..., Tensor], module: Any, args: tuple, output: Tensor) -> Tensor:
    """Compute transformers' NEFTune hook with noise by token. Its size depends on the length of whole sequences."""
    if not module.training or (torch.compiler.is_compiling() and not module.noise_shared):
        return hook(module, args, output)
    return _noisy(hook, module, args, output)


@between_graphs
def _noisy(hook: Callable[..., Tensor], module: Any, args: tuple, output: Tensor) -> Tensor:
    noise = _noise()
    if noise is None:
        return hook(module, args, output)
    size = module.neftune_noise_alpha / math.sqrt(noise.length * output.shape[2])
    return output + (_numbers(noise, module, output).to(output.dtype) + 0.5) * (size * 2 / STEPS)

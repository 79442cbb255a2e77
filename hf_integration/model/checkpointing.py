"""Gradient checkpointing for transformers models without running attention twice (see ds_seqpar.memory.checkpoints).

`gradient_checkpointing_enable` sets a checkpoint function on each layer. A sharded forward wraps the checkpoint
functions before the layers run. The checkpoint functions therefore need no context_fn, may be reentrant, and may be set
at any time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.memory.checkpoints import Checkpoint

from ..compat import CHECKPOINT, checkpoint_of
from ..context import current, entered
from ..module_patch import override, patch_on


def layers_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the layers that transformers can checkpoint."""
    return tuple(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def is_checkpointed(layer: Any) -> bool:
    """Return whether the layer's next forward is checkpointed."""
    return layer.training and layer.gradient_checkpointing


class AsInForward:
    """A checkpoint function whose recomputation in backward repeats the first run, regardless of forwards in between.

    The recomputation is local or sharded, like the first run. torch's checkpoint restores the random state.

    Args:
        checkpoint: The checkpoint function to wrap.
        base: The patched base model.
    """

    def __init__(self, checkpoint: Callable[..., Any], base: nn.Module) -> None:
        self.checkpoint, self.base = checkpoint, weakref.ref(base)

    def __deepcopy__(self, memo: dict) -> AsInForward:
        base: Any = self.base()
        return self if base is None else AsInForward(self.checkpoint, memo.get(id(base), base))

    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        base: Any = self.base()
        own, context = patch_on(base), current()
        if torch.compiler.is_compiling() or own is None or context is None:
            return self.checkpoint(function, *args, **kwargs)

        def run(*args: object, **kwargs: object) -> Any:
            if context.mode != "local" and patch_on(base) is not own:
                raise ConfigError(
                    "backward computes checkpointed layers again, for which the model must be patched as it was in "
                    "forward; got one that was unpatched since, call unpatch_attention after backward"
                )
            with entered(context.recomputing()):
                return function(*args, **kwargs)

        return self.checkpoint(run, *args, **kwargs)


def keep_attention(layers: tuple[Any, ...], base: nn.Module, sp: SequenceParallel) -> None:
    """Wrap the layers' checkpoint functions so that attention results are stored if the settings enable it."""
    if torch.compiler.is_compiling():
        return  # the compiler decides which results to store
    for layer in layers:
        if is_checkpointed(layer) and not isinstance(function := checkpoint_of(layer), Checkpoint):
            override(layer, CHECKPOINT, sp.checkpointing(AsInForward(function, base)))

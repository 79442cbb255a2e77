"""Gradient checkpointing of transformers models in which attention runs once (ds_seqpar.running.keeping).

Whatever `gradient_checkpointing_enable` was given, and whenever: the checkpoint function that it left in each layer is
wrapped before a sharded forward, so that it needs no context_fn and may be reentrant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_seqpar import SequenceParallel
from ds_seqpar.running.keeping import Checkpoint

FUNCTION = "_gradient_checkpointing_func"


def layers_of(model: nn.Module) -> tuple[Any, ...]:
    """The layers that transformers can checkpoint."""
    return tuple(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def is_checkpointed(layer: Any) -> bool:
    """Whether the layer's next forward is."""
    return layer is not None and layer.training and layer.gradient_checkpointing


def keep_attention(layers: tuple[Any, ...], sp: SequenceParallel) -> None:
    """Has their checkpoints keep what attention gives, where the settings say so."""
    if torch.compiler.is_compiling():
        return  # the compiler's own matter
    for layer in layers:
        function = vars(layer).get(FUNCTION)
        if layer.gradient_checkpointing and function is not None and not isinstance(function, Checkpoint):
            setattr(layer, FUNCTION, sp.checkpointing(function))


def forget(layers: tuple[Any, ...]) -> None:
    """Gives layers the checkpoint functions back that they had."""
    for layer in layers:
        if isinstance(function := vars(layer).get(FUNCTION), Checkpoint):
            setattr(layer, FUNCTION, function.checkpoint)

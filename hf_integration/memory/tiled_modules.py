"""Choose which MLPs, norms and losses of patched models are tiled, when, and into how many tiles.

All tiles of an MLP run inside one call of its module, and the tiles of the loss inside one call of the head. Hooks on
the module, such as ZeRO-3's, therefore see one call and one backward, and ranks may have different numbers of tiles.
Hooks on modules inside an MLP would run once per tile. The MLP is therefore marked as a ZeRO-3 leaf, so that ZeRO-3
gathers and reduces all its parameters together. For loss tiling, see `tiled_loss`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.base.errors import SECTION, ConfigError
from ds_seqpar.base.log import log_once

from ..compat import LEAF, ZERO_ID
from ..context import current
from ..families import base_of, is_of_liger, patch_of, unwrapped
from ..graph_breaks import between_graphs
from ..module_patch import override, override_forward, patched
from .tiled_function import tile_count, tiled, trained_parameters
from .tiled_loss import model_forward


def check_tiles(model: Any, config: SequenceParallelConfig) -> None:
    """Raise ConfigError if the model does not support the config's `mlp_tiles` or `loss_tiles`."""
    if patch_of(model) is not None:
        return
    mlps, head = _mlps(model, config.mlp_tiles), _head(model, config.loss_tiles)
    if config.mlp_tiles not in (1, "auto") and not mlps:
        raise ConfigError(
            f"{SECTION}.mlp_tiles needs layers with a dense mlp.down_proj; got {config.mlp_tiles} for a model of "
            f"family {model.config.model_type!r}, which has none (experts' routers are read by layer), leave it out"
        )
    if config.loss_tiles not in (1, "auto") and not head:
        raise ConfigError(
            f"{SECTION}.loss_tiles needs a causal language model; got {config.loss_tiles} for a "
            f"{type(model).__name__}, leave it out"
        )
    if head and is_of_liger(model.forward):
        raise ConfigError(
            f"{SECTION}.loss_tiles needs a loss that is not fused; got {config.loss_tiles} for a model with Liger's, "
            'which makes no whole logits either, leave it out, or say "auto"'
        )
    for name, modules in (("mlp_tiles", mlps), ("loss_tiles", [*head, model] if head else [])):
        if other := [module for module in modules if _has_other_forward(module)]:
            raise ConfigError(
                f"tiles need modules with the forward of their class; got a {type(other[0]).__name__} with one of its "
                f"own (as trl's SFTTrainer sets, whose loss is in chunks already), leave {SECTION}.{name} out"
            )
    if any(hasattr(module, ZERO_ID) and not hasattr(module, LEAF) for module in _zero_leaves(mlps, head)):
        raise ConfigError(
            "tiles under ZeRO-3 need a model that is patched before DeepSpeed has it; got one that an engine has, call "
            "patch_attention first, or ds_seqpar.initialize"
        )


def tile(model: Any, config: SequenceParallelConfig) -> bool:
    """Replace the forwards of MLPs, norms and the model itself with tiled versions, according to the config.

    Returns:
        Whether any module is tiled.
    """
    mlps, head = _mlps(model, config.mlp_tiles), _head(model, config.loss_tiles)
    norms = _norms(model) if mlps or config.mlp_tiles == "auto" else []
    for module in (*mlps, *norms):
        override_forward(module, functools.partial(_tiled_forward, config.mlp_tiles))
    for mlp in mlps:
        patched(mlp).hooks.append(mlp.register_forward_pre_hook(before_leaf))
    for module in _zero_leaves(mlps, head):
        override(module, LEAF, True)
    if head:
        override_forward(model, model_forward)
    return bool(mlps or norms or head)


@contextlib.contextmanager
def evaluating_loss(model: nn.Module) -> Iterator[None]:
    """Context manager in which forwards without gradients also compute the loss in tiles, without logits.

    Models without tiles are not affected.
    """
    patch = patch_of(unwrapped(model))
    if patch is None:
        yield
        return
    patch.evaluating = True
    try:
        yield
    finally:
        patch.evaluating = False


def _mlps(model: Any, tiles: int | str) -> list[nn.Module]:
    """Return the dense MLPs.

    Experts are excluded, since hooks read their routers once per layer for the expert balance loss.
    """
    layers = getattr(base_of(model), "layers", ()) if tiles != 1 else ()
    mlps = [layer.mlp for layer in layers if hasattr(getattr(layer, "mlp", None), "down_proj")]
    if len(mlps) < len(layers):
        log_once(f"{SECTION}.mlp_tiles: experts are not tiled")
    return mlps


def _norms(model: Any) -> list[nn.Module]:
    """Return the norms over whole hidden states. Including their fp32 copies, norms take more memory than attention."""
    base = base_of(model)
    children = [module for layer in getattr(base, "layers", ()) for module in layer.children()]
    norms = [module for module in (*children, *base.children()) if type(module).__name__.endswith("Norm")]
    for other in filter(_has_other_forward, norms):
        log_once(f"{SECTION}.mlp_tiles: a {type(other).__name__} with a forward of its own is not tiled")
    return [module for module in norms if not _has_other_forward(module)]


def _head(model: Any, tiles: int | str) -> list[nn.Module]:
    """Return [the head] if the model has a head and the loss is tiled, otherwise [].

    "auto" leaves the loss to Liger's fused loss if there is one.
    """
    if tiles == 1:
        return []
    if tiles == "auto" and is_of_liger(model.forward):
        log_once(f"{SECTION}.loss_tiles: Liger's loss is not tiled, since it makes no whole logits either")
        return []
    return [model.lm_head] if hasattr(model, "lm_head") else []


def _has_other_forward(module: nn.Module) -> bool:
    """Return whether a module's forward comes neither from its class nor from Liger."""
    return "forward" in vars(module) and not is_of_liger(module.forward)


def _zero_leaves(mlps: list[nn.Module], head: list[nn.Module]) -> list[nn.Module]:
    """Return the tiled modules that have children, which are MLPs and heads with LoRA.

    ZeRO-3 treats each of these modules as one unit (a leaf).
    """
    return [module for module in (*mlps, *head) if next(module.children(), None) is not None]


def before_leaf(module: Any, args: tuple) -> tuple | None:
    """Prepare the call of a ZeRO-3 leaf module.

    If the input does not require a gradient (LoRA in a first layer), it is changed to require a gradient. Without an
    input gradient, ZeRO-3 would reduce the leaf's gradients too early.
    """
    needs_grad = args and hasattr(module, ZERO_ID) and torch.is_grad_enabled() and not args[0].requires_grad
    if needs_grad and trained_parameters(module):
        return (args[0].detach().requires_grad_(), *args[1:])
    return None


@between_graphs
def _tiled_forward(
    tiles: int | str, untiled: Callable[..., Any], module: Any, *args: Tensor, **kwargs: Tensor
) -> Tensor:
    """Compute the forward of an MLP or a norm in tiles of tokens.

    Input and output have the shape (B, s, hidden size).
    """
    x, *others = *args, *kwargs.values()
    if others or x.dim() != 3:  # some models pass additional inputs or other shapes
        return untiled(module, *args, **kwargs)
    number = tile_count(x.shape[0] * x.shape[1], x.shape[2]) if isinstance(tiles, str) else tiles
    context = current()
    if number == 1 or (context is not None and context.has_all_tokens):
        return untiled(module, x)
    return tiled(lambda tile, _: untiled(module, tile), x, trained_parameters(module), number)

"""Latent attention (MLA) in transformers models. Patched layers pass compressed latents to attention.

MLA layers compute keys and values in their `expand_kv(kv_nope, k_rot)` method. The patch replaces `expand_kv` with a
method that returns the latent and its expansion matrix. The matrix is computed by applying the original method to unit
vectors. The matrix therefore includes LoRA, and ZeRO-3 gathers the layer's weight as usual. Gradients reach the weight
through the layer's own modules.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from ds_seqpar.base.errors import SECTION, ConfigError
from ds_seqpar.operators.latent import is_sent

from .compat import is_plain_lora
from .context import current
from .graph_breaks import between_graphs
from .module_patch import override, patched

EXPAND, PROJECTION = "expand_kv", "kv_b_proj"


def use_latent(module: Any) -> None:
    """Make an MLA module send its latent to other ranks in sharded forwards.

    Modules without latent attention stay unchanged.
    """
    if hasattr(type(module), EXPAND) and hasattr(module, PROJECTION):
        override(module, EXPAND, types.MethodType(_expand_kv, module))


def _expand_kv(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, or a latent (B, s, R) and its expansion matrix (H, R, D + Dv)."""
    if torch.compiler.is_compiling() and patched(module).sp.config.latent_attention != "latent":
        return type(module).expand_kv(module, kv_nope, k_rot)  # compiled graphs cannot detect the current forward
    return _latent(module, kv_nope, k_rot)


@between_graphs
def _latent(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    expand, context, sp = type(module).expand_kv, current(), patched(module).sp
    is_needed = sp.config.latent_attention == "latent"
    if context is None and is_needed:
        raise ConfigError(
            f'{SECTION}.latent_attention "latent" needs a forward of the model, and one that is not compiled as one, '
            'since its graphs do not know what forward they are in; set "auto", with which they send keys and values'
        )
    if context is None or context.has_all_tokens or context.cached is not None:
        return expand(module, kv_nope, k_rot)
    tokens = context.layout.tokens if context.layout is not None else kv_nope.shape[2] * sp.size
    widths = kv_nope.shape[-1], k_rot.shape[-1]
    sizes = tokens, module.num_heads, sum(widths), module.qk_head_dim + module.v_head_dim
    # the proof of a model temporarily changes the runtime settings
    if not is_sent(sp.runtime.config, *sizes) or not is_linear(module, is_needed):
        return expand(module, kv_nope, k_rot)
    return torch.cat([kv_nope, k_rot], dim=-1).squeeze(1), matrix_of(module, kv_nope, k_rot)


def matrix_of(module: Any, kv_nope: Tensor, k_rot: Tensor) -> Tensor:
    """Return the matrix (H, R, D + Dv) that expands a module's latents into keys and values."""
    widths = kv_nope.shape[-1], k_rot.shape[-1]
    units = torch.eye(sum(widths), dtype=kv_nope.dtype, device=kv_nope.device)[None, None]
    return torch.cat(type(module).expand_kv(module, *units.split(widths, dim=-1)), dim=-1).squeeze(0)


def is_linear(module: Any, is_needed: bool = False) -> bool:
    """Return whether the latent's projection is linear, so that its results for unit vectors determine it.

    Raises ConfigError if the projection must be linear but is not.
    """
    projection = getattr(module, PROJECTION)
    inner = projection.base_layer if is_plain_lora(projection) else projection
    linear = type(inner).forward is nn.Linear.forward and inner.bias is None
    if is_needed and not linear:
        bias = " with a bias" if getattr(inner, "bias", None) is not None else ""
        raise ConfigError(
            f'{SECTION}.latent_attention "latent" needs a {PROJECTION} that is a linear layer without a bias, or one '
            f'with LoRA without dropout; got {type(projection).__name__}{bias}, set "auto" or "expanded"'
        )
    return linear

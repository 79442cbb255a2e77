"""Registers sequence parallel attention with transformers and switches models to it.

A forward is sharded unless it has a kv cache: `generate` on a patched model is local. Before a sharded forward its
ranks agree, once, that each was given its own tokens with their global positions; a hook on the base model does that
and tells the attention, through the keyword arguments that flow to every layer.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ds_seqpar import SequenceParallel
from ds_seqpar.agreement import agree
from ds_seqpar.config import check_heads
from ds_seqpar.errors import ConfigError, InputError
from ds_seqpar.telling import told_once

from .families import check_model, heads

NAME = "ds_seqpar"
HOW = "give the model what sp.shard_batches returns"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Patch:
    sp: SequenceParallel
    before: str
    hooks: tuple[RemovableHandle, ...]


@told_once
def patch_attention(model: PreTrainedModel, sp: SequenceParallel) -> PreTrainedModel:
    """Makes every attention of the model exact over sequences that are shared by `sp.size` ranks. Returns the model.

    Train it on what `sp.shard_batches` gives. Raises ConfigError for a model that cannot be patched (see families),
    whose heads do not fit, or that is patched with another SequenceParallel.
    """
    check_model(model)
    if (patched := patched_with(model)) is not None:
        if patched is sp:
            return model
        raise ConfigError("the model is patched with another SequenceParallel; call unpatch_attention(model) first")
    check_heads(sp.config.ulysses, *heads(model), size=sp.size)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    _own_config(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    for module in _attentions(model):
        module.sequence_parallel = sp
    hooks = [model.base_model.register_forward_pre_hook(_before_base, with_kwargs=True)]
    if model.base_model is not model:
        hooks.append(model.register_forward_pre_hook(_before_head, with_kwargs=True))
    model.base_model._sequence_parallel_patch = _Patch(sp=sp, before=before, hooks=tuple(hooks))
    return model


def unpatch_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the model back the attention it had. A model that is not patched stays as it is. Returns the model."""
    patch = getattr(model.base_model, "_sequence_parallel_patch", None)
    if patch is None:
        return model
    for hook in patch.hooks:
        hook.remove()
    for module in _attentions(model):
        del module.sequence_parallel
    model.set_attn_implementation(patch.before)
    del model.base_model._sequence_parallel_patch
    return model


def patched_with(model: PreTrainedModel) -> SequenceParallel | None:
    """The SequenceParallel that the model is patched with."""
    patch = getattr(model.base_model, "_sequence_parallel_patch", None)
    return patch.sp if patch else None


def _own_config(model: PreTrainedModel) -> None:
    """Models made from one config object share it, and it names the attention: the patched one needs its own."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "num_key_value_groups")]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sequence_parallel: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, H, S, D), key and value (B, Hkv, S, D) -> out (B, S, H, D)."""
    if sequence_parallel is None:
        raise InputError("patched attention was reached past its model's forward; call the model that was patched")
    if not sequence_parallel:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise ConfigError(f"sequence parallel attention needs attention_dropout 0; got {dropout}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return module.sequence_parallel.attention_agreed(q, k, v, module.is_causal, scaling), None


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Without a registered mask function transformers drops padding masks in silence. A sharded forward has no mask
    (its hook sees to that) and must not be given one of local length squared; a local one gets that of sdpa."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward call by name."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_local(module: nn.Module, given: dict[str, Any]) -> bool:
    """A kv cache means generation, which is local; training has none, and labels that were sharded none either."""
    cached = given.get("past_key_values") is not None or bool(given.get("use_cache"))
    return cached and given.get("shift_labels") is None and not (module.training and torch.is_grad_enabled())


def _before_head(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Labels without shift_labels would be shifted inside each shard. The base model's hook agrees on it and raises."""
    given = _named(module, args, kwargs)
    if not _is_local(module, given) and given.get("labels") is not None and given.get("shift_labels") is None:
        kwargs["unshifted_labels"] = True
    return args, kwargs


def _before_base(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    given = _named(module, args, kwargs)
    unshifted = given.pop("unshifted_labels", False)
    if _is_local(module, given):
        return (), {**given, "sequence_parallel": False}
    sp = module._sequence_parallel_patch.sp
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    error = InputError(f"labels must be shifted before sharding; got no shift_labels, {HOW}") if unshifted else None
    error = error or _sharding_error(sp, tokens, given)
    shape = None if tokens is None else tuple(tokens.shape)
    backward = torch.is_grad_enabled() and module.training
    agree(sp.groups.control, "model inputs", (shape, f"{backward=}"), error=error)
    return (), {**given, "attention_mask": None, "use_cache": False, "sequence_parallel": True}


def _sharding_error(sp: SequenceParallel, tokens: Tensor | None, given: dict[str, Any]) -> InputError | None:
    """What shows that this rank was not given its own tokens, positions and no mask."""
    if tokens is None:
        return InputError(f"a patched model needs input_ids or inputs_embeds; got neither, {HOW}")
    if given.get("past_key_values") is not None or given.get("use_cache"):
        return InputError("training and evaluation take no kv cache; got one, leave out use_cache and past_key_values")
    if given.get("is_causal") is False:
        return InputError("sharded attention of this model is causal; got is_causal=False, leave it out")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not bool((mask != 0).all()):
        return InputError(
            f"a sharded forward takes no padding mask; got one with zeros, {HOW} (it checks and drops it)"
        )
    try:
        expected = sp.position_ids(tokens.shape[1] * sp.size)
    except InputError as error:
        return error
    given_here = None if positions is None else positions.cpu().expand(tokens.shape[0], -1)
    if given_here is None or not torch.equal(given_here, expected.expand(tokens.shape[0], -1)):
        what = "none" if positions is None else "those of other tokens"
        return InputError(
            f"a patched model needs this rank's tokens with their global position_ids; got {what}, {HOW}, or "
            "unpatch_attention(model) to run it on whole sequences"
        )
    return None

"""Facts about models.

A table contains the facts for tested families. For all other models, facts are detected on a small copy.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.models import unwrapped

from ..compat import attention_name, forward_hooks, forward_pre_hooks
from ..families import QUANTIZERS, is_of_library
from .facts import TESTED, VERSIONS, Facts, config_heads, masks, modules_of
from .look import look

_seen: WeakKeyDictionary[nn.Module, Facts] = WeakKeyDictionary()


def facts_of(model: PreTrainedModel) -> Facts:
    """Return a model's recorded or detected facts.

    Raises:
        ConfigError: The model cannot be patched.
    """
    if is_tested(model):
        return TESTED[model.config.model_type]
    if model not in _seen:
        _seen[model] = look(model)
    return _seen[model]


def is_tested(model: PreTrainedModel) -> bool:
    """Return whether a model belongs to a tested family and has no user code in its base model."""
    release = ".".join(transformers.__version__.split(".")[:2])
    if model.config.model_type not in TESTED or release not in VERSIONS:
        return False
    return bool(modules_of(model, TESTED[model.config.model_type])) and all(
        map(_is_as_tested, model.base_model.modules())
    )


def _is_as_tested(module: nn.Module) -> bool:
    """Return whether a module has no user code in its class, forward or hooks."""
    own = vars(module).get("forward")
    if own is not None and not is_of_library(own):
        return False
    if not is_of_library(type(module)) and not type(module).__module__.startswith(QUANTIZERS):
        return False
    return all(map(is_of_library, (*forward_hooks(module).values(), *forward_pre_hooks(module).values())))


def is_known(model: PreTrainedModel) -> bool:
    """Return whether a model's attention can probably be patched and does not call `sp.attention` itself."""
    attention = ALL_ATTENTION_FUNCTIONS.get(attention_name(model.config))  # None means the function in the model's file
    if is_tested(model) or not is_of_library(type(model)) or not (attention is None or is_of_library(attention)):
        return is_tested(model)
    try:
        facts_of(model)
    except ConfigError:
        return False
    return True


def heads(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of heads of a transformers model.

    Args:
        model: A causal model, possibly inside a peft model, or any other object with a config.

    Returns:
        (query heads, key/value heads), each the minimum across layers.
    """
    return tuple(map(min, zip(*heads_by_layer(model), strict=True)))


def heads_by_layer(model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """Return the distinct (query heads, key/value heads) among a model's layers."""
    inner = unwrapped(model)
    return (isinstance(inner, PreTrainedModel) and facts_of(inner).heads) or (config_heads(inner.config),)


def windows(model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each attention module, in keys.

    A window includes the query's own position. None means all keys up to the query.
    """
    return [length if shape == "window" else None for shape, length in masks(model, facts_of(model))]

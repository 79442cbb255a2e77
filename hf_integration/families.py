"""Find the modules of transformers models, check attention settings, and switch the attention function.

transformers looks up attention and mask functions by the name in a model's config. A patched model therefore gets its
own config, whose text part contains our attention's name. Copies of the patched config contain the previous attention
name, and saved model files contain no attention name.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.models import unwrapped

from .compat import ATTENTION, EAGER, attention_name
from .module_patch import patch_on

__all__ = ["base_of", "check_adapters", "check_config", "check_model", "unwrapped"]


def check_adapters(model: nn.Module) -> None:
    """Raise ConfigError for a peft model that uses prompt learning, which adds tokens before the sequence."""
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            "sequence parallel training needs adapters inside the model; got a prompt learning method of peft, which "
            "puts tokens of its own before every rank's, use LoRA"
        )


def vocabulary(model: PreTrainedModel) -> tuple[int, int]:
    """Return a model's current (number of token embeddings, number of logits per token)."""
    size = model.config.get_text_config(decoder=True).vocab_size
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return getattr(embeddings, "num_embeddings", size), getattr(head, "out_features", size)


def check_model(model: PreTrainedModel) -> None:
    """Raise ConfigError if a model is not from transformers, or is an encoder-decoder."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"patch_attention needs a transformers model; got {type(model).__name__}, "
            "call sp.attention in a model of your own"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            "patch_attention needs softmax attention over one sequence; got a model of family "
            f"{model.config.model_type!r} with cross-attention between an encoder and a decoder, which is not "
            "supported, see docs/models.md"
        )


def check_config(model: PreTrainedModel, outside: bool) -> None:
    """Raise ConfigError if a model's config requests unsupported attention.

    Args:
        model: A transformers model.
        outside: Whether masks are created outside the layers for each batch, regardless of the layers' config.
    """
    if unmet_needs := _unmet_needs(model.config.get_text_config(decoder=True), outside):
        raise ConfigError(f"sequence parallel attention needs {' and '.join(unmet_needs)}; change the model's config")


def _unmet_needs(config: PreTrainedConfig, outside: bool) -> list[str]:
    """Return "NEEDED; got GIVEN" for each config setting that prevents patching."""
    unmet = [
        f"{name} 0 (ranks would drop different weights); got {rate}"
        for name, rate in vars(config).items()
        if re.fullmatch(r"(attention|attn)_.*(dropout|pdrop).*", name) and isinstance(rate, float) and rate > 0
    ]
    if not getattr(config, "is_causal", True):
        unmet.append("a causal model; got is_causal=False in its config")
    # "vision": images only
    is_bidirectional = getattr(config, "use_bidirectional_attention", False) in (True, "all")
    if is_bidirectional and not outside:
        unmet.append("a causal model; got use_bidirectional_attention in its config")
    return unmet


def base_of(model: Any) -> Any:
    """Return the patched module, which is the base model or the part of the base model that heads call directly."""
    own = patch_on(model)
    return model.base_model if own is None or own.base is None else model.get_submodule(own.base)


def patch_of(model: Any) -> Any:
    """Return the Patch of a model, or None if the model is not patched."""
    own = patch_on(base_of(model)) if hasattr(model, "base_model") else None
    return own and own.model


def balance_weight(model: Any) -> float:
    """Return the weight of the expert balance loss, or 0 if the model has no such loss."""
    return next((getattr(owner, name) for owner, name in _balance_weights(model)), 0.0)


def set_balance_weight(model: Any, weight: float) -> None:
    for owner, name in _balance_weights(model):
        setattr(owner, name, weight)


def _balance_weights(model: Any) -> list[tuple[Any, str]]:
    owners = (model, model.config, model.config.get_text_config(decoder=True))
    return [(owner, name) for name in BALANCE for owner in owners if hasattr(owner, name)]


NAME = "ds_seqpar"
BALANCE = ("router_aux_loss_coef", "aux_loss_coef")  # attributes that store the weight of the expert balance loss


class Name(str):
    """The name of our attention in a config. Copying or pickling a `Name` yields the replaced name instead.

    transformers searches attention names for "flash" to choose masks for flash attention. In this search, a `Name` acts
    like the name of the attention for local forwards.
    """

    replaced: str

    def __reduce__(self) -> tuple:
        return str, (self.replaced,)

    def __contains__(self, part: Any) -> bool:
        return part in self.replaced


def keep_name(config: Any, before: str | None = None) -> None:
    """Set the name of our attention in a config.

    Local forwards still use the attention named by `before`, which defaults to the config's previous attention.
    """
    if not isinstance(name := attention_name(config), Name):
        ours = Name(NAME)
        ours.replaced = before or name
        setattr(config, ATTENTION, ours)


def name_before(config: Any) -> str:
    """Return the name of a config's attention, or the previous name if our attention replaced it."""
    if (name := attention_name(config)) == NAME and not isinstance(name, Name):
        raise ConfigError(f'attention "{NAME}" needs patch_attention; set attn_implementation to "sdpa", then patch')
    return getattr(name, "replaced", name)


def switch_attention(model: PreTrainedModel, name: str, attending: Mapping[str, Any] | None = None) -> str:
    """Switch the attention of a model's text part, in a config that no other model shares.

    Args:
        model: A model.
        name: The name of an attention function.
        attending: The modules that must use the attention function after the switch, by name.

    Returns:
        The previous name.

    Raises:
        ConfigError: A module keeps its previous attention because its class cannot switch. transformers would only
            warn.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        vars(module).update({key: copies[id(x)] for key, x in vars(module).items() if id(x) in copies})
    text = model.config.get_text_config(decoder=True)
    before, parts = attention_name(text), [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    for part in [part for part in parts if part.config is text][-1:]:  # enclosing classes may be user-defined
        part.set_attn_implementation({"": name})
    for module_name, module in (attending or {}).items():
        if attention_name(module.config) != name:
            setattr(text, ATTENTION, before)
            raise ConfigError(
                f"patch_attention needs a model whose attention set_attn_implementation switches; got {module_name}, a "
                f"{type(module).__name__} that keeps {attention_name(module.config)!r}, give it the config of the "
                "model, and call ALL_ATTENTION_FUNCTIONS.get_interface in the file of its class"
            )
    return before


def local_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute attention as in the unpatched model. For "eager", call the function in the model's own file."""
    files = [sys.modules[cls.__module__] for cls in type(module).__mro__]
    eager: Any = next((getattr(file, EAGER) for file in files if hasattr(file, EAGER)), None)
    name = name_before(module.config)
    function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function(_With(module, config=_With(module.config, _attn_implementation=name)), *args, **kwargs)


class _With:
    """A view of a module or config with changed attributes, through which flash attention reads its kernel's name.

    The original object stays unchanged, since other threads may read it at the same time.
    """

    def __init__(self, original: Any, **changed: Any) -> None:
        vars(self).update(changed, original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


def heads_around(model: nn.Module) -> list[nn.Module]:
    """Return the modules that wrap the base model and that users call.

    peft's modules are included, because peft may call the inner model's forward without running that model's hooks.
    """
    inner = unwrapped(model)
    modules = [module for module in model.modules() if _is_of_peft(module)]
    return modules if base_of(inner) is inner else [*modules, inner]


def token_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules outside the base model that process tokens independently: heads, norms and dropout."""
    base: nn.Module = base_of(model)
    inside, types = {*base.modules()}, (nn.Linear, nn.Dropout, nn.LayerNorm, nn.RMSNorm)
    return [module for module in model.modules() if isinstance(module, types) and module not in inside]


def _is_of_peft(module: nn.Module) -> bool:
    return any(cls.__name__ == "PeftModel" for cls in type(module).__mro__)


# modules from these packages behave like the modules they replace
QUANTIZERS = ("bitsandbytes", "torchao", "kernels")
CAUSAL_LMS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
LIBRARIES = ("transformers", "liger_kernel", "trl", "peft", "accelerate", "torch", "deepspeed", "hf_integration")


def is_plain_head(module: Any) -> bool:
    """Return whether a module around the base model computes only the token losses of a causal language model.

    Library heads for causal language models compute only token losses. Other heads, user-defined forwards and adapters
    with a penalty may compute any loss from the base model's outputs.
    """
    if _is_of_peft(module):  # the forward of a peft tuner may add a term to the loss
        tuner = next(cls for cls in type(module.base_model).__mro__ if "forward" in vars(cls))
        inner = unwrapped(module)
        plain_inside = inner is base_of(inner) or is_plain_head(inner)
        return plain_inside and is_of_library(module.forward) and tuner.__name__ == "BaseTuner"
    return is_causal_lm(module) and is_of_library(module.forward) and is_of_library(type(module).forward)


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether a model's class is a transformers causal language model or a subclass of one."""
    names = [cls.__name__ for cls in type(model).__mro__]
    return any(name.endswith("ForCausalLM") or name in CAUSAL_LMS for name in names)


def is_of_library(forward: Any) -> bool:
    """Return whether a function or class comes from a library rather than from user code."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return (getattr(inspect.unwrap(forward), "__module__", None) or "").partition(".")[0] in LIBRARIES


def is_of_liger(forward: Callable[..., Any]) -> bool:
    """Return whether a forward belongs to a Liger class or was set on a module by Liger.

    Liger's norms, activations and RoPE process tokens independently, so a rank's local tokens suffice. Liger's fused
    loss takes shift_labels and num_items_in_batch and never materializes the full logits, so it replaces our loss
    tiles.
    """
    return getattr(forward, "__module__", "").startswith("liger_kernel.")

"""Model families that were checked: what their attention needs, and which settings would make it wrong.

transformers looks up an attention function by the name in the config of the module that calls it. So each attention
module of a patched model gets a view of the model's config with our name. The config itself does not change, and
neither do models that are saved, copied or made with it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_seqpar.errors import ConfigError
from ds_seqpar.models import unwrapped

from .compat import EAGER, attention_name

__all__ = ["attentions", "check_adapters", "check_model", "heads", "is_known", "unwrapped", "windows"]


@dataclasses.dataclass(frozen=True)
class Family:
    """Properties in which the causal attention of families differs.

    All families use transformers' AttentionInterface and take RoPE from position_ids. Scale, softcap and sinks are
    arguments of each call.
    """

    # the layers that have config.sliding_window; "layers": those of config.layer_types that are "sliding_attention". A
    # window counts the query's own position (window N: N keys), as ours does
    window: Literal["none", "all", "layers"] = "none"
    experts: bool = False  # whether the loss may have a term that balances experts, which is not linear in tokens
    norms_heads: bool = False  # whether q and k have norms over all heads: a head cannot be computed without the others


# model_type -> family. Logits, losses and gradients were compared with the unpatched model's
# (tests/hf/test_families.py)
FAMILIES = {
    "cohere2": Family(window="layers"),  # layers with a window have RoPE, the others no positions
    "gemma2": Family(window="layers"),  # softcap
    "gemma3_text": Family(window="layers"),  # a RoPE for each kind of layer, norms of q and k
    "glm4": Family(),  # RoPE on half of the head
    "gpt_oss": Family(window="layers", experts=True),  # sinks
    "granite": Family(),  # a scale of its own
    "llama": Family(),
    "mistral": Family(window="all"),
    "olmo2": Family(norms_heads=True),
    "olmo3": Family(window="layers", norms_heads=True),
    "phi3": Family(window="all"),
    "qwen2": Family(window="layers"),
    "qwen3": Family(window="layers"),
    "qwen3_moe": Family(window="all", experts=True),
    "smollm3": Family(window="layers"),  # some layers without positions
}
# features that no schedule here computes: (whether a config has it, its name)
FOREIGN: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda config: getattr(config, "kv_lora_rank", None) is not None, "multi-head latent attention (MLA)"),
    (lambda config: "linear_attention" in _layer_types(config), "linear attention"),
    (lambda config: "chunked_attention" in _layer_types(config), "chunked attention"),
    (lambda config: getattr(config, "attention_chunk_size", None) is not None, "chunked attention"),
    (lambda config: bool({"mamba", "conv", "recurrent"} & set(_layer_types(config))), "recurrent layers"),
    (lambda config: getattr(config, "is_encoder_decoder", False), "cross-attention between an encoder and a decoder"),
)


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or []


def check_adapters(model: nn.Module) -> None:
    """Raise ConfigError for a peft model that is more than its base model with adapters inside."""
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            "sequence parallel training needs adapters inside the model; got a prompt learning method of peft, which "
            "puts tokens of its own before every rank's, use LoRA"
        )


def heads(model: PreTrainedModel) -> tuple[int, int]:
    """Return the numbers of heads of a transformers model.

    Args:
        model: A model whose config has `num_attention_heads`.

    Returns:
        (query heads, key/value heads).
    """
    config = model.config
    q_heads = getattr(config, "num_attention_heads", 0)
    return q_heads, getattr(config, "num_key_value_heads", None) or q_heads


def vocabulary(model: PreTrainedModel) -> tuple[int, int]:
    """Return (tokens that the model embeds, labels that its head has logits for), as they are now."""
    size = model.config.vocab_size
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return getattr(embeddings, "num_embeddings", size), getattr(head, "out_features", size)


def is_known(model: PreTrainedModel) -> bool:
    """Return whether the model is of a family that was checked."""
    return model.config.model_type in FAMILIES


def attentions(model: nn.Module) -> list[Any]:
    """Return the attention modules of a model, in the order of its layers."""
    return [module for module in model.modules() if hasattr(module, "num_key_value_groups")]


def windows(model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each attention module, in keys.

    A window counts the query's own position; None: all keys up to the query.
    """
    config, family = model.config, FAMILIES[model.config.model_type]
    window = getattr(config, "sliding_window", None) if family.window != "none" else None
    layer_types = config.layer_types if family.window == "layers" else ["sliding_attention"] * len(attentions(model))
    return [window if layer_types[module.layer_idx] == "sliding_attention" else None for module in attentions(model)]


def check_model(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose attention cannot be, or was not checked to be, sequence parallel."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"patch_attention needs a transformers model; got {type(model).__name__}, "
            "call sp.attention in a model of your own"
        )
    config, family = model.config, model.config.model_type
    if foreign := [feature for has_feature, feature in FOREIGN if has_feature(config)]:
        raise ConfigError(
            f"patch_attention needs softmax attention over one sequence; got a model of family {family!r} with "
            f"{foreign[0]}, which is not supported, see docs/supported.md"
        )
    if not is_known(model):
        raise ConfigError(
            f"patch_attention knows the attention of {', '.join(sorted(FAMILIES))}; got a model of family {family!r}, "
            "call sp.attention from an attention function of the model (docs/other_models.md)"
        )
    if model.base_model is model and not type(model).__name__.endswith("Model"):
        raise ConfigError(
            f"patch_attention needs a model with a base model of its family inside; got {type(model).__name__}, whose "
            f"base_model_prefix {model.base_model_prefix!r} names none"
        )
    if unmet_needs := _unmet_needs(config):
        raise ConfigError(f"sequence parallel attention needs {' and '.join(unmet_needs)}; change the model's config")


def _unmet_needs(config: PreTrainedConfig) -> list[str]:
    """Return "NEEDED; got GIVEN" for each setting with which a model of a known family cannot be patched."""
    unmet = []
    if getattr(config, "attention_dropout", 0) > 0:
        unmet.append(f"attention_dropout 0 (ranks would drop different weights); got {config.attention_dropout}")
    if not getattr(config, "is_causal", True):
        unmet.append("a causal model; got is_causal=False in its config")
    if getattr(config, "use_bidirectional_attention", False):
        unmet.append("a causal model; got use_bidirectional_attention in its config")
    if unknown := sorted(set(_layer_types(config)) - {"full_attention", "sliding_attention"}):
        unmet.append(f"layer_types full_attention and sliding_attention; got {', '.join(unknown)}")
    return unmet


NAME = "ds_seqpar"


class ConfigView:
    """A view of a model's config, with the name of our attention, for the attention modules of a patched model."""

    def __init__(self, original: Any, name: str = NAME) -> None:
        self.original, self._attn_implementation = original, name

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # copies and pickles read these before `original` is set
            raise AttributeError(name)
        return getattr(self.original, name)


def local_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of the unpatched model.

    "eager" attention is a function in the file of each model. During the call the module has the model's config, where
    flash attention reads the name of its kernel.
    """
    files = [sys.modules[cls.__module__] for cls in type(module).__mro__]
    eager: Any = next((getattr(file, EAGER) for file in files if hasattr(file, EAGER)), None)
    view, module.config = module.config, module.config.original
    function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(attention_name(view.original), eager)
    try:
        return function(module, *args, **kwargs)
    finally:
        module.config = view


def heads_around(model: nn.Module) -> list[nn.Module]:
    """Return the modules around the base model that users call.

    peft's is one of them, since peft may call the forward of the model inside without that model's hooks.
    """
    inner = unwrapped(model)
    modules = [module for module in model.modules() if _is_of_peft(module)]
    return modules if inner.base_model is inner else [*modules, inner]


def token_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules around the base model that treat tokens independently: heads, with norms and dropout."""
    base: nn.Module = model.base_model
    inside, types = {*base.modules()}, (nn.Linear, nn.Dropout, nn.LayerNorm, nn.RMSNorm)
    return [module for module in model.modules() if isinstance(module, types) and module not in inside]


def _is_of_peft(module: nn.Module) -> bool:
    return any(cls.__name__ == "PeftModel" for cls in type(module).__mro__)


LIBRARIES = ("transformers", "liger_kernel", "trl", "peft", "accelerate", "torch", "deepspeed", "hf_integration")


def is_plain_head(module: Any) -> bool:
    """Return whether a module around the base model computes token losses of a causal language model, and nothing more.

    Those of libraries do. Others (heads of other kinds, a user's own forwards, adapters with a penalty) may compute any
    loss from the base model's outputs.
    """
    if _is_of_peft(module):  # a tuner's forward may add to the loss
        tuner = next(cls for cls in type(module.base_model).__mro__ if "forward" in vars(cls))
        return is_of_library(module.forward) and tuner.__name__ == "BaseTuner"
    return is_causal_lm(module) and is_of_library(module.forward) and is_of_library(type(module).forward)


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether a model is a causal language model of transformers, or of a class that extends one."""
    return any(cls.__name__.endswith("ForCausalLM") for cls in type(model).__mro__)


def is_of_library(forward: Any) -> bool:
    """Return whether a function or a class is of a library, and not of a user."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return (getattr(inspect.unwrap(forward), "__module__", None) or "").partition(".")[0] in LIBRARIES


def is_of_liger(forward: Callable[..., Any]) -> bool:
    """Return whether a forward is Liger's: of a class that Liger wrote, or set on a module by Liger.

    Liger's norms, activations and RoPE treat tokens independently, so a rank's local tokens are enough. Its fused loss
    takes shift_labels and num_items_in_batch, and makes no whole logits: it replaces our loss tiles.
    """
    return getattr(forward, "__module__", "").startswith("liger_kernel.")

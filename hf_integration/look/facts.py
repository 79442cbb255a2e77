"""Model properties that a patch needs beyond the config.

The properties are recorded in this module for tested families, and detected at run time for all other models.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VERSIONS = ("5.18", "5.23")  # transformers releases in which the tested families were checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of a model that a patch needs. All fields can be written as JSON."""

    # attention modules, named relative to `base`, with "*" for numbers, and with the class appended to ambiguous names
    attention: tuple[str, ...] = ("layers.*.self_attn",)
    mixers: tuple[str, ...] = ()  # modules with a state or a convolution, named like `attention`
    # modules that gather keys, because of an index or custom attention, named in the same way
    gathered: tuple[str, ...] = ()
    selects: bool = False  # whether modules with latents and an index can run on all local tokens at once
    base: str | None = None  # the module that heads call, relative to the model; None for the base model
    # the module in `base` that gets inputs_embeds containing media features, relative to the model; None without media
    stack: str | None = None
    outside: bool = False  # whether masks are made outside the stack, based on media token types
    no_media: str = "it puts no features of media in the place of tokens' embeddings"  # "" if it does
    # (kind of layer in config.layer_types or "" for all, the setting in LENGTHS with the length of its window or chunk)
    masks: tuple[tuple[str, str], ...] = ()
    # each layer's (query heads, key/value heads), or () to use the config's numbers
    heads: tuple[tuple[int, int], ...] = ()
    keywords: bool = True  # whether keywords of the model's forward reach attention
    first_position: int = 0  # the position of a sequence's first token
    counts_padding: bool = True  # whether padding before a sequence takes up positions
    balance: bool = False  # whether the loss may include a term that balances experts
    shift_labels: bool = True  # whether the loss takes shift_labels and num_items_in_batch
    # whether norms of q and k span all heads, so that heads depend on one another; only recorded
    norms_heads: bool = False
    skips: bool = False  # whether layers are skipped at random in training
    not_small: tuple[str, ...] = ()  # sizes that are not reduced in the small copy

    @property
    def uncached(self) -> str:
        """The kind of layer that a sharded cache does not support, or "" if all layers are supported."""
        return "layers with a state" if self.mixers else ""


def starred(name: str) -> str:
    """Return a module's name with "*" in place of each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def text_config(config: PreTrainedConfig) -> Any:
    """Return the config of a model's text part."""
    return config.get_text_config(decoder=True)


def config_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return a config's (query heads, key/value heads), with 0 for missing numbers."""
    text = text_config(config)
    q_heads = number_of(text, "num_attention_heads") or 0
    return q_heads, number_of(text, "num_key_value_heads") or q_heads


def number_of(config: PreTrainedConfig, name: str) -> Any:
    """Return a config's number by its most common name, or None if the config does not have the number."""
    name, values = config.attribute_map.get(name, name), vars(config)
    # configs with per-layer sizes raise an error when a size is read
    return values[name] if name in values else getattr(config, name, None)


def kind_of_layer(config: PreTrainedConfig, name: str) -> str:
    """Return the kind of the layer that contains the named module, or "" if the config defines no layer kinds."""
    types = getattr(text_config(config), "layer_types", None) or ()
    index = next((int(part) for part in name.split(".") if part.isdigit()), 0)
    return types[index] if index < len(types) else ""


def base_module(model: PreTrainedModel, facts: Facts) -> nn.Module:
    """Return the module that a model's heads call."""
    return model.base_model if facts.base is None else model.get_submodule(facts.base)


Kind = Literal["attention", "mixers", "gathered"]


def modules_of(model: PreTrainedModel, facts: Facts, kind: Kind = "attention") -> dict:
    """Return a model's modules of one kind in layer order, by name relative to `base`.

    Args:
        model: A model.
        facts: The model's facts.
        kind: The kind of modules.
    """
    names = {*getattr(facts, kind)}
    modules = base_module(model, facts).named_modules()
    return {name: x for name, x in modules if {starred(name), with_class(name, x)} & names}


def with_class(name: str, module: nn.Module) -> str:
    """Return a module's starred name, followed by its class name."""
    return f"{starred(name)}:{type(module).__name__}"


# settings that transformers' mask functions read, and the shape of the mask that each setting specifies
LENGTHS: dict[str, Literal["window", "chunk"]] = {"sliding_window": "window", "attention_chunk_size": "chunk"}
WINDOWS_BY_KIND = (("sliding_attention", "sliding_window"),)
WINDOW_EVERYWHERE = (("", "sliding_window"),)
# facts by model_type. tests/hf/test_conformance.py compares logits, losses and gradients with the unpatched model, and
# tests/hf/test_look.py compares these facts with detected facts
TESTED = {
    **dict.fromkeys(("glm4", "granite", "llama"), Facts()),
    **dict.fromkeys(("mistral", "phi3"), Facts(masks=WINDOW_EVERYWHERE)),
    **dict.fromkeys(("cohere2", "gemma2", "gemma3_text", "qwen2", "qwen3", "smollm3"), Facts(masks=WINDOWS_BY_KIND)),
    "gpt_oss": Facts(masks=WINDOWS_BY_KIND, balance=True),
    "olmo2": Facts(norms_heads=True),
    "olmo3": Facts(masks=WINDOWS_BY_KIND, norms_heads=True),
    "qwen3_moe": Facts(masks=WINDOW_EVERYWHERE, balance=True),
}


def masks(model: PreTrainedModel, facts: Facts, kind: Kind = "attention") -> list[tuple[str, int | None]]:
    """Return ("window" or "chunk", its length in tokens or None) for each module of one kind."""
    text, rules = text_config(model.config), dict(facts.masks)
    kinds = [kind_of_layer(model.config, name) for name in modules_of(model, facts, kind)]
    names = [rules.get(kind) or rules.get("", "") for kind in kinds]
    return [(LENGTHS.get(name, "window"), getattr(text, name, None)) for name in names]

"""What a patch must know about a model beyond its config: recorded for tested families, found by a look for all
others."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VERSIONS = ("5.18", "5.23")  # releases of transformers in which the tested families were looked at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a patch must know about a model. All fields can be written as JSON."""

    # the modules that attend, below `base`, with "*" for numbers, and with their class where other modules differ
    attention: tuple[str, ...] = ("layers.*.self_attn",)
    mixers: tuple[str, ...] = ()  # the modules with a state or a convolution, named in the same way
    # the modules that attend by an index, or in a way of their own, and gather keys, in the same way
    gathered: tuple[str, ...] = ()
    selects: bool = False  # whether those with latents and an index can run on all of a rank's tokens at once
    base: str | None = None  # the module that heads call, below the model; None: its base model
    # the module in `base` that gets inputs_embeds with features of media in them, below the model; None: there is none
    stack: str | None = None
    outside: bool = False  # whether masks are made around it, from what distinguishes media from text
    no_media: str = "it puts no features of media in the place of tokens' embeddings"  # "": it takes them
    # (kind of layer of config.layer_types, "" for all; the setting of LENGTHS with the length of its window or chunk)
    masks: tuple[tuple[str, str], ...] = ()
    heads: tuple[tuple[int, int], ...] = ()  # each layer's (query heads, key/value heads); (): those of the config
    keywords: bool = True  # whether keywords of the model's forward reach attention
    first_position: int = 0  # the position of a sequence's first token
    counts_padding: bool = True  # whether padding before a sequence has positions too
    balance: bool = False  # whether the loss may have a part that balances experts
    shift_labels: bool = True  # whether the loss takes shift_labels and num_items_in_batch
    # whether q and k have norms over all heads, so that a head cannot be computed without the others; only recorded
    norms_heads: bool = False
    skips: bool = False  # whether chance decides which layers run in training
    not_small: tuple[str, ...] = ()  # what is as large in the small copy as in the model

    @property
    def uncached(self) -> str:
        """What layers have that a cache in parts does not keep; "" if nothing."""
        return "layers with a state" if self.mixers else ""


def starred(name: str) -> str:
    """Return a module's name with "*" for each number in it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def text_config(config: PreTrainedConfig) -> Any:
    """Return the config of a model's text part."""
    return config.get_text_config(decoder=True)


def config_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the (query heads, key/value heads) that a config specifies, 0 for those it does not."""
    text = text_config(config)
    q_heads = number_of(text, "num_attention_heads") or 0
    return q_heads, number_of(text, "num_key_value_heads") or q_heads


def number_of(config: PreTrainedConfig, name: str) -> Any:
    """Return a number from a config by its most common name; None if the config lacks it."""
    name, values = config.attribute_map.get(name, name), vars(config)
    # a config with other sizes for some layers raises if one of them is read
    return values[name] if name in values else getattr(config, name, None)


def kind_of_layer(config: PreTrainedConfig, name: str) -> str:
    """Return the kind of the layer that contains the named module; "" if the config has no kinds."""
    types = getattr(text_config(config), "layer_types", None) or ()
    index = next((int(part) for part in name.split(".") if part.isdigit()), 0)
    return types[index] if index < len(types) else ""


def base_module(model: PreTrainedModel, facts: Facts) -> nn.Module:
    """Return the module that a model's heads call."""
    return model.base_model if facts.base is None else model.get_submodule(facts.base)


Kind = Literal["attention", "mixers", "gathered"]


def modules_of(model: PreTrainedModel, facts: Facts, kind: Kind = "attention") -> dict:
    """Return a model's modules of this kind in layer order, by their names in `base`.

    Args:
        model: A model.
        facts: The model's facts.
        kind: The kind of modules.
    """
    names = {*getattr(facts, kind)}
    modules = base_module(model, facts).named_modules()
    return {name: x for name, x in modules if {starred(name), with_class(name, x)} & names}


def with_class(name: str, module: nn.Module) -> str:
    """Return a module's starred name, with its class."""
    return f"{starred(name)}:{type(module).__name__}"


# settings that transformers' mask functions read -> the shape of the mask
LENGTHS: dict[str, Literal["window", "chunk"]] = {"sliding_window": "window", "attention_chunk_size": "chunk"}
WINDOWS_BY_KIND = (("sliding_attention", "sliding_window"),)
WINDOW_EVERYWHERE = (("", "sliding_window"),)
# model_type -> facts. tests/hf/test_conformance.py compares logits, losses and gradients with the unpatched model's,
# and tests/hf/test_look.py what a look finds
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
    """Return ("window" or "chunk", its length in keys or None if there is none) for each module of this kind."""
    text, rules = text_config(model.config), dict(facts.masks)
    kinds = [kind_of_layer(model.config, name) for name in modules_of(model, facts, kind)]
    names = [rules.get(kind) or rules.get("", "") for kind in kinds]
    return [(LENGTHS.get(name, "window"), getattr(text, name, None)) for name in names]

"""What a patched model's config calls its attention, and the attention that the model had, for local forwards."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "ds_seqpar"
EAGER = "eager_attention_forward"


class Name(str):
    """The name of our attention, in a model's config: with that of the attention it had, which local forwards use."""

    before: str

    def __new__(cls, before: str) -> Name:
        name = super().__new__(cls, NAME)
        name.before = before
        return name

    def __reduce__(self) -> tuple:
        return Name, (self.before,)


def own_config(model: PreTrainedModel) -> None:
    """Models made from one config object share it, and it names the attention: the patched one needs its own."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            vars(module)["config"] = own


def use(model: PreTrainedModel, before: str) -> None:
    model.set_attn_implementation(NAME)
    model.config._attn_implementation = Name(before)


def local_attention(module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that the model had. "eager" is a function of each model's own file."""
    files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    eager: Any = next((file.eager_attention_forward for file in files if hasattr(file, EAGER)), None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation.before, eager)


def local_mask(*, config: Any, **kwargs: Any) -> Tensor | None:
    """Without a registered mask function transformers drops padding masks and windows in silence. A sharded forward
    makes no mask (`NO_MASK`); a local one gets that of the attention the model had."""
    return ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation.before](config=config, **kwargs)

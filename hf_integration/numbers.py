"""A transformers config as the numbers that the memory of a training step depends on."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ds_seqpar.errors import ConfigError, nearest
from ds_seqpar.files import Given, ask, read_json
from ds_seqpar.limits import check_model

from .families import FAMILIES

if TYPE_CHECKING:
    from ds_seqpar.planner.request import Model

WHOLE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "num_experts_per_tok", "moe_intermediate_size")  # fmt: skip


def numbers_of(place: str) -> Model:
    """From a folder with a config.json, or that file. Raises ConfigError, also for what transformers cannot make a
    model of."""
    if not os.path.exists(place):
        raise ConfigError(f"--model must be the folder of a model, or its config.json; there is no {place}")
    file = os.path.join(place, "config.json") if os.path.isdir(place) else place
    content = read_json(file, "--model must be the folder of a model, or its config.json; that")
    where = f"the model's configuration {file}"
    kind = Given(where, content.get("model_type"), "model_type")
    if kind.text() not in CONFIG_MAPPING:
        raise kind.wrong(f"one that transformers knows{nearest(kind.value, CONFIG_MAPPING)}")
    return ask("transformers", where, content, lambda given: _made(where, given))


def _made(place: str, content: dict[str, Any]) -> Model:
    config = AutoConfig.for_model(**content)
    for name in WHOLE:
        if (value := getattr(config, name, None)) is not None:
            Given(place, value, name).count()
    return numbers(config)


def numbers(config: PreTrainedConfig) -> Model:
    """Parameters are counted on the model itself, made on the meta device: they are right for every family."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown(config)
    check_model(config.to_dict())
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    return counted(model)


def _unknown(config: PreTrainedConfig) -> ConfigError:
    return ConfigError(
        f"the memory of a step is known for causal language models; got a config of {config.model_type!r}, give one"
    )


def counted(model: PreTrainedModel) -> Model:
    """The same of a model as it is, on any device, or sharded by ZeRO-3."""
    from ds_seqpar.planner.request import Model

    config, layers = model.config, getattr(model.base_model, "layers", None)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if layers is None or head is None:
        raise _unknown(config)
    heads, hidden = config.num_attention_heads, config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    return Model(
        hidden=hidden,
        intermediate=experts * (width or config.intermediate_size),
        layers=len(layers),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab=config.vocab_size,
        parameters=_elements(model),
        layer_parameters=max(map(_elements, layers)),
        tied=head.weight is embedding.weight,
        norms_heads=config.model_type in FAMILIES and FAMILIES[config.model_type].norms_heads,
    )


def _elements(module: nn.Module) -> int:
    """ZeRO-3 leaves nothing in a parameter, and says how many it had."""
    return sum(getattr(x, "ds_numel", x.numel()) for x in module.parameters())

"""A transformers config as the numbers that the memory of a training step depends on."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ds_seqpar.errors import ConfigError
from ds_seqpar.planning.needs import Model


def numbers_of(place: str) -> Model:
    """From a folder with a config.json, or that file. Raises ConfigError."""
    path = Path(place)
    if not path.exists():
        raise ConfigError(f"--model must be the folder of a model, or its config.json; there is no {place}")
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--model must be the folder of a model, or its config.json; got {place}: {reason}") from None
    return numbers(config)


def numbers(config: PreTrainedConfig) -> Model:
    """Parameters are counted on the model itself, made on the meta device: they are right for every family."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config)
        layers = model.base_model.layers
    except (ValueError, AttributeError):
        raise ConfigError(
            f"the memory of a step is known for causal language models; got a config of {config.model_type!r}, give one"
        ) from None
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
        parameters=sum(x.numel() for x in model.parameters()),
        layer_parameters=max(sum(x.numel() for x in layer.parameters()) for layer in layers),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    )

"""Model families that have been checked, and what in a model of theirs would make sharded training wrong."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ds_seqpar.errors import ConfigError
from ds_seqpar.models import unwrapped

__all__ = ["check_adapters", "check_model", "heads", "is_known", "unwrapped"]


def _llama(model: PreTrainedModel) -> list[str]:
    """LLaMA: RoPE once in the model from position_ids, one causal attention a layer through AttentionInterface."""
    config, against = model.config, []
    if config.attention_dropout > 0:
        against.append(f"attention_dropout 0 (ranks would drop different weights); got {config.attention_dropout}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        against.append(f"a rope_type that does not depend on the longest position a rank sees; got {rope!r}")
    if not getattr(config, "is_causal", True):
        against.append("a causal model; got is_causal=False in its config")
    return against


# model_type -> what a model of that family needs and does not have
FAMILIES = {"llama": _llama}


def check_adapters(model: nn.Module) -> None:
    """Raises ConfigError for a peft model that is more than its base model with adapters inside."""
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            "sequence parallel training needs adapters inside the model; got a prompt learning method of peft, which "
            "puts tokens of its own before every rank's, use LoRA"
        )


def heads(model: PreTrainedModel) -> tuple[int, int]:
    """(query heads, key/value heads) of a transformers model."""
    config = model.config
    q_heads = getattr(config, "num_attention_heads", 0)
    return q_heads, getattr(config, "num_key_value_heads", None) or q_heads


def is_known(model: PreTrainedModel) -> bool:
    """Whether the model is of a family that was checked."""
    return model.config.model_type in FAMILIES


def check_model(model: PreTrainedModel) -> None:
    """Raises ConfigError for a model whose attention cannot be, or was not checked to be, sequence parallel."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"patch_attention needs a transformers model; got {type(model).__name__}, "
            "call sp.attention in a model of your own"
        )
    family = model.config.model_type
    if not is_known(model):
        raise ConfigError(
            f"patch_attention knows the attention of {', '.join(sorted(FAMILIES))}; got a model of family {family!r}, "
            "others come with sliding windows and packed documents, and till then you can call sp.attention from an "
            "attention function of the model (docs/other_models.md)"
        )
    if not type(model).__name__.endswith(("ForCausalLM", "Model")):
        raise ConfigError(
            f"patch_attention needs a causal language model (or its base model); got {type(model).__name__}, "
            "whose head would see this rank's tokens only"
        )
    if against := FAMILIES[family](model):
        raise ConfigError(f"sequence parallel attention needs {' and '.join(against)}; change the model's config")

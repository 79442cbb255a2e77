"""A tiny model of every family that is supported, from its real config class, and what in it is worth varying."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_experts_per_tok": 2}
# family -> its own settings; "window": which of them has the length of its window
FAMILIES = {
    "cohere2": {**MIXED, "window": "sliding_window"},
    "gemma2": {**MIXED, "window": "sliding_window", "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    "gemma3_text": {**MIXED, "window": "sliding_window"},
    "glm4": {},
    "gpt_oss": {**MIXED, **EXPERTS, "window": "sliding_window", "num_local_experts": 4},
    "granite": {"attention_multiplier": 0.5, "logits_scaling": 2.0},
    "llama": {},
    "mistral": {"window": "sliding_window"},
    "olmo2": {},
    "olmo3": {**MIXED, "window": "sliding_window"},
    "phi3": {"window": "sliding_window"},
    "qwen2": {**MIXED, "window": "sliding_window", "use_sliding_window": True},
    "qwen3": {**MIXED, "window": "sliding_window", "use_sliding_window": True},
    "qwen3_moe": {
        **EXPERTS,
        "window": "sliding_window",
        "use_sliding_window": True,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "smollm3": {
        **MIXED,
        "window": "sliding_window",
        "use_sliding_window": True,
        "no_rope_layers": [1, 0],
        "no_rope_layer_interval": 2,
    },
}


def model_of(family, window=None, seed=0, **changes):
    """Random weights, the same for the same seed, with sinks and norms that are not what they begin as."""
    given = {**SIZE, **FAMILIES[family], **changes}
    if (name := given.pop("window", None)) is not None:
        given[name] = window or 20
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # they begin as 0 or 1
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "router" in name or "gate.weight" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model

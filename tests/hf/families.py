"""A tiny model of every family that is supported, from its real config class, and what in it is worth varying. Batches
of every kind for it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.hf.llama import IGNORE, array

SEQ = 51
PACKS = ((20, 1, 30), (7, 9, 35))  # rows may differ; a document of one token; others longer than a shard

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
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_experts_per_tok": 2}
# family -> its own settings; "window": which of them has the length of its window
FAMILIES = {
    "cohere2": {**MIXED, "window": "sliding_window"},
    "gemma2": {**MIXED, "window": "sliding_window", "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    "gemma3_text": {**MIXED, "window": "sliding_window"},
    "glm4": {},
    "gpt_oss": {**MIXED, **ROUTED, "window": "sliding_window", "num_local_experts": 4},
    "granite": {"attention_multiplier": 0.5, "logits_scaling": 2.0},
    "llama": {},
    "mistral": {"window": "sliding_window"},
    "olmo2": {},
    "olmo3": {**MIXED, "window": "sliding_window"},
    "phi3": {"window": "sliding_window"},
    "qwen2": {**MIXED, "window": "sliding_window", "use_sliding_window": True},
    "qwen3": {**MIXED, "window": "sliding_window", "use_sliding_window": True},
    "qwen3_moe": {
        **ROUTED,
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
EXPERTS = tuple(name for name in FAMILIES if "num_experts_per_tok" in FAMILIES[name])


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


def batch_of(kind, number=0):
    ids = torch.randint(3, 64, (2, SEQ), generator=torch.Generator().manual_seed(1 + number))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in PACKS])
    if kind in ("left", "right"):
        at = torch.arange(SEQ)
        mask = at >= torch.tensor([[0], [13]]) if kind == "left" else at < torch.tensor([[SEQ], [29]])
        batch |= {"attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORE)}
    return batch


def collated(kind, number=0):
    """A batch as collators make it: no label counts that is predicted across a document's end, or from padding."""
    batch = batch_of(kind, number)
    labels = batch["labels"]
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = IGNORE
    if kind == "left":
        labels[torch.nn.functional.pad(batch["attention_mask"], (1, 0))[:, :-1] < batch["attention_mask"]] = IGNORE
    return batch


def real(batch):
    """(rows, tokens, 1): 0 for padding, of which everybody may compute something else."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None]


def gradients(model):
    return {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}

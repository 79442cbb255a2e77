"""A tiny model of every causal type of transformers, from its real config class: its sizes by the names that configs
give them, and of its layers one of each kind."""

import copy
import fnmatch
import functools

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Mistral4ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
# why a type has no tiny model
UNBUILT = {
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "drafts tokens from the states of another model",
    "gemma4_unified_assistant": "drafts tokens from the states of another model",
    "musicgen": "is made of three other models",
    "musicgen_melody": "is made of three other models",
}
BY_CLASS = {"mistral4": Mistral4ForCausalLM}  # what AutoModelForCausalLM does not know
# whose windows and blocks count from padding on, which transformers itself says is not what is meant
BY_PADDING = ("deepseek_v4", "minimax_m3_vl_text")
LARGEST = 64  # of a number that no rule names
# names of a config's numbers -> the size; the first pattern that fits
SIZES = {
    "vocab_size*": 64,
    "*_token_id": lambda value: min(value, 2),
    "max_*position*|n_positions|n_ctx|max_seq_len*|model_max_length|*context_length": 128,
    "index_topk": 8,  # fewer than a document has
    "sliding_window*|attention_chunk_size|local_attention*|attention_window_size|window_size|keep_window_size": 8,
    "chunk_size|mamba_chunk_size": 16,  # of Mamba-2
    "num_key_value_heads|*_kv_heads|*key_value_heads": 2,
    "num_*experts_per_tok*|moe_topk|moe_k|top_k*": 2,
    "num_*heads*|n_heads|n_head|*attention_heads": lambda value: 8,
    "head_dim|d_head|*_head_dim|attention_head_size|dim_head|kv_channels|rotary_dim": 8,
    "*layers|n_layer|num_blocks|num_layers*": 2,
    "*lora_rank": 16,
    "num_*experts|n_routed_experts|moe_num_experts": 4,
    "n_group|num_expert_group|topk_group": 1,
    "first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_kv_shared_layers": 1,
    "*intermediate*|*ffn*|dff|dim_ff|feed_forward_size|n_inner": 48,
    "hidden_size*|d_model|n_embd|emb_dim|embedding_dim|*embedding_size|lru_width|*_embed_dim|*_proj_dim": 64,
}
ABSENT = {"head_dim": 8, "sliding_window": 8, "num_key_value_heads": 2}  # what a config may have as None
DERIVED = ("qk_head_dim", "attention_hidden_size", "attention_head_dim")  # which the config computes
QUIET = ("*dropout*", "*_pdrop", "*layerdrop", "*noise*")
RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "state_size", "ssm", "rescale_every", "qk_dim_factor")
BALANCE = ("router_aux_loss_coef", "aux_loss_coef")
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CONV = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
INDEXER = {
    "indexer_n_heads": 16,  # of fewer, no head may agree, and scores that are equal have no order
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LATENT = {
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
WIDER = {
    "global_head_dim": 16,
    "layer_types": [*MIXED["layer_types"]] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# what the rules do not say of a type
OWN = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        **MIXED,
        "rope_parameters": {kind: {**ROPE, "mrope_section": [2, 1, 1]} for kind in MIXED["layer_types"]},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {**EXPERTS, **MIXED},
    "dots3_note": {"text_config": LATENT},
    "dots3_note_text": LATENT,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},  # of few neurons more may leave none
    "gemma4": {"text_config": WIDER},
    "gemma4_text": WIDER,
    "gemma4_unified": {"text_config": WIDER},
    "gemma4_unified_text": WIDER,
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {"linear_num_heads": 8},
    "laguna": {**MIXED, "num_attention_heads_per_layer": [4, 8]},
    "lfm2": {**CONV, "full_attn_idxs": [1]},
    "lfm2_moe": CONV,
    "mellum": MIXED,
    "mamba2": {"head_dim": 16},
    "mistral4": {"head_dim": 16},  # of what rotates and what does not
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "nemotron_h": {"mamba_num_heads": 16},
    "olmo_hybrid": DELTA,
    "qwen3_5": {"text_config": DELTA},
    "qwen3_5_moe": {"text_config": DELTA},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 51,
        "lsh_attn_chunk_length": 51,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"mamba_headdim": 16},
}


def tiny(model_type, seed=0):
    """Return a model whose weights are the same for the same seed, none of them as small as it begins."""
    if model_type in UNBUILT:
        raise ValueError(f"{model_type} {UNBUILT[model_type]}")
    torch.manual_seed(seed)
    config = copy.deepcopy(config_of(model_type))
    config._attn_implementation = "eager"
    make = BY_CLASS.get(model_type, AutoModelForCausalLM.from_config)
    model = make(config).float()
    return enlivened(model).train()


def enlivened(model):
    """Give a model weights that are not as small, or as even, as they begin."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _enliven(name, parameter)
    return model


def _enliven(name, parameter):
    if parameter.dim() < 2 or "A_log" in name:  # norms, biases, decays
        parameter.add_(torch.randn_like(parameter) * 0.1)
        if "A_log" in name:  # states that decay by e^-10 a token have gradients that fp32 rounds to 2e-5
            parameter.clamp_(max=0)
    elif (spread := parameter.std().item()) < 0.15:
        parameter.copy_(parameter * (0.15 / spread) if spread else torch.randn_like(parameter) * 0.15)


@functools.cache
def config_of(model_type):
    config = shrunk(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))
    config.use_cache = False
    return config


def shrunk(config_class, own):
    """Return a config of this class with small sizes. own: settings that take the place of the rules'."""
    default = config_class()
    if "use_sliding_window" in vars(default):
        mixed = MIXED if "layer_types" in vars(default) else {}
        own = {"use_sliding_window": True, "sliding_window": 8, **mixed, **own}
    given = {name: size for name, size in ABSENT.items() if vars(default).get(name, 0) is None}
    for name, value in vars(default).items():
        if hasattr(value, "to_dict"):
            given[name] = shrunk(type(value), own.get(name, {}))
        elif name in own:
            given[name] = own[name]
        elif name not in DERIVED and (size := _small(name, value)) is not None:
            given[name] = size
    if vars(default).get("kv_lora_rank"):  # keys and values of all heads come from one latent
        given["num_key_value_heads"] = given["num_attention_heads"]
    given |= {name: value for name, value in _layers(default).items() if name not in own}
    given |= {name: True for name in ("is_decoder", "output_router_logits") if hasattr(default, name)}
    given |= {name: 0.1 for name in BALANCE if hasattr(default, name)}
    return config_class(**given, **{name: value for name, value in own.items() if name not in given})


def _small(name, value):
    if isinstance(value, float) and any(fnmatch.fnmatch(name, pattern) for pattern in QUIET):
        return 0.0
    if not isinstance(value, int) or isinstance(value, bool) or name.startswith("_"):
        return None
    for patterns, size in SIZES.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split("|")):
            return size(value) if callable(size) else min(value, size)
    return min(value, LARGEST)


def _layers(config):
    """Return lists that speak of layers, cut to one layer of each kind and to two at least, and how many these are."""
    count = getattr(config, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and count and len(value) == count and [*value] != [*range(count)]
    }
    if not lists:
        return {}
    kinds = list(zip(*map(repr_each, lists.values()), strict=True))
    first = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())
    first = (first * 2)[:2] if len(first) < 2 else first
    return {name: [_small(name, value[at]) or value[at] for at in first] for name, value in lists.items()} | {
        "num_hidden_layers": len(first)
    }


def repr_each(values):
    return [repr(value) for value in values]


def features(model_type):
    """Return what is known of a type's way to mix tokens, from its config."""
    config = config_of(model_type).get_text_config(decoder=True)
    given = {name: value for name, value in vars(config).items() if value not in (None, False, 0, [], ())}
    layers = " ".join(map(str, [*given.get("layer_types", ()), *given.get("layers_block_type", ())]))
    names = " ".join(given)
    signs = {
        "window": "sliding" in layers
        or "local_attention" in names
        or ("layer_types" not in given and "sliding" in names),
        "chunks": "attention_chunk_size" in given,
        "latent": "kv_lora_rank" in given,
        "index": "index" in layers or "sparse" in layers or "index_topk" in names,
        "experts": "expert" in names,
        "recurrent": any(word in f"{layers} {names}" for word in RECURRENT),
    }
    return [sign for sign, found in signs.items() if found]

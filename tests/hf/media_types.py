"""A model of every type of transformers that takes images or audio, on the meta device, from its real config."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

ALL = tuple(sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}))
LACKING = ("chameleon", "deepseek_ocr2", "diffusion_gemma", "emu3", "granite4_vision", "qwen3_omni_moe")
OF_TWO = ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder")
# why types have no model of their default config here, or no small copy that runs on text alone
UNTRIED = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "its tower needs timm"),
    **dict.fromkeys(LACKING, "its default config lacks values"),
    "evolla": "AutoModelForMultimodalLM does not know it",
    **dict.fromkeys(
        ("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2"), "takes no text without images"
    ),
    **dict.fromkeys(("pi0", "voxtral_realtime"), "needs another input than tokens"),
    **dict.fromkeys(OF_TWO, "is an encoder and a decoder"),
    **dict.fromkeys(("muse_spark", "nemo_speechlm", "qwen2_5_omni", "vibevoice_asr"), "its small copy is not small"),
    "inkling_mm_model": "needs scipy",
    "kyutai_speech_to_text": "its padding is outside a small vocabulary",
}
# types that have no batch: none puts features in place of tokens but molmo2, which wants an index of them
NO_BATCH = ("git", "kosmos-2.5", "mistral4", "mllama", "molmo2", "phi4_multimodal", "qwen2_audio")
TYPES = tuple(sorted({*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES} - {*UNTRIED, *NO_BATCH}))

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"text_config.rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]}}
HALF = {"text_config.rope_parameters": {**ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}
HEADS = {"text_config.head_dim": 128}
BOTH = {
    "full_attention": MROPE["text_config.rope_parameters"],
    "sliding_attention": MROPE["text_config.rope_parameters"],
}
INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 256, "budget": 16, "compress_ratio": 4}
SIGLIP = {"vision_config.image_size": 896, "vision_config.patch_size": 14}
TOKEN = {"image_token_id": 50}
ENCODER = {"projector_config.encoder_hidden_size": 1024}
# what default configs lack, or say of other models than their text model
OWN = {
    "aria": {"vision_config.image_size": 980, "vision_config.patch_size": 14},
    "aya_vision": {"vision_config.num_attention_heads": 16},
    "cohere_compass": {"text_config.rope_parameters": BOTH},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**ROPE, "mrope_section": [22, 22, 20]}},
    "gemma3": SIGLIP,
    "glm46v": HALF,
    "glm4v": HALF,
    "glm4v_moe": HALF | HEADS,
    "glm_ocr": HALF | HEADS,
    "glmga": HALF,
    "granite_speech": ENCODER,
    "granite_speech_plus": ENCODER,
    "hunyuan_vl": HEADS | {"text_config.rope_parameters": {**ROPE, "mrope_section": [16] * 4}},
    "janus": {"vision_config.projection_dim": 4096},
    "llama4": {"vision_config.hidden_size": 1408, "vision_config.vision_output_dim": 4096},
    "minicpm_ocr": TOKEN,
    "minicpmv4_6": TOKEN,
    "minicpmv4_7": TOKEN,
    "nemotron_h_omni": TOKEN,
    "ovis2": {"hidden_size": 4096},
    "qwen2_5_omni_thinker": MROPE | {"vision_start_token_id": 151652},
    "qwen2_5_vl": MROPE,
    "qwen2_vl": {**MROPE, "vision_config.hidden_size": 8192},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "qwen4_exp": {f"text_config.indexer_{name}": number for name, number in INDEXER.items()},
    "shieldgemma2": SIGLIP,
    "step3p7": {"text_config.sliding_window": 512},
    "voxtral": {"audio_token_id": 24},
}
TOWERS = {"gemma4": "gemma4_vision", "gemma4_unified": "gemma4_unified_vision"}  # of configs that have none by default
OF_TEXT = ("out_hidden_size", "adapter_out_dim", "output_dim", "text_hidden_size")  # widths that are the text model's


def model_of(model_type):
    """Return a model of this type on the meta device."""
    given = {"vision_config": {"model_type": TOWERS[model_type]}} if model_type in TOWERS else {}
    config = CONFIG_MAPPING[model_type](**given)
    width = config.get_text_config(decoder=True).hidden_size
    for part in [x for x in vars(config).values() if hasattr(x, "to_dict")]:
        vars(part).update({name: width for name in OF_TEXT if isinstance(vars(part).get(name), int)})
    for path, value in OWN.get(model_type, {}).items():
        *parents, name = path.split(".")
        setattr(getattr(config, parents[0]) if parents else config, name, value)
    with torch.device("meta"):
        return AutoModelForMultimodalLM.from_config(config)

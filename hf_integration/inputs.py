"""How ranks share the arguments of transformers' models, by name. Numbers and objects need no declaration."""

from ds_seqpar.data.inputs import INPUTS, joined, refused, replicated, tokens

POSITIONS = "position_ids of the model"  # those of a forward with a cache, which go where tokens go
MEDIA = [
    "pixel_values", "pixel_values_videos", "pixel_values_images", "pixel_values_local", "pixel_mask",
    "pixel_attention_mask", "pixel_position_ids", "images", "image_sizes", "image_grid_thw", "image_grid_hw",
    "image_embeds", "image_embeds_position_mask", "image_attention_mask", "image_hidden_states", "image_position_ids",
    "image_flags", "image_features", "image_num_patches", "videos", "video_grid_thw", "video_embeds",
    "video_features", "video_position_ids", "video_second_per_grid", "second_per_grid_ts", "input_features",
    "input_features_mask", "feature_attention_mask", "audio", "audio_values", "audio_embeds", "audio_features",
    "audio_attention_mask", "audio_feature_lengths", "audio_codes", "input_values", "mm_encoder_outputs",
]  # fmt: skip
TABLE = joined(
    INPUTS,
    dict.fromkeys(("token_type_ids", "mm_token_type_ids", "per_layer_inputs", POSITIONS), tokens()),
    {
        "logits_to_keep": replicated(),
        "cache_position": refused("a patched model counts the tokens of its cache itself; got {}, leave it out"),
    },
    dict.fromkeys(
        MEDIA,
        refused("ranks share sequences of text alone; got {}, leave pictures, films and sounds out of the batch"),
    ),
)

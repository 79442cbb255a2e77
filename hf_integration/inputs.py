"""Specifications of how ranks share each argument of transformers models, by name.

Numbers and plain objects need no entry.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_seqpar.data.inputs import INPUTS, InputSpec, joined, own, refused, replicated, tokens
from ds_seqpar.data.value_checks import INTEGERS


def _of_own_tokens(features: list[Tensor], batch: Mapping[str, Any], held: Tensor) -> list[Tensor]:
    """Return the rows of each feature tensor (media tokens, width) that belong to this rank's media tokens."""
    is_media = batch["visual_pos_masks"].flatten()
    numbers, held = is_media.long().cumsum(0) - 1, held.to(is_media.device)
    mine = numbers[held[is_media[held]]]
    return [x[mine.to(x.device)] for x in features]


# position_ids with media or with a cache, sharded like tokens
POSITIONS = "position_ids of the model"
MEDIA = [
    "pixel_values", "pixel_values_videos", "pixel_values_images", "pixel_values_local", "pixel_mask",
    "pixel_attention_mask", "pixel_position_ids", "images", "image_sizes", "image_grid_thw", "image_grid_hw",
    "image_embeds", "image_embeds_position_mask", "image_attention_mask", "image_hidden_states", "image_position_ids",
    "image_flags", "image_features", "image_num_patches", "videos", "video_grid_thw", "video_embeds",
    "video_features", "video_position_ids", "video_second_per_grid", "second_per_grid_ts", "input_features",
    "input_features_mask", "feature_attention_mask", "audio", "audio_values", "audio_embeds", "audio_features",
    "audio_attention_mask", "audio_feature_lengths", "audio_codes", "input_values", "mm_encoder_outputs",
]  # fmt: skip
# arguments that distinguish media tokens from text tokens
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
TABLE = joined(
    INPUTS,
    dict.fromkeys((*TYPES, "per_layer_inputs", "ple_input_ids", "visual_pos_masks", POSITIONS), tokens()),
    {
        "deepstack_visual_embeds": own(_of_own_tokens),
        "logits_to_keep": replicated(),
        "cache_position": refused("a patched model counts the tokens of its cache itself; got {}, leave it out"),
    },
    dict.fromkeys(
        MEDIA,
        refused(
            "parts of sequences are of text alone; got {}, call the model with the whole batch, the same on all ranks"
        ),
    ),
)


def with_axes(table: Mapping[str, InputSpec], inputs: Mapping[str, Any]) -> Mapping[str, InputSpec]:
    """Return the table of argument specs, adapted to the number of axes of the position_ids."""
    return table if POSITIONS not in inputs else {**table, POSITIONS: tokens(inputs[POSITIONS].dim() - 1)}


def by_row(inputs: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
    """Return checksums of each row of large inputs, for comparison between ranks."""
    found = {name: inputs.get(name) for name in names}
    is_large = {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1}
    return {f"{name} by row": _sums_of_bits(x) for name, x in is_large.items()}


def _sums_of_bits(x: Tensor) -> Tensor:
    """Return the sum of each row's elements, interpreted as integers, in one pass and without a copy."""
    return x.detach().view(INTEGERS[x.dtype.itemsize]).flatten(1).sum(1, dtype=torch.int64)

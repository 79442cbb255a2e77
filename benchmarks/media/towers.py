"""Time a step with large images that ranks divide, compared with a step in which each rank encodes all images.

    python -m benchmarks.media.towers
    python -m benchmarks.media.towers --ranks 2 --images 4 --side 48

A step is forward and backward of a patched Qwen2.5-VL with few layers, in which the vision tower does most of the work.
Steps take turns. All ranks begin together, and the slowest rank's time counts. A ratio is the median over turns, and
the spread covers the middle half. No launcher is needed: ranks are forked with gloo.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks import tables
from benchmarks.turns import in_turns, together
from hf_integration import share_sequences
from tests.launch import on_ranks

MERGE, PATCH, TOKEN = 2, 3 * 2 * 14**2, 100
IDS = {"image_token_id": TOKEN, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
TOWER = {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 64}
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}  # fmt: skip


def main() -> None:
    args = tables.parser(__doc__, ranks=4, images=8, side=32, rounds=5).parse_args()
    seconds = on_ranks(args.ranks, steps, args.images, args.side, args.rounds, timeout=3600)[0]
    tables.head("each rank makes the features", "s", "spread", "of all / these", "spread")
    for name, each in seconds.items():
        ratios = [a / b for a, b in zip(seconds["of all images"], each, strict=True)]
        tables.row(name, *tables.middle(each, 1, ".2f"), *tables.middle(ratios, 1, ".2f"))


def steps(images: int, side: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of step."""
    torch.manual_seed(0)
    plain = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=TOWER, **IDS))
    inputs = batch(images, side)

    def step(model: Qwen2_5_VLForConditionalGeneration) -> None:
        model(**inputs).loss.backward()
        model.zero_grad()

    settings = {"size": dist.get_world_size(), "prove": "never"}
    rows = {}
    for name, divides in {"of all images": False, "of its own images": True}.items():
        model = copy.deepcopy(plain)
        share_sequences(model, divide_media=divides, **settings)
        rows[name] = functools.partial(step, model)
    return in_turns(rows, rounds, together())


def batch(images: int, side: int) -> Mapping[str, Tensor]:
    """Return the inputs for one row with images of side x side patches."""
    places = (side // MERGE) ** 2
    one = torch.tensor([5, 6, 7, IDS["vision_start_token_id"], *[TOKEN] * places, IDS["vision_end_token_id"]])
    ids = one.repeat(images)[None]
    return {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == TOKEN).long(),
        "pixel_values": torch.randn(images * side**2, PATCH),
        "image_grid_thw": torch.tensor([[1, side, side]] * images),
    }


if __name__ == "__main__":
    main()

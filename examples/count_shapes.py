"""Train a small Qwen3-VL to count disks in images. The ranks of a sequence share each row of six images.

    deepspeed --num_gpus 2 examples/count_shapes.py --deepspeed ds_configs/zero2_sp2_dp.json

The script draws its own images, and takes a minute on two CPU ranks. The output consists of two files in
--output_dir: `loss.png`, the loss curve, and `sample.png`, held-out images with the model's counts. The script
accepts all of transformers' TrainingArguments as options.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

if "OMP_NUM_THREADS" not in os.environ:  # before importing torch; otherwise, every rank starts a thread per core
    ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks_here))

import matplotlib
import torch
from PIL import Image, ImageDraw
from transformers import (
    HfArgumentParser,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    TrainingArguments,
    set_seed,
)

from hf_integration import SequenceParallelTrainer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WORDS = ["<pad>", "<image>", "<video>", "<start>", "<end>", "how", "many", "?", ".", "1", "2", "3", "4"]
ID = {word: number for number, word in enumerate(WORDS)}
PATCH, MERGE, CELL = 8, 2, 16  # pixels; patches per token and axis; pixels of a disk's cell, which is a token
PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=PATCH, merge_size=MERGE, temporal_patch_size=1, min_pixels=1, max_pixels=2**20
)
IMAGES = 6  # images in a row
IGNORE = -100


def small_model() -> PreTrainedModel:
    width = {"hidden_size": 64, "intermediate_size": 128}
    vision = {**width, "depth": 2, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 64}
    vision |= {
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": MERGE,
        "deepstack_visual_indexes": [0],
    }
    text = {**width, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text |= {"vocab_size": len(WORDS), "pad_token_id": ID["<pad>"], "rope_parameters": rope}
    tokens = {"image_token_id": ID["<image>"], "video_token_id": ID["<video>"]}
    tokens |= {"vision_start_token_id": ID["<start>"], "vision_end_token_id": ID["<end>"]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **tokens))


def draw(rng: random.Random) -> tuple[Image.Image, int]:
    """Draw an image of one of four sizes. Return (image, number of disks)."""
    image = Image.new("RGB", (rng.choice((3, 4)) * CELL, rng.choice((3, 4)) * CELL))
    cells = [(x, y) for x in range(0, image.width, CELL) for y in range(0, image.height, CELL)]
    chosen = rng.sample(cells, rng.randint(1, 4))
    for x, y in chosen:
        disk = x + 2, y + 2, x + CELL - 3, y + CELL - 3
        ImageDraw.Draw(image).ellipse(disk, fill=rng.choice(("red", "lime", "yellow", "white")))
    return image, len(chosen)


def row(seed: int) -> dict[str, Any]:
    """Return the token ids of several images with questions and answers; only answers have labels."""
    rng = random.Random(seed)
    images, counts = zip(*(draw(rng) for _ in range(IMAGES)), strict=True)
    ids, labels = [], []
    for image, count in zip(images, counts, strict=True):
        places = ["<image>"] * (image.width * image.height // CELL**2)
        question = [ID[word] for word in ("<start>", *places, "<end>", "how", "many", "?")]
        ids += [*question, ID[str(count)], ID["."]]
        labels += [*[IGNORE] * len(question), ID[str(count)], IGNORE]
    return {"input_ids": ids, "labels": labels, "images": images}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows to the maximum length, and concatenate the patches of all images, as the model expects."""
    longest = max(len(one["input_ids"]) for one in rows)
    padded = {
        name: torch.tensor([one[name] + [fill] * (longest - len(one[name])) for one in rows])
        for name, fill in (("input_ids", ID["<pad>"]), ("labels", IGNORE))
    }
    ids = padded["input_ids"]
    masks = {"attention_mask": (ids != ID["<pad>"]).long(), "mm_token_type_ids": (ids == ID["<image>"]).long()}
    images = [image for one in rows for image in one["images"]]
    return {**padded, **masks, **PROCESSOR(images=images, return_tensors="pt")}


def write_results(trainer: SequenceParallelTrainer, sample: dict[str, Any], answers: list[str], folder: Path) -> None:
    curve = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(*zip(*curve, strict=True))
    axes.set(xlabel="step", ylabel="loss of the answers")
    figure.savefig(folder / "loss.png", dpi=150)
    figure, cells = plt.subplots(1, IMAGES, figsize=(9, 2), layout="constrained")
    for axes, image, answer in zip(cells, sample["images"], answers, strict=True):
        axes.imshow(image)
        axes.set(title=f"answer: {answer}", xticks=[], yticks=[])
    figure.savefig(folder / "sample.png", dpi=150)


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="runs/count_shapes", max_steps=150, learning_rate=2e-3, warmup_steps=10, logging_steps=5,
        per_device_train_batch_size=8, report_to="none", save_strategy="no", remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(), lr_scheduler_type="cosine",
    )  # fmt: skip
    (training,) = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    rows = [row(seed) for seed in range(training.max_steps * training.per_device_train_batch_size)]
    trainer = SequenceParallelTrainer(small_model(), training, train_dataset=rows, data_collator=collate)
    trainer.train()
    held_out = [row(-1 - number) for number in range(8)]
    found = trainer.predict(held_out)
    is_answer = found.label_ids[:, 1:] != IGNORE
    said, true = found.predictions[:, :-1].argmax(-1)[is_answer], found.label_ids[:, 1:][is_answer]
    if trainer.is_world_process_zero():
        write_results(trainer, held_out[0], [WORDS[number] for number in said[:IMAGES]], Path(training.output_dir))
        print(f"{(said == true).mean():.0%} of {len(true)} held-out images are counted right")
        print(f"wrote {training.output_dir}")
    trainer.end()


if __name__ == "__main__":
    main()

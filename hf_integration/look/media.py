"""Make image or audio inputs for a small copy, in a form that the copy's forward accepts."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ds_seqpar.data.batches import IGNORE

from .facts import text_config
from .look import tensors_in
from .small import PATCHES, call, parameters_of, tokens_for

Batch = dict[str, Any]
ROWS = ((), (0,), (1, 0))  # the size indices of the images in each row of a batch
PLAIN = 5  # number of text tokens before each image, and minimum number after the last image
# arguments that specify the locations of patches
SIZED = re.compile(r".*grid_(thw|hws?)|(target|.*merge)_sizes|spatial_shapes|.*position_ids")
STRIP = "target_sizes"  # for images whose patches are joined into one strip
GRIDS = (((4, 4), (4, 8)), ((6, 6), (6, 12)), ((8, 8), (8, 16)))  # pairs of image sizes, in rows and columns of patches
WHOLE = ((PATCHES, PATCHES), (PATCHES, PATCHES // 2))
TILES = ((1, 2), (3, 5), (2, 3))  # pairs of numbers of tiles per image
FRAMES = (200, 400, 80)  # the numbers of frames of an audio input


class _Medium(NamedTuple):
    noun: str
    method: str  # the method that computes features
    tokens: tuple[str, str, str]  # config names of the tokens before, at and after features


IMAGES = _Medium(
    "images",
    "get_image_features",
    (
        r"(vision_start|image_start|image_bos|boi)_token_(id|index)|im_start_id",
        r"image_(token|patch)_(id|index)",
        r"(vision_end|image_end|eoi)_token_(id|index)|im_end_id",
    ),
)
AUDIO = _Medium(
    "audio",
    "get_audio_features",
    (r"(audio_start|audio_bos|boa)_token_(id|index)", r"audio_token_(id|index)", r"(audio_end|eoa)_token_(id|index)"),
)


def media_batch(model: PreTrainedModel, rows: Sequence[Sequence[int]] = ROWS) -> tuple[Batch | None, str]:
    """Make inputs with images, or with audio if a model does not encode images.

    Args:
        model: A small copy.
        rows: The size index, 0 or 1, of each image in each row. All images have the same size if the model supports
            only one size.

    Returns:
        (the forward's inputs with labels, ""), or (None, a clause with the reason for failure).
    """
    reasons: list[str] = []
    for medium in (IMAGES, AUDIO):
        owner = next((module for module in reversed([*model.modules()]) if _takes(module, medium)), None)
        tokens = [_token(model.config, names) for names in medium.tokens]
        if owner is None:
            continue
        if tokens[1] is None:
            reasons.append(f"its config names no token that stands for {medium.noun}")
            continue
        first = ""
        for found in _examples(model.config, owner, medium):
            for number in range(len(found), 0, -1):
                try:
                    return _batch(model, owner, medium, found[:number], tokens, rows), ""
                except Exception as error:
                    said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            first = first or said  # the error for one size, with the likeliest kind of input
        reasons.append(f"no {medium.noun} were found that its {medium.method} takes ({first})")
    return None, reasons[0] if reasons else "it has no get_image_features, whose results take the places of tokens"


def padded(model: PreTrainedModel, batch: Batch, left: Collection[int], length: int = 7) -> Batch:
    """Pad a batch by `length` tokens, on the left of the rows in `left` and on the right of all other rows."""
    ids, pad = batch["input_ids"], getattr(text_config(model.config), "pad_token_id", None) or 0

    def longer(x: Tensor, value: int) -> Tensor:
        sides = [(length, 0) if row in left else (0, length) for row in range(len(x))]
        return torch.stack([functional.pad(row, side, value=value) for row, side in zip(x, sides, strict=True)])

    values = {"input_ids": pad, "labels": IGNORE}
    by_token = {name: longer(x, values.get(name, 0)) for name, x in batch.items() if x.shape == ids.shape}
    by_token["labels"][[*left], length] = IGNORE  # padding predicts no token
    return {**batch, **by_token, "attention_mask": longer(torch.ones_like(ids), 0)}


def placeholders(config: PreTrainedConfig) -> list[int]:
    """Return the tokens that features replace, according to a config."""
    names = (IMAGES.tokens[1], r"video_token_(id|index)", AUDIO.tokens[1])
    return [token for token in (_token(config, name) for name in names) if token is not None]


def _takes(module: nn.Module, medium: _Medium) -> bool:
    """Return whether a module computes features with a method that has named inputs."""
    method = getattr(module, medium.method, None)
    return method is not None and "args" not in inspect.signature(method).parameters


def _token(config: PreTrainedConfig, names: str) -> int | None:
    return next((x for name, x in vars(config).items() if re.fullmatch(names, name) and isinstance(x, int)), None)


def _number(config: PreTrainedConfig, names: str, default: int) -> int:
    """Return the first number in a config or its subconfigs whose name matches the pattern."""
    parts = [config, *(x for x in vars(config).values() if isinstance(x, PreTrainedConfig))]
    found = [x for part in parts for name, x in vars(part).items() if x and re.fullmatch(names, name)]
    return next((x[0] if isinstance(x, list | tuple) else x for x in found), default)


def _examples(config: PreTrainedConfig, owner: nn.Module, medium: _Medium) -> Iterator[list[Batch]]:
    """Yield inputs for a method that computes features, with two images of different sizes or one audio input."""
    parameters = inspect.signature(getattr(owner, medium.method)).parameters
    values, *others = [name for name in parameters if name not in ("self", "kwargs")]
    required = [name for name in others if parameters[name].default is inspect.Parameter.empty]
    if medium is AUDIO:
        bins = _number(config, "num_mel_bins|n_mel_bins|input_dim|feature_size", 80)
        bins *= _number(config, "num_stacked_frames", 1)
        masks = [name for name in others if name in required or "mask" in name]
        for frames in (2 * _number(config, "max_source_positions", 50), *FRAMES):
            for dims in ((1, bins, frames), (1, frames, bins)):
                yield [{values: _drawn(dims)} | {name: torch.ones(1, frames).long() for name in masks}]
        return
    patch, channels = _number(config, "patch_size", 16), _number(config, "(in|num)_channels", 3)
    times, merge = _number(config, "temporal_patch_size|patch_temporal", 1), _number(config, ".*merge_size", 2)
    sizes = [name for name in others if SIZED.fullmatch(name)]

    def image(shape: Sequence[int], grid: tuple[int, int]) -> Batch:
        """Return the inputs for an image with the given numbers of rows and columns of patches."""
        known = {
            r".*merge_sizes": torch.tensor([merge]),
            r".*thw": torch.tensor([[1, *grid]]),
            r"image_sizes": torch.tensor([grid]) * patch,
            r".*position_ids": torch.cartesian_prod(*map(torch.arange, grid)).flip(-1)[None],
            r".*mask": torch.ones(*shape[:2], dtype=torch.bool),
            r".*pixel_values": _drawn(shape),
            r".*": torch.tensor([grid]),
        }
        named = {name: next(x for key, x in known.items() if re.fullmatch(key, name)) for name in {*sizes, *required}}
        return {values: _drawn(shape), **named}

    one, pool = channels * patch**2, _number(config, "pooling_kernel_size", 1)
    if sizes:  # patches of all images in one dimension, or in one row per image
        flat: list[tuple[int, ...]] = [
            (-1, times * one),
            (-1, channels, patch, patch),
            (1, -1, one),
            (1, -1, one * pool**2),
            (-1, merge * patch, merge * patch, channels),
        ]
        if STRIP in sizes:
            flat = [(1, channels, patch, -patch)]
        for pair in GRIDS:
            for sides in flat:
                yield [image([x if x > 0 else -x * math.prod(grid) for x in sides], grid) for grid in pair]
        return
    yield [image((1, channels, grid[0] * patch, grid[1] * patch), grid) for grid in WHOLE]
    yield [image((1, PATCHES**2, one), WHOLE[0])]
    for tiles in TILES:
        shapes = [(1, x, channels, PATCHES * patch, PATCHES * patch) for x in tiles]
        yield [image(shape, (PATCHES * x, PATCHES * x)) for x, shape in enumerate(shapes, 1)]


def _drawn(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _batch(
    model: PreTrainedModel,
    owner: nn.Module,
    medium: _Medium,
    examples: list[Batch],
    tokens: list[Any],
    rows: Sequence[Sequence[int]],
) -> Batch:
    """Make inputs, and return the inputs if the model's call with them succeeds."""
    config, forward = model.config, parameters_of(model)
    device = next(model.parameters()).device
    examples = [{name: x.to(device) for name, x in example.items()} for example in examples]
    with torch.no_grad():
        numbers = [_number_of_features(getattr(owner, medium.method)(**example)) for example in examples]
    sizes = [[min(size, len(examples) - 1) for size in row] for row in rows]
    ids = tokens_for(config, len(rows), PLAIN + max(sum(PLAIN + numbers[x] + 2 for x in row) for row in sizes))
    behind = torch.ones_like(ids)
    before, place, after = tokens
    for row, images in enumerate(sizes):
        at = 0
        for size in images:
            new = [x for x in (before, *[place] * numbers[size], after) if x is not None]
            at += PLAIN + len(new)
            ids[row, at - len(new) : at] = torch.tensor(new)
        behind[row, :at] = 0
    stands = torch.eq(ids, place).long()
    # bidirectional tokens, which are image tokens or all tokens before an answer
    prefix = getattr(text_config(config), "use_bidirectional_attention", False)
    types = {
        "mm_token_type_ids": stands,
        "moe_mm_token_type_ids": stands,
        "token_type_ids": behind if prefix else stands,
    }
    batch = {"input_ids": ids, "labels": ids.masked_fill(stands == 1, IGNORE)}
    batch |= {name: x for name, x in types.items() if name in forward}
    chosen = enumerate(examples[size] for row in sizes for size in row)
    different = [{key: x.roll(n, -1) if x.is_floating_point() else x for key, x in each.items()} for n, each in chosen]
    batch = {name: x.to(device) for name, x in batch.items()} | joined(different)
    with torch.no_grad():
        loss = call(model, **batch).loss
    if not loss.isfinite():
        raise ValueError(f"the loss is {float(loss)}")
    return batch


def _number_of_features(found: Any) -> int:
    """Return the number of tokens that a method's results replace."""
    pooled = getattr(found, "pooler_output", None)
    features = tensors_in(getattr(found, "last_hidden_state", found) if pooled is None else pooled)
    return sum(x[..., 0].numel() for x in features)


def joined(images: Sequence[Batch]) -> Batch:
    """Join images, or the images of several batches, into one batch.

    Images are padded to the largest size or concatenated into one strip of patches.
    """
    whole: Batch = {}
    for name in (names := dict.fromkeys(name for image in images for name in image)):
        given: list[Any] = [image[name] for image in images if name in image]
        if isinstance(given[0], list):
            whole[name] = list(itertools.chain(*given))
            continue
        if STRIP in names and name != STRIP:
            whole[name] = torch.cat(given, dim=-1)
            continue
        most = [max(sizes) for sizes in zip(*(x.shape[1:] for x in given), strict=True)]
        fill = -1 if "position" in name else 0
        pads = [[y for size, to in zip(x.shape[:0:-1], most[::-1], strict=True) for y in (0, to - size)] for x in given]
        whole[name] = torch.cat([functional.pad(x, pad, value=fill) for x, pad in zip(given, pads, strict=True)])
    return whole

"""Processors of small copies of models with images, made of their configs without a hub."""

import functools

from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
)

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def tokenizer_of(config, **special):
    """Return a tokenizer whose words are the numbers of tokens, but for these: name -> (word, number)."""
    numbers = {number: word for word, number in special.values()}
    words = {numbers.get(i, f"{i}"): i for i in range(config.get_text_config().vocab_size)}
    by_word = Tokenizer(WordLevel(words, unk_token="1"))
    by_word.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_word,
        pad_token="0",
        eos_token="2",
        padding_side="left",  # as trl wants prompts
        extra_special_tokens={name: word for name, (word, _) in special.items()},
    )


def without_videos(kind):
    """Return a processor's class that wants no processor of videos, which would need torchvision."""
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})


def _square(side):
    return {"size": {"height": side, "width": side}}


def _llava(config):
    vision = config.vision_config
    return LlavaProcessor(
        CLIPImageProcessorPil(**_square(vision.image_size), do_center_crop=False),
        tokenizer_of(config, image_token=("<image>", config.image_token_id)),
        patch_size=vision.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )


def _qwen(kind, config):
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image_pad": "image", "video_pad": "video"}
    special = {key: (f"<|{key}|>", getattr(config, f"{name}_token_id")) for key, name in names.items()}
    vision = config.vision_config
    return without_videos(kind)(
        Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            size={"shortest_edge": 1, "longest_edge": 2**20},
        ),
        tokenizer_of(config, **special),
        None,
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )


def _gemma3(config):
    special = {"boi_token": ("<boi>", config.boi_token_index), "eoi_token": ("<eoi>", config.eoi_token_index)}
    special["image_token"] = "<soft>", config.image_token_id
    return Gemma3Processor(
        Gemma3ImageProcessorPil(**_square(config.vision_config.image_size)),
        tokenizer_of(config, **special),
        image_seq_length=config.mm_tokens_per_image,
        chat_template=TEMPLATE.replace("IMAGE", "<boi>"),
    )


def _idefics3(config):
    vision = config.vision_config
    special = {"image_token": ("<image>", config.image_token_id)}
    others = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    special |= {word.strip("<>").replace("-", "_"): (word, 80 + i) for i, word in enumerate(others)}
    return Idefics3Processor(
        Idefics3ImageProcessorPil(
            do_image_splitting=False,
            size={"longest_edge": vision.image_size},
            max_image_size={"longest_edge": vision.image_size},
        ),
        tokenizer_of(config, **special),
        image_seq_len=(vision.image_size // vision.patch_size // config.scale_factor) ** 2,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )


def _internvl(config):
    words = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    special = {name: (word, 80 + i) for i, (name, word) in enumerate(words.items())}
    special["context_image_token"] = "<context>", config.image_token_id
    (side, _), (patch, _) = config.vision_config.image_size, config.vision_config.patch_size
    return without_videos(InternVLProcessor)(
        GotOcr2ImageProcessorPil(**_square(side), max_patches=3),
        tokenizer_of(config, **special),
        None,
        image_seq_length=int((side // patch * config.downsample_ratio) ** 2),
        chat_template=TEMPLATE.replace("IMAGE", "<context>"),
    )


# type -> a processor of its small copy. In one dimension all patches; images; with types of tokens; in rows that are
# padded; tiles
PROCESSORS = {
    "qwen2_5_vl": functools.partial(_qwen, Qwen2_5_VLProcessor),
    "qwen3_vl": functools.partial(_qwen, Qwen3VLProcessor),
    "llava": _llava,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
}


def drawn(number):
    """Return an image of four colors, high or wide."""
    image = Image.new("RGB", (2, 2))
    for at in range(4):
        image.putpixel((at % 2, at // 2), tuple((37 * number + 59 * at + 83 * color) % 256 for color in range(3)))
    return image.resize((64, 64) if number % 3 else (128, 64), Image.Resampling.NEAREST)

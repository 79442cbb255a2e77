"""The sizes that the planner counts with are the model's: of any decoder whose layers attend, and of its tower."""

import dataclasses
import functools

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.planner.estimate import estimate, tower_seconds
from ds_seqpar.planner.footprint import footprint
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import Images, Index, Job
from hf_integration.look.sizes import config_sizes, model_sizes
from hf_integration.trainer.job import job_of
from tests.hf.every_type import config_of

# Qwen2.5-VL-7B
TEXT = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_hidden_layers": 28, "vocab_size": 152064}  # fmt: skip
VISION = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 128}  # fmt: skip
IMAGES = Images(32, 4096, 4 * 4096)


def elements(*modules):
    return sum(x.numel() for module in modules for x in module.parameters())


def on_meta(config, make=AutoModelForCausalLM):
    with torch.device("meta"):
        return make.from_config(config)


# plain attention under names of their own, with and without a gate
@pytest.mark.parametrize(
    "model_type", ["gpt2", "opt", "gpt_neox", "phi", "starcoder2", "bert", "ctrl", "llama", "phi3"]
)
def test_matrices_are_counted_under_any_names(model_type):
    model = on_meta(config_of(model_type))
    found, config = model_sizes(model), model.config
    layers = [x for name, x in model.named_parameters() if ".0." in name or ".1." in name]
    assert found.weights == sum(x.numel() for x in layers if x.dim() == 2)
    assert found.parameters == elements(model)
    assert (found.hidden, found.heads, found.layers) == (config.hidden_size, config.num_attention_heads, 2)
    assert (found.tower, found.gathers) == (None, False)


def test_attention_of_its_own_is_said_not_to_be_counted():
    assert "gather" in config_sizes(config_of("bloom")).not_counted[0]


def test_an_index_is_priced_by_what_it_gathers_scores_and_picks():
    """By hand for DeepSeek V3.2: of a layer at 128K tokens 0.14 PFLOP of scores and 0.08 of attention; 176 MiB come."""
    model, size, seq = config_sizes(CONFIG_MAPPING["deepseek_v32"](num_hidden_layers=4)), 8, 2**17
    assert model.index == Index(layers=4, own=4, latent=576, keys=128, heads=64, picks=2048)
    assert (model.dense, model.not_counted) == (0, [])
    config = SequenceParallelConfig(size=size, ulysses=1).resolve(size)
    step = Job(model=model, seq=seq).step(config, size, on_gpu=True)
    machine = dataclasses.replace(Machine.load("h100-ib"), attention={"bfloat16": 1e15}, matrices={"bfloat16": 1e24})
    found = estimate(step, machine)
    assert found.forward.inside == 7 * seq // 8 * (576 + 128) * 2
    assert found.backward.inside == 7 * seq // 8 * 576 * 2
    sent = 4 * (found.forward.seconds + found.backward.seconds)
    assert (found.seconds - sent) * size / 4 == pytest.approx(0.14 + 4 * 0.079, rel=0.02)  # backward computes 3 times
    parts = {moment.name: moment.bytes_by_item for moment in footprint(step).moments}
    latents, scores = seq * (576 + 128) * 2, seq // 8 * 2**16 * 4
    assert parts["forward: attention"]["attention"] < 3 * (latents + scores)
    assert "gather" in config_sizes(config_of("deepseek_v4")).not_counted[-1]


@pytest.mark.parametrize("model_type", ["t5", "vit", "rwkv", "hrm_text"])
def test_what_cannot_be_counted_is_refused_with_its_reason(model_type):
    config = CONFIG_MAPPING[model_type]() if model_type in ("t5", "vit") else config_of(model_type)
    with pytest.raises(ConfigError, match=f"decoders whose layers attend; got '{model_type}'"):
        config_sizes(config)


def test_a_job_without_a_model_says_why():
    found = job_of(on_meta(config_of("rwkv")), Job())
    assert found.model is None
    assert "'rwkv'" in found.uncounted


# type -> the modules that are no part of the text
TOWERS = {
    "gemma3": ("vision_tower", "multi_modal_projector"),
    "internvl": ("vision_tower", "multi_modal_projector"),
    "llava": ("vision_tower", "multi_modal_projector"),
    "qwen2_5_vl": ("visual",),
    "qwen3_vl": ("visual",),
    "voxtral": ("audio_tower", "multi_modal_projector"),
}


@pytest.mark.parametrize("model_type", TOWERS)
def test_parameters_of_a_tower_are_counted_exactly(model_type):
    config = CONFIG_MAPPING[model_type]()
    model = on_meta(config, AutoModelForMultimodalLM if model_type == "voxtral" else AutoModelForImageTextToText)
    found = config_sizes(config)
    assert found.parameters == elements(model)
    assert found.tower.layers.parameters == elements(*(getattr(model.model, name) for name in TOWERS[model_type]))
    assert found.layers == len(model.model.language_model.layers)
    width = getattr(config, "vision_config", None) or config.audio_config
    assert (found.tower.layers.hidden, found.tower.layers.intermediate) == (width.hidden_size, width.intermediate_size)


@functools.cache
def qwen():
    return config_sizes(CONFIG_MAPPING["qwen2_5_vl"](text_config=TEXT, vision_config=VISION))


def step_of(divides, size=8):
    config = SequenceParallelConfig(size=size, divide_media=divides).resolve(size, (28, 4))
    return Job(model=qwen(), seq=2**17, checkpointing=True, images=IMAGES).step(config, size, on_gpu=True)


def test_an_undivided_tower_is_half_of_a_step_of_qwen():
    machine = Machine.load("h100-ib")
    layers = qwen().tower.layers
    assert layers.weights == pytest.approx(0.63e9, rel=0.01)  # 5.0 GFLOP forward for the 4 patches of a token
    divided, undivided = (tower_seconds(step_of(divides), machine) for divides in ("auto", False))
    assert undivided / estimate(step_of(False), machine).seconds == pytest.approx(0.51, abs=0.02)
    assert divided == pytest.approx(undivided / 8, rel=0.05)  # and features that are sent
    alone = step_of(False, 1)
    assert tower_seconds(alone, machine) / estimate(alone, machine).seconds == pytest.approx(0.115, abs=0.01)


def test_checkpoints_of_a_tower_are_the_inputs_of_its_layers():
    def items(step):
        return {moment.name: moment.bytes_by_item for moment in footprint(step).moments}["forward: MLP"]["tower"]

    whole = 2**17 * 3584 * 2  # embeddings of all tokens
    for divides, of_rank in (("auto", 4), (False, 32)):
        inputs = of_rank * IMAGES.patches * 1280 * 2
        assert items(step_of(divides)) == pytest.approx(whole + (32 + 6) * inputs, rel=0.01)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_what_waits_for_a_towers_backward_is_what_autograd_saves(checkpointing):
    vision = {"depth": 8, "hidden_size": 640, "intermediate_size": 1710, "num_heads": 8, "out_hidden_size": 64}
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=SMALL, vision_config={**vision, "fullatt_block_indexes": [3, 7]})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights, saved = {x.untyped_storage()._cdata for x in model.parameters()}, {}

    def save(x):
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        features = model.model.get_image_features(torch.randn(512, 1176).bfloat16(), torch.tensor([[1, 16, 16]] * 2))
    found = sum(storage.nbytes() for at, storage in saved.items() if at not in weights)
    job = Job(model=model_sizes(model), seq=512, checkpointing=checkpointing, images=Images(2, 64, 256))
    parts = footprint(job.step(SequenceParallelConfig(size=2, divide_media=False).resolve(2, (8, 4)), 2, False)).moments
    predicted = next(x for x in parts if x.name == "backward: loss").bytes_by_item["tower"]
    assert predicted == pytest.approx(found, rel=0.15)
    del features

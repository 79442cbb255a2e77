"""Models with layers that have a state, and with latent attention: loss, logits and all gradients are those of the
plain model, in fp64 to 1e-9; of packs those of each document by itself, as plain models leak between documents."""

import pytest

from tests.hf.conformance import CALLS, EXACT, KINDS, outcomes
from tests.hf.in_fp64 import tiny_fp64

pytestmark = pytest.mark.usefixtures("compiled")
# those of each function that transformers' files call for a state, and a convolution alone
SEAMS = ("qwen3_next", "bamba", "minimax", "lfm2")
STATES = (
    *SEAMS, "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1",
    "zamba2", "mamba2", "lfm2_moe",
)  # fmt: skip
LATENTS = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3", "longcat_flash", "mistral4", "youtu")
# (ranks, Ulysses ranks, way)
PASSED = ((2, 1, "states"), (4, 2, "heads"), (2, 2, "heads"), (4, 2, "states"), (4, 4, "heads"))
TRAVELED = ((2, 1, "latent"), (2, 2, "expanded"), (4, 2, "latent"), (4, 2, "expanded"), (4, 4, "latent"))
FEW = ("left", "packed")


def section(size, ulysses, way):
    setting = "recurrent_layers" if way in ("states", "heads") else "latent_attention"
    return {"size": size, "ulysses": ulysses, setting: way, "prove": "never"}


def assert_exact(types, way, kinds=KINDS, calls=CALLS):
    found = outcomes(types, way[0], kinds, build=tiny_fp64, section=section(*way), calls=calls)
    assert {name: wrong for name in types if (wrong := [x for x in found[name].items() if x[1] != EXACT])} == {}


@pytest.mark.parametrize("way", PASSED[:2], ids=str)
def test_a_model_of_each_function_with_a_state(way):
    assert_exact(SEAMS, way, FEW, CALLS[:1])


@pytest.mark.parametrize("way", [TRAVELED[0], TRAVELED[2]], ids=str)
def test_a_model_with_latents(way):
    assert_exact(LATENTS[:1], way, FEW, CALLS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("types", [STATES[:7], STATES[7:]], ids="-".join)
@pytest.mark.parametrize("way", PASSED[:4], ids=str)
def test_every_model_with_a_state(types, way):
    assert_exact(types, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", TRAVELED, ids=str)
def test_every_model_with_latents(way):
    assert_exact(LATENTS, way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "way"),
    [
        (SEAMS, PASSED[4]),
        (SEAMS, (8, 2, "heads")),
        (SEAMS, (8, 1, "states")),
        (LATENTS[:2], (8, 2, "latent")),
        (LATENTS[:1], (8, 8, "latent")),
    ],
    ids=str,
)
def test_on_more_ranks(types, way):
    assert_exact(types, way, FEW, CALLS[1:])

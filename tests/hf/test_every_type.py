"""Every causal type of transformers, tiny: exact on several ranks, or refused in a sentence on each of them; and the
table of the docs says which."""

import pytest
import transformers

from docs.model_types import PAGE, TOGETHER, cells, cells_of, version_of
from hf_integration import patch_attention
from tests.grids import each_then_rest
from tests.hf.conformance import KINDS, outcomes
from tests.hf.every_type import TYPES, UNBUILT, features

pytestmark = pytest.mark.usefixtures("compiled")
TRIED = [name for name in TYPES if name not in UNBUILT]
TOLD = ("exact", "refused", "plain")  # how an outcome may begin
# what differs between types, once: experts and the name of their balance, windows in the mask alone, positions that
# are learned or begin at 1, latents, a nested config, heads and head sizes by layer, keys of another layer, chunks,
# keywords that get lost; and what must be refused: recurrence, attention of its own, an index, labels that stay
FEW = (
    "qwen2_moe", "jetmoe", "roberta", "opt", "deepseek_v3", "gemma3", "gemma4_text", "laguna", "llama4_text",
    "nemotron", "mamba", "falcon", "deepseek_v32", "bart", "zaya",
)  # fmt: skip
TABLE = cells_of(PAGE.read_text(encoding="utf-8"))
SHARED = [name for name in TRIED if all(TABLE.get(name, {"": False}).values())]
EACH_SET = {str(features(name)): name for name in SHARED}.values()  # a type of each set of features
ON_FOUR = list(dict.fromkeys([*(name for name in FEW if name in SHARED), *EACH_SET, *SHARED[::3]]))[:30]


def told(types, kinds, world):
    """Compare with the table what these types do in batches of these kinds."""
    found = outcomes(types, world, kinds)
    assert found.keys() == {*types}
    for name, cases in found.items():
        assert {case: words for case, words in cases.items() if not words.startswith(TOLD)} == {}, name
        now = cells(cases, kinds)
        assert now == {column: TABLE[name][column] for column in now}, (name, cases)


def groups(types):
    return [types[start : start + TOGETHER] for start in range(0, len(types), TOGETHER)]


def meddled(model, sp):
    """A patch that changes a model, or breaks."""
    if model.config.model_type == "mistral":
        raise KeyError("planted")
    if model.config.model_type == "qwen2":
        patch_attention(model, sp)
        model.lm_head.weight.data *= 1.01


def test_the_comparison_tells_what_is_wrong_and_what_crashes():
    found = outcomes(["mistral", "qwen2"], kinds=("plain",), patch=meddled)
    assert all(words.startswith("wrong: loss by ") for words in found["qwen2"].values())
    assert all(words.startswith("crash: KeyError: 'planted'") for words in found["mistral"].values())


# what makes wrong what one kind of batch shows and another not
@pytest.mark.parametrize("kinds", each_then_rest([("packed",)], [("left",), ("plain", "right")]), ids="-".join)
def test_a_type_of_each_kind_does_what_the_table_says(kinds):
    told(FEW, kinds, 2)


@pytest.mark.slow
@pytest.mark.parametrize("types", groups([name for name in TRIED if name not in FEW]), ids="-".join)
def test_every_type_does_what_the_table_says(types):
    told(types, KINDS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("types", groups(ON_FOUR), ids="-".join)
def test_it_does_so_on_four_ranks(types):
    told(types, KINDS, 4)


def test_the_table_is_of_this_transformers():
    """Else: python docs/model_types.py"""
    assert (version_of(PAGE.read_text(encoding="utf-8")), sorted(TABLE)) == (transformers.__version__, sorted(TYPES))

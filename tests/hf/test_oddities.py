"""Models of one's own with an oddity: refused on every rank before they train, each in a sentence that names it. Those
that are right are exact."""

import pytest
import torch

from tests.dist.ranks import refusal
from tests.grids import each_then_rest
from tests.hf.conformance import outcomes
from tests.hf.families import SEQ, batch_of
from tests.hf.oddities import ODDITIES, OddLlama, build

pytestmark = pytest.mark.usefixtures("compiled")
TRAINED = ("plain", "packed")
LEFT = ("Dropout",)  # to the check of the config


def names(*outcomes):
    return [name for name, oddity in ODDITIES.items() if oddity.outcome in outcomes]


def observed(name):
    """(logits, loss) of a padded batch, a plain one, a packed one, and of one whose positions are far apart."""
    model, plain = build(name), batch_of("odd")
    far = {"attention_mask": torch.ones(2, SEQ), "position_ids": 2 * torch.arange(SEQ)[None]}
    with torch.no_grad():
        outputs = [model(**batch) for batch in (batch_of("right"), plain, batch_of("packed"), {**plain, **far})]
    return [x for output in outputs for x in (output.logits, output.loss)]


def test_each_oddity_shows_in_the_model_by_itself():
    plain = {name: observed(name) for name in ("Plain", "PlainLlama")}
    for name in ODDITIES.keys() - plain:
        base = plain["PlainLlama" if isinstance(build(name), OddLlama) else "Plain"]
        assert max((a - b).abs().max().item() for a, b in zip(observed(name), base, strict=True)) > 1e-3, name


def groups(names, size=13):
    return [names[start : start + size] for start in range(0, len(names), size)]


FEW = ["Convolution", "PreviousToken", "LooksAhead", "Twice", "MixedKeys", "hook_of_instance", "AbsolutePositions"]
RIGHT = [["Sinks", "NarrowValues", "NoPositionsInOneLayer"]], [names("exact")]
ODD = [FEW, *groups([name for name in names("refused") if name not in FEW])]


@pytest.mark.parametrize("names", each_then_rest(ODD[:1], ODD[1:]), ids=lambda names: names[0])
def test_what_would_train_wrong_is_refused_on_every_rank(names):
    for name, cases in outcomes(names, kinds=TRAINED, build=build).items():
        place = ODDITIES[name].place
        assert all(words.startswith("refused") and place in words for words in cases.values()), (name, cases)


@pytest.mark.slow
def test_what_may_be_right_is_exact_or_refused():
    """In plain batches: of packs nobody knows what such a loss should be."""
    for name, cases in outcomes(names("either"), kinds=("plain",), build=build).items():
        assert all(words.startswith(("refused", "exact")) for words in cases.values()), (name, cases)


@pytest.mark.parametrize("names", each_then_rest(*RIGHT), ids=lambda names: names[0])
def test_what_is_right_is_exact(names):
    for name, cases in outcomes(names, kinds=TRAINED, build=build).items():
        assert {*cases.values()} == {"exact"}, (name, cases)


def test_the_look_has_no_false_alarm_and_names_what_it_finds():
    from hf_integration.look.look import look

    for name, oddity in ODDITIES.items():
        refused, words = refusal(look, build(name))
        assert refused == "ConfigError" or oddity.outcome != "refused" or name in LEFT, name
        assert refused is None or (oddity.outcome != "exact" and oddity.place in words), (name, words)

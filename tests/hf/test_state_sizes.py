"""What the planner takes from a model with layers that have a state is what these layers give to the engine."""

import math

import pytest
import torch

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.planner.footprint import footprint
from ds_seqpar.planner.request import TrainingStep
from hf_integration import mixers
from hf_integration.look.sizes import model_sizes
from tests.hf.every_type import tiny

# type -> (layers, of them those that attend, that have a state or a convolution, that have an MLP)
LAYERS = {
    "bailing_hybrid": (3, 1, 2, 3),
    "bamba": (2, 1, 1, 2),
    "falcon_h1": (2, 2, 2, 2),
    "granitemoehybrid": (2, 1, 1, 2),
    "kimi_linear": (3, 1, 2, 3),
    "lfm2": (2, 1, 1, 2),
    "lfm2_moe": (2, 1, 1, 2),
    "lfm3": (3, 2, 1, 3),
    "mamba2": (2, 0, 2, 0),
    "minimax": (2, 1, 1, 2),
    "nemotron_h": (4, 1, 1, 2),
    "olmo_hybrid": (2, 1, 1, 2),
    "qwen3_5_moe_text": (2, 1, 1, 2),
    "qwen3_5_text": (2, 1, 1, 2),
    "qwen3_next": (2, 1, 1, 2),
    "zamba2": (2, 1, 2, 1),
}


class Recorder:
    """Runs layers on the whole sequence, and keeps what they are given."""

    def __init__(self):
        self.recurrences, self.convs = [], []

    def recurrence(self, function, tokens, parameters, cell):
        self.recurrences.append((tokens, cell))
        return function(tokens, parameters, False).out

    def conv(self, function, x, kernel_size):
        self.convs.append(x)
        return function(x)


@pytest.mark.parametrize("model_type", LAYERS)
def test_sizes_are_those_that_layers_run_with(model_type):
    model, recorder = tiny(model_type), Recorder()
    sizes = model_sizes(model)
    states = sizes.states
    assert (sizes.layers, sizes.attending, states.count, sizes.with_mlp) == LAYERS[model_type]
    found = [module for module in model.modules() if mixers.is_mixer(module)]
    assert len(found) == states.count
    for module in found:
        module.forward = mixers.with_engine(module, lambda keywords: recorder)
    with torch.no_grad():
        model(torch.arange(12)[None])
    assert len(recorder.recurrences) == (0 if model_type.startswith("lfm") else states.count)
    for (values, *others), cell in recorder.recurrences:
        given = values.shape[2], cell.keys, math.prod(cell.transition)
        assert given == (states.heads, states.keys, states.transition)
        assert numbers(values, others, cell) == states.exchanged
    for module in found:
        linears = [x for x in module.modules() if isinstance(x, torch.nn.Linear)]
        assert states.weights == sum(x.weight.numel() for x in linears)


def numbers(values, others, cell):
    """The numbers of a token that are exchanged, the output's included."""
    return sum(x.shape[2:].numel() for x in (values, *others)) + values.shape[2] * cell.values


@pytest.mark.parametrize("model_type", ["mamba", "jamba", "recurrent_gemma"])
def test_other_layers_are_refused(model_type):
    with pytest.raises(ConfigError, match="the planner knows attention, delta rules"):
        model_sizes(tiny(model_type))


def test_layers_without_a_state_are_counted_as_before():
    sizes = model_sizes(tiny("qwen3"))
    assert (sizes.states, sizes.attending, sizes.with_mlp) == (None, sizes.layers, sizes.layers)
    assert sizes.not_counted == []


def test_moments_are_those_of_layers_that_there_are():
    config = SequenceParallelConfig(size=4, ulysses=1, schedule="ring").resolve(4)
    step = TrainingStep(model=model_sizes(tiny("mamba2")), config=config, world=4, seq=64)
    names = [moment.name for moment in footprint(step).moments]
    assert any("state" in name for name in names)
    assert not any("attention" in name or "MLP" in name for name in names)

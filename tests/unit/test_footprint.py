"""The memory of a training step by arithmetic: small numbers that a hand can check."""

import dataclasses

import pytest

from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.deepspeed_json import Zero
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.footprint import bytes_a_token, footprint
from ds_seqpar.planner.request import Model, Step

# hidden 8, 4 query heads of 2, 2 of k and v
MODEL = Model(
    hidden=8, intermediate=16, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=32,
    parameters=2048, layer_parameters=512,
)  # fmt: skip
NONE = {"reduce_bucket_size": 0, "prefetch_bucket_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}


def _step(settings=None, model=MODEL, world=4, stage=3, **more):
    config = SequenceParallelConfig(**{"size": 4, "ulysses": 1, "schedule": "ring", **(settings or {})})
    resolved = config.resolve(world, (model.heads, model.kv_heads))
    given = {"seq": 64, "dtype": "float32", "zero": Zero(stage=stage, **NONE), **more}
    return Step(model=model, config=resolved, world=world, **given)


def _moments(step):
    return {moment.name: moment for moment in footprint(step).moments}


# bytes of 2048 parameters on one of 4 ranks, by hand: (parameters with fp32 copies, gradients, optimiser)
RESTING = {
    (0, "float32"): (4 * 2048, 0, 8 * 2048),
    (1, "float32"): (4 * 2048 + 2048, 0, 2 * 2048),
    (2, "bfloat16"): (2 * 2048 + 2048, 0, 2 * 2048),
    (3, "float32"): (2048 + 2048, 2048, 2 * 2048),
    (3, "bfloat16"): (2048 // 2 + 2048, 2048 // 2, 2 * 2048),
}


@pytest.mark.parametrize(("stage", "dtype"), RESTING)
def test_states_are_shared_as_the_stage_says(stage, dtype):
    found = footprint(_step(stage=stage, dtype=dtype)).resting.parts
    parts = tuple(found.get(name, 0) for name in ("parameters", "gradients", "optimiser"))
    assert parts == RESTING[stage, dtype]


def test_data_parallel_ranks_share_states_too():
    halves, whole = (footprint(_step(world=world)).resting.total for world in (8, 4))
    assert 2 * halves == whole


def test_a_bucket_is_there_between_steps_of_zero_3_and_in_backward_of_the_others():
    for stage in (1, 2, 3):
        step = _step(stage=stage, zero=Zero(**{**NONE, "stage": stage, "reduce_bucket_size": 100}))
        assert footprint(step).resting.parts.get("buckets", 0) == (400 if stage == 3 else 0)
        assert _moments(step)["backward: loss"].parts["buckets"] == 400


def test_checkpoints_are_the_inputs_of_layers_and_what_attention_keeps():
    """16 tokens a rank: a hidden state is 16 * 8 * 4 bytes, so is out; lse 16 * 4 * 4; cos and sin 2 * 16 * 2 * 4."""
    parts = _moments(_step())["backward: loss"].parts
    assert parts["checkpoints"] == 3 * 512 + 256
    assert parts["kept attention"] == 3 * (512 + 256)
    assert "kept attention" not in _moments(_step({"keep_attention": False}))["backward: loss"].parts


def test_with_ulysses_a_checkpoint_keeps_the_inner_q_k_and_v():
    """2 members: 32 tokens of half the heads, as many bytes as the own q, k and v, 512 + 512."""
    parts = _moments(_step({"ulysses": 2}))["backward: loss"].parts
    assert parts["kept attention"] == 3 * (512 + 256 + 1024)


def test_offloaded_checkpoints_are_in_host_memory():
    found = footprint(_step({"offload_checkpoints": True}))
    assert found.host == 3 * (512 + 512 + 256)
    assert "kept attention" not in found.peak.parts


def test_without_checkpoints_layers_keep_what_they_save():
    """Of a layer, in hidden states of 512 bytes: its input and the middle residual, two norms of 2, q, k and v of 2,
    out, lse of a half, and gate, up, their product and silu(gate) of 2 each."""
    parts = _moments(_step(checkpointing=False))["backward: loss"].parts
    assert parts["checkpoints"] == 3 * 512 * (2 + 4 + 2 + 1 + 8) + 3 * 256 + 256


def test_logits_are_there_three_times_or_those_of_a_tile():
    """16 tokens, 32 words, 4 bytes: a softmax, its gradient and that of the logits. Those of a tile in forward, but in
    fp16."""
    places = {1: "backward: loss", 4: "forward: loss"}
    parts = [_moments(_step({"loss_tiles": tiles}))[place].parts["loss"] for tiles, place in places.items()]
    assert "backward: loss" in _moments(_step({"loss_tiles": 4}, dtype="float16"))
    assert parts == [3 * 16 * 32 * 4, 3 * 4 * 32 * 4]


def test_a_tile_of_the_mlp_is_six_of_its_intermediates():
    """With tiles, the gradient of its input beside them."""
    parts = [_moments(_step({"mlp_tiles": tiles}))["backward: layer 3, MLP"].parts["mlp"] for tiles in (1, 4)]
    assert parts == [6 * 16 * 16 * 4, 6 * 16 * 16 * 4 // 4 + 512]


def test_zero_3_gathers_a_layer_and_what_it_may_keep():
    parts = _moments(_step())["backward: layer 3, MLP"].parts
    assert parts["gathered"] == 512 * 4  # nothing more may live
    free = {**NONE, "stage": 3, "max_live_parameters": 10**6, "max_reuse_distance": 10**6}
    parts = _moments(_step(zero=Zero(**free)))["backward: layer 3, MLP"].parts
    assert parts["gathered"] == 2048 * 4  # the whole model
    assert "gathered" not in _moments(_step(stage=2))["backward: layer 3, MLP"].parts


def test_tied_weights_wait_for_the_gradient_of_the_other_end():
    tied = dataclasses.replace(MODEL, tied=True)
    for name in ("backward: layer 3, attention", "backward: layer 1, attention"):
        parts = [_moments(_step(model=model))[name].parts["gradients"] for model in (MODEL, tied)]
        assert parts[1] - parts[0] == 32 * 8 * 4


def test_more_stages_of_heads_take_less():
    taken = [_moments(_step({"head_stages": n}))["backward: layer 3, attention"].parts["attention"] for n in (1, 2)]
    assert taken[1] < taken[0]


def test_a_length_that_ranks_cannot_share_equally_is_that_of_the_padded_sequence():
    assert footprint(_step(seq=63)) == footprint(_step(seq=64))


def test_what_a_token_adds_is_the_slope():
    step = _step(seq=4096)
    more = [footprint(dataclasses.replace(step, seq=n)).peak.total for n in (4096, 8192)]
    assert bytes_a_token(step) == (more[1] - more[0]) / 1024


def test_zero_settings_are_read_as_deepspeed_writes_them():
    section = {
        "stage": 3,
        "stage3_max_live_parameters": 1e3,
        "reduce_bucket_size": 7,
        "stage3_prefetch_bucket_size": "auto",
    }
    assert Zero.of(section) == Zero(stage=3, max_live_parameters=1000, reduce_bucket_size=7)
    with pytest.raises(ConfigError, match=r"reduce_bucket_size.*many"):
        Zero.of({"reduce_bucket_size": "many"})

"""The memory of a training step by arithmetic: small numbers that a hand can check."""

import dataclasses

import pytest

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import DeepSpeedJson, Offload, Zero
from ds_seqpar.planner.estimate import estimate
from ds_seqpar.planner.footprint import bytes_a_token, cache_bytes, fits, footprint, longest
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import MemoryBudget, Model, StateLayers, TrainingStep
from ds_seqpar.planner.state_memory import state_bytes

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
    return TrainingStep(model=model, config=resolved, world=world, **given)


def _moments(step):
    return {moment.name: moment for moment in footprint(step).moments}


# bytes of 2048 parameters on one of 4 ranks, by hand: (parameters with fp32 copies, gradients, optimizer)
RESTING = {
    (0, "float32"): (4 * 2048, 0, 8 * 2048),
    (0, "bfloat16"): (2 * 2048 + 4 * 2048, 0, 8 * 2048),
    (1, "float32"): (4 * 2048 + 2048, 0, 2 * 2048),
    (2, "bfloat16"): (2 * 2048 + 2048, 0, 2 * 2048),
    (3, "float32"): (2048 + 2048, 2048, 2 * 2048),
    (3, "bfloat16"): (2048 // 2 + 2048, 2048 // 2, 2 * 2048),
}


@pytest.mark.parametrize(("stage", "dtype"), RESTING)
def test_states_are_shared_as_the_stage_says(stage, dtype):
    found = footprint(_step(stage=stage, dtype=dtype)).resting.bytes_by_item
    parts = tuple(found.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    assert parts == RESTING[stage, dtype]


# type and momentum of the JSON's optimizer -> tensors that it keeps of each parameter
OPTIMIZERS = {("SGD", None): 0, ("sgd", 0): 0, ("SGD", 0.9): 1, ("Lion", None): 1, ("AdamW", None): 2, (None, None): 2,
              ("auto", "auto"): 2}  # fmt: skip


@pytest.mark.parametrize("given", OPTIMIZERS)
def test_states_are_those_of_the_optimizer(given):
    params = {} if given[1] is None else {"momentum": given[1]}
    content = {} if given[0] is None else {"optimizer": {"type": given[0], "params": params}}
    states = DeepSpeedJson.read(content).optimizer_states
    assert states == OPTIMIZERS[given]
    found = footprint(_step(stage=2, dtype="bfloat16", optimizer_states=states))
    assert found.resting.bytes_by_item.get("optimizer", 0) == states * 2048
    (step,) = [moment for moment in found.moments if moment.name == "step of the optimizer"]
    assert step.bytes_by_item["optimizer"] == (1 + 2 * states) * 2048


def test_data_parallel_ranks_share_states_too():
    halves, whole = (footprint(_step(world=world)).resting.total for world in (8, 4))
    assert 2 * halves == whole


def test_a_bucket_is_there_between_steps_of_zero_3_and_in_backward_of_the_others():
    for stage in (1, 2, 3):
        step = _step(stage=stage, zero=Zero(**{**NONE, "stage": stage, "reduce_bucket_size": 100}))
        assert footprint(step).resting.bytes_by_item.get("buckets", 0) == (400 if stage == 3 else 0)
        assert _moments(step)["backward: loss"].bytes_by_item["buckets"] == 400


def test_checkpoints_are_the_inputs_of_layers_and_what_attention_keeps():
    """16 tokens a rank: a hidden state is 16 * 8 * 4 bytes, so is out; lse 16 * 4 * 4; cos and sin 2 * 16 * 2 * 4."""
    parts = _moments(_step())["backward: loss"].bytes_by_item
    assert parts["checkpoints"] == 3 * 512 + 256
    assert parts["kept attention"] == 3 * (512 + 256)
    assert "kept attention" not in _moments(_step({"recompute_attention": True}))["backward: loss"].bytes_by_item


def test_with_ulysses_a_checkpoint_keeps_the_inner_q_k_and_v():
    """2 ulysses_size: 32 tokens of half the heads, as many bytes as the own q, k and v, 512 + 512."""
    parts = _moments(_step({"ulysses": 2}))["backward: loss"].bytes_by_item
    assert parts["kept attention"] == 3 * (512 + 256 + 1024)


def test_offloaded_checkpoints_are_in_host_memory():
    found = footprint(_step({"offload_checkpoints": True}))
    assert found.host.bytes_by_item == {"checkpoints": 3 * 512, "kept attention": 3 * (512 + 256)}
    assert "kept attention" not in found.peak.bytes_by_item


def test_without_checkpoints_layers_keep_what_they_save():
    """Of a layer, in hidden states of 512 bytes: its input and the middle residual, two norms of 2, q, k and v of 2,
    out, lse of a half, and gate, up, their product and silu(gate) of 2 each."""
    parts = _moments(_step(checkpointing=False))["backward: loss"].bytes_by_item
    assert parts["checkpoints"] == 3 * 512 * (2 + 4 + 2 + 1 + 8) + 3 * 256 + 256


def test_logits_are_there_three_times_or_those_of_a_tile():
    """16 tokens, 32 words, 4 bytes: a softmax, its gradient and that of the logits. Those of a tile in forward, but in
    fp16."""
    places = {1: "backward: loss", 4: "forward: loss"}
    parts = [_moments(_step({"loss_tiles": tiles}))[place].bytes_by_item["loss"] for tiles, place in places.items()]
    assert "backward: loss" in _moments(_step({"loss_tiles": 4}, dtype="float16"))
    assert parts == [3 * 16 * 32 * 4, 3 * 4 * 32 * 4]


def test_a_tile_of_the_mlp_is_six_of_its_intermediates():
    """With tiles, the gradient of its input beside them."""
    steps = _step({"mlp_tiles": 1}), _step({"mlp_tiles": 4})
    parts = [_moments(step)["backward: layer 3, MLP"].bytes_by_item["mlp"] for step in steps]
    assert parts == [6 * 16 * 16 * 4, 6 * 16 * 16 * 4 // 4 + 512]


def test_zero_3_gathers_a_layer_and_what_it_may_keep():
    parts = _moments(_step())["backward: layer 3, MLP"].bytes_by_item
    assert parts["gathered"] == 512 * 4  # nothing more may live
    free = {**NONE, "stage": 3, "max_live_parameters": 10**6, "max_reuse_distance": 10**6}
    parts = _moments(_step(zero=Zero(**free)))["backward: layer 3, MLP"].bytes_by_item
    assert parts["gathered"] == 2048 * 4  # the whole model
    assert "gathered" not in _moments(_step(stage=2))["backward: layer 3, MLP"].bytes_by_item


def test_tied_weights_wait_for_the_gradient_of_the_other_end():
    tied = dataclasses.replace(MODEL, tied=True)
    for name in ("backward: layer 3, attention", "backward: layer 1, attention"):
        parts = [_moments(_step(model=model))[name].bytes_by_item["gradients"] for model in (MODEL, tied)]
        assert parts[1] - parts[0] == 32 * 8 * 4


def test_more_stages_of_heads_take_less():
    taken = [
        _moments(_step({"head_chunks": n}))["backward: layer 3, attention"].bytes_by_item["attention"] for n in (1, 2)
    ]
    assert taken[1] < taken[0]


def test_a_length_that_ranks_cannot_share_equally_is_that_of_the_padded_sequence():
    assert footprint(_step(seq=63)) == footprint(_step(seq=64))


def test_what_a_token_adds_is_the_slope():
    step = _step(seq=4096)
    more = [footprint(dataclasses.replace(step, seq=n)).peak.total for n in (4096, 8192)]
    assert bytes_a_token(step) == (more[1] - more[0]) / 1024


CPU, DRIVE = Offload(device="cpu"), Offload(device="nvme")
# what leaves, of 2048 parameters in bf16 on 4 ranks (512 each), by hand: on the device (parameters, gradients,
# optimizer), in host memory (the same, buffers), on drives. At the stages 1 and 2 a gradient passes two buffers as
# large as the largest parameter, 32 * 8
AWAY = {
    "2": ({"stage": 2, "offload_optimizer": CPU}, (4096, 512, 0), (6 * 512, 4 * 512 + 512, 8 * 512, 0), 0),
    "3": ({"stage": 3, "offload_optimizer": CPU}, (1024, 0, 0), (4 * 512, 6 * 512, 8 * 512, 0), 0),
    "half of 4 sub-groups": (
        {"stage": 3, "offload_optimizer": dataclasses.replace(CPU, ratio=0.5), "sub_group_size": 128},
        (1024 + 1024, 1024, 2048), (4 * 256, 4 * 256 + 1024, 8 * 256, 0), 0,
    ),
    "half of one sub-group": (
        {"stage": 3, "offload_optimizer": dataclasses.replace(CPU, ratio=0.5)},
        (1024, 0, 0), (4 * 512, 6 * 512, 8 * 512, 0), 0,
    ),
    "parameters too": (
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, (0, 0, 0), (6 * 512, 6 * 512, 8 * 512, 0), 0,
    ),
    "drives": (
        {"stage": 3, "offload_optimizer": DRIVE, "sub_group_size": 128}, (1024, 0, 0), (0, 1024, 0, 4 * 4 * 128), 8192,
    ),
    "parameters on drives": (
        {"stage": 3, "offload_param": Offload(device="nvme", max_in_cpu=112, buffer_size=10), "sub_group_size": 128},
        (2048, 1024, 4096), (224, 0, 0, 2 * (40 + 128)), 800,
    ),
    "not at stage 2": ({"stage": 2, "offload_param": CPU}, (4096 + 2048, 0, 4096), (0, 0, 0, 0), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", AWAY)
def test_what_deepspeed_offloads_is_in_host_memory_or_on_drives(name):
    zero, device, host, drives = AWAY[name]
    found = footprint(_step(dtype="bfloat16", zero=Zero(**{**NONE, **zero})))
    names = "parameters", "gradients", "optimizer", "buffers"
    assert tuple(found.resting.bytes_by_item.get(part, 0) for part in names[:3]) == device
    assert tuple(found.host.bytes_by_item.get(part, 0) for part in names) == host
    assert found.drives == drives


def test_pinned_memory_is_rounded_up_to_powers_of_two():
    """2040 parameters: 510 of a rank, whose gradients take 1020 bytes in bf16 and 2040 in fp32. A layer's input is 24
    tokens of 16 bytes."""
    zero = Zero(**NONE, stage=3, offload_optimizer=CPU)
    model = dataclasses.replace(MODEL, parameters=2040)
    given = {"model": model, "dtype": "bfloat16", "zero": zero}
    assert footprint(_step(**given)).host.bytes_by_item["rounding"] == 4 + 8
    pageable = dataclasses.replace(zero, offload_optimizer=dataclasses.replace(CPU, pin_memory=False))
    assert "rounding" not in footprint(_step(**{**given, "zero": pageable})).host.bytes_by_item
    away = {"offload_checkpoints": True, "recompute_attention": True}
    assert footprint(_step(away, **{**given, "seq": 96})).host.bytes_by_item["rounding"] == 4 + 8 + 3 * (512 - 24 * 16)


def test_the_longest_sequence_that_fits_fills_a_rank_or_its_host():
    step, roomy = _step({"offload_checkpoints": True}, dtype="bfloat16"), 2**40
    rank, host = (
        MemoryBudget(limit=2**20, host=roomy, ranks_per_node=4),
        MemoryBudget(limit=roomy, host=2**20, ranks_per_node=4),
    )
    for room, full in ((rank, "rank"), (host, "host")):
        found = longest(step, room)
        assert found.full == full
        assert fits(footprint(dataclasses.replace(step, seq=found.tokens)), room)
        assert not fits(footprint(dataclasses.replace(step, seq=found.tokens * 1.002 // 8 * 8 + 16)), room)
    for seq in (16, 2**20):  # wherever it is looked for from
        near = longest(dataclasses.replace(step, seq=seq), rank).tokens
        assert abs(near / longest(step, rank).tokens - 1) < 2e-3
    assert longest(step, MemoryBudget(limit=1, host=roomy, ranks_per_node=4)).tokens == 0
    shared = MemoryBudget(limit=2**20, host=roomy, ranks_per_node=4, apart=False)  # host memory is the rank's own
    assert longest(step, shared).tokens < longest(step, rank).tokens


def zero_of(section):
    return DeepSpeedJson.read({"zero_optimization": section}).known.zero_optimization


def test_zero_settings_are_read_as_deepspeed_writes_them():
    section = {
        "stage": 3,
        "stage3_max_live_parameters": 1e3,
        "reduce_bucket_size": 7,
        "stage3_prefetch_bucket_size": "auto",
    }
    assert zero_of(section) == Zero(stage=3, max_live_parameters=1000, reduce_bucket_size=7)
    away = {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": False}, "offload_param": None}
    assert zero_of(away) == Zero(offload_optimizer=Offload(device="cpu", ratio=0.5, pin_memory=False))
    assert zero_of({"cpu_offload": True}) == Zero(offload_optimizer=CPU)
    with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio.*all"):
        zero_of({"offload_optimizer": {"ratio": "all"}})
    with pytest.raises(ConfigError, match=r"reduce_bucket_size.*many"):
        zero_of({"reduce_bucket_size": "many"})


# heads 4, of each a state of 2 x 3 that a matrix of 2 x 2 maps; two of three layers
STATES = StateLayers(count=2, heads=4, keys=2, values=3, transition=4, exchanged=10, kept=20, weights=64)
HYBRID = dataclasses.replace(MODEL, states=STATES, attention_layers=1, layers=3)


def test_bytes_of_states_by_hand():
    passed = state_bytes(_step(model=HYBRID, batch=2))
    rows, runs = 2 * 64 // 4, 7  # a chunk and its mirror image on each rank, the last rank's two are neighbors
    assert passed.received == (runs - 1) * 2 * 4 * (2 * 3 + 4) * 4
    assert passed.exchanged == 0
    assert passed.entering == 2 * 2 * 4 * 2 * 3 * 4
    assert passed.saved == rows * (20 + 4 * 2) * 4
    heads = state_bytes(_step({"ulysses": 4, "recurrent_layers": "heads"}, HYBRID, batch=2))
    assert (heads.received, heads.entering) == (0, 0)
    assert heads.exchanged == rows * 10 * 4 * 3 // 4
    assert heads.saved == rows * 20 * 4


def test_ranks_share_layers_with_a_state_in_the_way_of_fewer_bytes():
    for seq, way in ((32, "heads"), (2048, "states")):
        auto, given = (
            state_bytes(_step({"ulysses": 4, "recurrent_layers": name}, HYBRID, seq=seq)) for name in ("auto", way)
        )
        assert auto == given


def test_striped_tokens_have_no_layers_with_a_state():
    with pytest.raises(ConfigError, match="consecutive tokens"):
        footprint(_step({"layout": "striped"}, HYBRID))


def test_only_layers_that_attend_keep_attention():
    all_attend, hybrid = (_moments(_step(model=model, checkpointing=True)) for model in (MODEL, HYBRID))
    kept = [moments["backward: loss"].bytes_by_item["kept attention"] for moments in (all_attend, hybrid)]
    assert kept[1] == kept[0] // 3 + 2 * state_bytes(_step(model=HYBRID)).entering
    assert {*hybrid} - {*all_attend} == {"backward: layer 3, state", "backward: layer 1, state"}


def test_time_counts_messages_of_states_and_only_layers_that_attend():
    machine = Machine.load("h100-ib")
    step = _step(model=HYBRID, dtype="bfloat16", zero=Zero(stage=3))
    found, rows = estimate(step, machine), step.seq // step.config.size * step.batch
    attention = found.forward.seconds + found.backward.seconds  # one layer attends
    matrices = 2 * rows * (4 * HYBRID.weights + 3 * HYBRID.embedding) / machine.matrices["bfloat16"]
    sent = state_bytes(step)
    states = 2 * 2 * (sent.received + sent.exchanged) / machine.inside.rate
    assert found.seconds == pytest.approx(attention + matrices + states)


def test_a_prompt_is_of_layers_that_attend():
    with pytest.raises(ConfigError, match="all of whose layers attend"):
        cache_bytes(_step(model=HYBRID), 64)

"""The memory of a training step: golden files of small numbers that a hand can check, and what holds for any step."""

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
from tests.unit.commands import golden

# hidden 8, 4 query heads of 2, 2 of k and v
MODEL = Model(
    hidden=8, intermediate=16, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=32,
    parameters=2048, layer_parameters=512,
)  # fmt: skip
# heads 4, of each a state of 2 x 3 that a matrix of 2 x 2 maps; two of three layers
STATES = StateLayers(count=2, heads=4, keys=2, values=3, transition=4, exchanged=10, kept=20, weights=64)
HYBRID = dataclasses.replace(MODEL, states=STATES, attention_layers=1, layers=3)
MODELS = {
    "plain": MODEL,
    "hybrid": HYBRID,
    "tied": dataclasses.replace(MODEL, tied=True),
    "2040": dataclasses.replace(MODEL, parameters=2040),
}
NONE = {"reduce_bucket_size": 0, "prefetch_bucket_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
# name -> {"step": arguments of `step`, "bytes": some of what `bytes_of` gives, "by hand": how a hand computes them}
GOLDEN = golden("footprint")


def step(settings=None, model="plain", world=4, zero=None, json=None, **more):
    """json: the DeepSpeed JSON whose optimizer counts."""
    model = MODELS[model]
    config = SequenceParallelConfig(**{"size": 4, "ulysses": 1, "schedule": "ring", **(settings or {})})
    zero = {name: Offload(**x) if isinstance(x, dict) else x for name, x in (zero or {"stage": 3}).items()}
    if json is not None:
        more["optimizer_states"] = DeepSpeedJson.read(json).optimizer_states
    given = {"seq": 64, "dtype": "float32", "zero": Zero(**{**NONE, **zero}), **more}
    return TrainingStep(model=model, config=config.resolve(world, (model.heads, model.kv_heads)), world=world, **given)


def bytes_of(found):
    """By moment and item; of the host and of drives too."""
    parts = {one.name: one.bytes_by_item for one in found.moments}
    return {**parts, "resting": found.resting.bytes_by_item, "host": found.host.bytes_by_item, "drives": found.drives}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_those_of_the_golden_file(name):
    case, found = GOLDEN[name], bytes_of(footprint(step(**GOLDEN[name]["step"])))
    parts = found if case.get("has all") else case["bytes"]
    assert {part: found[part] for part in parts} == case["bytes"]


def test_what_a_token_adds_is_the_slope():
    one = step(seq=4096)
    more = [footprint(dataclasses.replace(one, seq=n)).peak.total for n in (4096, 8192)]
    assert bytes_a_token(one) == (more[1] - more[0]) / 1024


def test_the_longest_sequence_that_fits_fills_a_rank_or_its_host():
    one, roomy = step({"offload_checkpoints": True}, dtype="bfloat16"), 2**40
    rank = MemoryBudget(limit=2**20, host=roomy, ranks_per_node=4)
    host = MemoryBudget(limit=roomy, host=2**20, ranks_per_node=4)
    for room, full in ((rank, "rank"), (host, "host")):
        found = longest(one, room)
        assert found.full == full
        assert fits(footprint(dataclasses.replace(one, seq=found.tokens)), room)
        assert not fits(footprint(dataclasses.replace(one, seq=found.tokens * 1.002 // 8 * 8 + 16)), room)
    for seq in (16, 2**20):  # wherever it is looked for from
        near = longest(dataclasses.replace(one, seq=seq), rank).tokens
        assert abs(near / longest(one, rank).tokens - 1) < 2e-3
    assert longest(one, MemoryBudget(limit=1, host=roomy, ranks_per_node=4)).tokens == 0
    shared = MemoryBudget(limit=2**20, host=roomy, ranks_per_node=4, apart=False)  # host memory is the rank's own
    assert longest(one, shared).tokens < longest(one, rank).tokens


def zero_of(section):
    return DeepSpeedJson.read({"zero_optimization": section}).known.zero_optimization


def test_zero_settings_are_read_as_deepspeed_writes_them():
    section = {"stage": 3, "stage3_max_live_parameters": 1e3, "stage3_prefetch_bucket_size": "auto"}
    assert zero_of({**section, "reduce_bucket_size": 7}) == Zero(
        stage=3, max_live_parameters=1000, reduce_bucket_size=7
    )
    away = {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": False}, "offload_param": None}
    assert zero_of(away) == Zero(offload_optimizer=Offload(device="cpu", ratio=0.5, pin_memory=False))
    assert zero_of({"cpu_offload": True}) == Zero(offload_optimizer=Offload(device="cpu"))
    with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio.*all"):
        zero_of({"offload_optimizer": {"ratio": "all"}})
    with pytest.raises(ConfigError, match=r"reduce_bucket_size.*many"):
        zero_of({"reduce_bucket_size": "many"})


def test_bytes_of_states_by_hand():
    passed = state_bytes(step(model="hybrid", batch=2))
    rows, runs = 2 * 64 // 4, 7  # a chunk and its mirror image on each rank, the last rank's two are neighbors
    assert passed.received == (runs - 1) * 2 * 4 * (2 * 3 + 4) * 4
    assert passed.exchanged == 0
    assert passed.entering == 2 * 2 * 4 * 2 * 3 * 4
    assert passed.saved == rows * (20 + 4 * 2) * 4
    heads = state_bytes(step({"ulysses": 4, "recurrent_layers": "heads"}, "hybrid", batch=2))
    assert (heads.received, heads.entering) == (0, 0)
    assert heads.exchanged == rows * 10 * 4 * 3 // 4
    assert heads.saved == rows * 20 * 4


def test_ranks_share_layers_with_a_state_in_the_way_of_fewer_bytes():
    for seq, way in ((32, "heads"), (2048, "states")):
        auto, given = (
            state_bytes(step({"ulysses": 4, "recurrent_layers": name}, "hybrid", seq=seq)) for name in ("auto", way)
        )
        assert auto == given


def test_what_no_footprint_counts_is_refused():
    with pytest.raises(ConfigError, match="consecutive tokens"):
        footprint(step({"layout": "striped"}, "hybrid"))
    with pytest.raises(ConfigError, match="all of whose layers attend"):
        cache_bytes(step(model="hybrid"), 64)


def test_time_counts_messages_of_states_and_only_layers_that_attend():
    machine = Machine.load("h100-ib")
    one = dataclasses.replace(step(model="hybrid", dtype="bfloat16"), zero=Zero(stage=3))
    found, rows = estimate(one, machine), one.seq // one.config.size * one.batch
    attention = found.forward.seconds + found.backward.seconds  # one layer attends
    matrices = 2 * rows * (4 * HYBRID.weights + 3 * HYBRID.embedding) / machine.matrices["bfloat16"]
    sent = state_bytes(one)
    states = 2 * 2 * (sent.received + sent.exchanged) / machine.inside.rate
    assert found.seconds == pytest.approx(attention + matrices + states)

"""Which configuration the planner takes: cases that can be checked by hand, and what holds for every answer."""

import dataclasses
import math

import pytest

from ds_seqpar.config.deepspeed_json import Offload, Zero
from ds_seqpar.config.settings import SequenceParallelConfig
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.candidates import candidates
from ds_seqpar.planner.machine import Machine, Wire, ZeroCosts
from ds_seqpar.planner.plan import find_plan, plan, received_over_least
from ds_seqpar.planner.predict import Prediction, memory_options, predict
from ds_seqpar.planner.request import Model, Request
from ds_seqpar.planner.steptime import (
    attention_link_seconds,
    collective_seconds,
    elementwise_bytes,
    gather_seconds,
    step_time,
)

H100, MODEST = Machine.load("h100-ib"), Machine.load("modest")
ROOMY = dataclasses.replace(H100, memory=1e15)  # memory decides nothing


def _model(heads=32, kv_heads=32, head_dim=128, layers=4):
    hidden = heads * head_dim
    own = (2 * hidden + 2 * kv_heads * head_dim) * hidden + 3 * hidden * 4 * hidden + 2 * hidden
    ends = 32000 * hidden
    return Model(
        hidden=hidden, intermediate=4 * hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=32000, parameters=layers * own + 2 * ends + hidden, layer_parameters=own,
    )  # fmt: skip


def _asked(machine=ROOMY, world=8, seq=65536, model=None, **given):
    return Request(model=model or _model(), machine=machine, world=world, seq=seq, **given)


def _best(**given):
    return plan(_asked(**given)).best


def test_one_node_is_ulysses_where_heads_allow():
    for model in (_model(32, 32), _model(32, 8)):
        best = _best(model=model, given={"size": 8})
        assert (best.config.ulysses, best.config.schedule) == (8, "ring")


@pytest.mark.parametrize(("rate", "gain"), [(5e9, 1.05), (5e10, 1.05), (1e12, 1.0)])
def test_stages_are_taken_where_exchanges_take_time(rate, gain):
    machine = dataclasses.replace(H100, per_node=1, between=Wire(latency=1e-5, rate=rate), uplink=None)
    found = plan(_asked(machine=machine, world=4, model=_model(16, 16), given={"size": 4, "ulysses": 4}))
    (plain,) = (one for one in found.ranked if one.config.head_chunks == 1)
    assert plain.seconds / found.best.seconds >= gain
    assert found.best.config.overlap == (found.best.config.head_chunks > 1) == (gain > 1)


def test_what_is_sent_again_is_priced():
    """Head chunks without overlap send q, k and v in backward too, unless they are kept."""
    given = {"size": 4, "ulysses": 4, "overlap": False, "head_chunks": 4}
    asked = [
        _asked(world=4, given={**given, "save_qkv_after_all_to_all": kept}, checkpointing=False)
        for kept in (True, False)
    ]
    kept, again = (plan(one).best for one in asked)
    assert again.forward == kept.forward
    assert again.backward.received == pytest.approx(kept.backward.received * 7 / 4, rel=0.01)  # do, dq, dk, dv; q, k, v
    assert again.memory.peak.total < kept.memory.peak.total


@pytest.mark.parametrize("machine", [MODEST, ROOMY], ids=["modest", "h100"])
def test_one_key_value_head_is_not_replicated(machine):
    """Ulysses 8 would bring every Ulysses rank the one head, beside an eighth of q and out; what goes round instead is
    that head alone. (A short sequence, whose bytes are little beside the time of messages, may yet take Ulysses.)"""
    asked = _asked(model=_model(32, 1), machine=machine, memory=10**15, given={"size": 8})
    best = plan(asked).best
    (whole, *_) = (f for f in candidates(8, (32, 1), {**asked.given, "rank_order": "auto"}) if f.ulysses == 8)
    replicated = predict(asked, whole)
    assert best.config.ulysses == 1
    assert best.seconds < replicated.seconds
    for way in ("forward", "backward"):
        assert getattr(best, way).received < getattr(replicated, way).received


def test_causal_attention_between_nodes_takes_the_causal_floor_where_heads_are_many():
    """28 nodes of one rank, links decide: 12.6 q blocks a rank against a mesh's 18.1; with few key/value heads rows of
    a tile cost more than its columns, and a long mesh is better."""
    apart = dataclasses.replace(MODEST, per_node=1, memory=1e15)
    asked = {
        "machine": apart,
        "world": 28,
        "seq": 28 * 1024,
        "given": {"size": 28, "ulysses": 1, "comm_dtype": "bf16"},
    }
    assert _best(model=_model(16, 16), **asked).config.schedule == "triangle"
    assert _best(model=_model(32, 4), **asked).config.schedule != "triangle"


def test_33_heads_are_not_dealt_unevenly_to_8_where_that_is_slower():
    """Five heads are the most that one of 8 Ulysses ranks has, so Ulysses 8 takes 40/33 of the time."""
    best = _best(model=_model(33, 33), given={"size": 8}, seq=131072)
    assert best.config.ulysses == 1


def test_slow_links_between_nodes_carry_the_fewest_bytes():
    """Of two nodes of 8 whose ranks share a port a hundred times slower than the links inside."""
    slow = dataclasses.replace(
        ROOMY, between=dataclasses.replace(ROOMY.between, rate=3.6e9), uplink=3.6e9,
    )  # fmt: skip
    choice = plan(_asked(machine=slow, world=16, model=_model(32, 8), given={"size": 16}))
    across = [one.forward.between + one.backward.between for one in choice.ranked]
    assert across[0] <= 1.05 * min(across)
    assert choice.best.config.ulysses <= 8  # its exchange stays in the node
    whole = predict(choice.request, next(
        f for f in candidates(16, (32, 8), {"size": 16, "ulysses": 16, "rank_order": "auto"})))  # fmt: skip
    assert whole.seconds > choice.best.seconds


def test_a_limit_of_memory_rejects_what_gathers_much():
    """Attention2D gathers blocks of q and of k/v; beneath what that takes a ring is left."""
    spared = {
        "head_chunks": 1,
        "loss_tiles": 64,
        "mlp_tiles": 64,
        "recompute_attention": True,
        "offload_checkpoints": False,
    }
    asked = _asked(world=16, seq=2**20, model=_model(32, 32, layers=2), given={"size": 16, "ulysses": 1, **spared})
    found = {str(candidate): candidate for candidate in candidates(16, (32, 32), asked.given)}
    ring, square = (predict(asked, found[name]) for name in ("16 ranks: ring", "16 ranks: attention2d rows 4 cols 4"))
    assert square.memory.peak.total > 1.05 * ring.memory.peak.total
    tight = dataclasses.replace(asked, memory=ring.memory.peak.total)
    assert predict(tight, ring.candidate).seconds == ring.seconds
    assert "GiB on each rank" in predict(tight, square.candidate)
    choice = find_plan(tight)
    assert choice.ranked
    assert all(one.memory.peak.total <= tight.limit for one in choice.ranked)


def test_queries_travel_back_with_many_key_value_heads_and_they_with_few():
    fixed = {"size": 8, "ulysses": 1, "schedule": "ring"}
    assert _best(model=_model(32, 32), given=fixed).travels == ("kv", "q")
    assert _best(model=_model(32, 4), given=fixed).travels == ("kv", "kv")


def test_short_sequences_take_fewer_ranks():
    """The longer one does not fit one rank."""
    model = _model(32, 8, layers=32)
    found = [_best(machine=H100, seq=seq, model=model, given={"ulysses": 1}).config.size for seq in (4096, 2**20)]
    assert found[0] == 1
    assert found[1] >= 2


def test_with_a_few_sequences_a_step_ranks_share_them():
    """Two sequences on 16 ranks: with fewer than 8 ranks each, ranks would have nothing to do."""
    assert _best(world=16, seq=262144, sequences=2).config.size >= 8
    assert _best(seq=262144).config.size < 8


def test_windows_are_no_mesh():
    for model in (_model(32, 32), _model(32, 8)):
        best = _best(model=model, seq=131072, window=4096, given={"size": 8})
        assert best.candidate.cp_size == 1 or not best.candidate.schedule.collective_axes


def test_a_pack_of_short_documents_does_not_travel():
    choice = plan(_asked(seq=64 * 2048, documents=(2048,) * 64, given={"size": 8}))
    assert choice.best.candidate.cp_size == 8
    assert choice.best.forward.received == choice.best.backward.received == 0


def test_the_answer_is_the_same_each_time_and_is_legal():
    asked = _asked(machine=MODEST, seq=131072, model=_model(32, 8))
    first, second = (find_plan(dataclasses.replace(asked)) for _ in range(2))
    assert first.rejected == second.rejected
    assert [(one.config, one.seconds) for one in first.ranked] == [(one.config, one.seconds) for one in second.ranked]
    for one in first.ranked:
        assert SequenceParallelConfig(**{**one.config.settings()}).resolve(8, (32, 8)) == one.config
        assert one.memory.peak.total <= MODEST.usable
    assert first.best.seconds <= 1.005 * min(one.seconds for one in first.ranked)
    section = SequenceParallelConfig.from_dict(first.section).resolve(8, (32, 8))
    assert dataclasses.replace(section, overlap=first.best.config.overlap) == first.best.config


def test_nothing_that_got_no_price_is_faster():
    """Of all candidates of a small job none beats what was chosen among few."""
    slow = dataclasses.replace(MODEST, per_node=2)
    asked = _asked(machine=slow, world=8, seq=32768, model=_model(16, 4), memory=10**15, given={"size": 8})
    best = find_plan(asked).best
    found = [
        predict(asked, candidate)
        for candidate in candidates(8, asked.heads, asked.given)
        if candidate.has_default_layout
    ]
    assert min(one.seconds for one in found) >= 0.99 * best.seconds


def test_bytes_stand_beside_the_floor():
    """Ulysses with as many heads of k/v as of q receives (U-1)/U 4 |q|, and owns the rest of the floor."""
    choice = plan(_asked(given={"size": 8, "ulysses": 8}))
    assert received_over_least(choice, choice.best) == pytest.approx((7 / 8 * 4) / (4 - 4 / 8))
    alone = plan(_asked(given={"size": 1}))
    assert received_over_least(alone, alone.best) is None


def test_a_step_is_attention_matrices_and_zero():
    asked = _asked(given={"size": 8}, checkpointing=False)
    step = asked.step(SequenceParallelConfig(size=8, ulysses=8).resolve(8, asked.heads))
    m = step.model
    rows = 65536 // 8
    took = step_time(step, H100, 1.0, 2.0)
    assert took.sequences == 1
    assert took.seconds_by_item["attention forward"] == 4
    assert took.seconds_by_item["attention backward"] == 8
    matrices = m.layer_parameters - 2 * m.hidden  # all of a layer's but its norms
    assert took.seconds_by_item["matrices"] == pytest.approx(3 * 2 * matrices * rows * 4 / H100.gemm["bfloat16"])
    again = step_time(dataclasses.replace(step, checkpointing=True), H100, 1.0, 2.0)
    assert again.seconds_by_item["matrices"] == pytest.approx(4 / 3 * took.seconds_by_item["matrices"])
    assert again.seconds_by_item["attention backward"] == 8  # it is kept
    # the layers' gathers run beside attention, those of the ends beside nothing
    ends = (m.parameters - 4 * m.layer_parameters) * 2
    norm = 2 * gather_seconds(H100, 8, 4)
    assert took.seconds_by_item["ZeRO"] == pytest.approx(3 * gather_seconds(H100, 8, ends) + norm)
    plain = dataclasses.replace(step, zero=Zero(stage=3, overlap_comm=False))
    layers = 4 * 3 * gather_seconds(H100, 8, m.layer_parameters * 2)
    assert step_time(plain, H100, 1.0, 2.0).seconds_by_item["ZeRO"] == pytest.approx(
        took.seconds_by_item["ZeRO"] + layers
    )


WIRE = Wire(latency=1e-3, rate=1e9)
COSTS = ZeroCosts(ranks=8, gather=WIRE, reduce=Wire(latency=2e-3, rate=5e8), all_reduce=Wire(latency=3e-3, rate=2e8),
                  forward=1e-3, backward=2e-3)  # fmt: skip
HOST = dataclasses.replace(ROOMY, ahead=False, zero=COSTS)  # works by itself at what it is told


def _layer_step(**more):
    asked = _asked(given={"size": 8}, **{"checkpointing": False, **more})
    return asked.step(SequenceParallelConfig(size=8, ulysses=8).resolve(8, asked.heads))


FREE, BUSY = (0.0, 0.0), (1e3, 1e3)  # seconds in which attention has the links busy


def _parts(machine=HOST, attention_links=FREE, **more):
    """The parts of a step whose attention takes 10 and 20 s, in seconds."""
    return step_time(_layer_step(**more), machine, 10.0, 20.0, attention_links=attention_links).seconds_by_item


def test_work_without_matrices_is_priced_by_its_bytes():
    step = _layer_step()
    m, rows = step.model, 65536 // 8
    # in bf16 a norm casts and computes in fp32: 12 + 8 + 4 + 8 + 4 bytes; a residual 6; RoPE 20 of q and k; SwiGLU 10
    token = 2 * m.hidden * (36 + 6) + 2 * m.hidden * 20 + m.intermediate * 10
    assert elementwise_bytes(step) == token
    took = step_time(step, H100, 1.0, 2.0).seconds_by_item["elementwise"]
    assert took == pytest.approx((4 * 3 * rows * token + rows * m.vocab * 32) / H100.elementwise_rate)
    again = step_time(dataclasses.replace(step, checkpointing=True), H100, 1.0, 2.0).seconds_by_item["elementwise"]
    assert again - took == pytest.approx(4 * rows * token / H100.elementwise_rate)


def test_hooks_take_time_of_a_host_that_works_by_itself_and_are_hidden_by_a_device():
    modules = 4 * 13 + 6
    assert _parts()["host"] == pytest.approx(modules * 3e-3)
    assert _parts(checkpointing=True)["host"] == pytest.approx(modules * 4e-3)
    assert _parts(dataclasses.replace(HOST, ahead=True))["host"] == 0
    assert _parts(dataclasses.replace(HOST, zero=None))["host"] == _parts(zero=Zero(stage=1))["host"] == 0


def test_collectives_take_what_they_took_on_as_many_ranks():
    assert collective_seconds(HOST, 8, "reduce", 1e9, 3) == pytest.approx(3 * 2e-3 + 2)
    assert collective_seconds(HOST, 16, "gather", 1e9) == gather_seconds(HOST, 16, 1e9)
    assert collective_seconds(ROOMY, 8, "all_reduce", 1e9) == 2 * gather_seconds(ROOMY, 8, 1e9)


def test_without_streams_reductions_are_waited_for_and_gathers_run_beside_work():
    zero, m = Zero(stage=3, reduce_bucket_size=2**20), _layer_step().model
    ends = m.parameters - 4 * m.layer_parameters
    reduced = m.parameters / 2**20 * 2e-3 + 2 * m.parameters / 5e8 + 3e-3 + 4 / 2e8  # and the norm
    found = _parts(zero=zero)["ZeRO"]  # a layer's work is longer than its gather
    assert found == pytest.approx(reduced + 2 * (1e-3 + 2 * ends / 1e9))
    layer = 1e-3 + 2 * m.layer_parameters / 1e9
    assert _parts(zero=zero, attention_links=BUSY)["ZeRO"] == pytest.approx(found + 4 * 2 * layer)


def test_zero_copies_what_travels():
    unit = 2 * _layer_step().model.parameters / HOST.elementwise_rate
    seconds = [_parts(zero=Zero(stage=stage))["copies"] for stage in (0, 1, 2, 3)]
    assert seconds == pytest.approx([0, 6 * unit, 6 * unit, 12 * unit])


AWAY = Zero(stage=3, offload_optimizer=Offload(device="cpu"))


def test_states_that_are_away_step_at_the_hosts_rate_and_their_copies_run_beside_work():
    own = _layer_step().model.parameters // 8
    assert _parts(H100, zero=AWAY)["optimiser"] == pytest.approx(42 * own * 8 / H100.host_rate)
    pageable = Zero(stage=3, offload_optimizer=Offload(device="cpu", pin_memory=False))
    both = dataclasses.replace(AWAY, offload_param=Offload(device="cpu"))  # parameters are fetched twice
    # bytes of a parameter whose copies are waited for: new parameters, and what nothing hides
    for zero, attention_links, size in (
        (AWAY, FREE, 2),
        (AWAY, BUSY, 8),
        (pageable, FREE, 8),
        (both, FREE, 0),
        (both, BUSY, 8),
    ):
        found = _parts(H100, attention_links, zero=zero)["offload"]
        assert found == pytest.approx(size * own / H100.offload_rate), (zero, attention_links)
    drives = Zero(stage=3, offload_optimizer=Offload(device="nvme"))
    assert _parts(H100, zero=drives)["drives"] == pytest.approx(32 * own * 8 / H100.nvme_rate)
    with pytest.raises(ConfigError, match=r"nvme_rate.*has none"):
        _asked(machine=dataclasses.replace(ROOMY, nvme_rate=None), zero=drives)


def test_what_a_host_has_no_room_for_is_not_taken():
    asked = _asked(machine=H100, zero=AWAY, given={"size": 8, "ulysses": 8})
    candidate = next(candidates(8, asked.heads, asked.given))
    host = predict(asked, candidate).memory.host
    assert set(host.bytes_by_item) >= {"parameters", "gradients", "optimiser"}
    full = dataclasses.replace(H100, host_memory=8 * host.total - 1)
    assert "does not fit the host" in predict(dataclasses.replace(asked, machine=full), candidate)
    assert isinstance(predict(dataclasses.replace(asked, machine=full, zero=Zero(stage=3)), candidate), Prediction)


def test_where_the_optimiser_could_leave_that_is_said():
    asked = _asked(machine=H100, model=_model(32, 8, layers=32), memory=16 * 2**30, given={"size": 8})
    with pytest.raises(ConfigError, match="offload_optimizer with device cpu"):
        plan(asked)


def test_processors_keep_nothing_away():
    """Their host's memory is their own."""
    asked = _asked(machine=dataclasses.replace(HOST, memory=5e9), model=_model(16, 4), given={"size": 8})
    assert not any("offload_checkpoints" in settings for settings, _ in memory_options(asked, 1))
    assert any("offload_checkpoints" in settings for settings, _ in memory_options(_asked(), 1))


def test_attention_has_those_links_busy_that_zero_waits_for():
    attention = predict(asked := _asked(world=16, given={"size": 8, "ulysses": 1}), next(
        f for f in candidates(16, (32, 32), asked.given))).forward  # fmt: skip
    assert attention.between == 0  # a sequence stays in its node
    assert attention_link_seconds(H100, 8, attention) == attention.links > 0
    assert attention_link_seconds(H100, 16, attention) == 0
    far = dataclasses.replace(attention, between=9e9)
    assert attention_link_seconds(H100, 16, far) == min(attention.links, 9e9 / H100.between.rate)


def test_the_first_stages_reduce_on_all_ranks_and_then_gather():
    step = _layer_step(zero=Zero(stage=1))
    size = 2 * step.model.parameters
    took = step_time(step, HOST, 1.0, 2.0).seconds_by_item["ZeRO"]
    norm = 3e-3 + 4 / 2e8
    assert took == pytest.approx(3e-3 + size / 2e8 + 1e-3 + size / 1e9 + norm)
    none = step_time(dataclasses.replace(step, zero=Zero(stage=0)), HOST, 1.0, 2.0).seconds_by_item
    assert none["ZeRO"] == pytest.approx(3e-3 + size / 2e8 + norm)
    assert none["optimiser"] == pytest.approx(8 * step_time(step, HOST, 1.0, 2.0).seconds_by_item["optimiser"])


def test_a_gather_over_nodes_takes_as_long_as_what_a_node_takes_in():
    size = 8e9
    inside = size * 7 / 8 / H100.inside.rate
    assert gather_seconds(H100, 8, size) == pytest.approx(inside + H100.inside.latency)
    between = size / 2 / (8 * H100.between.rate)
    assert gather_seconds(H100, 16, size) == pytest.approx(max(inside, between) + H100.between.latency)
    assert gather_seconds(dataclasses.replace(H100, uplink=1e9), 16, size) == pytest.approx(4, rel=1e-3)
    assert gather_seconds(H100, 1, size) == 0


def test_where_nothing_fits_the_nearest_that_does_is_said():
    asked = _asked(machine=MODEST, world=8, seq=2**22, model=_model(32, 8, layers=8))
    with pytest.raises(ConfigError, match=r"4194304 tokens.*8 ranks.*GiB.*take \d+ ranks"):
        plan(asked)


def test_1024_ranks_are_planned():
    choice = plan(
        _asked(machine=H100, world=1024, seq=2**22, model=_model(32, 8, layers=32), given={"size": 1024, "ulysses": 8})
    )
    assert choice.considered > 100
    assert choice.best.config.size == 1024
    assert math.isfinite(choice.best.seconds)
    assert choice.best.time.seconds_by_item["attention forward"] > 0


@pytest.mark.parametrize("given", [{"size": 4}, {"size": 4, "ulysses": 1}], ids=str)
def test_no_two_that_are_ranked_come_out_alike(given):
    """The overlap pass makes the same plan of several shapes, and some ways round are as long."""
    found = plan(_asked(world=4, seq=2**20, model=_model(32, 8), machine=H100, given=given))
    rows = [(one.memory.peak.total, *(round(x, 9) for x in one.time.seconds_by_item.values())) for one in found.ranked]
    assert len(set(rows)) == len(rows) > 2
    assert any("the same as" in why for _, why in found.rejected)


def test_a_rank_alone_is_one_candidate():
    (one,) = {
        candidate.plan_key(documents=False)
        for candidate in candidates(4, (8, 8), {"size": 4, "ulysses": 4, "rank_order": "auto"})
    }
    assert one == next(candidates(4, (8, 8), {"size": 4, "ulysses": 4})).plan_key(documents=False)

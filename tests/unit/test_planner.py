"""Which configuration the planner takes: what holds for every answer. test_plan_command.py has golden answers."""

import dataclasses
import itertools

import pytest

from ds_seqpar.core.compiler.compile import Compiler
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.layout import Topology
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import Zero
from ds_seqpar.planner.estimate import attention, estimate
from ds_seqpar.planner.machine import Machine, Wire
from ds_seqpar.planner.plan import find_plan, memory_options, plan
from ds_seqpar.planner.request import Job, Model, Request

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


def _asked(machine=ROOMY, world=8, seq=65536, model=None, given=(), memory=None, **job):
    job = {"zero": Zero(stage=3), "checkpointing": True, **job}
    return Request(
        job=Job(model=model or _model(), seq=seq, **job), machine=machine, world=world, given=dict(given), memory=memory
    )


def _best(**asked):
    return plan(_asked(**asked)).best


def _traffic(direction="forward", machine=ROOMY, world=8, seq=65536, model=None, **settings):
    asked = _asked(machine=machine, world=world, seq=seq, model=model)
    config = SequenceParallelConfig(**settings).resolve(world, asked.heads)
    return attention(asked.step(config), machine, direction)


# ---- the estimate


def test_of_a_step_the_longer_of_products_and_messages_counts():
    """A ring of two, each with half of the pairs of a causal mask in two steps, the first of which hides a message."""
    config = {"size": 2, "ulysses": 1, "schedule": "ring"}
    alone, block = _traffic(size=1, ulysses=1, world=2).seconds, 2 * 32768 * 32 * 128 * 2
    for rate, hidden in ((1e15, True), (1e6, False)):
        machine = dataclasses.replace(ROOMY, inside=Wire(latency=0.0, rate=rate))
        found = _traffic(machine=machine, world=2, rotate_forward="kv", **config)
        assert (found.inside, found.messages) == (block, 1)
        if hidden:
            assert found.seconds == pytest.approx(alone / 2)
        else:
            assert block / rate < found.seconds < block / rate + alone / 2


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["ring", "attention2d", "mesh", "double_ring", "distflash"])
def test_bytes_are_those_that_all_ranks_receive_in_the_plan(schedule, direction):
    settings = {"size": 4, "ulysses": 1, "schedule": schedule}
    config = SequenceParallelConfig(**settings).resolve(4, (8, 8))
    found = _traffic(direction, world=4, seq=4096, model=_model(8, 8), **settings)
    recipe, shape = config.recipe(Topology(axes=config.cp_axes)), shape_of("fp32", "bfloat16", 1, (8, 8, 128))
    shards, sizes = EvenShards(config.layout, 4096, 4), shape.bytes_per_token(direction)
    mask = Compiler(recipe, 0).block_mask(CAUSAL, shards)
    block = {kind: size * 4096 // 4 // shards.blocks_per_rank for kind, size in sizes.items()}
    assert found.inside == max(recipe.plan(direction, mask, shape).received(block)[rank] for rank in (0, 2, 3))


def test_head_chunks_that_exchange_again_are_counted():
    """Head chunks without overlap send q, k and v in backward too, unless they are kept."""
    kept, again = (
        _traffic("backward", world=4, size=4, ulysses=4, head_chunks=4, save_qkv_after_all_to_all=kept)
        for kept in (True, False)
    )
    assert again.received == pytest.approx(kept.received * 7 / 4, rel=0.01)  # do, dq, dk, dv; q, k, v


def test_a_step_is_attention_and_matrices():
    asked = _asked()
    step = asked.step(SequenceParallelConfig(size=8, ulysses=8).resolve(8, asked.heads))
    m, found = step.model, estimate(step, H100)
    layer = m.layer_parameters - 2 * m.hidden  # all of a layer's weights but its norms
    matrices = 2 * (65536 // 8) * (4 * 4 * layer + 3 * m.embedding) / H100.matrices["bfloat16"]
    assert found.seconds == pytest.approx(matrices + 4 * (found.forward.seconds + found.backward.seconds))
    config = dataclasses.replace(step.config, recompute_attention=True)
    again = estimate(dataclasses.replace(step, config=config), H100)
    assert again.seconds == pytest.approx(found.seconds + 4 * found.forward.seconds)


# ---- the choice


def test_slow_links_between_nodes_carry_few_bytes():
    """Of two nodes of 8 whose ranks have links to others a thousand times slower than the links inside."""
    slow = dataclasses.replace(ROOMY, between=dataclasses.replace(ROOMY.between, rate=3.6e8))
    best = _best(machine=slow, world=16, model=_model(32, 8), given={"size": 16})
    assert 1 < best.config.ulysses <= 8  # its exchange stays in the node
    whole = _best(machine=slow, world=16, model=_model(32, 8), given={"size": 16, "ulysses": 16})
    assert whole.seconds > best.seconds


def test_what_fits_is_taken_with_as_little_as_it_needs():
    asked = _asked(world=16, seq=2**20, model=_model(layers=2), given={"size": 16, "ulysses": 1, "schedule": "ring"})
    needed = plan(asked).best.memory.peak.total
    for part in (1.0, 0.9, 0.6):
        tight = dataclasses.replace(asked, memory=int(needed * part))
        found = plan(tight).ranked
        assert all(one.memory.peak.total <= tight.memory for one in found)
        assert bool(found[0].spared) == (part < 1)
        (option,) = (n for n, one in enumerate(memory_options(tight, 1)) if one == found[0].spared)
        assert all(one != found[0].spared for one in memory_options(tight, 1)[:option])


def test_the_answer_is_the_same_each_time_and_is_legal():
    asked = _asked(machine=MODEST, seq=131072, model=_model(32, 8))
    first, second = (find_plan(dataclasses.replace(asked)) for _ in range(2))
    assert first.rejected == second.rejected
    assert [(one.config, one.seconds) for one in first.ranked] == [(one.config, one.seconds) for one in second.ranked]
    for one in first.ranked:
        assert SequenceParallelConfig(**one.config.settings()).resolve(8, (32, 8)) == one.config
        assert SequenceParallelConfig.from_dict(one.config.section()).resolve(8, (32, 8)) == one.config
        assert one.memory.peak.total <= MODEST.usable
        assert estimate(asked.step(one.config), MODEST) == one.estimate


def test_what_is_given_is_not_searched():
    given = {"ulysses": 2, "schedule": "mesh", "layout": "striped", "comm_dtype": "bf16", "mlp_tiles": 3}
    found = plan(_asked(model=_model(32, 8), given=given)).ranked
    assert all({name: getattr(one.config, name) for name in given} == given for one in found)


SHORT = {"schedule": "ring", "size": 4}


def test_memory_settings_save_more_and_more():
    asked = _asked(given=SHORT, model=_model(32, 8))
    options = memory_options(asked, 4)
    assert options[0] == {}
    assert all(set(before) <= set(after) for before, after in itertools.pairwise(options[:4]))
    assert options[-1].keys() == {"loss_tiles", "mlp_tiles", "head_chunks", "offload_checkpoints",
                                  "recompute_attention"}  # fmt: skip
    alone = memory_options(_asked(given=SHORT, machine=Machine.load("cpu"), dtype="float32"), 1)
    assert not any({"offload_checkpoints", "save_qkv_after_all_to_all"} & set(option) for option in alone)
    given = memory_options(_asked(given={"mlp_tiles": 2, "recompute_attention": False}), 1)
    assert not any({"mlp_tiles", "recompute_attention"} & set(option) for option in given)

"""Where no configuration fits: one sentence whatever the sizes are, and what it advises does fit."""

import dataclasses
import re

import pytest

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.deepspeed.config import Zero
from ds_seqpar.planner import limits
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.plan import find_plan, nearest_fits, nothing_fits, plan, with_length, with_optimizer_on_host
from ds_seqpar.planner.request import Job, Model, Request
from tests.words import missing

H100 = Machine.load("h100-ib")
LAYER = (2 * 64 + 2 * 8) * 128 * 8192 + 3 * 8192 * 28672 + 2 * 8192
LARGE = Model(
    hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128256,
    parameters=80 * LAYER + 2 * 128256 * 8192 + 8192, layer_parameters=LAYER,
)  # fmt: skip
SMALL = dataclasses.replace(LARGE, layers=4, parameters=4 * LAYER + 2 * 128256 * 8192)


def request(world, seq, per_node=8, model=LARGE, documents=(), **given):
    machine = dataclasses.replace(H100, per_node=per_node)
    job = Job(model=model, seq=seq, documents=documents, zero=Zero(stage=3), checkpointing=True)
    return Request(job=job, machine=machine, world=world, **given)


def followed(asked, advice):
    """The request with one change that was advised."""
    if "offload_optimizer" in advice:
        return with_optimizer_on_host(asked)
    ranks, tokens = (re.search(rf"(\d+) {what}", advice) for what in ("ranks", "tokens"))
    asked = with_length(asked, int(tokens[1])) if tokens else asked
    changes = {"world": int(ranks[1]), "given": {**asked.given, "size": "auto"}} if ranks else {}
    return dataclasses.replace(asked, **changes)


RING = {"schedule": "ring", "layout": "zigzag", "rank_order": "ulysses_intra"}  # a short search
# (request, what is advised among others)
ASKED = [
    pytest.param(request(128, 60_000_000, given=RING), "512 ranks with 60000256 tokens", marks=pytest.mark.slow),
    (request(7919, 2**22, per_node=7919, model=SMALL), " ranks"),  # a prime: one rank a sequence
    (request(16, 1, model=SMALL, given={"size": 16}), "32 tokens"),
    (request(4, 16385, model=SMALL, given={"size": 4, "ulysses": 4}), "16388 tokens"),
    (request(8, 10**12, model=SMALL, given=RING), "tokens"),
    # no more ranks can be had
    pytest.param(request(limits.MAX_RANKS, 10**12, model=SMALL, given=RING), "tokens", marks=pytest.mark.slow),
    (request(24, limits.MAX_TOKENS, model=SMALL, given={"size": 24, **RING}), "tokens"),  # nor a longer sequence
    (request(8, 2**23, documents=(2**23,), given=RING), "ranks"),
    (request(8, 2**13), "offload_optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "wanted"), ASKED, ids=lambda x: f"{x.world} ranks" if isinstance(x, Request) else "")
def test_what_is_advised_fits(asked, wanted):
    """60M tokens of a 70B model on 16 nodes of 8 ended in a StopIteration."""
    with pytest.raises(ConfigError) as caught:
        plan(asked)
    near = nearest_fits(asked)
    assert missing(str(caught.value), f"{asked.seq} tokens", f"{asked.world} ranks", "take", wanted, *near) == []
    for advice in near:
        assert find_plan(followed(asked, advice)).ranked, advice


@pytest.mark.parametrize(("world", "seq"), [(1, 1021), (3, 10**12), (1009, 1)])
def test_no_size_ends_otherwise(world, seq):
    """Also where memory is next to nothing, and where the given shape fits no other number of ranks."""
    for more in ({}, {"memory": 1}, {"given": {"ulysses": 1, "schedule": "mesh"}}):
        asked = request(world, seq, model=SMALL, **more)
        found = find_plan(asked)
        assert found.ranked or missing(nothing_fits(asked, found.rejected), "got none for", "take") == []

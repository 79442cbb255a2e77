"""The walker executes whatever the validator lets through, exactly: gathered groups, square-only kernels, odd plans."""

import dataclasses
import functools
import random
from collections import deque

import pytest

from ds_seqpar import testing as virtual
from ds_seqpar.base.errors import PlanError
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.schedules.actions import Collective, Compute, Move, Step
from ds_seqpar.core.compiler.schedules.plan import Plan
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime import call, runtime
from ds_seqpar.core.runtime.kernels import KernelSupport, Scores
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.schedules.overlap import overlapped
from ds_seqpar.schedules.validate import validate
from ds_seqpar.testing import attention
from tests.kernel_suite import LowerRight
from tests.oracle import dense, errors, tensors
from tests.unit.plans import added, by_hand, changed, joint, places, rejoined, replaced


def _errors(size, causal=True, times=1, heads=(2, 1), **settings):
    """Of out, dq, dk, dv."""
    config = SequenceParallelConfig(size=size, ulysses=1, **settings)
    inputs = tensors(1, 2 * size * times, heads, 4)
    found = attention(config, *inputs, causal=causal)
    return errors((found.out, found.dq, found.dk, found.dv), dense(*inputs, causal=causal))


# ---- kernels that want a causal mask to be square


def _use(monkeypatch, kernel):
    monkeypatch.setattr(runtime, "select", lambda *_: kernel)


SHAPES = [{"schedule": "mesh", "mesh": shape} for shape in ((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))]
SHAPES += [{"schedule": "double_ring", "ring_size": 2}, {"schedule": "mesh", "mesh": (2, 2, 1), "overlap": True}]


# CUDA's flash kernels align a causal mask to the lower right corner: silently wrong where lengths differ
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_a_kernel_that_aligns_lower_right_is_given_square_causal_blocks_only(monkeypatch, settings, layout):
    _use(monkeypatch, LowerRight())
    assert max(_errors(4, times=3, layout=layout, **settings)) <= 1e-10


def test_a_kernel_that_aligns_lower_right_is_exact_in_distflash(monkeypatch):
    _use(monkeypatch, LowerRight())
    assert max(_errors(5, times=3, schedule="distflash")) <= 1e-10


def test_a_kernel_that_conceals_its_alignment_is_wrong(monkeypatch):
    """So the tests above can fail."""
    concealed = LowerRight()
    concealed.support = KernelSupport()
    _use(monkeypatch, concealed)
    assert max(_errors(4, times=3, layout="zigzag", **SHAPES[0])) > 0.01


# ---- odd plans


def test_a_product_of_which_nothing_is_visible_adds_nothing(replace_schedule):
    """A plan may compute more than is needed, and send it."""

    def helped(topology, block_mask, direction, travels):
        # rank 1 sees rank 0's late keys with rank 0's own early queries: nothing, and sends home what it found
        own = tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in range(2))
        moves = (Move(src=0, dst=1, kind="q", key=(0,)), Move(src=0, dst=1, kind="kv", key=(0,)))
        void, late = Compute(rank=1, q=(0,), kv=(1,)), Compute(rank=1, q=(1,), kv=(0,))
        kinds = {"forward": [("out", (0,))], "backward": [("dq", (0,)), ("dkv", (0,))]}[direction]
        results = tuple(Move(src=1, dst=0, kind=kind, key=key) for kind, key in kinds)
        steps = (Step(moves=moves, computes=own), Step(computes=(void, late), results=results))
        return by_hand(2, *steps, direction=direction).ranks.__getitem__

    replace_schedule("ring", helped)
    assert max(_errors(2, times=2, layout="contiguous", rotate_forward="kv", rotate_backward="kv")) <= 1e-10


def test_an_error_in_a_step_says_where_it_happened(monkeypatch):
    class Broken(LowerRight):
        def forward(self, q, k, v, causal, scale):
            raise RuntimeError("no such instruction")

    _use(monkeypatch, Broken())
    config = SequenceParallelConfig(size=2, ulysses=1).resolve(2)
    q, k, v, _ = tensors(1, 4, (2, 1), 4)
    rank = runtime.Runtime(config, config.topology(2), 0, virtual._VirtualComm(0, virtual.Mailbox(deque)))
    with pytest.raises(RuntimeError, match="no such instruction") as caught:
        rank.forward_walk((q, k, v), None, call.CallSettings(CAUSAL, rank.shards(4), Scores(1.0)), None).run()
    (note,) = caught.value.__notes__
    assert note.splitlines() == [
        "ring forward, CP rank 0 of 2, step 0, with ranks 1",
        "-> step 0: q(0)*kv(0) kv(0)>1 kv(1)<1",
        "   step 1: q(0)*kv(1)",
    ]


def test_an_error_after_the_last_step_is_raised_as_it_is(monkeypatch):
    def fails(of_call):
        raise RuntimeError("no results")

    monkeypatch.setattr(call.ForwardCall, "results", fails)
    config = SequenceParallelConfig(size=1).resolve(1)
    q, k, v, _ = tensors(1, 4, (2, 1), 4)
    rank = runtime.Runtime(config, config.topology(1), 0, virtual._VirtualComm(0, virtual.Mailbox(deque)))
    with pytest.raises(RuntimeError, match="no results") as caught:
        rank.forward_walk((q, k, v), None, call.CallSettings(CAUSAL, rank.shards(4), Scores(1.0)), None).run()
    assert "q(0)*kv(0)" in caught.value.__notes__[0]


# ---- what the validator lets through is right


def _mutated(dice, plan):
    """The plan with one action changed at random."""
    steps = joint(plan)
    place = dice.choice(list(places(steps)))
    number, field, _, action = place
    keys = [
        getattr(other[3], name) for other in places(steps) for name in ("key", "q", "kv") if hasattr(other[3], name)
    ]
    rank = dice.randrange(plan.size)
    options = [(), (action, action)]
    if isinstance(action, Move):
        options += [{"src": rank}, {"dst": rank}, {"dst": rank}, {"key": dice.choice(keys)}]
        options += [{"within": dice.randrange(4)}, {"within": 2}]
        options += [{"kind": dice.choice(["q", "kv", "out", "dq", "dkv"])}, {"src": action.dst, "dst": action.src}]
    if isinstance(action, Compute):
        options += [{"rank": rank}, {"q": dice.choice(keys)}, {"kv": dice.choice(keys)}]
    if isinstance(action, Collective):
        options += [{"keys": action.keys[::-1]}, {"ranks": action.ranks[::-1]}]
        options += [{"keys": action.keys[::-1], "ranks": action.ranks[::-1]}]
    choice = dice.choice([*options, "elsewhere", "elsewhere", "last"])
    if choice == "elsewhere":
        return rejoined(plan, added(replaced(steps, place), dice.randrange(len(steps)), field, action))
    if choice == "last":
        return rejoined(plan, added(replaced(steps, place), number, field, action))
    return changed(plan, place, *([dataclasses.replace(action, **choice)] if isinstance(choice, dict) else choice))


# name -> (size, settings)
STARTS = {
    "ring": (4, {"schedule": "ring"}),
    "ring of 3": (3, {"schedule": "ring"}),
    "double ring": (4, {"schedule": "double_ring", "ring_size": 2}),
    "distflash": (4, {"schedule": "distflash"}),
    "distflash of 5": (5, {"schedule": "distflash"}),
    "mesh 2x2x1": (4, {"schedule": "mesh", "mesh": (2, 2, 1)}),
    "mesh 2x1x2": (4, {"schedule": "mesh", "mesh": (2, 1, 2)}),
    "mesh 1x2x2": (4, {"schedule": "mesh", "mesh": (1, 2, 2)}),
}


def _check_mutations(replace_schedule, name, seeds):
    """How many changed plans the validator accepted; asserts that those are exact."""
    size, settings = STARTS[name]
    builder, accepted = SCHEDULES[settings["schedule"]].build, 0
    for seed in seeds:
        dice = random.Random(seed)
        direction, overlap = dice.choice(["forward", "backward"]), dice.random() < 0.2
        travels = "kv" if "distflash" in name else dice.choice(["kv", "q"])
        causal = "distflash" in name or dice.random() < 0.5
        layout = "contiguous" if "distflash" in name else dice.choice(["zigzag", "contiguous", "striped"])

        @functools.cache  # all ranks walk the same plan
        def build(topology, block_mask, way, travels, dice=dice, direction=direction, overlap=overlap):
            plan = Plan.of(name, way, size, builder(topology, block_mask, way, travels))
            if overlap:
                plan = overlapped(plan, block_mask, {"q": 2, "kv": 1, "out": 3, "dq": 2, "dkv": 1})
            for _ in range(dice.choice([1, 1, 1, 2, 3]) if way == direction else 0):
                plan = _mutated(dice, plan)
            validate(plan, block_mask.pairs())
            return plan.ranks.__getitem__

        replace_schedule(settings["schedule"], build)
        choice = {} if "distflash" in name else {"rotate_forward": travels, "rotate_backward": travels}
        try:
            wrong = _errors(size, causal, layout=layout, **choice, **settings)
        except PlanError:
            continue
        except Exception as failure:
            raise AssertionError(f"seed {seed}: a plan that passed the validator failed") from failure
        assert max(wrong) <= 1e-10, f"seed {seed}"
        accepted += 1
    return accepted


@pytest.mark.parametrize("name", STARTS)
def test_a_changed_plan_that_the_validator_accepts_is_exact(replace_schedule, name):
    accepted = _check_mutations(replace_schedule, name, range(20))
    assert 2 <= accepted <= 18  # enough of either kind to say something


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_many_changed_plans_that_the_validator_accepts_are_exact(replace_schedule, name):
    assert _check_mutations(replace_schedule, name, range(20, 200)) >= 12

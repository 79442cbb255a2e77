"""The walker executes whatever the validator lets through, exactly: gathered groups, square-only kernels, odd plans."""

import dataclasses
import random

import pytest

from ds_seqpar import runtime
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.errors import PlanError
from ds_seqpar.plan import Collective, Compute, Move, Plan, Step
from ds_seqpar.schedules import SCHEDULES
from ds_seqpar.virtual import attention
from tests.kernel_suite import LowerRight
from tests.oracle import dense, errors, tensors
from tests.unit.mesh import mesh
from tests.unit.plans import added, changed, places, replaced

SHAPES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (1, 1, 3), (2, 2, 2), (2, 3, 2)]


def _errors(size, layout, causal, times=1, ulysses=1, heads=(2, 1)):
    """Of out, dq, dk, dv."""
    config = SequenceParallelConfig(size=size * ulysses, ulysses=ulysses, layout=layout)
    inputs = tensors(1, 2 * size * ulysses * times, heads, 4)
    found = attention(config, *inputs, causal=causal)
    return errors((found.out, found.dq, found.dk, found.dv), dense(*inputs, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_meshes_of_gathers_and_reduce_scatters_are_exact(run_as_ring, shape, layout, causal):
    run_as_ring(mesh(*shape))
    for times in (1, 3):
        assert max(_errors(shape[0] * shape[1] * shape[2], layout, causal, times)) <= 1e-10


def test_a_mesh_is_exact_inside_ulysses(run_as_ring):
    run_as_ring(mesh(2, 2, 1))
    assert max(_errors(4, "zigzag", True, times=2, ulysses=2, heads=(4, 2))) <= 1e-10


# CUDA's flash kernels align a causal mask to the lower right corner: silently wrong where lengths differ
def _with_kernel(monkeypatch, kernel):
    monkeypatch.setattr(runtime, "select", lambda name, spec: kernel)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 1, 2), (1, 1, 4)], ids=str)
def test_a_kernel_that_aligns_lower_right_is_given_square_causal_blocks_only(run_as_ring, monkeypatch, shape, layout):
    run_as_ring(mesh(*shape))
    _with_kernel(monkeypatch, LowerRight())
    assert max(_errors(4, layout, True, times=3)) <= 1e-10


def test_a_kernel_that_conceals_its_alignment_is_wrong(run_as_ring, monkeypatch):
    """So the test above can fail."""
    concealed = LowerRight()
    concealed.square = False
    run_as_ring(mesh(2, 2, 1))
    _with_kernel(monkeypatch, concealed)
    assert max(_errors(4, "zigzag", True, times=3)) > 0.01


def test_a_product_of_which_nothing_is_visible_adds_nothing(run_as_ring):
    """A plan may compute more than is needed, and send it."""

    def helped(topology, needed, direction):
        # rank 1 sees rank 0's late keys with rank 0's own early queries: nothing, and sends home what it found
        own = tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in range(2))
        moves = (Move(src=0, dst=1, kind="q", key=(0,)), Move(src=0, dst=1, kind="kv", key=(0,)))
        void, late = Compute(rank=1, q=(0,), kv=(1,)), Compute(rank=1, q=(1,), kv=(0,))
        kinds = {"forward": [("out", (0,))], "backward": [("dq", (0,)), ("dkv", (0,))]}[direction]
        results = tuple(Move(src=1, dst=0, kind=kind, key=key) for kind, key in kinds)
        steps = (Step(moves=moves, computes=own), Step(computes=(void, late), results=results))
        return Plan(name="helped", direction=direction, size=2, steps=steps)

    run_as_ring(helped)
    assert max(_errors(2, "contiguous", True, times=2)) <= 1e-10


def test_an_error_in_a_step_names_the_rank_and_carries_the_table(monkeypatch):
    class Broken(LowerRight):
        def forward(self, q, k, v, causal, scale):
            raise RuntimeError("no such instruction")

    _with_kernel(monkeypatch, Broken())
    with pytest.raises(RuntimeError, match="no such instruction") as caught:
        _errors(2, "zigzag", True)
    (note,) = caught.value.__notes__
    assert note.startswith("inner rank 0, step 0 of this plan:\nring forward, 2 ranks\n")


# ---- what the validator lets through is right


def _mutated(dice, plan):
    """The plan with one action changed at random."""
    place = dice.choice(list(places(plan)))
    number, field, _, action = place
    keys = [getattr(other[3], name) for other in places(plan) for name in ("key", "q", "kv") if hasattr(other[3], name)]
    rank = dice.randrange(plan.size)
    options = [(), (action, action)]
    if isinstance(action, Move):
        options += [{"src": rank}, {"dst": rank}, {"dst": rank}, {"key": dice.choice(keys)}]
        options += [{"kind": dice.choice(["q", "kv", "out", "dq", "dkv"])}, {"src": action.dst, "dst": action.src}]
    if isinstance(action, Compute):
        options += [{"rank": rank}, {"q": dice.choice(keys)}, {"kv": dice.choice(keys)}]
    if isinstance(action, Collective):
        options += [{"parts": action.parts[::-1]}, {"ranks": action.ranks[::-1]}]
        options += [{"parts": action.parts[::-1], "ranks": action.ranks[::-1]}]
    choice = dice.choice([*options, "elsewhere", "elsewhere", "last"])
    if choice == "elsewhere":
        steps = added(replaced(plan.steps, place), dice.randrange(len(plan.steps)), field, action)
        return dataclasses.replace(plan, steps=steps)
    if choice == "last":
        return dataclasses.replace(plan, steps=added(replaced(plan.steps, place), number, field, action))
    return changed(plan, place, *([dataclasses.replace(action, **choice)] if isinstance(choice, dict) else choice))


BUILDERS = {
    "ring": (SCHEDULES["ring"], 4),
    "small ring": (SCHEDULES["ring"], 3),
    **{str(shape): (mesh(*shape), shape[0] * shape[1] * shape[2]) for shape in SHAPES[:3]},
}


def _check_mutations(run_as_ring, builder, size, seeds):
    accepted = 0
    for seed in seeds:
        dice = random.Random(seed)
        direction = dice.choice(["forward", "backward"])

        def build(topology, needed, way, dice=dice, direction=direction):
            plan = builder(topology, needed, way)
            for _ in range(dice.choice([1, 1, 1, 2, 3]) if way == direction else 0):
                plan = _mutated(dice, plan)
            return plan

        run_as_ring(build)
        layout, causal = dice.choice(["zigzag", "contiguous", "striped"]), dice.random() < 0.5
        try:
            wrong = _errors(size, layout, causal)
        except PlanError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: a plan that passed the validator failed") from error
        assert max(wrong) <= 1e-10, f"seed {seed}"
        accepted += 1
    return accepted


@pytest.mark.parametrize("name", BUILDERS)
def test_a_changed_plan_that_the_validator_accepts_is_exact(run_as_ring, name):
    accepted = _check_mutations(run_as_ring, *BUILDERS[name], range(150))
    assert 10 <= accepted <= 140  # enough of either kind to say something


@pytest.mark.whole
@pytest.mark.parametrize("name", BUILDERS)
def test_many_changed_plans_that_the_validator_accepts_are_exact(run_as_ring, name):
    assert _check_mutations(run_as_ring, *BUILDERS[name], range(150, 4000)) >= 200

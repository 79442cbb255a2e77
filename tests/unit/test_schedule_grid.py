"""Every schedule in every shape, over layouts, Ulysses, travelling sides, masks, heads and overlap, equals dense fp64.

Virtual ranks: the walker, kernels and packing are those of the real ranks, only the transport is a mailbox.
"""

import dataclasses
import functools

import pytest
import torch

from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.program.shape import Shape as PlanShape
from ds_seqpar.compiler.sharding.layout import multiple
from ds_seqpar.compiler.sharding.masks import CAUSAL
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.config.settings import LAYOUTS, SequenceParallelConfig
from ds_seqpar.runtime import work
from ds_seqpar.runtime.kernels import KERNELS
from ds_seqpar.runtime.work import out_with_rowsum
from ds_seqpar.testing import attention
from tests.grids import cover, grouped, whole
from tests.oracle import dense, errors, spreads, tensors
from tests.unit.plans import SINGLE

RANKS = (4, 8, 9, 12, 16)
# CP ranks -> schedule -> its own fields. A plan stands under one name: attention2d is a mesh without a ring, and
# wallfacer one whose gathers are equally long.
SHAPES = {
    2: {
        "ring": [{}],
        "double_ring": [{"ring_size": 2}],
        "distflash": [{}],
        "attention2d": [{"rows": 1}, {"rows": 2}],
        "wallfacer": [{"team": 1}],
    },
    4: {
        "ring": [{}],
        "double_ring": [{"ring_size": 2}],
        "distflash": [{}],
        "attention2d": [{"rows": 1}, {"rows": 2}, {"rows": 4}],
        "wallfacer": [{"team": 2}],
        "mesh": [{"mesh": (2, 1, 2)}, {"mesh": (1, 2, 2)}],
    },
    6: {
        "ring": [{}],
        "double_ring": [{"ring_size": 2}, {"ring_size": 3}],
        "distflash": [{}],
        "attention2d": [{"rows": 2}, {"cols": 2}],
        "mesh": [{"mesh": (3, 1, 2)}, {"mesh": (1, 3, 2)}, {"mesh": (2, 1, 3)}],
    },
    8: {
        "ring": [{}],
        "double_ring": [{"ring_size": 2}, {"ring_size": 4}],
        "distflash": [{}],
        "attention2d": [{"rows": 4}],
        "wallfacer": [{"team": 2}],
        "mesh": [{"mesh": (4, 2, 1)}, {"mesh": (2, 1, 4)}, {"mesh": (1, 2, 4)}],
    },
    9: {
        "ring": [{}],
        "double_ring": [{"ring_size": 3}],
        "distflash": [{}],
        "attention2d": [{"rows": 3}],
        "wallfacer": [{"team": 3}],
        "mesh": [{"mesh": (3, 1, 3)}, {"mesh": (1, 3, 3)}],
    },
    12: {
        "ring": [{}],
        "double_ring": [{"ring_size": 3}, {"ring_size": 4}],
        "distflash": [{}],
        "attention2d": [{"rows": 3}, {"cols": 2}],
        "wallfacer": [{"team": 2}],
        "mesh": [{"mesh": (3, 2, 2)}, {"mesh": (2, 3, 2)}, {"mesh": (1, 4, 3)}],
    },
    16: {
        "ring": [{}],
        "double_ring": [{"ring_size": 4}, {"ring_size": 8}],
        "distflash": [{}],
        "attention2d": [{"rows": 4}, {"rows": 2}],
        "wallfacer": [{"team": 2}, {"team": 4}],
        "mesh": [{"mesh": (4, 2, 2)}, {"mesh": (2, 4, 2)}, {"mesh": (2, 1, 8)}],
    },
}


@dataclasses.dataclass(frozen=True)
class Shape:
    size: int
    ulysses: int
    schedule: str
    fields: tuple

    def config(self, **options):
        settings = {"size": self.size, "ulysses": self.ulysses, "schedule": self.schedule, **dict(self.fields)}
        return SequenceParallelConfig(**settings, **options)

    @functools.cached_property
    def goes_round(self):
        """Whether there is a ring, in which one side or the other travels."""
        return self.config().resolve(self.size).cp_axes[-1] != ("z", 1)

    def __str__(self):
        words = "_".join(str(word) for word in (self.schedule, *sum(self.fields, ()))).replace(", ", "x")
        return f"{self.size}_ranks_u{self.ulysses}_{words}"


GRID = {
    "shape": tuple(
        Shape(inner * ulysses, ulysses, schedule, tuple(fields.items()))
        for inner, schedules in SHAPES.items()
        for schedule, shapes in schedules.items()
        for fields in shapes
        for ulysses in (1, 2)
        if inner * ulysses in RANKS
    ),
    "layout": LAYOUTS,
    "rotate_forward": ("kv", "q"),
    "rotate_backward": ("kv", "q"),
    "causal": (True, False),
    "heads": ((4, 4), (4, 2)),
    "overlap": (False, True),
    "times": (1, 3),  # the shortest sequence that can be shared, and a longer one
}


def _legal(case):
    shape, travelling_q = case["shape"], "q" in (case["rotate_forward"], case["rotate_backward"])
    # what has nothing to do with each other changes together, which saves time: the plans of both directions at a
    # longer sequence; on more than 4 ranks always, and heads with lengths. And of one document "balanced" deals the
    # runs of "zigzag": tests/unit/test_balanced.py
    if case["times"] > 1 and case["rotate_forward"] != case["rotate_backward"]:
        return False
    if shape.size > 4 and (case["times"] == 1) != (case["heads"] == (4, 4)):
        return False
    if shape.size > 4 and (case["rotate_forward"] != case["rotate_backward"] or case["layout"] == "balanced"):
        return False
    if shape.schedule == "distflash":
        return case["causal"] and case["layout"] == "contiguous" and not travelling_q
    # where nothing goes round, "q" and "kv" are the same plan: the next test
    return shape.goes_round or not travelling_q


@functools.lru_cache(maxsize=64)
def _problem(seq, heads, causal):
    inputs = tensors(1, seq, heads, 8)
    return inputs, dense(*inputs, causal=causal)


def _errors(case, compilers):
    """Of out, dq, dk, dv. compilers: as `attention` takes them."""
    config = case["shape"].config(
        **{name: case[name] for name in ("layout", "rotate_forward", "rotate_backward", "overlap")}
    )
    seq = case["times"] * multiple(config.layout, config.size, config.ulysses)
    inputs, wanted = _problem(seq, case["heads"], case["causal"])
    found = attention(config, *inputs, causal=case["causal"], compilers=compilers)
    return errors((found.out, found.dq, found.dk, found.dv), wanted)


def _is_small(shape):
    """Whether `make test` has it: 4 CP ranks, or 9 in a mesh. tests/unit/test_virtual_packs.py draws larger ones."""
    return shape.size // shape.ulysses <= 4 or (shape.size == 9 and shape.schedule == "mesh")


SMALL = {**GRID, "shape": tuple(shape for shape in GRID["shape"] if _is_small(shape))}
# each shape on 8 or 9 ranks with all legal cases, on more ranks with a cover of them
OF_LARGE = [
    pytest.param(
        (cover if shape.size > 9 else whole)(_legal, **{**GRID, "shape": (shape,)}),
        id=str(shape),
        marks=pytest.mark.whole,
    )
    for shape in GRID["shape"]
    if not _is_small(shape)
]


@pytest.mark.parametrize("cases", [*grouped(("shape",), _legal, **SMALL), *OF_LARGE])
def test_every_schedule_equals_dense_attention(cases):
    compilers = {}
    for case in cases:
        wrong = _errors(case, compilers)
        assert max(wrong) <= 1e-10, (case, dict(zip(("out", "dq", "dk", "dv"), wrong, strict=True)))


def test_the_grid_has_every_schedule_on_every_number_of_ranks():
    met = {(case["shape"].schedule, case["shape"].size) for case in whole(_legal, **GRID)}
    assert met == {(schedule, size) for schedule in SINGLE for size in RANKS}


@pytest.mark.parametrize("ranks", [9, pytest.param(16, marks=pytest.mark.whole)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_where_nothing_goes_round_both_sides_travel_by_the_same_plan(direction, overlap, ranks):
    shapes = [shape for shape in GRID["shape"] if shape.size <= ranks and not shape.goes_round]
    assert len(shapes) > 10
    sizes = PlanShape(batch=1, q_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", comm_dtype="float32")
    for shape in shapes:
        sides = []
        for side in ("kv", "q", "auto"):
            config = shape.config(rotate_forward=side, rotate_backward=side, overlap=overlap).resolve(shape.size)
            recipe = config.recipe(config.topology(shape.size))
            block_mask = block_mask_of(CAUSAL, EvenShards("zigzag", 4 * shape.size, recipe.size))
            sides.append(recipe.plan(direction, block_mask, sizes))
        assert sides[0] == sides[1] == sides[2], shape


# ---- in less than fp64

# name -> (settings, how often one partial result is rounded on its way home when it travels in less than fp32): once
# where it goes straight home or is reduce-scattered, and at every hop of a ring
PRECISE = {
    "ring, q travels": ({"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"}, 15),
    "mesh": ({"schedule": "mesh", "mesh": (2, 2, 4)}, 4),
    "mesh, q travels": ({"schedule": "mesh", "mesh": (2, 2, 4), "rotate_forward": "q", "rotate_backward": "q"}, 4),
    "mesh, overlapped": ({"schedule": "mesh", "mesh": (2, 2, 4), "overlap": True}, 1),
    "attention2d": ({"schedule": "attention2d", "rows": 4}, 1),
    "attention2d, overlapped": ({"schedule": "attention2d", "rows": 4, "overlap": True}, 1),
    "distflash": ({"schedule": "distflash"}, 1),
}
NUMBERS = {"name": tuple(PRECISE), "causal": (True, False), "heads": ((4, 4), (4, 1))}


def _can(case):
    return case["causal"] or case["name"] != "distflash"


# every name once, each with another mask and other heads than the last
TURNS = [(True, (4, 4)), (False, (4, 1)), (True, (4, 1)), (False, (4, 4))]
FEW = [
    {"name": name, "causal": causal or name == "distflash", "heads": heads}
    for name, (causal, heads) in zip(PRECISE, TURNS * 2, strict=False)
]
_precise = pytest.mark.parametrize(
    ("name", "causal", "heads"),
    [pytest.param(*case.values(), marks=[] if case in FEW else pytest.mark.whole) for case in whole(_can, **NUMBERS)],
    ids=str,
)


def _attend(name, causal, inputs, travel="fp32"):
    """(out, dq, dk, dv) on 16 virtual ranks."""
    config = SequenceParallelConfig(size=16, ulysses=1, comm_dtype=travel, **PRECISE[name][0])
    found = attention(config, *inputs, causal=causal)
    return found.out, found.dq, found.dk, found.dv


@functools.lru_cache
def _half(heads, causal):
    """bf16 inputs, dense fp64, and what one kernel call on the whole sequence gives."""
    inputs = q, k, v, do = tensors(1, 256, heads, 64, torch.bfloat16)
    kernel, scale = KERNELS["cpu_flash"], 64**-0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    single = out, *kernel.backward(do, q, k, v, out, lse, causal, scale)
    return inputs, dense(*inputs, causal=causal), single


@_precise
def test_fp32_is_exact_to_rounding(name, causal, heads):
    inputs = tensors(1, 96, heads, 32, torch.float32)
    assert max(errors(_attend(name, causal, inputs), dense(*inputs, causal=causal))) <= 1e-5


# ring-flash-attention#42, #67: in bf16 the error grows with the number of ranks
@_precise
def test_bf16_is_at_most_twice_as_wrong_as_one_kernel_call_on_the_whole_sequence(name, causal, heads):
    inputs, wanted, single = _half(heads, causal)
    found = _attend(name, causal, inputs)
    assert max(errors(found, wanted)) <= 2 * max(errors(single, wanted))
    # single elements are chance, their mean is not
    for mine, alone in zip(spreads(found, wanted), spreads(single, wanted), strict=True):
        assert mine <= 1.5 * alone


@_precise
def test_partial_results_that_travel_narrow_cost_their_rounding_only(name, causal, heads):
    inputs, wanted, single = _half(heads, causal)
    found = _attend(name, causal, inputs, "bf16")
    assert all(x.isfinite().all() for x in found)
    # the single call's result was rounded to bf16 once, so its error is one rounding at least; further ones, which know
    # nothing of each other, add up in squares
    for mine, alone in zip(spreads(found, wanted), spreads(single, wanted), strict=True):
        assert mine <= (1.5**2 + PRECISE[name][1]) ** 0.5 * alone


def test_partial_results_really_travel_narrow():
    inputs, *_ = _half((4, 4), False)
    wide, narrow = (_attend("mesh, q travels", False, inputs, travel) for travel in ("fp32", "bf16"))
    assert not any(torch.equal(a, b) for a, b in zip(wide[:2], narrow[:2], strict=True))


# ---- queries that travel bring delta = rowsum(do * out) and no out; a kernel is given a projection instead

SCALES = (1.0, 1e-25, 1e-30)  # of rows of do in fp32: the squares of the small ones are 0


def _rows(dtype, seed):
    """(do, out, delta): rows of every scale, and rows of zeros."""
    dice = torch.Generator().manual_seed(seed)
    do, out = (torch.randn(2, 12, 3, 16, generator=dice, dtype=torch.float64) for _ in range(2))
    do *= torch.tensor([*SCALES, 0.0] * 3, dtype=torch.float64)[:, None, None]
    do, out = do.to(dtype), out.to(dtype)
    return do, out, (do.to(work.sum_dtype(dtype)) * out).sum(-1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # a rounding of each of the result's elements and of their sum
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)],
    ids=["fp64", "fp32", "bf16"],
)
def test_the_projection_has_the_delta_of_the_true_output_and_is_no_longer(dtype, tolerance):
    for seed in range(20):
        do, out, delta = _rows(dtype, seed)
        found = out_with_rowsum(do, delta)
        assert found.dtype == dtype
        assert found.isfinite().all()
        again = (do.double() * found.double()).sum(-1)
        assert (again - delta.double()).abs().le(tolerance * delta.double().abs()).all()
        assert found[:, 3::4].eq(0).all()  # where do is 0
        lengths = found.double().norm(dim=-1), out.double().norm(dim=-1)
        assert lengths[0].le(lengths[1] * (1 + tolerance)).all()


def _travelling_q(scale):
    """fp32 errors of dq, dk, dv of a ring where q travels, for a do of this scale with some rows of zeros."""
    q, k, v, do = tensors(1, 64, (4, 2), 16, torch.float32)
    do *= scale
    do[:, ::5] = 0
    found = attention(SequenceParallelConfig(size=8, ulysses=1, rotate_backward="q"), q, k, v, do)
    return errors((found.dq, found.dk, found.dv), dense(q, k, v, do)[1:])


@pytest.mark.parametrize("scale", SCALES)
def test_gradients_of_visiting_queries_are_exact_however_small(scale):
    assert max(_travelling_q(scale)) <= 1e-5


def test_a_projection_that_squares_small_numbers_would_be_noticed(monkeypatch):
    def naive(do, delta):
        square = do.square().sum(-1, keepdim=True)
        return do * torch.where(square > 0, delta[..., None] / square, 0.0)

    monkeypatch.setattr(work, "out_with_rowsum", naive)
    assert max(_travelling_q(1.0)) <= 1e-5
    assert max(_travelling_q(1e-25)) > 0.01


def test_visitors_outputs_are_projections_and_the_own_is_the_true_one(monkeypatch):
    made = []
    monkeypatch.setattr(work, "out_with_rowsum", lambda do, delta: made.append(do.shape) or out_with_rowsum(do, delta))
    inputs = tensors(1, 16, (2, 2), 8)
    for side, visitors in (("kv", 0), ("q", 4 * 3)):
        made.clear()
        attention(SequenceParallelConfig(size=4, ulysses=1, rotate_forward=side, rotate_backward=side), *inputs)
        assert len(made) == visitors

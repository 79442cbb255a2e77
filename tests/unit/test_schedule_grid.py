"""Every schedule in every shape, over layouts, Ulysses, travelling sides, masks, heads and overlap, equals dense fp64.

Virtual ranks: the walker, kernels and packing are those of the real ranks, only the transport is a mailbox.
"""

import dataclasses
import functools

import pytest
import torch

from ds_seqpar import work
from ds_seqpar.config import LAYOUTS, SCHEDULES, SequenceParallelConfig
from ds_seqpar.kernels import KERNELS
from ds_seqpar.layout import multiple
from ds_seqpar.schedules import build
from ds_seqpar.topology import Topology
from ds_seqpar.virtual import attention
from ds_seqpar.work import project
from tests.grids import grouped, whole
from tests.oracle import dense, error, errors, spreads, tensors

RANKS = (4, 8, 9, 12, 16)
# inner ranks -> schedule -> its own fields. A plan stands under one name: attention2d is a mesh without a ring, and
# wallfacer one whose gathers are equally long.
SHAPES = {
    2: {
        "ring": [{}],
        "double_ring": [{"window": 2}],
        "distflash": [{}],
        "attention2d": [{"rows": 1}, {"rows": 2}],
        "wallfacer": [{"team": 1}],
    },
    4: {
        "ring": [{}],
        "double_ring": [{"window": 2}],
        "distflash": [{}],
        "attention2d": [{"rows": 1}, {"rows": 2}, {"rows": 4}],
        "wallfacer": [{"team": 2}],
        "mesh": [{"mesh": (2, 1, 2)}, {"mesh": (1, 2, 2)}],
    },
    6: {
        "ring": [{}],
        "double_ring": [{"window": 2}, {"window": 3}],
        "distflash": [{}],
        "attention2d": [{"rows": 2}, {"cols": 2}],
        "mesh": [{"mesh": (3, 1, 2)}, {"mesh": (1, 3, 2)}, {"mesh": (2, 1, 3)}],
    },
    8: {
        "ring": [{}],
        "double_ring": [{"window": 2}, {"window": 4}],
        "distflash": [{}],
        "attention2d": [{"rows": 4}],
        "wallfacer": [{"team": 2}],
        "mesh": [{"mesh": (4, 2, 1)}, {"mesh": (2, 1, 4)}, {"mesh": (1, 2, 4)}],
    },
    9: {
        "ring": [{}],
        "double_ring": [{"window": 3}],
        "distflash": [{}],
        "attention2d": [{"rows": 3}],
        "wallfacer": [{"team": 3}],
        "mesh": [{"mesh": (3, 1, 3)}, {"mesh": (1, 3, 3)}],
    },
    12: {
        "ring": [{}],
        "double_ring": [{"window": 3}, {"window": 4}],
        "distflash": [{}],
        "attention2d": [{"rows": 3}, {"cols": 2}],
        "wallfacer": [{"team": 2}],
        "mesh": [{"mesh": (3, 2, 2)}, {"mesh": (2, 3, 2)}, {"mesh": (1, 4, 3)}],
    },
    16: {
        "ring": [{}],
        "double_ring": [{"window": 4}, {"window": 8}],
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
    def rounds(self):
        """How many steps something goes round; 1 where there is no ring."""
        return self.config().resolve(self.size).inner_axes[-1][1]

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
    "forward": ("kv", "q"),
    "backward": ("kv", "q"),
    "causal": (True, False),
    "heads": ((4, 4), (4, 2)),
    "overlap": (False, True),
    "times": (1, 3),  # the shortest sequence that can be shared, and a longer one
}


def _legal(case):
    shape, travelling_q = case["shape"], "q" in (case["forward"], case["backward"])
    # heads and lengths have nothing to do with each other: on many ranks they change together, which saves time
    if shape.size > 9 and (case["times"] == 1) != (case["heads"] == (4, 4)):
        return False
    if shape.schedule == "distflash":
        return case["causal"] and case["layout"] == "contiguous" and not travelling_q
    # where nothing goes round, "q" and "kv" are the same plan: the next test
    return shape.rounds > 1 or not travelling_q


@functools.lru_cache(maxsize=64)
def _problem(seq, heads, causal):
    inputs = tensors(1, seq, heads, 8)
    return inputs, dense(*inputs, causal=causal)


def _errors(case):
    """Of out, dq, dk, dv."""
    config = case["shape"].config(**{name: case[name] for name in ("layout", "forward", "backward", "overlap")})
    seq = case["times"] * multiple(config.layout, config.size, config.ulysses)
    inputs, wanted = _problem(seq, case["heads"], case["causal"])
    found = attention(config, *inputs, causal=case["causal"])
    return errors((found.out, found.dq, found.dk, found.dv), wanted)


@pytest.mark.parametrize("cases", grouped(("shape",), _legal, **GRID))
def test_every_schedule_equals_dense_attention(cases):
    for case in cases:
        wrong = _errors(case)
        assert max(wrong) <= 1e-10, (case, dict(zip(("out", "dq", "dk", "dv"), wrong, strict=True)))


def test_the_grid_has_every_schedule_and_every_number_of_ranks():
    cases = whole(_legal, **GRID)
    met = {(case["shape"].schedule, case["shape"].size) for case in cases}
    squares = {(schedule, size) for schedule in SCHEDULES for size in RANKS}
    # (3, 3, 1) is the only mesh of 9 that is no attention2d, wallfacer or ring, but for those with a ring: all have it
    assert met == squares


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_where_nothing_goes_round_both_sides_travel_by_the_same_plan(direction, overlap):
    shapes = [shape for shape in GRID["shape"] if shape.rounds == 1 and shape.schedule != "distflash"]
    assert len(shapes) > 10
    sizes = tuple({"q": 3, "kv": 5, "out": 7, "dq": 11, "dkv": 13}.items())
    for shape in shapes:
        topology = Topology.of(shape.config().resolve(shape.size), shape.size)
        settings = shape.schedule, topology, "zigzag", 4 * shape.size, True, direction
        kv, q, auto = (build(*settings, travels=side, overlap=overlap, sizes=sizes) for side in ("kv", "q", "auto"))
        assert kv == q == auto, shape


# ---- in less than fp64

PRECISE = {
    "mesh": {"schedule": "mesh", "mesh": (2, 2, 4)},
    "mesh, q travels": {"schedule": "mesh", "mesh": (2, 2, 4), "forward": "q", "backward": "q"},
    "mesh, overlapped": {"schedule": "mesh", "mesh": (2, 2, 4), "overlap": True},
    "attention2d": {"schedule": "attention2d", "rows": 4},
    "attention2d, overlapped": {"schedule": "attention2d", "rows": 4, "overlap": True},
    "distflash": {"schedule": "distflash"},
}
_precise = pytest.mark.parametrize("name", PRECISE)
_masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
_heads = pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "gqa"])


def _attend(name, causal, inputs, travel="fp32"):
    if name == "distflash" and not causal:
        pytest.skip("distflash has no schedule without a causal mask")
    found = attention(SequenceParallelConfig(size=16, ulysses=1, travel_dtype=travel, **PRECISE[name]), *inputs)
    return found.out, found.dq, found.dk, found.dv

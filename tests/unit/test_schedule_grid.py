"""Every schedule in every shape, over layouts, Ulysses, travelling sides, masks, heads and overlap, equals dense fp64.

Virtual ranks: the walker, kernels and packing are those of the real ranks, only the transport is a mailbox.
"""

import itertools
import math

import pytest
import torch

from ds_seqpar.config import LAYOUTS, SCHEDULES, SequenceParallelConfig
from ds_seqpar.errors import ConfigError
from ds_seqpar.kernels import KERNELS
from ds_seqpar.layout import multiple
from ds_seqpar.schedules import build
from ds_seqpar.topology import Topology
from ds_seqpar.virtual import attention
from tests.grids import grouped
from tests.oracle import dense, errors, tensors

# inner ranks -> (schedule, its own fields). A shape stands under one name: a wallfacer of team 2 on 16 ranks is the
# mesh (2, 2, 4), and an attention2d is a mesh that has no ring.
SHAPES = {
    2: [
        ("ring", {}),
        ("double_ring", {"window": 2}),
        ("distflash", {}),
        ("attention2d", {"rows": 1}),
        ("attention2d", {"rows": 2}),
        ("wallfacer", {"team": 1}),
    ],
    4: [
        ("ring", {}),
        ("double_ring", {"window": 2}),
        ("distflash", {}),
        *(("attention2d", {"rows": rows}) for rows in (1, 2, 4)),
        ("wallfacer", {"team": 2}),
        *(("mesh", {"mesh": shape}) for shape in ((2, 1, 2), (1, 2, 2))),
    ],
    6: [
        ("ring", {}),
        *(("double_ring", {"window": window}) for window in (2, 3)),
        ("distflash", {}),
        *(("attention2d", {"rows": rows}) for rows in (2, 3)),
        *(("mesh", {"mesh": shape}) for shape in ((3, 1, 2), (1, 3, 2), (2, 1, 3))),
    ],
    8: [
        ("ring", {}),
        *(("double_ring", {"window": window}) for window in (2, 4)),
        ("distflash", {}),
        ("attention2d", {"rows": 4}),
        ("wallfacer", {"team": 2}),
        *(("mesh", {"mesh": shape}) for shape in ((4, 2, 1), (2, 1, 4), (1, 2, 4))),
    ],
    9: [
        ("ring", {}),
        ("double_ring", {"window": 3}),
        ("distflash", {}),
        ("attention2d", {"rows": 3}),
        ("wallfacer", {"team": 3}),
        *(("mesh", {"mesh": shape}) for shape in ((3, 1, 3), (1, 3, 3))),
    ],
    12: [
        ("ring", {}),
        *(("double_ring", {"window": window}) for window in (3, 4)),
        ("distflash", {}),
        *(("attention2d", {"rows": rows}) for rows in (3, 6)),
        ("wallfacer", {"team": 2}),
        *(("mesh", {"mesh": shape}) for shape in ((3, 2, 2), (2, 3, 2), (1, 4, 3))),
    ],
    16: [
        ("ring", {}),
        *(("double_ring", {"window": window}) for window in (4, 8)),
        ("distflash", {}),
        *(("attention2d", {"rows": rows}) for rows in (4, 2)),
        *(("wallfacer", {"team": team}) for team in (2, 4)),
        *(("mesh", {"mesh": shape}) for shape in ((4, 2, 2), (2, 4, 2), (2, 1, 8))),
    ],
}
RANKS = (4, 8, 9, 12, 16)
GRID = {
    # (ranks, Ulysses, schedule, fields as a sorted tuple)
    "shape": tuple(
        (inner * ulysses, ulysses, schedule, *fields.items())
        for ulysses in (1, 2)
        for inner, shapes in SHAPES.items()
        for schedule, fields in shapes
        if inner * ulysses in RANKS
    ),
    "layout": LAYOUTS,
    "forward": ("kv", "q"),
    "backward": ("kv", "q"),
    "causal": (True, False),
    "heads": ((4, 4), (4, 2)),
    "overlap": (False, True),
}

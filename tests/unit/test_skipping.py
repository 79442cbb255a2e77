"""What benchmarks/skipping.py counts, on cases small enough to count by hand."""

import pytest

from benchmarks import skipping
from ds_seqpar.compiler.cuts import calls
from ds_seqpar.compiler.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.shape import Shape
from ds_seqpar.compiler.shards import EvenShards, UnevenShards
from ds_seqpar.compiler.tiles import Tile
from tests.unit.plans import SINGLE

SHAPE = Shape(batch=1, q_heads=2, kv_heads=2, head_dim=128, dtype="bfloat16", travel="float32")
UNIT = 256 * 2 * 128 * 2  # bytes of q of 256 tokens
BLOCK = 128 * 128
TRIANGLE = 256 * 257 // 2


@pytest.mark.parametrize("direction", skipping.DIRECTIONS)
def test_ranks_with_a_document_each_compute_its_triangle_and_receive_nothing(direction):
    mask = Mask(documents=Mask.documents_of([256] * 4))
    found = skipping.counts({"schedule": "ring"}, direction, mask, EvenShards("contiguous", 1024, 4), SHAPE)
    assert found == [skipping.Count(calls=1, products=TRIANGLE, blocks=3 * BLOCK, received=0)] * 4
    assert skipping.visible(mask, 1024) == 4 * TRIANGLE


def test_a_causal_ring_computes_and_receives_a_block_more_on_each_rank():
    found = skipping.counts({"schedule": "ring"}, "forward", CAUSAL, EvenShards("contiguous", 1024, 4), SHAPE)
    assert [one.calls for one in found] == [1, 2, 3, 4]
    assert [one.products for one in found] == [TRIANGLE + rank * 256 * 256 for rank in range(4)]
    assert [one.blocks for one in found] == [(3 + 4 * rank) * BLOCK for rank in range(4)]
    assert [one.received for one in found] == [2 * rank * UNIT for rank in range(4)]


def test_collectives_bring_the_other_members_parts():
    setting = {"schedule": "attention2d", "rows": 2}
    found = skipping.counts(setting, "forward", FULL, EvenShards("contiguous", 1024, 4), SHAPE)
    log_sum_exp = 256 * 2 * 4
    # a block of q, one of k and v, and a result of the own queries in fp32
    assert {one.received for one in found} == {UNIT + 2 * UNIT + 2 * UNIT + log_sum_exp}
    assert sum(one.products for one in found) == skipping.visible(FULL, 1024) == 1024**2


def test_what_arrives_has_the_tokens_of_its_sender():
    shards = UnevenShards([((0, 1, 100),), ((100, 1, 924),)])
    found = skipping.counts({"schedule": "ring"}, "forward", FULL, shards, SHAPE)
    assert [one.received for one in found] == [2 * tokens * 2 * 128 * 2 for tokens in (924, 100)]


@pytest.mark.parametrize(
    ("tile", "blocks"),
    [
        (Tile(0, 130, 0, 10, "full"), 2),
        (Tile(5, 305, 7, 307, "causal"), 1 + 2 + 3),
        (Tile(0, 300, 0, 300, "upper"), 1 + 2 + 3),
        (Tile(0, 300, 0, 100, "causal"), 1 + 2),  # a square, and 200 rows that see all
        (Tile(0, 512, 0, 767, "band", 256), 2 * (3 + 3)),  # two squares of 256, each upper and, but for a row, causal
        (Tile(0, 128, 0, 383, "band", 256), 1 + 1 + 1),  # upper, full, and 127 rows causal
    ],
)
def test_a_kernel_computes_the_blocks_that_a_tile_touches(tile, blocks):
    assert sum(map(skipping.in_blocks, calls([tile], skipping.CUDA))) == blocks * BLOCK


def test_ranks_read_what_is_theirs_to_see_and_held_by_others():
    shards = EvenShards("contiguous", 512, 4)
    packed = Mask(documents=(0, 100))
    assert [skipping.read(packed, shards, rank) for rank in range(4)] == [0, 28, 156, 284]
    assert [skipping.read(Mask(window=31), shards, rank) for rank in range(4)] == [0, 30, 30, 30]
    assert skipping.read(FULL, shards, 2) == 384


def test_a_pack_is_dealt_whole_or_cut_evenly():
    assert skipping.dealt([5, 3, 3, 2], 2) == (((0, 1, 5),), ((5, 1, 3), (8, 1, 3), (11, 1, 2)))
    assert skipping.cut([16, 4], 2) == (
        ((0, 1, 4), (12, 1, 4), (16, 1, 1), (19, 1, 1)),
        ((4, 1, 4), (8, 1, 4), (17, 1, 1), (18, 1, 1)),
    )
    for seed in range(20):
        lengths = skipping.lengths_of(64, 65536, seed)
        assert len(lengths) == 64
        assert min(lengths) >= 1
        assert sum(lengths) == 65536


@pytest.mark.parametrize("direction", skipping.DIRECTIONS)
def test_every_schedule_computes_what_is_visible_and_whole_documents_bring_nothing(direction):
    found = [*skipping.rows(skipping.cases(4, tokens=4096), direction, SHAPE, 4096)]
    assert {row.schedule for row in found} >= set(SINGLE)  # others want other shards
    assert {row.products for row in found} == {1}
    assert {row.received for row in found if row.case.layout == "whole documents"} == {(0, 0)}
    assert all(row.fraction > 0 for row in found if row.case.kind == "causal")

"""Tiles cut into calls that a kernel takes: the same pairs, each once, in few calls."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.compiler.cuts import PLAIN, Takes, calls
from ds_seqpar.compiler.layout import Run
from ds_seqpar.compiler.masks import Mask
from ds_seqpar.compiler.tiles import Segments, Tile, tiles
from tests.grids import examples
from tests.kernel_suite import seen

TAKES = [
    PLAIN,
    Takes(square=True),
    Takes(band=1000),
    Takes(square=True, band=9, rows=5),
    Takes(band=100, rows=70),
    Takes(square=True, windows=1),
    Takes(square=True, windows=2),
    Takes(square=True, windows=2, segments=True),
]


def _covered(found, rows, columns):
    """How often each pair is visible."""
    covered = torch.zeros(rows, columns, dtype=torch.int64)
    for call in found:
        i, j = torch.arange(call.q1 - call.q0)[:, None], torch.arange(call.k1 - call.k0)
        part = {"full": i >= 0, "causal": j <= i, "upper": j >= i, "band": (i <= j) & (j < i + call.width)}
        part = part[call.kind] if call.segments is None else seen(call.segments)
        part = part.expand(call.q1 - call.q0, call.k1 - call.k0).long()
        assert call.products == call.groups * part.sum() > 0, call
        for group in range(call.groups):
            q, k = group * call.q_step, group * call.k_step
            assert call.q1 + q <= rows, call
            assert call.k1 + k <= columns, call
            covered[call.q0 + q : call.q1 + q, call.k0 + k : call.k1 + k] += part
    return covered


def _taken(call, takes):
    """Whether a kernel takes the call; upper is causal in reverse order."""
    rows, columns = call.q1 - call.q0, call.k1 - call.k0
    if call.segments:
        left, right, several = call.segments.left, call.segments.right, len(call.segments.rows) > 1
        assert max(left, right) < max(call.segments.columns)  # or a kernel would take it for no limit
        return (takes.windows == 2 and takes.segments >= several) or (right == 0 and not several)
    if call.kind == "band":
        return call.width <= takes.band and rows <= (takes.rows or rows)
    return not takes.square or call.kind == "full" or rows == columns


@pytest.mark.parametrize("takes", TAKES, ids=str)
@examples(60)
@given(data=st.data())
def test_calls_are_what_the_kernel_takes_and_see_the_same_pairs(takes, data):
    seq = data.draw(st.integers(1, 160))
    starts = data.draw(st.sets(st.integers(1, seq)))
    if data.draw(st.booleans()):
        starts = range(0, seq, data.draw(st.integers(1, seq)))
    mask = Mask(
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(1, 130)),
        documents=(0, *sorted({start for start in starts if 0 < start < seq})),
    )
    step = data.draw(st.integers(1, 3))
    q, kv = ((Run(0, size, -(-seq // size)),) for size in (1, step))
    found = tiles(q, kv, mask, takes.square)
    cut = calls(found, takes)
    size = q[0].length, kv[0].length
    assert torch.equal(_covered(cut, *size), _covered(found, *size))
    assert all(_taken(call, takes) for call in cut), cut
    for call in cut:  # rows are in one group; a call's results are no more than the whole
        assert call.groups == 1 or call.q_step >= call.q1 - call.q0, call
        assert call.groups * (call.k1 - call.k0) <= size[1], call


def test_documents_of_one_length_are_one_call():
    runs = (Run(0, 1, 256),)
    for causal, kind in ((True, "causal"), (False, "full")):
        found = tiles(runs, runs, Mask(causal=causal, documents=tuple(range(0, 256, 16))))
        for takes in (PLAIN, Takes(square=True, windows=2, segments=True)):  # a batch needs no lengths
            assert calls(found, takes) == (Tile(0, 16, 0, 16, kind, 0, 16, 16, 16),)
    longer = tiles(runs, runs, Mask(documents=(0, 10, 20, 56, 66, 76, 200)))  # 10 10 36 10 10 124 56
    assert [(call.q0, call.q1, call.groups) for call in calls(longer, PLAIN)] == [
        (0, 10, 2), (20, 56, 1), (56, 66, 2), (76, 200, 1), (200, 256, 1)
    ]  # fmt: skip


def test_tiles_that_share_rows_or_columns_are_calls_of_their_own():
    beside = [Tile(0, 4, at, at + 4, "full") for at in (0, 4, 8)]
    below = [Tile(at, at + 4, 0, 4, "full") for at in (0, 4, 8)]
    assert calls(beside, PLAIN) == tuple(beside)
    assert calls(below, PLAIN) == tuple(below)


def test_who_takes_all_tiles_is_given_them_as_they_are():
    runs = (Run(0, 1, 64),)
    for window, documents in itertools.product((None, 5), ((), (0, 16, 32, 48))):
        found = tiles(runs, runs, Mask(window=window, documents=documents))
        assert calls(found, Takes(tiles=True)) == found


WINDOWS = Takes(square=True, windows=2, segments=True)


def _own(mask, takes=WINDOWS, queries=((0, 1, 4096),), keys=None):
    """The calls of some runs of queries and of keys."""
    q, kv = (tuple(Run(*run) for run in runs) for runs in (queries, keys or queries))
    return calls(tiles(q, kv, mask, takes.square), takes)


@pytest.mark.parametrize("windows", [1, 2])
def test_a_window_is_one_call(windows):
    takes = WINDOWS._replace(windows=windows, segments=False)
    (call,) = _own(Mask(window=100), takes)
    assert call.segments == Segments((4096,), (4096,), 99, 0)
    (call,) = _own(Mask(window=100, causal=False), WINDOWS)
    assert call.segments == Segments((4096,), (4096,), 99, -1)
    (call,) = _own(Mask(), takes, ((0, 1, 64), (960, 1, 64)))  # a rank's own tokens under zigzag
    assert call == Tile(0, 128, 0, 128, "causal")
    # what a striped layout gives: of any two ranks, for windows too, whichever comes first
    for first, second in ((1, 2), (2, 1)):
        assert len(_own(Mask(), takes, ((first, 4, 64),), ((second, 4, 64),))) == 1
        assert len(_own(Mask(window=100), takes, ((first, 4, 64),), ((second, 4, 64),))) == 1


@pytest.mark.parametrize("window", [None, 20, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_a_pack_of_many_documents_is_one_call(window, causal):
    lengths = [1 + 37 * n % 61 for n in range(63)]
    mask = Mask(causal=causal, window=window, documents=Mask.documents_of([*lengths, 4096 - sum(lengths)]))
    (call,) = _own(mask)
    assert call.segments.rows == call.segments.columns == (*lengths, 4096 - sum(lengths))
    for first, second in ((0, 0), (1, 2), (2, 1)):  # some documents have rows or columns without a pair
        striped = _own(mask, WINDOWS, ((first, 4, 1024),), ((second, 4, 1024),))
        assert len(striped) == 1 or not causal


def test_a_band_is_cut_into_blocks_whose_columns_overlap():
    band = Tile(5, 805, 0, 1055, "band", 256)
    first, second, rest = calls([band], Takes(band=512, rows=192))
    assert first == Tile(5, 197, 0, 447, "band", 256, 2, 192, 192)
    assert second == first._replace(q0=389, q1=581, k0=384, k1=831)
    assert rest == Tile(773, 805, 768, 1055, "band", 256)
    assert calls([band], Takes(band=256)) == (band,)
    assert {call.kind for call in calls([band], Takes(band=255))} == {"upper", "full", "causal"}
    # the far edge of a window is a band whose last columns are not there
    edge = Tile(0, 9, 3, 12, "upper")
    assert calls([edge], Takes(band=9)) == (edge._replace(kind="band", width=9),)
    assert calls([edge], Takes(band=8)) == calls([edge], Takes(band=9, rows=8)) == (edge,)

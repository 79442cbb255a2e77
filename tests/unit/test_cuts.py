"""Tiles cut into launches that a kernel supports: the same pairs, each once, in few launches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL, KernelSupport, launches
from ds_seqpar.core.compiler.tiles.tiles import Segments, Tile, tiles
from ds_seqpar.kernels.varlen import joined
from tests.grids import examples
from tests.kernel_suite import seen
from tests.unit.packs import parents_of

SUPPORTS = [
    PLAIN_KERNEL,
    KernelSupport(square=True),
    KernelSupport(band=1000),
    KernelSupport(square=True, band=9, rows=5),
    KernelSupport(band=100, rows=70),
    KernelSupport(square=True, windows=1, join=joined),
    KernelSupport(square=True, windows=2, join=joined),
    KernelSupport(square=True, windows=2, segments=True, join=joined),
]


def _covered(found, rows, columns):
    """How often each pair is visible."""
    covered = torch.zeros(rows, columns, dtype=torch.int64)
    for launch in found:
        i, j = torch.arange(launch.q1 - launch.q0)[:, None], torch.arange(launch.k1 - launch.k0)
        part = {"full": i >= 0, "causal": j <= i, "upper": j >= i, "band": (i <= j) & (j < i + launch.width)}
        part = part[launch.kind] if launch.segments is None else seen(launch.segments)
        part = part.expand(launch.q1 - launch.q0, launch.k1 - launch.k0).long()
        assert launch.pairs == launch.groups * part.sum() > 0, launch
        for group in range(launch.groups):
            q, k = group * launch.q_step, group * launch.k_step
            assert launch.q1 + q <= rows, launch
            assert launch.k1 + k <= columns, launch
            covered[launch.q0 + q : launch.q1 + q, launch.k0 + k : launch.k1 + k] += part
    return covered


def _supported(launch, support):
    """Whether a kernel supports the launch; upper is causal in reverse order."""
    rows, columns = launch.q1 - launch.q0, launch.k1 - launch.k0
    if launch.segments:
        left, right, several = launch.segments.left, launch.segments.right, len(launch.segments.rows) > 1
        assert max(left, right) < max(launch.segments.columns)  # or a kernel would take it for no limit
        return (support.windows == 2 and support.segments >= several) or (right == 0 and not several)
    if launch.kind == "band":
        return launch.width <= support.band and rows <= (support.rows or rows)
    return not support.square or launch.kind == "full" or rows == columns


@pytest.mark.parametrize("support", SUPPORTS, ids=lambda support: str(support._replace(join=None)))
@examples(60)
@given(data=st.data())
def test_launches_are_what_the_kernel_supports_and_see_the_same_pairs(support, data):
    seq = data.draw(st.integers(1, 160))
    starts = data.draw(st.sets(st.integers(1, seq)))
    if data.draw(st.booleans()):
        starts = range(0, seq, data.draw(st.integers(1, seq)))
    documents = 0, *sorted({start for start in starts if 0 < start < seq})
    limits = {"window": data.draw(st.none() | st.integers(1, 130))}
    if data.draw(st.booleans()):
        most = data.draw(st.integers(1, 4))
        limits = {"parents": parents_of(len(documents), lambda path: data.draw(st.integers(0, min(path, most))))}
    mask = Mask(causal=data.draw(st.booleans()), documents=documents, **limits)
    step = data.draw(st.integers(1, 3))
    q, kv = ((Run(0, size, -(-seq // size)),) for size in (1, step))
    found = tiles(q, kv, mask, support.square)
    cut = launches(found, support)
    size = q[0].length, kv[0].length
    assert torch.equal(_covered(cut, *size), _covered(found, *size))
    assert all(_supported(launch, support) for launch in cut), cut
    for launch in cut:  # rows are in one group; a launch's results are no more than the whole
        assert launch.groups == 1 or launch.q_step >= launch.q1 - launch.q0, launch
        assert launch.groups * (launch.k1 - launch.k0) <= size[1], launch


def test_completions_and_their_prompt_are_two_launches_whatever_their_lengths():
    lengths = [1 + 37 * n % 61 for n in range(16)]
    mask = Mask(documents=Mask.documents_of([1000, *lengths]), parents=(-1, *(0,) * 16))
    own, prompt = _own(mask, queries=((0, 1, 1000 + sum(lengths)),))
    assert (own.segments.rows, own.segments.right) == ((1000 + lengths[0], *lengths[1:]), 0)
    assert prompt == Tile(1000 + lengths[0], 1000 + sum(lengths), 0, 1000, "full")


def test_documents_of_one_length_are_one_launch():
    runs = (Run(0, 1, 256),)
    for causal, kind in ((True, "causal"), (False, "full")):
        found = tiles(runs, runs, Mask(causal=causal, documents=tuple(range(0, 256, 16))))
        for support in (
            PLAIN_KERNEL,
            KernelSupport(square=True, windows=2, segments=True, join=joined),
        ):  # a batch needs no lengths
            assert launches(found, support) == (Tile(0, 16, 0, 16, kind, 0, 16, 16, 16),)
    longer = tiles(runs, runs, Mask(documents=(0, 10, 20, 56, 66, 76, 200)))  # 10 10 36 10 10 124 56
    assert [(launch.q0, launch.q1, launch.groups) for launch in launches(longer, PLAIN_KERNEL)] == [
        (0, 10, 2), (20, 56, 1), (56, 66, 2), (76, 200, 1), (200, 256, 1)
    ]  # fmt: skip


def test_tiles_that_share_rows_or_columns_are_launches_of_their_own():
    beside = [Tile(0, 4, at, at + 4, "full") for at in (0, 4, 8)]
    below = [Tile(at, at + 4, 0, 4, "full") for at in (0, 4, 8)]
    assert launches(beside, PLAIN_KERNEL) == tuple(beside)
    assert launches(below, PLAIN_KERNEL) == tuple(below)


WINDOWS = KernelSupport(square=True, windows=2, segments=True, join=joined)


def _own(mask, support=WINDOWS, queries=((0, 1, 4096),), keys=None):
    """The launches of some runs of queries and of keys."""
    q, kv = (tuple(Run(*run) for run in runs) for runs in (queries, keys or queries))
    return launches(tiles(q, kv, mask, support.square), support)


@pytest.mark.parametrize("windows", [1, 2])
def test_a_window_is_one_launch(windows):
    support = WINDOWS._replace(windows=windows, segments=False)
    (launch,) = _own(Mask(window=100), support)
    assert launch.segments == Segments((4096,), (4096,), 99, 0)
    (launch,) = _own(Mask(window=100, causal=False), WINDOWS)
    assert launch.segments == Segments((4096,), (4096,), 99, -1)
    (launch,) = _own(Mask(), support, ((0, 1, 64), (960, 1, 64)))  # a rank's local tokens under zigzag
    assert launch == Tile(0, 128, 0, 128, "causal")
    # what a striped layout gives: of any two ranks, for windows too, whichever comes first
    for first, second in ((1, 2), (2, 1)):
        assert len(_own(Mask(), support, ((first, 4, 64),), ((second, 4, 64),))) == 1
        assert len(_own(Mask(window=100), support, ((first, 4, 64),), ((second, 4, 64),))) == 1


@pytest.mark.parametrize("window", [None, 20, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_a_pack_of_many_documents_is_one_launch(window, causal):
    lengths = [1 + 37 * n % 61 for n in range(63)]
    mask = Mask(causal=causal, window=window, documents=Mask.documents_of([*lengths, 4096 - sum(lengths)]))
    (launch,) = _own(mask)
    assert launch.segments.rows == launch.segments.columns == (*lengths, 4096 - sum(lengths))
    for first, second in ((0, 0), (1, 2), (2, 1)):  # some documents have rows or columns without a pair
        striped = _own(mask, WINDOWS, ((first, 4, 1024),), ((second, 4, 1024),))
        assert len(striped) == 1 or not causal


def test_a_band_is_cut_into_blocks_whose_columns_overlap():
    band = Tile(5, 805, 0, 1055, "band", 256)
    first, second, rest = launches([band], KernelSupport(band=512, rows=192))
    assert first == Tile(5, 197, 0, 447, "band", 256, 2, 192, 192)
    assert second == first._replace(q0=389, q1=581, k0=384, k1=831)
    assert rest == Tile(773, 805, 768, 1055, "band", 256)
    assert launches([band], KernelSupport(band=256)) == (band,)
    assert {launch.kind for launch in launches([band], KernelSupport(band=255))} == {"upper", "full", "causal"}
    # the far edge of a window is a band whose last columns are not there
    edge = Tile(0, 9, 3, 12, "upper")
    assert launches([edge], KernelSupport(band=9)) == (edge._replace(kind="band", width=9),)
    assert launches([edge], KernelSupport(band=8)) == launches([edge], KernelSupport(band=9, rows=8)) == (edge,)

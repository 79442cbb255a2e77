"""Masks as values; tiles that cover exactly what a mask leaves visible, in few kernel calls; who sees whom."""

import itertools
import pickle

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS, Run, join
from ds_seqpar.core.compiler.sharding.masks import END, Mask, visibility
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.compiler.tiles.tiles import Tile, tiles
from ds_seqpar.core.settings import LAYOUTS as COMMON
from ds_seqpar.data.balance import balanced
from tests.grids import examples
from tests.oracle import seen
from tests.unit.packs import parents_of
from tests.words import missing

CAUSAL, FULL = Mask(), Mask(causal=False)


def _blocks(layout, ranks, per_rank):
    return [LAYOUTS[layout].runs(ranks * per_rank, ranks, rank) for rank in range(ranks)]


def _held(runs):
    return torch.tensor([position for run in runs for position in run.positions], dtype=torch.int64)


def _dense(q, kv, mask):
    return seen(mask, _held(q), _held(kv))


def _part(tile):
    """What the tile's definition says of its rectangle."""
    rows, columns = torch.arange(tile.q1 - tile.q0)[:, None], torch.arange(tile.k1 - tile.k0)[None, :]
    return {
        "full": rows >= 0,
        "causal": columns <= rows,
        "upper": columns >= rows,
        "band": (rows <= columns) & (columns < rows + tile.width),
    }[tile.kind].expand(tile.q1 - tile.q0, tile.k1 - tile.k0)


def _assert_exact(q, kv, mask, square=False):
    """Every visible pair lies in exactly one tile and no other pair in any."""
    seen = _dense(q, kv, mask)
    covered = torch.zeros(seen.shape, dtype=torch.int64)
    found = tiles(q, kv, mask, square)
    for tile in found:
        assert 0 <= tile.q0 < tile.q1 <= seen.shape[0], tile
        assert 0 <= tile.k0 < tile.k1 <= seen.shape[1], tile
        part = _part(tile).long()
        assert tile.pairs == part.sum() > 0, tile
        covered[tile.q0 : tile.q1, tile.k0 : tile.k1] += part
        rows, columns = part.shape
        assert tile.kind != "band" or columns == rows + tile.width - 1, tile
        assert tile.kind == "band" or tile.width == 0, tile
        assert tile.kind != "upper" or rows == columns, tile
        assert not (square and tile.kind == "causal") or rows == columns, tile
    assert torch.equal(covered, seen.long()), (q, kv, mask, found)


# ---- the value


def test_bounds_are_the_first_and_last_key_that_a_query_sees():
    for causal, window, documents in itertools.product((True, False), (None, 1, 3, 40), ((), (0, 4, 5, 11))):
        mask = Mask(causal=causal, window=window, documents=documents)
        wanted = _dense((Run(0, 1, 20),), (Run(0, 1, 20),), mask)
        for p in range(20):
            lo, hi = mask.bounds(p)
            assert list(range(lo, min(hi, 20))) == wanted[p].nonzero().flatten().tolist(), (mask, p)
            for right in (0, 2, 40):
                near = Mask(causal=False, window=window, window_right=right, documents=documents)
                seen = _dense((Run(p, 1, 1),), (Run(0, 1, 20),), near)[0]
                lo, hi = near.bounds(p)
                assert list(range(lo, min(hi, 20))) == seen.nonzero().flatten().tolist(), (near, p)
    for window, whole in ((None, False), (3, False), (3, True), (40, True)):
        mask = Mask(window=window, documents=(0, 4, 11), blocks=((1, 3), (4, 11), (12, 18)), whole_blocks=whole)
        wanted = _dense((Run(0, 1, 20),), (Run(0, 1, 20),), mask)
        for p in range(20):
            assert list(range(*mask.bounds(p))) == wanted[p].nonzero().flatten().tolist(), (mask, p)
    assert FULL.bounds(7) == (0, END)
    assert [Mask(prefix=5).bounds(p) for p in (0, 4, 5, 9)] == [(0, 5), (0, 5), (0, 6), (0, 10)]


def test_a_mask_is_a_value():
    packed = Mask(documents=(0, 3, 9))
    assert packed == Mask(documents=(0, 3, 9))
    others = Mask(prefix=3), Mask(causal=False, window_right=3), Mask(causal=False, window_right=0)
    others += (
        Mask(blocks=((2, 5),)),
        Mask(blocks=((2, 6),), window=3),
        Mask(blocks=((2, 6),), window=3, whole_blocks=True),
    )
    assert len({packed, Mask(documents=(0, 3, 9)), CAUSAL, FULL, Mask(window=3), *others}) == 10
    assert Mask(blocks=((2, 3),), whole_blocks=True) == CAUSAL  # a token sees itself
    assert [pickle.loads(pickle.dumps(mask)) for mask in others] == [*others]
    assert Mask(documents=(0,)) == CAUSAL  # one document is no documents
    assert Mask(documents=Mask.documents_of([3, 6, 2])) == packed
    assert Mask.documents_of([]) == ()
    tree = Mask(documents=(0, 3, 9), parents=(-1, 0, 0))
    assert len({packed, tree, Mask(documents=(0, 3, 9), parents=(-1, 0, 1))}) == 3
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert Mask(documents=(0, 3, 9), parents=(-1, -1, -1)) == packed
    assert Mask(documents=(0,), parents=(-1,)) == CAUSAL
    copy = pickle.loads(pickle.dumps(packed))
    assert copy == packed
    assert hash(copy) == hash(packed)


def test_the_hash_of_a_mask_is_of_numbers_only():
    # None has another hash in every process, and a mask may be sent to one
    assert hash(Mask(documents=(0, 3))) == hash((True, 0, (0, 3)))


def test_masks_say_what_they_are():
    documents = tuple(range(64))
    assert str(Mask(window=128, documents=documents)) == "causal, window 128, 64 documents"
    assert str(Mask(documents=(0, 4), parents=(-1, 0))) == "causal, 2 documents with parents"
    assert str(CAUSAL) == "causal"
    assert str(FULL) == "full"
    assert str(Mask(causal=False, window=4)) == "window 4"
    assert str(Mask(prefix=9)) == "causal, prefix 9"
    near = Mask(causal=False, window=4, window_right=3)
    assert str(near) == "window 4, window_right 3"
    assert not near.full
    assert str(Mask(blocks=((0, 4), (4, 8)), window=4)) == "causal, window 4, 2 blocks"
    masks = CAUSAL, FULL, Mask(window=4), Mask(documents=(0, 4)), Mask(prefix=2), Mask(causal=False, window_right=0)
    assert [mask.scale_free for mask in (*masks, Mask(blocks=((2, 4),)))] == [1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("number", [numpy.int64, numpy.int32, torch.tensor], ids=lambda kind: kind.__name__)
def test_numbers_of_arrays_and_tensors_are_whole_numbers(number):
    assert Mask(documents=(0, 3), parents=(number(-1), number(0))) == Mask(documents=(0, 3), parents=(-1, 0))
    mask = Mask(window=number(4), documents=(0, number(3), number(8)))
    assert mask == Mask(window=4, documents=(0, 3, 8))
    assert hash(mask) == hash(Mask(window=4, documents=(0, 3, 8)))
    assert [type(x) for x in (mask.window, *mask.documents)] == [int] * 4
    assert Mask.documents_of([number(3), number(5)]) == Mask.documents_of(number([3, 5])) == (0, 3)
    assert UnevenShards([[(number(0), number(1), number(4))], []]) == UnevenShards([[(0, 1, 4)], []])
    assert balanced(number([30, 9]), number(2)) == balanced([30, 9], 2)
    for wrong in (number([3, 5]), number(0) == 0):  # several numbers, and a truth
        with pytest.raises(InputError, match="window must be a whole number"):
            Mask(window=wrong)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"causal": 1}, ("causal", "got 1")),
        ({"window": 0}, ("window", "got 0")),
        ({"window": True}, ("window", "got True")),
        ({"window": 2.0}, ("window", "got 2.0")),
        ({"documents": [0, 2]}, ("documents", "tuple", "got [0, 2]")),
        ({"documents": (0, 2.0)}, ("documents", "got (0, 2.0)")),
        ({"documents": (0, True)}, ("documents", "got (0, True)")),
        ({"documents": (1, 2)}, ("documents", "position 0", "got 1")),
        ({"documents": (0, 5, 5)}, ("documents", "5 after 5")),
        ({"prefix": -1}, ("prefix", "got -1")),
        ({"prefix": 2.0}, ("prefix", "got 2.0")),
        ({"prefix": 4, "window": 2}, ("prefix 4", "causal, window 2")),
        ({"prefix": 4, "documents": (0, 5)}, ("prefix 4", "2 documents")),
        ({"prefix": 4, "causal": False}, ("prefix 4", "full")),
        ({"window_right": 4}, ("window_right", "causal=False", "got 4")),
        ({"window_right": -1, "causal": False}, ("window_right", "got -1")),
        ({"parents": [-1, 0], "documents": (0, 4)}, ("parents", "2 documents", "got [-1, 0]")),
        ({"parents": (-1, 0.0), "documents": (0, 4)}, ("parents", "got (-1, 0.0)")),
        ({"parents": (-1, 0, 0), "documents": (0, 4)}, ("parents", "2 documents", "got (-1, 0, 0)")),
        ({"parents": (0,)}, ("depth-first", "parent 0 of document 0")),
        ({"parents": (-1, 0, 2), "documents": (0, 4, 5)}, ("depth-first", "parent 2 of document 2")),
        ({"parents": (-1, -1, 0), "documents": (0, 4, 5)}, ("depth-first", "parent 0 of document 2")),
        ({"parents": (-2, 0), "documents": (0, 4)}, ("depth-first", "parent -2 of document 0")),
        ({"parents": (-1, 0), "documents": (0, 4), "window": 3}, ("without a window", "causal, window 3")),
        (
            {"parents": (-1, 0), "documents": (0, 4), "window_right": 3, "causal": False},
            ("without a window", "window_right 3"),
        ),
        ({"parents": (-1, 0), "documents": (0, 4), "prefix": 3}, ("prefix 3", "2 documents")),
        ({"blocks": [(0, 4)]}, ("blocks", "tuple", "got [(0, 4)]")),
        ({"blocks": ((0, 4), 5)}, ("blocks", "got ((0, 4), 5)")),
        ({"blocks": ((0, 4.0),)}, ("blocks", "got ((0, 4.0),)")),
        ({"blocks": ((4, 4),)}, ("blocks", "got (4, 4)")),
        ({"blocks": ((0, 4), (3, 5))}, ("disjoint", "got (3, 5) after 4")),
        ({"blocks": ((2, 5),), "documents": (0, 4)}, ("within a document", "got (2, 5)", "begins at 4")),
        ({"blocks": ((2, 5),), "causal": False}, ("causal", "got full")),
        ({"blocks": ((2, 5),), "prefix": 3}, ("prefix", "got causal, prefix 3")),
    ],
)
def test_a_wrong_mask_is_refused_in_one_sentence(fields, words):
    with pytest.raises(InputError) as caught:
        Mask(**fields)
    assert missing(str(caught.value), *words) == []


@pytest.mark.parametrize("length", [0, -1, 2.0, True])
def test_a_document_without_tokens_is_refused(length):
    with pytest.raises(InputError, match=f"documents.*got a length of {length!r}"):
        Mask.documents_of([3, length])


@pytest.mark.parametrize("lengths", [5, torch.tensor(5), None])
def test_lengths_that_are_no_list_are_refused(lengths):
    with pytest.raises(InputError, match=r"documents_of needs a list of lengths; got"):
        Mask.documents_of(lengths)


# ---- tiles are exact

_steps = st.integers(1, 6)
_runs = st.builds(Run, st.integers(0, 40), _steps, st.integers(1, 12))
_any_runs = st.lists(_runs, min_size=1, max_size=4).map(tuple)
_documents = st.sets(st.integers(1, 70), max_size=24).map(lambda starts: (0, *sorted(starts)))
_windows = st.none() | st.integers(1, 12) | st.integers(1, 80)
_near = {"window": _windows, "window_right": st.integers(0, 12), "documents": st.just(()) | _documents}


@st.composite
def _trees(draw):
    documents, most = draw(_documents), draw(st.integers(1, 4))
    parents = parents_of(len(documents), lambda path: draw(st.integers(0, min(path, most))))
    return Mask(causal=draw(st.booleans()), documents=documents, parents=parents)


@st.composite
def _blocked(draw):
    """Blocks of neighboring tokens within documents, of all tokens or few."""
    documents, edges = draw(st.just((0,)) | _documents), draw(st.sets(st.integers(0, 80), max_size=24))
    spans = itertools.pairwise(sorted({*documents, *edges}))
    return Mask(
        window=draw(_windows),
        documents=documents,
        blocks=tuple(span for span in spans if draw(st.booleans())),
        whole_blocks=draw(st.booleans()),
    )


_masks = st.one_of(
    _trees(),
    _blocked(),
    st.sampled_from([CAUSAL, FULL]),
    st.builds(Mask, causal=st.booleans(), window=_windows, documents=_documents),
    st.builds(Mask, causal=st.just(False), **_near),
    st.builds(Mask, prefix=st.integers(0, 80)),
)
_both = st.tuples(_any_runs, _any_runs)


@st.composite
def _equal_steps(draw):
    step = draw(st.integers(1, 4))
    run = st.builds(Run, st.integers(0, 40), st.just(step), st.integers(1, 12))
    return tuple(tuple(draw(st.lists(run, min_size=1, max_size=4))) for _ in range(2))


@st.composite
def _gathered(draw):
    """Two groups of blocks, each of a layout of its own and in the order of a gathered operand."""
    found = []
    for _ in range(2):
        layout, ranks = draw(st.sampled_from(COMMON)), draw(st.integers(1, 9))
        blocks = _blocks(layout, ranks, draw(st.integers(1, 4)) * (2 if layout == "zigzag" else 1))
        found.append(join(blocks[rank] for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1))))
    return tuple(found)


@st.composite
def _uneven(draw):
    """Blocks of any length, one after the other; some queries, and some keys."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=2, max_size=8))
    runs = [Run(sum(lengths[:index]), 1, length) for index, length in enumerate(lengths)]
    pick = st.sets(st.sampled_from(runs)).map(lambda group: tuple(sorted(group)))
    return draw(pick), draw(pick)


@examples(300)
# one query may be the first to see two keys, where runs of one step follow each other closely
@example(((Run(1, 2, 3),), (Run(4, 2, 1), Run(5, 2, 1))), CAUSAL, False)
# the keys end in a later document than the queries
@example(((Run(14, 2, 4),), (Run(17, 2, 7),)), Mask(causal=False, documents=(0, 14, 15)), False)
@given(_both | _equal_steps() | _gathered() | _uneven(), _masks, st.booleans())
def test_tiles_are_exact(runs, mask, square):
    _assert_exact(*runs, mask, square)


# ---- and few


# calls of all pairs of groups of blocks under a causal mask, for these ranks; with square triangles only
CALLS = {
    ("contiguous", False): [32, 50, 82, 100, 220],
    ("contiguous", True): [32, 58, 94, 116, 248],
    ("striped", False): [32, 98, 200, 288, 968],
    ("striped", True): [32, 98, 200, 288, 968],
    ("zigzag", False): [32, 78, 138, 175, 393],
    ("zigzag", True): [32, 82, 146, 184, 408],
}


@pytest.mark.parametrize(("layout", "square"), CALLS)
def test_a_causal_edge_needs_few_calls(layout, square):
    for ranks, most in zip((1, 2, 3, 4, 8), CALLS[layout, square], strict=True):
        calls = 0
        for per_rank in (2, 6):
            blocks = _blocks(layout, ranks, per_rank)
            groups = [*((block,) for block in blocks), blocks[:2], blocks[::2], blocks]
            for q, kv in itertools.product(map(join, groups), repeat=2):
                calls += len(tiles(q, kv, CAUSAL, square))
                assert len(tiles(q, kv, FULL, square)) == 1
        assert calls <= most, ranks


LONG, BEFORE, AFTER = (Run(0, 1, 64),), (Run(0, 1, 16),), (Run(16, 1, 16),)
DOCUMENTS = Mask(documents=(0, 8, 16, 24, 32, 40, 48, 56))
PROMPT = Mask(documents=(0, 16, 32, 48), parents=(-1, 0, 0, 0))


def triangles(size, kind="causal"):
    return tuple(Tile(at, at + size, at, at + size, kind) for at in range(0, 64, size))


# (queries, keys, mask, tiles): as few as there can be
FEW = [
    ((Run(3, 2, 4), Run(0, 1, 2)), (Run(9, 1, 5),), FULL, (Tile(0, 6, 0, 5, "full"),)),
    ((), LONG, FULL, ()),
    (LONG, (), CAUSAL, ()),
    (LONG, LONG, Mask(window=16), (Tile(0, 16, 0, 16, "causal"), Tile(16, 64, 1, 64, "band", 16))),
    (LONG, LONG, Mask(window=64), (Tile(0, 64, 0, 64, "causal"),)),
    # a window that ends in the block before is that one's upper triangle
    (AFTER, BEFORE, Mask(window=17), (Tile(0, 16, 0, 16, "upper"),)),
    (AFTER, BEFORE, Mask(window=16), (Tile(0, 15, 1, 16, "upper"),)),
    (AFTER, BEFORE, Mask(window=1), ()),
    # documents that end with blocks are a triangle or a square each; a window of one key is one band whatever they are
    (LONG, LONG, DOCUMENTS, triangles(8)),
    (LONG, LONG, Mask(causal=False, documents=DOCUMENTS.documents), triangles(8, "full")),
    (LONG, LONG, Mask(window=1), (Tile(0, 64, 0, 64, "band", 1),)),
    (LONG, LONG, Mask(window=1, documents=(0, 8, 9)), (Tile(0, 64, 0, 64, "band", 1),)),
    # completions of a prompt see it in one rectangle
    (LONG, LONG, PROMPT, (*triangles(16), Tile(16, 64, 0, 16, "full"))),
]


@pytest.mark.parametrize(("queries", "keys", "mask", "expected"), FEW, ids=str)
def test_tiles_are_as_few_as_there_can_be(queries, keys, mask, expected):
    assert tiles(queries, keys, mask) == expected


# ---- who sees whom


# the last query alone sees the key, in a parent that begins after the first query's document
@example([((Run(0, 10, 3),), (Run(12, 1, 1),))], Mask(documents=(0, 8, 15), parents=(-1, -1, 1)))
@given(st.lists(_both | _equal_steps() | _gathered() | _uneven(), min_size=1, max_size=4), _masks)
def test_a_block_sees_another_where_any_query_sees_any_key(blocks, mask):
    queries, keys = zip(*blocks, strict=True)
    found = visibility(queries, keys, mask)
    assert len(found) == len(queries)
    for (i, q), (j, kv) in itertools.product(enumerate(queries), enumerate(keys)):
        seen = bool(_dense(q, kv, mask).any())
        assert found[i] >> j & 1 == seen, (q, kv, mask)
        assert bool(tiles(q, kv, mask)) == seen, (q, kv, mask)

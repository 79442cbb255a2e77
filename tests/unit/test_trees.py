"""Documents with parents: what shared prompts save in products and bytes, and how `balanced` deals them."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.compile import BoundProgram
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data.balance import balanced, shards_of
from ds_seqpar.testing import attention
from tests.grids import examples
from tests.oracle import tensors
from tests.unit.packs import Tree, parents_of, traveling

# eight completions behind a prompt that is eight times as long: 16 units of tokens do the work of 72
PROMPT = (192, *(24,) * 8), (-1, *(0,) * 8)
WAYS = {
    "ring": {"size": 4},
    "queries go round": {"size": 4, "rotate_forward": "q", "rotate_backward": "q"},
    "double ring": {"size": 4, "schedule": "double_ring", "ring_size": 2},
    "2D": {"size": 4, "schedule": "attention2d", "rows": 2},
    "mesh": {"size": 4, "schedule": "mesh", "mesh": (2, 1, 2), "overlap": True},
    "distflash": {"size": 4, "schedule": "distflash"},
    "triangle": {"size": 3, "schedule": "triangle"},
    "Ulysses": {"size": 4, "ulysses": 2},
    "dealt by its documents": {"size": 4},
    "dealt by its documents around Ulysses": {"size": 4, "ulysses": 2, "head_chunks": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_computed_and_sent_is_the_ideal_fraction_of_what_rows_take(way, monkeypatch):
    """Rows that repeat the prompt, in the same layout. Ideal are the visible pairs, and in bytes the tokens."""
    (lengths, parents), launches, computed = PROMPT, BoundProgram.launches, []

    def counted(*args):
        found = launches(*args)
        computed.extend(launch.pairs for launch in found)
        return found

    monkeypatch.setattr(BoundProgram, "launches", counted)
    config = SequenceParallelConfig(**{"ulysses": 1, **WAYS[way]})
    shards = shards_of("balanced", lengths, config.size // config.ulysses, parents) if "dealt" in way else None
    cases, figures = (
        (1, 384, {"mask": Tree(*PROMPT).mask, "shards": shards}),
        (8, 216, {"mask": Mask()}),
    ), []  # fmt: skip
    for batch, seq, options in cases:
        computed.clear()
        found = attention(config, *tensors(batch, seq, (4, 4), 4), **options)
        figures.append((batch * sum(computed), sum(sum(rank.values()) for rank in found.received)))
    (products, elements), (products_of_rows, elements_of_rows) = figures
    pairs, pairs_of_rows = (Tree(*one).pairs for one in (PROMPT, ((216,) * 8, ())))
    assert products / products_of_rows == pairs / pairs_of_rows < 0.32
    assert 0 < elements / elements_of_rows <= 1.1 * 16 / 72


# ---- dealt


@st.composite
def _trees(draw):
    lengths = draw(st.lists(st.integers(1, 5) | st.integers(1, 3000), min_size=1, max_size=30))
    return Tree(lengths, parents_of(len(lengths), lambda path: draw(st.integers(0, min(path, 4)))))


@given(_trees(), st.integers(1, 16))
@examples(60)
def test_every_token_of_a_tree_is_dealt_once_and_evenly(tree, ranks):
    blocks, total = balanced(tree.lengths, ranks, tree.parents), sum(tree.lengths)
    UnevenShards(blocks)  # every position once, in order
    assert {sum(run.length for run in runs) for runs in blocks} <= {total // ranks, -(-total // ranks)}
    pairs, longest = (
        [tree.pairs_of(runs) for runs in blocks],
        max(map(sum, zip(tree.before, tree.lengths, strict=True))),
    )
    assert sum(pairs) == tree.pairs
    assert all(abs(mine - tree.pairs / ranks) <= tree.pairs / ranks / 32 + 4 * longest for mine in pairs)


def prompts(dice, count):
    """Prompts of 100 to 4,000 tokens with 2 to 8 completions each, of which some go on in two ways."""
    lengths, parents = [], []
    for _ in range(count):
        prompt = len(lengths)
        lengths.append(dice.randint(100, 4000))
        parents.append(-1)
        for _ in range(dice.randint(2, 8)):
            turn = len(lengths)
            more = dice.choice((0, 0, 2))
            lengths += [dice.randint(50, 2000) for _ in range(1 + more)]
            parents += [prompt, *[turn] * more]
    return Tree(lengths, tuple(parents))


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_packs_of_prompts_are_even_and_few_of_them_are_cut(ranks):
    for seed, count in itertools.product(range(4), (1, 3, 3 * ranks)):
        tree = prompts(random.Random(seed), count)
        blocks = balanced(tree.lengths, ranks, tree.parents)
        pairs = [tree.pairs_of(runs) for runs in blocks]
        assert max(pairs) * ranks <= 1.005 * tree.pairs, (seed, count)
        if count == 3 * ranks:
            roots = [start for start, parent in zip(tree.mask.documents, tree.parents, strict=True) if parent < 0]
            edges = itertools.pairwise((*roots, sum(tree.lengths)))
            on = [
                sum(any(run.start < end and run.last >= start for run in runs) for runs in blocks)
                for start, end in edges
            ]
            assert sum(number > 1 for number in on) <= 2 * (ranks - 1), seed
            # two hops of each block; those of documents that are dealt one by one make many more
            assert sum(traveling(tree._replace(blocks=blocks))) <= 2 * sum(tree.lengths), seed


def test_equal_trees_are_whole_and_nothing_travels():
    for ranks, each in itertools.product((2, 3, 8), (1, 2)):
        lengths, parents = (50, 20, 30, 5), (-1, 0, 1, 0)
        count = ranks * each
        at = [tuple(4 * n + parent if parent >= 0 else -1 for parent in parents) for n in range(count)]
        tree = Tree(lengths * count, sum(at, ()))
        assert sum(traveling(tree._replace(blocks=balanced(tree.lengths, ranks, tree.parents)))) == 0


def test_parents_are_checked_where_documents_are_dealt():
    with pytest.raises(InputError, match="one for each of the 2 documents"):
        balanced([3, 4], 2, (-1, 0, 0))
    with pytest.raises(InputError, match="depth-first"):
        shards_of("balanced", (3, 4), 2, (-1, 1))

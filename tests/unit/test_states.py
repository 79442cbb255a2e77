"""Layers with a state on virtual ranks equal the same layers over each document alone, and receive what is said."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.data.balance import shards_of
from ds_seqpar.data.batch_layout import positions_held
from ds_seqpar.operators import segments as rules
from ds_seqpar.operators.segments import received_bytes, segments_of
from tests import oracle
from tests.grids import each_then_rest, examples
from tests.recurrent import KINDS, alone, inputs, layer
from tests.threads import on_virtual_ranks

LAYOUTS = ("balanced", "contiguous", "zigzag")
HEADS = ((1, 1), (2, 1), (4, 2), (6, 6), (12, 4), (33, 3))  # of values, and of keys
WAYS = ("states", "heads", "auto")
RANKS = tuple((size, ulysses) for size in (1, 2, 3, 4, 6, 8) for ulysses in (1, 2, 3, 4) if size % ulysses == 0)
BATCH, CELL = 2, {"delta": 4 * 3 + 4 * 4, "decayed": 4 * 3 + 1}  # numbers of a head's state and of its map


def dealt(layout, documents, seq, cp_size):
    return shards_of(layout, tuple(b - a for a, b in itertools.pairwise([*documents, seq])), cp_size)


@st.composite
def cut(draw, seq, cp_size):
    """Runs that are cut anywhere, up to three a rank: some ranks may have no token."""
    edges = [0, *sorted(draw(st.lists(st.integers(0, seq), min_size=3 * cp_size - 1, max_size=3 * cp_size - 1))), seq]
    runs = draw(st.permutations([Run(a, 1, b - a) for a, b in itertools.pairwise(edges)]))
    return UnevenShards([tuple(sorted(runs[rank::cp_size])) for rank in range(cp_size)])


@st.composite
def cases(draw):
    size, ulysses = draw(st.sampled_from(RANKS))
    seq = draw(st.integers(1, 37))
    documents = (0, *sorted(draw(st.sets(st.integers(1, seq), max_size=8)) - {seq}))
    layout = draw(st.sampled_from((*LAYOUTS, "cut", "cut")))
    cp_size = size // ulysses
    shards = draw(cut(seq, cp_size)) if layout == "cut" else dealt(layout, documents, seq, cp_size)
    kind = draw(st.sampled_from(KINDS))
    # of a convolution: the kernel's length, and nothing
    heads, groups = (draw(st.integers(1, 9)), 1) if kind == "conv" else draw(st.sampled_from(HEADS))
    config = {"size": size, "ulysses": ulysses, "recurrent_layers": draw(st.sampled_from(WAYS))}
    return kind, seq, (heads, groups), shards, documents, config, draw(st.booleans())


def compared(kind, seq, heads, shards, documents, config, ordered=False):
    """Compare out and all gradients, and return the elements that each rank received. ordered: whether states go from
    run to run, however few they are."""
    tokens, parameters = inputs(kind, seq, *heads)
    whole = [x.clone().requires_grad_() for x in (*tokens, *parameters)]
    of_tokens, of_parameters = whole[: len(tokens)], whole[len(tokens) :]
    expected = alone(kind, of_tokens, of_parameters, documents, seq)
    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected.backward(do)
    held = [positions_held(shards, config["ulysses"], rank) for rank in range(config["size"])]

    def on_rank(runtime, rank):
        local = [x[:, held[rank]].clone().requires_grad_() for x in tokens]
        mine = [x.clone().requires_grad_() for x in parameters]
        out = layer(kind, runtime, local, mine, shards, documents)
        out.backward(do[:, held[rank]])
        return [out.detach(), *(x.grad for x in local)], [x.grad for x in mine]

    with pytest.MonkeyPatch.context() as patch:
        if ordered:
            patch.setattr(rules, "AT_ONCE", 0)
        results, received = on_virtual_ranks(on_rank, **config)
    found = [torch.cat(of_ranks, 1) for of_ranks in zip(*(local for local, _ in results), strict=True)]
    found += [sum(of_ranks) for of_ranks in zip(*(mine for _, mine in results), strict=True)]
    wanted = [x[:, torch.cat(held)] for x in (expected.detach(), *(x.grad for x in of_tokens))]
    # decays of documents of one token have no gradient
    oracle.assert_exact(found, [*wanted, *(x.grad for x in of_parameters)], (kind, config), least=1e-2)
    return received


def fits(kind, heads, config):
    """Whether ranks can exchange heads."""
    ulysses = config["ulysses"]
    return kind == "conv" or all(n % ulysses == 0 or (n < heads[0] and ulysses % n == 0) for n in heads)


@examples(120)
@given(cases())
def test_layers_equal_each_document_alone(case):
    kind, _, heads, _, _, config, _ = case
    if config["recurrent_layers"] == "heads" and not fits(kind, heads, config):
        with pytest.raises(ConfigError, match=f'"heads" needs ulysses .* got ulysses {config["ulysses"]} and'):
            compared(*case)
    else:
        compared(*case)


# heads among all, states among all, and both; a sequence shorter than ranks and a kernel longer than a shard
@pytest.mark.parametrize("ulysses", each_then_rest([4], [1, 2, 8, 16]))
def test_on_sixteen_ranks(ulysses):
    for kind, (seq, layout) in itertools.product(KINDS, ((11, "contiguous"), (43, "balanced"))):
        documents = (0, 1, 2, 9) if seq == 11 else (0, 1, 30)
        shards, ways = (
            dealt(layout, documents, seq, 16 // ulysses),
            ("states",) if kind == "conv" else ("states", "heads"),
        )
        for way in ways:
            heads = (9, 1) if kind == "conv" else (33, 3) if way == "states" else (16, 8)
            config = {"size": 16, "ulysses": ulysses, "recurrent_layers": way}
            for ordered in (False, True):
                compared(kind, seq, heads, shards, documents, config, ordered)


def test_tokens_apart_are_refused_unless_ranks_exchange_heads():
    for ulysses, way in ((2, "states"), (2, "heads"), (4, "states")):
        config = {"size": 4, "ulysses": ulysses, "recurrent_layers": way}
        case = "delta", 16, (4, 2), dealt("striped", (0,), 16, 4 // ulysses), (0,), config
        if ulysses == 4:
            compared(*case)
        else:
            with pytest.raises(ConfigError, match="consecutive tokens; got tokens 2 apart, set layout to balanced"):
                compared(*case)


def test_received_is_what_ranks_depend_on_and_does_not_grow_with_the_sequence():
    heads, size = 4, 4
    for kind, layout, ulysses in itertools.product(CELL, LAYOUTS, (1, 2, 4)):
        config = {"size": size, "ulysses": ulysses, "recurrent_layers": "states"}
        received = {}
        for seq in (16, 48):
            shards = dealt(layout, (0,), seq, size // ulysses)
            received[seq] = compared(kind, seq, (heads, 2), shards, (0,), config)
        assert received[16] == received[48]
        segments, number = segments_of(shards, (), ulysses), BATCH * heads
        numbers, last = segments.numbers, len(segments.runs) - 1
        for rank, counted in enumerate(received[16]):  # all runs of a rank, in forward and in backward
            before = [x for x in range(size) if x != rank and min(numbers[x]) < max(numbers[rank])]
            behind = [x for x in range(size) if x != rank and max(numbers[x]) > min(numbers[rank])]
            if layout == "contiguous":
                assert (before, behind) == ([*range(rank)], [*range(rank + 1, size)])
            assert counted == {"states": number * CELL[kind] * sum(len(numbers[x]) for x in before + behind)}
        most = max(sum(len(runs) for runs in numbers if runs != mine and min(runs) < max(mine)) for mine in numbers)
        assert most * CELL[kind] == received_bytes(segments.reach(), segments.most_runs, 12, CELL[kind] - 12)
        ordered = compared(kind, 48, (heads, 2), shards, (0,), config, ordered=True)
        for counted, mine in zip(ordered, numbers, strict=True):  # the first run gets none, in backward the last
            assert counted == {"states": number * 4 * 3 * (2 * len(mine) - (0 in mine) - (last in mine))}


def test_exchanged_heads_are_received_as_counted():
    """Each Ulysses rank brings its tokens' operands and takes its heads' outputs, and gradients the other way."""
    seq, heads, groups, ulysses = 24, 4, 4, 4
    config = {"size": ulysses, "ulysses": ulysses, "recurrent_layers": "heads"}
    for kind, numbers in (("delta", 3 + 2 * 4 + 2), ("decayed", 3 + 1 + 2 * 4)):
        received = compared(kind, seq, (heads, groups), dealt("contiguous", (0,), seq, 1), (0,), config)
        inward, outward = (BATCH * seq * heads * n * (ulysses - 1) // ulysses**2 for n in (numbers, 3))
        assert received == [{"state_heads": 2 * (inward + outward)}] * ulysses

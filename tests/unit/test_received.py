"""What virtual ranks receive, by kind, is what the formulas and the plans say; tests/dist/test_transport.py has real
ranks receive the same."""

import itertools

import pytest

from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.heads import heads_by_ulysses_rank
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.testing import attention
from tests.oracle import tensors

BATCH, SEQ, DIM = 2, 48, 8
# (size, ulysses, heads): rings of several sizes, Ulysses alone and around a ring, MHA, GQA, U > Hkv
CASES = [
    *((2, 1, (4, 4)), (2, 2, (4, 4)), (3, 1, (4, 1)), (4, 1, (4, 2)), (4, 2, (4, 1)), (4, 4, (8, 4)), (4, 4, (8, 2))),
    *((6, 2, (4, 2)), (6, 3, (6, 1)), (8, 4, (8, 2)), (8, 2, (4, 4))),
]


def units_of(cp_size, ulysses, heads):
    """Elements of one CP rank's block, by direction. k/v is never repeated: with U > Hkv a Ulysses rank has one
    head."""
    tokens = BATCH * SEQ // cp_size
    q, kv = tokens * heads[0] // ulysses * DIM, 2 * tokens * max(1, heads[1] // ulysses) * DIM
    lse = q // DIM
    # with a query go, in backward, the output's gradient, lse and delta
    return {
        "forward": {"q": q, "kv": kv, "out": q + lse},
        "backward": {"q": 2 * q + 2 * lse, "kv": kv, "dq": q, "dkv": kv},
    }


def received(heads, **settings):
    """By SP rank: elements by kind, and what the plans of both directions say of its CP rank."""
    config = SequenceParallelConfig(**settings)
    config = config.resolve(config.size)
    recipe, inner = config.recipe(config.topology(config.size)), config.size // config.ulysses
    units = units_of(inner, config.ulysses, heads)
    pattern = block_mask_of(CAUSAL, EvenShards(config.layout, SEQ, inner))
    shape = shape_of("fp32", "float64", BATCH, (heads[0] // config.ulysses, max(1, heads[1] // config.ulysses), DIM))
    plans = [recipe.plan(direction, pattern, shape).received(units[direction]) for direction in units]
    found = attention(config, *tensors(BATCH, SEQ, heads, DIM)).received
    return [(+one, sum(plan[rank // config.ulysses] for plan in plans)) for rank, one in enumerate(found)]


@pytest.mark.parametrize(("size", "ulysses", "heads"), CASES)
def test_elements_follow_the_formulas(size, ulysses, heads):
    inner, way_in = size // ulysses, {}
    units = units_of(inner, ulysses, heads)
    q, kv = units["forward"]["q"], units["forward"]["kv"]
    if ulysses > 1:  # (U - 1) / U of |q| + |kv| in, and of |o| out; the gradients go the other way
        way_in = {"qkv": q + kv, "out_heads": q, "dqkv": q + kv, "do_heads": q}
    for travels in ("kv", "q"):
        # what goes round, and the results that are merged on the way or sent to their owners, each A - 1 times
        moved = {"kv": (("kv",), ("kv", "dkv")), "q": (("q", "out"), ("q", "dq"))}[travels]
        ring = [(kind, units[way][kind]) for way, kinds in zip(units, moved, strict=True) for kind in kinds]
        wanted = {kind: (inner - 1) * sum(n for name, n in ring if name == kind) for kind, _ in ring if inner > 1}
        total = sum(wanted.values())
        wanted |= {kind: (ulysses - 1) * n // ulysses for kind, n in way_in.items()}
        settings = {"size": size, "ulysses": ulysses, "layout": "zigzag"}
        for found, planned in received(heads, **settings, rotate_forward=travels, rotate_backward=travels):
            assert dict(found) == wanted, travels
            assert planned == total, travels


@pytest.mark.parametrize(("size", "ulysses"), [(4, 1), (4, 2), (8, 2)])
def test_contiguous_causal_skips_moves_that_nobody_needs(size, ulysses):
    inner = size // ulysses
    unit = units_of(inner, ulysses, (4, 1))["forward"]["kv"]
    settings = {"rotate_forward": "kv", "rotate_backward": "kv", "layout": "contiguous"}
    for number, (found, planned) in enumerate(received((4, 1), size=size, ulysses=ulysses, **settings)):
        rank = number // ulysses
        # only earlier tokens' k/v comes; of gradients, those passing by, and one's own once later ranks have it
        kv, dkv = 2 * rank * unit, (max(0, rank - 1) + (rank < inner - 1)) * unit
        assert (found["kv"], found["dkv"], planned) == (kv, dkv, kv + dkv)


@pytest.mark.parametrize("heads", [(33, 33), (14, 2), (25, 5), (40, 10), (7, 1)], ids=str)
def test_a_ulysses_rank_receives_its_own_heads_and_no_other(heads):
    config = SequenceParallelConfig(size=4, ulysses=4)
    found = attention(config, *tensors(BATCH, SEQ, heads, DIM)).received
    row = BATCH * SEQ // 4 * DIM  # one head of one Ulysses rank's tokens
    own = [(q.stop - q.start, kv.stop - kv.start) for q, kv in heads_by_ulysses_rank(*heads, 4)]
    for (q, kv), counted in zip(own, found, strict=True):
        inward, outward = 3 * row * (q + 2 * kv), row * (heads[0] - q)
        # a gradient of k and v comes from every other Ulysses rank that has one
        gradients = 2 * row * (sum(kv for _, kv in own) - kv)
        wanted = {"qkv": inward, "out_heads": outward, "do_heads": 3 * row * q, "dqkv": outward + gradients}
        assert dict(+counted) == wanted


def test_head_chunks_that_hide_exchanges_receive_what_one_chunk_does():
    config = {"size": 4, "ulysses": 2, "overlap": True}
    plain, hidden = (
        attention(SequenceParallelConfig(**config, head_chunks=n), *tensors(1, 64, (16, 16), 8)).received
        for n in (1, 4)
    )
    assert hidden == plain


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_forward_alone_receives_no_gradients(layout):
    for travels, causal in itertools.product(("kv", "q"), (True, False)):
        config = SequenceParallelConfig(size=4, ulysses=2, layout=layout, rotate_forward=travels)
        found = attention(config, *tensors(1, SEQ, (4, 2), DIM)[:3], causal=causal)
        assert found.dq is None
        assert not any(one["dkv"] + one["dq"] + one["dqkv"] for one in found.received)

"""Masks and shards of any lengths on virtual ranks: every schedule equals dense fp64 in both directions, or refuses."""

import dataclasses
import functools
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.sharding.layout import Run, divisors, multiple
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.compiler.sharding.shards import UnevenShards
from ds_seqpar.config.settings import SequenceParallelConfig
from ds_seqpar.errors import ConfigError
from ds_seqpar.testing import attention
from tests.grids import examples
from tests.oracle import dense, errors, seen, tensors
from tests.unit.plans import SINGLE

REFUSED = r"distflash.*causal.*queries of block \d+"
NAMES = ("out", "dq", "dk", "dv")
HEADS = ((4, 4), (4, 2), (4, 1), (5, 5), (6, 3), (7, 1))  # also such that Ulysses ranks do not divide


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings and lengths; shards where they are not the layout's."""

    config: SequenceParallelConfig
    mask: Mask
    seq: int
    keys: int
    heads: tuple[int, int]
    shards: UnevenShards | None


def _check(case, compilers=None):
    """Equals dense attention to 1e-10, or refuses where the schedule cannot. compilers: as `attention` takes them."""
    q, k, v, do, visible, wanted = _wanted(case.mask, case.seq, case.keys, case.heads)
    if case.config.schedule == "distflash" and _sees_a_later_block(case, visible):
        with pytest.raises(ConfigError, match=REFUSED) as caught:
            attention(case.config, q, k, v, do, mask=case.mask, shards=case.shards)
        assert "\n" not in str(caught.value)
        return False
    found = attention(case.config, q, k, v, do, mask=case.mask, shards=case.shards, compilers=compilers)
    found = (found.out, found.dq, found.dk, found.dv)
    assert not any(x.isnan().any() for x in found), case
    # a token that sees itself alone has gradients of 0, and no measure of error
    sizes = [max(1.0, x.abs().max().item()) for x in wanted]
    wrong = [(a - b).abs().max().item() / size for a, b, size in zip(found, wanted, sizes, strict=True)]
    assert max(wrong) <= 1e-10, (case, dict(zip(NAMES, wrong, strict=True)))
    return True


@functools.lru_cache(maxsize=256)  # grids ask for the same masks again for each layout and shape
def _wanted(mask, seq, keys, heads):
    """(q, k, v, do, what each query sees, dense results)."""
    q, _, _, do = tensors(1, seq, heads, 4)
    _, k, v, _ = tensors(1, keys, heads, 4, seed=1)
    visible = seen(mask, range(seq), range(keys))
    return q, k, v, do, visible, dense(q, k, v, do, visible)


def _sees_a_later_block(case, visible):
    size = case.config.size // case.config.ulysses
    shards = case.shards or UnevenShards([(Run(r * case.seq // size, 1, case.seq // size),) for r in range(size)])
    held = [
        [[p for run in shards.runs(side, (block,)) for p in run.positions] for block in range(size)]
        for side in ("q", "kv")
    ]
    return any(visible[held[0][i]][:, held[1][j]].any() for i in range(size) for j in range(i + 1, size) if held[0][i])


# ---- what is drawn


@st.composite
def masks(draw, seq):
    """Windows of 1 .. seq, to one side or both, drawn documents, both, or neither; or a prefix."""
    if draw(st.integers(0, 5)) == 0:
        return Mask(prefix=draw(st.integers(1, seq)))
    window = draw(st.none() | st.integers(1, seq))
    starts = draw(st.sets(st.integers(1, seq - 1), max_size=draw(st.sampled_from([0, 2, 8])))) if seq > 1 else ()
    causal = draw(st.sampled_from([True, True, False]))
    right = None if causal else draw(st.none() | st.integers(0, seq))
    return Mask(causal=causal, window=window, window_right=right, documents=(0, *sorted(starts)))


@st.composite
def configs(draw, schedule, most):
    inner = draw(st.integers(1, most))
    ulysses = draw(st.sampled_from([u for u in (1, 1, 2, 4) if inner * u <= most]))
    its = SCHEDULES[schedule]
    own = draw(st.sampled_from(list(its.shapes(inner))))
    return SequenceParallelConfig(
        size=inner * ulysses,
        ulysses=ulysses,
        schedule=schedule,
        layout=draw(st.sampled_from(its.layouts)),
        overlap=draw(st.booleans()),
        rotate_forward=draw(st.sampled_from(its.moving_sides)),
        rotate_backward=draw(st.sampled_from(its.moving_sides)),
        **own,
    )


@st.composite
def shared(draw, config):
    """(seq, keys, shards): a sequence in the configured layout, or in blocks of any length."""
    size = config.size // config.ulysses
    step = multiple(config.layout, config.size, config.ulysses)
    kind = draw(st.sampled_from(["even", "uneven", "uneven", "other keys"]))
    if kind == "even":
        seq = step * draw(st.integers(1, max(1, 40 // step)))
        return seq, seq, None
    seq, dice = draw(st.integers(1, 40)), random.Random(draw(st.integers(0, 2**32)))
    pieces = draw(st.sampled_from([1, 1, 2, 3]))
    ordered = draw(st.booleans())
    q = _cuts(dice, seq, size, pieces, ordered)
    if kind == "uneven":
        return seq, seq, UnevenShards(q)
    keys = draw(st.integers(seq, 48))  # a query sees itself
    return seq, keys, UnevenShards(q, _cuts(dice, keys, size, pieces, ordered))


def _cuts(dice, seq, size, pieces, ordered):
    """Runs of every block: the sequence in pieces of random lengths, 0 too, dealt out; or each block one, in order."""
    count = size * (1 if ordered else pieces)
    cuts = sorted(dice.randint(0, seq) for _ in range(count - 1))
    runs = [Run(a, 1, b - a) for a, b in zip([0, *cuts], [*cuts, seq], strict=True)]
    if not ordered:
        dice.shuffle(runs)
    return [tuple(sorted(run for run in runs[block::size] if run.length)) for block in range(size)]


@st.composite
def cases(draw, schedule, most):
    config = draw(configs(schedule, most))
    seq, keys, shards = draw(shared(config))
    mask = draw(masks(seq))
    if SCHEDULES[schedule].default_layout == "contiguous" and draw(st.booleans()):  # one that it can do
        mask = dataclasses.replace(mask, causal=True, window_right=None)
    return Case(config, mask, seq, keys, draw(st.sampled_from(HEADS)), shards)


@pytest.mark.parametrize("schedule", SINGLE)
@examples(25)
@given(data=st.data())
def test_every_schedule_equals_dense_attention_under_any_mask(schedule, data):
    _check(data.draw(cases(schedule, 9)))


@pytest.mark.whole
@pytest.mark.parametrize("schedule", SINGLE)
@examples(100)
@given(data=st.data())
def test_every_schedule_equals_dense_attention_under_many_masks(schedule, data):
    _check(data.draw(cases(schedule, 16)))


# ---- all of them, one by one

NAMED = ("contiguous", "striped", "zigzag")  # the runs of "balanced" are those of zigzag, where no documents are dealt
DOCUMENTS = ([], [5, 7, 4], [1, 1, 14], [16], [4, 4, 4, 4], [8, 8])


def _grid(schedule, size, windows, layouts=NAMED, packings=DOCUMENTS):
    """How many of the cases the schedule took. The ring has all of them. Tiles depend on the layout alone, so layouts
    and shapes of the others take turns: each pair of layout, shape, window and packing is met."""
    took, shapes, compilers = 0, list(SCHEDULES[schedule].shapes(size)), {}
    layouts = [layout for layout in layouts if layout in SCHEDULES[schedule].layouts]
    for (w, window), (p, lengths) in itertools.product(enumerate(windows), enumerate(packings)):
        dealt = layouts if schedule == "ring" else layouts[(w + p) % max(1, len(layouts)) :][:1]
        mine = [own for n, own in enumerate(shapes) if (n - w // 3 - p) % 3 == 0] or shapes[:1]
        for layout, own, causal in itertools.product(dealt, mine, (True, False)):
            config = SequenceParallelConfig(size=size, ulysses=1, schedule=schedule, layout=layout, **own)
            mask = Mask(causal=causal, window=window, documents=Mask.documents_of(lengths))
            took += _check(Case(config, mask, 16, 16, (2, 1), None), compilers)
    return took


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("schedule", SINGLE)
def test_every_window_and_packing_of_a_short_sequence(schedule, size):
    assert _grid(schedule, size, (None, *range(1, 17)))


@pytest.mark.parametrize("schedule", SINGLE)
def test_windows_and_packings_of_a_short_sequence(schedule):
    settings = ((None, "zigzag"), (1, "striped"), (5, "contiguous"))
    assert any([_grid(schedule, 4, (window,), (layout,), DOCUMENTS[1:3]) for window, layout in settings])


def test_keys_that_end_with_the_queries_are_causal_from_the_lower_right():
    """As flash-attn aligns them."""
    mask = Mask(causal=False, window_right=9)
    assert (seen(mask, range(12), range(21)) == seen(Mask(), range(9, 21), range(21))).all()
    shards = UnevenShards([[(4 * r, 1, 4)] for r in range(3)], [[(7 * r, 1, 7)] for r in range(3)])
    for ulysses in (1, 2):
        config = SequenceParallelConfig(size=3 * ulysses, ulysses=ulysses)
        assert _check(Case(config, mask, 12, 21, (4, 2), shards))


# ---- what a schedule cannot do


def test_distflash_refuses_by_name_where_a_query_sees_a_later_block():
    q, k, v, _ = tensors(1, 12, (2, 1), 4)
    config = SequenceParallelConfig(size=4, ulysses=1, schedule="distflash")
    late_keys = UnevenShards([(Run(3 * r, 1, 3),) for r in range(4)], [(Run(11 * r, 1, 11 if r == 0 else 0),) for r in
                             range(1)] + [(Run(11, 1, 1),), (), ()])  # fmt: skip
    crossed = UnevenShards([(Run(3 * r, 1, 3),) for r in (1, 0, 2, 3)])
    refused = [(Mask(causal=False), None), (Mask(causal=False, window=5), None), (Mask(), crossed)]
    for mask, shards in refused:
        with pytest.raises(ConfigError, match=REFUSED):
            attention(config, q, k, v, mask=mask, shards=shards)
    # each of whose documents ends with a block, or keys that lie no later than their queries
    for mask, shards in ((Mask(causal=False, documents=(0, 3, 6, 9)), None), (Mask(), late_keys)):
        found = attention(config, q, k, v, mask=mask, shards=shards).out
        wanted = dense(q, k, v, q, seen(mask, range(12), range(12)))[0]
        assert errors((found,), (wanted,))[0] <= 1e-10


@functools.cache
def _ulysses_shapes():
    return [(inner * u, u) for inner in (1, 2, 3) for u in divisors(4)]


@pytest.mark.parametrize("heads", [(4, 4), (8, 4), (4, 1), (14, 2), (5, 5)], ids=str)
def test_members_share_blocks_of_any_length(heads):
    """Tokens of a CP rank that its Ulysses ranks cannot share equally, and fewer tokens than Ulysses ranks."""
    dice = random.Random(3)
    for size, ulysses in _ulysses_shapes():
        config = SequenceParallelConfig(size=size, ulysses=ulysses, schedule="ring")
        for seq in (1, 2, 5, 13):
            shards = UnevenShards(_cuts(dice, seq, size // ulysses, 2, False))
            assert _check(Case(config, Mask(window=4), seq, seq, heads, shards))

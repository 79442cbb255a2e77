"""What the planner looks at is what the runtime takes: no more, and no less."""

import itertools
import random

import pytest

from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.schedules.base import MOVING_SIDES, RANK_ORDERS
from ds_seqpar.compiler.sharding.layout import LAYOUTS
from ds_seqpar.compiler.sharding.masks import CAUSAL
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.config.settings import SequenceParallelConfig, check_length
from ds_seqpar.errors import SeqParError
from ds_seqpar.planner.candidates import candidates, check_given, refusal, travels

HEADS = (6, 2)
ALL = list(range(1, 17))


def _spelled(settings):
    return tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in settings.items()))


def _proposed(world, heads, seq):
    return {
        _spelled({**candidate.settings, "rotate_forward": forward, "rotate_backward": backward})
        for candidate in candidates(world, heads, {})
        if not refusal(candidate, seq, documents=False)
        for forward, backward in itertools.product(*(candidate.schedule.moving_sides,) * 2)
    }


def _takes(world, heads, seq, settings):
    """Whether the runtime does."""
    try:
        check_length(SequenceParallelConfig(**settings).resolve(world, heads), seq)
    except SeqParError:
        return False
    return True


def _everything(world, sizes):
    """Settings of all kinds, legal and not: each shape of each schedule on up to `world` ranks."""
    shapes = [(name, own) for name, its in SCHEDULES.items() for ranks in ALL[:world] for own in its.shapes(ranks)]
    shapes = [pair for number, pair in enumerate(shapes) if pair not in shapes[:number]]
    words = itertools.product(sizes, ALL[:world], shapes, LAYOUTS, RANK_ORDERS, MOVING_SIDES, MOVING_SIDES)
    for size, ulysses, (schedule, own), layout, placement, forward, backward in words:
        yield {"size": size, "ulysses": ulysses, "schedule": schedule, "layout": layout, "rank_order": placement,
               "rotate_forward": forward, "rotate_backward": backward, **own}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "heads"), [(1, (4, 4)), (2, (1, 1)), (3, (4, 2)), pytest.param(4, HEADS, marks=pytest.mark.whole)]
)
def test_all_that_is_legal_is_looked_at_and_nothing_else(world, heads):
    legal = {_spelled(one) for one in _everything(world, ALL[:world]) if _takes(world, heads, 48, one)}
    assert _proposed(world, heads, 48) == legal


@pytest.mark.parametrize(
    ("world", "heads", "seq"), [(16, (33, 33), 64), (16, (8, 1), 512), (12, HEADS, 60), (8, HEADS, 40)]
)
def test_so_it_is_for_some_of_many_on_more_ranks(world, heads, seq):
    generator, proposed = random.Random(world), _proposed(world, heads, seq)
    shapes = [
        (name, ranks, own) for name, its in SCHEDULES.items() for ranks in ALL[:world] for own in its.shapes(ranks)
    ]
    agreed = 0
    for _ in range(400):
        schedule, ranks, own = generator.choice(shapes)
        ulysses = generator.choice([1, 1, 2, 3, 4, 8])
        size = generator.choice([ranks * ulysses, generator.choice(ALL)])
        words = [generator.choice(list(choice)) for choice in (LAYOUTS, RANK_ORDERS, MOVING_SIDES, MOVING_SIDES)]
        settings = dict(zip(("layout", "rank_order", "rotate_forward", "rotate_backward"), words, strict=True))
        settings |= {"size": size, "ulysses": ulysses, "schedule": schedule, **own}
        legal = _takes(world, heads, seq, settings)
        assert (_spelled(settings) in proposed) == legal, settings
        agreed += legal
    assert agreed > 5


def test_what_is_given_is_no_choice_any_more():
    given = {"size": 8, "schedule": "mesh", "mesh": [2, 2, 2], "layout": "striped", "rank_order": "ring_intra"}
    (candidate,) = candidates(16, (8, 8), given)
    assert {name: candidate.settings[name] for name in ("size", "ulysses", "layout")} == {
        "size": 8, "ulysses": 1, "layout": "striped",
    }  # fmt: skip
    assert {candidate.ulysses for candidate in candidates(16, (8, 8), {"size": 16, "ulysses": 4})} == {4}
    assert travels(candidate, {"rotate_backward": "q"}) == {"forward": ("kv", "q"), "backward": ("q",)}
    with pytest.raises(SeqParError, match="size 3 on 16"):
        check_given({"size": 3}, 16, (8, 8))
    with pytest.raises(SeqParError, match="rank orders by name"):
        check_given({"size": 4, "ulysses": 2, "rank_order": ["ring", "ulysses"]}, 4, (8, 8))


def test_candidates_that_are_called_the_same_have_the_same_plans():
    """CP ranks do the same in every step, on the same ranks of the world."""
    groups = {}
    for candidate in candidates(8, (8, 8), {"size": 8}):
        groups.setdefault(candidate.plan_key(documents=False), []).append(candidate)
    assert any(len({candidate.schedule.name for candidate in group}) > 1 for group in groups.values())
    for group in (group for group in groups.values() if len(group) > 1):
        for way in ("forward", "backward"):
            for travel in group[0].schedule.moving_sides if group[0].cp_size > 1 else ("kv",):
                assert len({_story(candidate, way, travel) for candidate in group}) == 1


def _story(candidate, way, travel):
    top, shards = candidate.topology, EvenShards(candidate.layout, 16 * candidate.cp_size, candidate.cp_size)
    steps = candidate.schedule.build(top, block_mask_of(CAUSAL, shards), way, travel)
    places = tuple((top.index(r, "ulysses"), top.index(r, *top.cp_axes)) for r in range(8))
    if candidate.cp_size == 1:  # a rank alone has one block, or two that are the same tokens
        return places
    return places, tuple(steps(rank) for rank in range(candidate.cp_size)), shards.runs("q", (0,))

"""Plans that pass states of layers on: valid, complete under NCCL's rules, with the bytes that ranks count."""

import pytest

from ds_seqpar.analysis import nccl
from ds_seqpar.analysis.listing import listing
from ds_seqpar.compiler import states
from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.overlap.simulate import programs_of
from ds_seqpar.compiler.schedules.validate import validate
from ds_seqpar.compiler.sharding.balance import shards_of
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.compiler.sharding.segments import segments_of
from ds_seqpar.runtime.recurrence import Cell, recurrence
from tests.dist.ranks import make
from tests.dist.test_recurrence import decayed, inputs
from tests.launch import on_ranks
from tests.unit.commands import run


def plans(lengths, ranks, layout="balanced", ulysses=None):
    """(plan, block mask, shards) in forward and in backward."""
    segments = segments_of(shards_of(layout, lengths, ranks), Mask.documents_of(lengths), ulysses)
    shape = states.shape_of_states("float32", 1, 12, 1)
    for shards in segments.shards:
        block_mask = block_mask_of(Mask(window=segments.reach() + 1), shards)
        yield states.recipe(shards.size).plan("forward", block_mask, shape), block_mask, shards


@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
@pytest.mark.parametrize("lengths", [(40,), (1, 1, 7, 23, 8), (3,), (33, 2, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_plans_are_valid_and_end_under_nccls_rules(ranks, lengths, layout):
    for ulysses in (None, 2):
        for plan, block_mask, _ in plans(lengths, ranks, layout, ulysses):
            validate(plan, block_mask.pairs())
            nccl.check([programs_of(plan), programs_of(plan)])


def test_the_schedule_says_what_a_rank_receives_where_all_need_all_others():
    plan, *_ = next(plans((40,), 8))
    schedule = states.STATES
    assert plan.received({"kv": 3}) == schedule.received(schedule.axes(8, {}), "forward", "kv", {"kv": 3})


def test_documents_that_end_in_their_run_send_nothing():
    plan, *_ = next(plans((10, 10, 10, 10), 4, "contiguous"))
    assert plan.received({"kv": 1}) == [0] * 4


def received(lengths):
    """What this rank of 4 receives of sequences of these lengths: bytes of states in forward, and in backward."""
    sp, counts = make(ulysses=1, layout="balanced"), []
    for seq in lengths:
        tokens, parameters = inputs("decayed", seq, 4, 2)
        local = [x[:, : seq // 4].clone().requires_grad_() for x in tokens]
        before = sp.comm.received["kv"]
        out = recurrence(sp.runtime, decayed, local, parameters, Cell(4, 3, True))
        between = sp.comm.received["kv"]
        out.sum().backward()
        counts += [between - before, sp.comm.received["kv"] - between]
    sp.close()
    return counts


def test_ranks_count_the_elements_of_the_plan_at_any_length():
    of_run = 2 * (4 * 12 + 4)  # two rows
    wanted = []
    for plan, _, shards in plans((16,), 4):
        moves = [[m for step in steps for m in step.moves if m.dst == rank] for rank, steps in enumerate(plan.ranks)]
        wanted.append([of_run * sum(shards.tokens("kv", move.key) for move in of_rank) for of_rank in moves])
    assert on_ranks(4, received, (16, 64)) == [list(both) * 2 for both in zip(*wanted, strict=True)]


def test_show_prints_states(capsys):
    out, err, code = run(capsys, "show", "--states", "delta", "--size", 4, "--program", 1, "--documents", 40)
    assert (err, code) == ("", 0)
    plan, *_ = next(plans((40,), 4))
    assert plan.table() in out
    segments = segments_of(shards_of("balanced", (40,), 4), (), 1)
    shape = states.shape_of_states("float32", 1, 8 * 128 * 128, 8 * 128 * 128)
    assert listing(states.bound_states(1, segments.shards[0], segments.reach(), shape)) in out
    assert f"{6 * 8 * 2 * 128 * 128 * 4:,} bytes" in out  # of the six runs of others
    for words in (
        ["--overlap"],
        ["--schedule", "ring"],
        ["--seq", 8],
        ["--full"],
        ["--ulysses", 2],
        ["--layout", "striped"],
    ):
        _, err, code = run(capsys, "show", "--states", "decay", *words)
        assert code == 2
        assert words[0].removeprefix("--") in err or "consecutive" in err
    assert run(capsys, "show", "--documents", 3)[2] == 2


def test_show_tells_heads_from_states(capsys):
    ways = {}
    for way in ("heads", "states"):
        out, _, code = run(capsys, "show", "--states", "decay", "--size", 8, "--ulysses", 4, "--recurrent-layers", way)
        assert code == 0
        ways[way] = out
    assert "2 ranks" in ways["heads"]
    assert "8 ranks" in ways["states"]

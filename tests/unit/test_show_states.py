"""`show --states`: the plan that passes states of layers on, with the bytes that ranks count."""

import pytest
import torch
from torch.nn import functional as F

from ds_seqpar.analysis.listing import listing
from ds_seqpar.compiler import states
from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.sharding.balance import shards_of
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.compiler.sharding.segments import segments_of
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.runtime import recurrence
from ds_seqpar.runtime.recurrence import Cell
from tests.dist.ranks import make
from tests.launch import on_ranks
from tests.recurrent import decayed, delta
from tests.unit.commands import run


def test_the_plan_and_the_program_of_a_rank(capsys):
    out, err, code = run(
        capsys, "show", "--states", "delta", "--size", 4, "--heads", 1, 1, "--program", 1, "--documents", 9, 25, 6
    )
    assert (err, code) == ("", 0)
    segments = segments_of(shards_of("balanced", (9, 25, 6), 4), (0, 9, 34), 1)
    shards, shape = segments.shards[0], states.shape_of_states("float32", 1, 128 * 128, 128 * 128)
    mask = block_mask_of(Mask(window=segments.reach() + 1), shards)
    assert states.recipe(4).plan("forward", mask, shape).table() in out
    assert listing(states.bound_states(1, shards, segments.reach(), shape)) in out


def test_many_bytes_go_from_run_to_run(capsys):
    out, err, code = run(capsys, "show", "--states", "delta", "--size", 3, "--heads", 128, 128)
    assert (err, code) == ("", 0)
    shards = segments_of(EvenShards("balanced", 12, 3), (), 1).blocks[0]
    shape = states.shape_of_states("float32", 1, 1, 0)
    assert states.recipe(3, True).plan("forward", block_mask_of(Mask(window=2), shards), shape).table() in out
    assert f"at most {2 * 4 * 128**3:,} bytes" in out


def received(kind, seq, layout, ulysses, way):
    """Bytes of states that this rank receives in forward, and in backward."""
    sp = make(ulysses=ulysses, layout=layout, recurrent_layers=way)
    heads, rows = 8, seq // sp.size
    v, k = (torch.randn(1, rows, heads, 128, requires_grad=True) for _ in range(2))
    gate = torch.rand(1, rows, heads)
    if kind == "delta":
        tokens, parameters, function = [v, *[F.normalize(k, dim=-1)] * 2, -gate, gate], [], recurrence.delta_rule(delta)
    else:
        tokens, parameters, function = [v, gate, k, k], [-torch.rand(heads), torch.rand(heads)], decayed
    out = recurrence.recurrence(sp.runtime, function, tokens, parameters, Cell(128, 128, kind == "decay"))
    counts = [4 * sp.comm.received["kv"]]
    out.sum().backward()
    counts.append(4 * sp.comm.received["kv"] - counts[0])
    sp.close()
    return counts


@pytest.mark.parametrize(
    ("kind", "ulysses", "way"), [("delta", 1, "auto"), ("delta", 2, "heads"), ("decay", 2, "states")]
)
def test_bytes_are_those_that_ranks_count_at_any_length(capsys, kind, ulysses, way):
    for layout, seq in (("balanced", 16), ("contiguous", 32)):
        words = ["--size", 4, "--layout", layout, "--ulysses", ulysses, "--recurrent-layers", way]
        out, _, code = run(capsys, "show", "--states", kind, *words)
        assert code == 0
        counts = on_ranks(4, received, kind, seq, layout, ulysses, way)
        most = [max(of_direction) for of_direction in zip(*counts, strict=True)]
        assert all(f"at most {size:,} bytes" in out for size in most)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--overlap"], "--overlap"),
        (["--schedule", "ring"], "--schedule"),
        (["--seq", 8], "--seq"),
        (["--ulysses", 2], "--recurrent-layers"),
        (["--heads", 3, 3, "--ulysses", 2, "--recurrent-layers", "heads"], "3 heads"),
        (["--layout", "striped"], "consecutive"),
        (["--program", 4], "--program"),
    ],
)
def test_what_states_do_not_depend_on_is_refused(capsys, words, said):
    _, err, code = run(capsys, "show", "--states", "decay", *words)
    assert code == 2
    assert said in err


def test_documents_are_of_states_alone(capsys):
    assert run(capsys, "show", "--documents", 3)[2] == 2

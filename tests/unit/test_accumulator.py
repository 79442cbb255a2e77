"""Accumulators: adopted as they come, widened only where they must be, and placed where they are sent from."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_seqpar.core.runtime.kernels.accumulate import Rows, Softmax, Sum

INF = float("inf")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def _partial(seed, dtype=BF16, rows=6, narrow=True):
    """(out, lse) of a block, out in that dtype; with a row without keys."""
    dice = torch.Generator().manual_seed(seed)
    out = torch.randn(2, rows, 3, 4, generator=dice, dtype=F64).to(dtype)
    lse = torch.randn(2, rows, 3, generator=dice, dtype=F64).to(torch.promote_types(dtype, F32))
    out[:, 1], lse[:, 1] = 0, -INF
    return out, lse


def _merged(*parts):
    """By the definition, in fp64."""
    total = torch.logsumexp(torch.stack([lse.double() for _, lse in parts]), 0)
    weights = [torch.exp(lse.double() - total).nan_to_num(0.0)[..., None] for _, lse in parts]
    return sum(weight * out.double() for weight, (out, _) in zip(weights, parts, strict=True)), total


def _softmax(rows=6, wide=F32):
    """An empty one, and how often its buffers were asked for."""
    made = []

    def make():
        made.append(tuple(torch.full(shape, float("nan"), dtype=wide) for shape in ((2, rows, 3, 4), (2, rows, 3))))
        return made[-1]

    return Softmax(make), made


ALL = Rows(0, 6)


def test_a_first_result_is_adopted_as_it_is():
    into, made = _softmax()
    out, lse = _partial(1)
    into.add((out, lse), ALL, 6)
    assert into.held[0] is out
    found = into.finish(BF16, None)
    assert found[0] is out
    assert found[1] is lse
    assert not made
    assert into.held is None
    for dtype in (F32, F64):  # wide as it comes: a second one goes into it
        into, made = _softmax(wide=dtype)
        out, lse = _partial(1, dtype)
        into.add((out, lse), ALL, 6)
        into.add(_partial(2, dtype), ALL, 6)
        assert into.finish(dtype, None)[0] is out
        assert not made
    total, made = Sum(lambda: made.append(1)), []
    total.add((out,), ALL, 6)
    assert total.finish(out.dtype)[0] is out
    assert not made


def test_a_second_result_widens():
    into, made = _softmax()
    parts = [_partial(1), _partial(2)]
    wanted = _merged(*parts)
    for part in parts:
        into.add(part, ALL, 6)
    assert into.held is made[0]
    out, lse = into.finish(F32, None)
    # the buffers are parts of a message, and an op's results may share no memory with each other
    assert not {out.data_ptr(), lse.data_ptr()} & {x.data_ptr() for x in made[0]}
    for a, b in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-6, atol=1e-6)
    assert len(made) == 1


def test_parts_of_the_rows_leave_the_others_untouched():
    for rows in (Rows(0, 2), Rows(2, 2), Rows(4, 2), Rows(0, 1, 3, 2), Rows(1, 2, 2, 3)):
        into, _ = _softmax()
        out, lse = (x.contiguous() for x in map(rows.of, _partial(3)))
        into.add((out, lse), rows, 6)
        found = into.finish(F32, None)
        assert torch.equal(rows.of(found[0]), out.float())
        assert torch.equal(rows.of(found[1]), lse)
        assert (found[1] == -INF).sum() >= found[1].numel() - lse.numel()
        assert not found[0][found[1] == -INF].any()


def test_what_nothing_has_touched_is_zero():
    into, _ = _softmax()
    out, lse = into.finish(BF16, None)
    assert out.dtype == BF16
    assert not out.any()
    assert (lse == -INF).all()
    total = Sum(lambda: (torch.full((2, 3), float("nan")), torch.full((2, 3), float("nan"))))
    assert not any(x.any() for x in total.finish(BF16, BF16))


STATES = ["empty", "narrow", "accum"]


def _in_state(state):
    """(accumulator that so many parts have been added to, its buffers, those parts)."""
    into, made = _softmax()
    parts = [_partial(seed) for seed in range(STATES.index(state))]
    for part in parts:
        into.add(part, ALL, 6)
    return into, made, parts


def _assert_is(found, wanted, tolerance=1e-6):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("arriving", [BF16, F32])
@pytest.mark.parametrize("state", STATES)
def test_absorb_and_merge_in_every_state(state, arriving):
    """What is absorbed may become the accumulator; what is merged stays as it was."""
    into, made, parts = _in_state(state)
    arrived = _partial(7, arriving)
    wanted = _merged(*parts, arrived)
    into.add_(*arrived)
    home = into.held[0]
    # what is held is merged into what arrived where that is wide, and else widened
    assert home is (arrived[0] if state == "empty" or arriving == F32 else made[0][0])
    assert len(made) == (state == "accum" or home is not arrived[0])
    _assert_is(into.finish(home.dtype, None), wanted)
    into, made, _ = _in_state(state)
    arrived = _partial(7, arriving)
    before = [x.clone() for x in arrived]
    into.merge(*arrived)
    assert into.held is made[0]
    assert all(torch.equal(a, b) for a, b in zip(arrived, before, strict=True))
    _assert_is(into.finish(F32, None), wanted)


@pytest.mark.parametrize("arriving", [BF16, F32])
@pytest.mark.parametrize("state", STATES)
def test_gradients_absorb_in_every_state(state, arriving):
    made = []

    def make():
        made.append(tuple(torch.full((2, 6, 3, 4), float("nan")) for _ in range(2)))
        return made[-1]

    total = Sum(make)
    parts = [tuple(_partial(seed + at)[0] for at in (0, 50)) for seed in range(STATES.index(state))]
    arrived = tuple(_partial(7 + at, arriving)[0] for at in (0, 50))
    wanted = [sum(x.double() for x in column) for column in zip(*parts, arrived, strict=True)]
    for part in parts:
        total.add(part, ALL, 6)
    total.add_(*arrived)
    adopted = state == "empty" or arriving == F32
    assert (total.held[0] is arrived[0]) == adopted
    assert len(made) == (state == "accum" or not adopted)
    _assert_is(total.finish(F32, F32), wanted)


@pytest.mark.parametrize("state", STATES)
def test_a_result_that_is_sent_stands_where_it_is_sent_from(state):
    parts = [_partial(seed) for seed in range(STATES.index(state))]
    wanted = _merged(*parts) if parts else (torch.zeros(2, 6, 3, 4), torch.full((2, 6, 3), -INF))
    placed, made = _softmax()
    copied, narrow = _softmax()[0], (torch.empty(2, 6, 3, 4, dtype=BF16), torch.empty(2, 6, 3))
    for part in parts:
        placed.add(tuple(x.clone() for x in part), ALL, 6)
        copied.add(tuple(x.clone() for x in part), ALL, 6)
    assert placed.materialize() is made[0]
    copied.copy_into(narrow)
    _assert_is(made[0], wanted)
    _assert_is(narrow, wanted, 2**-8)


def test_what_arrived_wide_is_sent_from_where_it_arrived():
    into, made = _softmax()
    arrived = _partial(7, F32)
    into.add_(*arrived)
    assert into.materialize()[0] is arrived[0]
    assert not made


@pytest.mark.parametrize("arriving", [BF16, F32])
@pytest.mark.parametrize("rows", [Rows(0, 2), Rows(2, 2), Rows(4, 2)], ids=str)
def test_a_first_result_of_part_of_the_rows_is_kept_narrow_until_there_is_more(rows, arriving):
    into, made = _softmax()
    whole = _partial(3)
    part = tuple(map(rows.of, whole))
    into.add(part, rows, 6)
    assert into.held[0] is part[0]
    assert not made
    arrived = _partial(7, arriving)
    untouched = torch.zeros_like(whole[0]), torch.full_like(whole[1], -INF)
    for x, y in zip(untouched, part, strict=True):
        rows.of(x).copy_(y)
    wanted = _merged(untouched, arrived)
    into.add_(*arrived)
    assert (into.held[0] is arrived[0]) == (arriving == F32)
    assert len(made) == (arriving == BF16)
    _assert_is(into.finish(F32, None), wanted)


class _Largest(TorchDispatchMode):
    """The largest tensor that anything allocated, in elements."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.elements = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in self.known:
            self.elements = max(self.elements, found.numel())
        return found


# the temporaries of a merge were as large as what is merged, in fp32
@pytest.mark.parametrize("shape", [(1, 4096, 8, 128), (64, 64, 8, 128), (2, 2, 1024, 1024)])
def test_adding_needs_little_memory_beside_the_results(shape):
    whole = torch.zeros(shape), torch.zeros(shape[:3])
    part = torch.ones(shape, dtype=BF16), torch.zeros(shape[:3])
    into, total = Softmax(lambda: whole), Sum(lambda: whole[:1])
    rows, of = Rows(0, shape[1]), shape[1]
    into.add_(*whole)
    with _Largest(*whole, *part) as largest:
        into.add(part, rows, of)
        total.add_(whole[0])
        total.add(part[:1], rows, of)
    assert 0 < largest.elements <= whole[0].numel() // 16
    assert into.held[0] is whole[0]
    torch.testing.assert_close(whole[0], torch.full(shape, 1.5))  # half of one, and one

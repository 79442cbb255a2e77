"""Tiles of all kinds run by kernels that know one block, into accumulators that are copied and widened only where
they must be."""

import pytest
import torch

from ds_seqpar.core.compiler.sharding.layout import LAYOUTS, Run
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.tiles.launches import launches
from ds_seqpar.core.compiler.tiles.tiles import Tile, tiles
from ds_seqpar.core.runtime.kernels.accumulate import Softmax, Sum, backward, forward
from ds_seqpar.core.runtime.kernels.reference import Reference
from ds_seqpar.core.settings import LAYOUTS as COMMON
from ds_seqpar.kernels.flash import CpuFlash
from tests.grids import grouped
from tests.kernel_suite import SCALE, LowerRight
from tests.oracle import tensors

INF = float("inf")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Strict(LowerRight):
    """Aligned lower-right, and says so where it is given a causal block that is not square."""

    def forward(self, q, k, v, causal, scale):
        assert not causal or q.shape[1] == k.shape[1]
        return super().forward(q, k, v, causal, scale)

    def backward(self, do, q, k, v, out, lse, causal, scale):
        assert not causal or q.shape[1] == k.shape[1]
        return super().backward(do, q, k, v, out, lse, causal, scale)


KERNELS = {"reference": Reference(), "cpu_flash": CpuFlash(), "square": Strict()}
named = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def _seen(found, rows, columns):
    seen = torch.zeros(rows, columns, dtype=torch.bool)
    for tile in found:
        i, j = torch.arange(tile.q1 - tile.q0)[:, None], torch.arange(tile.k1 - tile.k0)[None, :]
        part = {"full": i >= 0, "causal": j <= i, "upper": j >= i, "band": (i <= j) & (j < i + tile.width)}[tile.kind]
        seen[tile.q0 : tile.q1, tile.k0 : tile.k1] |= part
    return seen


def _dense(q, k, v, do, seen):
    """(out, lse, dq, dk, dv) in fp64, by autograd; a row that sees nothing is 0, -inf."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    some = seen.any(1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * SCALE
    scores = scores.masked_fill(~(seen | ~some[:, None]), -INF)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values) * some[:, None, None]
    lse = scores.logsumexp(-1).transpose(1, 2).masked_fill(~some[:, None], -INF)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), do.double())


def _makers(q, k):
    """Buffers with NaN in them: whoever reads what nobody has written is found out."""
    wide = torch.promote_types(q.dtype, F32)
    blank = lambda *shape: torch.full(shape, float("nan"), dtype=wide)  # noqa: E731
    return (
        Softmax(lambda: (blank(*q.shape), blank(*q.shape[:3]))),
        Sum(lambda: (blank(*q.shape),)),
        Sum(lambda: (blank(*k.shape), blank(*k.shape))),
    )


def _run(kernel, q, k, v, do, found):
    """(out, lse, dq, dk, dv)."""
    into, dq, dkv = _makers(q, k)
    found = launches(found, kernel.support)
    forward(kernel, q, k, v, found, SCALE, into)
    out, lse = into.finish(q.dtype, None)
    backward(kernel, do, q, k, v, out, lse, found, SCALE, dq, dkv)
    found = out, lse, *dq.finish(q.dtype), *dkv.finish(k.dtype, k.dtype)
    assert all(x.is_contiguous() for x in found)
    assert {x.dtype for x in (found[0], *found[2:])} == {q.dtype}
    assert lse.dtype == torch.promote_types(q.dtype, F32)
    return found


def _inputs(rows, columns, heads=(4, 2), dtype=F64, batch=2):
    q, k, v, do = tensors(batch, max(rows, columns), heads, 8, dtype, seed=rows + 50 * columns)
    return q[:, :rows], k[:, :columns], v[:, :columns], do[:, :rows]


def _check(kernel, inputs, found, tolerance, case=None):
    wanted = _dense(*inputs, _seen(found, inputs[0].shape[1], inputs[1].shape[1]))
    got = _run(kernel, *inputs, found)
    empty = wanted[1] == -INF
    assert torch.equal(got[1] == -INF, empty)
    assert not got[0][empty].any()
    got, wanted = ((x[0], x[1].masked_fill(empty, 0.0), *x[2:]) for x in (got, wanted))
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        assert not a.isnan().any(), (name, case)
        # a lone key's dq is 0
        assert (a.double() - b).abs().max() <= tolerance * max(1.0, b.abs().max()), (name, case)


# (rows, columns) of the whole and its tiles; some rows and columns in none
TILES = {
    "full": (20, 30, [Tile(0, 20, 0, 30, "full")]),
    "full in part": (20, 30, [Tile(3, 15, 4, 29, "full")]),
    "causal": (24, 24, [Tile(0, 24, 0, 24, "causal")]),
    "causal with more rows": (24, 20, [Tile(2, 24, 5, 17, "causal")]),
    "upper": (24, 24, [Tile(0, 24, 0, 24, "upper")]),
    "upper in part": (24, 30, [Tile(3, 20, 11, 28, "upper")]),
    "upper of one": (3, 3, [Tile(1, 2, 1, 2, "upper")]),
    "band wider than long": (12, 40, [Tile(1, 10, 2, 30, "band", 20)]),
    "band as wide as long": (12, 40, [Tile(0, 12, 3, 26, "band", 12)]),
    "band of two squares": (24, 35, [Tile(0, 24, 0, 35, "band", 12)]),
    "band with a rest": (41, 60, [Tile(0, 41, 5, 55, "band", 10)]),
    "band with a rest of one": (41, 60, [Tile(9, 40, 5, 45, "band", 10)]),
    "band of one key": (20, 24, [Tile(0, 20, 2, 22, "band", 1)]),
    "band of one key in part": (20, 24, [Tile(4, 19, 2, 17, "band", 1)]),
    "band of two keys": (20, 24, [Tile(0, 20, 2, 23, "band", 2)]),
    "two bands": (30, 30, [Tile(0, 10, 0, 10, "causal"), Tile(10, 30, 1, 30, "band", 10), Tile(0, 9, 20, 29, "full")]),
    "none": (6, 5, []),
}


GRID = {
    "kernel": tuple(KERNELS),
    "dtype": (F64, F32),
    "name": tuple(TILES),
    "heads": ((4, 4), (4, 2), (4, 1)),
    "batch": (1, 2),
}


@pytest.mark.parametrize("cases", grouped(("kernel", "dtype"), **GRID))
def test_tiles_of_every_kind_are_exact(cases):
    for case in cases:
        kernel = KERNELS[case["kernel"]]
        rows, columns, found = TILES[case["name"]]
        inputs = _inputs(rows, columns, case["heads"], case["dtype"], case["batch"])
        _check(kernel, inputs, found, kernel.tolerance[case["dtype"]], case)


MASKS = {
    "kernel": tuple(KERNELS),
    "layout": COMMON,
    "window": (None, 1, 7, 30),
    "lengths": ((48,), (5, 30, 1, 12)),
    "causal": (True, False),
}


@pytest.mark.parametrize("cases", grouped(("kernel",), **MASKS))
def test_a_sequence_in_blocks_is_the_whole(cases):
    """Masks as they come out of planning, for queries and keys in the order of all the blocks."""
    seq, ranks = 48, 3
    for case in cases:
        kernel = KERNELS[case["kernel"]]
        mask = Mask(causal=case["causal"], window=case["window"], documents=Mask.documents_of(case["lengths"]))
        blocks = [LAYOUTS[case["layout"]].runs(seq, ranks, rank) for rank in range(ranks)]
        order = [position for runs in blocks for run in runs for position in run.positions]
        runs = tuple(run for runs in blocks for run in runs)
        inputs = _inputs(seq, seq)
        whole = _dense(*inputs, _seen(tiles((Run(0, 1, seq),), (Run(0, 1, seq),), mask), seq, seq))
        mixed = tuple(x[:, order] for x in inputs)
        got = _run(kernel, *mixed, tiles(runs, runs, mask, kernel.support.square))
        for a, b in zip(got, whole, strict=True):
            torch.testing.assert_close(
                a, b[:, order], rtol=0, atol=1e-12, msg=lambda said, case=case: f"{case}: {said}"
            )


@named
def test_operands_may_be_strided(kernel):
    rows, columns, found = TILES["band with a rest"]
    q, k, v, do = _inputs(rows, columns)
    pair = torch.stack([k, v], dim=2)
    wanted = _run(kernel, q, k, v, do, found)
    strided = torch.stack([q, do], dim=3)[..., 0, :], *pair.unbind(2), torch.stack([q, do], dim=2)[:, :, 1]
    assert not any(x.is_contiguous() for x in strided)
    for a, b in zip(_run(kernel, *strided, found), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_band_is_few_calls_however_long_it_is():
    class Counting(Reference):
        calls = 0

        def forward(self, *arguments):
            self.calls += 1
            return super().forward(*arguments)

    for rows, width, count in ((64, 8, 2), (64, 1, 1), (66, 8, 5), (8, 64, 3), (8, 8, 2)):
        kernel, (q, k, v, _) = Counting(), _inputs(rows, rows + width - 1)
        cut = launches([Tile(0, rows, 0, rows + width - 1, "band", width)], kernel.support)
        forward(kernel, q, k, v, cut, SCALE, _makers(q, k)[0])
        assert kernel.calls == count, (rows, width)

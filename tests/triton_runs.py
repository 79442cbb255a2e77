"""Run by test_triton_ops.py in Triton's interpreter (TRITON_INTERPRET=1), and by tests/gpu on a GPU. It compares the
kernels with the functions that they replace, on tensors with random shapes, strides and values, and runs whole calls
with them. It prints JSON with the greatest error of each kernel and the errors of the calls.
"""

import json
import random
import warnings
from collections import defaultdict

import torch

from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.tiles.tiles import Rows
from ds_seqpar.core.runtime import dense as work
from ds_seqpar.core.runtime.kernels import accumulate
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.kernels import triton_ops
from ds_seqpar.testing import attention
from tests.oracle import dense, errors, tensors

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = 12
device = "cpu"


def strided(draw, shape, dtype=torch.float32):
    """A tensor of random numbers whose dimensions are in any memory order, with or without gaps between elements."""
    order = draw.sample(range(len(shape)), len(shape))
    if draw.random() < 0.5:
        order = list(range(len(shape)))
    steps = [draw.choice((1, 1, 2)) for _ in shape]
    steps[-1] = draw.choice((1, 1, 1, 1, 3))
    whole = torch.randn([shape[dim] * steps[dim] for dim in order], device=device).to(dtype)
    x = whole.permute([order.index(dim) for dim in range(len(shape))])
    return x[tuple(slice(None, None, step) for step in steps)]


def shape_of(draw):
    return tuple(map(draw.choice, ((0, 1, 1, 2), (0, 1, 5, 37), (1, 3, 8), (1, 16, 20, 64, 80))))


def as_grouped(draw, x, others):
    """x (B, n, ...) and the others as views of row groups (B, groups, size, ...), as launches pass them."""
    size, groups = draw.choice((1, 2)), draw.choice((1, 2))
    if x.shape[1] < 5:
        return [x, *others]
    rows = Rows(draw.choice((0, 1)), size, groups, size if groups == 1 else 2)
    return [rows.of(y) for y in (x, *others)]


def error(found, wanted):
    """The greatest difference, relative for elements beyond 1; equal infinities and NaN do not count."""
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    difference = ((found - wanted).abs() / wanted.abs().clamp_min(1.0)).masked_fill(same, 0.0).nan_to_num(nan=INF)
    return difference.max().item() if difference.numel() else 0.0


def merges(draw):
    dtype, shape = draw.choice(DTYPES), shape_of(draw)
    out, new_out = strided(draw, shape), strided(draw, shape, dtype)
    lses = [strided(draw, shape[:3]) for _ in range(2)]
    for lse, x in zip(lses, (out, new_out), strict=True):
        lse.mul_(draw.choice((1.0, 1.0, 50.0, 1e4)))
        for value in (-INF, -INF, INF):
            hit = torch.rand(lse.shape, device=device) < draw.choice((0.0, 0.3))
            lse[hit], x[hit] = value, 0.0
        lse[torch.rand(lse.shape, device=device) < draw.choice((0.0, 0.1))] = NAN
    out, lse, new_out, new_lse = as_grouped(draw, out, (lses[0], new_out, lses[1]))
    wanted = out.clone(), lse.clone()
    accumulate._merge_(wanted[0], new_out, wanted[1], new_lse)
    triton_ops.merge_(out, lse, new_out, new_lse)
    empty = lse.isneginf()
    assert out[empty].eq(0).all()
    yield "merge_", max(map(error, (out, lse), wanted))


def deltas(draw):
    dtype, shape = draw.choice(DTYPES), shape_of(draw)
    do, out = (strided(draw, shape, dtype) for _ in range(2))
    scale = torch.tensor([1.0, 1e-4, 0.0])[torch.randint(3, shape[:3])].to(device, dtype)
    do.mul_(scale[..., None])
    do[..., 0][torch.rand(shape[:3], device=device) < draw.choice((0.0, 0.1))] = draw.choice((NAN, INF))
    products = do.double() * out.double()
    found = triton_ops.rowsum(do, out)
    assert found.dtype == torch.float32
    size = products.abs().sum(-1).clamp_min(1.0)
    yield "rowsum", error(found / size, products.sum(-1) / size)
    delta = strided(draw, shape[:3]) * scale.float()
    found, wanted = triton_ops.out_with_rowsum(do, delta), work._out_with_rowsum(do, delta)
    assert found.dtype == dtype
    rounds = dtype != torch.float32  # the two may round to different sides
    yield f"out_with_rowsum{', rounded' if rounds else ''}", error(found, wanted.to(dtype))


CALLS = {
    "a ring, queries travel": ({"size": 3, "rotate_forward": "q", "rotate_backward": "q"}, Mask(window=23)),
    "striped": ({"size": 2, "layout": "striped"}, Mask(documents=(0, 9, 30))),
}


def calls():
    """The fp32 errors of out, dq, dk and dv of whole calls, and how often a kernel ran."""
    counted, found = defaultdict(int), {}

    class Ops:
        def __getattr__(self, name):
            counted[name] += 1
            return getattr(triton_ops, name)

    kept, accumulate.FUSED[:] = [*accumulate.FUSED], [lambda x: Ops()]
    for name, (settings, mask) in CALLS.items():
        q, k, v, do = tensors(2, 48, (4, 2), 12, torch.float32)
        result = attention(SequenceParallelConfig(ulysses=1, **settings), q, k, v, do, mask=mask)
        found[name] = max(errors((result.out, result.dq, result.dk, result.dv), dense(q, k, v, do, mask=mask)))
    accumulate.FUSED[:] = kept
    return found, counted


def worst_of(cases, elements):
    """The greatest error by kernel. elements: how many a program computes one after another; the interpreter is slow
    per program."""
    torch.manual_seed(0)
    worst, of_program = defaultdict(float), triton_ops.ELEMENTS
    for seed in range(cases):
        triton_ops.ELEMENTS = elements[seed % len(elements)]
        for kind in (merges, deltas):
            for name, wrong in kind(random.Random(seed)):
                worst[name] = max(worst[name], wrong)
    triton_ops.ELEMENTS = of_program
    return worst


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy warns of operations that a GPU computes silently
    worst, triton_ops.ELEMENTS = worst_of(CASES, (1 << 16, 1 << 12)), 1 << 16
    print(json.dumps({"worst": worst, "calls": calls()}))

"""Compare the kernels that a job would take with attention's definition, and look at how their results are added."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..compiler.sharding.layout import Run
from ..compiler.sharding.masks import Mask
from ..compiler.tiles.launches import launches
from ..compiler.tiles.tiles import Tile, tiles
from ..errors import MOST_SHOWN, ConfigError
from ..runtime.buffers import sum_dtype
from ..runtime.kernels import Kernel
from ..runtime.kernels.accumulate import Softmax, Sum, backward, forward
from .findings import Finding, Job
from .reference import NAMES, exact_and_plain, masks, random, seen, share_of_allowed

# (position of the first query, queries, keys): alone, at the end of its keys, after them; odd lengths; one query
SHAPES = ((0, 64, 64), (0, 61, 61), (30, 37, 67), (66, 1, 67), (32, 96, 64))
LARGE = ((0, 256, 256), (0, 515, 515), (300, 130, 515))
BLOCKS, IN_BLOCK = 16, 8  # of the sums that are looked at
ADVICE = "see what has changed ds_seqpar.runtime.kernels.accumulate"


def check_kernels(job: Job) -> list[Finding]:
    """Compare each kernel that would be taken, forward and backward, with a computation in fp64."""
    local = torch.empty(1, 8, job.heads[0], job.head_dim, dtype=job.dtype, device=job.sp.device)
    chunks = job.sp.config.head_chunks if isinstance(job.sp.config.head_chunks, int) else 1
    wrong, worst, names, cases = list[str](), 0.0, dict[str, None](), 0
    for kind, mask in masks(64, job.window).items():
        try:
            bound, kernel = job.sp.runtime.bound("forward", local, job.heads[1], mask, None, job.softcap or 0.0, chunks)
        except ConfigError:  # the schedule takes no such mask
            continue
        heads = bound.shape.q_heads, bound.shape.kv_heads
        names[f"{kernel.name} on {heads[0]}/{heads[1]} heads of {job.head_dim} in {bound.shape.dtype}"] = None
        for shape in SHAPES + LARGE * (not job.quick):
            try:
                share, what = _compare(job, kernel, mask, heads, *shape)
            except Exception as error:  # one that a kernel raises for one shape
                share, what = float("inf"), f"raises {type(error).__name__}: {str(error).splitlines()[0]:.200}"
            cases, worst = cases + 1, max(worst, share)
            if share > 1:
                wrong.append(f"{kernel.name}, {kind}, {shape[1]} queries and {shape[2]} keys: {what}")
    passed = f"{', '.join(names)}: {cases} cases, at most {worst:.0%} of the error that is allowed"
    some = "; ".join(wrong[:MOST_SHOWN]) + f"; {len(wrong)} of {cases} cases in all" * (len(wrong) > MOST_SHOWN)
    advice = 'name another "kernel" in the section, such as "chunked"'
    return [Finding.of("kernels", some, advice, passed), _sums(job, kernel)]


def _compare(
    job: Job, kernel: Kernel, mask: Mask, heads: tuple[int, int], first: int, rows: int, columns: int
) -> tuple[float, str]:
    """Return (error as a share of the one that is allowed, what differs most)."""
    q, do = random(job, 1, (rows, heads[0]), 2)
    k, v = random(job, 2, (columns, heads[1]), 2)
    at, scale = torch.arange(max(first + rows, columns), device=q.device), job.head_dim**-0.5
    visible = seen(mask, at[first : first + rows], at[:columns])
    cut = launches(tiles((Run(first, 1, rows),), (Run(0, 1, columns),), mask, kernel.support.square), kernel.support)
    exact, plain = exact_and_plain(q, k, v, do, visible, job.softcap)
    pairs = zip(NAMES, _product(kernel, q, k, v, do, cut, scale), exact, plain, strict=True)
    return max(share_of_allowed(name, x, one, usual, job.dtype, heads[0] // heads[1]) for name, x, one, usual in pairs)


def _product(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, cut: tuple[Tile, ...], scale: float
) -> list[Tensor]:
    """Return out, dq, dk and dv of launches, added as a walk adds them."""
    wide = sum_dtype(q.dtype)

    def zeros(*like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(torch.zeros_like(x, dtype=wide) for x in like)

    total, dq, dkv = Softmax(zeros(q, q[..., 0])), Sum(zeros(q)), Sum(zeros(k, v))
    forward(kernel, q, k, v, cut, scale, total)
    out, lse = total.finish(q.dtype, wide)
    backward(kernel, do, q, k, v, out, lse, cut, scale, dq, dkv)
    return [out, *dq.finish(q.dtype), *dkv.finish(q.dtype, q.dtype)]


def _sums(job: Job, kernel: Kernel) -> Finding:
    """Return whether results of many blocks are added in fp32: to 1 those are added that a short dtype would lose."""
    size, many = IN_BLOCK, IN_BLOCK * BLOCKS
    step = torch.finfo(job.dtype if job.dtype.itemsize == 2 else torch.bfloat16).eps

    def constant(first: float, others: float, tokens: int) -> Tensor:
        x = torch.full((1, tokens, 1, job.head_dim), others, dtype=job.dtype, device=job.sp.device)
        x[:, :size] = first
        return x

    starts = range(0, many, size)
    few, rows = constant(0, 0, size), constant(0, 0, many)
    columns = tuple(Tile(0, size, start, start + size, "full") for start in starts)
    out = _product(kernel, few, rows, constant(1, 1 + step, many), few, columns, 1.0)[0]
    below = tuple(Tile(start, start + size, 0, size, "full") for start in starts)
    dv, wrong = _product(kernel, rows, few, few, constant(1, step / 4, many), below, 1.0)[3], ""
    for name, x, expected in (("out", out, 1 + step * (1 - 1 / BLOCKS)), ("dv", dv, 1 + step / 4 * (BLOCKS - 1))):
        if not (x.double() - expected).abs().max() <= step / 2:
            wrong = f"sums are not kept in fp32: {BLOCKS} blocks give {name} {float(x.max()):.5f}, not {expected:.5f}"
    return Finding.of("sums", wrong, ADVICE, f"results of {BLOCKS} blocks are added in fp32")

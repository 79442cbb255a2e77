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
from .reference import NAMES, allowed, attention, errors, masks, seen

# (position of the first query, queries, keys): alone, at the end of its keys, after them; odd lengths; one query
SHAPES = ((0, 64, 64), (0, 61, 61), (30, 37, 67), (66, 1, 67), (32, 96, 64))
LARGE = ((0, 256, 256), (0, 515, 515), (300, 130, 515))
BLOCKS, IN_BLOCK = 16, 8  # of the sums that are looked at


def check_kernels(job: Job) -> list[Finding]:
    """Compare each kernel that would be taken, forward and backward, with a computation in fp64."""
    local = torch.empty(1, 8, job.heads[0], job.head_dim, dtype=job.dtype, device=job.sp.device)
    wrong, worst, names, cases = list[str](), 0.0, dict[str, None](), 0
    for kind, mask in masks(64, job.window).items():
        chunks = job.sp.config.head_chunks if isinstance(job.sp.config.head_chunks, int) else 1
        try:
            program, kernel = job.sp.runtime.bound(
                "forward", local, job.heads[1], mask, None, job.softcap or 0.0, chunks
            )
        except ConfigError:  # the schedule takes no such mask
            continue
        shape = program.shape
        names[f"{kernel.name} on {shape.q_heads}/{shape.kv_heads} heads of {shape.head_dim}"] = None
        for first, rows, columns in SHAPES + LARGE * (not job.quick):
            text = f"{kernel.name}, {kind}, {rows} queries and {columns} keys"
            try:
                heads = shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads
                share, what = _compare(job, kernel, mask, heads, first, rows, columns)
            except Exception as error:  # one that a kernel raises for one shape
                share, what = float("inf"), f"raises {type(error).__name__}: {str(error).splitlines()[0]:.200}"
            cases, worst = cases + 1, max(worst, share)
            wrong += [f"{text}: {what}"] if share > 1 else []
    more = f"; and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    found = Finding(
        check="kernels", status="fail" if wrong else "pass",
        detail="; ".join(wrong[:MOST_SHOWN]) + more if wrong else
        f"{', '.join(names)} in {shape.dtype}: {cases} cases, at most {worst:.0%} of the error that is allowed",
        advice='name another "kernel" in the section, such as "chunked"' if wrong else "",
    )  # fmt: skip
    return [found, _sums(job, kernel)]


def _compare(
    job: Job, kernel: Kernel, mask: Mask, heads: tuple[int, ...], first: int, rows: int, columns: int
) -> tuple[float, str]:
    """Return (error as a share of the one that is allowed, what differs most)."""
    dice, device, scale = torch.Generator().manual_seed(rows), job.sp.device, job.head_dim**-0.5
    lengths = rows, columns, columns, rows
    q, k, v, do = (
        torch.randn(1, length, count, job.head_dim, generator=dice).to(device, job.dtype)
        for length, count in zip(lengths, heads, strict=True)
    )
    visible = seen(mask, torch.arange(first, first + rows, device=device), torch.arange(columns, device=device))
    cut = launches(tiles((Run(first, 1, rows),), (Run(0, 1, columns),), mask, kernel.support.square), kernel.support)
    found = _product(kernel, q, k, v, do, cut, scale)
    exact = attention(q, k, v, do, visible, scale, job.softcap, torch.float64)
    plain = errors(attention(q, k, v, do, visible, scale, job.softcap, job.dtype), exact)
    shares = [
        (gap / allowed(job.dtype, usual), f"{name} differs by {gap:.1e}, a plain one by {usual:.1e}")
        for name, gap, usual in zip(NAMES, errors(found, exact), plain, strict=True)
    ]
    return max(shares)


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
    dv = _product(kernel, rows, few, few, constant(1, step / 4, many), below, 1.0)[3]
    for name, x, expected, most in (
        ("out", out, 1 + step * (BLOCKS - 1) / BLOCKS, step / 4), ("dv", dv, 1 + step / 4 * (BLOCKS - 1), step)
    ):  # fmt: skip
        if not (x.double() - expected).abs().max() <= most:
            detail = f"{BLOCKS} blocks give {name} {float(x.flatten()[0]):.5f} and must give {expected:.5f}"
            advice = "sums are not kept in fp32: look for what changes ds_seqpar.runtime.kernels.accumulate"
            return Finding(check="sums", status="fail", detail=f"sums are not kept in fp32: {detail}", advice=advice)
    return Finding(check="sums", status="pass", detail=f"results of {BLOCKS} blocks are added in fp32")

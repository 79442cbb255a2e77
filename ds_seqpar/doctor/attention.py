"""Compare attention with its definition, both for each kernel and for a call with the configured schedule.

The definition computed in fp64 is the correct result, and the definition computed in another dtype shows the usual
rounding error. If a call is wrong, its result is compared with the results of likely mistakes: a part of the mask is
dropped, heads are mixed up, or a product of two blocks is missing.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import MOST_SHOWN, ConfigError
from ..core.compiler.sharding.layout import Run
from ..core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ..core.compiler.tiles.launches import launches
from ..core.compiler.tiles.tiles import Rows, Tile, tiles
from ..core.runtime.buffers import sum_dtype
from ..core.runtime.call import CallSettings
from ..core.runtime.kernels import Kernel, Scores
from ..core.runtime.kernels.accumulate import Softmax, Sum, backward, forward
from ..data.batch_layout import BatchLayout
from ..data.batches import IGNORE, check_batch
from .findings import Finding, Job
from .ranks import ADVICE, Gathering

NAMES = ("out", "dq", "dk", "dv")
# (position of the first query, queries, keys), with odd lengths, a single query, and queries after all keys
SHAPES = ((0, 64, 64), (0, 61, 61), (30, 37, 67), (66, 1, 67), (32, 96, 64))
LARGE = ((0, 256, 256), (0, 515, 515), (300, 130, 515))
BLOCKS = 16  # number of blocks in the sums to check
FACTOR = " times what it must be"
LEAST = 64  # minimum number of tokens in a call


def kernels(job: Job) -> list[Finding]:
    """Compare each kernel that the job may use with a computation in fp64, in forward and backward."""
    tokens, config = 4 * job.sp.multiple // job.sp.size, job.sp.config
    local = torch.empty(1, tokens, job.heads[0], job.head_dim, dtype=job.dtype, device=job.sp.device)
    keys = 1, tokens, job.heads[1], job.head_dim
    chunks = config.head_chunks if isinstance(config.head_chunks, int) else 1
    wrong, worst, names, cases = list[str](), 0.0, dict[str, None](), 0
    for kind, mask in masks(64, job.window).items():
        try:
            settings = CallSettings(mask, None, Scores(1.0, job.softcap or 0.0), chunks)
            bound, kernel = job.sp.runtime.bound("forward", local, [local.shape, keys, keys], settings)
        except ConfigError:  # the schedule does not support the mask
            continue
        heads = bound.shape.q_heads, bound.shape.kv_heads
        names[f"{kernel.name} on {heads[0]}/{heads[1]} heads of {job.head_dim} in {bound.shape.dtype}"] = None
        for first, rows, columns in SHAPES + LARGE * (not job.quick):
            visible = seen(mask, torch.arange(first, first + rows), torch.arange(columns)).to(local.device)
            cut = tiles((Run(first, 1, rows),), (Run(0, 1, columns),), mask, kernel.support.square)
            tensors = random(job, visible, *heads)
            exact, plain = (define(job, tensors, visible, dtype=dtype) for dtype in (torch.float64, job.dtype))
            try:
                found = _product(kernel, tensors, launches(cut, kernel.support), job.head_dim**-0.5)
                share, what = max(errors([x[0].double() for x in found], exact, plain, job.dtype))
            except Exception as reason:  # raised by the kernel for this shape
                share, what = float("inf"), f"raises {type(reason).__name__}: {' '.join(str(reason).split()):.200}"
            cases, worst = cases + 1, max(worst, share)
            wrong += [f"{kernel.name}, {kind}, {rows} queries and {columns} keys: {what}"] * (share > 1)
    passed = f"{', '.join(names)}: {cases} cases, at most {worst:.0%} of the error that is allowed"
    some = "; ".join(wrong[:MOST_SHOWN]) + f"; {len(wrong)} of {cases} cases in all" * (len(wrong) > MOST_SHOWN)
    return [Finding.of("kernels", some, 'name another "kernel" in the section, such as "chunked"', passed)]


def _product(kernel: Kernel, tensors: list[Tensor], cut: tuple[Tile, ...], scale: float) -> list[Tensor]:
    """Run several launches, accumulate the results like the executor of a plan, and return out, dq, dk and dv."""
    (q, k, v, do), wide, zeros = tensors, sum_dtype(tensors[0].dtype), torch.zeros_like
    total = Softmax(lambda: (zeros(q, dtype=wide), zeros(q[..., 0], dtype=wide)))
    dq, dkv = Sum(lambda: (zeros(q, dtype=wide),)), Sum(lambda: (zeros(k, dtype=wide), zeros(v, dtype=wide)))
    forward(kernel, q, k, v, cut, scale, total)
    out, lse = total.finish(q.dtype, wide)
    backward(kernel, do, q, k, v, out, lse, cut, scale, dq, dkv)
    return [out, *dq.finish(q.dtype), *dkv.finish(q.dtype, q.dtype)]


def sums(job: Job) -> list[Finding]:
    """Check that the results of many blocks are accumulated in fp32.

    The terms added to 1 are so small that they would be lost in a 16-bit sum.
    """
    step, wrong = torch.finfo(job.dtype if job.dtype.itemsize == 2 else torch.bfloat16).eps, ""
    block = torch.zeros(1, 8, 1, 8, dtype=sum_dtype(job.dtype), device=job.sp.device)
    weighted = Softmax, "out", 1 + step, 1 + step * (1 - 1 / BLOCKS)
    for accumulator, name, value, expected in (weighted, (Sum, "dv", step / 4, 1 + step / 4 * (BLOCKS - 1))):
        total = accumulator(lambda: (block.clone(), block[..., 0].clone()))
        for added in (1.0, *[value] * (BLOCKS - 1)):
            total.expect(Rows(0, 8))
            total.add(((block + added).to(job.dtype), block[..., 0].clone()), Rows(0, 8), 8)
        if not ((x := total.settled()[0]).double() - expected).abs().max() <= step / 2:
            wrong = f"sums are not kept in fp32: {BLOCKS} blocks give {name} {float(x.max()):.5f}, not {expected:.5f}"
    advice = "see what has changed ds_seqpar.core.runtime.kernels.accumulate"
    return [Finding.of("sums", wrong, advice, f"results of {BLOCKS} blocks are added in fp32")]


class _Case(NamedTuple):
    """A mask, both as an argument for `attention` and as a tensor of visible keys."""

    name: str
    mask: Mask
    layout: BatchLayout | None
    visible: Tensor  # bool (queries, keys), False for ignored queries
    dropped: dict[str, Tensor]  # visible keys without one part of the mask, by part


def attention(job: Job) -> Gathering:
    """Compare one forward and backward call with the definition for each mask."""
    sp, findings, cases = job.sp, list[Finding](), _cases(job)
    sent = torch.bfloat16 if sp.config.comm_dtype == "bf16" and sp.runtime.size > 1 else job.dtype
    whole = {case.name: random(job, case.visible, *job.heads) for case in cases}
    yield None  # yield before communicating, so that no rank waits if another rank has failed
    for case in cases:
        held = sp.shard(torch.arange(len(case.visible), device=sp.device), 0, case.layout)
        q, k, v, do = (sp.shard(x, 1, case.layout).detach().requires_grad_() for x in whole[case.name])
        shards = case.layout.shards if case.layout else None
        try:
            with torch.enable_grad(), torch.autocast(sp.device.type, enabled=False):
                out, lse = sp.attention(q, k, v, mask=case.mask, shards=shards, softcap=job.softcap, return_lse=True)
                results = out.detach(), *torch.autograd.grad(out, (q, k, v), do)
        except ConfigError as reason:  # on all ranks, if the schedule does not support the mask
            findings.append(Finding(check=f"attention, {case.name}", status="not tried", detail=str(reason)))
            continue
        exact, plain = (define(job, whole[case.name], case.visible, dtype=x) for x in (torch.float64, job.dtype))
        found, counts = [x[0].double() for x in results], case.visible.any(1)[held]
        found[0] = (found[0] * (lse[0].detach() - exact[4][held]).exp()[..., None]).where(counts[:, None, None], 0)
        wrong = ["", ""]
        for at, (share, text) in reversed([*enumerate(all_of := errors(found, exact, plain, sent, held))]):
            if share > 1:
                known = FACTOR in text or share == torch.inf  # NaN cannot be explained
                cause = "" if known else _cause(job, case, whole[case.name], at, found[at], exact, held)
                wrong[at > 0] = f"{'backward' if at else 'forward'}: {cause or text}"
        by_rank = yield wrong  # a wrong forward on any rank also makes backward wrong
        detail = wrong[all(not of_rank[0] for of_rank in by_rank)]
        passed = f"{', '.join(NAMES)} have at most {max(all_of)[0]:.0%} of the error that is allowed"
        findings.append(Finding.of(f"attention, {case.name}", detail, ADVICE, passed))
    return findings


def _cases(job: Job) -> list[_Case]:
    sp, device = job.sp, job.sp.device
    tokens = sp.multiple * max(2, -(-LEAST // sp.multiple))
    at, of_kind = torch.arange(tokens, device=device), masks(tokens, job.window)
    whole, causal, window, documents = (seen(mask, at, at) for mask in of_kind.values())
    starts = (*of_kind["documents"].documents, tokens)
    packed: Any = sp.place(tokens, tuple(end - start for start, end in itertools.pairwise(starts)))
    real = torch.ones(2, tokens // 2, dtype=torch.int64)  # two rows, padded on the left and on the right
    real[0, : tokens // 8] = real[1, -tokens // 8 :] = 0
    batch = {"labels": torch.full_like(real, IGNORE), "attention_mask": real}
    padded: Any = check_batch(sp.sharding, batch, True).part.placement
    counts, rows = real.flatten().bool().to(device), at // (tokens // 2)
    queries = causal & counts[:, None]
    in_row = queries & (rows[:, None] == rows)
    dropped = {"padding": in_row, "boundaries of rows and padding": queries}
    return [
        _Case("full", FULL, None, whole, {}),
        _Case("causal", CAUSAL, None, causal, {"the causal edge": whole}),
        _Case("window", of_kind["window"], None, window, {"the window": causal}),
        _Case("documents", packed.mask, packed, documents, {"boundaries of documents": causal}),
        _Case("padding", padded.mask, BatchLayout(padded.mask, padded.shards), in_row & counts, dropped),
    ]


def masks(tokens: int, window: int | None) -> dict[str, Mask]:
    """Return masks that are common in models, by name. `window` is the model's window, or None."""
    documents = (0, tokens // 3, tokens // 3 + 1, tokens // 2 + 3)
    cut = Mask(window=min(window or tokens, tokens // 3))
    return {"full": FULL, "causal": CAUSAL, "window": cut, "documents": Mask(documents=documents)}


def seen(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys are visible at the given positions, bool (queries, keys)."""
    q, kv, starts = queries[:, None], keys[None, :], torch.tensor(mask.documents, device=keys.device)
    of_document = torch.bucketize(q, starts, right=True) == torch.bucketize(kv, starts, right=True)
    return of_document & ((kv <= q) | (not mask.causal)) & (kv > q - (mask.window or len(keys) + len(queries)))


def random(job: Job, visible: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """Return random q, k, v and do (1, tokens, heads, head_dim), the same on all ranks.

    The gradient do is 0 for queries that see no key.
    """
    dice, sizes = torch.Generator().manual_seed(1), [(len(visible), heads), (visible.shape[1], kv_heads)]
    of = [torch.randn(1, *sizes[side], job.head_dim, generator=dice) for side in (0, 1, 1, 0)]
    of[3] *= visible.any(1).cpu()[:, None, None]
    return [x.to(job.sp.device, job.dtype) for x in of]


def define(
    job: Job, tensors: list[Tensor], seen: Tensor, computed: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return out, dq, dk and dv (tokens, heads, head_dim) and the log-sum-exp (tokens, heads), all in fp64.

    Args:
        job: The job.
        tensors: q, k, v and do (1, tokens, heads, head_dim).
        seen: The keys that each query sees, bool (queries, keys).
        computed: The query-key products to add up, normalized by the correct log-sum-exp. The default is `seen`.
        dtype: The dtype of the computation.
    """
    found, scale, group = list[list[Tensor]](), job.head_dim**-0.5, tensors[0].shape[2] // tensors[1].shape[2]
    for head in range(tensors[1].shape[2]):  # one head at a time, to limit the memory of scores
        q, do = (x[0, :, head * group : head * group + group].to(dtype) for x in (tensors[0], tensors[3]))
        k, v = (x[0, :, head].to(dtype) for x in tensors[1:3])
        scores, slope = torch.einsum("qhd,kd->hqk", q, k) * scale, scale
        if job.softcap:
            scores = job.softcap * torch.tanh(scores / job.softcap)
            slope = scale * (1 - (scores / job.softcap) ** 2)
        lse = scores.double().masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights, d_weights = (scores - lse).exp().to(dtype), torch.einsum("qhd,kd->hqk", do, v)
        delta = (weights.where(seen, 0) * d_weights).sum(-1, keepdim=True)
        weights = weights.where(seen if computed is None else computed, 0)
        d_scores = weights * (d_weights - delta) * slope
        of_queries = [torch.einsum("hqk,kd->qhd", *pair) for pair in ((weights, v), (d_scores, k))]
        # compute each query head separately, then add in the inputs' dtype, as in some kernels
        of_keys = [torch.einsum("hqk,qhd->khd", *x).sum(1, keepdim=True) for x in ((d_scores, q), (weights, do))]
        found.append([*of_queries, *of_keys, lse[..., 0].T])
    return [torch.cat(of_kind, dim=1).double() for of_kind in zip(*found, strict=True)]


def errors(
    found: list[Tensor], exact: list[Tensor], plain: list[Tensor], dtype: torch.dtype, held: Tensor | None = None
) -> list[tuple[float, str]]:
    """For each name in NAMES, return the error as a fraction of the allowed error, and a description of the error.

    The allowed error is twice the error of a plain computation, plus a few rounding errors. Both the maximum error and
    the root mean square are checked. The root mean square reveals small errors that affect all elements.

    Args:
        found: The computed result for this rank's tokens.
        exact: The result of `define`.
        plain: The result of `define` in the tensors' dtype.
        dtype: The dtype to which tensors are rounded.
        held: Indices of this rank's tokens. The default is all tokens.
    """
    # some kernels add up the gradients of a group of heads in this dtype
    group, result = exact[0].shape[1] / exact[2].shape[1], []
    rounding = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8) * max(1.0, (group / 2) ** 0.5)
    for name, x, whole, usual in zip(NAMES, found, exact, plain, strict=False):
        expected, worst = whole if held is None else whole[held], (0.0, "")
        factor = float((x * expected).sum() / expected.square().sum())
        for norm, what, roundings in ((torch.inf, "at most", 4), (2, "on average", 1)):
            gap, unscaled, size, full, other = (
                float(torch.linalg.vector_norm(y, norm)) / (1 if norm == torch.inf else y.numel() ** 0.5)
                for y in (x - expected, x - factor * expected, expected, whole, usual - whole)
            )
            gap, other = gap / max(size, full), other / full
            text = f"{name} differs by {gap:.1e} {what}, and by {other:.1e} in a plain computation"
            text = f"{name} is {factor:.4g}{FACTOR}" if unscaled <= 0.1 * gap * max(size, full) else text
            share = gap / max(2 * other, roundings * rounding)
            worst = max(worst, (share if share == share else torch.inf, text))
        result.append(worst)
    return result


def _cause(
    job: Job, case: _Case, tensors: list[Tensor], at: int, found: Tensor, exact: list[Tensor], held: Tensor
) -> str:
    """Return the first likely mistake that reproduces a wrong result for one head and block, or "" if no mistake does.

    Args:
        job: The job.
        case: The mask.
        tensors: q, k, v and do.
        at: The index of the result in NAMES.
        found: The result, for this rank's tokens.
        exact: The result of `define`.
        held: Indices of this rank's tokens.
    """
    runtime, blocks, of_queries = job.sp.runtime, torch.zeros_like(case.visible[0], dtype=torch.int64), at < 2
    shards = case.layout.shards if case.layout else runtime.shards(len(blocks) // runtime.size)
    for block in range(runtime.size * shards.blocks_per_rank):
        for run in shards.runs("q", (block,)):
            blocks[run.start : run.last + 1 : run.step] = block
    gap, group = found - exact[at][held], job.heads[0] // job.heads[1]
    sizes = gap.abs().amax(-1)
    head = int((sizes.amax(0) >= sizes.max() / 2).nonzero()[0])
    own, here = (head // group if of_queries else head), int(blocks[held[sizes[:, head].argmax()]])
    rows = blocks[held] == here

    def guess(computed: Tensor, kv: int) -> Tensor:
        """Return the result of adding up only the products in `computed`, with key/value head `kv`."""
        first = group * (own if of_queries else kv)
        heads = slice(first, first + group), slice(kv, kv + 1), slice(kv, kv + 1), slice(first, first + group)
        of = define(job, [x[:, :, one] for x, one in zip(tensors, heads, strict=True)], case.visible, computed)
        x = of[at] * (of[4] - exact[4][:, heads[0]]).exp()[..., None] if at == 0 else of[at]
        return x[held][rows, head % group if of_queries else 0]

    guesses = {f"{part} dropped": guess(computed, own) for part, computed in case.dropped.items()}
    for kv in {*range(job.heads[1])} - {own}:
        text = f"heads are mixed up: head {head} of {NAMES[at]} is of key/value head {kv}, not {own}"
        guesses[text] = guess(case.visible, kv)
    each = [blocks == block for block in range(int(blocks.max()) + 1)]
    parts = [guess(case.visible & (of if of_queries else of[:, None]), own).flatten().cpu() for of in each]
    matrix, right = torch.stack(parts, dim=1), found[rows, head]
    times = torch.linalg.lstsq(matrix, right.cpu().flatten()[:, None]).solution  # weight of each product
    for other in (((times[:, 0] - 1).abs() > 0.05) & (matrix.norm(dim=0) > 0)).nonzero()[:1].flatten().tolist():
        q, kv = (here, other) if of_queries else (other, here)
        guesses[_product_of(job, at, q, kv, float(times[other]))] = (matrix @ times).view_as(right).to(right)
    return next((text for text, x in guesses.items() if (right - x).norm() <= 0.1 * gap[rows, head].norm()), "")


def _product_of(job: Job, at: int, q: int, kv: int, times: float) -> str:
    """Describe how many times a product of blocks is counted, and which rank computes the product in which step."""
    runtime, direction = job.sp.runtime, "backward" if at else "forward"
    text = f"the product q({q})*kv({kv}) {'is left out' if abs(times) < 0.05 else f'counts {times:.3g} times'}"
    program = runtime.last_bound[direction][1][0]
    block_mask = runtime.compiler.block_mask(program.mask, program.shards)
    for rank, steps in enumerate(runtime.compiler.recipe.plan(direction, block_mask, program.shape).ranks):
        for number, step in enumerate(steps):
            if any(q in compute.q and kv in compute.kv for compute in step.computes):
                text += f", which CP rank {rank} computes in step {number} of {program.program.name}"
    return text

"""Compare attention of the configured schedule with its definition, by inputs whose results name what is wrong.

Where q is 0, a row weights each key that it sees alike, and its log-sum-exp says how many these are. So values that are
1 in the column of their block make the output count the keys that a row saw of each block. The last column has the
number of the key/value head, and so says of which head they were. The gradient of v counts a key's rows in the same
way.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.sharding.shards import EvenShards
from ..data.batch_layout import BatchLayout
from ..data.batches import IGNORE, check_batch
from ..errors import ConfigError
from .findings import Finding, Job
from .ranks import Gathering
from .reference import NAMES, allowed, attention, masks, seen

LEAST = 64  # tokens of a sequence
ADVICE = "see which part of ds_seqpar or of its kernels is not as it was installed"


class _Case(NamedTuple):
    """A mask as the product takes it, and by its definition."""

    name: str
    options: dict[str, Any]  # of sp.attention
    layout: BatchLayout | None
    visible: Tensor  # bool (queries, keys), False for queries that do not count
    dropped: dict[str, Tensor]  # what would be visible without a part of the mask, by the part's name


def check_attention(job: Job) -> Gathering:
    """Compare forward and backward with the definition for each mask: which keys a row sees, then the numbers."""
    found: list[list[str]] = []  # for each case: what is wrong in forward, in backward and in numbers; figures
    cases = _cases(job)
    for case in cases:
        yield None
        try:
            found.append([*_counted(job, case), *_compared(job, case)])
        except ConfigError as refusal:  # on all ranks: the schedule does not take such a mask
            found.append(["", "", "", "", str(refusal)])
    by_rank = yield found
    return [
        _finding(f"attention, {case.name}", found[index], [of_rank[index] for of_rank in by_rank])
        for index, case in enumerate(cases)
    ]


def _finding(check: str, found: list[str], by_rank: list[list[str]]) -> Finding:
    *wrong, figures, refusal = [*found, ""][:5]
    if refusal:
        return Finding(check=check, status="not tried", detail=refusal)
    # what is wrong in forward, on any rank, makes backward and the numbers wrong
    first = next((at for at in range(len(wrong)) if any(of_rank[at] for of_rank in by_rank)), 0)
    if wrong[first]:
        return Finding(check=check, status="fail", detail=wrong[first], advice=ADVICE)
    return Finding(check=check, status="pass", detail=figures)


def _cases(job: Job) -> list[_Case]:
    sp, device = job.sp, job.sp.device
    tokens = sp.multiple * max(2, -(-LEAST // sp.multiple))
    at, of_kind = torch.arange(tokens, device=device), masks(tokens, job.window)
    visible = {kind: seen(mask, at, at) for kind, mask in of_kind.items()}
    without = {"causal": ("the causal edge", "full"), "window": ("the window", "causal")}
    cases = [
        _Case(kind, {"mask": of_kind[kind]}, None, visible[kind], {part: visible[other] for part, other in dropped})
        for kind, dropped in ((kind, [without[kind]] if kind in without else []) for kind in ("full", *without))
    ]
    starts = (*of_kind["documents"].documents, tokens)
    documents = sp.place(tokens, tuple(b - a for a, b in itertools.pairwise(starts)))
    real = torch.ones(2, tokens // 2, dtype=torch.int64)  # two rows, padded on the left and on the right
    real[0, : tokens // 8] = real[1, -tokens // 8 :] = 0
    padded = check_batch(sp, {"labels": torch.full_like(real, IGNORE), "attention_mask": real}, True).placement
    row, counts = at // (tokens // 2), real.flatten().bool().to(device)
    in_row = visible["causal"] & (row[:, None] == row) & counts[:, None]
    whole = visible["causal"] & counts[:, None]
    for kind, layout, sees, dropped in (
        ("documents", documents, visible["documents"], {"boundaries of documents": visible["causal"]}),
        ("padding", padded, in_row & counts, {"padding": in_row, "boundaries of documents and padding": whole}),
    ):
        assert layout is not None  # of several documents
        options = {"mask": layout.mask, "shards": layout.shards}
        cases.append(_Case(kind, options, BatchLayout(layout.mask, layout.shards), sees, dropped))
    return cases


def _attend(job: Job, case: _Case, *whole: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return this rank's out, dq, dk and dv (tokens, heads, head_dim) in fp64, and its rows' log-sum-exp."""
    q, k, v, do = (job.sp.shard(x[None].to(job.dtype), 1, case.layout) for x in whole)
    with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
        local = [x.requires_grad_() for x in (q, k, v)]
        out, lse = job.sp.attention(q, k, v, **case.options, softcap=job.softcap, return_lse=True)
        results = out.detach(), *torch.autograd.grad(out, local, do)
    return [x[0].double() for x in results], lse[0].detach().double()


def _counted(job: Job, case: _Case) -> list[str]:
    """Return what is wrong with the keys that this rank's rows see, and with the rows that see its keys."""
    (heads, kv_heads), tokens, columns = job.heads, len(case.visible), job.head_dim - 1
    blocks = _blocks(job, case)
    one_hot = torch.nn.functional.one_hot(blocks % columns, columns).double()
    numbers = torch.arange(1, kv_heads + 1, device=blocks.device).double()
    v = torch.cat([one_hot[:, None].expand(-1, kv_heads, -1), numbers[:, None].expand(tokens, -1, 1)], dim=2)
    do = (v * case.visible.sum(1)[:, None, None]).repeat_interleave(heads // kv_heads, dim=1)
    do[:, torch.arange(heads, device=do.device) % (heads // kv_heads) > 0] = 0  # but one query head of each group
    (out, _, _, dv), lse = _attend(job, case, v.new_zeros(tokens, heads, job.head_dim), torch.ones_like(v), v, do)
    held = job.sp.shard(torch.arange(tokens, device=out.device), 0, case.layout)
    seen_by_rows = (out * lse.exp()[..., None]).nan_to_num() * case.visible[held].any(1)[:, None, None]
    wrong = []
    for direction, counts, turn in (("forward", seen_by_rows, lambda x: x), ("backward", dv, lambda x: x.T)):
        expected, group = turn(case.visible)[held].double() @ one_hot, counts.shape[1] // kv_heads
        of_head = expected.sum(1, keepdim=True) * numbers.repeat_interleave(group)
        text = ""
        if (bad := (counts[..., :-1] - expected[:, None]).abs() > 0.5).any():
            text = next(
                (
                    f"{part} dropped"
                    for part, visible in case.dropped.items()
                    if (counts[..., :-1] - (turn(visible)[held].double() @ one_hot)[:, None]).abs().max() <= 0.5
                ),
                "",
            )
            row, head, column = bad.nonzero()[0].tolist()
            text = text or _miscounted(
                job,
                direction,
                held[row],
                blocks,
                turn(case.visible),
                column,
                float(counts[row, head, column]),
                float(expected[row, column]),
            )
        elif (mixed := (counts[..., -1] - of_head).abs() > 0.4 * expected.sum(1, keepdim=True)).any():
            row, head = mixed.nonzero()[0].tolist()
            other = round(float(counts[row, head, -1] / expected[row].sum())) - 1
            kind = "query" if direction == "forward" else "gradients of key/value"
            text = f"heads are mixed up: {kind} head {head} is of key/value head {other}, not {head // group}"
        wrong.append(text and f"{direction}: {text}")
    return wrong


def _blocks(job: Job, case: _Case) -> Tensor:
    """Return the number of each token's block."""
    tokens, size = len(case.visible), job.sp.runtime.size
    shards = case.layout.shards if case.layout else EvenShards(job.sp.config.layout, tokens, size)
    blocks = torch.zeros(tokens, dtype=torch.int64, device=job.sp.device)
    for block in range(size * shards.blocks_per_rank):
        for run in shards.runs("q", (block,)):
            blocks[run.start : run.last + 1 : run.step] = block
    return blocks


def _miscounted(
    job: Job, direction: str, token: Tensor, blocks: Tensor, visible: Tensor, column: int, found: float, expected: float
) -> str:
    """Return what is wrong where a token meets `found` tokens of a block and not `expected` ones."""
    of_column = (blocks % (job.head_dim - 1) == column) & (visible[token] | (expected == 0))
    own, other = int(blocks[token]), int(blocks[of_column][0])
    q, kv = (own, other) if direction == "forward" else (other, own)
    what = "is left out" if abs(found) < 0.5 else f"has {found:.4g} pairs of token {int(token)} and not {expected:.4g}"
    runtime = job.sp.runtime
    program = runtime.last_bound[direction][1][0]
    block_mask = runtime.compiler.block_mask(program.mask, program.shards)
    for rank, steps in enumerate(runtime.compiler.recipe.plan(direction, block_mask, program.shapes[0]).ranks):
        for number, step in enumerate(steps):
            if any(q in compute.q and kv in compute.kv for compute in step.computes):
                what += f", which CP rank {rank} computes in step {number} of {program.program.name}"
    return f"the product q({q})*kv({kv}) {what}"


def _compared(job: Job, case: _Case) -> tuple[str, str]:
    """Return (what is wrong with the numbers of random tensors, figures)."""
    dice, tokens, scale = torch.Generator().manual_seed(7), len(case.visible), job.head_dim**-0.5
    heads, kv_heads = job.heads
    q, k, v, do = (
        torch.randn(1, tokens, count, job.head_dim, generator=dice).to(job.sp.device, job.dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    do *= case.visible.any(1)[:, None, None]
    exact, plain = (
        attention(q, k, v, do, case.visible, scale, job.softcap, dtype) for dtype in (torch.float64, job.dtype)
    )
    held = job.sp.shard(case.visible.any(1)[None], 1, case.layout)[0]
    found, _ = _attend(job, case, q[0], k[0], v[0], do[0])
    found[0] *= held[:, None, None]
    sent = torch.bfloat16 if job.sp.config.comm_dtype == "bf16" and job.sp.runtime.size > 1 else job.dtype
    worst = 0.0
    for name, got, one, usual in zip(NAMES, found, exact, plain, strict=True):
        expected, greatest = job.sp.shard(one, 1, case.layout)[0], float(one.abs().max())
        gap, most = (
            float((got - expected).abs().max()) / greatest,
            2 * allowed(sent, float((usual - one).abs().max()) / greatest),
        )
        worst = max(worst, gap / most)
        if not gap <= most:
            factor = float((got * expected).sum() / expected.square().sum())
            rest = float((got - factor * expected).abs().max()) / greatest
            if rest <= 0.1 * gap:
                return f"{name} is {factor:.4g} times what it must be", ""
            return f"{name} differs by {gap:.1e} of its greatest element, {most:.1e} is allowed", ""
    return "", f"out, dq, dk, dv have at most {worst:.0%} of the error that is allowed"

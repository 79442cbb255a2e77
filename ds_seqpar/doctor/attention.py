"""Compare attention of the configured schedule with its definition, by inputs whose results name what is wrong.

Where q is 0, a row weights each key that it sees alike, and its log-sum-exp says how many these are. So values that are
1 in the column of their block make the output count the keys that a row saw of each block. The last column has the
number of the key/value head, and so says of which head they were. The gradient of v counts a key's rows in the same
way.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.sharding.masks import CAUSAL, FULL, Mask
from ..compiler.sharding.shards import EvenShards
from ..data.batch_layout import BatchLayout
from ..data.batches import IGNORE, check_batch
from ..errors import ConfigError
from .findings import Finding, Job
from .ranks import ADVICE, Gathering
from .reference import NAMES, exact_and_plain, masks, random, seen, share_of_allowed

LEAST = 64  # tokens of a sequence


class _Case(NamedTuple):
    """A mask as the product takes it, and by its definition."""

    name: str
    mask: Mask
    layout: BatchLayout | None
    visible: Tensor  # bool (queries, keys), False for queries that do not count
    dropped: dict[str, Tensor]  # what would be visible without a part of the mask, by the part's name


def check_attention(job: Job) -> Gathering:
    """Compare forward and backward with the definition for each mask: which keys a row sees, then the numbers."""
    cases, found = _cases(job), list[list[str]]()
    for case in cases:
        try:
            found.append([*(yield from _counted(job, case)), *(yield from _compared(job, case)), ""])
        except ConfigError as error:  # on all ranks: the schedule does not take such a mask
            found.append(["", "", "", "", str(error)])
    by_rank, findings = (yield found), list[Finding]()
    for at, case in enumerate(cases):
        *wrong, figures, refusal = found[at]
        check = f"attention, {case.name}"
        if refusal:
            findings.append(Finding(check=check, status="not tried", detail=refusal))
        else:  # what is wrong in forward on any rank makes backward and the numbers wrong
            first = next((i for i in range(len(wrong)) if any(of_rank[at][i] for of_rank in by_rank)), 0)
            findings.append(Finding.of(check, wrong[first], ADVICE, figures))
    return findings


def _cases(job: Job) -> list[_Case]:
    sp, device = job.sp, job.sp.device
    tokens = sp.multiple * max(2, -(-LEAST // sp.multiple))
    at, of_kind = torch.arange(tokens, device=device), masks(tokens, job.window)
    whole, causal, window, documents = (seen(mask, at, at) for mask in of_kind.values())
    starts = (*of_kind["documents"].documents, tokens)
    packed = sp.place(tokens, tuple(end - start for start, end in itertools.pairwise(starts)))
    real = torch.ones(2, tokens // 2, dtype=torch.int64)  # two rows, padded on the left and on the right
    real[0, : tokens // 8] = real[1, -tokens // 8 :] = 0
    padded = check_batch(sp, {"labels": torch.full_like(real, IGNORE), "attention_mask": real}, True).placement
    assert packed is not None  # since there are several documents
    assert padded is not None
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


def _attend(job: Job, case: _Case, *whole: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return this rank's out, dq, dk and dv (tokens, heads, head_dim) in fp64, and its rows' log-sum-exp."""
    q, k, v, do = (job.sp.shard(x[None].to(job.dtype), 1, case.layout) for x in whole)
    shards = case.layout.shards if case.layout else None
    with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
        local = [x.requires_grad_() for x in (q, k, v)]
        out, lse = job.sp.attention(q, k, v, mask=case.mask, shards=shards, softcap=job.softcap, return_lse=True)
        results = out.detach(), *torch.autograd.grad(out, local, do)
    return [x[0].double() for x in results], lse[0].detach().double()


def _counted(job: Job, case: _Case) -> Generator[None, Any, list[str]]:
    """Return what is wrong with the keys that this rank's rows see, and with the rows that see its keys. It yields
    before ranks communicate, as `_compared` does, so that an error of one leaves none waiting."""
    (heads, kv_heads), tokens, columns = job.heads, len(case.visible), job.head_dim - 1
    blocks, each = _blocks(job, case), torch.arange(heads, device=job.sp.device)
    one_hot = torch.nn.functional.one_hot(blocks % columns, columns).double()
    numbers = torch.arange(1, kv_heads + 1, device=blocks.device).double()
    v = torch.cat([one_hot[:, None].expand(-1, kv_heads, -1), numbers[:, None].expand(tokens, -1, 1)], dim=2)
    do = (v * case.visible.sum(1)[:, None, None]).repeat_interleave(heads // kv_heads, dim=1)
    do[:, each % (heads // kv_heads) > 0] = 0  # but for one query head of each group
    yield
    (out, _, _, dv), lse = _attend(job, case, v.new_zeros(tokens, heads, job.head_dim), torch.ones_like(v), v, do)
    held = job.sp.shard(torch.arange(tokens, device=out.device), 0, case.layout)
    out = (out * lse.exp()[..., None]).nan_to_num() * case.visible[held].any(1)[:, None, None]
    wrong = []
    for direction, result, counts, turned in (("forward", "out", out, False), ("backward", "dv", dv, True)):
        visible, *dropped = (x.T if turned else x for x in (case.visible, *case.dropped.values()))
        expected, found = visible[held].double() @ one_hot, counts[..., :-1]
        total, text = expected.sum(1, keepdim=True), ""
        mixed = (counts[..., -1] / total - numbers.repeat_interleave(counts.shape[1] // kv_heads)).abs() > 0.4
        if (bad := (found - expected[:, None]).abs() > 0.5).any():
            factor = float((found * expected[:, None]).sum() / expected.square().sum() / found.shape[1])
            causes = {
                f"{part} dropped": x[held].double() @ one_hot for part, x in zip(case.dropped, dropped, strict=True)
            }
            causes[f"{result} is {factor:.4g} times what it must be"] = factor * expected
            text = next((cause for cause, x in causes.items() if (found - x[:, None]).abs().max() <= 0.5), "")
            row, head, column = bad.nonzero()[0].tolist()
            pairs = float(found[row, head, column]), float(expected[row, column])
            of_block = blocks[(blocks % columns == column) & (visible[held[row]] | (pairs[1] == 0))][:1]
            text = text or _miscounted(job, direction, int(held[row]), (int(blocks[held[row]]), int(of_block)), *pairs)
        elif mixed.any():
            row, head = mixed.nonzero()[0].tolist()
            other, must = round(float(counts[row, head, -1] / total[row])) - 1, head * kv_heads // counts.shape[1]
            text = f"heads are mixed up: head {head} of {result} is of key/value head {other}, not {must}"
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


def _miscounted(job: Job, direction: str, token: int, blocks: tuple[int, int], found: float, expected: float) -> str:
    """Return what is wrong where a token meets `found` tokens of a block and not `expected` ones. blocks: of both."""
    runtime, (q, kv) = job.sp.runtime, blocks if direction == "forward" else blocks[::-1]
    what = "is left out" if abs(found) < 0.5 else f"has {found:.4g} pairs of token {token} and not {expected:.4g}"
    program = runtime.last_bound[direction][1][0]
    block_mask = runtime.compiler.block_mask(program.mask, program.shards)
    for rank, steps in enumerate(runtime.compiler.recipe.plan(direction, block_mask, program.shape).ranks):
        for number, step in enumerate(steps):
            if any(q in compute.q and kv in compute.kv for compute in step.computes):
                what += f", which CP rank {rank} computes in step {number} of {program.program.name}"
    return f"the product q({q})*kv({kv}) {what}"


def _compared(job: Job, case: _Case) -> Generator[None, Any, tuple[str, str]]:
    """Return (what is wrong with the numbers of random tensors, figures)."""
    tokens, (heads, kv_heads), counts = len(case.visible), job.heads, case.visible.any(1)[:, None, None]
    (q, do), (k, v) = random(job, 1, (tokens, heads), 2), random(job, 2, (tokens, kv_heads), 2)
    yield
    found, _ = _attend(job, case, q[0], k[0], v[0], do[0] * counts)
    found[0] *= job.sp.shard(counts, 0, case.layout)
    exact, plain = exact_and_plain(q, k, v, do * counts, case.visible, job.softcap)
    sent = torch.bfloat16 if job.sp.config.comm_dtype == "bf16" and job.sp.runtime.size > 1 else job.dtype
    worst, text = max(
        share_of_allowed(name, x, one, usual, sent, heads // kv_heads, job.sp.shard(one, 1, case.layout)[0])
        for name, x, one, usual in zip(NAMES, found, exact, plain, strict=True)
    )
    return text if worst > 1 else "", f"out, dq, dk, dv have at most {worst:.0%} of the error that is allowed"

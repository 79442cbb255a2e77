"""Check each rank's data: the tokens, positions and labels of sharded batches, and the sequences from loaders."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..base.errors import ranks_in_words
from ..data.checks import IGNORE
from .findings import Finding, Job

ROWS, BATCHES = 2, 2
OF_JOB = "the job's loader"  # may repeat examples, such as prompts, in several groups
DIVISOR = "num_items_in_batch"


def batches(job: Job) -> list[Finding]:
    """Shard a plain, a padded and a packed batch, gather the shards, and compare the results with the whole batches."""
    tokens, wrong = max(23, 2 * job.sp.multiple + 5), ""
    dice, size = torch.Generator().manual_seed(1), min(job.sp.sharding.vocabulary or (64,))
    ids = torch.randint(size, (ROWS, tokens), generator=dice, device="cpu")
    mask, at = torch.ones_like(ids), torch.arange(tokens, device="cpu")
    mask[0, : tokens // 4] = mask[1, -(tokens // 3) :] = 0
    labels = ids.masked_fill((mask == 0) | (at == tokens // 4), IGNORE)  # padding predicts no token
    positions = torch.stack([at % (tokens // 2), at % (tokens // 3)])
    padded, packed = {"attention_mask": mask, "labels": labels}, {"position_ids": positions}
    for kind, more in {"plain": dict[str, Tensor](), "padded": padded, "packed": packed}.items():
        whole = {"input_ids": ids, "labels": ids, **more}
        found = [_wrong(job, whole, shard) for shard in job.sp.shard_batches([whole, whole], training=False)]
        wrong = wrong or next((f"{one}, in a {kind} batch" for one in found if one), "")
    advice = "what `sp.shard_batches` returns was changed: take this rank's tokens of it as they are"
    detail = f"tokens, position_ids and labels of {ROWS} x {tokens} tokens, plain, padded and packed"
    return [Finding.of("batches", wrong, advice, detail)]


def _wrong(job: Job, whole: Mapping[str, Tensor], shard: Mapping[str, Any]) -> str:
    """Describe how a shard differs from its whole batch, or return "" if the shard is correct.

    The call is collective across the ranks that share the sequence.
    """
    sp, ids = job.sp, whole["input_ids"]
    positions = whole.get("position_ids", torch.arange(ids.shape[1], device="cpu").expand_as(ids))
    mask = whole.get("attention_mask", torch.ones_like(ids)).bool()
    first = torch.nn.functional.pad(positions[:, 1:] == 0, (0, 1), value=True)  # the next token starts a new document
    labels = whole["labels"].roll(-1, 1).masked_fill(first, IGNORE)
    for name, right in (("input_ids", ids), ("position_ids", positions), ("shift_labels", labels)):
        local = shard[name]
        late = torch.ones_like(local)  # whether labels are this rank's next tokens instead of the sequence's
        late[:, :-1] = local[:, :-1] == shard["labels"][:, 1:]
        own = torch.arange(local.shape[1], device="cpu").expand_as(local)
        got, own, late = (sp.gather(x.contiguous(), 1, shard.get("placement")) for x in (local, own, late))
        counts = torch.ones_like(mask) if name == "shift_labels" else mask
        if got.shape != right.shape:
            return f"{name} has {tuple(got.shape)} tokens in place of {tuple(right.shape)}"
        if not (different := (got != right) & counts).any():
            continue
        if name == "position_ids" and torch.equal(got, own):
            return "position_ids count each rank's own tokens, and not those of the sequence"
        if name == "shift_labels" and late.all():
            return "labels are shifted after sharding, so that a rank's last token has not the next one's label"
        row, token = different.nonzero()[0].tolist()
        return f"{name} is {got[row, token]} in place of {right[row, token]} at token {token} of row {row}"
    items = float((labels != IGNORE).sum()) * sp.data_size / sp.topology.world_size
    if abs(shard[DIVISOR] - items) <= 1e-6 * items:
        return ""
    factor = f"gradients are {items / shard[DIVISOR]:.4g} times what they must be"
    return f"{DIVISOR} is {shard[DIVISOR]:.6g} in place of {items:.6g}: {factor}"


def loaders(job: Job) -> Generator[Any, list[Any], list[Finding]]:
    """Check that ranks of the same group receive the same sequences, and that groups receive different sequences."""
    sp, numbers, findings = job.sp, [*range(2 * BATCHES * job.sp.data_size)], []
    dealt = sp.loader(DataLoader(numbers, batch_size=1))  # type: ignore[arg-type]
    given = {"sp.sampler": [*sp.sampler(numbers)], "sp.loader": [int(x) for batch in dealt for x in batch]}
    if (sampler := getattr(job.loader, "batch_sampler", None)) is not None:
        dataset = getattr(job.loader, "dataset", None)
        with contextlib.suppress(Exception):  # skip samplers that cannot be copied, since reading one would advance it
            sampler = copy.deepcopy(sampler, {id(dataset): dataset})
            given[OF_JOB] = [list(batch) for batch in itertools.islice(iter(sampler), BATCHES)]
    by_rank = yield sp.data_rank, given
    for name in given:
        wrong = ""
        for (rank, (group, mine)), (other, (others, its)) in itertools.combinations(enumerate(by_rank), 2):
            ranks, same = ranks_in_words([rank, other]), mine[name] == its[name]
            if group == others and not same:
                wrong = wrong or f"{ranks} share sequences, but {name} gives them {mine[name][:4]} and {its[name][:4]}"
            elif group != others and same and name != OF_JOB:
                wrong = wrong or f"{ranks} are of different groups, but {name} gives both {mine[name][:4]}"
        advice = "give the DataLoader sampler=sp.sampler(dataset), or let sp.loader deal its batches"
        findings.append(Finding.of(name, wrong, advice, f"{sp.data_size} group{'s' * (sp.data_size > 1)} of {sp.size}"))
    return findings

"""Check what ranks are given: tokens, positions and labels of sharded batches, and the sequences of loaders."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.checks import IGNORE
from ..errors import ranks_in_words
from ..runtime.agreement import all_gather_objects
from .findings import Check, Finding, Job

ROWS, BATCHES = 2, 2
OF_JOB = "the job's loader"  # which may give groups the same examples, as of prompts in several groups
DIVISOR = "num_items_in_batch"
SHARDING = "what `sp.shard_batches` returns was changed: take this rank's tokens of it as they are"
DEALING = "give the DataLoader sampler=sp.sampler(dataset), or let sp.loader deal its batches"


def batches(job: Job) -> list[Finding]:
    """Shard a plain, a padded and a packed batch, gather it again, and compare it with the whole one."""
    sp, tokens, wrong = job.sp, max(23, 2 * job.sp.multiple + 5), ""
    for kind, whole in batches_of(tokens, min(sp.vocabulary or (64,))).items():
        found = [_wrong(job, whole, shard) for shard in sp.shard_batches([whole, whole], training=False)]
        wrong = wrong or next((f"{one}, in a {kind} batch" for one in found if one), "")
    detail = f"tokens, position_ids and labels of {ROWS} x {tokens} tokens, plain, padded and packed"
    return [Finding.of("batches", wrong, SHARDING, detail)]


def batches_of(tokens: int, vocabulary: int) -> dict[str, dict[str, Tensor]]:
    """Return whole batches of each kind, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (ROWS, tokens), generator=generator, device="cpu")
    mask, at = torch.ones_like(ids), torch.arange(tokens, device="cpu")
    mask[0, : tokens // 4] = mask[1, -(tokens // 3) :] = 0
    labels = ids.masked_fill((mask == 0) | (at == tokens // 4), IGNORE)  # from padding no token is predicted
    positions = torch.stack([at % (tokens // 2), at % (tokens // 3)])
    return {
        "plain": {"input_ids": ids, "labels": ids},
        "padded": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "packed": {"input_ids": ids, "position_ids": positions, "labels": ids},
    }


def _wrong(job: Job, whole: Mapping[str, Tensor], shard: Mapping[str, Any]) -> str:
    """Return how a shard differs from its whole batch, "" where it does not. Collective over the sequence's ranks."""
    sp, (rows, tokens) = job.sp, whole["input_ids"].shape
    positions = whole.get("position_ids", torch.arange(tokens, device="cpu").expand(rows, -1))
    mask = whole.get("attention_mask", torch.ones_like(positions)).bool()
    first = torch.nn.functional.pad(positions[:, 1:] == 0, (0, 1), value=True)  # the next token is another document's
    expected = {"input_ids": whole["input_ids"], "position_ids": positions}
    expected["shift_labels"] = whole["labels"].roll(-1, 1).masked_fill(first, IGNORE)
    for name, right in expected.items():
        counts = torch.ones_like(mask) if name == "shift_labels" else mask
        got = sp.gather(shard[name].contiguous(), 1, shard.get("placement"))
        if got.shape != right.shape or not torch.equal(got[counts], right[counts]):
            return _named(job, name, got, right, shard)
    items = float((expected["shift_labels"] != IGNORE).sum()) * sp.data_size / dist.get_world_size()
    if abs(shard[DIVISOR] - items) > 1e-6 * items:
        factor = f"gradients are {items / shard[DIVISOR]:.4g} times what they must be"
        return f"{DIVISOR} is {shard[DIVISOR]:.6g} in place of {items:.6g}: {factor}"
    return ""


def _named(job: Job, name: str, got: Tensor, right: Tensor, shard: Mapping[str, Any]) -> str:
    """Return what is wrong with a shard's tensor in words. Collective over the sequence's ranks."""
    local = shard[name]
    is_local = torch.equal(local, torch.arange(local.shape[1], device="cpu").expand_as(local))
    shifted_late = name == "shift_labels" and torch.equal(local[:, :-1], shard["labels"][:, 1:])
    of_ranks = all_gather_objects(job.sp.groups.control, ("shards", (is_local, shifted_late)))
    if name == "position_ids" and all(is_local for _, (is_local, _) in of_ranks):
        return "position_ids count each rank's own tokens, and not those of the sequence"
    if all(late for _, (_, late) in of_ranks):
        return "labels are shifted after sharding, so that a rank's last token has not the next one's label"
    if got.shape != right.shape:
        return f"{name} has {tuple(got.shape)} tokens in place of {tuple(right.shape)}"
    row, token = (got != right).nonzero()[0].tolist()
    return f"{name} is {got[row, token]} in place of {right[row, token]} at token {token} of row {row}"


def loaders(job: Job) -> Generator[Any, list[Any], list[Finding]]:
    """Compare which sequences each rank is given: the same in a group, and others in other groups."""
    sp = job.sp
    numbers = [*range(2 * BATCHES * sp.data_size)]
    dealt = sp.loader(DataLoader(numbers, batch_size=1))  # type: ignore[arg-type]
    given = {"sp.sampler": [*sp.sampler(numbers)], "sp.loader": [int(x) for batch in dealt for x in batch]}
    if (sampler := getattr(job.loader, "batch_sampler", None)) is not None:
        dataset = getattr(job.loader, "dataset", None)
        with contextlib.suppress(Exception):  # one that cannot be copied is not read, since that would move it on
            sampler = copy.deepcopy(sampler, {id(dataset): dataset})
            given[OF_JOB] = [list(batch) for batch in itertools.islice(iter(sampler), BATCHES)]
    by_rank = yield sp.data_rank, given
    findings = []
    for name in given:
        wrong = _wrong_examples(name, [(group, of_rank[name]) for group, of_rank in by_rank])
        detail = f"{sp.data_size} group{'s' * (sp.data_size > 1)} of {sp.size}"
        findings.append(Finding.of(name, wrong, DEALING, detail))
    return findings


def _wrong_examples(name: str, by_rank: Sequence[tuple[int, Sequence[Any]]]) -> str:
    """Return which ranks are given the wrong examples; "" where none are. by_rank: (its group, its examples)."""
    for (rank, (group, own)), (other, (others, its)) in itertools.combinations(enumerate(by_rank), 2):
        ranks = ranks_in_words([rank, other])
        if group == others and own != its:
            return f"{ranks} share sequences, but {name} gives them {own[:4]} and {its[:4]}"
        if group != others and own == its and name != OF_JOB:
            return f"{ranks} are of different groups, but {name} gives both {own[:4]}"
    return ""


CHECKS: tuple[tuple[str, Check], ...] = (("batches", batches), ("loaders", loaders))

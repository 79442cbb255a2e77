"""Explain differences between ranks on the basis of the fields that they compared. The functions are passed to
`assert_ranks_agree` as `advice`.

Each function receives the fields of the differing ranks. Each function returns a clause with the cause and the remedy,
or "" if the cause is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..base.errors import ranks_in_words
from ..base.fingerprint import Fields
from .agreement import differing

SAMPLES = ("input_ids", "inputs_embeds", "labels")
KEPT = "attention to kept keys"  # operator name of `cache_attention`
PLACEMENT = "give attention mask=placement.mask and shards=placement.shards of its batch's placement on every rank"


def of_batches(by_rank: Mapping[int, Fields], began: bool = False) -> str:
    """Return the cause if ranks that share a sequence have different samples, but the same numbers of batches and
    columns.

    Args:
        by_rank: Fields of each rank.
        began: Whether ranks have already made calls together, in which case one rank may have skipped a step.
    """
    names = differing(by_rank)
    same_columns = all(name in fields for name in names for fields in by_rank.values())
    if not same_columns or not any(name.endswith(SAMPLES) for name in names):
        return ""
    by_samples: dict[str, list[int]] = {}
    for rank, fields in by_rank.items():
        by_samples.setdefault(repr(sorted(fields.items())), []).append(rank)
    remedy = (
        "make samplers by sp.sampler(dataset), or loaders by sp.loader (give a Trainer the whole data set on every "
        "rank, and an Accelerator to share_accelerator), and seed all ranks alike"
    )
    *minorities, _ = sorted(by_samples.values(), key=len)
    deviating = ranks_in_words([rank for ranks in minorities for rank in ranks])
    if began:
        who = "one of them" if len(by_samples) == len(by_rank) else deviating
        return (
            f"{who} is one call ahead, as after a step that not all ranks skipped (skip it on all or on none), or has "
            f"another part of the data, as from a DistributedSampler over all ranks: {remedy}"
        )
    if len(by_samples) == len(by_rank):
        return f"each has samples of its own, as from a DistributedSampler over all ranks or other seeds: {remedy}"
    return f"{deviating} has other samples than the rest, as from another seed or data set: {remedy}"


WEIGHT = "mean size of "  # prefix of weight fields in training, followed by a parameter name
RANDOM = "random numbers"  # field with the random states from which numbers for whole tensors are drawn
# allowed relative difference between weights, since rounding differs between device types even for equal gradients
ROUNDING = 1e-4


def of_models(by_rank: Mapping[int, Fields]) -> str | None:
    """Return the cause if weights or placements differ in a sharded forward pass, or None if only rounding differs."""
    names = differing(by_rank)
    if names and all(name.startswith(WEIGHT) for name in names):
        weights = [[float(fields[name]) for fields in by_rank.values()] for name in names]
        if all(max(values) - min(values) <= ROUNDING * max(values) for values in weights):
            return None
        return (
            "their weights have drifted apart in training, since nothing averages gradients over ranks: wrap the model "
            "in DistributedDataParallel, fully_shard, DeepSpeed or accelerate's prepare, or average its gradients over "
            "all ranks before each step"
        )
    if names == [RANDOM]:
        return (
            "they drew other random numbers for whole tensors: call torch.manual_seed with one seed on all ranks of a "
            "sequence, and draw on all of them or from a torch.Generator"
        )
    if "placement" in names:
        return "a placement belongs to another batch: give each forward all that shard_batches returned for its batch"
    if names and all(name.startswith("values of ") for name in names):
        return (
            "their models began with other weights, as from other seeds: call torch.manual_seed with one seed on every "
            "rank before the model is made, or load one checkpoint"
        )
    return ""


def of_kernels(by_rank: Mapping[int, Fields]) -> str:
    """Return the cause if ranks have the same configuration but would choose different kernels."""
    if not all(name.startswith("kernels ") for name in differing(by_rank)):
        return ""
    return 'they have other kernels: install the same packages, or name a "kernel"'


def of_attention(by_rank: Mapping[int, Fields]) -> str:
    """Return the cause if an attention call omits its batch's placement or receives another batch's placement."""
    names, has_shards = differing(by_rank), ["shards" in fields for fields in by_rank.values()]
    if any(KEPT in fields.get("operator", "") for fields in by_rank.values()):  # `cache_attention` takes no placement
        return ""
    if any(has_shards) and {"shards", "mask"} & set(names):
        return f"a placement {'belongs to another batch' if all(has_shards) else 'was left out'}: {PLACEMENT}"
    other_dims = {re.sub(r"^'\((\d+), \d+", r"\1", fields.get("q", "")) for fields in by_rank.values()}
    if "q" in names and len(other_dims) == 1:
        return f"ranks hold unequal numbers of tokens, which a placement says: {PLACEMENT}"
    return ""

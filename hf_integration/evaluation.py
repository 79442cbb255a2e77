"""Whether a Trainer's way to evaluate gives the mean token loss, tried once before anything depends on it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_seqpar.batches import IGNORE
from ds_seqpar.errors import ConfigError, SeqParError, as_error
from ds_seqpar.runtime.agreement import agree

from .families import unwrapped
from .loss_checks import evaluating
from .masks import add_checked_mask
from .sharding_trainer import ShardingTrainer

HOW = "give the Trainer check_loss=False where that is meant"
AT_LEAST = 8  # tokens of the tried sequence, so that ranks hold different numbers of labels


def check_evaluation(trainer: ShardingTrainer, model: nn.Module) -> None:
    """Raises ConfigError on every rank unless `prediction_step`, with the prepared model, gives the mean token loss of
    sequences whose labels are spread unevenly over ranks. Once a Trainer; collective over the world."""
    if trainer.evaluation_was_tried:
        return
    trainer.evaluation_was_tried = True
    sp, vocabulary = trainer.sp, unwrapped(trainer.model).config.vocab_size
    ids = torch.arange(sp.multiple * math.ceil(AT_LEAST / sp.multiple))[None] % vocabulary
    with evaluating(model, trainer):
        labels, expected, dtype = _uneven(trainer, model, ids)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        shard = sp.shard_batch(batch, training=False)
        add_checked_mask(sp, batch, shard)
        loss, error = None, None
        try:
            loss = trainer.local_prediction_step(model, shard, True, None)[0]
        except Exception as reason:
            error = as_error(f"trying prediction_step on {', '.join(batch)} alone failed ({HOW})", reason)
    agree(sp.control_world, "evaluation step", loss is None, error=error)
    if loss is None:
        return  # nothing that could be wrong
    error = _loss_error(sp.mean_loss(loss), expected, rel_tol=1e-3 if dtype == torch.float32 else 1e-2)
    agree(sp.control_world, "evaluation loss", None, error=error)


def _uneven(trainer: ShardingTrainer, model: nn.Module, ids: Tensor) -> tuple[Tensor, float, torch.dtype]:
    """(labels for ids (1, S), their mean token loss, the logits' dtype). Few tokens count, more of the first group's
    than of others', some of them likely and some not: a mean of ranks' means is then far from the mean."""
    sp = trainer.sp
    given = {"input_ids": sp.shard(ids, 1), "position_ids": sp.position_ids(ids.shape[1])[None]}
    output = model(**{name: x.to(trainer.args.device) for name, x in given.items()})
    logits = output.logits.float()
    likely, unlikely = sp.gather(logits.argmax(-1), 1).cpu(), sp.gather(logits.argmin(-1), 1).cpu()
    labels = torch.full_like(ids, IGNORE)
    counted = 3 if sp.data_rank == 0 else 1
    labels[:, 1:counted] = likely[:, : counted - 1]
    labels[:, counted] = unlikely[:, counted - 1]
    shifted = sp.shard(F.pad(labels[:, 1:], (0, 1), value=IGNORE), 1).flatten().to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1), shifted, ignore_index=IGNORE, reduction="sum")
    return labels, sp.mean_loss(losses) / sp.mean_loss((shifted != IGNORE).double().sum()), output.logits.dtype


def _loss_error(found: float, expected: float, rel_tol: float) -> SeqParError | None:
    if math.isclose(found, expected, rel_tol=rel_tol):
        return None
    return ConfigError(
        "evaluation needs a prediction_step that takes its loss from compute_loss, or from the model, with all inputs "
        f"that it is given; got {found:.4f} where the mean token loss is {expected:.4f}, leave prediction_step as it "
        f"is, or {HOW}"
    )

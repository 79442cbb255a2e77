"""Whether a loss is what sharded training needs: the sum of token losses on shift_labels over num_items_in_batch.

A loss that swallows both in its **kwargs would train silently wrong, so it is tried: a `loss_function` on two tokens,
and then what came out of a forward.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.batches import IGNORE
from ds_seqpar.errors import ConfigError, SeqParError, as_error
from ds_seqpar.runtime.agreement import agree

from .experts import left_out
from .families import unwrapped
from .liger import as_in_training
from .tiling import evaluated

ITEMS = 3.0  # the divisor that a loss is tried with


def check_function(model: nn.Module, sp: SequenceParallel) -> None:
    """Raises ConfigError on every rank unless the loss_function of a causal language model of transformers is right."""
    if _has_loss(model):
        agree(sp.control_world, "loss function", None, error=loss_function_error(unwrapped(model), "initialize"))


def check_engine(engine: Any, sp: SequenceParallel) -> None:
    """Raises ConfigError on every rank unless the engine's model, a causal language model of transformers, calls
    sp.attention and gives the loss that is needed. One forward of the shortest sequence; leaves modes and random state
    as they were."""
    if not _has_loss(engine.module):
        return
    given = probe(sp, unwrapped(engine.module).config.vocab_size, engine.device)
    error: SeqParError | None = None
    before = sum(sp.comm.received.values())
    try:
        with evaluating(engine):
            output = engine(**given, num_items_in_batch=ITEMS)
            losses = [float(output.loss)]
            if way := as_in_training(unwrapped(engine.module)):
                losses.append(float(engine(**given, **way, num_items_in_batch=ITEMS).loss))
        error = loss_error(output, given["shift_labels"], losses, ITEMS, "initialize")
    except SeqParError:
        raise  # on all ranks
    except Exception as reason:
        error = as_error("trying the model's loss (check_loss=False leaves that out) failed", reason)
    received = sum(sp.comm.received.values()) - before
    if not agree(sp.control_world, "loss of the model", None, error=error, number=received) and sp.size > 1:
        raise ConfigError(
            "a model that is given with sequence_parallel=sp must call sp.attention; got "
            f"{type(unwrapped(engine.module)).__name__}, in whose forward nobody communicated, see docs/other_models.md"
        )


def _has_loss(model: nn.Module) -> bool:
    model = unwrapped(model)
    return isinstance(model, PreTrainedModel) and type(model).__name__.endswith("ForCausalLM")


def probe(sp: SequenceParallel, vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's part of the shortest sequence, with shift_labels that could not be made from its labels."""
    ids = torch.arange(sp.multiple)[None] % vocabulary
    given = sp.shard_batch({"input_ids": ids, "labels": ids.clone()}, training=False)
    given["shift_labels"] = (given["labels"] * 3 + 1) % vocabulary
    return {name: x.to(device) for name, x in given.items() if isinstance(x, Tensor)}


@contextlib.contextmanager
def evaluating(model: nn.Module, trainer: Any = None) -> Iterator[None]:
    """The model, or engine, in evaluation mode, without gradients; afterwards all is what it was: modes, torch's random
    state, what ZeRO-3 knows of the order of forwards, and what a Trainer of trl collects to log. Of a model with
    experts the loss is that of tokens alone; of one with a tiled loss it is that, with whole logits beside it."""
    modes = [(module, module.training) for module in model.modules()]
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), left_out(model), evaluated(model, "logits"):
            yield
    finally:
        for module, training in modes:
            module.training = training
        if metrics is not None:
            trainer._metrics = metrics
        _forget_order(model)


def _forget_order(engine: nn.Module) -> None:
    """ZeRO-3 records its first forward and prefetches by that from the second on: that must be one of training, or what
    selective checkpointing sees in it differs from what it sees when it recomputes."""
    optimizer = getattr(engine, "optimizer", None)
    offload: Any = getattr(optimizer, "parameter_offload", optimizer)
    if hasattr(offload, "get_param_coordinator"):
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


def loss_function_error(model: PreTrainedModel, taker: str = "the Trainer") -> ConfigError | None:
    """What is wrong with `model.loss_function`. taker: who takes check_loss=False, or "" where nobody does."""
    logits, labels = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]]), torch.tensor([[1, 0]])
    shifted = torch.tensor([[2, IGNORE]])  # nothing that could be made from labels
    expected = float(F.cross_entropy(logits[0, :1], shifted[0, :1])) / 4
    given = {"labels": labels, "vocab_size": 3, "num_items_in_batch": torch.tensor(4), "shift_labels": shifted}
    try:
        loss = float(model.loss_function(logits=logits, **given))
    except Exception as reason:
        return _error(f"a loss_function that cannot take them ({type(reason).__name__}: {reason})", taker)
    if math.isclose(loss, expected, rel_tol=1e-4):
        return None
    return _error(f"a loss_function that gives {loss:.4f} for {expected:.4f}", taker)


def loss_error(
    output: Any, labels: Tensor, found: Sequence[float], items: float, taker: str = "the Trainer"
) -> ConfigError | None:
    """What is wrong with the losses `found` of a forward that gave `output`, by shift_labels `labels` over `items`."""
    logits = output.get("logits") if isinstance(output, Mapping) else output[1]
    if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
        return _error("no logits to compare its loss with", taker)
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    expected = float(losses) / items
    wrong = [loss for loss in found if not math.isclose(loss, expected, rel_tol=1e-2)]
    return _error(f"{wrong[0]:.4f} where that is {expected:.4f}", taker) if wrong else None


def _error(got: str, taker: str) -> ConfigError:
    got = " ".join(got.split())
    otherwise = f"give {taker} check_loss=False" if taker else "compute it from the whole logits"
    return ConfigError(
        "sequence parallel training needs a loss that divides the sum of token losses on shift_labels by "
        f"num_items_in_batch; got {got}, pass both on to transformers' loss, or {otherwise} where another loss is meant"
    )

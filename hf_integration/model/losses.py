"""Check a model's loss when ranks share sequences, and compute the expert balance loss.

A rank's loss on its own tokens must be the sum of token losses on shift_labels, divided by num_items_in_batch. A loss
that swallows both arguments in its **kwargs, or adds a term, would silently produce wrong gradients. The loss is
therefore tested twice: `loss_function` on two tokens, and the loss of a real forward, up to rounding. With whole
batches, a user-defined forward gets whole outputs instead, and may compute any loss (see `families.is_plain_head`).

The expert balance loss multiplies two sums over tokens (Switch Transformer, equation 4). Averaging the ranks' balance
losses would change the loss and the gradients of the unsplit model. The balance is therefore computed from whole
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.guards.agreement import all_gather_objects, assert_ranks_agree
from ds_seqpar.whole import WholeTensor

from ..families import balance_weight, is_causal_lm, unwrapped
from ..memory.tiled_loss import token_losses


def check_function(model: nn.Module, sp: SequenceParallel) -> None:
    """Raise ConfigError on every rank if the loss_function of a transformers causal language model is wrong."""
    if has_loss(model):
        assert_ranks_agree(
            sp.control_world, "loss function", None, error=loss_function_error(unwrapped(model), "initialize")
        )


def has_loss(model: nn.Module) -> bool:
    """Return whether a model is a transformers causal language model, whose loss can be checked."""
    model = unwrapped(model)
    return isinstance(model, PreTrainedModel) and is_causal_lm(model)


def loss_function_error(model: PreTrainedModel, option_of: str) -> ConfigError | None:
    """Return the error for a wrong `model.loss_function`, or None if the function is correct.

    Args:
        option_of: The name of the function or class that accepts check_loss=False, or "" if there is none. Used in the
            error message.
    """
    logits, labels = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]]), torch.tensor([[1, 0]])
    shifted = torch.tensor([[2, IGNORE]])  # cannot be derived from labels
    expected = float(F.cross_entropy(logits[0, :1], shifted[0, :1])) / 4
    arguments = {"labels": labels, "vocab_size": 3, "num_items_in_batch": torch.tensor(4), "shift_labels": shifted}
    try:
        loss = float(model.loss_function(logits=logits, **arguments))
    except Exception as reason:
        return _error(f"a loss_function that cannot take them ({type(reason).__name__}: {reason})", option_of)
    tried = TriedLoss.of(torch.tensor(loss), expected)
    return tried.error(option_of, "a loss_function that gives {} for {}") if tried.rest else None


class TriedLoss(NamedTuple):
    """A comparison of a forward's loss with the sum of token losses."""

    value: float  # the loss that the forward returned
    expected: float  # the sum of token losses over num_items_in_batch
    rounding: float  # the difference that rounding may cause

    @classmethod
    def of(cls, loss: Tensor, expected: float, tokens: int = 1) -> TriedLoss:
        """Compare a loss with a sum of token losses in fp32.

        Args:
            loss: The loss that the forward returned.
            expected: The sum of token losses, divided by num_items_in_batch.
            tokens: The number of summed token losses.
        """
        value = float(loss.detach())
        eps = max(torch.finfo(torch.float32).eps, torch.finfo(loss.dtype).eps)
        return cls(value, expected, min(1e-2, eps * max(8, tokens**0.5)) * max(abs(value), abs(expected)))

    @property
    def rest(self) -> float:
        """The loss minus the sum of token losses, or 0 if the difference is within rounding."""
        rest = self.value - self.expected
        alike = self.value == self.expected or (math.isnan(self.value) and math.isnan(self.expected))
        return 0.0 if alike or abs(rest) <= self.rounding else rest

    def error(self, option_of: str, got: str = "{} where that is {}") -> ConfigError:
        return _error(got.format(*(f"{x:.7g}" for x in self[:2])), option_of)


def shard_loss_error(sp: SequenceParallel, tried: TriedLoss | None) -> ConfigError | None:
    """Return the error for the loss of sharded forwards, or None if the loss is correct.

    The call is collective across the ranks that share the sequence.

    A rank's loss may contain another term, such as a penalty on parameters, if the term is equal on all ranks. Sharded
    losses are averaged over ranks, so a term that is equal on all ranks contributes once.
    """
    all_tried = [trial for _, trial in all_gather_objects(sp.groups.control, ("loss of the model", tried))]
    if tried is None or not tried.rest:
        return None
    rests = [trial.rest if trial else math.nan for trial in all_tried]
    rounding = max(trial.rounding for trial in all_tried if trial)
    alike = sp.size > 1 and all(map(math.isfinite, rests)) and max(rests) - min(rests) <= rounding
    return None if alike else tried.error("initialize")


def check_loss(
    sp: SequenceParallel, module: nn.Module, inputs: Mapping[str, Any], output: Any, *, share: float = 1.0,
    tiles: list[float] | None = None, option_of: str | None = None, error: ConfigError | None = None,
) -> bool:  # fmt: skip
    """Raise ConfigError on all ranks that share a sequence if any rank's loss contains more than token losses.

    Args:
        inputs: The forward's arguments by name, with this rank's shard.
        output: The forward's output.
        share: See `tried_loss`.
        tiles: See `tried_loss`.
        option_of: For a whole batch, see `loss_function_error`. None if the batch was passed sharded.
        error: An earlier error on this rank, or None.

    Returns:
        Whether the batch contains the arguments needed for the check.
    """
    labels, items = inputs.get("shift_labels"), inputs.get("num_items_in_batch")
    if labels is None or items is None or inputs.get("labels") is None:
        return False
    tried = tried_loss(unwrapped(module), labels, float(items), output, share, tiles)
    if option_of is None:
        error = shard_loss_error(sp, tried) or error
    elif tried is not None and tried.rest:
        error = tried.error(option_of)
    sp.checker.check_now("loss of the model", None, error=error)
    return True


def tried_loss(
    model: Any, labels: Tensor, items: float, output: Any, share: float, tiles: list[float] | None = None
) -> TriedLoss | None:
    """Compare a forward's loss with the sum of token losses.

    Args:
        labels: The forward's shift_labels.
        items: The divisor of the token losses.
        output: The forward's output.
        share: The fraction of the expert balance that the loss includes.
        tiles: Each tile's sum of token losses, if the loss is tiled and there are no logits.

    Returns:
        The comparison, or None if there is no loss to compare, or neither logits nor a tiled loss.
    """
    fields = output if isinstance(output, Mapping) else dict(zip(("loss", "logits"), output, strict=False))
    loss, logits, experts = (fields.get(name) for name in ("loss", "logits", "aux_loss"))
    losses = sum(tiles) if tiles else None
    if isinstance(logits, Tensor) and logits.shape[:2] == labels.shape:
        losses = token_losses(logits, labels)
    if loss is None or losses is None or not items:
        return None
    balance = 0.0 if experts is None else share * balance_weight(model) * float(experts.detach())
    tried = TriedLoss.of(loss, losses / items + balance, tokens=labels.numel())
    return tried._replace(rounding=tried.rounding + 8 * torch.finfo(loss.dtype).eps * abs(balance))


def _error(got: str, option_of: str) -> ConfigError:
    got = " ".join(got.split())
    otherwise = f"give {option_of} check_loss=False" if option_of else "compute it from the whole logits"
    return ConfigError(
        "a rank's loss must be the sum of token losses on shift_labels divided by num_items_in_batch, and nothing more "
        f"(such as a z-loss, or a penalty); got {got}, pass both on to transformers' loss and leave loss_tiles out, or "
        f"{otherwise} where another loss is meant: on whole batches a forward of your own may add terms "
        "(docs/own_loop.md)"
    )


class ExpertBalance:
    """The expert balance loss of a patched model."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        sp.sharding.mask_users.add(self)  # makes `shard_batches` return the mask, so that padding is not counted

    def __deepcopy__(self, memo: dict) -> ExpertBalance:
        return ExpertBalance(self.sp)

    def close(self) -> None:
        self.sp.sharding.mask_users.discard(self)

    def correct(self, model: Any, kwargs: dict[str, Any], output: Any, share: float, router_logits: Any = None) -> Any:
        """Replace the expert balance over this rank's tokens with the balance over whole sequences.

        The balance is already correct if a user-defined head got whole router logits.

        Args:
            output: The forward's output, changed in place.
            share: The fraction of the balance to include in a rank's loss. The fraction is 1 for batches from
                `shard_batches`, for which losses are averaged over ranks, and 1 / size in a whole call, in which losses
                are summed.
            router_logits: The base model's router logits, for outputs that lack router logits, as with trl.

        Returns:
            The output.
        """
        if getattr(output, "aux_loss", None) is None:
            return output
        router_logits = getattr(output, "router_logits", None) or router_logits
        if router_logits is None:
            raise ConfigError(
                f"the balance of experts needs router_logits; got a {type(output).__name__} without, of a compiled "
                "model, compile its layers instead (layer.compile())"
            )
        if isinstance(router_logits[0], WholeTensor):
            return output
        chosen, mask = model.num_experts_per_tok, kwargs.get("attention_mask")
        whole = torch.compiler.disable(balance)(self.sp, router_logits, chosen, mask)
        if output.get("loss") is not None:
            # subtracting the model's own term also cancels its gradient exactly
            output.loss = output.loss + balance_weight(model) * (share * whole - output.aux_loss)
        output.aux_loss = whole
        return output


def balance(sp: SequenceParallel, router_logits: tuple[Tensor, ...], chosen: int, mask: Tensor | None) -> Tensor:
    """Compute the expert balance loss over all layers and all tokens of the group's sequences.

    The loss is the number of experts times a sum over experts. Each term is the share of tokens that chose the expert,
    multiplied by the expert's mean probability.

    Args:
        router_logits: The router logits (tokens, experts) of each layer.
        chosen: The number of experts per token.
        mask: A mask that is 0 for tokens to ignore, or None to count all tokens.
    """
    weight = None if mask is None else mask.reshape(-1, 1).float()
    sums, experts = [], router_logits[0].shape[-1]
    for logits in router_logits:
        likely = torch.softmax(logits, dim=-1)
        selected = F.one_hot(likely.topk(chosen, dim=-1).indices, experts).sum(-2).float()
        ones = torch.ones_like(likely[:, :1], dtype=torch.float32) if weight is None else weight.to(likely.device)
        sums.append(torch.cat([(x * ones).sum(0) for x in (selected, likely.float(), torch.ones_like(ones))]))
    total = sp.sum_over_ranks(torch.stack([x.to(sums[0].device) for x in sums]).sum(0))
    counts, probabilities, rows = total[:experts].detach(), total[experts:-1], total[-1].detach()
    return experts * (counts / rows * (probabilities / rows)).sum()


def check_output(model: Any, inputs: dict[str, Any]) -> None:
    """Raise ConfigError if a forward with an expert balance loss returns a tuple, in which the loss has no name."""
    wanted = inputs.get("output_router_logits")
    balances = model.config.output_router_logits if wanted is None else wanted
    as_dict = inputs.get("return_dict")
    if balances and (as_dict is False or (as_dict is None and not getattr(model.config, "return_dict", True))):
        raise ConfigError(
            "the loss for balanced experts needs a forward with return_dict=True; got False, leave it out or set "
            "output_router_logits=False"
        )

"""The loss for balanced experts, over whole sequences: it multiplies two sums over tokens (Switch Transformer, equation
4), so that a mean of ranks' losses is another number, and has other gradients, than the unsplit model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_seqpar import SequenceParallel
from ds_seqpar.errors import ConfigError

from .families import FAMILIES, unwrapped


class Experts:
    """Of a patched model whose loss has such a part."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        sp.mask_users.add(self)  # padding is not counted as tokens

    def __deepcopy__(self, memo: dict) -> Experts:
        return Experts(self.sp)

    def close(self) -> None:
        self.sp.mask_users.discard(self)

    def correct(self, model: Any, kwargs: dict[str, Any], output: Any, share: float) -> Any:
        """The output of a sharded forward with the loss of whole sequences in place of that of this rank's tokens.
        share: what of it a rank's loss has. Ranks' losses of `shard_batches` are averaged: each has all of it. Those of
        a whole call are summed."""
        if getattr(output, "aux_loss", None) is None:
            return output
        settings = model.num_experts, model.num_experts_per_tok
        whole = torch.compiler.disable(balance)(self.sp, output.router_logits, *settings, kwargs.get("attention_mask"))
        if output.get("loss") is not None:
            # what the model has added goes again with its gradient, which is then a sum of two that cancel exactly
            output.loss = output.loss + model.router_aux_loss_coef * (share * whole - output.aux_loss)
        output.aux_loss = whole
        return output


def has_experts(model: Any) -> bool:
    """Whether the loss of a known model may have such a part."""
    family = FAMILIES.get(model.config.model_type)
    return family is not None and family.experts and hasattr(model, "router_aux_loss_coef")


def balance(
    sp: SequenceParallel, router_logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Tensor | None
) -> Tensor:
    """experts * sum over e of (share of tokens that chose e) * (mean probability of e), of all layers and of all tokens
    of the group's sequences; `chosen` experts a token. router_logits: (tokens, experts) of each layer. mask: 0 for
    tokens that do not count."""
    weight = None if mask is None else mask.reshape(-1, 1).float()
    sums = []
    for logits in router_logits:
        likely = torch.softmax(logits, dim=-1)
        picked = F.one_hot(likely.topk(chosen, dim=-1).indices, experts).sum(-2).float()
        ones = torch.ones_like(likely[:, :1], dtype=torch.float32) if weight is None else weight.to(likely.device)
        sums.append(torch.cat([(x * ones).sum(0) for x in (picked, likely.float(), torch.ones_like(ones))]))
    total = sp.sum_over_ranks(torch.stack([x.to(sums[0].device) for x in sums]).sum(0))
    counts, probabilities, rows = total[:experts].detach(), total[experts:-1], total[-1].detach()
    return experts * (counts / rows * (probabilities / rows)).sum()


@contextlib.contextmanager
def left_out(model: Any) -> Iterator[None]:
    """A context in which a model's loss is that of tokens alone."""
    config: Any = unwrapped(model).config
    before = getattr(config, "output_router_logits", False)
    if before:
        config.output_router_logits = False
    try:
        yield
    finally:
        if before:
            config.output_router_logits = True


def check_output(model: Any, given: dict[str, Any]) -> None:
    """Raises ConfigError for a forward that gives a tuple, in which the loss cannot be told."""
    wanted = given.get("output_router_logits")
    asked = model.config.output_router_logits if wanted is None else wanted
    as_dict = given.get("return_dict")
    if asked and (as_dict is False or (as_dict is None and not getattr(model.config, "return_dict", True))):
        raise ConfigError(
            "the loss for balanced experts needs a forward with return_dict=True; got False, leave it out or set "
            "output_router_logits=False"
        )

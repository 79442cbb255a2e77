"""The tiled loss of a causal language model, independent of the code between the model's head and its loss.

Some families scale or cap their logits, or add an expert balance loss. No family's code is duplicated in this module.
The forward of the model's own class runs once for each tile, on a copy of the model (a twin) whose base model returns
one tile of the last hidden state. To compute the model's remaining outputs, the forward runs once more with the real
base model, whose output is truncated to zero tokens.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.core.settings import most_logits
from ds_seqpar.data.batches import IGNORE

from ..compat import LEAF, ZERO_ID, drop_children
from ..context import current
from ..families import balance_weight, base_of, patch_of
from ..graph_breaks import between_graphs
from ..module_patch import patch_on
from .tiled_function import GradientSums, tile_count, tiled_sum, trained_parameters

TOGETHER = 1024  # number of tokens whose logits are cast to fp32 at once


def token_losses(logits: Tensor, labels: Tensor) -> float:
    """Return the sum of token losses in fp32, given logits (B, s, vocabulary) and shift_labels (B, s)."""
    flat, targets = logits.detach().flatten(0, 1), labels.to(logits.device).flatten()
    pairs = zip(flat.split(TOGETHER), targets.split(TOGETHER), strict=True)
    losses = [F.cross_entropy(x.float(), target.long(), ignore_index=IGNORE, reduction="sum") for x, target in pairs]
    return float(torch.stack(losses).sum())


def model_forward(plain: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a causal language model's forward with a tiled loss.

    Without tiles, call the plain forward of the model's class.
    """
    inputs = {**dict(zip(_argument_names(model), args, strict=False)), **kwargs} if args else kwargs
    if not _wants_tiles(model, inputs):
        return plain(model, *args, **kwargs)
    if inputs.get("num_items_in_batch") is None:
        raise InputError(
            "a tiled loss needs num_items_in_batch, which the sum of token losses is divided by; got none, give the "
            "model what sp.shard_batches returns"
        )
    return _tiled_output(model, inputs)


def _argument_names(model: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def _wants_tiles(model: Any, inputs: dict[str, Any]) -> bool:
    patch = patch_of(model)
    if inputs.get("labels") is None or inputs.get("shift_labels") is None or inputs.get("logits_to_keep"):
        return False
    return not patch.whole and (torch.is_grad_enabled() or patch.evaluating)


def _tiled_output(model: Any, inputs: dict[str, Any]) -> Any:
    inputs = {**inputs}
    as_dict = inputs.pop("return_dict", None)
    base, rest = _output_without_tokens(model, inputs)
    loss = _loss(model, inputs, base)
    if rest.get("aux_loss") is not None:
        loss = loss + balance_weight(model) * rest.aux_loss.to(loss.device)
    output = type(rest)(**{**rest, "loss": loss, "logits": None})
    return output if (getattr(model.config, "return_dict", True) if as_dict is None else as_dict) else output.to_tuple()


@between_graphs
def _loss(model: Any, inputs: dict[str, Any], base: Any) -> Tensor:
    sum_tiles = functools.partial(_sum_of_tiles, model, inputs, type(base))
    return through(model.lm_head, sum_tiles, base.last_hidden_state)


def through(head: Any, sum_tiles: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Call `sum_tiles(forward, x, sums)` within a single call of the head, where `forward` is the head's own forward.

    Hooks on the head, such as ZeRO-3's hooks, therefore do not see the tiles. The head's forward is replaced only
    during the call, even if other code has already replaced it.
    """
    head_forward, instance_forward = head.forward, vars(head).get("forward")
    has_children, partitioned = any(head.children()), any(hasattr(p, ZERO_ID) for p in head.parameters())
    if has_children and partitioned and not hasattr(head, LEAF):
        raise ConfigError(
            "a tiled loss, as log_probs has, needs under ZeRO-3 the head that the model had when it was patched with "
            f"loss_tiles; got one of type {type(head).__name__}, set them, and patch the model after its adapters are "
            "there"
        )

    def forward(x: Tensor) -> Tensor:
        sums = GradientSums(trained_parameters(head))
        plain = instance_forward is None and type(head).forward is nn.Linear.forward
        return sum_tiles((lambda tile: sums.linear(tile, head.weight, head.bias)) if plain else head_forward, x, sums)

    head.forward = forward
    try:
        return head(x)
    finally:
        del head.forward
        if instance_forward is not None:
            head.forward = instance_forward


def _output_without_tokens(model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Return (the base model's output, the whole model's output for zero tokens)."""
    outputs: list[Any] = []

    def base(*args: Any, **kwargs: Any) -> Any:
        return without_tokens(base_of(model)(*args, **kwargs), outputs)

    rest = class_forward(model, base, lambda x: x, {**inputs, "labels": None})
    return outputs[0], rest


@between_graphs
def without_tokens(output: Any, outputs: list[Any]) -> Any:
    """Truncate a base model's output to zero tokens.

    Args:
        outputs: A list that receives the original output.
    """
    outputs.append(output)
    return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, :0]})


def _sum_of_tiles(
    model: Any, inputs: dict[str, Any], output_type: type, head: Callable[..., Tensor], x: Tensor, sums: GradientSums
) -> Tensor:
    """Compute the token losses from x (B, s, d), the base model's last hidden state.

    Args:
        output_type: The type of the base model's output.
    """
    context, shape = current(), inputs["shift_labels"].shape
    by_token = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.shape[:2] == shape}
    # the expert balance loss is computed for all tokens in `_output_without_tokens`
    if "output_router_logits" in _argument_names(model):
        inputs = {**inputs, "output_router_logits": False}

    def loss_of(tile: Tensor, cut: slice) -> Tensor:
        tile_inputs = inputs | {name: x[:, cut].contiguous() for name, x in by_token.items()}
        output = class_forward(model, lambda *args, **kwargs: output_type(last_hidden_state=tile), head, tile_inputs)
        if context is not None and context.state.losses is not None:
            context.state.losses.append(token_losses(output.logits, tile_inputs["shift_labels"]))
        return output.loss

    return tiled_sum(loss_of, x, sums, loss_tiles(model, x))


def class_forward(model: Any, base: Callable[..., Any], head: Callable[..., Tensor], inputs: dict[str, Any]) -> Any:
    """Call the forward of the model's class with another base model and head."""
    return type(model).forward(_twin(model, base, head), **inputs, return_dict=True)


@between_graphs
def _twin(model: Any, base: Callable[..., Any], head: Callable[..., Tensor]) -> Any:
    """Return a copy of the model with another base model and head.

    The copy has the same class, so a subclass's overrides apply.
    """
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    own = patch_on(model)
    name, *inside = ((own and own.base) or model.base_model_prefix).split(".")
    called: Any = Instead(base_of(model), base)
    for part in reversed(inside):  # the head may call a part of its base model
        called = types.SimpleNamespace(**{part: called})
    replaced = {name: called, "lm_head": Instead(model.lm_head, head)}
    vars(twin).update(replaced)
    drop_children(twin, replaced)  # compiled forwards read children from where they were at compile time
    return twin


class Instead:
    """A function that takes the place of a module. Forwards can still read the module's other attributes."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def loss_tiles(model: Any, x: Tensor) -> int:
    """Return the number of tiles for the logits of the last hidden state x (B, s, d)."""
    tiles, vocab = patch_of(model).sp.config.loss_tiles, model.config.get_text_config(decoder=True).vocab_size
    if tiles in (1, "auto"):
        return tile_count(x.shape[0] * x.shape[1] * vocab * 4, most_logits(vocab, x.shape[2]))
    return tiles

"""Rules for torch functions that can run on a rank's shard of a whole tensor.

All other functions gather the whole tensor.

A rule receives an operator and its arguments by name. The rule returns the operator's result, or None if the operator
needs the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.compat import tree_leaves, tree_map
from .tensor import RULES, WholeTensor, shard_of, wholes

aten = torch.ops.aten


def _by_element(func: Any, arguments: dict[str, Any]) -> Any:
    """Run an elementwise operator."""
    like = next(x for x in wholes(arguments) if x._gathered is None)
    if not all(_can_be_sharded_like(x, like) for x in tree_leaves(arguments) if isinstance(x, Tensor)):
        return None
    return _on_shards(func, arguments, like)


def _by_token(func: Any, arguments: dict[str, Any]) -> Any:
    """Run an operator along dims other than rows and tokens."""
    like = next(x for x in wholes(arguments) if x._gathered is None)
    dims = like.dim() + (func.overloadpacket.__name__ == "unsqueeze")
    dim = arguments.get("dim")
    along = [d % dims for d in (dim if isinstance(dim, list | tuple) else [dim]) if d is not None]
    same = [x.shape[: like.lead] == like.shape[: like.lead] for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    if not along or min(along) < like.lead or not all(same):
        return None
    negative_dims = [d - dims for d in along]
    return _on_shards(
        func, {**arguments, "dim": negative_dims if isinstance(dim, list | tuple) else negative_dims[0]}, like
    )


def _reshaped(func: Any, arguments: dict[str, Any]) -> Any:
    """Reshape a tensor if rows and tokens stay unchanged, are flattened into one dim, or are unflattened."""
    x, size = arguments["self"], list(arguments.get("size", ()))
    if -1 in size:
        others = -torch.Size(size).numel()
        size[size.index(-1)] = x.numel() // others if others else 0
    rows, tokens = x.shard_spec.rows, x.shard_spec.tokens
    for flat, lead in ((False, [rows, tokens]), (True, [rows * tokens])):
        rest = size[len(lead) :]
        if size[: len(lead)] == lead and torch.Size(rest).numel() == x.shard.shape[2:].numel():
            return WholeTensor(x.shard.reshape(*x.shard.shape[:2], *rest), x.shard_spec, flat, of=x)
    return None


def _new(func: Any, arguments: dict[str, Any]) -> Any:
    """Create a tensor with the rows and tokens of `self`."""
    x, size = arguments["self"], list(arguments["size"])
    if size[: x.lead] != list(x.shape[: x.lead]):
        return None
    return WholeTensor(
        func(**{**arguments, "self": x.shard, "size": [*x.shard.shape[:2], *size[x.lead :]]}), x.shard_spec, x.flat
    )


def _nll_loss(func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the negative log likelihood, by which cross entropy selects each token's loss from log-probabilities.

    The log-probabilities have the shape (rows * tokens, classes). For the sum or the mean, ranks gather only one number
    per token.
    """
    x, reduction = arguments["self"], arguments["reduction"]
    if (
        not isinstance(x, WholeTensor)
        or x._gathered is not None
        or not x.flat
        or x.dim() != 2
        or arguments["weight"] is not None
    ):
        return None
    if x.device.type == "cpu" and _has_wrong_class(arguments["target"], x.shape[1], arguments["ignore_index"]):
        return None  # with the whole tensor, all ranks raise torch's error
    target = shard_of(arguments["target"], x.shard_spec, flat=True).flatten()
    on_shard = {**arguments, "self": x.shard.flatten(0, 1), "target": target}
    if func is aten.nll_loss_backward.default:
        if not reduction:
            on_shard["grad_output"] = shard_of(arguments["grad_output"], x.shard_spec, flat=True).flatten()
        return WholeTensor(func(**on_shard).view(x.shard.shape), x.shard_spec, flat=True)
    losses = func(**{**on_shard, "reduction": 0})[0]
    by_token = WholeTensor(losses.view(x.shard.shape[:2]), x.shard_spec, flat=True)
    counted = (arguments["target"] != arguments["ignore_index"]).sum().to(x.dtype)
    if not reduction:
        return by_token, torch.zeros_like(counted)
    total = by_token.gathered().sum()
    return total / counted if reduction == 1 else total, counted


def _has_wrong_class(target: Tensor, classes: int, ignored: int) -> bool:
    return bool((((target < 0) | (target >= classes)) & (target != ignored)).any())


def _on_shards(func: Any, arguments: dict[str, Any], like: WholeTensor) -> Any:
    """Run an operator on this rank's shards of the arguments. Return WholeTensors that are sharded like `like`."""
    shards = tree_map(lambda x: _shard_like(x, like) if isinstance(x, Tensor) else x, arguments)
    result, base = func(**shards), like if func.is_view else None
    return tree_map(lambda x: WholeTensor(x, like.shard_spec, like.flat, base) if isinstance(x, Tensor) else x, result)


def _can_be_sharded_like(x: Tensor, like: WholeTensor) -> bool:
    """Return whether x has the same rows and tokens as `like`, or broadcasts over rows and tokens."""
    if isinstance(x, WholeTensor):
        return x.dim() == like.dim() and x.is_like(like)
    missing = like.dim() - x.dim()
    lead = x.shape[: max(0, like.lead - missing)]
    return missing >= 0 and all(
        size in (1, whole) for size, whole in zip(reversed(lead), reversed(like.shape[: like.lead]), strict=False)
    )


def _shard_like(x: Tensor, like: WholeTensor) -> Tensor:
    """Return the shard of x for this rank's tokens of `like`."""
    missing, shard_spec = like.dim() - x.dim(), like.shard_spec
    if isinstance(x, WholeTensor) or missing >= like.lead:
        return shard_of(x, shard_spec, like.flat) if isinstance(x, WholeTensor) else x
    x = x[(None,) * missing]
    if x.shape[: like.lead].numel() == 1:
        return x[None] if like.flat else x
    x = x.expand(*like.shape[: like.lead], *x.shape[like.lead :])
    return shard_of(x, shard_spec, like.flat)


BY_ELEMENT = """
    add sub rsub mul div true_divide floor_divide remainder neg abs sign reciprocal pow sqrt rsqrt exp exp2 expm1 log
    log2 log1p sigmoid tanh softplus relu gelu silu clamp clamp_min clamp_max minimum maximum where masked_fill lerp
    eq ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or
    _to_copy clone detach alias zeros_like ones_like empty_like full_like nan_to_num logaddexp xlogy
    sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward softplus_backward log_sigmoid_backward
"""
BY_TOKEN = """
    _log_softmax _softmax _log_softmax_backward_data _softmax_backward_data logsumexp sum mean amax amin max min argmax
    argmin topk sort cumsum gather scatter_add slice select squeeze unsqueeze any all
"""
RULES |= {
    **dict.fromkeys(BY_ELEMENT.split(), _by_element),
    **dict.fromkeys(BY_TOKEN.split(), _by_token),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshaped),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _nll_loss),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _new),
}

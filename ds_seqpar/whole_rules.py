"""What is done on a rank's part of a whole tensor: which functions, and how. Any other function needs the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .whole_tensors import RULES, WholeTensor, part_of, wholes

aten = torch.ops.aten


def _by_element(func: Any, named: dict[str, Any]) -> Any:
    """What each element of the result needs is in the same place of all arguments."""
    like = next(x for x in wholes(named) if x._gathered is None)
    if not all(_lies_over(x, like) for x in tree_leaves(named) if isinstance(x, Tensor)):
        return None
    return _on_parts(func, named, like)


def _by_token(func: Any, named: dict[str, Any]) -> Any:
    """It works along dims that are neither rows nor tokens."""
    like = next(x for x in wholes(named) if x._gathered is None)
    dims = like.dim() + (func.overloadpacket.__name__ == "unsqueeze")
    given = named.get("dim")
    along = [d % dims for d in (given if isinstance(given, list | tuple) else [given]) if d is not None]
    same = [x.shape[: like.lead] == like.shape[: like.lead] for x in tree_leaves(named) if isinstance(x, Tensor)]
    if not along or min(along) < like.lead or not all(same):
        return None
    from_end = [d - dims for d in along]
    return _on_parts(func, {**named, "dim": from_end if isinstance(given, list | tuple) else from_end[0]}, like)


def _reshaped(func: Any, named: dict[str, Any]) -> Any:
    """Rows and tokens stay, or become one dim, or two again."""
    x, size = named["self"], list(named.get("size", ()))
    if -1 in size:
        known = -torch.Size(size).numel()
        size[size.index(-1)] = x.numel() // known if known else 0
    rows, tokens = x.spread.rows, x.spread.tokens
    for flat, lead in ((False, [rows, tokens]), (True, [rows * tokens])):
        rest = size[len(lead) :]
        if size[: len(lead)] == lead and torch.Size(rest).numel() == x.part.shape[2:].numel():
            return WholeTensor(x.part.reshape(*x.part.shape[:2], *rest), x.spread, flat, of=x)
    return None


def _filled(func: Any, named: dict[str, Any]) -> Any:
    """A new tensor of the same tokens."""
    x, size = named["self"], list(named["size"])
    if size[: x.lead] != list(x.shape[: x.lead]):
        return None
    return WholeTensor(
        func(**{**named, "self": x.part, "size": [*x.part.shape[:2], *size[x.lead :]]}), x.spread, x.flat
    )


def _picked(func: Any, named: dict[str, Any]) -> Any:
    """The losses of tokens that cross entropy picks of their log-probabilities (rows * tokens, classes), and what is
    made of them: a number a token is gathered, and no class."""
    x, reduction = named["self"], named["reduction"]
    if (
        not isinstance(x, WholeTensor)
        or x._gathered is not None
        or not x.flat
        or x.dim() != 2
        or named["weight"] is not None
    ):
        return None
    if x.device.type == "cpu" and _is_wrong(named["target"], x.shape[1], named["ignore_index"]):
        return None  # and all ranks raise what torch raises
    target = part_of(named["target"], x.spread, flat=True).flatten()
    of_part = {**named, "self": x.part.flatten(0, 1), "target": target}
    if func is aten.nll_loss_backward.default:
        if not reduction:
            of_part["grad_output"] = part_of(named["grad_output"], x.spread, flat=True).flatten()
        return WholeTensor(func(**of_part).view(x.part.shape), x.spread, flat=True)
    losses = func(**{**of_part, "reduction": 0})[0]
    found = WholeTensor(losses.view(x.part.shape[:2]), x.spread, flat=True)
    counted = (named["target"] != named["ignore_index"]).sum().to(x.dtype)
    if not reduction:
        return found, torch.zeros_like(counted)
    total = found.gathered().sum()
    return total / counted if reduction == 1 else total, counted


def _is_wrong(target: Tensor, classes: int, ignored: int) -> bool:
    return bool((((target < 0) | (target >= classes)) & (target != ignored)).any())


def _on_parts(func: Any, named: dict[str, Any], like: WholeTensor) -> Any:
    parts = tree_map(lambda x: _laid_over(x, like) if isinstance(x, Tensor) else x, named)
    found, of = func(**parts), like if func.is_view else None
    return tree_map(lambda x: WholeTensor(x, like.spread, like.flat, of) if isinstance(x, Tensor) else x, found)


def _lies_over(x: Tensor, like: WholeTensor) -> bool:
    """Whether every rank can tell which of x belongs to its tokens."""
    if isinstance(x, WholeTensor):
        return x.dim() == like.dim() and x.is_like(like)
    missing = like.dim() - x.dim()
    lead = x.shape[: max(0, like.lead - missing)]
    return missing >= 0 and all(
        size in (1, whole) for size, whole in zip(reversed(lead), reversed(like.shape[: like.lead]), strict=False)
    )


def _laid_over(x: Tensor, like: WholeTensor) -> Tensor:
    """What of x belongs to this rank's tokens."""
    missing, spread = like.dim() - x.dim(), like.spread
    if isinstance(x, WholeTensor) or missing >= like.lead:
        return part_of(x, spread, like.flat) if isinstance(x, WholeTensor) else x
    x = x[(None,) * missing]
    if x.shape[: like.lead].numel() == 1:
        return x[None] if like.flat else x
    x = x.expand(*like.shape[: like.lead], *x.shape[like.lead :])
    return part_of(x, spread, like.flat)


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
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _picked),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _filled),
}

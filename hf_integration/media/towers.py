"""Divide the images in towers among the ranks that share a sequence.

Without the division, each rank would encode all images of a whole call. With the division, each rank encodes a
contiguous share of the images or video frames, and sends the features to the other ranks. The gradients of features are
summed on the rank that computed the features. A tower's parameters thus get the gradient that the tokens of all ranks
send to the rank's own images, times the number of ranks. The mean over ranks therefore equals the gradient without
sequence parallelism.

A rank without images still computes the smallest image, since every parameter needs a gradient and ranks must gather
partitioned parameters together. The features of this extra image are not sent.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.base.compat import tree_leaves, tree_map
from ds_seqpar.base.errors import SECTION, ConfigError, SeqParError, as_seqpar_error
from ds_seqpar.core.runtime.buffers import sum_dtype
from ds_seqpar.guards.agreement import all_gather_objects, assert_ranks_agree

from ..context import LOCAL, current, entered
from ..look.media import media_batch
from ..look.small import call, small_copy
from ..noise import own_stream
from . import joining
from .cuts import GRID, SAME, Cut, Images, cut_of, joined

IMAGES, VIDEOS = "get_image_features", "get_video_features"
METHODS = (IMAGES, VIDEOS, "get_audio_features")
FEATURES = "features of images"
KIND = "features"  # the name under which `sp.comm.received` counts features
Cuts = dict[str, Cut]


class Replaced(NamedTuple):
    """A method that is replaced until `remove` is called."""

    owner: nn.Module
    name: str

    def remove(self) -> None:
        vars(self.owner).pop(self.name, None)


def owner_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the innermost module that has a method with the given name and named inputs, or None if there is none."""
    found = [module for module in model.modules() if hasattr(module, name)]
    return next((x for x in reversed(found) if "args" not in _names(x, name)), None)


def _names(owner: nn.Module, name: str) -> list[str]:
    return [*inspect.signature(getattr(owner, name)).parameters]


def cuts_for(model: PreTrainedModel, sp: SequenceParallel) -> Cuts:
    """Return the division of each feature method of a model, by method name.

    The call is collective across the ranks of `sp`.

    Args:
        model: An unwrapped transformers model. The model's tensors are not read.
        sp: The SequenceParallel whose ranks share sequences.

    Raises:
        ConfigError: `divide_media` is true, but the images of the model cannot be divided.
    """
    setting, cuts = sp.config.divide_media, Cuts()
    if sp.size == 1 or setting is False or not any(owner_of(model, name) for name in METHODS):
        return cuts
    error: SeqParError | None = None
    try:
        small = small_copy(model)[0].train()
        batch, reason = media_batch(small)
        cuts = cuts if batch is None else cuts_of(small, batch)
        if setting is True and not cuts:
            reason = reason or "features of an image are others where it is alone"
            got = f"got {type(model).__name__}: {reason}"
            error = ConfigError(f'{SECTION}.divide_media true needs images that can be divided; {got}, say "auto"')
    except Exception as failed:  # reported to the other ranks
        error = as_seqpar_error("looking at a model with images failed", failed)
    assert_ranks_agree(sp.groups.control, "how images are divided", cuts, error=error, call="patch_attention")
    return cuts


def divide(model: PreTrainedModel, sp: SequenceParallel, cuts: Mapping[str, Cut]) -> list[Any]:
    """Divide the images of a model's whole calls among the ranks that share a sequence.

    All ranks call the towers together if necessary, for example if the towers are partitioned.

    Args:
        model: An unwrapped transformers model, or its small copy.
        sp: The SequenceParallel whose ranks share sequences.
        cuts: The result of `cuts_for`.

    Returns:
        Handles whose `remove` method undoes the division.
    """
    found = {name: owner for name in METHODS if sp.size > 1 and (owner := owner_of(model, name)) is not None}
    of_owners = {owner: tuple(name for name, x in found.items() if x is owner) for owner in found.values()}
    embedding = model.get_input_embeddings()
    return [
        *(x for owner, names in of_owners.items() for x in joining.join(owner, embedding, sp, cuts, names)),
        *(_replace(found[name], name, functools.partial(_features, sp, cut)) for name, cut in cuts.items()),
    ]


def _replace(owner: nn.Module, name: str, instead: Callable[..., Any]) -> Replaced:
    """Replace a module's method with `instead(arguments by name, the method)`.

    Copies of the module keep the replacement.
    """
    plain, names = getattr(type(owner), name), _names(owner, name)

    @functools.wraps(plain)
    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return instead(dict(zip(names, args, strict=False)) | kwargs, types.MethodType(plain, self))

    setattr(owner, name, types.MethodType(replaced, owner))
    return Replaced(owner, name)


def _features(sp: SequenceParallel, cut: Cut, arguments: dict[str, Any], method: Callable[..., Any]) -> Any:
    context = current()
    if context is None or context.mode != "whole":
        return method(**arguments)
    images, result, error = Images(arguments, cut), None, None
    shares = images.shares(sp.size)
    begin, end = shares[sp.rank]
    is_idle = begin == end
    stream = own_stream(sp)
    try:
        with entered(LOCAL):
            result = method(**(images.smallest() if is_idle else images.part(begin, end)))
    except Exception as reason:  # reported to the other ranks, which are waiting for features
        error = as_seqpar_error("making features of images failed", reason)
    finally:
        context.state.shared = stream.end()
    sp.checker.check_now("images", {"costs": images.costs}, error=error)
    assert result is not None
    own = {name: result[name] for name, way in cut.ways.items() if way != SAME}
    parts = [x for x in _gathered(sp, own, not is_idle) if x is not None]
    owners = [images.of_elements(*share) for share in shares if share[0] < share[1]]
    fields = {name: joined(cut.ways[name], [x[name] for x in parts], owners, images.number) for name in own}
    return type(result)(**{name: fields.get(name, result[name]) for name in cut.ways})


def _gathered(sp: SequenceParallel, own: dict[str, Any], has_share: bool) -> list[Any]:
    """Return the fields of each rank's features, or None for ranks without a share.

    The call is collective across the ranks of `sp`.
    """
    told = tree_map(lambda x: x.detach().to("meta"), own) if has_share else None
    by_rank = [told for _, told in all_gather_objects(sp.groups.control, (FEATURES, told))]
    leaves = [[] if told is None else tree_leaves(told) for told in by_rank]
    mine = torch.cat([x.flatten() for x in tree_leaves(own)])  # in the widest dtype of all fields
    whole = _Gathered.apply(mine, [sum(x.numel() for x in each) for each in leaves], sp)
    pieces = iter(whole.split([x.numel() for each in leaves for x in each]))
    parts: list[Any] = [None] * sp.size
    for rank, told in zip(sp.groups.sp_order, by_rank, strict=True):
        if told is not None:
            parts[rank] = tree_map(lambda x: next(pieces).view(x.shape).to(x.dtype), told)
    return parts


class _Gathered(Function):
    """Gather the elements of all ranks. Each rank sends either all or none of its elements."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int], sp: SequenceParallel) -> Tensor:
        ctx.sizes, ctx.sp, ctx.number = sizes, sp, len(own)
        sp.calls.follow(FEATURES)
        size = sizes[dist.get_rank(sp.groups.sp)]
        return _exchanged(sp, own.detach()[:size].repeat(len(sizes)), [size] * len(sizes), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sp, sizes = ctx.sp, ctx.sizes
        sp.calls.enter()
        size = sizes[dist.get_rank(sp.groups.sp)]
        parts = _exchanged(sp, grad.contiguous(), sizes, [size] * len(sizes)).view(len(sizes), size)
        total = parts.sum(0, dtype=sum_dtype(grad.dtype)).to(grad.dtype)
        return total if size else grad.new_zeros(ctx.number), None, None


def _exchanged(sp: SequenceParallel, own: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    """Exchange the given numbers of elements with every rank, and return the received elements."""
    received = own.new_empty(sum(receives))
    sp.comm.exchange_with_all(f"the exchange of {FEATURES}", KIND, own, received, (tuple(sends), tuple(receives)))
    return received


# ---- the check on a small copy


def cuts_of(small: PreTrainedModel, batch: Mapping[str, Any]) -> Cuts:
    """Return the possible division of each feature method of a small copy, by method name.

    Args:
        small: The copy.
        batch: Inputs from `media_batch` with three images or audio inputs.
    """
    given: dict[str, dict[str, Any]] = {}

    def note(name: str, arguments: dict[str, Any], method: Callable[..., Any]) -> Any:
        given[name] = arguments
        return method(**arguments)

    owners: Any = {name: owner for name in METHODS if (owner := owner_of(small, name)) is not None}
    handles = [_replace(owner, name, functools.partial(note, name)) for name, owner in owners.items()]
    with torch.no_grad():
        call(small, **batch)
    for handle in handles:
        handle.remove()
    cuts = {name: cut_of(getattr(owners[name], name), arguments) for name, arguments in given.items()}
    if (cut := cuts.get(IMAGES)) is not None and cut.by == GRID and VIDEOS in owners:
        names = dict(zip(_names(owners[IMAGES], IMAGES), _names(owners[VIDEOS], VIDEOS), strict=False))
        videos = {names.get(name, name): x for name, x in _videos(cut, given[IMAGES]).items()}
        cuts[VIDEOS] = cut_of(getattr(owners[VIDEOS], VIDEOS), videos)
    return {name: cut for name, cut in cuts.items() if cut is not None}


def _videos(cut: Cut, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments for images into arguments for two videos, which have two frames and one frame."""
    images = Images(arguments, cut)
    one, videos = images.part(0, 1), images.part(0, 2)
    frame, grid = one[images.values], videos[cut.grid].clone()
    grid[:1, :-2] = 2  # a grid without a frame dimension stays unchanged and does not support videos
    return videos | {images.values: torch.cat([frame.flip(-2), videos[images.values]], cut.dim), cut.grid: grid}

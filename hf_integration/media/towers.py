"""Towers whose pictures are divided among the ranks that share a sequence: each rank makes features of its own alone.

It happens in whole calls, in which each rank would make those of all. A rank computes neighboring pictures, or frames
of films, and sends their features to the others; the gradients of features are summed back to the rank that made them.
The parameters of a tower so get the gradient of its own pictures from the tokens of all ranks, times the number of
ranks, and the mean over ranks is the plain gradient. A rank without pictures computes the smallest one, so that no
parameter is without a gradient and ranks gather those that are partitioned together; nothing of it is sent.
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
from ds_seqpar.guards.waits import explaining_failure

from ..context import LOCAL, current, entered
from ..look.media import PICTURES, media_batch
from ..look.small import call, small_copy
from ..noise import own_stream
from . import joining
from .cuts import GRID, Cut, Pictures, cut_of, joined, sent

FILMS = "get_video_features"
METHODS = ("get_image_features", FILMS, "get_audio_features")
FEATURES = "features of pictures"
Cuts = dict[str, Cut]


class Undivided(NamedTuple):
    """What is called in place of a method, until `remove`."""

    owner: nn.Module
    name: str

    def remove(self) -> None:
        vars(self.owner).pop(self.name, None)


def owner_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the innermost module with a method that makes features, and says of which inputs; None without one."""
    found = [module for module in model.modules() if hasattr(module, name)]
    return next((x for x in reversed(found) if "args" not in _names(getattr(x, name))), None)


def _names(method: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(method).parameters]


def cuts_for(model: PreTrainedModel, sp: SequenceParallel) -> Cuts:
    """Return how a model's methods that make features are divided, by their names. Collective over `sp`.

    Args:
        model: A transformers model, unwrapped. Its tensors are not read.
        sp: Whose ranks share sequences.

    Raises:
        ConfigError: `divide_media` is true, and the pictures of this model cannot be divided.
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
            reason = reason or "features of a picture are others where it is alone"
            got = f"got {type(model).__name__}: {reason}"
            error = ConfigError(f'{SECTION}.divide_media true needs pictures that can be divided; {got}, say "auto"')
    except Exception as failed:  # reported to the other ranks
        error = as_seqpar_error("looking at a model with pictures failed", failed)
    assert_ranks_agree(sp.groups.control, "how pictures are divided", cuts, error=error, call="patch_attention")
    return cuts


def divide(model: PreTrainedModel, sp: SequenceParallel, cuts: Mapping[str, Cut]) -> list[Any]:
    """Divide the pictures of a model's whole calls among the ranks of a sequence, and let all ranks call its towers
    together where these are partitioned.

    Args:
        model: A transformers model, unwrapped, or its small copy.
        sp: Whose ranks share sequences.
        cuts: From `cuts_for`.

    Returns:
        What undoes it, by `remove`.
    """
    found = {name: owner for name in METHODS if sp.size > 1 and (owner := owner_of(model, name)) is not None}
    of_owners = {owner: tuple(name for name, x in found.items() if x is owner) for owner in found.values()}
    embedding = model.get_input_embeddings()
    return [
        *(x for owner, names in of_owners.items() for x in joining.join(owner, embedding, sp, cuts, names)),
        *(_replace(found[name], name, functools.partial(_features, sp, cut)) for name, cut in cuts.items()),
    ]


def _replace(owner: nn.Module, name: str, instead: Callable[..., Any]) -> Undivided:
    """Call `instead(arguments by name, the method)` in place of a module's method. A copy of the module does so too."""
    plain, names = getattr(type(owner), name), _names(getattr(owner, name))

    @functools.wraps(plain)
    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return instead(dict(zip(names, args, strict=False)) | kwargs, types.MethodType(plain, self))

    setattr(owner, name, types.MethodType(replaced, owner))
    return Undivided(owner, name)


def _features(sp: SequenceParallel, cut: Cut, arguments: dict[str, Any], method: Callable[..., Any]) -> Any:
    context = current()
    if context is None or context.mode != "whole":
        return method(**arguments)
    pictures = Pictures(arguments, cut)
    shares, result, error = pictures.shares(sp.size), None, None
    begin, end = shares[sp.rank]
    if is_idle := begin == end:
        begin = pictures.costs.index(min(pictures.costs))
    stream = own_stream(sp)
    try:
        with entered(LOCAL):
            result = method(**pictures.part(begin, begin + 1 if is_idle else end))
    except Exception as reason:  # reported to the other ranks, which would wait for features
        error = as_seqpar_error("making features of pictures failed", reason)
    finally:
        context.state.shared = stream.end()
    sp.checker.check_now("pictures", {"costs": pictures.costs}, error=error)
    parts = _gathered(sp, sent(cut.joined, result), not is_idle)
    owners = [pictures.of_elements(*share) for share in shares if share[0] < share[1]]
    return joined(cut.joined, [x for x in parts if x is not None], owners, pictures.number, result)


def _gathered(sp: SequenceParallel, own: Any, has_share: bool) -> list[Any]:
    """Return what each rank sends, by its number; None of a rank without a share. Collective over the sequence."""
    told = tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, own) if has_share else None
    by_rank = [told for _, told in all_gather_objects(sp.groups.control, (FEATURES, told))]
    shapes = [[x for x in tree_leaves(told) if isinstance(x, Tensor)] for told in by_rank]
    mine = [x for x in tree_leaves(own) if isinstance(x, Tensor)]
    values: dict[tuple[int, int], Tensor] = {}
    for dtype in sorted({x.dtype for x in mine}, key=str):
        places = [(rank, at) for rank, each in enumerate(shapes) for at, x in enumerate(each) if x.dtype == dtype]
        sizes = [sum(x.numel() for x in each if x.dtype == dtype) for each in shapes]
        whole = _Gathered.apply(torch.cat([x.flatten() for x in mine if x.dtype == dtype]), sizes, sp)
        pieces = whole.split([shapes[rank][at].numel() for rank, at in places])
        values |= {(r, at): x.view(shapes[r][at].shape) for (r, at), x in zip(places, pieces, strict=True)}
    parts: list[Any] = [None] * sp.size
    for rank, told in enumerate(by_rank):
        found = iter([values[rank, at] for at in range(len(shapes[rank]))])
        parts[sp.groups.sp_order[rank]] = tree_map(lambda x: next(found) if isinstance(x, Tensor) else x, told)  # noqa: B023
    return parts


class _Gathered(Function):
    """(elements of this rank, how many each rank sends: all of its own or none) -> those of all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int], sp: SequenceParallel) -> Tensor:
        ctx.sizes, ctx.sp, ctx.number = sizes, sp, len(own)
        sp.calls.follow(FEATURES)
        size = sizes[dist.get_rank(sp.sharding.group_for(own))]
        return _exchanged(sp, own.detach()[:size].repeat(len(sizes)), [size] * len(sizes), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sp, sizes = ctx.sp, ctx.sizes
        sp.calls.enter()
        size = sizes[dist.get_rank(sp.sharding.group_for(grad))]
        parts = _exchanged(sp, grad.contiguous(), sizes, [size] * len(sizes)).view(len(sizes), size)
        total = parts.sum(0, dtype=sum_dtype(grad.dtype)).to(grad.dtype)
        return total if size else grad.new_zeros(ctx.number), None, None


def _exchanged(sp: SequenceParallel, own: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    """Return so many elements of each rank, to each of which this one sends so many of its own."""
    received, group, width = own.new_empty(sum(receives)), sp.sharding.group_for(own), own.element_size()
    incoming, outgoing = ([size * width for size in sizes] for sizes in (receives, sends))
    with explaining_failure(f"the exchange of {FEATURES}", group):
        dist.all_to_all_single(received.view(torch.uint8), own.view(torch.uint8), incoming, outgoing, group=group)
    return received


# ---- the look


def cuts_of(small: PreTrainedModel, batch: Mapping[str, Any]) -> Cuts:
    """Return how the methods of a small copy that make features can be divided, by their names.

    Args:
        small: The copy.
        batch: Inputs with three pictures or sounds, as `media_batch` makes them.
    """
    given: dict[str, dict[str, Any]] = {}

    def note(name: str, arguments: dict[str, Any], method: Callable[..., Any]) -> Any:
        given[name] = arguments
        return method(**arguments)

    loss, cuts = _loss(small, batch, note), Cuts()
    for name, arguments in [*given.items()]:
        method = getattr(owner_of(small, name), name)
        for narrow in (True, False):
            cut = cut_of(method, arguments, narrow)
            if cut is None or not torch.isclose(_loss(small, batch, functools.partial(_in_two, cut)), loss, rtol=1e-5):
                continue
            cuts[name] = cut
            if name == PICTURES.method and (owner := owner_of(small, FILMS)) is not None:
                of_films = getattr(owner, FILMS)
                films = cut_of(of_films, _films(cut, arguments, _names(method), _names(of_films)))
                cuts |= {FILMS: films} if films else {}
            break
    return cuts


def _loss(small: PreTrainedModel, batch: Mapping[str, Any], instead: Callable[..., Any]) -> Tensor:
    """Return the loss of a copy; `instead(name, arguments, method)` is called in place of methods."""
    owners = {name: owner for name in METHODS if (owner := owner_of(small, name)) is not None}
    handles = [_replace(owner, name, functools.partial(instead, name)) for name, owner in owners.items()]
    with torch.no_grad():
        try:
            return call(small, **batch).loss
        finally:
            for handle in handles:
                handle.remove()


def _in_two(cut: Cut, name: str, arguments: dict[str, Any], method: Callable[..., Any]) -> Any:
    pictures = Pictures(arguments, cut)
    shares = [(0, 1), (1, len(pictures.costs))]
    results = [method(**pictures.part(*share)) for share in shares]
    parts, owners = [sent(cut.joined, x) for x in results], [pictures.of_elements(*share) for share in shares]
    return joined(cut.joined, parts, owners, pictures.number, results[0])


def _films(cut: Cut, arguments: Mapping[str, Any], names: list[str], of_films: list[str]) -> dict[str, Any]:
    """Return the arguments of a method for two films, made of those for three pictures."""
    pictures = Pictures(arguments, cut)
    values, others = arguments[pictures.values], {name: x for name, x in arguments.items() if name in of_films}
    if cut.by != GRID:
        films = values[:2, :2] if values.dim() == 5 else values[[0, 1, 2, 0]].unflatten(0, (2, 2))
        return others | {of_films[0]: films}
    one, two = pictures.part(0, 1), pictures.part(0, 2)
    first, both = one[pictures.values], two[pictures.values]
    two |= {pictures.values: torch.cat([first.flip(-2), both], cut.dim), cut.grid: two[cut.grid].clone()}
    two[cut.grid][:1, :-2] = 2  # a grid without frames is left as it is, and fits no films
    return {dict(zip(names, of_films, strict=False)).get(name, name): x for name, x in two.items()}

"""Divide a call's images into shares, and join the features of all shares.

No table of models is needed. A check on a small copy computes each image alone and all images together, and picks the
first way of joining for which both results are equal. If no way of joining works, for example because images attend to
one another, the model has no `Cut`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_seqpar.base.compat import tree_leaves
from ds_seqpar.base.errors import InputError

# the tolerance in fp32, relative to the largest feature; images that attend to one another may differ only slightly
# more
ROUNDING = 2e-6
GRID, TILE, IMAGE = "grid", "tile", "image"
# ways to join a result field: concatenated tensors, lists with elements per image, lists whose elements are each joined
# in one of these ways, and values that are the same in all shares
CAT, LIST, EACH, SAME = "cat", "list", "each ", "same"
WAYS = (CAT, LIST, EACH + CAT, EACH + LIST, SAME)
# raised if a method does not support a share, or if results cannot be joined as tested
UNFIT = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)
# internal fields that a tower returns besides the features that replace tokens
INSIDE = re.compile(r".*(hidden_states?|attentions)")


class Cut(NamedTuple):
    """The way in which a feature method is divided among ranks. All fields can be written as JSON."""

    by: str  # GRID: patches of all images in one dim; TILE: images in dims 0 and 1; IMAGE: images in dim 0
    grid: str = ""  # the argument that contains each image's numbers of frames, patch rows and patch columns
    dim: int = 0  # the dim of the patches
    frames: bool = False  # whether a video's frames can be divided among ranks
    drops: bool = False  # whether all-zero images, which pad rows, have no features
    ways: Mapping[str, str] = {}  # how each result field is joined


class Images:
    """The images, tiles or video frames of one call, as elements that are assigned to ranks one by one.

    Attributes:
        costs: The cost of each element, in patches or tiles.
        owners: The index of each element's image or row of images.
        number: The number of images or rows.
    """

    def __init__(self, arguments: Mapping[str, Any], cut: Cut) -> None:
        if cut.by == GRID and not isinstance(arguments.get(cut.grid), Tensor):
            raise InputError(
                f"images need {cut.grid}, which says where each ends; got none, pass what a processor gives"
            )
        self.cut, self.arguments = cut, dict(arguments)
        self.values, values = next((name, x) for name, x in arguments.items() if isinstance(x, Tensor | list))
        self.rows = arguments[cut.grid].tolist() if cut.by == GRID else values
        self.number = len(self.rows)
        self.owners, self.costs = [*range(self.number)], [1] * self.number
        if cut.by == GRID:
            self.owners = [at for at in self.owners for _ in range(self.rows[at][0] if cut.frames else 1)]
            patches = arguments[cut.grid][:, int(cut.frames) :].prod(-1).tolist()
            self.costs = [patches[at] for at in self.owners]
        elif isinstance(values, Tensor) and values.dim() == 5:
            real = values.flatten(2).any(-1)
            self.costs = real.sum(1).clamp(min=1).tolist()
            if cut.by == TILE:
                kept = real if cut.drops and real.any() else torch.ones_like(real)
                self.owners = kept.nonzero()[:, 0].tolist()
                self.costs = [1] * len(self.owners)
                leads = [name for name, x in arguments.items() if isinstance(x, Tensor) and x.shape[:2] == kept.shape]
                self.arguments |= {name: arguments[name][kept][:, None] for name in leads}

    def of_elements(self, begin: int, end: int) -> list[int]:
        """Return the owner of each element in the list of features computed from `part(begin, end)`."""
        return [*dict.fromkeys(self.owners[begin:end])] if self.cut.by == GRID else self.owners[begin:end]

    def smallest(self) -> dict[str, Any]:
        """Return the arguments for the cheapest element."""
        at = self.costs.index(min(self.costs))
        return self.part(at, at + 1)

    def part(self, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments for the elements from `begin` up to `end`."""
        if self.cut.by != GRID:
            number = len(self.costs)
            return {name: x[begin:end] if _holds(x, number) else x for name, x in self.arguments.items()}
        total, first, last = sum(self.costs), self.owners[begin], self.owners[end - 1]
        before, behind = sum(self.costs[:begin]), sum(self.costs[:end])
        rows = [[*row] for row in self.rows[first : last + 1]]
        if self.cut.frames:
            for at, row in enumerate(rows, first):
                row[0] = self.owners[begin:end].count(at)
        part = dict(self.arguments)
        for name, x in self.arguments.items():
            if name == self.cut.grid:
                part[name] = x.new_tensor(rows)
            elif name != self.values and _holds(x, self.number):
                part[name] = x[first : last + 1]
            elif name == self.values or (isinstance(x, Tensor) and x.dim() and x.shape[0] == total):
                size = x.shape[self.cut.dim]
                if before * size % total or behind * size % total:
                    raise ValueError(f"{size} of {name} are not shared by images of {self.costs} patches")
                part[name] = x.narrow(self.cut.dim, before * size // total, (behind - before) * size // total)
        return part

    def shares(self, ranks: int) -> list[tuple[int, int]]:
        """Return the begin and end of each rank's contiguous share, with costs balanced as evenly as possible."""
        total, sums = sum(self.costs), itertools.accumulate(self.costs)
        middles = [behind - cost / 2 for behind, cost in zip(sums, self.costs, strict=True)]
        ends = [sum(middle * ranks < total * (rank + 1) for middle in middles) for rank in range(ranks)]
        return [*itertools.pairwise((0, *ends))]


def _holds(x: Any, number: int) -> bool:
    """Return whether an argument has one element per image."""
    if isinstance(x, Tensor):
        return x.dim() > 0 and len(x) == number
    return isinstance(x, list) and len(x) == number and all(isinstance(y, Tensor | list | tuple) for y in x)


def joined(way: str, parts: Sequence[Any], owners: Sequence[list[int]], number: int) -> Any:
    """Join one field of the result over all images.

    Args:
        way: One of `WAYS`.
        parts: The field of each share's result.
        owners: The owners of each share's list elements.
        number: The number of elements of a list.
    """
    if way in (CAT, SAME):
        return torch.cat([*parts]) if way == CAT else parts[0]
    if way != LIST:
        inside = way.removeprefix(EACH)
        return type(parts[0])(joined(inside, x, owners, number) for x in zip(*parts, strict=True))
    elements: list[list[Tensor]] = [[] for _ in range(number)]
    for x, owner in zip(itertools.chain(*parts), itertools.chain(*owners), strict=True):
        elements[owner].append(x)
    return type(parts[0])(torch.cat(each or [parts[0][0][:0]]) for each in elements)


def features_in(result: Mapping[str, Any]) -> list[str]:
    """Return the fields of a result that a model uses. A tower's internal fields are omitted if other fields exist."""
    return [name for name in result if not INSIDE.fullmatch(name)] or [*result]


# ---- the check on a small copy


def cut_of(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Cut | None:
    """Return how to divide a method that computes features, or None if no division works.

    Args:
        method: A method of a small copy.
        arguments: The method's arguments by name, for two or more images.
    """
    for cut in _tries(arguments):
        try:
            with torch.no_grad():
                ways = _ways(method, arguments, cut)
        except UNFIT:
            continue
        if ways:
            return cut._replace(ways=ways)
    return None


def _tries(arguments: Mapping[str, Any]) -> Iterator[Cut]:
    (_, values), *others = [(name, x) for name, x in arguments.items() if isinstance(x, Tensor)]
    for grid, x in others:
        if not x.is_floating_point() and x.dim() == 2 and x.shape[1] in (2, 3):
            videos = (True, False) if x.shape[1] == 3 and (x[:, 0] > 1).any() else (False,)
            yield from (Cut(GRID, grid, dim, frames) for dim in (0, 1, -1) for frames in videos)
    if values.dim() == 5:
        yield from (Cut(TILE, drops=True), Cut(TILE))
    yield Cut(IMAGE)


def _ways(method: Callable[..., Any], arguments: Mapping[str, Any], cut: Cut) -> dict[str, str]:
    """Return the way to join each result field, or {} if single images and larger shares need different ways."""
    whole, images, found = method(**arguments), Images(arguments, cut), list[dict[str, str]]()
    names, count = features_in(whole), len(images.costs)
    for ends in (range(count + 1), (0, 1, count)):
        shares = [*itertools.pairwise(ends)]
        parts = [method(**images.part(*share)) for share in shares]
        owners = [images.of_elements(*share) for share in shares]
        fields = {name: [x[name] for x in parts] for name in names}
        rebuilt = {
            name: [way for way in WAYS if _rebuilds(whole[name], way, each, owners, images.number)]
            for name, each in fields.items()
        }
        found.append({name: ways[0] for name, ways in rebuilt.items() if ways})
    is_divided = count > 1 and len(found[0]) == len(names) and {*found[0].values()} != {SAME}
    return found[0] if is_divided and found[0] == found[1] else {}


def _rebuilds(whole: Any, way: str, parts: Sequence[Any], owners: Sequence[list[int]], number: int) -> bool:
    largest = max([float(x.abs().max()) for x in tree_leaves(whole) if isinstance(x, Tensor)], default=0.0)
    try:
        for x in parts if way == SAME else [joined(way, parts, owners, number)]:
            torch.testing.assert_close(x, whole, rtol=0.0, atol=ROUNDING * largest)
    except UNFIT:  # results with different shapes, lengths or values
        return False
    return True

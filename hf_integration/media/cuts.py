"""How the pictures of a call are cut into shares, and how features of shares become those of all pictures.

No table says it: a look at a small copy computes each picture alone and all together, and takes the first way in which
both are equal. A model in which none is, as where pictures see one another, has no cut.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-5
GRID, TILE, PICTURE = "grid", "tile", "picture"
SAME, LIST, EACH = "same", "list", "each"
# results that a tower returns beside the features that take the places of tokens
INSIDE = re.compile(r".*(hidden_states?|attentions)")


class Cut(NamedTuple):
    """How a method that makes features is divided. All fields can be written as JSON."""

    by: str  # GRID: patches of all pictures lie in one dim; TILE: pictures in dims 0 and 1; PICTURE: in dim 0
    grid: str = ""  # the argument with the rows, columns and frames of each picture's patches
    dim: int = 0  # of the patches
    frames: bool = False  # whether the frames of a film can be on several ranks
    drops: bool = False  # whether pictures of zeros, which pad rows, have no features
    # how results of shares are joined: the dim in which tensors are; LIST: elements are of pictures; (EACH, how those
    # are joined); {name: how}; SAME: all shares have the same
    joined: Any = SAME


class Pictures:
    """The pictures of one call, or the frames of its films, which go to ranks one by one.

    Attributes:
        costs: What each costs, in patches or tiles.
        owners: The number of the picture, or of the row of them, that each is a part of.
        number: How many pictures, or rows, there are.
    """

    def __init__(self, arguments: Mapping[str, Any], cut: Cut) -> None:
        self.cut, self.arguments = cut, dict(arguments)
        self.values = next(name for name, x in arguments.items() if isinstance(x, Tensor | list))
        values = arguments[self.values]
        if cut.by == GRID:
            self.rows: list[list[int]] = arguments[cut.grid].tolist()
            self.number = len(self.rows)
            splits = [row[0] if cut.frames else 1 for row in self.rows]
            patches = torch.tensor(self.rows).prod(-1).tolist()
            self.owners = [picture for picture, count in enumerate(splits) for _ in range(count)]
            self.costs = [patches[picture] // splits[picture] for picture in self.owners]
            return
        self.number = len(values)
        self.owners, self.costs = [*range(self.number)], [1] * self.number
        if isinstance(values, Tensor) and values.dim() == 5:
            real = values.flatten(2).any(-1)
            self.costs = real.sum(1).clamp(min=1).tolist()
        if cut.by == TILE:
            kept = real if cut.drops and real.any() else torch.ones_like(real)
            self.owners = kept.nonzero()[:, 0].tolist()
            self.costs = [1] * len(self.owners)
            self.arguments |= {name: x[kept][:, None] for name, x in arguments.items() if _leads(x, kept.shape)}

    def of_elements(self, begin: int, end: int) -> list[int]:
        """Return the owner of each element of a list of features, of the arguments that `part` returns."""
        return [*dict.fromkeys(self.owners[begin:end])] if self.cut.by == GRID else self.owners[begin:end]

    def part(self, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments for those from `begin` up to `end`."""
        if self.cut.by != GRID:
            number = len(self.costs)
            return {name: x[begin:end] if _holds(x, number) else x for name, x in self.arguments.items()}
        total, dim, first, last = sum(self.costs), self.cut.dim, self.owners[begin], self.owners[end - 1]
        before, behind = sum(self.costs[:begin]), sum(self.costs[:end])
        rows = [[*self.rows[picture]] for picture in range(first, last + 1)]
        if self.cut.frames:
            for row, picture in zip(rows, range(first, last + 1), strict=True):
                row[0] = self.owners[begin:end].count(picture)
        part = dict(self.arguments)
        for name, x in self.arguments.items():
            if name == self.cut.grid:
                part[name] = x.new_tensor(rows)
            elif name != self.values and _holds(x, len(self.rows)):
                part[name] = x[first : last + 1]
            elif name == self.values or (isinstance(x, Tensor) and x.dim() and x.shape[0] == total):
                size = x.shape[dim]
                if before * size % total or behind * size % total:
                    raise ValueError(f"{size} of {name} are not shared by pictures of {self.costs} patches")
                part[name] = x.narrow(dim, before * size // total, (behind - before) * size // total)
        return part

    def shares(self, ranks: int) -> list[tuple[int, int]]:
        """Return the beginning and the end of each rank's neighbors, of costs as equal as they can be."""
        total, sums = sum(self.costs), itertools.accumulate(self.costs)
        middles = [behind - cost / 2 for behind, cost in zip(sums, self.costs, strict=True)]
        ends = [sum(middle * ranks < total * (rank + 1) for middle in middles) for rank in range(ranks)]
        return [*itertools.pairwise((0, *ends))]


def _leads(x: Any, shape: torch.Size) -> bool:
    return isinstance(x, Tensor) and x.shape[:2] == shape


def _holds(x: Any, number: int) -> bool:
    """Return whether an argument has an element for each picture."""
    if isinstance(x, Tensor):
        return x.dim() > 0 and len(x) == number
    return isinstance(x, list) and len(x) == number and all(isinstance(y, Tensor | list | tuple) for y in x)


# ---- results


def sent(how: Any, result: Any) -> Any:
    """Return what of a share's result other ranks need, as dicts and lists."""
    if how == SAME:
        return None
    if isinstance(how, dict):
        return {name: sent(inside, result[name]) for name, inside in how.items()}
    if isinstance(how, int):
        return result
    return [x if how == LIST else sent(how[1], x) for x in result]


def joined(how: Any, parts: Sequence[Any], owners: Sequence[list[int]], number: int, own: Any) -> Any:
    """Return the result for all pictures.

    Args:
        how: As in `Cut`.
        parts: What `sent` returned of each share.
        owners: For each share, whose elements of lists are.
        number: How many elements a list has.
        own: The result for a share, for what all have.
    """
    if how == SAME:
        return own
    if isinstance(how, dict):
        named = {name: [x[name] for x in parts] for name in how}
        return type(own)(**{name: joined(how[name], x, owners, number, own[name]) for name, x in named.items()})
    if isinstance(how, int):
        return torch.cat([*parts], dim=how)
    if how != LIST:
        return type(own)(joined(how[1], [x[at] for x in parts], owners, number, y) for at, y in enumerate(own))
    elements: list[list[Tensor]] = [[] for _ in range(number)]
    for x, owner in zip(itertools.chain(*parts), itertools.chain(*owners), strict=True):
        elements[owner].append(x)
    return type(own)(torch.cat(each or [parts[0][0][:0]]) for each in elements)


def _how(whole: Any, parts: Sequence[Any], owners: Sequence[list[int]], number: int, narrow: bool = False) -> Any:
    """Return how results of shares are joined to that of all pictures.

    Args:
        narrow: Whether to leave out what a tower has inside.

    Raises:
        ValueError: They are not that.
    """
    if isinstance(whole, Mapping):
        names = [name for name in whole if not (narrow and INSIDE.fullmatch(name))] or [*whole]
        return {name: _how(whole[name], [x[name] for x in parts], owners, number) for name in names}
    tries: list[Any] = [SAME]
    if isinstance(whole, Tensor):
        tries = [*range(whole.dim()), SAME]
    elif isinstance(whole, list | tuple):
        tries = [LIST] if all(isinstance(x, Tensor) for x in whole) else []
        if whole and all(len(x) == len(whole) for x in parts):
            inside = [_how(x, [part[at] for part in parts], owners, number) for at, x in enumerate(whole)]
            tries += [(EACH, inside[0])] if inside.count(inside[0]) == len(inside) else []
    for how in tries:
        if all(_equal(whole, x) for x in parts) if how == SAME else _rebuilds(how, whole, parts, owners, number):
            return how
    raise ValueError("features of pictures are others where pictures are alone")


def _rebuilds(how: Any, whole: Any, parts: Sequence[Any], owners: Sequence[list[int]], number: int) -> bool:
    try:
        return _equal(whole, joined(how, [sent(how, x) for x in parts], owners, number, parts[0]))
    except (RuntimeError, IndexError, ValueError):  # of other shapes
        return False


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * a.abs().max())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b


# ---- the look


def cut_of(method: Callable[..., Any], arguments: Mapping[str, Any], narrow: bool = True) -> Cut | None:
    """Return how a method that makes features can be divided; None where it cannot.

    Args:
        method: Of a small copy.
        arguments: By name, of three pictures or more.
        narrow: Whether to leave out what a tower has inside.
    """
    for cut in _tries(arguments):
        try:
            with torch.no_grad():
                return _found(method, arguments, cut, narrow)
        except Exception:  # what cannot be called with a share is not divided so
            continue
    return None


def _found(method: Callable[..., Any], arguments: Mapping[str, Any], cut: Cut, narrow: bool) -> Cut:
    """Return a cut with how results are joined, the same for each picture alone and for shares of other sizes."""
    whole, pictures, hows = method(**arguments), Pictures(arguments, cut), []
    count = len(pictures.costs)
    for ends in (range(count + 1), (0, 1, count)):
        shares = [*itertools.pairwise(ends)]
        parts = [method(**pictures.part(*share)) for share in shares]
        owners = [pictures.of_elements(*share) for share in shares]
        hows.append(_how(whole, parts, owners, pictures.number, narrow))
    if hows[0] != hows[1] or hows[0] == SAME or count < 2:
        raise ValueError("shares of other sizes are joined in another way")
    return cut._replace(joined=hows[0])


def _tries(arguments: Mapping[str, Any]) -> Iterator[Cut]:
    (_, values), *others = [(name, x) for name, x in arguments.items() if isinstance(x, Tensor)]
    for grid, x in others:
        if not x.is_floating_point() and x.dim() == 2 and x.shape[1] in (2, 3):
            films = (True, False) if x.shape[1] == 3 and (x[:, 0] > 1).any() else (False,)
            yield from (Cut(GRID, grid, dim, frames) for dim in (0, 1, -1) for frames in films)
    if values.dim() == 5:
        yield Cut(TILE, drops=True)
        yield Cut(TILE)
    yield Cut(PICTURE)

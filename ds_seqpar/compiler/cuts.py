"""Tiles as calls that a kernel takes: what it does not take is cut, and equal calls become one batch.

A call is a tile. Of kind "upper" it is causal with rows and columns in reverse order. For a kernel with windows of its
own tiles are joined again: see `windows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .tiles import Segments, Tile

# what a configuration can name; `runtime.kernels.register` adds to it
KERNELS = ["auto", "cpu_flash", "cuda_flash", "cudnn", "cuda_efficient", "flash_attn", "chunked", "reference"]
FEWEST = 64  # rows of a block of a band, however narrow that is: smaller blocks cost more than what they leave out


class Takes(NamedTuple):
    """What a kernel takes in one call, beside full and causal blocks and batches of equal ones.

    square: a causal block must be square, because the kernel aligns it to the lower right corner; False means top-left
    alignment for any shape.
    band: the widest band that it takes, 0 for none. rows: of a band, at most in one block, for which it makes a mask of
    rows by columns; 0 for any number, without a mask.
    tiles: it takes all tiles of a product at once, of every kind, and adds to the running results itself.
    windows: 0 none, 1 a window that ends with a causal edge, 2 a window with any two edges. Its calls have `Segments`.
    segments: many blocks of different sizes are one call; else each is a call of its own.
    """

    square: bool = False
    band: int = 0
    rows: int = 0
    tiles: bool = False
    windows: int = 0
    segments: bool = False


PLAIN = Takes()


def calls(tiles: Sequence[Tile], takes: Takes) -> tuple[Tile, ...]:
    """The calls that make the same pairs visible."""
    if takes.tiles:
        return tuple(tiles)
    if takes.windows:
        from .windows import joined  # which only kernels for GPUs need

        return _batched(iter(joined(tiles, takes.windows, takes.segments)))
    return _batched(call for tile in tiles for call in _cut(tile, takes))


def _cut(tile: Tile, takes: Takes) -> Iterator[Tile]:
    q0, q1, k0, k1, kind = tile[:5]
    if kind == "band":
        yield from _blocks(tile, takes.rows) if tile.width <= takes.band else _squares(tile)
    elif kind == "upper" and q1 - q0 <= min(takes.band, takes.rows or takes.band):
        yield tile._replace(kind="band", width=k1 - k0)
    elif kind == "causal" and takes.square and q1 - q0 > k1 - k0:
        end = q0 + k1 - k0
        yield tile._replace(q1=end)
        yield Tile(end, q1, k0, k1, "full")
    else:
        yield tile


def _blocks(tile: Tile, most: int) -> Iterator[Tile]:
    """A band in blocks of rows, whose columns overlap. A call has no more columns than the tile, those that are in two
    blocks counted twice: so many results it has."""
    rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
    size = min(rows, most, max(tile.width, FEWEST)) if most else rows
    count, rest = divmod(rows, size)
    together = max(1, columns // (size + tile.width - 1))
    for first in range(0, count, together):
        yield _band(tile, first * size, size, min(together, count - first))
    if rest:
        yield _band(tile, count * size, rest, 1)


def _band(tile: Tile, first: int, rows: int, groups: int) -> Tile:
    """Blocks of a band, from its row `first` on."""
    block = Tile(tile.q0 + first, tile.q0 + first + rows, tile.k0 + first, 0, "band", tile.width)
    return _repeated(block._replace(k1=block.k0 + rows + tile.width - 1), groups, rows)


def _squares(tile: Tile) -> Iterator[Tile]:
    """A band in squares as wide as it is, and what is left of its rows."""
    count, rest = divmod(tile.q1 - tile.q0, tile.width)
    if count:
        yield from _square(tile.q0, tile.k0, tile.width, tile.width, count)
    if rest:
        done = count * tile.width
        yield from _square(tile.q0 + done, tile.k0 + done, rest, tile.width, 1)


def _square(q0: int, k0: int, rows: int, width: int, count: int) -> Iterator[Tile]:
    """`count` bands of so many rows (at most their width), one after the other. Each row sees the end of its square,
    from the diagonal on. Then it sees what is between, and of the next square the beginning, up to the diagonal."""
    last = k0 + width + rows - 1
    parts = [Tile(q0, q0 + rows, k0, k0 + rows, "upper" if rows > 1 else "full")]
    if width > rows:
        parts.append(Tile(q0, q0 + rows, k0 + rows, k0 + width, "full"))
    if rows > 1:
        parts.append(Tile(q0 + 1, q0 + rows, k0 + width, last, "causal"))
    yield from (_repeated(part, count, rows) for part in parts)


def _repeated(tile: Tile, groups: int, step: int) -> Tile:
    return tile._replace(groups=groups, q_step=step, k_step=step) if groups > 1 else tile


def _batched(cut: Iterator[Tile]) -> tuple[Tile, ...]:
    """Calls of one shape that follow one another at equal distances, as one."""
    found: list[Tile] = []
    last: dict[tuple[int, int, str, int, Segments | None], int] = {}  # where the last call of a shape is
    for tile in cut:
        shape = tile.q1 - tile.q0, tile.k1 - tile.k0, tile.kind, tile.width, tile.segments
        longer = _longer(found[last[shape]], tile) if shape in last else None
        if longer:
            found[last[shape]] = longer
        else:
            last[shape] = len(found)
            found.append(tile)
    return tuple(found)


def _longer(run: Tile, tile: Tile) -> Tile | None:
    """The run with one more tile of its shape; None where that is not one step further, or shares rows or columns."""
    steps = tile.q0 - run.q0, tile.k0 - run.k0
    if run.groups > 1:
        steps = run.q_step, run.k_step
    apart = steps[0] >= run.q1 - run.q0 and steps[1] >= run.k1 - run.k0
    follows = (tile.q0 - run.q0, tile.k0 - run.k0) == (run.groups * steps[0], run.groups * steps[1])
    if tile.groups > 1 or not apart or not follows:
        return None
    return run._replace(groups=run.groups + 1, q_step=steps[0], k_step=steps[1])

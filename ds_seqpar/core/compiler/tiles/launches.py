"""Conversion of tiles to kernel launches. Tiles that a kernel does not support are cut, and equal launches are batched.

A launch is one kernel call on a tile. A tile of kind "upper" runs as a causal launch with its rows and columns in
reverse order. For kernels that support windows, `KernelSupport.join` joins several tiles into one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .tiles import Segments, Tile

# kernel names allowed in configurations; `runtime.kernels.register` adds more
KERNELS = [
    *("auto", "cpu_flash", "cuda_flash", "cudnn", "cuda_efficient", "flash_attn", "flash_attn_3"),
    *("chunked", "reference"),
]
# minimum number of rows in a block of a band, even if the band is narrower: smaller blocks cost more than they save
MIN_BLOCK_ROWS = 64


class KernelSupport(NamedTuple):
    """The features that a kernel supports in addition to full and causal blocks and batches of equal blocks."""

    # True: the kernel aligns causal blocks to the lower right corner, so causal blocks must be square. False: the
    # kernel aligns causal blocks of any shape to the upper left corner.
    square: bool = False
    band: int = 0  # maximum width of a band; 0: no bands
    # maximum number of rows in a block of a band, for kernels that create a mask of rows by columns; 0: unlimited,
    # because the kernel needs no mask
    rows: int = 0
    # 0: no windows; 1: windows with a causal right edge; 2: windows with any two edges. Launches with windows have
    # `Segments`.
    windows: int = 0
    segments: bool = False  # whether one launch can have many blocks of different sizes
    # function (tiles, windows, segments) that joins tiles into launches of a kernel with windows; see `kernels.varlen`
    join: Callable[[Sequence[Tile], int, bool], Iterable[Tile]] | None = None
    workspace: str = ""  # the kernel in `analysis.workspace` with the same workspace size; "": not counted


PLAIN_KERNEL = KernelSupport()


def launches(tiles: Sequence[Tile], support: KernelSupport) -> tuple[Tile, ...]:
    """Return launches that compute the same visible pairs as the tiles."""
    if support.join is not None:
        return _batched(iter(support.join(tiles, support.windows, support.segments)))
    return _batched(launch for tile in tiles for launch in _cut(tile, support))


def _cut(tile: Tile, support: KernelSupport) -> Iterator[Tile]:
    q0, q1, k0, k1, kind = tile[:5]
    if kind == "band":
        yield from _blocks(tile, support.rows) if tile.width <= support.band else _squares(tile)
    elif kind == "upper" and q1 - q0 <= min(support.band, support.rows or support.band):
        yield tile._replace(kind="band", width=k1 - k0)
    elif kind == "causal" and support.square and q1 - q0 > k1 - k0:
        end = q0 + k1 - k0
        yield tile._replace(q1=end)
        yield Tile(end, q1, k0, k1, "full")
    else:
        yield tile


def _blocks(tile: Tile, max_rows: int) -> Iterator[Tile]:
    """Split a band into blocks of at most `max_rows` rows with overlapping columns.

    A launch computes results for the columns of each block, so overlapping columns are counted once per block. Even
    with this count, a launch has at most as many columns as the tile.
    """
    rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
    size = min(rows, max_rows, max(tile.width, MIN_BLOCK_ROWS)) if max_rows else rows
    count, last_rows = divmod(rows, size)
    batch = max(1, columns // (size + tile.width - 1))
    for first in range(0, count, batch):
        yield _band(tile, first * size, size, min(batch, count - first))
    if last_rows:
        yield _band(tile, count * size, last_rows, 1)


def _band(tile: Tile, first: int, rows: int, groups: int) -> Tile:
    """Return `groups` blocks of a band, each with `rows` rows. The first block starts at row `first` of the band."""
    block = Tile(tile.q0 + first, tile.q0 + first + rows, tile.k0 + first, 0, "band", tile.width)
    return _repeated(block._replace(k1=block.k0 + rows + tile.width - 1), groups, rows)


def _squares(tile: Tile) -> Iterator[Tile]:
    """Split a band into squares with the band's width, plus a remainder of rows that do not fill a square."""
    count, last_rows = divmod(tile.q1 - tile.q0, tile.width)
    if count:
        yield from _square(tile.q0, tile.k0, tile.width, tile.width, count)
    if last_rows:
        done = count * tile.width
        yield from _square(tile.q0 + done, tile.k0 + done, last_rows, tile.width, 1)


def _square(q0: int, k0: int, rows: int, width: int, count: int) -> Iterator[Tile]:
    """Yield the tiles of `count` consecutive bands of equal width, each with at most as many rows as its width.

    A row sees three sets of columns: those of its square from the diagonal onward, those between its square and the
    next one, and those of the next square up to the diagonal.
    """
    last = k0 + width + rows - 1
    tiles = [Tile(q0, q0 + rows, k0, k0 + rows, "upper" if rows > 1 else "full")]
    if width > rows:
        tiles.append(Tile(q0, q0 + rows, k0 + rows, k0 + width, "full"))
    if rows > 1:
        tiles.append(Tile(q0 + 1, q0 + rows, k0 + width, last, "causal"))
    yield from (_repeated(tile, count, rows) for tile in tiles)


def _repeated(tile: Tile, groups: int, step: int) -> Tile:
    return tile._replace(groups=groups, q_step=step, k_step=step) if groups > 1 else tile


def _batched(cut: Iterator[Tile]) -> tuple[Tile, ...]:
    """Batch consecutive launches of the same shape that are evenly spaced."""
    batched: list[Tile] = []
    last: dict[tuple[int, int, str, int, Segments | None], int] = {}  # shape -> index of the shape's last launch
    for tile in cut:
        shape = tile.q1 - tile.q0, tile.k1 - tile.k0, tile.kind, tile.width, tile.segments
        longer = _extended(batched[last[shape]], tile) if shape in last else None
        if longer:
            batched[last[shape]] = longer
        else:
            last[shape] = len(batched)
            batched.append(tile)
    return tuple(batched)


def _extended(batch: Tile, tile: Tile) -> Tile | None:
    """Return the batch extended by a tile of the same shape, or None if the tile overlaps the batch or does not
    directly follow it.
    """
    steps = tile.q0 - batch.q0, tile.k0 - batch.k0
    if batch.groups > 1:
        steps = batch.q_step, batch.k_step
    apart = steps[0] >= batch.q1 - batch.q0 and steps[1] >= batch.k1 - batch.k0
    follows = (tile.q0 - batch.q0, tile.k0 - batch.k0) == (batch.groups * steps[0], batch.groups * steps[1])
    if tile.groups > 1 or not apart or not follows:
        return None
    return batch._replace(groups=batch.groups + 1, q_step=steps[0], k_step=steps[1])

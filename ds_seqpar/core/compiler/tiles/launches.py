"""Tiles as kernel launches: unsupported tiles are cut, and equal launches are batched.

A launch is one call of a kernel, on a tile. A tile of kind "upper" is causal with rows and columns in reverse order.
For a kernel that supports windows, `KernelSupport.join` joins tiles again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .tiles import Segments, Tile

# names that a configuration can have; `runtime.kernels.register` adds to it
KERNELS = [
    *("auto", "cpu_flash", "cuda_flash", "cudnn", "cuda_efficient", "flash_attn", "flash_attn_3"),
    *("chunked", "reference"),
]
# least rows of a block of a band, however narrow the band is: smaller blocks cost more than they save
MIN_BLOCK_ROWS = 64


class KernelSupport(NamedTuple):
    """The support of a kernel in one launch, in addition to full or causal blocks and batches of equal blocks."""

    # a causal block must be square, because the kernel aligns it to the lower right corner; False: top-left alignment
    # for any shape
    square: bool = False
    band: int = 0  # the widest band; 0: no bands
    # rows that a block of a band may have, because the kernel creates a mask of rows by columns for it; 0: any number,
    # without a mask
    rows: int = 0
    # 0: none; 1: a window that ends with a causal edge; 2: a window with any two edges. Such launches have `Segments`
    windows: int = 0
    segments: bool = False  # many blocks of different sizes in one launch; False: one launch for each
    # joins tiles to launches of such a kernel: a function of (tiles, windows, segments); see `kernels.varlen`
    join: Callable[[Sequence[Tile], int, bool], Iterable[Tile]] | None = None
    workspace: str = ""  # the kernel of `analysis.workspace` that allocates as much for itself; "": none is counted


PLAIN_KERNEL = KernelSupport()


def launches(tiles: Sequence[Tile], support: KernelSupport) -> tuple[Tile, ...]:
    """Return launches that make the same pairs visible as the tiles."""
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
    """Yield a band in blocks of at most `max_rows` rows, whose columns overlap.

    A launch has at most as many columns as the tile, counting the columns of two blocks twice, since the launch
    computes results for each.
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
    """Return `groups` blocks of a band, each with this number of rows, starting at row `first` of the band."""
    block = Tile(tile.q0 + first, tile.q0 + first + rows, tile.k0 + first, 0, "band", tile.width)
    return _repeated(block._replace(k1=block.k0 + rows + tile.width - 1), groups, rows)


def _squares(tile: Tile) -> Iterator[Tile]:
    """Yield a band in squares of its width, then its last rows, which do not fill a square."""
    count, last_rows = divmod(tile.q1 - tile.q0, tile.width)
    if count:
        yield from _square(tile.q0, tile.k0, tile.width, tile.width, count)
    if last_rows:
        done = count * tile.width
        yield from _square(tile.q0 + done, tile.k0 + done, last_rows, tile.width, 1)


def _square(q0: int, k0: int, rows: int, width: int, count: int) -> Iterator[Tile]:
    """Yield the tiles of `count` consecutive bands with this number of rows (at most their width). A row sees the
    columns of its square from the diagonal on, the columns up to the next square, and the columns of the next square up
    to the diagonal.
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
    """Join consecutive launches of the same shape at equal distances."""
    batched: list[Tile] = []
    last: dict[tuple[int, int, str, int, Segments | None], int] = {}  # shape -> index of its last launch
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
    """Return the batch extended by a tile of its shape, or None if the tile is not one step further or overlaps."""
    steps = tile.q0 - batch.q0, tile.k0 - batch.k0
    if batch.groups > 1:
        steps = batch.q_step, batch.k_step
    apart = steps[0] >= batch.q1 - batch.q0 and steps[1] >= batch.k1 - batch.k0
    follows = (tile.q0 - batch.q0, tile.k0 - batch.k0) == (batch.groups * steps[0], batch.groups * steps[1])
    if tile.groups > 1 or not apart or not follows:
        return None
    return batch._replace(groups=batch.groups + 1, q_step=steps[0], k_step=steps[1])

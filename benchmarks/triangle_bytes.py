"""Prints what the busiest rank receives in the triangle, with the number of strips that brings the fewest bytes, in the
best mesh and in a ring, as multiples of its own query block in bf16. By closed form: no plan is built.

    python -m benchmarks.triangle_bytes
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_seqpar.planning.recipes import shape_of
from ds_seqpar.planning.schedules import SCHEDULES

HEAD_DIM = 128
TABLES = {  # name -> heads, ranks
    "MHA": ((32, 32), (6, 10, 12, 15, 20, 24, 28, 30, 36, 40, 48, 60, 66, 84, 120, 496)),
    "GQA 4:1": ((32, 8), (6, 12, 20, 24, 28, 40, 48, 60, 84, 112, 120, 180, 496)),
    "GQA 8:1": ((64, 8), (12, 24, 28, 40, 48, 60, 80, 112, 120, 168, 224, 360, 496)),
}
COLUMNS = [(direction, travel) for direction in ("forward", "backward") for travel in ("fp32", "bf16")]


def main() -> None:
    for name, (heads, sizes) in TABLES.items():
        print(f"\n{name} ({heads[0]}/{heads[1]} heads)\n")
        print("| ranks | " + " | ".join(f"{way}, {travel}" for way, travel in COLUMNS) + " |\n|---|---|---|---|---|")
        for ranks in sizes:
            print(f"| {ranks} | {' | '.join(cell(ranks, heads, *column) for column in COLUMNS)} |")


def cell(ranks: int, heads: tuple[int, int], direction: str, travel: str) -> str:
    """Triangle (strips) / mesh / ring: the triangle's part of the mesh's."""
    units = shape_of(travel, "bfloat16", 1, (*heads, HEAD_DIM)).bytes_per_token(direction)
    own = 2 * heads[0] * HEAD_DIM
    (ours, shape), (mesh, _), (ring, _) = (
        fewest(schedule, ranks, direction, units) for schedule in ("triangle", "mesh", "ring")
    )
    strips = f" ({shape['strips']})" if shape["strips"] > 1 else ""
    return f"{ours / own:.2f}{strips} / {mesh / own:.2f} / {ring / own:.2f}: {ours / mesh:.2f}"


def fewest(schedule: str, ranks: int, direction: str, units: Mapping[str, float]) -> tuple[float, Mapping]:
    """Bytes for a token of a rank, and the shape that has them, with what travels chosen best."""
    its = SCHEDULES[schedule]
    blocks = {kind: size / its.parts for kind, size in units.items()}
    return min(
        ((max(its.received(its.axes(ranks, own), direction, side, blocks)), own)
         for own in its.shapes(ranks) for side in its.travellers),
        key=lambda one: one[0],
    )  # fmt: skip


if __name__ == "__main__":
    main()

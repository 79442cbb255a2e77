"""A run of `benchmarks.cluster` as a picture: seconds beside the bytes of the busiest direction of a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def chart(rows: list[dict[str, Any]], title: str, rate: float, file: Path) -> None:
    """rows: of the table, those with seconds. rate: of a link, in bytes a second."""
    able = [row for row in rows if row.get("seconds")]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.45 * len(able)), layout="constrained")
    places = range(len(able))
    least = [max(*row["out"], *row["in"]) / rate for row in able]
    axes.barh(places, [row["median"] for row in able], color="#9ecae1", label="measured, median")
    axes.barh(places, least, height=0.4, color="#3182bd", label="its bytes at the rate of the link")
    for place, row in zip(places, able, strict=True):
        low, high = min(row["seconds"]), max(row["seconds"])
        axes.plot([low, high], [place, place], color="black", linewidth=1)
        axes.text(high, place, f"  {row['ratio']:.2f}x, {row['share']:.0%} of the link", va="center", fontsize=8)
    axes.set_yticks(list(places), [row["name"] for row in able])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(max(row["seconds"]) for row in able))
    axes.set_xlabel("seconds, forward and backward")
    axes.set_title(title, fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)

"""Charts of `benchmarks.memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_steps(found: dict[str, dict[int, list[float]]], file: Path) -> None:
    figure, axes = plots(2)
    for name, row in found.items():
        for axis, number in zip(axes, range(2), strict=True):
            axis.plot(list(row), [values[number] for values in row.values()], "o-", label=name)
    for axis, title in zip(axes, ("resident memory of a step", "tensors of a step"), strict=True):
        axis.set(title=title, xlabel="tokens of the sequence", ylabel="MiB, the rank with the most", ylim=(0, None))
        axis.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def draw_longest(found: dict[str, int], budget: int, file: Path) -> None:
    figure, (axis,) = plots(1)
    axis.barh(list(found), list(found.values()))
    axis.invert_yaxis()
    axis.set(xlabel="tokens", title=f"longest sequence, {budget / 2**20:.0f} MiB a rank")
    figure.savefig(file, dpi=120, bbox_inches="tight")


def plots(count: int) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(1, count, figsize=(6 * count, 4), squeeze=False)
    return figure, axes[0]

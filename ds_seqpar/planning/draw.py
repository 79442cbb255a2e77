"""A plan as a picture, a time line per rank with products, arriving transfers and waits; and the memory of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .needs import PARTS, Footprint
from .plan import Plan
from .simulate import Costs, Timeline, communication, computation, programs_of, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"product": "#4878a8", "move": "#e1a13c", "wait": "#c8c8c8"}
# of the parts of a step's memory, in their order
SHADES = ("#2f4b6e", "#4878a8", "#86a9cb", "#bccfe2", "#c8c8c8", "#3f7d58", "#8cbf9f", "#e1a13c", "#c8562e", "#f0cf8e",
          "#8e5a97")  # fmt: skip


def draw(plan: Plan, costs: Costs, file: str | Path) -> None:
    """Writes the simulated time line as an image (PNG or what the file's ending says). Needs matplotlib: ConfigError
    where it is not installed, or the file cannot be written.

    A rank's upper lane: products and waits; lower lane: transfers that arrive. Time is in products of two blocks.
    """
    timeline = simulate(programs_of(plan), costs)
    figure, axes = _figure(13, 1.2 + 0.62 * plan.size)
    _draw_events(axes, timeline, costs.product or 1.0)
    axes.set_yticks(range(plan.size), [f"rank {rank}" for rank in range(plan.size)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in products of one query block and one key/value block")
    bound = max(communication(plan, costs), computation(plan, costs))
    ratio = f"{timeline.seconds / bound:.2f} x max(compute, links)" if bound else "nothing to do"
    axes.set_title(f"{plan.name}, {plan.direction}: {ratio}", fontsize=11)
    from matplotlib.patches import Patch

    names = {"product": "product", "move": "transfer arriving", "wait": "waiting"}
    handles = [Patch(color=COLORS[kind], label=name) for kind, name in names.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.9 / (1.2 + 0.62 * plan.size)), ncol=3)
    _save(figure, file)


def draw_memory(found: Footprint, file: str | Path) -> None:
    """Writes the moments of a step as bars, part upon part. Raises as `draw` does."""
    moments = (found.resting, *found.moments)
    figure, axes = _figure(11, 1.4 + 0.38 * len(moments))
    starts = [0.0] * len(moments)
    for index, name in enumerate(PARTS):
        sizes = [moment.parts.get(name, 0) / 2**30 for moment in moments]
        if any(sizes):
            axes.barh(range(len(moments)), sizes, left=starts, label=name, color=SHADES[index])
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_yticks(range(len(moments)), [moment.name for moment in moments])
    axes.invert_yaxis()
    axes.set_xlabel("GiB of tensors on a rank")
    axes.set_title(f"peak {found.peak.total / 2**30:.2f} GiB: {found.peak.name}", fontsize=11)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _save(figure, file)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib; it is not installed, pip install 'ds_seqpar[plot]'") from None
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, file: str | Path) -> None:
    try:
        figure.savefig(file, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:  # no such folder, or an ending that matplotlib does not know
        raise ConfigError(f"a picture needs a file that can be written; got {file}: {error}") from None


def _draw_events(axes: Axes, timeline: Timeline, unit: float) -> None:
    """unit: seconds that are 1 on the axis of time."""
    width = timeline.seconds / unit
    for event in timeline.events:
        lane = event.rank + (0.24 if event.kind == "move" else -0.2)
        height = 0.3 if event.kind == "move" else 0.5
        start, length = event.start / unit, (event.end - event.start) / unit
        axes.barh(lane, length, left=start, height=height, color=COLORS[event.kind], edgecolor="white", linewidth=0.6)
        label = event.label.split(":")[0] if event.kind == "move" else event.label if event.kind == "product" else ""
        if label and length / max(width, 1e-9) * 150 > len(label):
            axes.text(start + length / 2, lane, label, ha="center", va="center", fontsize=6.5, clip_on=True)
    axes.set_xlim(0, width)

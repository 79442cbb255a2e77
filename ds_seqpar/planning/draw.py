"""A plan as a picture: a time line per rank with products, arriving transfers and waits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .plan import Plan
from .simulate import Costs, Timeline, communication, computation, programs_of, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"product": "#4878a8", "move": "#e1a13c", "wait": "#c8c8c8"}


def draw(plan: Plan, costs: Costs, file: str | Path) -> None:
    """Writes the simulated time line as an image (PNG or what the file's ending says). Needs matplotlib: ConfigError
    where it is not installed, or the file cannot be written.

    A rank's upper lane: products and waits; lower lane: transfers that arrive. Time is in products of two blocks.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("pictures need matplotlib; it is not installed, pip install 'ds_seqpar[plot]'") from None
    timeline = simulate(programs_of(plan), costs)
    figure = Figure(figsize=(13, 1.2 + 0.62 * plan.size))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_events(axes, timeline, costs.product or 1.0)
    axes.set_yticks(range(plan.size), [f"rank {rank}" for rank in range(plan.size)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in products of one query block and one key/value block")
    bound = max(communication(plan, costs), computation(plan, costs))
    ratio = f"{timeline.seconds / bound:.2f} x max(compute, links)" if bound else "nothing to do"
    axes.set_title(f"{plan.name}, {plan.direction}: {ratio}", fontsize=11)
    names = {"product": "product", "move": "transfer arriving", "wait": "waiting"}
    handles = [Patch(color=COLORS[kind], label=name) for kind, name in names.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.9 / (1.2 + 0.62 * plan.size)), ncol=3)
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

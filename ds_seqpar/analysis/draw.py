"""Draw a timeline with one row per rank, showing the rank's work and the data that the rank receives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import ConfigError, ranks_in_words
from ..core.compiler.schedules.plan import Plan
from ..data.placing import Pack
from ..schedules.simulate import UNSPLIT, Costs, HeadSplit
from ..schedules.timeline import TRACKS, Event, Timeline, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"product": "#4878a8", "move": "#e1a13c", "wait": "#c8c8c8", "merge": "#3f7d58", "copy": "#8cbf9f",
          "post": "#8e5a97", "exchange": "#c8562e"}  # fmt: skip
# legend text by kind of event; other kinds are not drawn
NAMES = {"product": "product", "move": "transfer arriving", "wait": "waiting", "merge": "merging", "copy": "copying",
         "post": "posting", "exchange": "Ulysses' exchange arriving"}  # fmt: skip
WHOLE = ("#c8c8c8", "#a0a0a0")  # alternating colors for documents that are whole on a rank
ARRIVING = tuple(kind for kind in NAMES if TRACKS[kind] == "receive")  # drawn in a row's lower lane


def draw(
    plan: Plan, timeline: Timeline, costs: Costs, slower: float, file: str | Path, head_split: HeadSplit = UNSPLIT
) -> None:
    """Write a plan's simulated timeline as an image, in PNG or in the format given by the file's extension.

    Each row is a CP rank. All Ulysses ranks of a CP rank behave identically. A row's upper lane shows products and
    waits, and its lower lane shows incoming transfers and exchanges of heads. The unit of time is one product of two
    blocks.

    Args:
        slower: The timeline's duration, divided by its product time or its transfer time, whichever is longer.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    ulysses_size, head_chunks = head_split[:2]
    split = f" in Ulysses {ulysses_size}" * (ulysses_size > 1) + f", {head_chunks} head chunks" * (head_chunks > 1)
    title = f"{plan.name}{split}, {plan.direction}: {slower:.2f} x max(compute, links)"
    unit = "products of one query block and one key/value block"
    groups = [range(rank * ulysses_size, (rank + 1) * ulysses_size) for rank in range(plan.size)]
    height = 1.2 + 0.62 * plan.size
    figure = new_figure(13, height)
    # imported after `new_figure`, which raises an error if matplotlib is not installed
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    _draw_events(axes, timeline, range(plan.size), costs.product)
    axes.set_yticks(range(plan.size), [*map(ranks_in_words, groups)])
    axes.set_ylim(plan.size - 0.45, -0.55)
    axes.set_xlabel(f"time, in {unit}")
    axes.set_title(title, fontsize=11)
    shown = {event.kind for event in timeline.events}
    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in NAMES if kind in shown]
    below = (0.5, -0.9 / height)
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=below, ncol=max(1, len(handles)))
    save(figure, file)


def draw_packs(packs: Sequence[Sequence[Pack]], file: str | Path) -> None:
    """Draw each group's packs.

    Each row shows a CP rank's tokens from left to right, one micro-batch after another. Documents on a single rank are
    gray, and every other document has a color.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    rows = [
        (group, pack, at, rank)
        for group, of in enumerate(packs)
        for at, pack in enumerate(of)
        for rank in range(pack.shards.size)
    ]
    widest = max(sum(part.tokens for part in parts) for of in packs for pack in of for parts in pack.parts)
    ranks = max(pack.shards.size * pack.ulysses for of in packs for pack in of)
    figure = new_figure(13, 1.2 + 0.3 * ranks * len(packs))
    axes = figure.add_subplot()
    for group, pack, at, rank in rows:
        left, cut, place = 1.05 * widest * at, pack.cut, group * (ranks + 1) + rank * pack.ulysses
        for number, part in enumerate(pack.parts[rank]):
            color = f"C{'012345689'[part.document % 9]}" if part.document in cut else WHOLE[number % 2]
            axes.broken_barh(
                [(left, part.tokens)], (place, pack.ulysses), facecolors=color, edgecolor="white", linewidth=0.3
            )
            left += part.tokens
    axes.set_yticks(
        [group * (ranks + 1) + rank + 0.5 for group in range(len(packs)) for rank in range(ranks)],
        [f"rank {group * ranks + rank}" for group in range(len(packs)) for rank in range(ranks)],
    )
    axes.invert_yaxis()
    axes.set_xlabel("tokens, of one micro-batch after another")
    axes.set_title("packs of an optimizer step: gray documents are whole on a rank", fontsize=11)
    save(figure, file)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches. Raise ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib; it is not installed, pip install 'ds_seqpar[plot]'") from None
    return Figure(figsize=(width, height))


def save(figure: Figure, file: str | Path) -> None:
    """Write a figure. Raise ConfigError if the file cannot be written."""
    try:
        figure.savefig(file, dpi=110, bbox_inches="tight")
    # the folder is missing, or the extension is unknown or requires LaTeX
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"a figure needs a file that can be written; got {file}: {error}") from None


def _draw_events(axes: Axes, timeline: Timeline, ranks: Sequence[int], second: float) -> None:
    """Draw the events of some ranks, with one row per rank.

    `second` is the number of seconds in one unit of time. All bars are drawn as one collection, since drawing each bar
    separately takes milliseconds.
    """
    from matplotlib.collections import PolyCollection

    width = timeline.seconds / second
    bars: list[tuple[Event, float, float]] = []  # (event, center of its lane, height)
    for row, rank in enumerate(ranks):
        arriving = lanes(timeline.of(rank, *ARRIVING))
        count = 1 + max((lane for lane, _ in arriving), default=0)
        height = 0.3 / count  # overlapping events share the lane
        bars += [(event, row + 0.09 + height * (lane + 0.5), height) for lane, event in arriving]
        upper = timeline.of(rank, *(kind for kind in NAMES if kind not in ARRIVING))
        bars += [(event, row - 0.2, 0.5) for event in upper]
    corners, too_thin = [], []
    for event, lane, height in bars:
        left, right = event.start / second, event.end / second
        low, high = lane - height / 2, lane + height / 2
        corners.append([(left, low), (right, low), (right, high), (left, high)])
        too_thin.append((right - left) / max(width, 1e-9) < 0.002)  # an edge would hide the bar
        _label(axes, event, left, right, lane, height, width)
    colors = [COLORS[event.kind] for event, _, _ in bars]
    widths = [0 if thin else 0.6 for thin in too_thin]
    axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="white", linewidths=widths))
    axes.set_xlim(0, width)


def _label(axes: Axes, event: Event, left: float, right: float, lane: float, height: float, width: float) -> None:
    """Draw the label of an event if its bar has enough room."""
    label = event.label.split(":")[0] if event.kind in ("move", "product", "exchange") else ""
    if label and height > 0.2 and (right - left) / max(width, 1e-9) * 150 > len(label):
        axes.text((left + right) / 2, lane, label, ha="center", va="center", fontsize=6.5, clip_on=True)

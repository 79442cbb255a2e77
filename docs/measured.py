"""Draws docs/figures/measured.svg, the README's figures, from the tables of benchmarks.md: python docs/measured.py"""

import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
OURS, THEIRS = "#4e79a7", "#bab0ac"


def table(section: str) -> list[list[str]]:
    """The cells of the first table in a section of benchmarks.md, without its head."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.*)\|$", page.split(f"## {section}\n")[1].split("\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[2:]]


def number(cell: str) -> float:
    return float(re.match(r"[\d,.]+", cell)[0].strip(",").replace(",", ""))


def bars(axes: Axes, title: str, labels: list[str], ours: list[float], theirs: list[float], name: str) -> None:
    """Two bars a label: DeepSpeed's, and ours, which says how many times the other it is."""
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        first = place == 0
        axes.bar(place - 0.2, other, 0.38, color=THEIRS, label="DeepSpeed ALST" if first else None)
        bar = axes.bar(place + 0.2, mine, 0.38, color=OURS, label=name if first else None)
        axes.bar_label(bar, [f"{mine / other:.2f} x"], fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.3)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    # the same file each time, with text as text
    matplotlib.rcParams |= {"svg.hashsalt": "ds_seqpar", "svg.fonttype": "none", "font.family": "sans-serif"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2), layout="constrained")
    memory = table("Longest sequence beside DeepSpeed")
    budgets = ["96 MiB of\ntensors", "85 MiB\nresident", "330 MiB of\ntensors", "415 MiB\nresident"]
    ours, theirs = [number(row[3]) / 1000 for row in memory], [number(row[2]) / 1000 for row in memory]
    bars(left, "longest sequence, thousands of tokens", budgets, ours, theirs, '"memory": "auto"')
    steps = {row[0]: [number(cell) for cell in row[1:4]] for row in table("Training steps")}
    links = ["50 Mbit/s", "200 Mbit/s", "1 Gbit/s"]
    bars(right, "training, tokens a second", links, steps["u8"], steps["deepspeed"], '"ulysses": 8')
    figure.savefig(DOCS / "figures" / "measured.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

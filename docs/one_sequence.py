"""Draws docs/figures/one_sequence.svg, the README's figure: python docs/one_sequence.py

One sequence of 8 chunks over a ring of 4 ranks: which chunks a rank holds, what travels, and which rank computes which
part of causal attention in which step.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from ds_seqpar.core.compiler.sharding.layout import LAYOUTS

RANKS, CHUNKS = 4, 8
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
HELD = [[p for run in LAYOUTS["zigzag"].runs(CHUNKS, RANKS, rank) for p in run.positions] for rank in range(RANKS)]
OWNER = {chunk: rank for rank, chunks in enumerate(HELD) for chunk in chunks}


def box(axes, x, y, text, color, width=1.0, height=1.0, alpha=1.0):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", alpha=alpha))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=9)


def draw_ranks(axes):
    """The sequence above, the four ranks below, and k and v on their way."""
    axes.set_title("a rank holds two chunks of one sequence (zigzag)", fontsize=10)
    for chunk in range(CHUNKS):
        box(axes, 1.25 * chunk, 3.6, f"{chunk}", COLORS[OWNER[chunk]], width=1.2, height=0.6)
    for rank, chunks in enumerate(HELD):
        left = 2.5 * rank
        axes.text(left + 1.1, 2.85, f"rank {rank}", ha="center", fontsize=9)
        for row, (name, alpha) in enumerate((("q", 1.0), ("k, v", 0.75))):
            for column, chunk in enumerate(chunks):
                x, y = left + 1.1 * column, 2.05 - 0.7 * row
                box(axes, x, y, f"{name} {chunk}", COLORS[rank], width=1.05, height=0.62, alpha=alpha)
    ends = [(2.5 * rank + 1.6, 2.5 * rank + 3.1) for rank in range(RANKS - 1)]
    for start, end in ends:
        axes.add_patch(FancyArrowPatch((start, 1.25), (end, 1.25), arrowstyle="-|>", mutation_scale=11,
                                       connectionstyle="arc3,rad=0.5", color="#555555"))  # fmt: skip
    axes.add_patch(FancyArrowPatch((8.6, 1.2), (1.1, 1.2), arrowstyle="-|>", mutation_scale=11,
                                   connectionstyle="arc3,rad=-0.16", color="#555555"))  # fmt: skip
    axes.text(4.85, -0.1, "k and v travel round the ring in 3 steps; q stays", ha="center", fontsize=9)
    axes.set_xlim(-0.1, 10.1)
    axes.set_ylim(-0.4, 4.3)
    axes.axis("off")


def draw_work(axes):
    """Causal attention as a square of chunks: the color is the rank that computes it, the number its step."""
    axes.set_title("who (color) computes what, in which step", fontsize=10)
    for query in range(CHUNKS):
        for key in range(query + 1):
            rank, step = OWNER[query], (OWNER[query] - OWNER[key]) % RANKS
            box(axes, key, query, str(step), COLORS[rank])
    axes.set_xlim(-0.1, CHUNKS + 0.1)
    axes.set_ylim(CHUNKS + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.set_xlabel("keys: chunk 0 to 7", fontsize=9)
    axes.set_ylabel("queries: chunk 0 to 7", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    # the same file each time, with text as text
    matplotlib.rcParams |= {"svg.hashsalt": "ds_seqpar", "svg.fonttype": "none", "font.family": "sans-serif"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.3), width_ratios=[1.75, 1], layout="constrained")
    draw_ranks(left)
    draw_work(right)
    target = Path(__file__).parent / "figures" / "one_sequence.svg"
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()

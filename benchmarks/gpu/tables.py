"""Tables and charts of files of figures, which `benchmarks.gpu` and `benchmarks.gpu.node` write.

    python -m benchmarks.gpu.tables FILE ...     # prints their pages
    python -m benchmarks.gpu.tables --docs       # writes those of benchmarks/gpu/figures into docs/gpu_benchmarks.md

The docs take figures of GPUs alone, never a stand-in's. While there is no file, they say "not yet measured".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import parser, table
from ds_seqpar.compiler.draw import new_figure, save

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_benchmarks.md"
MARK = "<!-- python -m benchmarks.gpu.tables --docs -->\n"
ABOUT = {"date": str, "stand_in": bool, "ranks": int, "device": str, "host": str, "commit": str, "versions": dict}
WAYS = ("forward", "backward")
Found = dict[str, Any]
Records = Sequence[dict[str, Any]]


def load(path: str | Path) -> Found:
    """A file of figures. Raises ValueError, in a sentence, for another one."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise ValueError(f"figures must be a JSON file that can be read; got {path}: {reason}") from None
    about = found.get("about") if isinstance(found, dict) else None
    wrong = [
        name for name, kind in ABOUT.items() if not isinstance(about, dict) or not isinstance(about.get(name), kind)
    ]
    if wrong or not isinstance(found.get("records"), list) or not isinstance(found.get("left_out"), list):
        lacking = f" without {', '.join(wrong)}" if wrong else " without records or left_out"
        raise ValueError(f"figures must be a file that benchmarks.gpu wrote; got {path}{lacking}, run it again")
    try:
        page(found)
    except (KeyError, TypeError, AttributeError) as reason:
        raise ValueError(
            f"figures must have all fields of their sections; got {path}, in which {reason} fails"
        ) from None
    return found


def write(found: Found, folder: Path) -> Path:
    """The JSON, the page and the chart of what was found; returns the JSON's path."""
    about = found["about"]
    kind = "stand-in" if about["stand_in"] else re.sub(r"\W+", "-", about["device"]).strip("-")
    count = f"-x{about['ranks']}" if about["ranks"] > 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{about['date']}-{kind}{count}.json"
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    chart(found, file.with_suffix(".png"))
    file.with_suffix(".md").write_text(f"{page(found)}\n![Chart]({file.stem}.png)\n", encoding="utf-8")
    return file


def page(found: Found, level: int = 1) -> str:
    """All tables as Markdown. level: of the first heading."""
    about, hashes = found["about"], "#" * level
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    count = f"{about['ranks']} x " if about["ranks"] > 1 else ""
    lines = [f"{hashes} {count}{about['device']}, {about['date']}\n"]
    if about["stand_in"]:
        lines.append("**A stand-in: small sizes on a CPU. It shows that the script runs; no figure is a GPU's.**\n")
    lines.append(f"Host: {about['host']}. Versions: {versions}. Commit {about['commit']}.\n")
    for name, (title, make) in SECTIONS.items():
        if rows := [one for one in found["records"] if one["section"] == name]:
            lines += [f"{hashes}# {title}\n", make(rows), ""]
    if found["left_out"]:
        lines += [f"{hashes}# Left out\n", *(f"- {sentence}" for sentence in found["left_out"]), ""]
    return "\n".join(lines)


def rate(one: dict[str, Any] | None) -> str:
    return "-" if one is None else f"{one['flops'] / 1e12:.3g} ({one['flops'] / one['ceiling']:.2f})"


def fastest(rows: Records) -> dict[str, dict[str, Any] | None]:
    """By way, of the contender that takes the least for both."""
    took: dict[str, float] = {}
    for one in rows:
        took[one["contender"]] = took.get(one["contender"], 0.0) + one["seconds"]
    best = min(took, key=lambda name: took[name], default=None)
    return {way: next((one for one in rows if (one["contender"], one["way"]) == (best, way)), None) for way in WAYS}


def by(rows: Records, *names: str) -> dict[Any, list[dict[str, Any]]]:
    """Rows that have the same in these fields, in the order in which they came."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for one in rows:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    return found


def kernels(rows: Records) -> str:
    lines = []
    for (mask, tokens), some in by(rows, "mask", "tokens").items():
        cells = [mask, f"{tokens:,}"]
        ours, bare = ([one for one in some if one["ours"] is own] for own in (True, False))
        for best in map(fastest, (bare, ours)):
            cells += [next((one["contender"] for one in best.values() if one), "-"), *map(rate, best.values())]
        ratios = [one["to_bare"] if one else None for one in best.values()]
        lines.append([*cells, " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    lines.sort(key=lambda cells: (list(MASKS).index(cells[0]), int(cells[1].replace(",", ""))))
    short = table(["mask", "tokens", "torch", *WAYS, "ours", *WAYS, "ours to torch"], lines)
    return (
        "TFLOP/s, in brackets the share of a product of large matrices; each time the fastest. The last column is "
        f"torch's time over ours, forward / backward.\n\n{short}\n\n{every_kernel(rows)}"
    )


MASKS = ("causal", "full", "window", "packed", "striped")


def every_kernel(rows: Records) -> str:
    """Each contender at the greatest length that was measured of a mask."""
    most = {mask: max(one["tokens"] for one in some) for (mask,), some in by(rows, "mask").items()}
    shown = [mask for mask in MASKS if mask in most]
    cells = []
    for (name,), some in by(rows, "contender").items():
        own = {(one["mask"], one["way"]): one for one in some if one["tokens"] == most[one["mask"]]}
        if own:
            cells.append([name, *(" / ".join(short(own.get((mask, way))) for way in WAYS) for mask in shown)])
    columns = [f"{mask}, {most[mask]:,}" for mask in shown]
    return f"Every kernel at the greatest length, TFLOP/s forward / backward:\n\n{table(['', *columns], cells)}"


def short(one: dict[str, Any] | None) -> str:
    return "-" if one is None else f"{one['flops'] / 1e12:.3g}"


def ranks(rows: Records) -> str:
    lines = [[name, count, f"{tokens:,}", *(f"{one['efficiency']:.3f}" for one in some)]
             for (name, count, tokens), some in by(rows, "contender", "ranks", "tokens").items()]  # fmt: skip
    about = "The slowest rank's part of causal attention: 1 / ranks of a dense call's time over its own."
    return f"{about}\n\n{table(['contender', 'ranks', 'tokens', *WAYS], lines)}"


def checkpoints(rows: Records) -> str:
    lines = [
        [f"{one['tokens']:,}", f"{one['plain']:.4g}", f"{one['ours']:.4g}", f"{one['speedup']:.2f}"] for one in rows
    ]
    return table(["tokens", "plain checkpoints, s", "ours, s", "speed-up"], lines)


def host(rows: Records) -> str:
    lines = [[one["what"], f"{one['seconds'] * 1e3:.2f}"] for one in rows]
    return table(["layers with", "host's ms a layer, forward and backward"], lines)


def longest(rows: Records) -> str:
    one = rows[0]
    about = (
        f"In {one['room'] / 2**20:,.0f} MiB beside parameters and gradients, {one['layers']} layers, vocabulary "
        f"{one['vocab']:,}. Each row has the features of all rows above it."
    )
    lines = []
    for one in rows:
        tokens = f"{one['tokens']:,}{' or more' * one['at_least']}" if one["tokens"] else "-"
        lines.append([one["feature"], tokens, f"{one['bytes_a_token'] / 1024:.1f}", number(one["seconds"])])
    return f"{about}\n\n{table(['features', 'tokens', 'KiB a token', 's a step'], lines)}"


def bus(rows: Records) -> str:
    lines = [[one["operation"], f"{one['bytes'] / 2**20:g}", f"{one['rate'] / 1e9:.3g}"] for one in rows]
    return table(["operation", "MiB a rank", "bus bandwidth, GB/s"], lines)


def overlap(rows: Records) -> str:
    units = {"seconds": 1e3, "to_first": 1.0, "alone": 1e3, "received": 2**-20, "transfer": 1e3, "hidden": 1.0}
    lines = [[one["contender"], *(number(one[name], unit) for name, unit in units.items())] for one in rows]
    about = (
        "Causal attention, forward and backward. *alone*: the same programs without transfers. *transfer*: what is "
        "received, at the measured rate of sends and receives. *hidden*: the share of that time which is not seen."
    )
    columns = ["contender", "ms", "first's time over it", "alone, ms", "MiB received", "transfer, ms", "hidden"]
    return f"{about} {rows[0]['tokens']:,} tokens.\n\n{table(columns, lines)}"


def number(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value * unit:.3g}"


def step(rows: Records) -> str:
    lines = [[one["contender"], f"{one['tokens']:,}", f"{one['seconds']:.3g}", f"{one['tokens'] / one['seconds']:,.0f}",
              f"{rows[0]['seconds'] / one['seconds']:.2f}", number(one["peak"], 2**-30)] for one in rows]  # fmt: skip
    return table(["contender", "tokens", "s", "tokens/s", "first's time over it", "GiB at the peak"], lines)


SECTIONS: dict[str, tuple[str, Callable[[Records], str]]] = {
    "kernels": ("Kernels", kernels), "ranks": ("A rank's part", ranks), "checkpoints": ("Checkpoints", checkpoints),
    "host": ("The host", host), "longest": ("The longest sequence", longest), "bus": ("Links", bus),
    "overlap": ("Hidden transfers", overlap), "step": ("A training step", step),
}  # fmt: skip


def chart(found: Found, file: Path) -> None:
    """One panel for each section that a picture says more of than a table."""
    drawn = [(name, rows) for name in PANELS if (rows := [x for x in found["records"] if x["section"] == name])]
    if not drawn:
        return
    height = (len(drawn) + 1) // 2
    figure = new_figure(11, 4 * height)
    for number_, (name, rows) in enumerate(drawn, 1):
        PANELS[name](figure.add_subplot(height, 2, number_), rows)
    about = found["about"]
    words = ": a stand-in, no figure is a GPU's" if about["stand_in"] else ""
    figure.suptitle(f"{about['device']}, {about['date']}{words}", y=1.02)
    figure.tight_layout()
    save(figure, file)


def _kernels_panel(axes: Any, rows: Records) -> None:
    shades = {False: "#c8c8c8", True: "#4878a8"}
    for own, label in ((False, "torch"), (True, "ours")):
        for way, line in zip(WAYS, ("-", "--"), strict=True):
            some = by([one for one in rows if one["ours"] is own and one["mask"] == "causal"], "tokens")
            best = [(tokens, one) for (tokens,), its in some.items() if (one := fastest(its)[way])]
            heights = [one["flops"] / one["ceiling"] for _, one in best]
            axes.plot([n for n, _ in best], heights, line, marker="o", color=shades[own], label=f"{label}, {way}")
    lengths = sorted({one["tokens"] for one in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    _finish(axes, "Causal attention", "tokens", "share of the ceiling")
    axes.legend(fontsize=8)


def _bars(axes: Any, bars: Iterable[tuple[str, float]], title: str, label: str) -> None:
    named = list(bars)
    axes.barh([name for name, _ in named], [value for _, value in named], color="#4878a8")
    for row, (_, value) in enumerate(named):
        axes.text(value, row, f" {value:,.0f}" if value >= 100 else f" {value:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    _finish(axes, title, label, "")
    axes.margins(x=0.18)


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0) if not axes.lines else axes.set_ylim(bottom=0)


PANELS: dict[str, Callable[[Any, Records], None]] = {
    "kernels": _kernels_panel,
    "ranks": lambda axes, rows: _bars(axes, (
        (f"{one['contender']}, {one['tokens']:,}, {one['way']}", one["efficiency"]) for one in rows),
        "A rank's part", "1 / ranks of a dense call over it"),
    "checkpoints": lambda axes, rows: _bars(axes, ((f"{one['tokens']:,} tokens", one["speedup"]) for one in rows),
                                            "Checkpoints", "plain's time over ours"),
    "longest": lambda axes, rows: _bars(axes, ((one["feature"], one["tokens"]) for one in rows),
                                        "The longest sequence", "tokens"),
    "overlap": lambda axes, rows: _bars(axes, ((one["contender"], one["to_first"]) for one in rows),
                                        "Attention", "the first's time over it"),
    "step": lambda axes, rows: _bars(axes, ((one["contender"], one["tokens"] / one["seconds"]) for one in rows),
                                     "A training step", "tokens/s"),
}  # fmt: skip


def docs(files: Iterable[Path]) -> str:
    """What the docs say of these files. Raises ValueError for one that cannot be read, or is a stand-in's."""
    pages = []
    for file in sorted(files):
        found = load(file)
        if found["about"]["stand_in"]:
            raise ValueError(f"the docs take figures of GPUs; got {file} of a stand-in, measure on a GPU")
        pages.append(page(found, level=3))
    return "\n".join(pages) or "Not yet measured: nobody has sent in a file.\n"


def main(given: list[str] | None = None) -> None:
    its = parser(__doc__)
    its.add_argument("files", nargs="*", type=Path, metavar="FILE")
    its.add_argument("--docs", action="store_true", help=f"write {PAGE.name}")
    args = its.parse_args(given)
    try:
        if args.docs:
            before, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
            PAGE.write_text(before + mark + docs(FIGURES.glob("*.json")), encoding="utf-8")
        print("\n".join(page(load(file)) for file in args.files), end="\n" * bool(args.files))
    except ValueError as reason:
        its.error(str(reason))


if __name__ == "__main__":
    main()

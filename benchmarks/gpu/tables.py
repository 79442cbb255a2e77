"""Format files with figures, which `benchmarks.gpu.first_hour` and its parts write, as tables.

    python -m benchmarks.gpu.tables FILE ...     # prints their pages
    python -m benchmarks.gpu.tables --docs       # writes those of benchmarks/gpu/figures into docs/benchmarks.md

The docs contain only figures of GPUs, never those of a stand-in. If there is no file, the docs state "not yet
measured".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import insert, parser, table
from ds_seqpar.analysis.draw import new_figure, save

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
MARK = "<!-- python -m benchmarks.gpu.tables --docs -->\n"
WAYS = ("forward", "backward")
MASKS = ("causal", "full", "window", "packed", "striped")
Found = dict[str, Any]
Records = Sequence[dict[str, Any]]


def load(path: str | Path) -> Found:
    """Read a file of figures. Raises ValueError for any other file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise ValueError(f"figures must be a JSON file that can be read; got {path}: {reason}") from None
    try:
        page(found)
    except (KeyError, TypeError, AttributeError) as reason:
        raise ValueError(
            f"figures must be a file that benchmarks.gpu wrote, with all fields; got {path}, in which {reason} fails, "
            "run it again"
        ) from None
    return found


def write(found: Found, folder: Path) -> Path:
    """Write the results as JSON, a Markdown page and a chart. Return the path of the JSON."""
    about = found["about"]
    kind = "stand-in" if about["stand_in"] else re.sub(r"\W+", "-", about["device"]).strip("-")
    count = f"-x{about['ranks']}" if about["ranks"] > 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{about['date']}-{kind}{count}.json"
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    new.replace(file)  # atomic, so that one of both files exists if the process ends
    chart(found, file.with_suffix(".png"))
    file.with_suffix(".md").write_text(f"{page(found)}\n![Chart]({file.stem}.png)\n", encoding="utf-8")
    return file


def page(found: Found, level: int = 1) -> str:
    """Return all tables as Markdown. `level` is the level of the first heading."""
    about, hashes = found["about"], "#" * level
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    count = f"{about['ranks']} x " if about["ranks"] > 1 else ""
    lines = [f"{hashes} {count}{about['device']}, {about['date']}\n"]
    if about["stand_in"]:
        lines.append("**A stand-in: small sizes on a CPU. It shows that the script runs; no figure is a GPU's.**\n")
    lines.append(f"Host: {about['host']}. Versions: {versions}. Commit {about['commit']}.\n")
    if ran := found.get("parts"):
        lines += [f"{hashes}# Parts\n", parts(ran), ""]
    for name, (title, make) in SECTIONS.items():
        if rows := of(found, name):
            lines += [f"{hashes}# {title}\n", make(rows), ""]
    if found["left_out"]:
        lines += [f"{hashes}# Left out\n", *(f"- {sentence}" for sentence in found["left_out"]), ""]
    return "\n".join(lines)


def of(found: Found, section: str) -> Records:
    return [one for one in found["records"] if one["section"] == section]


def by(rows: Records, *names: str) -> dict[Any, Records]:
    """Group rows by the given fields, in the order of their first occurrence."""
    keys = dict.fromkeys(tuple(one[name] for name in names) for one in rows)
    return {key: [one for one in rows if tuple(one[name] for name in names) == key] for key in keys}


def number(value: float | None, unit: float = 1.0) -> str:
    """Format a number with three significant digits, or all digits before the decimal point."""
    return "-" if value is None else f"{value * unit:,.0f}" if abs(value * unit) >= 100 else f"{value * unit:.3g}"


def columns(rows: Records, **named: str | tuple[str, float]) -> str:
    """Return a table of records. Each keyword maps a field to its column's title, optionally with a factor for its
    unit.
    """
    given = {field: (its, 1) if isinstance(its, str) else its for field, its in named.items()}
    cells = ([one[f] if isinstance(one[f], str) else number(one[f], unit) for f, (_, unit) in given.items()]
             for one in rows)  # fmt: skip
    return table([title for title, _ in given.values()], cells)


def fastest(rows: Records) -> dict[str, dict[str, Any] | None]:
    """Return the record of each direction for the contender with the minimum total time."""
    took = {name: sum(one["seconds"] for one in some) for (name,), some in by(rows, "contender").items()}
    best = min(took, key=lambda name: took[name], default=None)
    return {way: next((one for one in rows if (one["contender"], one["way"]) == (best, way)), None) for way in WAYS}


def rate(one: dict[str, Any] | None) -> str:
    return "-" if one is None else f"{one['flops'] / 1e12:.3g} ({one['flops'] / one['ceiling']:.2f})"


def parts(rows: Records) -> str:
    """Return a table of the parts of an hour, with their outcomes and results."""
    cells, failed = [], []
    for one in rows:
        told = "-"
        if tests := one.get("tests"):
            told = f"{tests['passed']} passed, {len(tests['failed'])} failed, {len(tests['skipped'])} skipped"
            failed += [f"- failed: {name}" for name in tests["failed"]]
        elif "figures" in one:
            told = f"{one['figures']} figures"
        cells.append([one["part"], one["result"], number(one["seconds"], 1 / 60), told])
    return "\n".join([table(["part", "result", "minutes", "found"], cells), *([""] if failed else []), *failed])


def kernels(rows: Records) -> str:
    """Return a table of the fastest kernels by mask and length, and all kernels at each mask's maximum length."""
    lines, cells = [], []
    for (mask, tokens), some in sorted(by(rows, "mask", "tokens").items(), key=lambda x: (MASKS.index(x[0][0]), x[0])):
        lines.append([mask, number(tokens)])
        for best in (fastest([one for one in some if one["ours"] is ours]) for ours in (False, True)):
            lines[-1] += [next((one["contender"] for one in best.values() if one), "-"), *map(rate, best.values())]
        lines[-1].append(" / ".join(number(one["to_bare"] if one else None) for one in best.values()))
    most = {mask: max(one["tokens"] for one in some) for (mask,), some in by(rows, "mask").items()}
    shown = [mask for mask in MASKS if mask in most]
    for (name,), some in by(rows, "contender").items():
        flops = {(one["mask"], one["way"]): one["flops"] for one in some if one["tokens"] == most[one["mask"]]}
        rates = (" / ".join(number(flops.get((mask, way)), 1e-12) for way in WAYS) for mask in shown)
        cells += [[name, *rates]] if flops else []
    short = table(["mask", "tokens", "torch", *WAYS, "ours", *WAYS, "ours to torch"], lines)
    return (
        "TFLOP/s, in brackets the share of a product of large matrices; each time the fastest. The last column is "
        f"torch's time over ours, forward / backward.\n\n{short}\n\nEvery kernel at the greatest length, TFLOP/s "
        f"forward / backward:\n\n{table(['', *(f'{mask}, {most[mask]:,}' for mask in shown)], cells)}"
    )


def ranks(rows: Records) -> str:
    lines = [[name, count, number(tokens), *(f"{one['efficiency']:.3f}" for one in some)]
             for (name, count, tokens), some in by(rows, "contender", "ranks", "tokens").items()]  # fmt: skip
    about = "The slowest rank's part of causal attention: 1 / ranks of a dense call's time over its own."
    return f"{about}\n\n{table(['contender', 'ranks', 'tokens', *WAYS], lines)}"


def longest(rows: Records) -> str:
    """Return a table by feature on one device, or by number of ranks."""
    one, by_ranks = rows[0], "ranks" in rows[0]
    about = (
        f"In {max(x['room'] for x in rows) / 2**20:,.0f} MiB a rank beside parameters and gradients, {one['layers']} "
        f"layers, vocabulary {one['vocab']:,}. "
    )
    about += "With tiles of the MLP and of the loss." if by_ranks else "Each row has the features of all rows above it."
    told = [{**one, "tokens": f"{one['tokens']:,}{' or more' * one['at_least']}"} for one in rows]
    words: dict[str, Any] = {
        **({"ranks": "ranks"} if by_ranks else {"feature": "features"}),
        "tokens": "tokens",
        "bytes_a_token": ("KiB a token and rank", 2**-10),
        "seconds": "s a step",
    }
    return f"{about}\n\n{columns(told, **words)}"


def overlap(rows: Records) -> str:
    about = (
        "Causal attention, forward and backward. *alone*: the same programs without transfers. *transfer*: what is "
        "received, at the measured rate of sends and receives. *hidden*: the share of that time which is not seen."
    )
    found = columns(
        rows, contender="contender", seconds=("ms", 1e3), to_first="first's time over it", alone=("alone, ms", 1e3),
        received=("MiB received", 2**-20), transfer=("transfer, ms", 1e3), hidden="hidden",
    )  # fmt: skip
    return f"{about} {rows[0]['tokens']:,} tokens.\n\n{found}"


def step(rows: Records) -> str:
    more = [{**one, "rate": one["tokens"] / one["seconds"], "to_first": rows[0]["seconds"] / one["seconds"]}
            for one in rows]  # fmt: skip
    return columns(more, contender="contender", tokens="tokens", seconds="s", rate="tokens/s",
                   to_first="first's time over it", peak=("GiB at the peak", 2**-30))  # fmt: skip


SECTIONS: dict[str, tuple[str, Callable[[Records], str]]] = {
    "kernels": ("Kernels", kernels),
    "ranks": ("A rank's part", ranks),
    "checkpoints": ("Checkpoints", lambda rows: columns(
        rows, tokens="tokens", plain="plain checkpoints, s", ours="ours, s", speedup="speed-up")),
    "host": ("The host", lambda rows: columns(
        rows, what="layers with", seconds=("host's ms a layer, forward and backward", 1e3))),
    "longest": ("The longest sequence", longest),
    "reach": ("The longest sequence of several ranks", longest),
    "bus": ("Links", lambda rows: columns(
        rows, operation="operation", bytes=("MiB a rank", 2**-20), rate=("bus bandwidth, GB/s", 1e-9))),
    "overlap": ("Hidden transfers", overlap),
    "step": ("A training step", step),
}  # fmt: skip


Length = Callable[[dict[str, Any]], float]
# section -> (fields that label bars, lengths of bars, title)
BARS: dict[str, tuple[tuple[str, ...], Length, str]] = {
    "kernels": (("contender", "tokens", "way"), lambda x: x["flops"] / x["ceiling"],
                "causal attention, share of a product of large matrices"),
    "ranks": (("contender", "tokens", "way"), lambda x: x["efficiency"],
              "a rank's part: 1 / ranks of a dense call's time over its own"),
    "checkpoints": (("tokens",), lambda x: x["speedup"], "plain checkpoints' time over ours"),
    "longest": (("feature",), lambda x: x["tokens"], "longest sequence, tokens"),
    "reach": (("ranks",), lambda x: x["tokens"], "longest sequence of several ranks, tokens"),
    "overlap": (("contender",), lambda x: x["to_first"], "attention, the first's time over it"),
    "step": (("contender",), lambda x: x["tokens"] / x["seconds"], "a training step, tokens/s"),
}  # fmt: skip


def chart(found: Found, file: Path) -> None:
    """Draw bars for each section with a chart; for kernels, only causal masks at the maximum length."""
    drawn = {name: rows for name in BARS if (rows := of(found, name))}
    causal = [one for one in drawn.get("kernels", []) if one["mask"] == "causal"]
    if causal:
        drawn["kernels"] = [one for one in causal if one["tokens"] == max(x["tokens"] for x in causal)]
    figure = new_figure(9, sum(1 + len(rows) / 4 for rows in drawn.values()) or 1)
    axes = figure.subplots(max(1, len(drawn)), squeeze=False, height_ratios=[4 + len(x) for x in drawn.values()] or [1])
    for (name, rows), (its,) in zip(drawn.items(), axes, strict=False):
        fields, length, title = BARS[name]
        words = ([one[f] if isinstance(one[f], str) else f"{one[f]:,} {f}" for f in fields] for one in rows)
        bars = its.barh([*map(", ".join, words)], [length(one) for one in rows])
        its.bar_label(bars, [number(length(one)) for one in rows], padding=3)
        its.margins(x=0.12)
        its.invert_yaxis()
        its.set_title(title, fontsize=10)
    figure.suptitle(
        f"{found['about']['device']}, {found['about']['date']}{', a stand-in' * found['about']['stand_in']}"
    )
    figure.tight_layout()
    save(figure, file)


def docs(files: Iterable[Path]) -> str:
    """Return the docs' text for files with figures. Raises ValueError for an invalid file or a stand-in's file."""
    pages = []
    for file in sorted(files):
        found = load(file)
        if found["about"]["stand_in"]:
            raise ValueError(f"the docs take figures of GPUs; got {file} of a stand-in, measure on a GPU")
        pages.append(page(found, level=3))
    return "\n".join(pages) or "Not yet measured: nobody has sent in a file.\n"


def main(given: list[str] | None = None) -> None:
    its = parser(__doc__, docs=False)
    its.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = its.parse_args(given)
    try:
        if args.docs:
            insert(PAGE, MARK, docs(FIGURES.glob("*.json")))
        print("\n".join(page(load(file)) for file in args.files), end="\n" * bool(args.files))
    except ValueError as reason:
        its.error(str(reason))


if __name__ == "__main__":
    main()

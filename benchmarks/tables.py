"""What all command lines share: options, Markdown tables on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Mode = TypeVar("Mode")
END = "<!-- end -->\n"  # of a table that a command writes into a page of the docs


def parser(description: str | None, **options: object) -> argparse.ArgumentParser:
    """One that shows the description as it is written. options: their defaults, as `add` takes them."""
    its = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add(its, **options)
    return its


def add(its: argparse.ArgumentParser, **options: object) -> None:
    """Options by their defaults: a bool is --NAME or --no-NAME, a list takes several, a tuple is of words to choose
    from, the first by default."""
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            its.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, list):
            its.add_argument(flag, nargs="+", type=type(default[0]), default=default, help=f"default: {default}")
        elif isinstance(default, tuple):
            its.add_argument(flag, choices=default, default=default[0], help=f"default: {default[0]}")
        else:
            its.add_argument(flag, type=type(default), default=default, help=f"default: {default}")


def mode(description: str | None, modes: Mapping[str, Mode]) -> Mode:
    """What the first word of the command line names; the other words, `sys.argv[2:]`, are for it."""
    if len(sys.argv) < 2 or sys.argv[1] not in modes:
        parser(description).parse_args(sys.argv[1:2])
        raise SystemExit(f"the first word must be one of {', '.join(modes)}")
    return modes[sys.argv[1]]


def line(cells: Iterable[object]) -> str:
    """One row."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]] = ()) -> str:
    return "\n".join([line(columns), f"|{'---|' * len(columns)}", *map(line, rows)])


def head(*columns: str) -> None:
    """Prints the first two lines of a table that takes long; `row` prints each of the others."""
    print(table(columns), flush=True)


def row(*cells: object) -> None:
    print(line(cells), flush=True)


def below(page: Path, mark: str) -> str:
    """Return what stands between the mark and the next END on a page of the docs."""
    return page.read_text(encoding="utf-8").partition(mark)[2].partition(END)[0]


def insert(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the mark and the next END on a page of the docs by this text."""
    before, mark, after = page.read_text(encoding="utf-8").partition(mark)
    page.write_text(before + mark + text + END + after.partition(END)[2], encoding="utf-8")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """From the least to the greatest."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def middle(values: Sequence[float], unit: float, form: str) -> list[str]:
    """Two cells: the median, and the quartiles around it."""
    if not values:
        return ["-", "-"]
    low, median, high = (value * unit for value in statistics.quantiles(values, n=4, method="inclusive"))
    return [f"{median:{form}}", f"{low:{form}}-{high:{form}}"]


def say(text: str) -> None:
    """Tells whoever watches how far it is."""
    print(text, file=sys.stderr, flush=True)

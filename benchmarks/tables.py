"""Helpers of all benchmark commands: options, Markdown tables on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end -->\n"  # end of a table that a command writes into the docs


def parser(description: str | None, **options: object) -> argparse.ArgumentParser:
    """Create a parser that preserves the layout of the description. `options` are names and defaults for `add`."""
    its = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add(its, **options)
    return its


def add(its: argparse.ArgumentParser, **options: object) -> None:
    """Add options with the given defaults.

    A bool becomes --NAME and --no-NAME, a list accepts several values, and a tuple lists choices, starting with the
    default.
    """
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


class OptionError(argparse.ArgumentTypeError, ValueError):
    """An invalid value of an option, whose message argparse shows to the user."""


def line(cells: Iterable[object]) -> str:
    """Format a table row."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]] = ()) -> str:
    return "\n".join([line(columns), f"|{'---|' * len(columns)}", *map(line, rows)])


def head(*columns: str) -> None:
    """Print the first two lines of a table that is filled in slowly; `row` prints the remaining lines."""
    print(table(columns), flush=True)


def stream(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table whose rows arrive slowly."""
    head(*columns)
    for cells in rows:
        row(*cells)


def row(*cells: object) -> None:
    print(line(cells), flush=True)


def below(page: Path, mark: str) -> str:
    """Return the text between a mark and the next END on a docs page."""
    return page.read_text(encoding="utf-8").partition(mark)[2].partition(END)[0]


def insert(page: Path, mark: str, text: str) -> None:
    """Replace the text between a mark and the next END on a docs page."""
    before, mark, after = page.read_text(encoding="utf-8").partition(mark)
    page.write_text(before + mark + text + END + after.partition(END)[2], encoding="utf-8")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the range from the minimum to the maximum."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def middle(values: Sequence[float], unit: float, form: str) -> list[str]:
    """Return two table cells: the median, and the quartiles."""
    if not values:
        return ["-", "-"]
    low, median, high = (value * unit for value in statistics.quantiles(values, n=4, method="inclusive"))
    return [f"{median:{form}}", f"{low:{form}}-{high:{form}}"]


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)

"""How benchmarks print: Markdown tables on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence


def line(cells: Iterable[object]) -> str:
    """One row."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*columns: str) -> str:
    """The first two lines of a table."""
    return f"{line(columns)}\n|{'---|' * len(columns)}"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([head(*columns), *map(line, rows)])


def row(*cells: object) -> None:
    """Prints a row at once, for tables that take long."""
    print(line(cells), flush=True)


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


def parser(description: str | None) -> argparse.ArgumentParser:
    """One that shows the description as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

"""Writes the tables of settings_reference.md, from the fields' types and docstrings: python docs/settings_tables.py"""

import json
import re
from pathlib import Path
from typing import Any

from ds_seqpar.cli.schema import properties

PAGE = Path(__file__).with_name("settings_reference.md")
TABLE = re.compile(r"(<!-- settings: (.*?) -->\n)(?:\|.*\n)*")  # names, then the table, which is made anew
WORDS = dict.fromkeys(("integer", "number"), "a number") | {
    "boolean": "`false`, `true`",
    "array": "a list",
    "string": "a text",
}


def with_tables(page: str) -> str:
    """Return a page whose lines `<!-- settings: size ulysses -->` are each followed by the table of these settings."""
    known = properties()

    def table(found: re.Match[str]) -> str:
        rows = [f"| `{name}` | {values(known[name])} | {known[name]['description']} |" for name in found[2].split()]
        return found[1] + "\n".join(["| setting | values | meaning |", "|---|---|---|", *rows, ""])

    return TABLE.sub(table, page)


def values(schema: dict[str, Any]) -> str:
    """Return the values of a setting in words, the default first."""
    words: list[str] = []
    for branch in schema.get("anyOf", [schema]):
        choices = branch.get("enum", [branch["const"]] if "const" in branch else [])
        pattern = [f'`"{branch["pattern"].removeprefix("^")}PATH"`'] if "pattern" in branch else []
        words += [f"`{json.dumps(choice)}`" for choice in choices] or pattern or [WORDS[branch["type"]]]
    default = f"`{json.dumps(schema['default'])}`"
    return ", ".join(dict.fromkeys([*([] if default in WORDS["boolean"] else [default]), *words]))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Print the JSON schema of a DeepSpeed JSON with our section, for editors, or write a page's tables of settings."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
from typing import Any

from pydantic import TypeAdapter

from ..compiler.schedules import settings
from ..config.settings import SequenceParallelConfig, setting_names
from ..errors import SECTION
from ..files import read_text, write_text

COUNT = {"type": "integer", "minimum": 1}
TABLE = re.compile(r"(<!-- settings: (.*?) -->\n)(?:\|.*\n)*")  # names, then the table, which is made anew
WORDS = {"integer": "a number", "boolean": "`false`, `true`", "array": "a list", "string": "a text"}


def add_parser(commands: Any) -> None:
    """Add `schema` to a parser's commands."""
    schema = commands.add_parser("schema", help="print the JSON schema of a DeepSpeed JSON, for editors")
    schema.add_argument("--page", metavar="FILE", help="write the tables of settings of this page anew instead")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.page is None:
        print(json.dumps(schema(), indent=1))
    else:
        write_text(args.page, with_tables(read_text(args.page, "a page of settings")), "a page of settings")


def schema() -> dict[str, Any]:
    """Return the JSON schema of a DeepSpeed JSON. Of DeepSpeed's own keys it says nothing."""
    section = {"type": "object", "properties": properties(), "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {SECTION: section},
    }


def properties() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each setting, with its documentation."""
    found = TypeAdapter(SequenceParallelConfig).json_schema()["properties"]
    docs = field_docs(SequenceParallelConfig)
    for name, (setting, schedule) in settings().items():
        labels = setting.option.get("metavar", ())
        shape = {"type": "array", "items": COUNT, "minItems": len(labels), "maxItems": len(labels)} if labels else COUNT
        found[name] = {"anyOf": [shape, {"const": "auto"}], "default": "auto"}
        docs[name] = f'For schedule "{schedule.name}": {setting.help}.'
    return {name: {key: x for key, x in found[name].items() if key != "title"} | {"description": docs[name]}
            for name in setting_names()}  # fmt: skip


def field_docs(form: type) -> dict[str, str]:
    """Return field -> the docstring under it, in one line."""
    (cls,) = ast.parse(inspect.getsource(form)).body
    assert isinstance(cls, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
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
        prefix = branch.get("pattern", "").removeprefix("^")
        words += [f"`{json.dumps(choice)}`" for choice in choices] or [
            (prefix and f'`"{prefix}PATH"`') or WORDS[branch["type"]]
        ]
    default = f"`{json.dumps(schema['default'])}`"
    return ", ".join(dict.fromkeys([*([] if default in WORDS["boolean"] else [default]), *words]))

"""Print the JSON schema for a DeepSpeed JSON that contains our section, for use in editors."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
from typing import Any

from pydantic import TypeAdapter

from ..base.errors import SECTION
from ..core.compiler.schedules import settings
from ..core.settings import SequenceParallelConfig, setting_names

COUNT = {"type": "integer", "minimum": 1}


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    print(json.dumps(schema(), indent=1))


def schema() -> dict[str, Any]:
    """Return the JSON schema for a DeepSpeed JSON, excluding DeepSpeed's own keys."""
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
    """Return the one-line docstring below each field of a dataclass, by field name."""
    (cls,) = ast.parse(inspect.getsource(form)).body
    assert isinstance(cls, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }

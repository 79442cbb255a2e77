"""The schema and the page of settings are those of the settings' types and docstrings."""

import json
from pathlib import Path

import pytest

from docs.settings_tables import PAGE, with_tables
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.cli.schema import properties, schema
from ds_seqpar.core.settings import SequenceParallelConfig

ROOT = Path(__file__).resolve().parents[2]


def test_the_schema_is_current():
    """Else: python -m ds_seqpar schema > ds_configs/ds_config.schema.json"""
    assert json.loads((ROOT / "ds_configs" / "ds_config.schema.json").read_text()) == schema()


def test_the_tables_are_current():
    """Else: python docs/settings_tables.py"""
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page
    assert [name for name in properties() if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", properties())
def test_what_the_schema_lists_is_taken(name):
    listed = properties()[name]
    for branch in listed.get("anyOf", [listed]):
        for value in branch.get("enum", [branch["const"]] if "const" in branch else []):
            SequenceParallelConfig(**{name: value})
    assert SequenceParallelConfig(**{name: listed["default"]}) == SequenceParallelConfig()
    with pytest.raises(ConfigError, match=rf"sequence_parallel\.{name} must"):
        SequenceParallelConfig(**{name: {}})

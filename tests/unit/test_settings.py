"""The ready settings are what the planner says, and each of their sections can be pasted."""

import json
import re

from benchmarks.planner.settings import HEAD, LENGTHS, MARK, NODES, PAGE, rows
from benchmarks.tables import below
from ds_seqpar.core.settings import SequenceParallelConfig

ROWS = below(PAGE, MARK).splitlines()


def test_a_row_is_what_the_planner_says():
    assert ROWS[0] == f"| {' | '.join(HEAD)} |"
    found = [f"| {' | '.join(row)} |" for row in rows("8B (Llama-3)", 32_768)]
    assert 1 <= len(found) == len(set(found) & set(ROWS))


def test_every_section_is_one():
    sections = [section for line in ROWS for section in re.findall(r"`(\{.*?\})`", line)]
    assert len(sections) >= len(NODES) * len(LENGTHS)
    for section in sections:
        SequenceParallelConfig.from_dict(json.loads(section))

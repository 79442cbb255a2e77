"""The settings page is what the planner says, and each of its sections can be pasted."""

import json
import re

from benchmarks.planner.settings import HEAD, MACHINES, NODES, PAGE, row
from ds_seqpar.config import SequenceParallelConfig

ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def test_a_row_is_what_the_planner_says():
    assert ROWS[0] == f"| {' | '.join(HEAD)} |"
    assert f"| {' | '.join(row('8B (Llama-3)', 'h100-ib', 32_768))} |" in ROWS


def test_every_section_is_one():
    sections = [section for line in ROWS for section in re.findall(r"`(\{.*?\})`", line)]
    assert len(sections) >= len(NODES) * len(MACHINES)
    for section in sections:
        SequenceParallelConfig.from_dict(json.loads(section))

"""The ready settings are what the planner says, and each of their sections can be pasted."""

import json
import re
import shlex

from benchmarks.planner.settings import HEAD, LENGTHS, MARK, NODES, PAGE, config_of, rows
from benchmarks.tables import below
from ds_seqpar.core.settings import SequenceParallelConfig
from tests.unit.commands import run

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = below(PAGE, MARK).splitlines()
MODEL = "8B (Llama-3)"


def test_a_row_is_what_the_planner_says():
    assert ROWS[0] == f"| {' | '.join(HEAD)} |"
    found = [f"| {' | '.join(row)} |" for row in rows(MODEL, 32_768)]
    assert 1 <= len(found) == len(set(found) & set(ROWS))


def test_the_command_for_a_million_tokens_prints_both_sizes_of_a_row(capsys, tmp_path):
    """With the settings of the row, and the lines that stand below the command."""
    block, lines = re.search(r"```bash\n(python -m ds_seqpar memory .*?)```\n\n```text\n(.*?)```", TEXT, re.S).groups()
    words = shlex.split(block.replace("\\\n", " "))[3:]
    (tmp_path / "config.json").write_text(json.dumps(config_of(MODEL).to_dict()), encoding="utf-8")
    printed, _, code = run(capsys, *(str(tmp_path) if word == "FOLDER" else word for word in words))
    assert code == 0
    assert lines in printed
    cells = next(line for line in ROWS if MODEL in line and "1,048,576" in line and "h100" in line).split(" | ")
    given = dict(word.split("=") for word in words if "=" in word)
    section = json.loads(cells[3].strip("`"))
    assert given == {name: value if isinstance(value, str) else json.dumps(value) for name, value in section.items()}
    rank, host = (f"{float(size):,.0f}" for size in re.findall(r"needs ([\d.]+) GiB", lines))
    assert [cell.strip(" |") for cell in cells[5:]] == [rank, host]
    choosing = PAGE.with_name("choosing_settings.md").read_text(encoding="utf-8")
    assert f"| `{cells[3].strip('`{}')}`: {rank} GiB on each GPU and {host} GiB" in choosing


def test_every_section_is_one():
    sections = [section for line in ROWS for section in re.findall(r"`(\{.*?\})`", line)]
    assert len(sections) >= len(NODES) * len(LENGTHS)
    for section in sections:
        SequenceParallelConfig.from_dict(json.loads(section))


def test_every_shipped_file_is_on_the_page():
    shipped = {path.name for path in (PAGE.parents[1] / "ds_configs").glob("*.json")}
    assert set(re.findall(r"^\| `(\w+\.json)` \|", TEXT, re.M)) == shipped - {"ds_config.schema.json"}

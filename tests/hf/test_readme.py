"""Every snippet of the README runs as it stands there."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_seqpar import SequenceParallelConfig
from tests.launch import free_port, on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
JSON = re.findall(r"```json\n(.*?)```", README, re.S)
BASH = re.findall(r"```bash\n(.*?)```", README, re.S)


def command_of(snippet):
    """The command in the snippet's first line, `# file.py: command`, and the file's name."""
    name, command = re.match(r"# (\S+): (.*)", snippet).groups()
    words = command.split()
    program = {"deepspeed": ["-m", "deepspeed.launcher.runner"], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    port = ["--master_port", str(free_port())]  # other tests may be launching too
    return name, [sys.executable, *program, *port, *words[1:]]


def written(snippet, folder):
    """The file that a snippet makes, beside the README's JSONs."""
    name, _ = command_of(snippet)
    (folder / name).write_text(snippet, encoding="utf-8")
    for file, content in zip(("ds_config.json", "ds_trainer.json"), JSON, strict=True):
        (folder / file).write_text(content, encoding="utf-8")
    return folder / name


def as_script(path):
    """Runs it as a launcher's process would; returns what it printed."""
    dist.destroy_process_group()  # it makes its own
    with contextlib.chdir(path.parent), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


SNIPPETS = pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: snippet.split(":")[0].removeprefix("# "))


@SNIPPETS
def test_python_snippet_runs(snippet, tmp_path):
    printed = on_ranks(4, as_script, written(snippet, tmp_path))
    if "print(" in snippet:
        assert re.search(r"loss \d+\.\d{4}", printed[0]), printed


@pytest.mark.whole
@SNIPPETS
def test_python_snippet_runs_by_its_command(snippet, tmp_path):
    written(snippet, tmp_path)
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = command_of(snippet)[1]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=threads)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    if "print(" in snippet:
        assert re.search(r"loss \d+\.\d{4}", ran.stdout), ran.stdout[-3000:]


def test_there_is_a_snippet_for_each_of_the_four_ways():
    assert [command_of(snippet)[0] for snippet in PYTHON] == ["train.py", "finetune.py", "evaluate.py", "own_model.py"]


@pytest.mark.parametrize("snippet", JSON)
def test_json_snippet_is_a_configuration(snippet):
    config = SequenceParallelConfig.from_deepspeed(json.loads(snippet))
    assert config.resolve(4, heads=(8, 2)).ulysses == 2


def test_commands_name_what_exists():
    commands = [line.split("#")[0].split() for block in BASH for line in block.strip().splitlines()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands:
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        for word in words:
            if word.endswith((".py", ".json")):
                assert (ROOT / word).is_file(), word
    assert len(commands) >= 3


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link

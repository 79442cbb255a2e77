"""The scripts of docs/preference_rl.md and docs/generation.md run as they stand there, and print what stands below."""

import re
import shutil
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer
from trl import DPOConfig, DPOTrainer

from tests import scripts
from tests.hf.test_readme import command_of
from tests.hf.trainers import fields, policy, texts
from tests.launch import on_trainer_ranks

pytestmark = pytest.mark.usefixtures("compiled")
ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("preference_rl.md", "generation.md")]
# (script, output) of each block whose first line is `# name: command`, if a block of output follows before other code
PAIRS = [
    pair
    for page in PAGES
    for pair in re.findall(r"```python\n(# \w+\.py: [^`]*?)```[^`]*?(?:`[^`\n]+`[^`]*?)*```text\n(.*?)```", page, re.S)
]
CASES = [pytest.param(*pair, id=command_of(pair[0])[0]) for pair in PAIRS]
QUICK = [x for x in CASES if x.id != "grpo.py"]
NUMBER = re.compile(r"\d+\.\d+")


def check(output, ran):
    """All printed lines, with decimals to a few thousandths."""
    assert not ran.failed, ran.stdout[-3000:] + ran.stderr[-3000:]
    begins = tuple({line.split(" ")[0] for line in output.splitlines()})
    found = [line for line in ran.stdout.splitlines() if line.startswith(begins)]
    assert [NUMBER.sub("#", line) for line in found] == [NUMBER.sub("#", line) for line in output.splitlines()]
    numbers = [[float(x) for x in NUMBER.findall(text)] for text in ("\n".join(found), output)]
    assert numbers[0] == pytest.approx(numbers[1], abs=3e-3)


def written(script, folder):
    """The script in a folder that has ds_configs, as a clone has."""
    shutil.copytree(ROOT / "ds_configs", folder / "ds_configs")
    file = folder / command_of(script)[0]
    file.write_text(script, encoding="utf-8")
    return file


@pytest.mark.parametrize(("script", "output"), QUICK)
def test_script_prints_what_the_page_shows(script, output, tmp_path):
    _, _, ranks = command_of(script)
    check(output, scripts.run(ranks, tmp_path, written(script, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(("script", "output"), CASES)
def test_script_prints_it_by_its_command(script, output, tmp_path):
    _, launcher, ranks = command_of(script)
    check(output, scripts.launch(launcher, ranks, tmp_path, written(script, tmp_path), threads=1))


def test_there_are_three_scripts():
    assert [command_of(script)[0] for script, _ in PAIRS] == ["dpo.py", "grpo.py", "long_prompt.py"]
    assert all(len(script.splitlines()) <= 35 for script, _ in PAIRS)


def reference_without_a_path(folder):
    """On a rank: trl's error for a model built from a config, without `ref_model`."""
    args = DPOConfig(str(folder), **{**fields(2), "deepspeed": None, "bf16": False})
    with pytest.raises(Exception, match="Repo id must use alphanumeric chars"):
        DPOTrainer(policy(), None, args, train_dataset=texts("DPO", 4, 1), processing_class=ByT5Tokenizer())
    return True


def test_trl_needs_a_reference_for_a_model_without_a_path(tmp_path):
    """As docs/troubleshooting.md says; the script of DPO passes one."""
    assert on_trainer_ranks(1, reference_without_a_path, tmp_path) == [True]

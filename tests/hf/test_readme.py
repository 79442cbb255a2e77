"""The scripts of the docs run as they stand there, and what the README shows is what they do."""

import json
import re
from pathlib import Path

import pytest

from ds_seqpar.core.settings import setting_names
from ds_seqpar.deepspeed.config import read_config
from hf_integration.look.facts import TESTED
from tests import scripts

pytestmark = pytest.mark.usefixtures("compiled")
ROOT = Path(__file__).parents[2]
README, GET_STARTED, OWN_LOOP, MODELS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/get_started.md", "docs/own_loop.md", "docs/models.md")
)
# name -> the script of the docs that begins with `# name: command`; loaders.py and decode.py have tests of their own
BY_NAME = {
    name: snippet
    for snippet, name in re.findall(r"```python\n(# (\S+\.py): .*?)```", GET_STARTED + OWN_LOOP + MODELS, re.S)
    if name in ("finetune.py", "train.py", "loop.py", "own_model.py")
}
JSON = dict(
    zip(("ds_trainer.json", "ds_config.json"), re.findall(r"```json\n(.*?)```", GET_STARTED, re.S), strict=True)
)
BASH = re.findall(r"```bash\n(.*?)```", README + GET_STARTED, re.S)
# what the README says that its Trainer script prints
PRINTED = re.search(r"```text\n(.*?)```", README, re.S)[1]


def command_of(snippet):
    """(name of its file, launcher, number of ranks) by the snippet's first line, `# file.py: command`."""
    name, launcher, option, ranks = re.match(r"# (\S+): (\S+) (--\S+) (\d) \1\n", snippet).groups()
    assert option == scripts.LAUNCHERS[launcher][-1]
    return name, launcher, int(ranks)


def written(snippet, folder):
    """The file that a snippet makes, beside the JSONs of the page."""
    name, *_ = command_of(snippet)
    (folder / name).write_text(snippet, encoding="utf-8")
    for file, content in JSON.items():
        (folder / file).write_text(content, encoding="utf-8")
    return folder / name


def check(snippet, ran):
    assert not ran.failed, ran.stdout[-3000:] + ran.stderr[-3000:]
    if "print(" in snippet:
        assert re.search(r"loss \d+\.\d{4}", ran.stdout), ran.stdout[-3000:]
    if snippet == BY_NAME["finetune.py"]:
        assert printed(ran.stdout) == pytest.approx(printed(PRINTED), rel=1e-3)


def printed(text):
    """Losses and gradient norms of the Trainer's lines, and the held-out loss, in their order."""
    return [float(x) for x in re.findall(r"(?:'loss': '|'grad_norm': '|held-out loss )([\d.]+)", text)]


SNIPPETS = [pytest.param(snippet, id=name) for name, snippet in BY_NAME.items()]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_snippet_runs(snippet, tmp_path):
    _, _, ranks = command_of(snippet)
    check(snippet, scripts.run(ranks, tmp_path, written(snippet, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_snippet_runs_by_its_command(snippet, tmp_path):
    _, launcher, ranks = command_of(snippet)
    check(snippet, scripts.launch(launcher, ranks, tmp_path, written(snippet, tmp_path), threads=1))


@pytest.mark.slow
def test_the_launcher_of_deepspeed_starts_it(tmp_path):
    """What needs no transformers: each process of a launch imports everything. It trains as one process does."""
    own_model = written(BY_NAME["own_model.py"], tmp_path)
    end, norms = "torch.distributed.destroy_process_group()", []
    # One write a rank: two ranks that print to one pipe cut each other's lines.
    say = 'print(f"\\nnorm {float(engine.get_global_grad_norm())}\\n", end="", flush=True)'
    own_model.write_text(BY_NAME["own_model.py"].replace(end, f"{say}\n{end}"))
    name = "ds_config.json"
    for ranks in (2, 1):
        content = re.sub('("size"): 4, ("ulysses"): 2', rf"\1: {ranks}, \2: {ranks}", JSON[name])
        (tmp_path / name).write_text(content)
        ran = scripts.launch("deepspeed", 2, tmp_path, own_model) if ranks == 2 else scripts.run(1, tmp_path, own_model)
        assert not ran.failed, ran.stdout[-3000:] + ran.stderr[-3000:]
        norms += [float(norm) for norm in re.findall(r"^norm (\S+)$", ran.stdout, re.M)]
    assert len(norms) == 3
    assert norms == pytest.approx([norms[-1]] * 3, rel=1e-5)


def test_there_is_a_snippet_for_each_of_the_four_ways():
    assert list(BY_NAME) == ["finetune.py", "train.py", "loop.py", "own_model.py"]
    assert [command_of(snippet)[0] for snippet in BY_NAME.values()] == list(BY_NAME)
    assert len(printed(PRINTED)) == 7


def test_the_diffs_lead_to_what_runs():
    """What the README's diffs add stands in the script of the Trainer, and on the page of the plain loop."""
    added = re.findall(r"^\+(.*)", "".join(re.findall(r"```diff\n(.*?)```", README, re.S)), re.M)
    assert len(added) == 5
    assert [line for line in added if line not in GET_STARTED and line not in OWN_LOOP] == []


@pytest.mark.parametrize("snippet", JSON.values(), ids=JSON)
def test_json_snippet_is_a_configuration(snippet):
    config = read_config(json.loads(snippet))
    assert config.resolve(4, heads=(8, 2)).ulysses == 2


def test_every_setting_is_on_the_page_of_settings():
    page = (ROOT / "docs" / "settings_reference.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert set(setting_names()) - named == set()


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
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_tests_that_are_named_are_there():
    named = re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)`", MODELS)
    assert len(named) > 5
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert not set(named) - there


def test_all_families_are_named():
    """One after another, as their owners write them."""
    (listed,) = re.findall(r"Llama, Mistral, [^|.:]*Cohere2", MODELS)
    names = {re.sub(r"\W", "", name).lower() for name in re.split(r", | and ", " ".join(listed.split()))}
    assert names == {family.replace("_", "") for family in TESTED}

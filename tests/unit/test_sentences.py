"""No sentence of the pages that are clean has more than 30 words.

`python tests/unit/test_sentences.py [FILE ...]` lists the longer ones of any page, or of all.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 30
CLEAN = (
    "README.md",
    "docs/quickstarts.md",
    "docs/settings_reference.md",
    "docs/supported.md",
    "docs/how_it_works.md",
    "docs/masks.md",
    "docs/refusals.md",
    "docs/schedules.md",
    "docs/gradient_contract.md",
    "docs/other_models.md",
    "docs/contributing.md",
    "docs/api.md",
    "docs/memory.md",
    "docs/launching.md",
    "docs/loaders.md",
    "docs/coming_from.md",
    "docs/whole.md",
    "docs/trainer.md",
    "docs/performance.md",
    "docs/measurements.md",
    "docs/planner.md",
    "docs/triangle.md",
    "docs/gpu_benchmarks.md",
)


def paragraphs(text):
    """Of a page: what is read as one piece. Code and pictures are none; each cell of a table and item of a list is."""
    text = re.sub(r"^```.*?^```|^(?: {4}[^\n]*\n)+", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=#|\||\s*[-*] |\s*\d+\. |\s*[a-z_, ]+: )", text):
        yield from block.strip().split("|") if block.strip().startswith("|") else [block]


def words_of(sentence):
    """Code in backquotes, and a message in quotation marks, count as one word each."""
    return [word for word in re.sub(r"`[^`]*`|\"[^\"]*\"", "code", sentence).split() if re.search(r"\w", word)]


def long_sentences(text):
    """[(words, sentence)] of those that are longer than MOST."""
    found = []
    for paragraph in paragraphs(text):
        for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+", " ".join(paragraph.split())):
            if (count := len(words_of(sentence))) > MOST:
                found.append((count, sentence))
    return found


@pytest.mark.parametrize("name", CLEAN)
def test_sentences_are_short(name):
    assert long_sentences((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("package", ["ds_seqpar", "hf_integration"])
def test_sentences_of_docstrings_are_short(package):
    long = set()
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                long |= {(file.name, said) for _, said in long_sentences(ast.get_docstring(node) or "")}
    assert long == set()


def test_a_long_sentence_is_found():
    long = " ".join(["word"] * (MOST + 1))
    table, code = f"| a cell | {long} |\n|---|---|", f"```\n{long}\n```"
    page = f"# Title\n\nA short one. {long}.\n\n{code}\n\n{table}\n\n- {long}\n- short\n"
    assert [count for count, _ in long_sentences(page)] == [MOST + 1] * 3


if __name__ == "__main__":
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in map(Path, sys.argv[1:] or pages):
        for count, sentence in long_sentences(path.read_text(encoding="utf-8")):
            print(f"{path.name}: {count} words: {sentence}")

"""Writes model_types.md, from what every causal type of transformers does on two ranks: python docs/model_types.py"""

import itertools
import sys
from pathlib import Path

import transformers

from tests.hf.conformance import CALLS, EXACT, KINDS, outcomes
from tests.hf.every_type import TYPES, UNBUILT, features

PAGE = Path(__file__).with_name("model_types.md")
TOGETHER = 12  # types that share one launch of ranks
HEAD = """# Every causal type of transformers

Made with transformers {version} by `python docs/model_types.py`: of each type that `AutoModelForCausalLM` knows, a
tiny model of its real config class on two ranks. "exact": the loss, the whole logits and the gradients of all
parameters are those of the plain model to 1e-5, for whole batches and for sharded ones. A packed batch is compared with
each document by itself. Elsewhere every rank raises the sentence in the last column. {exact} of {all} types are exact
in batches of all kinds.

| type | has | plain | padded | packed | otherwise |
|---|---|---|---|---|---|
"""
COLUMNS = {"plain": ("plain",), "padded": ("right", "left"), "packed": ("packed",)}


def version_of(page):
    """Return the version of transformers that a page was made with."""
    return page.partition("transformers ")[2].partition(" ")[0]


def cells_of(page):
    """Return {type: {column: whether it is exact}} of a page."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {
        row[0].strip("| `"): {name: cell == EXACT for name, cell in zip(COLUMNS, row[2:5], strict=True)} for row in rows
    }


def cells(found, kinds=KINDS):
    """Return {column: whether it is exact} of one type's outcomes. kinds: which were tried."""
    return {
        column: all(found[case] == EXACT for case in itertools.product(within, CALLS))
        for column, tried in COLUMNS.items()
        if (within := [kind for kind in tried if kind in kinds])
    }


def row(model_type, found):
    """Return one line of the table. found: the type's outcomes; None where it has no tiny model."""
    if found is None:
        return f"| `{model_type}` |  | - | - | - | not tried: {UNBUILT[model_type]} |"
    states = [EXACT if exact else "-" for exact in cells(found).values()]
    words = {}
    for (kind, _), outcome in found.items():
        if outcome != EXACT:
            words.setdefault(outcome.removeprefix("refused: ").replace("|", "\\|"), []).append(kind)
    whys = [
        why if len({*kinds}) == len(KINDS) else f"{', '.join(dict.fromkeys(kinds))}: {why}"
        for why, kinds in words.items()
    ]
    return f"| `{model_type}` | {', '.join(features(model_type))} | {' | '.join(states)} | {'; '.join(whys)} |"


def page():
    """Return the page of the transformers that is installed."""
    tried, found = [name for name in TYPES if name not in UNBUILT], {}
    for start in range(0, len(tried), TOGETHER):
        found |= outcomes(tried[start : start + TOGETHER])
        print(f"{len(found)} of {len(tried)}", file=sys.stderr)
    rows = [row(name, found.get(name)) for name in TYPES]
    exact = sum(all(cells(outcome).values()) for outcome in found.values())
    return HEAD.format(version=transformers.__version__, exact=exact, all=len(TYPES)) + "\n".join([*rows, ""])


if __name__ == "__main__":
    before, made = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", page()
    PAGE.write_text(made, encoding="utf-8")
    print("new types:", *sorted({*cells_of(made)} - {*cells_of(before)}))

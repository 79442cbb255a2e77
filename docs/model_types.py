"""Writes model_types.md, from what every causal and every multimodal type of transformers does on two ranks:
python docs/model_types.py [causal] [media] [--types TYPES, whose rows of "media" are made; "new": all without a row]"""

import argparse
import itertools
import sys
from pathlib import Path

import transformers

from tests.hf import images, media_types
from tests.hf.conformance import CALLS, EXACT, KINDS, outcomes
from tests.hf.every_type import TYPES, UNBUILT, features

PAGE = Path(__file__).with_name("model_types.md")
TOGETHER = 12  # types that share one launch of ranks
HEAD = """# Every causal and multimodal type of transformers

Made with transformers {version} by `python docs/model_types.py causal`: of each type that `AutoModelForCausalLM` knows,
a tiny model of its real config class on two ranks. "exact": the loss, the whole logits and the gradients of all
parameters are those of the plain model to 1e-5, for whole batches and for sharded ones. A packed batch is compared with
each document by itself. Elsewhere every rank raises the sentence in the last column. {exact} of {all} types are exact
in batches of all kinds.

| type | has | plain | padded | packed | otherwise |
|---|---|---|---|---|---|
"""
MEDIA_TITLE = "## Types that take images, videos or audio\n"
MEDIA_HEAD = """
Made with transformers {version} by `python docs/model_types.py media`: of each type that `AutoModelForImageTextToText`
or `AutoModelForMultimodalLM` knows, [a small copy](models.md) of its real config class on two ranks, with whole
batches: images of two sizes where it takes such, or audio where it takes no images; padded on the right and on the
left; packed, compared with each document by itself; and text alone. "divided": whose features ranks
[divide](images.md#each-image-is-computed-once) in these batches. {exact} of {all} types are exact in batches of all
kinds.

| type | takes | divided | media | padded | packed | text | otherwise |
|---|---|---|---|---|---|---|---|
"""
COLUMNS = {"plain": ("plain",), "padded": ("right", "left"), "packed": ("packed",)}
MEDIA_COLUMNS = {"media": ("media",), **COLUMNS, "text": ("text",)}
del MEDIA_COLUMNS["plain"]


def version_of(page):
    """Return the version of transformers that a table was made with."""
    return page.partition("transformers ")[2].partition(" ")[0]


def tables_of(page):
    """Return a page's table of causal types, and that of multimodal ones."""
    causal, _, media = page.partition(MEDIA_TITLE)
    return causal, media


def rows_of(table):
    """Return {type: the line} of a table."""
    return {line.split(" | ")[0].strip("| `"): line for line in table.splitlines() if line.startswith("| `")}


def cells_of(page):
    """Return {type: {column: whether it is exact}} of a page's causal types."""
    rows = {name: line.split(" | ")[2:5] for name, line in rows_of(tables_of(page)[0]).items()}
    return {
        name: {column: cell == EXACT for column, cell in zip(COLUMNS, row, strict=True)} for name, row in rows.items()
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
    why = otherwise([(kind, outcome) for (kind, _), outcome in found.items()], KINDS)
    return f"| `{model_type}` | {', '.join(features(model_type))} | {' | '.join(states)} | {why} |"


def otherwise(outcomes, kinds):
    """Return what the last column says of (kind, outcome)."""
    words = {}
    for kind, outcome in outcomes:
        if outcome != EXACT:
            words.setdefault(outcome.removeprefix("refused: ").replace("|", "\\|"), []).append(kind)
    whys = [
        why if len({*told}) == len(kinds) else f"{', '.join(dict.fromkeys(told))}: {why}" for why, told in words.items()
    ]
    return "; ".join(whys)


def causal_rows():
    """Return {type: the line} of causal types with the transformers that is installed."""
    tried, found = [name for name in TYPES if name not in UNBUILT], {}
    for start in range(0, len(tried), TOGETHER):
        found |= outcomes(tried[start : start + TOGETHER])
        print(f"{len(found)} of {len(tried)}", file=sys.stderr)
    return {name: row(name, found.get(name)) for name in TYPES}


def media_states(found):
    """Return a cell for each of `MEDIA_COLUMNS`. found: {kind: the type's outcome}."""
    return [EXACT if all(found[kind] == EXACT for kind in within) else "-" for within in MEDIA_COLUMNS.values()]


def media_row(model_type):
    """Return one line of the table of multimodal types."""
    if (why := media_types.UNTRIED.get(model_type)) is not None:
        return f"| `{model_type}` |  |  | - | - | - | - | not tried: {why} |"
    found = images.outcomes([model_type])[model_type]
    cells = [f"`{model_type}`", found[images.TAKES], found[images.DIVIDED], *media_states(found)]
    kinds = images.KINDS
    return f"| {' | '.join(cells)} | {otherwise([(kind, found[kind]) for kind in kinds], kinds)} |"


def written(head, rows, columns, version):
    """Return a table. rows: {type: the line}."""
    exact = sum(line.count(f" {EXACT} |") == len(columns) for line in rows.values())
    return head.format(version=version, exact=exact, all=len(rows)) + "\n".join([*map(rows.get, sorted(rows)), ""])


def write(causal, media):
    """Write the page. causal, media: (rows, the version of transformers they were made with)."""
    tables = written(HEAD, causal[0], COLUMNS, causal[1]), written(MEDIA_HEAD, media[0], MEDIA_COLUMNS, media[1])
    PAGE.write_text(f"\n{MEDIA_TITLE}".join(tables), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="*", default=["causal", "media"])
    parser.add_argument("--types", nargs="*", default=media_types.ALL)
    given, now = parser.parse_args(), transformers.__version__
    causal, media = ((rows_of(table), version_of(table)) for table in tables_of(PAGE.read_text(encoding="utf-8")))
    known = {*causal[0], *media[0]}
    if "causal" in given.tables:
        write(causal := (causal_rows(), now), media)
    new = [name for name in media_types.ALL if name not in media[0]]
    chosen = new if given.types == ["new"] else given.types
    for number, name in enumerate(chosen if "media" in given.tables else (), 1):
        # in processes of its own, which give memory back
        media = media[0] | {name: media_row(name)}, now
        write(causal, media)
        print(f"{number} of {len(chosen)}: {media[0][name]:.100}", file=sys.stderr)
    print("new types:", *sorted({*causal[0], *media[0]} - known))

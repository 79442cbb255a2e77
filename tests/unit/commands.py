"""Runs commands as users do, and reads what they answer to what does not fit; reads golden files."""

import json
from pathlib import Path

import pytest

from ds_seqpar.__main__ import main
from tests.words import missing

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}


def run(capsys, *words):
    """(what a command printed, what it said on stderr, exit code). None among the words is left out."""
    code = main([str(word) for word in words if word is not None])
    return *capsys.readouterr(), code


def with_options(given, words):
    """A command's words: `given` options, of which `words` change or add some. A value of None makes an option a flag,
    "-" leaves it out."""
    given = {**given, **dict(zip(words[::2], words[1::2], strict=True))}
    return [word for pair in given.items() if pair[1] != "-" for word in pair]


def assert_refused(ran, *words):
    """One sentence with these words on stderr, and code 2."""
    _, err, code = ran
    assert code == 2
    assert err.startswith("ds-seqpar: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert missing(err, *words) == []


def golden(name):
    """Cases by name, from golden/NAME.json. "by hand": how a hand computes what is there. To add one, add what is given
    with a result that was checked by hand."""
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text(encoding="utf-8"))


def assert_has(found, wanted, exact=()):
    """Numbers for programs have what a golden file has of them; exact: names of dicts of which it has all."""
    for name, x in wanted.items():
        if isinstance(x, dict) and name not in exact:
            assert_has(found[name], x, exact)
        else:
            assert found[name] == (pytest.approx(x) if isinstance(x, float) else x), name

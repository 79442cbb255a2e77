"""Runs commands as users do, and reads what they answer to what does not fit."""

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

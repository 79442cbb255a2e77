"""The Trainer says with which transformers it was tested, and what it says is what is installed and run."""

import configparser
import re
import warnings
from pathlib import Path

import pytest
import transformers

from ds_seqpar.base.errors import ConfigError
from hf_integration import NEWEST, OLDEST, check_transformers
from tests.dist.ranks import is_one_sentence

ROOT = Path(__file__).parents[2]


def test_a_transformers_that_is_too_old_is_refused():
    with pytest.raises(ConfigError, match=r"5\.18 to 5\.23.*got 5\.17\.3") as caught:
        check_transformers("5.17.3")
    assert is_one_sentence(str(caught.value))


def test_a_newer_one_is_warned_of_on_one_rank(monkeypatch):
    with pytest.warns(UserWarning, match="got 5.24.0.dev0"):
        check_transformers("5.24.0.dev0")
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("6.0.0", "5.18.0", "5.23.4", transformers.__version__):
            check_transformers(version)


def test_what_is_installed_and_run_is_what_is_said():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (needs,) = [line for line in config["options.extras_require"]["hf"].splitlines() if line.startswith("transformers")]
    assert needs == f"transformers >= {OLDEST[0]}.{OLDEST[1]}, < {NEWEST[0]}.{NEWEST[1] + 1}"
    newest = re.search(r"^transformers==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    oldest = re.search(r"^OLDEST := transformers==(\d+)\.(\d+)", (ROOT / "Makefile").read_text(), re.M)
    assert [tuple(map(int, found.groups())) for found in (oldest, newest)] == [OLDEST, NEWEST]

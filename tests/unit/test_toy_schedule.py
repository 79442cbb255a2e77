"""A schedule that is registered is a schedule: in the JSON, in Python, on the command line, and on virtual ranks.

What it says of itself is checked in test_registry.py, its groups on real ranks in tests/dist/test_transport.py.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from ds_seqpar.__main__ import main
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler import schedules
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import read_config
from ds_seqpar.testing import attention
from tests.oracle import assert_exact, dense, tensors
from tests.unit import toy_schedule
from tests.unit.plans import build, shaped
from tests.words import missing

Config = SequenceParallelConfig


@pytest.fixture(autouse=True)
def _registered():
    schedules.register(toy_schedule.SCHEDULE)
    yield
    schedules.remove("carousel")


def _message(call, *arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


# ---- configuration


def test_it_is_configured_in_the_json_as_in_python(tmp_path):
    path = tmp_path / "ds.json"
    section = {"size": 8, "ulysses": 2, "schedule": "carousel", "seats": 4}
    path.write_text(json.dumps({"train_batch_size": 8, "sequence_parallel": section}), encoding="utf-8")
    config = read_config(path)
    assert config == Config(**section) == dataclasses.replace(Config(**{**section, "seats": 2}), seats=4)
    assert hash(config) == hash(Config(**section))
    assert config != Config(**{**section, "seats": 2})
    assert config.seats == 4
    assert "seats=4" in repr(config)


def test_auto_is_its_own_choice():
    assert Config().seats == "auto"
    config = Config(schedule="carousel", ulysses=1).resolve(6)
    assert (config.seats, config.layout, config.cp_axes) == (2, "striped", (("seat", 2), ("car", 3)))
    assert Config(size=8, schedule="carousel", seats=4).resolve(8, (8, 8)).ulysses == 2


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"schedule": "carrousel"}, ("got 'carrousel'", "'carousel'")),
        ({"schedule": "rings"}, ("got 'rings'", "auto, carousel, distflash")),
        ({"seat": 2}, ("must be one that exists", "got 'seat'", "'seats'")),
        ({"seats": 0}, ("sequence_parallel.seats", '"auto"', "got 0")),
        ({"seats": 2}, ("sequence_parallel.seats", '"schedule": "carousel"', '"ring"')),
        ({"schedule": "carousel", "team": 2}, ("sequence_parallel.team", '"schedule": "wallfacer"', '"carousel"')),
        ({"schedule": "carousel", "seats": 3}, ("sequence_parallel.seats", "8 ranks", "got 3", "[1, 2")),
        (
            {"schedule": "carousel", "layout": "contiguous"},
            ("layout", '"striped", "zigzag" or "backwards"', '"carousel"'),
        ),
        ({"schedule": "mesh", "layout": "backwards"}, ("layout", '"mesh"', '"carousel"')),
        ({"schedule": "distflash", "layout": "zigzag"}, ("layout", '"contiguous"', '"carousel"')),
        ({"schedule": "ring", "rank_order": "collectives_intra"}, ("rank_order", '"collectives_intra"', '"carousel"')),
        ({"schedule": "carousel", "rank_order": ["car"]}, ("rank_order", "ulysses, seat, car", "got ['car']")),
    ],
    ids=str,
)
def test_errors_know_it(section, words):
    message = _message(lambda: Config.from_dict({"size": 8, "ulysses": 1, **section}).resolve(8))
    assert missing(message, *words) == []


def test_it_is_unknown_once_it_is_taken_off():
    schedules.remove("carousel")
    try:
        assert "got 'carousel'" in _message(Config, schedule="carousel")
        assert "got 'seats'" in _message(Config, seats=2)
        with pytest.raises(AttributeError):
            Config().seats  # noqa: B018
        assert "got 'backwards'" in _message(Config, layout="backwards")
    finally:
        schedules.register(toy_schedule.SCHEDULE)


# ---- command line


def test_the_command_line_helps_with_it(capsys):
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    (setting,) = toy_schedule.SCHEDULE.settings
    assert missing(said, "--seats SEATS", setting.help, "attention2d, carousel, distflash") == []
    assert f"carousel {toy_schedule.SCHEDULE.summary}" in said


def test_the_command_line_shows_it(capsys):
    words = ["show", "--schedule", "carousel", "--size", "6", "--seats", "3", "--full"]
    assert main([*words, "--rotate-forward", "kv", "--rotate-backward", "kv"]) == 0
    tables = [part.rsplit("\ncritical path: ", 1)[0] for part in capsys.readouterr().out.strip().split("\n\n")]
    plans = [build("carousel", shaped("carousel", 6, seats=3), direction) for direction in ("forward", "backward")]
    assert tables == [plan.table() for plan in plans]
    assert tables[0].startswith("carousel forward, 6 ranks\n")


@pytest.mark.parametrize(("layout", "overlap", "travels"), [
    ("striped", False, "kv"), ("zigzag", True, "q"), ("backwards", False, "auto"),
])  # fmt: skip
def test_it_equals_dense_attention(layout, overlap, travels):
    sides = {"rotate_forward": travels, "rotate_backward": travels}
    for size, ulysses, seats, causal in ((4, 1, 2, True), (6, 1, 3, False), (8, 2, "auto", True), (3, 1, 1, True)):
        config = Config(size=size, ulysses=ulysses, schedule="carousel", seats=seats, layout=layout, overlap=overlap,
                        **sides)  # fmt: skip
        inputs = tensors(1, 4 * size, (4, 2), 8)
        found = attention(config, *inputs, causal=causal)
        gradients = found.out, found.dq, found.dk, found.dv
        assert_exact(gradients, dense(*inputs, causal=causal), (size, ulysses, seats))


@pytest.mark.parametrize("travels", ["kv", "q"])
def test_the_pages_schedule_equals_dense_attention(travels):
    page = (Path(__file__).resolve().parents[2] / "docs" / "contributing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(block, {})
    try:
        config = Config(size=4, ulysses=1, schedule="backward_ring", rotate_forward=travels, rotate_backward=travels)
        inputs = tensors(1, 16, (4, 2), 8)
        found = attention(config, *inputs)
        assert_exact((found.out, found.dq, found.dk, found.dv), dense(*inputs), (travels,))
    finally:
        schedules.remove("backward_ring")

"""examples/finetune_llama.py: equal numbers for every shape, files, plain errors; by the deepspeed launcher too."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_seqpar.deepspeed.config import read_config
from tests import scripts
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune_llama.py"
CONFIGS = sorted((ROOT / "ds_configs").glob("demo*.json"))  # those of the Trainer are tested with its example


STEPS = 3
TEXT = Path(json.__file__).parent  # a few files: all of Python's own take seconds to be listed, on every rank


def run(ranks, config, folder, *more, steps=STEPS, seq_len=128, data=TEXT, launcher=None):
    """Runs the example on forked ranks, given what DeepSpeed's launcher gives, or by the launcher. data: None is the
    example's own."""
    words = [
        EXAMPLE, "--deepspeed_config", config, "--out", folder / "out",
        "--steps", steps, "--seq-len", seq_len, "--eval-sequences", 1, *(["--data", data] if data else []), *more,
    ]  # fmt: skip
    if launcher:
        return scripts.launch(launcher, ranks, folder, *words)
    return scripts.run(ranks, folder, *words, "--local_rank=LOCAL_RANK", environment={"OMP_NUM_THREADS": None})


def log_of(folder):
    return [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]


def config_with(folder, **section):
    content = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    content["sequence_parallel"] = section
    (folder / "ds.json").write_text(json.dumps(content))
    return folder / "ds.json"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder of a run on four ranks: Ulysses 2 x ring 2."""
    folder = tmp_path_factory.mktemp("shared")
    ran = run(4, config_with(folder, size=4, ulysses=2), folder)
    assert not ran.failed, ran.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process: the numbers that all others must show."""
    folder = tmp_path_factory.mktemp("alone")
    ran = run(1, config_with(folder, size=1), folder)
    assert not ran.failed, ran.stderr[-3000:]
    return log_of(folder)


@pytest.mark.slow
def test_without_data_it_reads_pythons_own(tmp_path):
    ran = run(1, config_with(tmp_path, size=1), tmp_path, steps=1, seq_len=16, data=None)
    assert not ran.failed, ran.stderr[-3000:]
    assert len(log_of(tmp_path)) == 1


MORE = [
    {"ulysses": 4},
    {"ulysses": 1},
    {"ulysses": 1, "schedule": "attention2d", "rows": 2, "rotate_backward": "q"},
    {"ulysses": 1, "schedule": "wallfacer", "team": 2, "overlap": True},
    {"ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2], "layout": "striped"},
    {"ulysses": 2, "schedule": "attention2d", "cols": 2, "rank_order": "collectives_intra"},
]


def assert_same(found, expected):
    assert len(found) == len(expected) == STEPS
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["grad_norm"] > 0


def test_losses_and_gradient_norms_are_those_of_one_process(shared, alone):
    assert_same(log_of(shared), alone)


@pytest.mark.slow  # test_readme.py has a launch of less; the example is given above what this one gives
def test_the_launcher_of_deepspeed_starts_it(alone, tmp_path):
    """What it hands to a process, and what the process prints there."""
    ran = run(2, config_with(tmp_path, size=2, ulysses=1), tmp_path, launcher="deepspeed")
    assert not ran.failed, ran.stderr[-3000:]
    assert_same(log_of(tmp_path), alone)
    assert "ulysses 1 x ring 2" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("section", MORE, ids=lambda section: "-".join(map(str, section.values())))
def test_losses_and_gradient_norms_of_every_schedule(section, alone, tmp_path):
    ran = run(4, config_with(tmp_path, size=4, **section), tmp_path)
    assert not ran.failed, ran.stderr[-3000:]
    assert_same(log_of(tmp_path), alone)


def test_writes_a_model_for_from_pretrained(shared):
    model = shared / "out" / "model"
    assert AutoTokenizer.from_pretrained(model).decode(AutoTokenizer.from_pretrained(model)("def f").input_ids[:5])
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.num_key_value_heads < loaded.config.num_attention_heads
    assert (shared / "out" / "loss.png").stat().st_size > 1000


def test_takes_a_model_and_a_text(shared, tmp_path):
    (tmp_path / "text.txt").write_text("All the world is a stage. " * 400)
    arguments = "--model", str(shared / "out" / "model"), "--gradient-checkpointing"
    config = ROOT / "ds_configs" / "demo_auto_bf16.json"
    ran = run(2, config, tmp_path, *arguments, steps=1, data=tmp_path / "text.txt")
    assert not ran.failed, ran.stderr[-3000:]
    assert log_of(tmp_path)[0]["loss"] < log_of(shared)[0]["loss"]  # it went on from the trained weights


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_ready_configuration_trains(config, tmp_path):
    ran = run(4, config, tmp_path, steps=6, seq_len=256)
    assert not ran.failed, ran.stderr[-3000:]
    losses = [line["loss"] for line in log_of(tmp_path)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_ready_configuration_is_complete(config):
    content = json.loads(config.read_text())
    assert "gradient_clipping" in content
    assert read_config(config).resolve(4, heads=(8, 2)).size in (2, 4)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"size": 3}, ("size 3 on 2 ranks",)),
        (None, ("absent.json: No such file",)),
    ],
)
def test_bad_settings_end_it_with_a_sentence(section, words, tmp_path):
    ran = run(2, config_with(tmp_path, **section) if section else tmp_path / "absent.json", tmp_path)
    assert ran.failed
    assert missing(ran.stdout + ran.stderr, *words) == []
    assert "Traceback" not in ran.stderr

"""No name of version 0.1 is lost: it is there, or is read with a warning that names the new one. names_of_0_1.json was
written by 0.1 itself."""

import argparse
import contextlib
import inspect
import json
import warnings
from pathlib import Path

import pytest

import ds_seqpar
import hf_integration
from ds_seqpar import SequenceParallel, SequenceParallelConfig, UnevenShards, renamed
from ds_seqpar.__main__ import main
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.machine import machine_of, presets
from tests.launch import on_each_of
from tests.unit.commands import LLAMA
from tests.words import missing

NAMES = json.loads((Path(__file__).parents[1] / "names_of_0_1.json").read_text(encoding="utf-8"))
# old setting -> (a value, the new value)
VALUES = {
    "forward": ("q", "q"),
    "backward": ("kv", "kv"),
    "placement": ("ring_intra", "ring_intra"),
    "travel_dtype": ("bf16", "bf16"),
    "head_stages": (2, 2),
    "keep_attention": (False, True),
    "keep_exchanged": (True, True),
    "window": (2, 2),
}


@pytest.fixture(autouse=True)
def _nothing_was_warned_of(monkeypatch):
    monkeypatch.setattr(renamed, "_warned", set())


@contextlib.contextmanager
def named(*words):
    """Exactly one warning comes, with these words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in found if one.category is FutureWarning]
    assert len(texts) == 1
    assert missing(texts[0], *words, "since 0.2") == []


def test_the_list_is_that_of_0_1():
    assert set(VALUES) == set(renamed.SETTINGS) <= set(NAMES["settings"])
    assert len(NAMES["members"]) == 5
    assert len(NAMES["json"]["plan"]) > 80


@pytest.mark.parametrize("package", [ds_seqpar, hf_integration])
def test_exports_are_there(package):
    assert [name for name in NAMES["exports"][package.__name__] if not hasattr(package, name)] == []


def lost(instance, names):
    """Those of the names that an instance has not, and those that it has only with a warning: (lost, warned of)."""
    gone, old = [], []
    for name in names:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if not hasattr(instance, name):
                gone.append(name)
        old += [name] * any(one.category is FutureWarning for one in found)
    return gone, old


def test_attributes_are_there():
    shards = UnevenShards([((0, 1, 4),), ((4, 1, 4),)])
    layout = BatchLayout(ds_seqpar.Mask(), shards)
    assert lost(SequenceParallelConfig().resolve(4), NAMES["members"]["SequenceParallelConfig"]) == (
        [],
        sorted([*renamed.SETTINGS, "own", "unsaid", "inner_axes"]),
    )
    assert lost(shards, NAMES["members"]["UnevenShards"]) == ([], ["parts"])
    assert lost(ds_seqpar.Mask(), NAMES["members"]["Mask"]) == ([], [])
    assert lost(layout, NAMES["members"]["Placement"]) == ([], [])


@on_each_of(1)
def test_attributes_of_a_sequence_parallel_are_there():
    assert lost(SequenceParallel(), NAMES["members"]["SequenceParallel"]) == ([], [])


# arguments that have other names: the old one is a keyword
KEYWORDS = {
    "UnevenShards": ["parts"],
    "SequenceParallel.shard_batches": ["window"],
    "SequenceParallelConfig": ["own", "unsaid"],
}


@pytest.mark.parametrize("call", NAMES["parameters"])
def test_arguments_are_there(call):
    first, *rest = call.split(".")
    found = getattr(ds_seqpar, first, None) or getattr(hf_integration, first)
    for name in rest:
        found = getattr(found, name)
    taken = inspect.signature(found).parameters
    assert [x for x in NAMES["parameters"][call] if x not in taken] == KEYWORDS.get(call, [])


def test_old_arguments_are_read_once_with_a_warning():
    runs = [[(0, 1, 2)], [(2, 1, 2)], [(4, 1, 2)], [(6, 1, 2)]]
    with named("UnevenShards", "'parts'", "'blocks_per_rank'"):
        shards = [UnevenShards(runs, parts=2) for _ in range(2)]
    assert shards == [UnevenShards(runs, blocks_per_rank=2)] * 2
    with pytest.raises(ConfigError, match="blocks_per_rank is the new name of parts"):
        UnevenShards(runs, blocks_per_rank=2, parts=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        UnevenShards(runs, blocks=2)
    with named("'own'", "'schedule_options'"):
        config = SequenceParallelConfig(own={"rows": 2})
    assert config == SequenceParallelConfig(rows=2)
    with named("'unsaid'", "'auto_fields'"):
        SequenceParallelConfig(memory="auto", unsaid=("mlp_tiles",))


@on_each_of(1)
def test_the_old_name_of_micro_batches_is_read():
    renamed._warned.clear()
    sp = SequenceParallel()
    tokens = ds_seqpar.parallel.torch.arange(8)[None]
    batches = [{"input_ids": tokens, "labels": tokens}]
    with named("shard_batches", "'window'", "'microbatches'"):
        (old,) = sp.shard_batches(window=batches)
    (new,) = sp.shard_batches(batches)
    assert old.keys() == new.keys()
    with pytest.raises(ConfigError, match="microbatches is the new name of window"):
        sp.shard_batches(batches, window=batches)


@pytest.mark.parametrize("old", VALUES)
def test_old_settings_are_read_once_with_a_warning(old):
    (value, new_value), new = VALUES[old], renamed.SETTINGS[old]
    with named(repr(old), repr(new)):
        configs = [SequenceParallelConfig.from_dict({old: value}), SequenceParallelConfig(**{old: value})]
    assert configs == [SequenceParallelConfig(**{new: new_value})] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert getattr(configs[0], old) == value
    with pytest.raises(
        ConfigError, match=f"sequence_parallel.{new} is the new name of sequence_parallel.{old}; got both"
    ):
        SequenceParallelConfig.from_dict({old: value, new: new_value})


def test_settings_that_kept_their_names_are_there():
    kept = set(NAMES["settings"]) - set(renamed.SETTINGS)
    assert kept <= SequenceParallelConfig().settings().keys()


def test_old_axes_are_read_with_a_warning():
    old = {"schedule": "double_ring", "ring_size": 2, "rank_order": ["windows", "ulysses", "inner_ring"]}
    with named("axis", "'windows'", "'outer_ring'"):
        config = SequenceParallelConfig(**old)
    assert config.rank_order == ("outer_ring", "ulysses", "inner_ring")


def parsers(monkeypatch):
    """Subcommand -> its parser's options, hidden ones too."""
    found = {}

    def parse(parser, *_):
        (commands,) = [x for x in parser._actions if isinstance(x, argparse._SubParsersAction)]
        for name, command in commands.choices.items():
            found[name] = {option for action in command._actions for option in action.option_strings}
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(SystemExit):
        main([])
    return found


def test_commands_take_their_old_options(monkeypatch):
    found = parsers(monkeypatch)
    assert [name for name, options in NAMES["commands"].items() if set(options) - found[name]] == []


def test_show_reads_its_old_options_with_a_warning(capsys):
    with named("'head_stages'", "'head_chunks'"):
        assert main(["show", "--ulysses", "2", "--head-stages", "2"]) == 0
    old = capsys.readouterr().out
    assert main(["show", "--ulysses", "2", "--head-chunks", "2"]) == 0
    assert capsys.readouterr().out == old
    assert main(["show", "--ulysses", "2", "--head-chunks", "2", "--head-stages", "2"]) == 2
    assert missing(capsys.readouterr().err, "head_chunks is the new name", "got both") == []


def keys(value, before=""):
    """The paths of all keys of a JSON value; [] for the items of a list."""
    if isinstance(value, list):
        return {path for item in value for path in keys(item, f"{before}[].")}
    if not isinstance(value, dict):
        return set()
    return {path for key, item in value.items() for path in ({before + key} | keys(item, f"{before}{key}."))}


@pytest.mark.parametrize("command", ["plan", "memory"])
def test_json_has_its_old_keys(command, capsys, tmp_path):
    """But for settings, which a section has under their new names."""
    model = {**LLAMA, "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "num_attention_heads": 16}
    numbers = {"intermediate_size": 2816, "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(model | numbers))
    asked = ["--model", str(tmp_path), "--seq-len", "65536", "--nodes", "1", "--machine", "h100-ib", "--json"]
    assert main([command, *asked]) == 0
    found = keys(json.loads(capsys.readouterr().out))
    wanted = set()
    for path in NAMES["json"][command]:
        before, _, last = path.rpartition(".")
        in_section = before.endswith(("section", "sequence_parallel"))
        wanted.add(f"{before}.{renamed.SETTINGS.get(last, last)}" if in_section else path)
    assert wanted - found == set()


def test_a_machines_file_has_its_old_keys():
    content = presets()["modest"]
    new_names = set(NAMES["machine"]) - {"spare"} | {"reserve_fraction"}
    assert {name for name in new_names if "." not in name} <= content.keys() | {"kernels", "peak"}
    old = {("spare" if name == "reserve_fraction" else name): value for name, value in content.items()}
    with named("'spare'", "'reserve_fraction'"):
        assert machine_of("modest", old) == machine_of("modest", content)
    with pytest.raises(ConfigError, match="spare does not exist"):
        machine_of("modest", content | {"spare": 0.1})


@pytest.mark.parametrize("where", ["--set", "--config"])
def test_commands_read_old_settings(where, capsys, tmp_path):
    """And plan with them, whatever their names: `head_chunks` 2 is fixed, not chosen."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    asked = ["--model", str(tmp_path), "--seq-len", "4096", "--ranks", "4", "--machine", "h100-ib", "--json"]
    found = []
    for name in ("head_stages", "head_chunks"):
        (tmp_path / "ds.json").write_text(json.dumps(content | {"sequence_parallel": {name: 2}}))
        given = ["--set", f"{name}=2"] if where == "--set" else ["--config", str(tmp_path / "ds.json")]
        with named("'head_stages'", "'head_chunks'") if name == "head_stages" else contextlib.nullcontext():
            assert main(["plan", *asked, *given]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert {one["section"].get("head_chunks", 1) for one in found[0]["ranked"]} == {2}

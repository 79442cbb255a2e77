"""Settings: what is accepted, how "auto" is resolved, and what each error says."""

import copy
import dataclasses
import json
import math
import pickle

import pytest

from ds_seqpar.base.errors import ConfigError, SeqParError
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.heads import even_ulysses, legal_ulysses
from ds_seqpar.core.runtime.kernels import KERNELS as KERNEL_OBJECTS
from ds_seqpar.core.settings import KERNELS, SequenceParallelConfig
from ds_seqpar.deepspeed.config import read_config
from tests.words import missing

Config = SequenceParallelConfig


def _message(call, *arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


KEYS = (
    "size", "ulysses", "schedule", "layout", "rotate_forward", "rotate_backward", "overlap", "rank_order",
    "comm_dtype", "kernel", "head_chunks", "recompute_attention", "save_qkv_after_all_to_all", "offload_checkpoints",
    "mlp_tiles", "loss_tiles", "seq_len", "tokens_per_rank",
    "machine", "memory", "agreement", "recurrent_layers", "latent_attention", "shared_prompts", "divide_media", "prove",
    "doctor", "max_ctas", "watchdog", "watchdog_s", "check_finite",
    "rows", "cols", "ring_size", "mesh", "team", "strips",
)  # fmt: skip


def test_names_in_the_config_are_the_names_that_exist():
    assert set(KERNELS) == {"auto", *KERNEL_OBJECTS}


def test_a_config_is_frozen_and_its_error_a_value_error():
    for name in ("size", "ring_size"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(Config(ring_size=2), name, 4)
    assert issubclass(ConfigError, SeqParError)
    assert issubclass(SeqParError, ValueError)


SIZES = (
    "size", "ulysses", "head_chunks", "mlp_tiles", "loss_tiles", "seq_len", "max_ctas", "ring_size", "rows", "cols",
    "team",
)  # fmt: skip
LAYOUTS = ("auto", "balanced", "contiguous", "striped", "zigzag")
# field -> values that are wrong for it, and what the sentence has beside both
WRONG = {
    **dict.fromkeys(SIZES, ((True, False, 0, -1, 2.0, "2", None, [2], "Auto"), ['"auto"'])),
    **dict.fromkeys(("schedule", "layout", "kernel"), ((3, None, True, "", ["ring"], {"name": "ring"}), [])),
    "mesh": (([2, 2], [2, 2, 1, 1], [2, 2, 0], [2, 2, True], [2, 2, "1"], "2x2x1", 4, None), ["[a, b, R]"]),
    "overlap": ((0, 1, "true", None, "yes"), []),
    "comm_dtype": (("float32", None), ["bf16", "fp32"]),
    "rank_order": (([1, 2], [["ring"]], ["ring", None]), []),
}
# the same of words that are nearly right
MISSPELT = [
    ("schedule", "rings", ["auto", "ring", "'ring'"]),
    ("layout", "zig-zag", [*LAYOUTS, "'zigzag'"]),
    ("layout", "stripes", [*LAYOUTS, "'striped'"]),
    ("memory", "Auto", ["given", "auto", "'auto'"]),
    ("kernel", "cpuflash", ["auto", "cpu_flash", "cuda_flash", "flash_attn", "reference", "'cpu_flash'"]),
    ("rotate_forward", "k", ["'kv'"]),
    ("rotate_backward", "k", ["'kv'"]),
    ("rank_order", "ring", ["'ring'"]),
    ("comm_dtype", "fp16", ["'bf16'"]),  # gradients of a mean loss over 16,384 tokens were 33 % off in it
    ("rank_order", "ring_inter", ["collectives_intra", "'ring_intra'"]),
]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [*((field, value, words) for field, (values, words) in WRONG.items() for value in values), *MISSPELT],
    ids=str,
)
def test_a_wrong_value_is_named_with_what_there_is(field, value, words):
    assert missing(_message(Config, **{field: value}), f"sequence_parallel.{field}", f"got {value!r}", *words) == []


def test_an_unknown_key_is_answered_with_the_nearest_or_all_keys():
    assert tuple(Config().settings()) == KEYS
    message = _message(Config.from_dict, {"ulyses": 2})
    assert missing(message, "got 'ulyses'", "did you mean 'ulysses'") == []
    assert len(message) < 100  # the nearest one, and not all that there are
    assert _message(Config, ulyses=2) == message
    assert missing(_message(Config.from_dict, {"cosl": 2}), "got 'cosl'", "'cols'") == []
    assert "got 'own'" in _message(Config.from_dict, {"own": {"ring_size": 2}})
    assert missing(_message(Config.from_dict, {"qqqq": 2}), ", ".join(KEYS), "got 'qqqq'") == []
    assert "got 5" in _message(Config.from_dict, {5: 2})


def test_from_a_deepspeed_dict_or_file(tmp_path):
    section = {"size": 4, "ulysses": 2, "schedule": "ring", "layout": "striped", "kernel": "reference"}
    whole = {"train_batch_size": 8, "sequence_parallel": section}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    for source in (whole, path, str(path)):
        assert read_config(source) == Config(**section)
    assert read_config({"train_batch_size": 8}) == Config()


MISSPELT_SECTIONS = ("sequence_paralel", "SequenceParallel", "sequence-parallel", "seq_parallel", "sp")
SECTIONS = [
    *(({"sequence_parallel": section}, f"got {section!r}") for section in ([], 4, "ring", None, True)),
    # it was passed over, and the run took every default
    *(({"train_batch_size": 8, key: {"size": 4}}, f'got "{key}"') for key in MISSPELT_SECTIONS),
    ({"zero_optimization": {"stage": 3, "sequence_parallel": {"size": 4}}}, 'inside "zero_optimization"'),
]


@pytest.mark.parametrize(("content", "value"), SECTIONS, ids=str)
def test_a_wrong_section_is_named(content, value):
    assert value in _message(read_config, content)


def test_keys_of_deepspeed_that_are_near_are_no_misspelling():
    whole = {"sequence_parallel_size": 1, "seq_parallel_communication_data_type": "fp32", "data_parallel_size": 2}
    others = {"tensor_parallel": {}, "expert_parallel": {}, "pipeline": {}, "sequence_parallel": {"size": 4}}
    assert read_config({**whole, **others}) == Config(size=4)


FILES = [
    ('{\n  "train_batch_size": 8,\n  "sequence_parallel": {"size": 4,}\n}\n', "line 3 column "),
    ('{"sequence_parallel": {"size": 2, "ulysses": 2, "size": 4}}', '"size" twice'),  # the last one won
    (b'{"a": "\xff"}', "UTF-8"),
    ("[1, 2]", "holds a list"),
    (None, "No such file"),
]


@pytest.mark.parametrize(("content", "value"), FILES, ids=str)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, value):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for given in (path, str(path)):
        assert missing(_message(read_config, given), str(path), value) == []
    assert f"{tmp_path}: Is a directory" in _message(read_config, tmp_path)


PLACES = ('"ring"', '"collectives_intra"', '"ulysses_intra"', '"ring_intra"', '"attention2d"', '"mesh"', '"wallfacer"')
# settings, ranks and heads that do not go together, and what the sentence has
# deepspeed#8291: heads split [4, 4, 4, 0] and a hang; verl#850, prime-rl#3042: kv heads fewer than ranks
UNFIT = [
    ({"size": 3}, (8,), ["size 3", "8 ranks", "[1, 2, 4, 8]"]),
    ({"size": 16}, (8,), ["size 16", "8 ranks", "[1, 2, 4, 8]"]),
    ({"size": 4, "ulysses": 3}, (8,), ["ulysses 3", "size 4", "[1, 2, 4]"]),
    ({"size": 8, "ulysses": 8}, (8, (6, 2)), ["ulysses 8", "6 query", "2 key/value", "[1, 2, 4]"]),
    ({"size": 12, "ulysses": 12}, (12, (7, 7)), ["ulysses 12", "7 query", "[1, 2, 3, 4, 6]"]),
    ({"size": 4, "schedule": "distflash", "layout": "zigzag"}, (4,), ['"contiguous"', 'got "zigzag"']),
    ({"size": 4, "schedule": "attention2d", "rows": 3}, (4,), ["rows 3", "(rows, cols)"]),
    ({"size": 4, "schedule": "mesh", "mesh": [2, 2, 2], "ulysses": 1}, (4,), ["4 CP ranks", "[2, 2, 2]"]),
    ({"size": 2, "head_chunks": 8}, (2, (8, 4)), ["head_chunks", "got 8"]),
    ({"size": 2, "ulysses": 2, "head_chunks": 2}, (2, (2, 2)), ["head_chunks", "got 2"]),
    ({"size": 2}, (2, (6, 4)), ["key/value heads", "6 and 4"]),
    ({"size": 2, "ulysses": 2}, (2, (6, 0)), ["key/value heads", "(6, 0)"]),
    ({"size": 8, "schedule": "mesh", "mesh": [3, 1, 1]}, (8, (8, 2)), ["mesh (3, 1, 1)", "size 8", "[1, 2, 4, 8]"]),
    ({"size": 8, "rank_order": "collectives_intra"}, (8,), ["sequence_parallel.rank_order", *PLACES]),
    *(
        ({"size": 8, "rank_order": axes}, (8,), ["sequence_parallel.rank_order", "axes ulysses, ring", f"got {axes}"])
        for axes in (["ring"], ["ring", "x"], ["ring", "ulysses", "x"], ["ring", "ring", "ulysses"], [])
    ),
]


@pytest.mark.parametrize(("settings", "ranks", "words"), UNFIT, ids=str)
def test_what_does_not_go_together_is_answered_with_what_does(settings, ranks, words):
    assert missing(_message(Config(**settings).resolve, *ranks), *words) == []


@pytest.mark.parametrize("heads", [(33, 33), (25, 5), (14, 2), (40, 10), (7, 1), (24, 6)])
def test_heads_that_ulysses_does_not_divide_are_taken_where_it_is_given_and_never_chosen(heads):
    assert Config(size=4, ulysses=4).resolve(4, heads).ulysses == 4
    assert Config(size=4).resolve(4, heads).ulysses == max(even_ulysses(4, *heads)) < 4


def test_even_degrees_are_those_that_share_heads_equally():
    for size in range(1, 25):
        for q_heads, kv_heads in ((24, 24), (24, 6), (24, 2), (24, 1), (96, 24), (12, 4), (33, 33)):
            even = even_ulysses(size, q_heads, kv_heads)
            assert set(even) <= set(legal_ulysses(size, q_heads))
            for u in range(1, size + 1):
                # equally: each of u Ulysses ranks has as many query heads, and they read whole kv heads or one of them
                queries = [set(range(m * q_heads // u, (m + 1) * q_heads // u)) for m in range(u)]
                keys = [{h * kv_heads // q_heads for h in mine} for mine in queries]
                equal = len({len(x) for x in queries}) == 1 and len({len(x) for x in keys}) == 1
                split = sum(len(x) for x in keys) in (kv_heads, u)
                assert (u in even) == (size % u == 0 and q_heads % u == 0 and equal and split), (size, u, kv_heads)


def test_auto_is_resolved():
    chosen = Config().resolve(8)
    assert chosen == Config(size=8, ulysses=1, schedule="ring", layout="balanced")
    assert Config().resolve(8, (24, 2)).ulysses == 8
    assert Config().resolve(8, (6, 2)).ulysses == 2
    assert Config().resolve(1, (6, 2)) == Config(size=1, ulysses=1, schedule="ring", layout="balanced")
    given = Config(size=4, ulysses=2, schedule="ring", layout="striped", kernel="reference")
    assert given.resolve(8, (6, 2)) == given


def test_resolving_again_changes_nothing():
    once = Config().resolve(8, (24, 6))
    assert once.resolve(8, (24, 6)) == once


# ---- what a schedule's own fields may be


def test_a_schedules_own_settings_are_read_compared_and_replaced_as_the_others():
    config = Config(schedule="attention2d", rows=2)
    assert (config.rows, config.cols, config.ring_size) == (2, "auto", "auto")
    assert config != Config(schedule="attention2d", rows=4)
    assert config == Config(schedule="attention2d", rows=2, cols="auto")
    assert dataclasses.replace(config, rows=4, cols=1) == Config(schedule="attention2d", cols=1, rows=4)
    assert dataclasses.replace(config, rows="auto") == Config(schedule="attention2d")
    assert config.resolve(8) == dataclasses.replace(config, size=8, ulysses=1, layout="balanced", cols=4)
    assert Config(**config.settings()) == config
    assert "rows=2" in repr(config)
    assert eval(repr(config), {"SequenceParallelConfig": Config}) == config
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert again == config
        assert hash(again) == hash(config)
    with pytest.raises(AttributeError, match="no attribute 'height'"):
        config.height  # noqa: B018


def test_ulysses_auto_leaves_a_head_in_every_stage():
    for head_chunks, ulysses in ((1, 8), (2, 4), ("auto", 8)):
        assert Config(size=16, head_chunks=head_chunks).resolve(16, (8, 2)).ulysses == ulysses


def test_a_list_in_json_is_as_good_as_a_tuple():
    config = Config(schedule="mesh", mesh=[2, 1, 2], rank_order=["x", "ulysses", "y", "z"])
    assert config == Config(schedule="mesh", mesh=(2, 1, 2), rank_order=("x", "ulysses", "y", "z"))
    assert hash(config) == hash(Config(schedule="mesh", mesh=(2, 1, 2), rank_order=("x", "ulysses", "y", "z")))


@pytest.mark.parametrize(
    ("field", "value", "owner"),
    [
        ("ring_size", 2, "double_ring"),
        ("rows", 2, "attention2d"),
        ("cols", 2, "attention2d"),
        ("team", 2, "wallfacer"),
        ("mesh", (2, 2, 1), "mesh"),
    ],
)
def test_a_field_of_another_schedule_is_refused(field, value, owner):
    for schedule in ("auto", *SCHEDULES):
        config = Config(schedule=schedule, **{field: value})
        if schedule == owner:
            assert config.resolve(4).schedule == owner
        else:
            chosen = "ring" if schedule == "auto" else schedule
            words = (f"sequence_parallel.{field}", f'"schedule": "{owner}"', f'"{chosen}"')
            assert missing(_message(config.resolve, 4), *words) == []


def test_inner_axes_of_every_schedule_hold_the_inner_ranks():
    for schedule, its in SCHEDULES.items():
        worlds = ((1, 1), (4, 1), (8, 2), (16, 1), (12, 3), (7, 1), (12, 2))
        for size, ulysses in (world for world in worlds if list(its.shapes(world[0] // world[1]))):
            config = Config(size=size, ulysses=ulysses, schedule=schedule).resolve(size)
            assert math.prod(side for _, side in config.cp_axes) == size // ulysses, (schedule, size)


@pytest.mark.parametrize(
    ("given", "ulysses"),
    [
        ({"schedule": "mesh", "mesh": [2, 1, 2]}, 2),
        ({"schedule": "mesh", "mesh": [2, 2, 2]}, 1),
        ({"schedule": "mesh", "mesh": [1, 1, 1]}, 8),
        ({"schedule": "double_ring", "ring_size": 4}, 2),
        ({"schedule": "double_ring", "ring_size": 2}, 4),
        ({"schedule": "attention2d", "rows": 2, "cols": 2}, 2),
        ({"schedule": "attention2d", "rows": 4}, 2),
        ({"schedule": "wallfacer", "team": 2}, 2),
        ({"schedule": "wallfacer"}, 8),
    ],
)
def test_ulysses_auto_leaves_room_for_the_shape_that_is_given(given, ulysses):
    """It took the largest of all, and then refused the shape."""
    resolved = Config(size=8, **given).resolve(8, (8, 8))
    assert resolved.ulysses == ulysses
    for field, value in given.items():
        assert getattr(resolved, field) == (tuple(value) if field == "mesh" else value)

"""`show`, `plan` and `memory` of samples of many lengths, and what docs/lengths.md quotes of them."""

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.placing import Pack
from tests.unit.commands import LLAMA, assert_refused, run
from tests.unit.test_dealing import CAP, COSTS, SIZE, step_of
from tests.words import missing

DOCS = Path(__file__).resolve().parents[2] / "docs" / "lengths.md"
FEW = (7000, 300, 2100, 900, 1500, 600, 1200, 450, 800, 1900)
PACKED = "--set", "tokens_per_rank=4096"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    Path("config.json").write_text(json.dumps({**LLAMA, **sizes, "num_hidden_layers": 16}), encoding="utf-8")
    Path("lengths.txt").write_text("\n".join(map(str, FEW)), encoding="utf-8")


def _ask(capsys, command, *words):
    return run(capsys, command, "--model", "config.json", "--lengths", "lengths.txt", *words)


def test_the_page_quotes_what_show_prints(capsys, files):
    command, shown = re.search(
        r"```bash\n(python -m ds_seqpar show .*?)\n```\n\n```text\n(.*?)```", DOCS.read_text(), re.S
    ).groups()
    assert run(capsys, *command.split()[3:])[0] == shown


@pytest.mark.parametrize("layout", ["balanced", "contiguous", "striped", "zigzag"])
def test_each_token_is_in_one_part_of_its_document(layout):
    rng = random.Random(0)
    for _ in range(20):
        documents = tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 9)))
        starts = [0, *itertools.accumulate(documents)]
        for pack in (Pack.shared(documents, layout, 4, 1), Pack(documents, EvenShards("zigzag", sum(documents), 3))):
            for rank, parts in enumerate(pack.parts):
                found = [starts[x.document] + x.start + x.step * n for x in parts for n in range(x.tokens)]
                blocks = pack.shards.blocks_per_rank
                runs = pack.shards.runs("q", tuple(range(rank * blocks, (rank + 1) * blocks)))
                assert sorted(found) == [position for held in runs for position in held.positions]
            everywhere = [part.document for parts in pack.parts for part in {x.document: x for x in parts}.values()]
            assert pack.cut == {document for document in everywhere if everywhere.count(document) > 1}


def test_work_of_ranks_is_that_of_the_samples():
    lengths = step_of("chat", 1)
    config = dataclasses.replace(COSTS.step.config, tokens_per_rank=CAP // SIZE)
    costs = dataclasses.replace(COSTS, step=dataclasses.replace(COSTS.step, config=config))
    packed = costs.packed(lengths, 2)
    assert sorted(n for packs in packed.packs for pack in packs for n in pack.documents) == sorted(lengths)
    assert sum(map(sum, packed.works)) == pytest.approx(COSTS.seconds(lengths))
    assert packed.seconds >= max(map(max, packed.works)) * (1 - 1e-9)
    assert packed.of_ranks < 1.05
    assert packed.seconds < COSTS.seconds_one_a_group(lengths, 2)
    alone = costs.packed([1024] * 2 * SIZE, 2)
    assert (alone.seconds, alone.cut, alone.ulysses) == (COSTS.seconds([1024]), 0, {1: 2})
    shared = costs.packed([CAP], 1)
    assert shared.cut == 1 or 1 not in shared.ulysses
    assert shared.seconds <= costs.seconds_one_a_group([CAP], 1)


def test_a_plan_has_a_row_for_each_number_of_ranks_and_one_sample_a_group_beside_it(capsys, files):
    found = json.loads(_ask(capsys, "plan", *PACKED, "--ranks", 8, "--json")[0])
    by_size = {one["section"]["size"]: one for one in found["ranked"]}
    assert set(by_size) == {2, 4, 8}  # the longest sample needs two ranks
    assert all(one["cut"] or one["ulysses"].keys() - {"1"} for one in found["ranked"])  # which ranks share
    assert found["deepspeed_json"]["sequence_parallel"] == found["ranked"][0]["section"]
    assert "ulysses" not in found["ranked"][0]["section"]  # each pack has its own
    assert found["assumed"]["tokens_a_step"] == sum(FEW)
    out = _ask(capsys, "plan", *PACKED, "--ranks", 8)[0]
    assert (
        missing(out, "packs of 2 x 4,096 tokens", "one sample a group of 4", "work, most over mean", "sp.packs") == []
    )
    fixed = json.loads(_ask(capsys, "plan", *PACKED, "--ranks", 4, "--set", "ulysses=4", "--json")[0])
    assert [(x["section"]["ulysses"], x["ulysses"]) for x in fixed["ranked"]] == [(4, {"4": 2})]


def test_memory_is_that_of_a_full_pack(capsys, files):
    found = json.loads(_ask(capsys, "memory", *PACKED, "--ranks", 4, "--json", "--set", "ulysses=4")[0])
    words = "memory", "--model", "config.json", "--ranks", 4, "--json", "--set", "ulysses=4", "--seq-len"
    assert found["peak"] == json.loads(run(capsys, *words, 4 * 4096)[0])["peak"]
    assert missing(_ask(capsys, "memory", *PACKED, "--ranks", 4)[0], "at most 4 x 4,096 tokens", "cut") == ["cut"]


def test_a_figure_has_a_row_for_each_rank(capsys, files):
    pixels = pytest.importorskip("matplotlib.image")
    out = _ask(capsys, "show", "--tokens-per-rank", 4096, "--png", "packs.png")[0]
    assert out.endswith("wrote packs.png\n")
    image = pixels.imread("packs.png")[..., :3]
    assert (abs(image - 0xC8 / 255) < 0.01).all(axis=-1).mean() > 0.01  # whole documents
    assert image.std(axis=-1).max() > 0.2  # and shared ones


REFUSED = [
    ("plan", ["--ranks", 8], ("tokens_per_rank", "--set")),
    ("plan", [*PACKED, "--ranks", 1], ("7000", "take more ranks", "1 ranks")),
    ("plan", [*PACKED, "--ranks", 4, "--memory", 0.01, "--machine", "modest"], ("GiB", "lower tokens_per_rank")),
    ("plan", [*PACKED, "--ranks", 4, "--seq-len", 8192], ("--seq-len", "leave")),
    ("memory", ["--set", "tokens_per_rank=1024", "--ranks", 4], ("4096 tokens", "7000", "cut it")),
    ("memory", [*PACKED, "--ranks", 4, "--trainer", "dpo"], ("--trainer", "--lengths")),
    ("show", [], ("--tokens-per-rank",)),
]


@pytest.mark.parametrize(("command", "words", "said"), REFUSED, ids=str)
def test_what_does_not_fit_is_answered_with_one_sentence(capsys, files, command, words, said):
    assert_refused(_ask(capsys, command, *words), *said)

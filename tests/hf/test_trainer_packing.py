"""Packs of whole documents: none lost, none cut, none over its size; and the example that trains on them."""

import json
import os
import re

import pytest
import torch
from datasets import Dataset

from ds_seqpar.base.errors import InputError
from hf_integration import PackingCollator, Packs
from tests import scripts
from tests.dist.ranks import is_one_sentence
from tests.hf.llama import IGNORE
from tests.hf.trainers import documents, settings
from tests.launch import on_ranks
from tests.words import missing

TOKENS = 64


def numbered(count, seed=5):
    """Documents of 9 to 40 tokens that all begin with their number."""
    found = documents(count, seed)
    return [{**x, "input_ids": torch.cat([torch.tensor([n]), x["input_ids"][1:]])} for n, x in enumerate(found)]


def first_tokens(packs):
    return [int(document["input_ids"][0]) for pack in packs for document in pack]


@pytest.mark.parametrize("tokens", [40, TOKENS, 1000])
def test_every_document_is_in_one_pack_and_no_pack_is_over_its_size(tokens):
    packs = Packs(numbered(50), tokens)
    assert sorted(first_tokens(packs[i] for i in range(len(packs)))) == list(range(50))
    sizes = [sum(len(document["input_ids"]) for document in packs[i]) for i in range(len(packs))]
    assert max(sizes) <= tokens
    # a document that fits into a pack there is gets no new one: no two packs are half empty
    assert len([size for size in sizes if size <= tokens / 2]) <= 1


def packed_here():
    """Packs, in a process that draws other numbers than the others."""
    torch.manual_seed(os.getpid())
    return Packs(numbered(40), TOKENS).packs


def test_packs_are_the_same_in_every_process():
    first, *others = on_ranks(4, packed_here)
    assert len(first) > 10
    assert all(other == first for other in others)


def test_columns_of_a_data_set_become_packs_too():
    rows = [{name: x.tolist() for name, x in document.items()} for document in numbered(12)]
    packs, same = Packs(Dataset.from_list(rows), TOKENS), Packs(numbered(12), TOKENS)
    batches = [(PackingCollator()([packs[i]]), PackingCollator()([same[i]])) for i in range(len(packs))]
    assert all(torch.equal(a[name], b[name]) for a, b in batches for name in b)


def test_a_batch_says_where_its_documents_end():
    pack = [{"input_ids": [5, 6, 7]}, {"input_ids": [8], "labels": [9], "attention_mask": [1], "text": "x"}]
    batch = PackingCollator()([pack, {"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([3, IGNORE])}])
    assert {name: x.tolist() for name, x in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 3, 4]],
        "labels": [[IGNORE, 6, 7, IGNORE, IGNORE, IGNORE]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
    }
    assert all(x.dtype == torch.int64 for x in batch.values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Packs(numbered(3), 8), ["8 tokens", "got one of", "cut it"]),
        (lambda: Packs([{"input_ids": []}], 8), ["got one of 0", "leave it out"]),
        (lambda: Packs([], 8), ["data set", "one document", "got none"]),
        (lambda: Packs(numbered(3), 0), ["packs", "tokens", "got 0"]),
        (lambda: Packs(numbered(3), 64.0), ["packs", "tokens", "got 64.0"]),
        (lambda: Packs([{"text": "a"}], 8), ["input_ids", "got text", "tokenize"]),
        (lambda: PackingCollator()([{"text": "a"}]), ["input_ids", "got text", "tokenize"]),
        (lambda: PackingCollator()([[3]]), ["input_ids", "got int"]),
        (lambda: PackingCollator()([]), ["batch", "one document", "got none"]),
        (lambda: PackingCollator()([{"input_ids": [1, 2], "labels": [1]}]), ["2 tokens", "1 labels"]),
        (lambda: PackingCollator()([{"input_ids": []}]), ["0 tokens", "0 labels"]),
        (
            lambda: PackingCollator()([{"input_ids": [1, 2], "pixel_values": torch.ones(4, 6)}]),
            ["got pixel_values", "tokens_per_rank"],
        ),
        (lambda: PackingCollator()([{"input_ids": [1, 0], "attention_mask": [1, 0]}]), ["padding", "attention_mask"]),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_sentence(given, words):
    with pytest.raises(InputError) as refused:
        given()
    assert is_one_sentence(str(refused.value))
    assert missing(str(refused.value), *words) == [], refused.value


def example(ranks, folder, texts):
    """The log of a run of three steps on packs, of one group of all ranks."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(settings({"size": ranks}, 3)))
    words = ["--pack", "--data", texts, "--seq_len", 200, "--documents", 32, "--eval_documents", 6]
    words += ["--max_steps", 3, "--logging_steps", 1, "--save_steps", 3, "--output_dir", folder / "out"]
    words += ["--deepspeed", folder / "ds.json"]
    ran = scripts.run(ranks, folder, scripts.EXAMPLE, *words, "--local_rank=LOCAL_RANK")
    assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-3000:]
    held_out = float(re.search(r"held-out loss (\d\.\d{3}), perplexity", ran.stdout)[1])
    log = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry], held_out


@pytest.mark.usefixtures("compiled")
def test_the_example_trains_on_packs_as_one_rank_does(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(38):
        (texts / f"{number}.txt").write_text(f"document {number} says so. " * (1 + number % 7))
    alone, held_out = example(1, tmp_path / "alone", texts)
    shared, held_out_shared = example(2, tmp_path / "shared", texts)
    assert len(shared) == 3
    assert shared[-1] < shared[0]
    assert shared == pytest.approx(alone, rel=1e-4)
    assert held_out_shared == pytest.approx(held_out, abs=2e-3)

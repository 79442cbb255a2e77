"""`python -m ds_seqpar perplexity`: the losses of one process, whatever the ranks and the chunks, and its refusals."""

import contextlib
import io
import json
import math
import os

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ds_seqpar.__main__ import main
from hf_integration import patch_attention
from hf_integration.generation.perplexity import token_losses
from tests.dist.ranks import is_one_sentence, make
from tests.hf.llama import MODES, llama
from tests.launch import on_each_of, on_ranks
from tests.unit.commands import assert_refused, run

WORDS = 64
TOKENS = 150


def ids_of(tokens=TOKENS):
    return torch.randint(0, WORDS, (tokens,), generator=torch.Generator().manual_seed(1))


def dense(model, ids):
    """Teacher forced, in one forward of whole logits."""
    with torch.no_grad():
        return F.cross_entropy(model(input_ids=ids[None, :-1]).logits[0], ids[1:], reduction="none")


CHUNKS = (53, 74, 500)  # of 149 tokens; 74 leaves a single one


@on_each_of(2)
def test_losses_are_those_of_one_process_and_logits_stay_in_parts():
    ids, expected = ids_of(), dense(llama().double().eval(), ids_of())
    for mode, chunks in (("r2", CHUNKS), ("u2", CHUNKS[:1])):
        sp = make(**MODES[mode])
        model, rows = patch_attention(llama().double().eval(), sp), []
        model.lm_head.register_forward_hook(lambda *call, rows=rows: rows.append(call[2].shape[1]))
        for chunk in chunks:
            losses, sizes = zip(*token_losses(model, ids, chunk), strict=True)
            assert [len(x) for x in losses] == [len(x) for x in ids[1:].split(chunk)]
            torch.testing.assert_close(torch.cat(losses), expected, rtol=0, atol=1e-11)
            assert max(rows) <= math.ceil(chunk / 2)
            assert sizes[-1] == 2 * 2 * 256 * 2 * 8 * 8  # layers, k and v, a block of tokens, heads, head_dim, bytes


def words_with(model, folder):
    """Saves a model beside a tokenizer of words."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def text_of(ids):
    return " ".join(f"w{i}" for i in ids.tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and its text."""
    folder = tmp_path_factory.mktemp("perplexity")
    words_with(llama(), folder)
    (folder / "text").write_text(text_of(ids_of()))
    return folder


def as_command(*words):
    """(what a rank printed, what it said, exit code)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["perplexity", *map(str, words)])
    return out.getvalue(), err.getvalue(), code


def test_the_command_prints_what_one_process_finds(place, capsys):
    words = ["--model", place, "--text", place / "text", "--chunk", 37]
    losses = dense(llama().eval(), ids_of()).double()
    (out, _, code), other = on_ranks(2, as_command, *words, "--json", "--set", "ulysses=2", patience=None)
    assert (code, other[0], other[2]) == (0, "", 0)
    found = json.loads(out)
    assert found["loss"] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    assert found["tokens"] == TOKENS - 1
    assert len(found["cache_bytes"]) == 2
    for first, last, loss in found["by_position"]:
        assert loss == pytest.approx(float(losses[first - 1 : last].mean()), abs=1e-5)
    assert [first for first, *_ in found["by_position"]] == [1, *(x[1] + 1 for x in found["by_position"][:-1])]
    assert found["by_position"][-1][1] == TOKENS - 1
    out, _, code = run(capsys, "perplexity", *words, "--out", place / "loss.svg")
    assert code == 0
    assert f"{math.exp(losses.mean()):.6g}" in out.splitlines()[0]
    assert out.count("#\n") == 32
    assert "<svg" in (place / "loss.svg").read_text()


def with_texts(place, *texts):
    return as_command("--model", place, "--text", place / texts[int(os.environ["RANK"])])


@pytest.mark.parametrize(("text", "says", "word"), [("other", 0, "same text"), ("none", 1, "none")])
def test_texts_that_differ_end_all_ranks_with_one_sentence(place, text, says, word):
    (place / "other").write_text(text_of(ids_of(9)))
    ran = on_ranks(2, with_texts, place, "text", text, patience=None)
    assert [code for *_, code in ran] == [2, 2]
    assert [err.count("ds-seqpar: ") for _, err, _ in ran] == [int(rank == says) for rank in range(2)]
    assert word in ran[says][1]
    assert is_one_sentence(ran[says][1].partition("ds-seqpar: ")[2].strip())


def test_what_cannot_be_read_or_taken_is_a_sentence(place, tmp_path, capsys):
    def refused(*words, model=place, text="w1 w2 w3"):
        (tmp_path / "text").write_text(text)
        out, err, code = run(capsys, "perplexity", "--model", model, "--text", tmp_path / "text", *words)
        return out, err.splitlines(keepends=True)[-1], code  # transformers' progress is before it

    def words_of(model):
        (folder := tmp_path / type(model).__name__).mkdir()
        return words_with(model, folder)

    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (bare := tmp_path / "bare").mkdir()
    llama().save_pretrained(bare)
    small = tmp_path / "small"
    small.mkdir()
    words_with(llama(vocab_size=3), small)
    capsys.readouterr()
    assert_refused(refused(model=tmp_path), "--model", "save_pretrained", "config.json")
    assert_refused(refused(model=bare), "tokenizer", "bare", "tokenizer.save_pretrained")
    assert_refused(refused(text="w1"), "two tokens", "got 1")
    assert_refused(refused("--chunk", 0), "--chunk", "'0'")
    assert_refused(refused("--set", "ulysess=2"), "ulysses")
    assert_refused(refused("--out", tmp_path / "none" / "x.svg"), "--out", "writ")
    assert_refused(refused("--out", "x.pdf"), ".svg", "x.pdf")
    assert_refused(refused(model=small), "3 ids", "id 3")
    gpt = words_of(GPT2LMHeadModel(GPT2Config(**sizes, n_positions=8)))
    assert_refused(refused(model=gpt, text=text_of(ids_of(10))), "8 positions", "10 tokens")
    bloom = words_of(BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=16, n_layer=1, n_head=2)))
    assert_refused(refused(model=bloom), "Bloom")

"""examples/perplexity.py: the losses of one process, whatever the ranks and the chunks."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from examples.perplexity import token_losses
from hf_integration import patch_attention
from tests import scripts
from tests.dist.ranks import make
from tests.hf.llama import MODES, llama
from tests.launch import on_each_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "perplexity.py"
WORDS, TOKENS = 64, 150


def ids_of():
    return torch.randint(0, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(1))


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
            losses = list(token_losses(model, ids, chunk))
            assert [len(x) for x in losses] == [len(x) for x in ids[1:].split(chunk)]
            torch.testing.assert_close(torch.cat(losses), expected, rtol=0, atol=1e-11)
            assert max(rows) <= math.ceil(chunk / 2)


def test_the_script_prints_what_one_process_finds(tmp_path):
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    (tmp_path / "text").write_text(" ".join(f"w{i}" for i in ids_of().tolist()))
    ran = scripts.run(2, tmp_path, EXAMPLE, "--model", str(tmp_path), "--text", str(tmp_path / "text"), "--chunk", "37")
    assert not ran.failed, ran.stderr
    loss = float(dense(llama().eval(), ids_of()).double().mean())
    first, *bars = ran.stdout.splitlines()
    assert float(first.split()[1].rstrip(":")) == pytest.approx(math.exp(loss), rel=1e-5)
    assert len([bar for bar in bars if bar.endswith("#")]) == 32

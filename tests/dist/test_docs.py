"""The scripts of docs/masks.md and docs/own_loop.md run as they stand there, and what masks.md refuses is refused."""

import contextlib
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from ds_seqpar import Mask, SeqParError, SequenceParallelConfig, UnevenShards
from ds_seqpar import testing as virtual
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS
from hf_integration import patch_attention
from tests import oracle
from tests.dist.ranks import make, refusal
from tests.hf.families import model_of
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks
from tests.words import missing

PAGES = Path(__file__).resolve().parents[2] / "docs"
MASKS = (PAGES / "masks.md").read_text(encoding="utf-8")
OWN_LOOP = (PAGES / "own_loop.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", MASKS, re.S)


def as_script(path):
    """Runs it as a launcher's process would; returns the output that it ends with."""
    dist.destroy_process_group()  # it makes its own
    return runpy.run_path(str(path), run_name="__main__")["out"].detach()


def test_scripts_run(tmp_path):
    tokens = {}
    for script in SCRIPTS:
        name = re.match(r"# (\S+\.py): torchrun --nproc-per-node 4 \1\n", script)[1]
        (tmp_path / name).write_text(script, encoding="utf-8")
        outs = on_ranks(4, as_script, tmp_path / name, keep=None)
        assert all(out.isfinite().all() for out in outs)
        tokens[name] = [out.shape[1] for out in outs]
    assert tokens == {
        "masks.py": [128] * 4,
        "batches.py": [515] * 4,
        "shared_prompt.py": [512] * 4,
        "uneven.py": [800, 1000, 600, 1696],
    }


def in_folder(path):
    """Runs it where it writes its files; returns its last batch."""
    dist.destroy_process_group()  # it makes its own
    with contextlib.chdir(path.parent):
        return runpy.run_path(str(path), run_name="__main__")["batch"]["input_ids"]


def test_the_script_of_loaders_runs(tmp_path):
    (script,) = re.findall(r"```python\n# (loaders.py): torchrun --nproc-per-node 4 \1\n(.*?)```", OWN_LOOP, re.S)
    (tmp_path / script[0]).write_text(script[1], encoding="utf-8")
    batches = on_ranks(4, in_folder, tmp_path / script[0], keep=None)
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[2], batches[3])
    assert not torch.equal(batches[0], batches[2])


def test_distflash_refuses_a_later_block():
    q = torch.zeros(1, 8, 2, 4)
    config = SequenceParallelConfig(size=4, ulysses=1, schedule="distflash")
    with pytest.raises(SeqParError) as refused:
        virtual.attention(config, q, q, q, mask=Mask(causal=False, window=3))
    assert (
        missing(str(refused.value), "distflash", "causal", "queries of block 0", "keys of block 1", "ring or mesh")
        == []
    )


@on_each_of(4, keep=None)
def test_kinds_of_attention_that_are_refused():
    sp = make(ulysses=1)
    q, ids = torch.zeros(1, 4, 2, 4), torch.arange(16)[None]
    gap = torch.ones_like(ids).index_fill_(1, torch.tensor([5]), 0)
    model = model_of("llama").patch_attention(sp)
    encoder = AutoConfig.for_model("t5", d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1, vocab_size=64)
    batch = {"input_ids": ids, "labels": ids.clone()}
    for call, *words in (
        (lambda: sp.attention(q, q, q, mask=torch.ones(16, 16)), "a Mask", "a tensor", "causal=False"),
        (lambda: sp.shard_batch({**batch, "attention_mask": gap}), "zeros between ones", "documents by position_ids"),
        (lambda: model(**sp.shard_batch(batch), is_causal=False), "is causal", "is_causal=False", "leave it out"),
        (lambda: patch_attention(model_of("llama", is_causal=False), sp), "is_causal=False in its config"),
        (lambda: patch_attention(AutoModelForSeq2SeqLM.from_config(encoder), sp), "'t5'", "cross-attention"),
        (lambda: patch_attention(model_of("llama", attention_dropout=0.1), sp), "attention_dropout 0", "got 0.1"),
    ):
        message = refusal(call)[1]
        assert missing(message, *words) == [], message


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_each_of(4)
def test_a_prefix_takes_two_calls(layout):
    sp, seq, prefix = make(ulysses=1, layout=layout), 32, 13
    q, k, v, _ = oracle.tensors(1, seq, (4, 2))
    at = sp.position_ids(seq)
    local = [x[:, at] for x in (q, k, v)]
    out = sp.attention(*local)
    held = [[(run.start, 1, min(run.length, prefix - run.start)) for run in runs if run.start < prefix]
            for runs in (LAYOUTS[layout].runs(seq, 4, rank) for rank in range(4))]  # fmt: skip
    of_prefix = [x[:, at < prefix] for x in local]
    out[:, at < prefix] = sp.attention(*of_prefix, mask=Mask(causal=False), shards=UnevenShards(held))
    seen = torch.arange(seq) < torch.arange(1, seq + 1)[:, None].clamp(min=prefix)
    oracle.assert_exact([out], [oracle.attention(q, k, v, seen)[:, at]])

"""What is switched off, chosen or ignored is logged in one line on rank 0, once."""

import logging
from types import MethodType

import torch

from ds_seqpar.base.log import log_once
from ds_seqpar.planner.request import Job
from hf_integration.trainer.job import job_of
from tests.dist.ranks import make
from tests.hf.llama import ragged, small
from tests.launch import on_ranks


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("ds_seqpar").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def what_is_left_out():
    """The lines of two steps, each eager and then compiled."""
    handler, sp, model = Lines(), make(size=2, ulysses=1, head_chunks=2, mlp_tiles="auto"), small()
    norm = model.model.norm
    norm.forward = MethodType(type(norm).forward, norm)
    model.patch_attention(sp)
    (batch,) = sp.shard_batches(ragged({"size": 2}, data_size=1, steps=1, sequences=2))
    for _ in range(2):
        model.eval()(**batch)
        model.train()(**batch).loss.backward()
    attention = model.model.layers[0].self_attn
    attention.compile(backend="eager")
    for _ in range(2):
        model(**batch).loss.backward()
    job_of(model.model, Job())
    return handler.lines


def test_each_is_said_once_on_rank_0():
    lines, others = on_ranks(2, what_is_left_out, timeout=300)
    for words in ("use_cache", "head_chunks", "LlamaRMSNorm", "nothing can be planned"):
        assert [words in line for line in lines].count(True) == 1, lines
    assert len(lines) == 4
    assert others == []


def logged(x):
    log_once("sequence_parallel: a line of this test")
    return x + 1


def test_a_line_is_not_repeated_and_breaks_no_graph(caplog, monkeypatch):
    torch.compile(logged, backend="eager", fullgraph=True)(torch.ones(3))
    logged(torch.ones(3))
    monkeypatch.setenv("RANK", "1")
    log_once("sequence_parallel: another")
    lines = [record.getMessage() for record in caplog.records if record.name == "ds_seqpar"]
    assert lines == ["sequence_parallel: a line of this test"]

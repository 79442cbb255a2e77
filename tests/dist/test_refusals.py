"""Bad settings and tensors get one clear sentence on every rank before attention communicates, and never a hang."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import SequenceParallel
from ds_seqpar.core.runtime.kernels import KERNELS, select
from hf_integration import share_sequences
from tests import oracle
from tests.dist.ranks import (
    SECONDS,
    WRONG,
    assert_all_refused,
    differ,
    everywhere,
    lacking,
    make,
    only_one,
    refusal,
)
from tests.hf.llama import small
from tests.launch import on_each_of


def attention(sp, tokens=4, heads=(4, 2), batch=1, dtype=torch.float64, grad=True, change=None, **options):
    """sp.attention with good local tensors, but for what a case asks for."""
    q, k, v = oracle.tensors(batch, tokens, heads, dtype=dtype)[:3]
    local = [x.requires_grad_(grad) for x in (q, k, v)]
    return sp.attention(*(change(*local) if change else local), **options)


def asked(**options):
    """A case in which every rank asks so."""
    return lambda sp, rank: attention(sp, **options)


def one_asks(**options):
    """A case in which the wrong rank does."""
    return lambda sp, rank: attention(sp, **(options if rank == WRONG else {}))


def without_kernel(sp, rank):
    """The configured kernel's package is missing on the wrong rank."""
    kernel = KERNELS["cpu_flash"]
    if rank == WRONG:
        kernel.reasons = lambda spec: ["is not installed here"]
    runtime = sp.runtime
    config, runtime.config = runtime.config, dataclasses.replace(runtime.config, kernel="cpu_flash")
    select.cache_clear()
    runtime.admitted.clear()  # as if these tensors were the first of their kind
    runtime.last_bound.clear()
    try:
        attention(sp)
    finally:
        runtime.config = config
        vars(kernel).pop("reasons", None)
        select.cache_clear()


def placed(sp, rank, wrong):
    """Attention over packed documents, on the wrong rank with what `wrong` makes of the placement."""
    ids = torch.arange(16)[None]
    restarts = (torch.arange(8).repeat(2), torch.cat([torch.arange(4), torch.arange(12)]))
    mine, other = (sp.shard_batch({"labels": ids, "position_ids": x})["placement"] for x in restarts)
    q = torch.zeros(1, 4, 4, 8)
    placement = wrong(other) if rank == WRONG else mine
    return sp.attention(q, q, q, **({"mask": placement.mask, "shards": placement.shards} if placement else {}))


def instead(call, usual):
    """A case in which the wrong rank calls something else than the others."""
    return lambda sp, rank: (call if rank == WRONG else usual)(sp)


def reentrant(sp):
    return sp.checkpoint(lambda _: attention(sp), torch.zeros(1, requires_grad=True), use_reentrant=True)


CONFIG, KERNEL = {"kind": "ConfigError"}, {"kind": "KernelError"}
CHECKPOINT = instead(lambda sp: sp.checkpoint(lambda: attention(sp)), attention)
# name -> (what a rank calls, what it is to be told). The SequenceParallel: 4 ranks, zigzag, ulysses 1, so 8 | length.
RING = {
    # deepspeed#7384 and #7842: a length that the ranks do not divide went through and corrupted
    "length": (asked(tokens=3), everywhere("got 12", "to 16")),
    "no tokens": (asked(change=lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0])), everywhere("got 0", "to 8")),
    "nothing to shard": (lambda sp, rank: sp.shard(torch.arange(0), 0), everywhere("got 0")),
    "tokens to gather that are not this rank's": (
        lambda sp, rank: sp.gather(torch.zeros(4 * (rank == 0)), 0),
        everywhere("1 tokens of 4"),
    ),
    "query heads": (asked(heads=(2, 2), change=lambda q, k, v: (q[:, :, :1], k, v)), everywhere("1 and 2", **CONFIG)),
    # EasyContext#47: backward shapes differed where the ranks' chunks were unequal
    "shapes": (one_asks(tokens=8), differ("(1, 8, 4, 8)")),
    "batch": (one_asks(batch=2), differ("(2, 4, 4, 8)")),
    "dtypes": (one_asks(dtype=torch.float32), differ("float32")),
    "causal": (one_asks(causal=False), differ("causal False")),
    "scale": (one_asks(scale=0.5), differ("scale 0.5")),
    "return_lse": (one_asks(return_lse=True), differ("return_lse True")),
    "requires_grad": (one_asks(grad=False), differ("backward False")),
    "no_grad": (instead(torch.no_grad()(attention), attention), differ("backward False")),
    "checkpoint": (CHECKPOINT, differ("checkpoint 'first run'")),
    "reentrant checkpoint beside no gradients": (
        instead(reentrant, lambda sp: attention(sp, grad=False)),
        differ("checkpoint 'first run'"),
    ),
    "different calls": (instead(lambda sp: sp.gather(torch.zeros(8), 0), attention), differ("tensor to gather")),
    "a placement left out": (
        lambda sp, rank: placed(sp, rank, lambda other: None),
        differ("a placement was left out", "no shards"),
    ),
    "a placement of another batch": (
        lambda sp, rank: placed(sp, rank, lambda other: other),
        differ("a placement belongs to another batch"),
    ),
    "three dims": (one_asks(change=lambda q, k, v: (q[0], k, v)), only_one("q (4, 4, 8)")),
    "not a tensor": (one_asks(change=lambda q, k, v: (q, None, v)), only_one("k NoneType")),
    "k unlike v": (one_asks(change=lambda q, k, v: (q, k, v[:, :, :1])), only_one("v (1, 4, 1, 8)")),
    "one tensor's dtype": (one_asks(change=lambda q, k, v: (q, k.float(), v)), only_one("torch.float32")),
    "one rank's length": (one_asks(tokens=3), only_one("got 12", "to 16")),
    "one rank gathers what autograd follows": (
        lambda sp, rank: sp.gather(torch.zeros(8, requires_grad=rank == WRONG), 0),
        only_one("requires_grad"),
    ),
    "one rank gathers nothing": (
        lambda sp, rank: sp.gather(None if rank == WRONG else torch.zeros(8), 0),
        only_one("got NoneType"),
    ),
    "no kernel on one rank": (without_kernel, only_one("cpu_flash is not installed", **KERNEL)),
    "no kernel": (asked(dtype=torch.int64, grad=False), everywhere("int64 on cpu", **KERNEL)),
}

# the same ranks with ulysses 2
ULYSSES = {
    "heads": (asked(heads=(1, 1)), everywhere("ulysses 2", "1 query", **CONFIG)),
    "key/value heads": (asked(heads=(6, 4)), everywhere("6 and 4", **CONFIG)),
    "return_lse": (one_asks(return_lse=True), differ("return_lse True")),
    # what a checkpoint's backward exchanges has other sizes: gloo ended a rank
    "checkpoint": (CHECKPOINT, differ("checkpoint 'first run'")),
    "one rank's heads": (one_asks(heads=(1, 1)), only_one("ulysses 2", "1 query", **CONFIG)),
    "one rank's uneven heads": (one_asks(heads=(3, 3)), differ("(1, 4, 3, 8)")),
    "shapes": (one_asks(tokens=8), differ("(1, 8, 4, 8)")),
    "no kernel": (asked(dtype=torch.int64, grad=False), everywhere("int64 on cpu", "2/1 heads", **KERNEL)),
}


TABLES = {"ring": (RING, 1), "ulysses": (ULYSSES, 2)}


@pytest.mark.parametrize("name", TABLES)
@on_each_of(4, timeout=SECONDS)
def test_tensors(name):
    table, ulysses_size = TABLES[name]
    assert_all_refused(table, make(ulysses=ulysses_size))


@on_each_of(4, timeout=SECONDS)
def test_attention_of_one_group_is_refused_on_that_group():
    """Two groups of two ranks; the second is given one rank's tensors wrong."""
    sp, rank = make(size=2), dist.get_rank()
    refused = refusal(attention, sp, tokens=4, **({"causal": False} if rank == 3 else {}))
    if rank < 2:  # it shares nothing with the other here: it goes on, up to what the whole world does together
        assert refused == (None, None)
    else:
        assert lacking(refused, "DisagreementError") == []
        assert refused[1].endswith("rank 2: causal True; rank 3: causal False")


def made(wrong=None, **usual):
    """A case in which every rank configures so, and the wrong one with these changes."""
    return lambda sp, rank: make(**{**usual, **(wrong or {} if rank == WRONG else {})})


# tests/unit/test_config.py has the others that a configuration refuses by itself
CONFIGURATIONS = {
    "size": (made(size=3), everywhere("size 3", "[1, 2, 4]", **CONFIG)),
    # deepspeed#8291: a rank without a head
    "heads": (made(heads=(3, 1), ulysses=4), everywhere("3 query", **CONFIG)),
    "one number of heads": (made(heads=(4,)), everywhere("got (4,)", **CONFIG)),
    "words for heads on one rank": (made({"heads": ("4", "2")}, heads=(4, 2)), only_one("got ('4', '2')", **CONFIG)),
    "a section instead of a configuration": (
        lambda sp, rank: SequenceParallel({"size": 4}),
        everywhere("got dict", **CONFIG),
    ),
    "a section on one rank": (
        lambda sp, rank: SequenceParallel({} if rank == WRONG else None),
        only_one("got dict", **CONFIG),
    ),
    "size on one rank": (made({"size": 3}, size=4), only_one("size 3", **CONFIG)),
    "layouts": (made({"layout": "striped"}, layout="zigzag"), differ("layout 'striped'")),
    "sizes": (made({"size": 2}, size=4), differ("ranks 0, 2-3: size 4", "rank 1: size 2")),
    "the models' heads": (made({"heads": (4, 2)}, heads=(4, 4), ulysses=2), differ("rank 1: heads (4, 2)")),
}


@on_each_of(4, timeout=SECONDS)
def test_configurations():
    assert_all_refused(CONFIGURATIONS, make(ulysses=2))


@on_each_of(1, timeout=SECONDS, keep=None)
def test_without_torch_distributed():
    dist.destroy_process_group()
    assert lacking(refusal(SequenceParallel), "ConfigError", "init_distributed()") == []
    assert "torchrun" not in refusal(SequenceParallel)[1]
    del os.environ["RANK"]  # as where no launcher is
    for call in (SequenceParallel, lambda: share_sequences(small(), size=2)):
        assert lacking(refusal(call), "ConfigError", "torchrun", "init_process_group()") == []

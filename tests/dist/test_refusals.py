"""Bad settings and tensors get one clear sentence on every rank before attention communicates, and never a hang."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.runtime.kernels import KERNELS, select
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
    runtime.checked = None  # as if these tensors were the first of their kind
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


# name -> (what a rank calls, what it is to be told). The SequenceParallel: 4 ranks, zigzag, ulysses 1, so 8 | length.
RING = {
    # deepspeed#7384 and #7842: a length that the ranks do not divide went through and corrupted
    "length": (asked(tokens=3), everywhere("multiple of 8", "got 12", "to 16")),
    "no tokens": (
        asked(change=lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0])),
        everywhere("multiple of 8", "got 0", "to 8"),
    ),
    "nothing to shard": (lambda sp, rank: sp.shard(torch.arange(0), 0), everywhere("one token", "got 0")),
    "tokens to gather that are not this rank's": (
        lambda sp, rank: sp.gather(torch.zeros(4 * (rank == 0)), 0),
        everywhere("gather", "1 tokens of 4"),
    ),
    "query heads": (
        asked(heads=(2, 2), change=lambda q, k, v: (q[:, :, :1], k, v)),
        everywhere("key/value heads", "1 and 2", kind="ConfigError"),
    ),
    # EasyContext#47: backward shapes differed where the ranks' chunks were unequal
    "shapes": (one_asks(tokens=8), differ("(1, 4, 4, 8)", "(1, 8, 4, 8)")),
    "batch": (one_asks(batch=2), differ("(1, 4, 4, 8)", "(2, 4, 4, 8)")),
    "dtypes": (one_asks(dtype=torch.float32), differ("float64", "float32")),
    "causal": (one_asks(causal=False), differ("causal True", "causal False")),
    "scale": (one_asks(scale=0.5), differ("scale None", "scale 0.5")),
    "return_lse": (one_asks(return_lse=True), differ("return_lse True", "return_lse False")),
    "requires_grad": (one_asks(grad=False), differ("backward True", "backward False")),
    "no_grad": (
        lambda sp, rank: torch.no_grad()(attention)(sp) if rank == WRONG else attention(sp),
        differ("backward True", "backward False"),
    ),
    "checkpoint": (
        lambda sp, rank: sp.checkpoint(lambda: attention(sp)) if rank == WRONG else attention(sp),
        differ("checkpoint 'none'", "checkpoint 'first run'"),
    ),
    "reentrant checkpoint beside no gradients": (
        lambda sp, rank: (
            sp.checkpoint(lambda _: attention(sp), torch.zeros(1, requires_grad=True), use_reentrant=True)
            if rank == WRONG
            else attention(sp, grad=False)
        ),
        differ("checkpoint 'none'", "checkpoint 'first run'"),
    ),
    "different calls": (
        lambda sp, rank: sp.gather(torch.zeros(8), 0) if rank == WRONG else attention(sp),
        differ("tensor to gather", "attention inputs"),
    ),
    "a placement left out": (
        lambda sp, rank: placed(sp, rank, lambda other: None),
        differ("a placement was left out", "shards=placement.shards", "no shards"),
    ),
    "a placement of another batch": (
        lambda sp, rank: placed(sp, rank, lambda other: other),
        differ("a placement belongs to another batch", "shards=placement.shards"),
    ),
    "three dims": (
        one_asks(change=lambda q, k, v: (q[0], k, v)),
        only_one("local_seq", "q (4, 4, 8)", "k (1, 4, 2, 8)"),
    ),
    "not a tensor": (one_asks(change=lambda q, k, v: (q, None, v)), only_one("local_seq", "k NoneType")),
    "k unlike v": (
        one_asks(change=lambda q, k, v: (q, k, v[:, :, :1])),
        only_one("but for head_dim", "v (1, 4, 1, 8)"),
    ),
    "one tensor's dtype": (
        one_asks(change=lambda q, k, v: (q, k.float(), v)),
        only_one("one dtype", "torch.float64", "torch.float32"),
    ),
    "one rank's length": (one_asks(tokens=3), only_one("multiple of 8", "got 12", "to 16")),
    "one rank gathers what autograd follows": (
        lambda sp, rank: sp.gather(torch.zeros(8, requires_grad=rank == WRONG), 0),
        only_one("requires_grad", "x.detach()"),
    ),
    "one rank gathers nothing": (
        lambda sp, rank: sp.gather(None if rank == WRONG else torch.zeros(8), 0),
        only_one("gather", "got NoneType"),
    ),
    "no kernel on one rank": (
        without_kernel,
        only_one("float64 on cpu", "cpu_flash is not installed", kind="KernelError"),
    ),
    "no kernel": (
        asked(dtype=torch.int64, grad=False),
        everywhere("int64 on cpu", "cpu_flash", "torch.int64", kind="KernelError"),
    ),
}

# the same ranks with ulysses 2
ULYSSES = {
    "heads": (asked(heads=(1, 1)), everywhere("ulysses 2", "1 query", "[1]", kind="ConfigError")),
    "key/value heads": (asked(heads=(6, 4)), everywhere("key/value heads", "6 and 4", kind="ConfigError")),
    "return_lse": (one_asks(return_lse=True), differ("return_lse True", "return_lse False")),
    # what a checkpoint's backward exchanges has other sizes: gloo ended a rank
    "checkpoint": (
        lambda sp, rank: sp.checkpoint(lambda: attention(sp)) if rank == WRONG else attention(sp),
        differ("checkpoint 'none'", "checkpoint 'first run'"),
    ),
    "one rank's heads": (one_asks(heads=(1, 1)), only_one("ulysses 2", "1 query", "[1]", kind="ConfigError")),
    "one rank's uneven heads": (one_asks(heads=(3, 3)), differ("(1, 4, 3, 8)", "(1, 4, 4, 8)")),
    "shapes": (one_asks(tokens=8), differ("(1, 4, 4, 8)", "(1, 8, 4, 8)")),
    "no kernel": (asked(dtype=torch.int64, grad=False), everywhere("int64 on cpu", "2/1 heads", kind="KernelError")),
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


CONFIGURATIONS = {
    "size": (lambda sp, rank: make(size=3), everywhere("size 3", "4 ranks", "[1, 2, 4]", kind="ConfigError")),
    "size beyond the world": (
        lambda sp, rank: make(size=8),
        everywhere("size 8", "4 ranks", "[1, 2, 4]", kind="ConfigError"),
    ),
    "ulysses beyond the size": (
        lambda sp, rank: make(size=2, ulysses=4),
        everywhere("ulysses 4", "size 2", "[1, 2]", kind="ConfigError"),
    ),
    # deepspeed#8291: a rank without a head
    "heads": (
        lambda sp, rank: make((3, 1), ulysses=4),
        everywhere("ulysses 4", "3 query", "[1, 2]", kind="ConfigError"),
    ),
    "heads that do not group": (
        lambda sp, rank: make((4, 3), ulysses=1),
        everywhere("key/value heads", "4 and 3", kind="ConfigError"),
    ),
    "one number of heads": (lambda sp, rank: make((4,)), everywhere("heads", "got (4,)", kind="ConfigError")),
    "words for heads on one rank": (
        lambda sp, rank: make(("4", "2") if rank == WRONG else (4, 2)),
        only_one("heads", "got ('4', '2')", kind="ConfigError"),
    ),
    "a section instead of a configuration": (
        lambda sp, rank: SequenceParallel({"size": 4}),
        everywhere("got dict", "SequenceParallelConfig.from_dict", kind="ConfigError"),
    ),
    "a section on one rank": (
        lambda sp, rank: SequenceParallel({} if rank == WRONG else None),
        only_one("got dict", "SequenceParallelConfig.from_dict", kind="ConfigError"),
    ),
    "size on one rank": (
        lambda sp, rank: make(size=3 if rank == WRONG else 4),
        only_one("size 3", "4 ranks", "[1, 2, 4]", kind="ConfigError"),
    ),
    "layouts": (
        lambda sp, rank: make(layout="striped" if rank == WRONG else "zigzag"),
        differ("layout 'zigzag'", "layout 'striped'"),
    ),
    "sizes": (lambda sp, rank: make(size=2 if rank == WRONG else 4), differ("ranks 0, 2-3: size 4", "rank 1: size 2")),
    "the models' heads": (
        lambda sp, rank: make((4, 2) if rank == WRONG else (4, 4), ulysses=2),
        differ("ranks 0, 2-3: heads (4, 4)", "rank 1: heads (4, 2)"),
    ),
}


@on_each_of(4, timeout=SECONDS)
def test_configurations():
    assert_all_refused(CONFIGURATIONS, make(ulysses=2))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"schedule": "rings"}, ("schedule", "'rings'", "'ring'")),
        ({"layout": "zig-zag"}, ("layout", "'zig-zag'", "'zigzag'")),
        ({"kernel": "cpuflash"}, ("kernel", "'cpuflash'", "'cpu_flash'")),
        ({"ulises": 2}, ("'ulises'", "'ulysses'")),
        ({"size": 0}, ("sequence_parallel.size", "got 0")),
        ({"size": "4"}, ("sequence_parallel.size", "got '4'")),
        ({"ulysses": True}, ("sequence_parallel.ulysses", "got True")),
    ],
)
def test_words_that_do_not_exist(section, words):
    assert lacking(refusal(SequenceParallelConfig.from_dict, section), "ConfigError", *words) == []


@on_each_of(1, timeout=SECONDS, keep=None)
def test_without_torch_distributed():
    dist.destroy_process_group()
    assert lacking(refusal(SequenceParallel), "ConfigError", "init_distributed()") == []

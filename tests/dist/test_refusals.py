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
    attention_error,
    differ,
    everywhere,
    is_one_sentence,
    make,
    on_wrong,
    only_one,
    refusal,
    try_all,
)
from tests.launch import on_warm_ranks as on_ranks
from tests.words import missing


def attention(sp, tokens=4, heads=(4, 2), batch=1, dtype=torch.float64, grad=True, change=None, **options):
    """sp.attention with good local tensors, but for what a case asks for."""
    q, k, v = oracle.tensors(batch, tokens, heads, dtype=dtype)[:3]
    local = [x.requires_grad_(grad) for x in (q, k, v)]
    return sp.attention(*(change(*local) if change else local), **options)


def without_kernel(sp, rank):
    """The configured kernel's package is missing on the wrong rank."""
    kernel = KERNELS["cpu_flash"]
    if rank == WRONG:
        kernel.reasons = lambda spec: ["is not installed here"]
    runtime = sp.runtime
    config, runtime.config = runtime.config, dataclasses.replace(runtime.config, kernel="cpu_flash")
    select.cache_clear()
    runtime.fit = None  # as if these tensors were the first of their kind
    runtime.last.clear()
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
    "length": (
        lambda sp, rank: attention(sp, tokens=3),
        everywhere("InputError", "multiple of 8", "got 12", "to 16"),
    ),
    "no tokens": (
        lambda sp, rank: attention(sp, change=lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0])),
        everywhere("InputError", "multiple of 8", "got 0", "to 8"),
    ),
    "nothing to shard": (
        lambda sp, rank: sp.shard(torch.arange(0), 0),
        everywhere("InputError", "one token", "got 0"),
    ),
    "tokens to gather that are not this rank's": (
        lambda sp, rank: sp.gather(torch.zeros(4 * (rank == 0)), 0),
        everywhere("InputError", "gather", "1 tokens of 4"),
    ),
    "query heads": (
        lambda sp, rank: attention(sp, heads=(2, 2), change=lambda q, k, v: (q[:, :, :1], k, v)),
        everywhere("ConfigError", "key/value heads", "1 and 2"),
    ),
    # EasyContext#47: backward shapes differed where the ranks' chunks were unequal
    "shapes": (
        lambda sp, rank: attention(sp, **on_wrong(rank, tokens=8)),
        differ("(1, 4, 4, 8)", "(1, 8, 4, 8)"),
    ),
    "batch": (lambda sp, rank: attention(sp, **on_wrong(rank, batch=2)), differ("(1, 4, 4, 8)", "(2, 4, 4, 8)")),
    "dtypes": (lambda sp, rank: attention(sp, **on_wrong(rank, dtype=torch.float32)), differ("float64", "float32")),
    "causal": (lambda sp, rank: attention(sp, **on_wrong(rank, causal=False)), differ("causal True", "causal False")),
    "scale": (lambda sp, rank: attention(sp, **on_wrong(rank, scale=0.5)), differ("scale None", "scale 0.5")),
    "return_lse": (
        lambda sp, rank: attention(sp, **on_wrong(rank, return_lse=True)),
        differ("return_lse True", "return_lse False"),
    ),
    "requires_grad": (
        lambda sp, rank: attention(sp, **on_wrong(rank, grad=False)),
        differ("backward True", "backward False"),
    ),
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
        lambda sp, rank: attention(sp, **on_wrong(rank, change=lambda q, k, v: (q[0], k, v))),
        only_one("InputError", "local_seq", "q (4, 4, 8)", "k (1, 4, 2, 8)"),
    ),
    "not a tensor": (
        lambda sp, rank: attention(sp, **on_wrong(rank, change=lambda q, k, v: (q, None, v))),
        only_one("InputError", "local_seq", "k NoneType"),
    ),
    "k unlike v": (
        lambda sp, rank: attention(sp, **on_wrong(rank, change=lambda q, k, v: (q, k, v[:, :, :1]))),
        only_one("InputError", "but for head_dim", "v (1, 4, 1, 8)"),
    ),
    "one tensor's dtype": (
        lambda sp, rank: attention(sp, **on_wrong(rank, change=lambda q, k, v: (q, k.float(), v))),
        only_one("InputError", "one dtype", "torch.float64", "torch.float32"),
    ),
    "one rank's length": (
        lambda sp, rank: attention(sp, **on_wrong(rank, tokens=3)),
        only_one("InputError", "multiple of 8", "got 12", "to 16"),
    ),
    "one rank gathers what autograd follows": (
        lambda sp, rank: sp.gather(torch.zeros(8, requires_grad=rank == WRONG), 0),
        only_one("InputError", "requires_grad", "x.detach()"),
    ),
    "one rank gathers nothing": (
        lambda sp, rank: sp.gather(None if rank == WRONG else torch.zeros(8), 0),
        only_one("InputError", "gather", "got NoneType"),
    ),
    "no kernel on one rank": (
        without_kernel,
        only_one("KernelError", "float64 on cpu", "cpu_flash is not installed"),
    ),
    "no kernel": (
        lambda sp, rank: attention(sp, dtype=torch.int64, grad=False),
        everywhere("KernelError", "int64 on cpu", "cpu_flash", "torch.int64"),
    ),
}

# the same ranks with ulysses 2
ULYSSES = {
    "heads": (
        lambda sp, rank: attention(sp, heads=(1, 1)),
        everywhere("ConfigError", "ulysses 2", "1 query", "[1]"),
    ),
    "key/value heads": (
        lambda sp, rank: attention(sp, heads=(6, 4)),
        everywhere("ConfigError", "key/value heads", "6 and 4"),
    ),
    "return_lse": (
        lambda sp, rank: attention(sp, **on_wrong(rank, return_lse=True)),
        differ("return_lse True", "return_lse False"),
    ),
    # what a checkpoint's backward exchanges has other sizes: gloo ended a rank
    "checkpoint": (
        lambda sp, rank: sp.checkpoint(lambda: attention(sp)) if rank == WRONG else attention(sp),
        differ("checkpoint 'none'", "checkpoint 'first run'"),
    ),
    "one rank's heads": (
        lambda sp, rank: attention(sp, **on_wrong(rank, heads=(1, 1))),
        only_one("ConfigError", "ulysses 2", "1 query", "[1]"),
    ),
    "one rank's uneven heads": (
        lambda sp, rank: attention(sp, **on_wrong(rank, heads=(3, 3))),
        differ("(1, 4, 3, 8)", "(1, 4, 4, 8)"),
    ),
    "shapes": (lambda sp, rank: attention(sp, **on_wrong(rank, tokens=8)), differ("(1, 4, 4, 8)", "(1, 8, 4, 8)")),
    "no kernel": (
        lambda sp, rank: attention(sp, dtype=torch.int64, grad=False),
        everywhere("KernelError", "int64 on cpu", "2/1 heads"),
    ),
}


TABLES = {"ring": (RING, 1), "ulysses": (ULYSSES, 2)}


def refused_tensors(name):
    table, degree = TABLES[name]
    return try_all(table, make(ulysses=degree))


@pytest.mark.parametrize("name", TABLES)
def test_tensors(name):
    assert_all_refused(TABLES[name][0], on_ranks(4, refused_tensors, name, timeout=SECONDS))


def wrong_group():
    """Two groups of two ranks; the second is given one rank's tensors wrong."""
    sp = make(size=2)
    rank = dist.get_rank()
    kind, message = refusal(attention, sp, tokens=4, **({"causal": False} if rank == 3 else {}))
    return kind, message


def test_attention_of_one_group_is_refused_on_that_group():
    (first, second, third, fourth) = on_ranks(4, wrong_group, timeout=SECONDS)
    # the other group shares nothing with it here: it goes on, up to what the whole world does together
    assert first == second == (None, None)
    for kind, message in (third, fourth):
        assert kind == "DisagreementError"
        assert is_one_sentence(message)
        assert message.endswith("rank 2: causal True; rank 3: causal False")


CONFIGURATIONS = {
    "size": (
        lambda rank: make(size=3),
        everywhere("ConfigError", "size 3", "4 ranks", "[1, 2, 4]"),
    ),
    "size beyond the world": (lambda rank: make(size=8), everywhere("ConfigError", "size 8", "4 ranks", "[1, 2, 4]")),
    "ulysses beyond the size": (
        lambda rank: make(size=2, ulysses=4),
        everywhere("ConfigError", "ulysses 4", "size 2", "[1, 2]"),
    ),
    # deepspeed#8291: a rank without a head
    "heads": (
        lambda rank: make((3, 1), ulysses=4),
        everywhere("ConfigError", "ulysses 4", "3 query", "[1, 2]"),
    ),
    "heads that do not group": (
        lambda rank: make((4, 3), ulysses=1),
        everywhere("ConfigError", "key/value heads", "4 and 3"),
    ),
    "one number of heads": (
        lambda rank: make((4,)),
        everywhere("ConfigError", "heads", "got (4,)"),
    ),
    "words for heads on one rank": (
        lambda rank: make(("4", "2") if rank == WRONG else (4, 2)),
        only_one("ConfigError", "heads", "got ('4', '2')"),
    ),
    "a section instead of a configuration": (
        lambda rank: SequenceParallel({"size": 4}),
        everywhere("ConfigError", "got dict", "SequenceParallelConfig.from_dict"),
    ),
    "a section on one rank": (
        lambda rank: SequenceParallel({} if rank == WRONG else None),
        only_one("ConfigError", "got dict", "SequenceParallelConfig.from_dict"),
    ),
    "size on one rank": (
        lambda rank: make(size=3 if rank == WRONG else 4),
        only_one("ConfigError", "size 3", "4 ranks", "[1, 2, 4]"),
    ),
    "layouts": (
        lambda rank: make(layout="striped" if rank == WRONG else "zigzag"),
        differ("layout 'zigzag'", "layout 'striped'"),
    ),
    "sizes": (
        lambda rank: make(size=2 if rank == WRONG else 4),
        differ("ranks 0, 2-3: size 4", "rank 1: size 2"),
    ),
    "the models' heads": (
        lambda rank: make((4, 2) if rank == WRONG else (4, 4), ulysses=2),
        differ("ranks 0, 2-3: heads (4, 4)", "rank 1: heads (4, 2)"),
    ),
}


def refused_configurations():
    found = {name: (*refusal(call, dist.get_rank()), 0) for name, (call, _) in CONFIGURATIONS.items()}
    return found, attention_error(make(ulysses=2))


def test_configurations():
    assert_all_refused(CONFIGURATIONS, on_ranks(4, refused_configurations, timeout=SECONDS))


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
    kind, message = refusal(SequenceParallelConfig.from_dict, section)
    assert kind == "ConfigError"
    assert is_one_sentence(message)
    assert missing(message, *words) == []


def not_initialised():
    dist.destroy_process_group()
    return refusal(SequenceParallel)


def test_without_torch_distributed():
    ((kind, message),) = on_ranks(1, not_initialised, timeout=SECONDS, keep=None)
    assert kind == "ConfigError"
    assert is_one_sentence(message)
    assert "init_distributed()" in message

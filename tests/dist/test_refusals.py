"""Bad settings and tensors get one clear sentence on every rank before attention communicates, and never a hang.

To add what attention refuses, add a row to the table of the ranks on which it does.
"""

import dataclasses
import os

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from ds_seqpar import SequenceParallel
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
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


def attention(
    sp, tokens=4, keys=None, heads=(4, 2), batch=1, dim=8, dtype=torch.float64, grad=True, change=None, **asked
):
    """sp.attention with good local tensors, but for what a case asks for."""
    q = oracle.tensors(batch, tokens, heads, dim, dtype)[0]
    _, k, v, _ = oracle.tensors(batch, keys or tokens, heads, dim, dtype)
    local = [x.requires_grad_(grad) for x in (q, k, v)]
    return sp.attention(*(change(*local) if change else local), **asked)


def asked(**options):
    """A case in which every rank asks so."""
    return lambda sp, rank: attention(sp, **options)


def one_asks(**options):
    """A case in which the wrong rank does."""
    return lambda sp, rank: attention(sp, **(options if rank == WRONG else {}))


def instead_of(usual, **options):
    """A case in which the wrong rank asks so, and the others as usual."""
    return lambda sp, rank: attention(sp, **{**usual, **(options if rank == WRONG else {})})


def on_one_rank(call):
    return lambda sp, rank: call(sp, rank) if rank == WRONG else attention(sp)


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


def placed(sp, rank):
    """Attention over packed documents, on the wrong rank with the placement of another batch."""
    ids = torch.arange(16)[None]
    restarts = (torch.arange(8).repeat(2), torch.cat([torch.arange(4), torch.arange(12)]))
    mine, other = (sp.shard_batch({"labels": ids, "position_ids": x})["placement"] for x in restarts)
    q = torch.zeros(1, 4, 4, 8)
    placement = other if rank == WRONG else mine
    return sp.attention(q, q, q, mask=placement.mask, shards=placement.shards)


def instead(call, usual):
    """A case in which the wrong rank calls something else than the others."""
    return lambda sp, rank: (call if rank == WRONG else usual)(sp)


def reentrant(sp):
    return sp.checkpoint(lambda _: attention(sp), torch.zeros(1, requires_grad=True), use_reentrant=True)


def dual(sp, rank):
    with forward_ad.dual_level():
        attention(sp, change=lambda q, k, v: (forward_ad.make_dual(q, torch.ones_like(q)), k, v))


def distributed(sp, rank):
    mesh = DeviceMesh("cpu", list(range(4)))
    attention(sp, change=lambda q, k, v: [DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k, v)])


def transformed(transform):
    def call(sp, rank):
        q, k, v = oracle.tensors(1, 4, (4, 2))[:3]
        transform(lambda x: sp.attention(x, k, v).sum(), q)

    return call


def unshaped(q, k, v):
    return q, torch.nn.UninitializedParameter(), v


def nested(q, k, v):
    return torch.nested.as_nested_tensor([q[0], q[0, :2]], layout=torch.jagged), k, v


def on_meta(*tensors):
    return tuple(x.to("meta") for x in tensors)


def jvp(f, q):
    return torch.func.jvp(f, (q,), (torch.ones_like(q),))


def runs_of(*lengths):
    """One run a rank, of so many tokens each."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [[Run(start, 1, length)] if length else [] for start, length in zip(starts, lengths, strict=True)]


WINDOW, TWO = {"mask": Mask(window=5)}, {"mask": Mask(documents=(0, 5))}
EVEN = {"shards": UnevenShards(runs_of(4, 4, 4, 4))}
CONFIG, KERNEL = {"kind": "ConfigError"}, {"kind": "KernelError"}
# name -> (what a rank calls, what it is to be told). The SequenceParallel: 4 ranks, zigzag, ulysses 1, so 8 | length.
# test_disagreements.py has ranks whose shapes, dtypes, masks, layouts, gradients or checkpoints differ
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
    "causal": (one_asks(causal=False), differ("causal False")),
    "scale": (one_asks(scale=0.5), differ("scale 0.5")),
    "return_lse": (one_asks(return_lse=True), differ("return_lse True")),
    "requires_grad": (one_asks(grad=False), differ("backward False")),
    "reentrant checkpoint beside no gradients": (
        instead(reentrant, lambda sp: attention(sp, grad=False)),
        differ("checkpoint 'first run'"),
    ),
    "a placement of another batch": (placed, differ("a placement belongs to another batch")),
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
    # masks and shards
    "windows": (instead_of(WINDOW, mask=Mask(window=6)), differ("window 6")),
    "a mask on one rank": (one_asks(**WINDOW), differ("no mask")),
    "documents": (instead_of(TWO, mask=Mask(documents=(0, 6))), differ("2 documents")),
    "parents": (instead_of(TWO, mask=Mask(documents=(0, 5), parents=(-1, 0))), differ("2 documents with parents")),
    "causal or not": (instead_of({"mask": FULL}, mask=Mask(causal=False, window=5)), differ("window 5")),
    "documents beyond the sequence": (asked(mask=Mask(documents=(0, 4, 16))), everywhere("at 16")),
    "one rank's documents": (one_asks(mask=Mask(documents=(0, 99))), only_one("at 99")),
    "a tensor for a mask": (asked(mask=torch.ones(4, 4, dtype=torch.bool)), everywhere("got a tensor")),
    "one rank's word for a mask": (one_asks(mask="window"), only_one("got 'window'")),
    "an array for a mask": (asked(mask=numpy.ones((9, 9))), everywhere("got array([")),
    "shards of other ranks": (asked(shards=UnevenShards(runs_of(4, 12))), everywhere("2 ranks")),
    "a list for shards": (asked(shards=runs_of(4, 4, 4, 4)), everywhere("got list")),
    "one rank's tensor for shards": (instead_of(EVEN, shards=torch.zeros(4)), only_one("got Tensor")),
    "a named layout for shards": (asked(shards=EvenShards("zigzag", 16, 4)), everywhere("got EvenShards")),
    "shards": (instead_of(EVEN, shards=UnevenShards(runs_of(3, 4, 5, 4))), differ("shards 'of 4 ranks")),
    "shards on one rank": (one_asks(**EVEN), differ("no shards")),
    "one rank's head_dim": (instead_of(EVEN, dim=16), differ("q '(1, 4, 16)")),
    "one rank's tokens": (instead_of(EVEN, tokens=5), only_one("5 and 5")),
    "one rank's keys": (instead_of(EVEN, keys=5), only_one("4 and 5")),
    "keys of another length without shards": (asked(keys=5), everywhere("k (1, 5, 2, 8)")),
}

# the same ranks with ulysses 2
ULYSSES = {
    "heads": (asked(heads=(1, 1)), everywhere("ulysses 2", "1 query", **CONFIG)),
    "key/value heads": (asked(heads=(6, 4)), everywhere("6 and 4", **CONFIG)),
    "return_lse": (one_asks(return_lse=True), differ("return_lse True")),
    # what a checkpoint's backward exchanges has other sizes: gloo ended a rank
    "checkpoint": (
        instead(lambda sp: sp.checkpoint(lambda: attention(sp)), attention),
        differ("checkpoint 'first run'"),
    ),
    "one rank's heads": (one_asks(heads=(1, 1)), only_one("ulysses 2", "1 query", **CONFIG)),
    "one rank's uneven heads": (one_asks(heads=(3, 3)), differ("(1, 4, 3, 8)")),
    "no kernel": (asked(dtype=torch.int64, grad=False), everywhere("int64 on cpu", "2/1 heads", **KERNEL)),
    # scales, of which None, 1 and the numbers of numpy are good, and what fp32 can hold
    **{
        f"scale {scale!r:.9}": (asked(scale=scale), everywhere("scale", f"got {scale!r}"))
        for scale in (0.0, -0.5, float("nan"), float("inf"), 1e-40, 1e300, 10**400, "0.5", True)
    },
    **{f"causal {x!r}": (asked(causal=x), everywhere(f"got {x!r}")) for x in (None, "yes", 1)},
    "scale a tensor": (asked(scale=torch.tensor(0.5)), everywhere("got a tensor")),
    "no sequence": (asked(change=lambda q, k, v: (q[:0], k[:0], v[:0])), everywhere("(0, 4, 4, 8)")),
    "no heads": (asked(change=lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0])), everywhere("(1, 4, 0, 8)")),
    "no kv heads": (asked(change=lambda q, k, v: (q, k[:, :, :0], v[:, :, :0])), everywhere("(1, 4, 0, 8)")),
    "no head_dim": (asked(change=lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0])), everywhere("(1, 4, 4, 0)")),
    "integers": (asked(change=lambda q, k, v: (q.long(), k.long(), v.long())), everywhere("int64 on cpu", **KERNEL)),
    "complex": (asked(change=lambda q, k, v: (q + 0j, k + 0j, v + 0j)), everywhere("complex128 on cpu", **KERNEL)),
    "sparse": (asked(change=lambda q, k, v: (q.to_sparse(), k, v)), everywhere("layout sparse_coo")),
    "nested": (asked(change=nested), everywhere("a nested tensor")),
    "distributed by torch": (distributed, everywhere("a DTensor")),
    "meta": (asked(change=on_meta), everywhere("on meta", **KERNEL)),
    "no shape": (asked(change=unshaped), everywhere("uninitialized parameter")),
    "one rank's no shape": (one_asks(change=unshaped), only_one("uninitialized parameter")),
    "one rank's scale": (one_asks(scale=float("nan")), only_one("got nan")),
    "forward-mode derivatives": (dual, everywhere("forward-mode")),
    "one rank's forward-mode derivatives": (on_one_rank(dual), only_one("forward-mode")),
    "torch.func.grad": (transformed(lambda f, q: torch.func.grad(f)(q)), everywhere("no torch.func")),
    "torch.func.jvp": (transformed(jvp), everywhere("no torch.func")),
    "torch.func.vmap": (on_one_rank(transformed(lambda f, q: torch.func.vmap(f)(q[None]))), only_one("no torch.func")),
}
DISTFLASH = {
    "full": (asked(mask=FULL), everywhere("distflash", "causal", **CONFIG)),
    "one rank's mask": (one_asks(mask=FULL), only_one("distflash", "causal", **CONFIG)),
}
REFERENCE = {"meta": (asked(change=on_meta), everywhere("not meta", **KERNEL))}


TABLES = {
    "ring": (RING, {"ulysses": 1}),
    "ulysses": (ULYSSES, {"ulysses": 2}),
    "distflash": (DISTFLASH, {"ulysses": 1, "schedule": "distflash"}),
    "reference": (REFERENCE, {"ulysses": 2, "kernel": "reference"}),
}


@pytest.mark.parametrize("names", [["ring", "distflash"], ["ulysses", "reference"]])
@on_each_of(4, timeout=SECONDS)
def test_tensors(names):
    for table, config in (TABLES[name] for name in names):
        assert_all_refused(table, make(**config))


@on_each_of(4)
def test_ulysses_ranks_that_share_tokens_have_their_own_number_of_them():
    sp = make(ulysses=2)
    shards = UnevenShards(runs_of(5, 6))
    right = [(2, 3), (3, 3)][sp.runtime.rank][sp.topology.index(sp.rank, "ulysses")]
    assert attention(sp, right, shards=shards).shape[1] == right
    kind = "InputError" if sp.rank == WRONG else "DisagreementError"
    refused = refusal(attention, sp, right + (sp.rank == WRONG), shards=shards)
    assert lacking(refused, kind, "shards", "3 of q", "4 and 4") == []


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

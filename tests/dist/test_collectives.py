"""What ranks give to a public collective is compared first: what one rank gives otherwise raises on all of them, and
tensors of every dtype are moved or refused."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.whole import whole_of
from ds_seqpar.whole.shard_spec import ShardSpec
from tests import oracle
from tests.dist.ranks import WRONG, assert_all_refused, differ, everywhere, lacking, make, only_one, refusal
from tests.launch import on_each_of

BATCH = {"labels": torch.arange(16)[None]}


def summed(wrong, right=lambda: torch.ones(3)):
    """A case in which the wrong rank gives `sum_over_ranks` something else than the others."""
    return lambda sp, rank: sp.sum_over_ranks(wrong() if rank == WRONG else right())


def gathered(*wrong):
    """A case in which the wrong rank gives `gather` these arguments."""
    return lambda sp, rank: sp.gather(*(wrong if rank == WRONG else (torch.ones(8), 0)))


def averaged(*losses):
    """A case in which the wrong rank gives `mean_loss` what a generator of these functions makes."""
    return lambda sp, rank: sp.mean_loss((make() for make in losses) if rank == WRONG else torch.ones(()))


def parts(sp):
    where = ShardSpec.of(sp.sharding, 2, 16, None, "logits")
    return whole_of(torch.ones(2, 8, 5), where)


def collected_alone(sp, rank):
    return sp.mean_loss(torch.ones(())) if rank == WRONG else sp.gather(torch.ones(8), 0)


def resumed_alone(sp, rank):
    loader, again = (sp.loader(torch.utils.data.DataLoader(range(8))) for _ in range(2))
    next(iter(loader))
    if rank == WRONG:
        again.load_state_dict(loader.state_dict())
    return next(iter(again))


# name -> (what a rank calls, what it is to be told). 2 ranks
WRONG_INPUTS = {
    "shapes": (summed(lambda: torch.ones(2, 3), lambda: torch.ones(3, 2)), differ("shape (3, 2)", "shape (2, 3)")),
    "lengths": (summed(lambda: torch.ones(4)), differ("shape (3,)", "shape (4,)")),
    "numbers of dims": (summed(lambda: torch.ones(3, 1)), differ("shape (3,)", "shape (3, 1)")),
    "half precisions": (
        summed(lambda: torch.ones(3).half(), lambda: torch.ones(3).bfloat16()),
        differ("bfloat16", "float16"),
    ),
    "precisions": (summed(lambda: torch.ones(3).double()), differ("float32", "float64")),
    "nothing to sum": (summed(lambda: None), only_one("sum_over_ranks", "NoneType")),
    "a number to sum": (summed(lambda: 3.0), only_one("sum_over_ranks", "got float")),
    "a sparse tensor": (summed(lambda: torch.ones(3).to_sparse()), only_one("sum_over_ranks", "sparse_coo")),
    "no memory": (summed(lambda: torch.ones(3, device="meta")), only_one("sum_over_ranks", "meta device")),
    "bools": (lambda sp, rank: sp.sum_over_ranks(torch.ones(3).bool()), everywhere("added up", "torch.bool")),
    "a whole tensor to sum": (lambda sp, rank: sp.sum_over_ranks(parts(sp)), everywhere("in parts", ".local")),
    "a whole tensor to gather": (
        lambda sp, rank: sp.gather(parts(sp).detach(), 1),
        everywhere("gather", "in parts", ".local"),
    ),
    "dtypes to gather": (gathered(torch.ones(8).int(), 0), differ("float32", "int32")),
    "no memory to gather": (gathered(torch.ones(8, device="meta"), 0), only_one("gather", "meta device")),
    "a sparse tensor to gather": (gathered(torch.ones(8).to_sparse(), 0), only_one("gather", "sparse_coo")),
    "no placement": (gathered(torch.ones(8), 0, "placement"), only_one("gather", "placement str")),
    "no dim": (gathered(torch.ones(8), 0.0), only_one("gather", "dim 0.0")),
    "losses on two devices": (
        averaged(lambda: torch.ones(()), lambda: torch.ones((), device="meta")),
        only_one("averaging losses failed"),
    ),
    "losses that cannot be made": (averaged(lambda: 1 / 0), only_one("averaging losses failed", "ZeroDivisionError")),
    "losses by name": (
        lambda sp, rank: sp.mean_loss({"loss": torch.ones(())} if rank == WRONG else torch.ones(())),
        only_one("mean_loss", "got dict"),
    ),
    "a loader that one rank resumes": (resumed_alone, differ("same loader", "number 0", "number 1")),
    "another call": (collected_alone, differ("calls", "losses", "tensor to gather")),
    "a device that is none": (
        lambda sp, rank: sp.shard_batch(BATCH, device="nope" if rank == WRONG else None),
        only_one("making the micro-batches of a step failed"),
    ),
    "nothing to shard": (lambda sp, rank: sp.shard(None, 0), everywhere("shard needs a tensor", "NoneType")),
    "a dim that is none": (lambda sp, rank: sp.shard(torch.ones(8), 3), everywhere("shard", "(8,) and dim 3")),
    "half a token": (lambda sp, rank: sp.place(16.5), everywhere("whole number of tokens", "16.5")),
}


@on_each_of(2)
def test_what_one_rank_gives_otherwise_is_told_to_all():
    assert_all_refused(WRONG_INPUTS, make())


def tensors_of(dtype, seed):
    """A tensor (8, 3) of random bits that are no NaN, or None where torch makes no tensor of the dtype."""
    numbers = torch.rand(8, 3, generator=torch.Generator().manual_seed(seed)).mul(100)
    try:
        return numbers.to(dtype)
    except (RuntimeError, NotImplementedError):
        return None


def bits(x):
    return x.resolve_conj().contiguous().flatten().view(torch.uint8)


DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


@on_each_of(2)
def test_every_dtype_is_moved_and_summed_or_refused():
    """Bits as they are; a sum as torch's, of dtypes that have one."""
    sp, moved, added = make(), set(), set()
    for dtype, dim in itertools.product(DTYPES, (0, 1)):
        given = tensors_of(dtype, seed=0)
        if given is None:
            continue
        x = given.t().contiguous() if dim else given
        own = sp.shard(x, dim)
        assert torch.equal(bits(sp.gather(own, dim)), bits(x)), dtype
        column = given[:, 0].contiguous()  # torch indexes some dtypes in more dims than one alone
        assert torch.equal(bits(sp.gather(sp.shard(column, 0), 0)), bits(column)), dtype
        moved.add(dtype)
        refused = refusal(sp.sum_over_ranks, x)
        if refused[0] is None:
            assert torch.equal(bits(sp.sum_over_ranks(x)), bits(x + x)), dtype
            added.add(dtype)
        else:
            assert lacking(refused, "InputError", "can be added up", str(dtype)) == []
    hard = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64}
    assert {*hard, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.complex128} <= moved
    assert {torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8} <= added
    assert not hard & added
    conjugate = torch.randn(8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj()
    assert torch.equal(sp.gather(sp.shard(conjugate, 0), 0), conjugate)


@on_each_of(2)
def test_a_gather_copies_no_shards():
    """Into a list of tensors NCCL gathers through a copy of all of them."""

    class Sent(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names += (function.name(),) * (function.namespace == "c10d")
            return function(*args, **(kwargs or {}))

    sp = make(size=2)
    with Sent() as sent:
        whole = sp.gather(torch.full((3, 2), sp.rank, dtype=torch.complex128), 0)
    assert whole[:, 0].real.unique().tolist() == [0, 1]
    assert [name for name in sent.names if "gather" in name] == ["c10d::_allgather_base_"]


@on_each_of(2)
def test_whole_numbers_may_be_numpys():
    sp = make()
    assert sp.place(np.int64(16)) is None
    assert torch.equal(sp.position_ids(np.int64(16)), sp.position_ids(16))
    assert str(sp.place(np.int64(16), (np.int32(5), 11))) == str(sp.place(16, (5, 11)))
    x = torch.arange(16.0)
    assert torch.equal(sp.gather(sp.shard(x, np.int64(0)), np.int64(-1)), x)


@on_each_of(2)
def test_a_constant_of_one_rank_and_infinite_numbers_are_summed():
    """A rank without tokens may have a constant; an infinite loss stays infinite, and its gradient is not NaN."""
    sp, x = make(), torch.tensor([1.0, float("inf")])
    own = x.clone().requires_grad_(dist.get_rank() == 0)
    total = sp.sum_over_ranks(own)
    assert total.tolist() == [2.0, float("inf")]
    if own.requires_grad:
        total.sum().backward()
        assert own.grad.tolist() == [2.0, 2.0]
    loss = x[1].clone().requires_grad_()
    mean = sp.mean_loss([loss, loss], differentiable=True)
    mean.backward()
    assert (mean.item(), loss.grad.item()) == (float("inf"), 1.0)


@pytest.mark.parametrize("again", [False, True])
@on_each_of(2, keep=None)
def test_groups_that_were_destroyed_get_a_sentence(again, tmp_path):
    """Also where torch.distributed is up again, whose groups are others."""
    made = [SequenceParallel(SequenceParallelConfig(size=2, ulysses=ulysses_size)) for ulysses_size in (1, 2)]
    q = torch.ones(1, 8, 4, 8, requires_grad=True)
    out, rank = made[1].attention(q, q, q), dist.get_rank()
    dist.destroy_process_group()
    if again:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=rank, world_size=2)
    calls = {"backward of attention": lambda: out.sum().backward()}
    for sp in made:
        calls |= {
            "attention": lambda sp=sp: sp.attention(q, q, q),
            "gather": lambda sp=sp: sp.gather(torch.ones(8), 0),
            "sum_over_ranks": lambda sp=sp: sp.sum_over_ranks(torch.ones(3)),
            "mean_loss": lambda sp=sp: sp.mean_loss(torch.ones(())),
            "shard_batches": lambda sp=sp: sp.shard_batch(BATCH),
        }
        for name, call in calls.items():
            words = name, "needs the process groups", "destroyed with torch.distributed"
            assert lacking(refusal(call), "ConfigError", *words) == []
        calls = {}
    if again:
        whole = oracle.tensors(1, 16, (4, 2))
        assert SequenceParallel().attention(*whole[:3]).shape == whole[0].shape

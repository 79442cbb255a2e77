"""The ranks of a sequence are given the same samples, and groups those of a plain run on as many data ranks."""

import io
import itertools
import os
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from tests.dist.ranks import make, refusal
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks
from tests.words import missing

EXAMPLES, EPOCHS = 1003, 2  # a number that nothing here divides
BATCH, MIDDLE = 100, 2  # examples of a batch; batches of an epoch before it is left


class Numbers(Dataset):
    """Each example is its own number."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return index, 0.0


class Stream(IterableDataset):
    """The numbers in order; each worker has its local part of them."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from ((index, 0.0) for index in range(first, EXAMPLES, step))


def plain(kind, **changes):
    """A DataLoader over the whole data set, seeded as on every rank."""
    torch.manual_seed(5)
    stateful = kind.startswith("stateful")
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader
    loader = StatefulDataLoader if stateful else DataLoader
    changes |= {"batch_size": BATCH, "collate_fn": list}  # tensors would come from workers by a socket each
    if kind.endswith("stream"):
        return loader(Stream(), **changes)
    return loader(Numbers(), shuffle="in order" not in kind, **changes)


def numbers(batches):
    return [[index for index, _ in batch] for batch in batches]


def dealt(whole, groups):
    """By group its batches of the whole loader's: every group has as many, the first ones fill up the last."""
    flat = list(itertools.chain(*whole))
    flat += flat[: -len(flat) % (BATCH * groups)]
    batches = [flat[at : at + BATCH] for at in range(0, len(flat), BATCH)]
    return [batches[group::groups] for group in range(groups)]


# kind of loader -> its workers
KINDS = {"shuffled by a worker": 1, "shuffled by workers": 2, "stateful by a worker": 1}
KINDS |= dict.fromkeys(("shuffled", "in order", "stateful", "stream", "stateful stream"), 0)


def epochs(sizes, kinds, read_once):
    """By (size, kind): this rank's numbers in each epoch, those of a run that was left in the middle of the last one
    and went on in a new loader, and the state's size."""
    found = {}
    for size in sizes:
        sp = make(size=size)
        for kind in kinds:
            loader = sp.loader(plain(kind, num_workers=KINDS[kind]), read_once)
            whole = [numbers(loader) for _ in range(EPOCHS)]
            loader = sp.loader(plain(kind, num_workers=KINDS[kind]), read_once)
            left = [numbers(loader) for _ in range(EPOCHS - 1)]
            begun = numbers(itertools.islice(loader, MIDDLE))
            file = io.BytesIO()
            torch.save(loader.state_dict(), file)
            other = sp.loader(plain(kind, num_workers=KINDS[kind]), read_once)
            torch.manual_seed(77)  # whatever was drawn meanwhile
            other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
            left.append(begun + numbers(other))
            found[size, kind] = whole, left, len(whole[0] if "stream" in kind else loader)
    return found


@pytest.mark.parametrize(
    ("kinds", "read_once"),
    [
        (["shuffled by a worker", "stateful"], False),
        (["stream"], True),
        pytest.param(
            ["in order", "shuffled", "shuffled by workers", "stateful by a worker", "stateful stream", "stream"],
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_epoch_is_dealt_to_groups_and_goes_on_where_it_was_left(kinds, read_once):
    """Groups of 2 and of 4 on 4 ranks."""
    results = on_ranks(4, epochs, (2, 4), kinds, read_once)
    for size, kind in itertools.product((2, 4), kinds):
        one = plain(kind)
        wholes = [numbers(one) for _ in range(EPOCHS)]
        for rank, found in enumerate(results):
            whole, left, length = found[size, kind]
            group, groups = rank // size, 4 // size
            expected = [dealt(x, groups)[group] for x in wholes] if groups > 1 else wholes
            assert whole == expected, (size, kind, rank)
            assert left == expected, (size, kind, rank)
            assert length == len(expected[0])


@pytest.mark.parametrize("size", [2, 4])
@on_each_of(4)
def test_a_sampler_draws_what_plain_data_ranks_draw(size):
    sp = make(size=size)
    sampler = sp.sampler(Numbers(), seed=3)
    loader = sp.loader(DataLoader(Numbers(), batch_size=BATCH, sampler=sampler, collate_fn=list))
    plain_one = DistributedSampler(Numbers(), num_replicas=sp.data_size, rank=sp.data_rank, seed=3)
    assert (sp.data_size, sp.data_rank) == (4 // size, dist.get_rank() // size)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        plain_one.set_epoch(epoch)
        assert list(itertools.chain(*numbers(loader))) == list(plain_one)


class Augmented(Numbers):
    """Draws from every global generator."""

    def __getitem__(self, index):
        return index, (torch.rand(()).item(), random.random(), numpy.random.rand())


class Failing(Numbers):
    def __init__(self, rank, at):
        self.rank, self.at = rank, at

    def __getitem__(self, index):
        if os.environ["RANK"] == str(self.rank) and index >= self.at:
            raise OSError("cannot read shard 7")
        return super().__getitem__(index)


def uneven(sp, rank):
    """One group has fewer examples: a stream says no length."""
    stream = torch.utils.data.ChainDataset([Stream()] * (1 if rank < 2 else 2))
    vars(stream)["_distributed"] = sp.sampler(range(4))  # its local part, as of datasets
    return list(sp.loader(DataLoader(stream, batch_size=500)))


def by_rank(sp, rank):
    torch.manual_seed(rank // 2)  # a seed by group
    return list(sp.loader(DataLoader(Numbers(), batch_size=BATCH, shuffle=True)))


WRONG = {
    "for all ranks": (
        lambda sp, rank: sp.loader(DataLoader(Numbers(), sampler=DistributedSampler(Numbers()))),
        ["sp.data_rank", "of 4 by its DistributedSampler", "use sampler=sp.sampler(dataset)"],
    ),
    "no loader": (lambda sp, rank: sp.loader([1, 2]), ["needs a DataLoader", "got list"]),
    "no batches": (lambda sp, rank: sp.loader(DataLoader(Numbers(), batch_size=None)), ["batch_size=None"]),
    "other data sets": (
        lambda sp, rank: sp.loader(DataLoader(range(8 + rank))),
        ["same loader", "rank 0: examples 8", "rank 3: examples 11"],
    ),
    "fails": (
        lambda sp, rank: list(sp.loader(DataLoader(Failing(2, 900), batch_size=BATCH))),
        ["cannot read shard 7"],
    ),
    "fails in workers": (
        lambda sp, rank: list(sp.loader(DataLoader(Failing(2, 900), 100, num_workers=1), True)),
        ["loading data failed", "cannot read shard 7"],
    ),
    "cannot be sent": (
        lambda sp, rank: list(sp.loader(DataLoader(Numbers(), collate_fn=lambda x: lambda: x), read_once=True)),
        ["loading data failed", "pickle"],
    ),
    "seeds of groups": (by_rank, ["same loader", "their samplers draw other orders", "seed all ranks alike"]),
    "unequal numbers": (uneven, ["same loader", "give each group as many", "no more"]),
}


@on_each_of(4)
def test_what_is_wrong_is_said_on_all_ranks():
    sp = make(size=2)
    for name, (call, words) in WRONG.items():
        kind, message = refusal(call, sp, dist.get_rank())
        assert kind is not None, name
        assert missing(message, *words) == [], (name, message)
    state = {**make(size=4).loader(DataLoader(Numbers())).state_dict(), "batches": 3}  # of one sequence each
    said = refusal(sp.loader(DataLoader(Numbers())).load_state_dict, state)[1]
    assert missing(said, "after 3 of 1 sequences in 1 groups", "in 2") == []


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    return torch.Generator().manual_seed(seed)


def drawn(by_group, size=2):
    """What a data set drew that one rank reads for its group, and what a loss then draws after every batch and after
    the epoch. by_group: whether ranks seed by themselves."""
    generator = seed_all(dist.get_rank() if by_group else 0)
    loader = DataLoader(Augmented(), BATCH, shuffle=not by_group, collate_fn=list, generator=generator)
    return drawn_by(make(size=size).loader(loader, read_once=True), generator)


def drawn_by(loader, generator):
    def of_loss():
        return torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist(), random.random(), numpy.random.rand()

    found = [(*batch, of_loss()) for _ in range(EPOCHS) for batch in loader]
    return [*found, of_loss()]


def test_one_may_read_for_all():
    """Ranks that seed by themselves too."""
    first, second, third, fourth = on_ranks(4, drawn, True)
    assert first == second != third == fourth


def test_where_one_reads_for_all_a_loss_draws_what_the_plain_run_draws():
    generator = seed_all(0)
    expected = drawn_by(DataLoader(Augmented(), BATCH, shuffle=True, collate_fn=list, generator=generator), generator)
    assert on_ranks(2, drawn, False) == [expected] * 2

"""Whole batches on a device: the call that shards them reads nothing, and the next one raises what is wrong."""

import dataclasses
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from ds_seqpar.base.compat import tree_map
from ds_seqpar.base.errors import DisagreementError, InputError
from ds_seqpar.base.on_devices import DeviceCache
from ds_seqpar.data import batches
from ds_seqpar.data.batches import shard_call
from ds_seqpar.data.inputs import INPUTS, joined, row, tokens
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.guards.consistency import ConsistencyChecker
from ds_seqpar.whole import whole_of
from ds_seqpar.whole.shard_spec import ShardSpec
from tests.dist.ranks import is_one_sentence, make
from tests.fake_cuda import Driverless, aten
from tests.launch import on_each_of, on_ranks
from tests.words import missing

SEQ = 16
TOKENS, CLASSES = 40, 30  # that the model has


def vocabulary(sp):
    """A model that knows so many tokens and labels, for as long as somebody refers to it."""
    model = torch.nn.Linear(1, 1)
    sp.sharding.vocabularies[model] = lambda _: (TOKENS, CLASSES)
    return model


def batch(**other):
    ids = torch.arange(2 * SEQ).view(2, SEQ) % CLASSES
    return {"input_ids": ids, "labels": ids.clone(), **other}


def changed(x, value, *index):
    x = x.clone()
    x[index] = value
    return x


PADDING = changed(torch.ones(2, SEQ, dtype=torch.int64), 0, 1, slice(SEQ - 3, None))
TABLE = joined(INPUTS, {"weights": row(), "seen": tokens()})
RIGHT = {
    "plain": batch(),
    "without labels": {"input_ids": batch()["input_ids"]},
    "embeddings": {"inputs_embeds": torch.randn(2, SEQ, 3), "labels": batch()["labels"]},
    "another length": {name: x[:, 1:] for name, x in batch().items()},
    "a pack": batch(position_ids=torch.arange(4).repeat(2, SEQ // 4), weights=torch.rand(2), seen=torch.rand(2, SEQ)),
    "padding": batch(labels=batch()["labels"].masked_fill(PADDING == 0, -100), attention_mask=PADDING),
    "padding on the left": batch(attention_mask=PADDING.flip(1), labels=changed(batch()["labels"], -100, 1)),
}
WRONG = {
    "a negative id": batch(input_ids=changed(batch()["input_ids"], -1, 1, 3)),
    "an unknown id": batch(input_ids=changed(batch()["input_ids"], TOKENS, 0, slice(5, 9))),
    "a negative label": batch(labels=changed(batch()["labels"], -7, 0, 0)),
    "an unknown label": batch(labels=changed(batch()["labels"], CLASSES, 1, SEQ - 1)),
    "a label in padding": batch(attention_mask=PADDING),
}


@on_each_of(2)
def test_what_is_read_later_is_sharded_as_what_is_read_at_once():
    sp = make(ulysses=1)
    model = vocabulary(sp)
    for name, given in RIGHT.items():
        later = ValueChecks(at_once=())
        (shard, counted), (other, other_counted) = (
            shard_call(sp.sharding, given, x, None, TABLE) for x in (ValueChecks(), later)
        )
        assert shard.keys() == other.keys(), name
        for key, x in shard.items():
            assert torch.equal(x, other[key]) if isinstance(x, torch.Tensor) else x == other[key], (name, key)
        assert isinstance(counted, float)
        assert float(other_counted) == counted
        later.compare(given)
        sp.checker.check_now("whole batch", later.fields)
        later.post(sp.checker)
    del model


@on_each_of(2)
def test_values_that_are_on_the_cpu_too_are_read_there_at_once():
    sp = make(ulysses=1)
    model = vocabulary(sp)
    for given in (RIGHT["a pack"], RIGHT["padding on the left"]):
        on_cpu = {name: x for name, x in given.items() if not x.is_floating_point()}
        on_device = {name: x + 1 if name in batches.READ else x for name, x in given.items()}  # these are not read
        later = ValueChecks(at_once=())
        expected, counted = shard_call(sp.sharding, given, ValueChecks(), None, TABLE)
        shard, other = shard_call(sp.sharding, on_device, later, on_cpu, TABLE)
        assert float(other) == counted
        assert all(torch.equal(x, shard[name]) for name, x in expected.items() if isinstance(x, torch.Tensor))
        assert shard["placement"] == expected["placement"]
    with pytest.raises(InputError, match="labels must be tokens"):
        shard_call(sp.sharding, batch(), ValueChecks(at_once=("cpu",)), {"labels": WRONG["an unknown label"]["labels"]})
    del model


@on_each_of(2)
def test_a_wrong_value_is_raised_in_the_next_comparison_and_computed_with_by_nobody():
    sp = make(ulysses=1)
    model = vocabulary(sp)
    for name, given in WRONG.items():
        with pytest.raises(InputError) as at_once:
            shard_call(sp.sharding, given, ValueChecks())
        checks = ValueChecks(at_once=())
        shard, _ = shard_call(sp.sharding, given, checks)
        assert 0 <= shard["input_ids"].min() <= shard["input_ids"].max() < TOKENS
        assert -100 <= shard["shift_labels"].min() <= shard["shift_labels"].max() < CLASSES
        assert not ((shard["shift_labels"] < 0) & (shard["shift_labels"] != -100)).any()
        sp.checker.check_now("whole batch", name)
        checks.post(sp.checker)
        with pytest.raises(InputError) as later:
            sp.checker.check_now("whole batch", name)
        assert str(later.value) == f"{at_once.value} (in an earlier forward: on a device it is seen one later)"
        assert is_one_sentence(str(later.value))
        sp.checker.check_now("whole batch", name)  # it is raised once
    del model


@on_each_of(2)
def test_another_batch_of_one_rank_is_raised_in_the_next_comparison():
    sp = make(ulysses=1)
    for name in ("input_ids", "labels"):
        given = batch()
        given[name] = changed(given[name], sp.rank, 0, 1)
        checks = ValueChecks(at_once=())
        checks.compare({**given, "epoch": 3, "embeddings": torch.randn(2, SEQ, 3)})
        sp.checker.check_now("whole batch", checks.fields)  # shapes are the same
        checks.post(sp.checker)
        with pytest.raises(DisagreementError) as raised:
            sp.checker.check_now("whole batch", 0)
        assert missing(str(raised.value), f"{name} 'with values", "rank 0", "rank 1") == []
        others = {"input_ids", "labels"} - {name}
        assert missing(str(raised.value), *others) == list(others)


class Moves(TorchDispatchMode):
    """Keeps copies between devices, (from, to), and raises where the host would wait for one."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in (aten._to_copy.default, aten.copy_.default):
            source = args[function is aten.copy_.default].device
            if source != made.device:
                assert args[2:] == (True,) or kwargs.get("non_blocking")
                self.found.append((source.type, made.device.type))
        return made


def on_fake_cuda():
    """Copies in the first forward and the second, by batch: to read a value raises."""
    sp, found = make(), {}
    model = vocabulary(sp)
    sp.sharding.mask_users.add(model)
    fakes = FakeTensorMode()
    layout_of, get = batches._layout_of, DeviceCache.get

    def really(function, *args):
        with unset_fake_temporarily():  # what is on the CPU has values
            made = function(*args)
        return tree_map(lambda x: fakes.from_tensor(x) if isinstance(x, torch.Tensor) else x, made)

    batches._layout_of = functools.partial(really, layout_of)
    DeviceCache.get = lambda cache, key, device, make: get(cache, key, device, functools.partial(really, make))
    with fakes, Driverless():
        for name, given in RIGHT.items():
            batch = {key: x if key in batches.READ else fakes.from_tensor(x) for key, x in given.items()}
            batch |= {
                key: torch.empty_like(x, device="cuda")
                for key, x in batch.items()
                if x.dim() > 1 and key not in batches.READ
            }
            found[name] = []
            for _ in range(2):
                checks = ValueChecks(at_once=("cpu",))
                with Moves() as moves:
                    shard, _ = shard_call(sp.sharding, batch, checks, None, TABLE)
                    checks.compare({key: x for key, x in batch.items() if x.is_cuda})
                    checks.post(ConsistencyChecker(None))  # which is not asked, since nothing here has values
                assert {x.device.type for x in shard.values() if isinstance(x, torch.Tensor)} == {"cuda"}
                found[name].append(moves.found)
        logits = torch.empty(1, SEQ, 3, device="cuda")
        packed = dataclasses.replace(sp.place(SEQ, (3, SEQ - 3)), rows=1)
        for placement in (None, packed):
            for _ in range(2):
                with Moves() as moves:
                    spec = ShardSpec.of(sp.sharding, 1, SEQ, placement, "logits")
                    whole = whole_of(spec.shard(logits), spec)
                    assert whole.exp().gathered().shape == (1, SEQ, 3)
                    narrow, kept = spec.narrow(slice(None), slice(2, 5), logits.device)
                    assert narrow.gathered(spec.shard(logits).index_select(1, kept)).shape == (1, 3, 3)
                    assert sp.gather(logits, 1, packed).shape == logits.shape
                    assert sp.sharding.local_positions(placement or SEQ, logits.device).is_cuda
                found.setdefault(("outputs", placement), []).append(moves.found)
    del model
    return found


def test_the_host_waits_for_nothing():
    """A layout is brought to the device once; one small copy comes back."""
    (found,) = on_ranks(1, on_fake_cuda)
    there, back = ("cpu", "cuda"), ("cuda", "cpu")
    assert found["plain"] == [[there] * 3 + [back], [back]]
    assert found["without labels"] == [[back], [back]]  # of the same layout
    assert found["another length"] == [[there] * 3 + [back], [back]]
    for name, moved in (("a pack", 1), ("padding", 1), ("padding on the left", 1)):  # weights; the mask
        first, second = found[name]
        assert second == [there] * moved + [back], name
        assert first.count(back) == 1
    for of_placement in [moves for name, moves in found.items() if name[0] == "outputs"]:
        assert set(of_placement[0]) == {there}
        assert of_placement[1] == []
    assert len(found["a pack"][0]) > len(found["a pack"][1])

"""A layer gives a device no more to do than the table says, however many tokens there are. No host waits."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import tables
from benchmarks.gpu import launches
from benchmarks.gpu.launches import COUNTED, NAMES, TOKENS, counting

KEPT = launches.load()["counts"]


def beyond(found, name, kind="now"):
    """What is more than the table has: (direction, what) -> how often."""
    table = {direction: of[kind] for direction, of in KEPT[name].items()}
    assert found.keys() == table.keys()
    return {(x, y): found[x][y] for x in found for y in COUNTED if found[x][y] > table[x][y]}


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_launches_no_more_than_the_table_says(name):
    assert beyond(launches.counts(name, TOKENS[-1]), name) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_as_many_with_few_tokens_and_a_few_more_without_triton(name):
    found = launches.counts(name, TOKENS[0])
    assert found == launches.counts(name, TOKENS[-1])
    assert {x: {y: found[x][y] for y in COUNTED} for x in found} == {x: of["now"] for x, of in KEPT[name].items()}
    with launches.without_triton():
        assert beyond(launches.counts(name, TOKENS[0]), name, "without Triton") == {}


def test_no_layer_waits_for_its_device():
    assert {name for name in NAMES if any(of["now"]["host waits"] for of in KEPT[name].values())} == set()


def test_the_docs_have_the_table():
    assert tables.below(launches.PAGE, launches.MARK) == f"{launches.rendered(launches.load())}\n"
    assert json.loads(launches.TABLE.read_text(encoding="utf-8"))["counts"].keys() == {*NAMES}


# ---- so that the tests above can fail


# what is done -> kernels, copies, allocations, transfers and waits
PLANTED = {
    "a sum": (lambda x: x + 1, (1, 0, 1, 0, 0)),
    "a sum in place": (lambda x: x.add_(1), (1, 0, 0, 0, 0)),
    "a view": (lambda x: x[:, 1:].transpose(0, 1).view(3, 1, 2), (0, 0, 0, 0, 0)),
    "memory": (lambda x: x.new_empty(3), (0, 0, 1, 0, 0)),
    "a copy": (lambda x: x.clone(), (1, 1, 1, 0, 0)),
    "another dtype": (lambda x: x.float(), (1, 1, 1, 0, 0)),
    "a list": (lambda x: torch.tensor([1, 2]).to(x.device, non_blocking=True), (1, 1, 1, 0, 1)),
    "a result on the host": (lambda x: x.to("cpu", non_blocking=True), (1, 1, 1, 0, 1)),
    "nothing": (lambda x: torch.ones(3) + 1, (0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_counted(name):
    done, expected = PLANTED[name]
    with FakeTensorMode():
        x = launches.empty(2, 4, 1)
        with counting(launches.Nowhere(0)) as found:
            done(x)
    assert tuple(found[what] for what in COUNTED) == expected

"""A digest that a device computes sees each value and its place, and the host reads nothing for it."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ds_seqpar.base.on_devices import DeviceCache
from ds_seqpar.data.value_checks import device_digest
from tests.fake_cuda import Driverless

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint64, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_value_and_its_place_counts(dtype):
    x = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 1]]).to(dtype)
    digest = device_digest(x)
    assert (digest.dtype, digest.shape) == (torch.int64, ())
    assert device_digest(x.t().contiguous().t()) == digest  # the same values, in other memory
    others = {int(digest)}
    for index in range(x.numel()):
        changed = x.clone().view(-1)
        changed[index] = 1 - int(changed[index].real)
        others.add(int(device_digest(changed.view(x.shape))))
    others.add(int(device_digest(torch.stack([x[1], x[0]]))))
    assert len(others) == 1 + x.numel() + 1


def test_equal_sums_of_values_and_places_are_told_apart():
    """Pairs that are swapped, and numbers that move by steps, as ids of shifted documents do."""
    x = torch.arange(1000)
    found = {int(device_digest(x))}
    for first in range(0, 40, 4):
        for step in (2, 3, 32):
            swapped = x.clone()
            swapped[[first, first + step]] = x[[first + step, first]]
            found.add(int(device_digest(swapped)))
            moved = x.clone()
            moved[first] += step
            moved[first + 1] -= step
            found.add(int(device_digest(moved)))
    assert len(found) == 61
    assert len({int(device_digest(torch.zeros(count, dtype=torch.int64))) for count in range(50)}) == 50


def test_nothing_on_a_device_is_read_for_it():
    with FakeTensorMode(), Driverless():
        digest = device_digest(torch.empty(2, 8, dtype=torch.bfloat16, device="cuda"))
        assert digest.is_cuda
        with pytest.raises(DataDependentOutputException):
            digest.item()  # so that this test can fail


def test_a_layout_is_made_once_while_it_is_in_use():
    cache, made = DeviceCache(), []

    def get(key, make=lambda: torch.arange(4)):
        def counted():
            made.append(key)
            return make()

        return cache.get(key, "cpu", counted)

    with torch.inference_mode():
        first = get("a")
    assert not first.is_inference()  # a later forward may save it for its backward
    assert get("a") is first
    assert get(("a", 2), lambda: (torch.ones(2), 3))[1] == 3
    for number in range(DeviceCache.MOST):
        get("a")
        get(number)
    assert made == ["a", ("a", 2), *range(DeviceCache.MOST)]
    large = torch.empty(DeviceCache.BYTES, dtype=torch.uint8)
    for number in range(DeviceCache.FEW):
        get(f"large {number}", lambda: large)
    get("large 0")
    assert made[-1] == f"large {DeviceCache.FEW - 1}"  # a few are kept however large they are
    get("a")
    assert made[-1] == "a"

"""A tensor that was made here is trusted as the object that it is, until somebody writes to it."""

import copy

import torch

from ds_seqpar.runtime.trusted import is_trusted, trust, trust_copy


class Maker:
    """Stands for what made a tensor."""


def test_only_the_object_by_its_maker_and_as_it_was():
    maker, other = Maker(), Maker()
    x = trust(torch.arange(4), maker)
    assert is_trusted(x, maker)
    assert not is_trusted(x, other)
    assert not is_trusted(x.clone(), maker)
    assert not is_trusted(x[:2], maker)
    assert not is_trusted(copy.deepcopy(x), maker)
    assert not is_trusted(None, maker)
    x[:2].add_(1)  # through a view
    assert not is_trusted(x, maker)


def test_a_copy_on_its_way_to_a_device_is_kept():
    maker = Maker()
    x, copied, late = trust(torch.arange(4), maker), torch.arange(4), torch.arange(4)
    trust_copy(x, copied)
    assert is_trusted(copied, maker)
    x.zero_()
    trust_copy(x, late)
    assert not is_trusted(late, maker)


def test_nothing_is_trusted_once_its_maker_is_gone():
    x = trust(torch.arange(4), Maker())
    assert not is_trusted(x, None)
    trust_copy(x, moved := torch.arange(4))
    assert not is_trusted(moved, None)


def test_tensors_that_keep_no_version_are_not_trusted():
    maker = Maker()
    with torch.inference_mode():
        x = trust(torch.arange(4), maker)
    assert not is_trusted(x, maker)

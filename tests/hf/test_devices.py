"""On a device the host looks at nothing in a forward; what is wrong is still refused."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ds_seqpar.data.shard_checks import check_shard
from ds_seqpar.data.value_checks import ValueChecks
from hf_integration.model.agreement import Agreement
from tests.dist.ranks import is_one_sentence, make, refusal
from tests.launch import on_ranks

SEQ = 8


def on_fake_cuda():
    """What forwards ask of tensors on a device, which have shapes and no values here: to look at one raises."""
    sp = make()
    ids = torch.arange(SEQ)[None]
    whole = {"input_ids": ids, "labels": ids.clone()}
    packed = sp.shard_batch({**whole, "position_ids": torch.arange(4).repeat(1, 2)}, training=False)
    agreement = Agreement(sp, nn.Linear(1, 1))  # which is gone at once, else it compares the model's values
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, positions, mask = (torch.empty(1, SEQ, dtype=torch.int64, device="cuda") for _ in range(3))
        with pytest.raises(DataDependentOutputException):
            bool((positions == 0).all())  # so that this test can fail
        looks = []
        for more in ({}, {"attention_mask": mask}, {"placement": packed["placement"]}):
            sp.checker._looks.clear()  # they could not be read
            given = {"input_ids": tokens, "position_ids": positions, **more}
            agreement.agree(given, "", backward=True, compiled=False)
            looks += [look.judge.parts for look in sp.checker._looks]
        sp.checker._looks.clear()
    return [len(parts) for parts in looks]


def test_no_forward_waits_for_the_device():
    """What is looked at later comes in one copy: positions, and a mask where there is one."""
    assert on_ranks(1, on_fake_cuda) == [[1, 2, 1]]


def found_later():
    """By case what is said in the next forward, and in the one after it."""
    sp = make()
    right, said = sp.position_ids(SEQ)[None], {}
    cases = {
        "right": (right, None),
        "with a mask of ones": (right, torch.ones(1, SEQ)),
        "positions": (right + 1, None),
        "mask": (right, torch.zeros(1, SEQ)),
    }
    tokens = torch.zeros(2, SEQ)
    for name, (positions, mask) in cases.items():
        checks = ValueChecks(at_once=())
        check_shard(sp.sharding, tokens, positions, mask, None, checks)
        checks.post(sp.checker)
        said[name] = [refusal(sp.checker.check_deferred, "model inputs", None)[1] for _ in range(2)]

    def refused(positions):
        return refusal(check_shard, sp.sharding, tokens, positions, None, None, ValueChecks())[0]

    shapes = {shape: refused(torch.zeros(shape)) for shape in ((3, SEQ), (2, SEQ + 1), ())}
    return said, shapes, [refused(x) for x in (right.expand(1, -1), right.expand(2, -1), right[0])]


def test_what_was_found_on_the_device_is_said_once_in_the_next_forward():
    ((said, shapes, good),) = on_ranks(1, found_later)
    assert said["right"] == said["with a mask of ones"] == [None, None]
    for name, words in (("positions", "global position_ids"), ("mask", "no padding mask")):
        first, second = said[name]
        assert words in first
        assert "earlier forward" in first
        assert is_one_sentence(first)
        assert second is None
    assert set(shapes.values()) == {"InputError"}
    assert good == [None, None, None]

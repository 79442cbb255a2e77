"""On a device the host looks at nothing in a forward but a model's first; what is wrong is still refused."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ds_seqpar.runtime import trusted
from hf_integration.model.agreement import Agreement, DeviceChecks, agree_on_shard, shard_error
from tests.dist.ranks import is_one_sentence, make
from tests.launch import on_ranks

SEQ = 8


def on_fake_cuda():
    """What forwards ask of tensors on a device, which have shapes and no values here: to look at one raises."""
    sp, model = make(), nn.Linear(1, 1)
    ids = torch.arange(SEQ)[None]
    whole = {"input_ids": ids, "labels": ids.clone()}
    batch = sp.shard_batch(whole, training=False)
    packed = sp.shard_batch({**whole, "position_ids": torch.arange(4).repeat(1, 2)}, training=False)
    agreement = Agreement(sp, model)
    agreement.compared = True  # else it compares the models' values
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, foreign, mask = (torch.empty(1, SEQ, dtype=torch.int64, device="cuda") for _ in range(3))
        with pytest.raises(DataDependentOutputException):
            bool((foreign == 0).all())  # so that this test can fail
        trusted.trust_copy(batch["position_ids"], ours := torch.empty(1, SEQ, dtype=torch.int64, device="cuda"))
        looks = []
        for positions, attention_mask in ((ours, None), (ours, None), (ours, mask), (foreign, mask)):
            agreement.device_checks.started.clear()  # they could not be read
            given = {"input_ids": tokens, "position_ids": positions, "attention_mask": attention_mask}
            assert agree_on_shard(agreement, given, wrong_shard="", backward=True, sources=[])[0] is positions
            looks.append(len(agreement.device_checks.started))
        agreement.device_checks.started.clear()
        trusted.trust_copy(packed["position_ids"], ours := torch.empty(1, SEQ, dtype=torch.int64, device="cuda"))
        for placement in (packed["placement"], None):
            given = {"input_ids": tokens, "position_ids": ours, "placement": placement}
            agree_on_shard(agreement, given, wrong_shard="", backward=True, sources=[])
            looks.append(len(agreement.device_checks.started))
    return looks


def test_no_forward_waits_for_the_device():
    """Positions that came with a placement are looked at where it was left out: the host would not see that."""
    assert on_ranks(1, on_fake_cuda) == [[0, 0, 1, 2, 0, 1]]


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
    for name, (positions, mask) in cases.items():
        checks = DeviceChecks()
        checks.start(sp, SEQ, positions, mask)
        said[name] = [str(error) if (error := checks.error()) else None for _ in range(2)]
    tokens = torch.zeros(2, SEQ)
    shapes = {shape: shard_error(sp, tokens, torch.zeros(shape)) is not None for shape in ((3, SEQ), (2, SEQ + 1), ())}
    right_shapes = [shard_error(sp, tokens, right.expand(rows, -1)) for rows in (1, 2)]
    return said, shapes, [*right_shapes, shard_error(sp, tokens, right[0])]


def test_what_was_found_on_the_device_is_said_once_in_the_next_forward():
    ((said, shapes, good),) = on_ranks(1, found_later)
    assert said["right"] == said["with a mask of ones"] == [None, None]
    for name, words in (("positions", "global position_ids"), ("mask", "no padding mask")):
        first, second = said[name]
        assert words in first
        assert "earlier forward" in first
        assert is_one_sentence(first)
        assert second is None
    assert set(shapes.values()) == {True}
    assert good == [None, None, None]

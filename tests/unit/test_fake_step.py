"""Whole training steps on a device that is not there: no layer moves a tensor off it, on it, or looks at a value."""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.errors import SeqParError
from tests.fake_cuda import NEEDS_CPU_BUILD, OneDevice, aten
from tests.gpu import STEPS
from tests.stand_in import on_stand_in
from tests.words import missing

pytestmark = NEEDS_CPU_BUILD

SEQ = 48


def batch_of(packed):
    ids = torch.arange(SEQ)[None]
    documents = {"position_ids": torch.arange(SEQ // 2).repeat(1, 2)} if packed else {}
    return {"input_ids": ids, "labels": ids.clone(), **documents}


def step(size, section, keeps, packed, family="llama"):
    """Kernel calls of a forward and backward, and whether every gradient came to where its parameter is."""
    from ds_seqpar.data.batches import _on_device
    from hf_integration import patch_attention, trust_loss
    from tests.hf.families import model_of
    from tests.stand_in.streams import Streams

    sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=max(1, size // 2), **section), heads=(8, 2))
    sharded = sp.shard_batch(batch_of(packed), training=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with sp.device:
            model = model_of(family, window=SEQ, num_hidden_layers=1).train()
        torch.set_default_dtype(torch.float32)
        if keeps:
            model.gradient_checkpointing_enable(keeps)
        patch_attention(model, sp)
        model.base_model._sequence_parallel_patch.agreement.compared = True  # values, in the first forward alone
        trust_loss(model)  # its value too
        given = _on_device(sharded, sp.device)
        with Streams().in_place_of_torch() as streams, OneDevice() as watch:
            model(**given).loss.backward()
        assert len(streams.done) >= (3 if sp.store else 1)
        assert {p.grad.device.type for p in model.parameters()} == {"cuda"}
    sp.close()
    return [watch.calls[op.default] for op in (aten._flash_attention_forward, aten._flash_attention_backward)]


def steps():
    """By name, of whole sequences; and of packed rows, whose documents end where this rank's parts do."""
    found = {name: step(4, *given, packed=False) for name, given in STEPS.items()}
    found["experts"] = step(4, *STEPS["checkpoints"], packed=False, family="qwen3_moe")
    return found, [step(4, *STEPS[name], packed=True) for name in ("plain", "all")]


def alone():
    return [step(1, *STEPS["all"], packed=packed) for packed in (False, True)]


def chosen():
    """What a rank takes: its device, kernel and groups' devices, what `make demo` runs here; or why it cannot."""
    from ds_seqpar.runtime.kernels import BlockSpec, select
    from examples import demo

    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(demo.COUNT, {})
    runs = demo.choose(int(said.getvalue()))
    try:
        sp = SequenceParallel(SequenceParallelConfig(ulysses=1), heads=(8, 2))
    except SeqParError as error:
        return str(error)
    kernel = select("auto", BlockSpec(sp.device.type, torch.bfloat16, 8, 2, 64))
    current = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    bound = {str(group.bound_device_id) for group in sp.groups.made}
    return str(sp.device), current, bound, kernel.name.startswith("cpu"), runs.ranks, runs.on_gpus


def chosen_where_each_sees_its_own():
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    return chosen()


def measured():
    """The kernels of a causal and of a windowed call, where a machine's file has an order for this device by its name;
    what a rank is told whose file has another one."""
    from ds_seqpar.compiler.sharding.masks import CAUSAL, Mask
    from ds_seqpar.planner.machine import presets

    def kernels():
        with SequenceParallel(SequenceParallelConfig(size=2, ulysses=1, schedule="ring", machine="machine.json")) as sp:
            found = []
            for mask in (CAUSAL, Mask(window=9)):
                with FakeTensorMode():
                    q = torch.empty(1, 16, 2, 64, dtype=torch.bfloat16, device=sp.device)
                found.append(sp.runtime.bound("forward", q, 2, mask, sp.runtime.shards(16))[1].name)
            return found

    with tempfile.TemporaryDirectory() as folder:  # each rank's own
        os.chdir(folder)
        order = {"bfloat16 64 causal": ["cudnn", "cuda_flash"]}
        content = {**presets()["h100-ib"], "kernels": {"NVIDIA Stand-in": order}}
        Path("machine.json").write_text(json.dumps(content))
        found = kernels()
        if os.environ["RANK"] == "1":
            order["bfloat16 64 causal"].reverse()
        Path("machine.json").write_text(json.dumps(content))
        try:
            return found, kernels()
        except SeqParError as error:
            return found, str(error)


def test_a_step_on_four_devices_and_on_one_of_a_world_of_one_rank():
    """A zigzag ring of two places around two Ulysses ranks is two calls: a causal one, and one with the other's
    block."""
    on_four, on_one = on_stand_in((4, 4, steps), (1, 1, alone))
    for found, packed in on_four:
        assert found.pop("head_chunks") == found.pop("all") == [4, 4]
        assert found.pop("checkpoints without attention") == [4, 2]
        assert list(found.values()) == [[2, 2]] * 6
        assert packed == [[1, 1], [2, 2]]
    assert on_one == [[[2, 2], [2, 2]]]


def test_a_measurement_on_this_gpu_chooses_the_kernel():
    for found, refused in on_stand_in((2, 2, measured))[0]:
        assert found == ["cudnn", "cuda_flash"]
        assert missing(refused, "bfloat16 64 causal", "rank 0: ", "('cudnn', 'cuda_flash'); rank 1") == []


def told_of_another_gpu():
    """What is on stderr where a machine's file has an order of kernels for another device alone; for this one."""
    from ds_seqpar.planner.machine import presets

    told = []
    with tempfile.TemporaryDirectory() as folder:  # each rank's own
        os.chdir(folder)
        for device in ("NVIDIA Other", "NVIDIA Stand-in"):
            content = {**presets()["h100-ib"], "kernels": {device: {"bfloat16 64 causal": ["cuda_flash"]}}}
            Path("machine.json").write_text(json.dumps(content))
            with contextlib.redirect_stderr(io.StringIO()) as said:
                settings = {"size": 2, "ulysses": 1, "schedule": "ring", "machine": "machine.json"}
                SequenceParallel(SequenceParallelConfig(**settings)).close()
            told.append([line for line in said.getvalue().splitlines() if "order" in line])
    return told


def test_rank_0_says_that_no_order_of_kernels_is_for_its_device():
    ((line,), none), others = on_stand_in((2, 2, told_of_another_gpu))[0]
    assert missing(line, "machine has the order", "NVIDIA Other", "NVIDIA Stand-in", "built-in order") == []
    assert none == []
    assert others == [[], []]


def test_every_rank_takes_its_own_device():
    none, one, two, eight, own, few = on_stand_in(
        (0, 2, chosen), (1, 1, chosen), (2, 2, chosen), (8, 8, chosen),
        (1, 2, chosen_where_each_sees_its_own), (2, 3, chosen),
    )  # fmt: skip
    assert none == [("cpu", None, {"None"}, True, 4, False)] * 2
    assert one == [("cuda:0", 0, set(), False, 4, False)]  # a rank alone needs no group
    assert own == [("cuda:0", 0, {"cuda:0"}, False, 4, False)] * 2  # which is its number 0, whatever the machine's
    assert two == [(f"cuda:{rank}", rank, {f"cuda:{rank}"}, False, 2, True) for rank in range(2)]
    assert eight == [(f"cuda:{rank}", rank, {f"cuda:{rank}"}, False, 4, True) for rank in range(8)]
    assert all("LOCAL_RANK 2 and 2 devices" in said for said in few)

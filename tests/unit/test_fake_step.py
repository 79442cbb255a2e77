"""Whole training steps, DeepSpeed's under ZeRO-3 too, on a device that is not there: no layer moves a tensor off it, on
it, or looks at a value."""

import contextlib
import io
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.base.errors import SeqParError
from tests.fake_cuda import NEEDS_CPU_BUILD, OneDevice, aten
from tests.gpu import STEPS, TILES
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
    from hf_integration.families import patch_of
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
        patch_of(model).agreement.compared = True  # values, in the first forward alone
        trust_loss(model)  # its value too
        given = _on_device(sharded, sp.device)
        with Streams().in_place_of_torch() as streams, OneDevice() as watch:
            model(**given).loss.backward()
        assert len(streams.done) >= (3 if sp.store else 1)
        assert {p.grad.device.type for p in model.parameters()} == {"cuda"}
    sp.close()
    return [watch.calls[op.default] for op in (aten._flash_attention_forward, aten._flash_attention_backward)]


def all_at_once():
    """Of whole sequences; and of packed rows, whose documents end where this rank's parts do."""
    return [step(4, *STEPS["all"], packed=packed) for packed in (False, True)]


def by_kind():
    names = "reentrant checkpoints", "checkpoints without attention"
    found = [step(2, *STEPS[name], packed=False) for name in names]
    return [*found, step(2, *STEPS["checkpoints"], packed=False, family="qwen3_moe")]


def alone():
    return step(1, *STEPS["all"], packed=True)


def chosen():
    """What a rank takes: its device, kernel and groups' devices, what `make demo` runs here; or why it cannot."""
    from ds_seqpar.core.runtime.kernels import BlockSpec, select
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


def options(ulysses, **settings):
    """What a SequenceParallel's groups are made with, that of layers with a state too: (high priority, most thread
    blocks) of each; whether the last is the job's own; which torch still knows after the end; and batches
    of messages."""
    from ds_seqpar.base import compat
    from tests.stand_in.ranks import Options

    Options.made.clear()
    batches, of_torch = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: batches.append([(x.op.__name__, x.group_peer) for x in ops]) or of_torch(ops)
    sp = SequenceParallel(SequenceParallelConfig(size=4, ulysses=ulysses, schedule="ring", **settings), heads=(8, 4))
    ring = sp.runtime.one_ring.comm.groups.inner
    found = [(given.is_high_priority_stream, given.config.max_ctas) for given in Options.made]
    is_jobs = ring is dist.group.WORLD
    sp.close()
    dist.batch_isend_irecv = of_torch
    return found, is_jobs, compat.is_known(ring), batches


def of_nccl():
    return options(1), options(2, max_ctas=4)


def hang():
    """What is said of a device that does not end what its host has launched: while another rank's host stays away; and
    once it has come, but its device ends nothing either. What is said of a device that has all messages; and of one
    in a layer with a state."""
    from ds_seqpar.base import compat
    from ds_seqpar.core.compiler.sharding.masks import CAUSAL
    from ds_seqpar.core.runtime.admit import AttentionOptions
    from ds_seqpar.guards import watchdog
    from ds_seqpar.operators import recurrence
    from tests.stand_in.streams import Streams

    settings = {"size": 2, "ulysses": 1, "schedule": "ring", "watchdog": "report", "watchdog_s": 1.0}
    sp, store, texts = SequenceParallel(SequenceParallelConfig(**settings), heads=(8, 2)), compat.default_store(), []

    (watched,) = watchdog._dog.users

    def attend(layer, stuck):
        streams.current.is_stuck = stuck
        sp.attention_agreed(q, q, q, AttentionOptions(CAUSAL, None, None, layer=layer))

    def told(number):
        """Waits until one rank has printed, whichever of them raised the alarm."""
        until = time.monotonic() + 60
        while not store.check([f"told {number}"]):
            if "after 1 s" in said.getvalue():
                store.set(f"told {number}", said.getvalue())
            time.sleep(0.05)
            assert time.monotonic() < until
        texts.append(store.get(f"told {number}").decode())
        said.seek(said.truncate(0))

    with (
        FakeTensorMode(allow_non_fake_inputs=True), Streams().in_place_of_torch() as streams,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):  # fmt: skip
        q = torch.empty(1, 24, 8, 64, dtype=torch.bfloat16, device=sp.device)
        attend(16, stuck=False)
        if sp.rank == 0:
            attend(17, stuck=True)
        told(1)
        if sp.rank == 1:
            attend(17, stuck=True)
        watched.launched.clear()
        attend(18, stuck=True)
        told(2)
        with unset_fake_temporarily():
            dist.all_reduce(torch.ones(1))
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()
        stuck = watched.oldest_open()
        texts.append(watchdog._on_device(stuck._replace(batches=[[work]] * len(stuck.batches))))
        sp.decode_attention(q[:, :1], q, q, agreed=True)
        texts.append(watchdog._on_device(watched.launched[-1]).partition(" with ")[0])
        watched.launched.clear()
        recurrence.causal_conv(sp.runtime, lambda x: x, torch.empty(1, 24, 8, device=sp.device), kernel_size=4)
        texts.append(watchdog._on_device(watched.oldest_open()).partition(" for ")[0])
        sp.close()
    return texts, sp.runtime.observers


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}
KERNEL = aten._flash_attention_forward, aten._flash_attention_backward


def engine_steps(section, keeps):
    """Kernel calls of a step of whole sequences, and of a packed one."""
    import ds_seqpar
    from ds_seqpar.base.hosts import set_device
    from ds_seqpar.data.batches import _on_device
    from hf_integration.families import patch_of
    from tests.hf.families import model_of

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with set_device():
            model = model_of("llama", window=SEQ, num_hidden_layers=1).train()
        torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable(keeps)
        given = {**CONFIG, "sequence_parallel": {"ulysses": 1, "schedule": "ring", **section}}
        parameters = list(model.parameters())
        engine, *_ = ds_seqpar.initialize(model=model, model_parameters=parameters, config=given, check_loss=False)
        patch_of(model).agreement.compared = True  # values, in the first forward alone
        found = []
        for packed in (False, True):
            with unset_fake_temporarily():
                batch = engine.sequence_parallel.shard_batch(batch_of(packed))
            batch = _on_device(batch, engine.sequence_parallel.device)
            with OneDevice() as watch:
                engine.backward(engine(**batch).loss)
            engine.step()
            found.append([watch.calls[op.default] for op in KERNEL])
    return found, str(engine.device), str(engine.sequence_parallel.device)


def zero3():
    from tests.stand_in.engine import for_deepspeed

    for_deepspeed()
    return engine_steps({**TILES, "offload_checkpoints": True}, {"use_reentrant": False})


def test_steps_and_hangs_on_devices_that_are_not_there():
    on_one, of_engines, hangs = on_stand_in((1, 1, alone), (2, 2, zero3), (2, 2, hang))
    check_alone(on_one, of_engines)
    check_hangs(*hangs)


@pytest.mark.slow
def test_settings_groups_and_devices_that_are_not_there():
    """In one process, as importing everything is what takes long."""
    on_four, on_two, groups, *devices = on_stand_in(
        (4, 4, all_at_once), (2, 2, by_kind), (4, 4, of_nccl),
        (0, 2, chosen), (1, 1, chosen), (8, 8, chosen), (1, 2, chosen_where_each_sees_its_own), (2, 3, chosen),
    )  # fmt: skip
    check_steps(on_four, on_two)
    # messages begin while products run, and those of layers with a state are not behind ZeRO's
    for rank, (ring, both) in enumerate(groups):
        assert ring == ([(True, None)], False, False, [met(rank, 4)])
        assert both == ([(True, 4)] * 3, False, False, [met(rank // 2, 2), met(rank, 4)])
    check_devices(*devices)


def check_hangs(first, second):
    """Hosts have gone on, so only the device's event says that it hangs."""
    (away, link, computes, decodes, state), left = first
    assert first == second
    *_, sentence = away.splitlines()
    words = (
        "rank 0 has a device that waits at step 0 of ring forward, layer 17 for kv(1):1>0 and ",
        "kv(0):0>1 with rank 1",
    )
    assert missing(sentence, *words, "after 1 s of waiting rank 1 is at test_fake_step.py:", "in told") == []
    *_, sentence = link.splitlines()
    assert (
        missing(sentence, "of ring forward, layer 18 for kv(", "with rank 0", "with rank 1", "a link is slow or") == []
    )
    assert computes == "has a device that does not end ring forward, layer 18"
    assert decodes == "has a device that waits at step 0 of decode forward for Gather(out(0,1))"
    assert missing(state, "waits at step 0 of states forward, call") == []
    assert not left


def met(rank, size):
    """The batch in which a member of a group meets all others, both ways."""
    return [(way, peer) for way in ("irecv", "isend") for peer in range(size) if peer != rank]


def check_steps(on_four, on_two):
    """A zigzag ring of two places is two calls: a causal one, and one with the other's block; with head chunks each."""
    assert on_four == [[[4, 4], [2, 2]]] * 4
    assert on_two == [[[2, 2], [4, 2], [2, 2]]] * 2


def check_alone(on_one, of_engines):
    """Under ZeRO-3 a pack ends with the block."""
    assert on_one == [[2, 2]]
    for rank, found in enumerate(of_engines):
        assert found == ([[2, 2], [1, 1]], f"cuda:{rank}", f"cuda:{rank}")


def check_devices(none, one, eight, own, few):
    """Every rank takes its own."""
    assert none == [("cpu", None, {"None"}, True, 4, False)] * 2
    assert one == [("cuda:0", 0, set(), False, 4, False)]  # a rank alone needs no group
    assert own == [("cuda:0", 0, {"cuda:0"}, False, 4, False)] * 2  # which is its number 0, whatever the machine's
    assert eight == [(f"cuda:{rank}", rank, {f"cuda:{rank}"}, False, 4, True) for rank in range(8)]
    assert all("LOCAL_RANK 2 and 2 devices" in said for said in few)

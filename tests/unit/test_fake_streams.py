"""No buffer is used before its event: what attention sends, and checkpoints that go to host memory and come back."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_seqpar.core.compiler.program.ulysses import SavedForBackward
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime import attention, groups, transport
from ds_seqpar.core.runtime.kernels import Scores
from ds_seqpar.core.runtime.runtime import CallSettings, Runtime
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.memory.offload import store_of
from tests.fake_cuda import no_device
from tests.stand_in.streams import Stream, Streams, TooEarly
from tests.unit.plans import SHAPES


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(transport, "communicator_device", lambda group: torch.device("cuda", 0))  # as NCCL's groups are
    with no_device(), Streams().in_place_of_torch() as streams:
        yield streams
    if dist.is_initialized():
        dist.destroy_process_group()


def made_for(config, rank):
    """A rank's groups in a world whose messages go nowhere."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.size)
    return groups.create(config.topology(config.size), rank, groups.control_world())


def walk(rank, size=4, ulysses=1, **settings):
    """One rank's forward and backward."""
    head_chunks = 1 + (ulysses > 1)
    config = SequenceParallelConfig(size=size, ulysses=ulysses, head_chunks=head_chunks, **settings).resolve(
        size, (8, 4)
    )
    made = made_for(config, rank)
    ulysses_rank = config.topology(size).index(rank, "ulysses")
    runtime = Runtime(config, config.topology(size), made.cp_rank, transport.TorchComm(made), ulysses_rank)
    tokens = 2 * multiple(config.layout, size, ulysses) // size
    q, k, v, do = (torch.empty(1, tokens, h, 64, dtype=torch.bfloat16, device="cuda") for h in (8, 4, 4, 8))
    for saves in SavedForBackward if ulysses > 1 else [SavedForBackward.NOTHING]:
        settings = CallSettings(CAUSAL, None, Scores(1.0, 0.0), head_chunks, saves)
        out, *rest = runtime.forward(q, k, v, None, settings)
        saved = [*rest, *([] if saves.out else [out]), *([] if saves.qkv else [q, k, v])]
        attention.backward(do, None, None, saved, 4, runtime, settings)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_attention_sends(name, streams):
    settings = {"ulysses": 2} if name == "ring" else SHAPES[name]
    for rank in (0, settings.get("size", 4) - 1):
        walk(rank, schedule=name, **settings)
    assert sum(count for stream, count in streams.done.items() if stream is not streams.current) > 4


def posted():
    made = made_for(SequenceParallelConfig(size=2, ulysses=1), 0)
    buffers = [torch.empty(8, dtype=torch.uint8, device="cuda") for _ in range(2)]
    sent, received = (transport.Message(1, "kv", 4, buffer, 0) for buffer in buffers)
    return *buffers, transport.TorchComm(made).post([sent], [received])


EARLY = {
    "read": lambda sent, received, works: received + 1,
    "written": lambda sent, received, works: sent.zero_(),
    "given to others": lambda sent, received, works: works.tensors.clear(),
}


@pytest.mark.parametrize("what", EARLY)
@pytest.mark.parametrize("waits", [False, True])
def test_what_was_posted_is_waited_for(what, waits, streams):
    """So that the test above can fail."""
    sent, received, works = posted()
    if waits:
        works.wait()
    with contextlib.nullcontext() if waits else pytest.raises(TooEarly, match=what):
        EARLY[what](sent, received, works)
        del sent, received
        torch.zeros(1, device="cuda")


def offloaded(tensors=6, steps=2):
    """What checkpoints do: tensors leave one after the other, and come back from the last one on."""
    store = store_of(torch.device("cuda", 0))
    for _ in range(steps):
        packed = []
        for _ in range(tensors):
            x = torch.zeros(4, 8, device="cuda")
            packed.append(store.pack(x.t()))
            del x
            torch.zeros(4, 8, device="cuda")
        while packed:
            store.unpack(packed.pop()).sum()


def test_checkpoints_in_host_memory(streams):
    offloaded()
    assert len(streams.done) == 3  # what computes, what leaves, what comes back


def test_a_copy_ahead_waits_for_nothing_that_is_computed_meanwhile(streams):
    store = store_of(torch.device("cuda", 0))
    packed = [store.pack(torch.zeros(4, 8, device="cuda")) for _ in range(3)]
    before = streams.done[streams.current]
    torch.zeros(1, device="cuda").add_(1)
    last = store.unpack(packed.pop())
    assert packed[1].on_device is not None
    assert store.to_device.seen[streams.current] <= before < streams.done[streams.current]
    last.sum()


@pytest.mark.parametrize("left_out", ["record_stream", "wait_stream", "wait_event"])
def test_checkpoints_need_every_wait(left_out, streams, monkeypatch):
    """So that the test above can fail."""
    of = torch.Tensor if left_out == "record_stream" else Stream
    monkeypatch.setattr(of, left_out, lambda *_: None)
    with pytest.raises(TooEarly):
        offloaded()


def test_what_came_back_is_not_overwritten_while_it_is_computed_with(streams, monkeypatch):
    """Its memory belongs to the stream of copies, so `record_stream` must name the one that computes."""
    record = torch.Tensor.record_stream
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, by: by is streams.current or record(x, by))
    with pytest.raises(TooEarly, match="given to others"):
        offloaded()

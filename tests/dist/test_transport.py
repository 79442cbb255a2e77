"""Each way of messages over real gloo processes, once: with the bits and the counts of virtual ranks.

Those are exact on much more: tests/unit/test_exact.py.
"""

import contextlib
import itertools
import os
import socket
import struct
import sys

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import Mask, SequenceParallelConfig, UnevenShards
from ds_seqpar import testing as virtual
from ds_seqpar.core.compiler import schedules
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.balance import shards_of
from tests import oracle
from tests.dist.ranks import assert_exact, leaves, make
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks
from tests.unit import toy_schedule

Q = {"rotate_forward": "q", "rotate_backward": "q"}
RING, MESH = {"schedule": "ring"}, {"schedule": "mesh", "mesh": [2, 1, 2]}
GRID = {"schedule": "attention2d", "rows": 2}
CHUNKS = {"ulysses": 2, "head_chunks": 2}
OTHER_KEYS = UnevenShards([[(0, 1, 5), (30, 1, 13)], [(5, 1, 25)]], [[(0, 1, 29)], [(29, 1, 19)]])
WINDOW, PACK = Mask(window=9), Mask(documents=(0, 5, 24, 31), window=20)
BF16 = {"dtype": torch.bfloat16}
# ranks -> what is sent how -> (settings, what else attention is given)
PATHS = {
    3: {"two blocks a rank": ({"schedule": "triangle", "overlap": True}, {})},
    4: {
        "pairs": ({**RING}, {}),
        "pairs of some ranks": ({**RING, **Q, "layout": "contiguous"}, {"mask": WINDOW}),
        "pairs of a ring of rings": ({"schedule": "double_ring", "ring_size": 2, "rotate_backward": "q"}, {}),
        "results straight to their owners": ({"schedule": "distflash"}, {"mask": WINDOW}),
        "a rank without a token": ({**RING}, {"shards": UnevenShards([[(0, 1, 20)], [], [(20, 1, 3)], [(23, 1, 25)]])}),
        "all-gather, reduce-scatter": ({**GRID, "layout": "striped"}, {"mask": PACK}),
        "both in one direction": ({"schedule": "wallfacer", "team": 2, "rotate_backward": "q"}, {"causal": False}),
        "early": ({**MESH, "overlap": True, "rank_order": "collectives_intra"}, {}),
        "bf16": ({**MESH, **Q, "comm_dtype": "bf16"}, BF16),
        "bf16 in fp32": ({**MESH, **Q, "comm_dtype": "fp32"}, BF16),
        "gradients in bf16": ({**GRID, "comm_dtype": "bf16"}, BF16),
        "all-to-all": ({"ulysses": 4}, {"batch": 2}),
        "all-to-all of shared heads": ({"ulysses": 4}, {"heads": (8, 1)}),
        "uneven all-to-all": ({"ulysses": 4}, {"heads": (14, 2)}),
        "all-to-all in bf16": ({"ulysses": 4}, {"heads": (5, 5), **BF16}),
        "all-to-all in two": ({"ulysses": 2}, {"heads": (7, 1), "shards": OTHER_KEYS}),
        "the same in head chunks": ({**CHUNKS, "save_qkv_after_all_to_all": True}, {"shards": OTHER_KEYS}),
        "all-to-all around a ring": ({"ulysses": 2, "rank_order": "ring_intra"}, {"mask": PACK}),
        "all-to-all of head chunks": ({**CHUNKS, "overlap": True}, {}),
        "all-to-all around collectives": ({**GRID, "ulysses": 2, "rank_order": "collectives_intra"}, {}),
        "packs": ({**RING}, {"shards": shards_of("balanced", (20, 1, 22), 4), "mask": Mask(documents=(0, 20, 21))}),
        "two sequences": ({"size": 2, "ulysses": 1, **RING}, {}),
    },
    6: {"all-to-all of messages that wait": ({"ulysses": 6}, {"heads": (7, 1), "batch": 2})},
}  # fmt: skip


def problem(sequence, heads=(8, 4), batch=1, dtype=torch.float64, shards=None, **asked):
    """((q, k, v, do), what attention is asked for)."""
    lengths = (
        [sum(run.length for runs in side for run in runs) for side in (shards.q, shards.kv)] if shards else [48] * 2
    )
    (q, _, _, do), (_, k, v, _) = (oracle.tensors(batch, n, heads, dtype=dtype, seed=sequence) for n in lengths)
    return (q, k, v, do), asked


def on_rank(ranks):
    """By path: its number among CP and Ulysses ranks, which sequence it has, its tensors' results, and its counts."""
    found = {}
    for name, (settings, given) in PATHS[ranks].items():
        with make(**{"size": ranks, "ulysses": 1, **settings}) as sp:
            whole, asked = problem(sp.data_rank, **given)
            place = sp.runtime.rank, sp.runtime.ulysses.rank, sp.data_rank
            at = positions(sp.config, given.get("shards"), *place[:2])
            local = [x.index_select(1, at[i > 0]).requires_grad_() for i, x in enumerate(whole[:3])]
            handles = watched(sp.comm)
            out = sp.attention(*local, **asked, **({"shards": given["shards"]} if "shards" in given else {}))
            out.backward(whole[3].index_select(1, at[0]))
            assert handles
            assert not any(handle.works for handle in handles), name  # each was waited for, or its message may be lost
            mine = [x.detach().double().numpy() for x in (out, *(x.grad for x in local))]
            found[name] = place, mine, dict(+sp.comm.received)
    return found


def watched(comm):
    """The handles of all that is started from now on."""
    handles = []
    for name in ("post", "all_gather", "all_to_all", "exchange"):
        start = getattr(comm, name)
        setattr(comm, name, lambda *given, start=start: handles.append(start(*given)) or handles[-1])
    return handles


def positions(config, shards, cp_rank, ulysses_rank):
    """Those of a rank's tokens of q, and of k and v. shards: None for those of the configured layout."""
    shards = shards or EvenShards(config.layout, 48, config.size // config.ulysses)
    sides = (
        oracle.positions_by_ulysses_rank(shards, side, cp_rank, config.ulysses)[ulysses_rank] for side in ("q", "kv")
    )
    return [torch.tensor(side, dtype=torch.int64) for side in sides]


@pytest.mark.parametrize("ranks", PATHS)
def test_real_ranks_have_the_bits_and_counts_of_virtual_ones(ranks):
    results = on_ranks(ranks, on_rank, ranks)
    for name, (settings, given) in PATHS[ranks].items():
        config = SequenceParallelConfig(**{"size": ranks, "ulysses": 1, **settings}).resolve(ranks, heads=(8, 4))
        for sequence in range(ranks // config.size):
            whole, asked = problem(sequence, **given)
            imagined = virtual.attention(config, *whole, **asked, shards=given.get("shards"))
            expected = imagined.out, imagined.dq, imagined.dk, imagined.dv
            limit = 0.05 if "dtype" in given else 1e-10
            oracle.assert_exact(expected, oracle.dense(*whole, **asked), name, limit=limit)
            for (cp_rank, ulysses_rank, theirs), mine, counted in (found[name] for found in results):
                if theirs != sequence:
                    continue
                at = positions(config, given.get("shards"), cp_rank, ulysses_rank)
                for x, one, side in zip(expected, mine, (0, 0, 1, 1), strict=True):
                    assert torch.equal(torch.from_numpy(one), x.double()[:, at[side]]), name
                assert counted == dict(+imagined.received[ulysses_rank + config.ulysses * cp_rank]), name


@on_each_of(4, keep=None)
def test_a_schedule_from_a_file_of_its_own_has_its_groups_and_is_exact():
    schedules.register(toy_schedule.SCHEDULE)
    with make(size=4, ulysses=1, schedule="carousel", seats=2, rotate_backward="q") as sp:
        assert sorted(sp.groups.collectives) == [(0, 1) if sp.rank < 2 else (2, 3)]
        assert_exact(sp, oracle.tensors(1, 16, (8, 4)))


# ---- what comes through their sockets


@on_each_of(2)
def test_messages_are_whole_words():
    """So that what stands after one in a buffer is aligned: k and v in bf16 take 4 bytes and are sent as 8."""
    sp = make(layout="contiguous", kernel="reference")
    with torch.no_grad():
        sp.attention(*(x.bfloat16() for x in oracle.tensors(1, 1, (1, 1), dim=1)[:3]))
    assert (sp.comm.received.total(), sp.comm.received_bytes) == ((2, 8) if sp.rank else (0, 0))


def arrived():
    """Bytes that this process's sockets have received: TCP_INFO counts them for each, whatever other programs send."""
    by_socket = {}  # one may have several descriptors, and a number may be another's by the time it is looked at
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no TCP socket, or closed
            duplicate = os.dup(int(name))
            try:
                inode, opened = os.fstat(duplicate).st_ino, socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            with opened:
                (count,) = struct.unpack_from("Q", opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 128)
            by_socket[inode] = count
    return sum(by_socket.values())


def on_the_wire(config, dtype):
    """(bytes that this rank counts, bytes that its sockets received), forward and backward."""
    sp = make(**config)
    # few tokens with large heads: many bytes and little to compute
    q, k, v, do = oracle.tensors(1, 128, (72, 36), dim=128, dtype=dtype)
    local, do = leaves(sp, q, k, v), sp.shard(do, 1)
    moments = []
    for step in (lambda: None, lambda: sp.attention(*local), lambda: out.backward(do)):  # noqa: B023 - of the step before
        out = step()
        dist.barrier()
        moments.append((sp.comm.received_bytes, arrived()))
    dist.barrier()  # a rank that returns frees its groups, which closes the others' sockets
    return [[after - before for before, after in itertools.pairwise(counter)] for counter in zip(*moments, strict=True)]


# counts alone would not have shown that gloo's own reduce-scatter receives twice its share; gradients of bf16 travel in
# fp32, so elements alone would not do either
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc/self/fd to find sockets in")
@pytest.mark.parametrize(("ranks", "settings", "dtype"), [
    (2, {"ulysses": 1, **RING}, torch.bfloat16),
    (2, {"ulysses": 2}, torch.float32),
    (4, {"ulysses": 1, **MESH, **Q, "overlap": True}, torch.float32),
    pytest.param(4, {"ulysses": 1, **GRID}, torch.bfloat16, marks=pytest.mark.slow),
], ids=["ring", "ulysses", "mesh", "attention2d"])  # fmt: skip
def test_bytes_on_the_wire_are_those_counted(ranks, settings, dtype):
    results = on_ranks(ranks, on_the_wire, settings, dtype, keep=None)
    counted, wire = ([sum(found) for found in zip(*by_rank, strict=True)] for by_rank in zip(*results, strict=True))
    assert min(counted) > 2**21  # so much that headers and the ranks' agreement do not matter
    assert wire == pytest.approx(counted, rel=0.05)

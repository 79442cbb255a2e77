"""What ranks receive: elements as the plan and the formulas say, and as many bytes come through their sockets."""

import contextlib
import itertools
import os
import socket
import struct
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.ranks import leaves, make, planned
from tests.grids import each_then_rest
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks

BATCH, SEQ, DIM = 2, 48, 8


def received(size, ulysses_size, layout, heads, travels):
    """(the SequenceParallel, forward counts, backward counts, what the plans say of this rank)."""
    sp = make(size=size, ulysses=ulysses_size, layout=layout, rotate_forward=travels, rotate_backward=travels)
    q, k, v, do = oracle.tensors(BATCH, SEQ, heads, dim=DIM)
    out = sp.attention(*leaves(sp, q, k, v))
    forward = Counter(sp.comm.received)
    out.backward(sp.shard(do, 1))
    plans = planned(sp, SEQ, heads, block_units(size // ulysses_size, ulysses_size, heads), BATCH, DIM)
    return sp, forward, Counter(sp.comm.received) - forward, plans


def block_units(inner, ulysses_size, heads):
    """Elements of one CP rank's block, by direction. k/v is never repeated: with U > Hkv a Ulysses rank has one
    head."""
    tokens = BATCH * SEQ // inner
    q, kv = tokens * heads[0] // ulysses_size * DIM, 2 * tokens * max(1, heads[1] // ulysses_size) * DIM
    lse = q // DIM
    # with a query go, in backward, the output's gradient, lse and delta
    return {
        "forward": {"q": q, "kv": kv, "out": q + lse},
        "backward": {"q": 2 * q + 2 * lse, "kv": kv, "dq": q, "dkv": kv},
    }


# size -> (ulysses, heads): rings of several sizes, Ulysses alone and around a ring, MHA, GQA, U > Hkv
CASES = {
    2: [(1, (4, 4)), (2, (4, 4))],
    3: [(1, (4, 1))],
    4: [(1, (4, 2)), (2, (4, 4)), (2, (4, 1)), (4, (8, 4)), (4, (8, 2))],
    6: [(2, (4, 2)), (3, (6, 1))],
    8: [(4, (8, 2)), (2, (4, 4))],
}


@pytest.mark.parametrize("size", each_then_rest([2, 3, 4], [6, 8]))
@on_each_of("size")
def test_elements_follow_the_formulas(size):
    for (ulysses_size, heads), travels in itertools.product(CASES[size], ("kv", "q")):
        case = ulysses_size, "zigzag", heads, travels
        sp, forward, backward, plans = received(size, *case)
        ring, rows = formulas(size, *case)
        assert +forward == +Counter({**ring[0], "qkv": rows[0], "out_heads": rows[1]}), case
        assert +backward == +Counter({**ring[1], "dqkv": rows[0], "do_heads": rows[1]}), case
        assert plans == [sum(ring[0].values()), sum(ring[1].values())], case
        assert sp.comm.received_bytes == 8 * (forward.total() + backward.total()), case


def formulas(size, ulysses_size, layout, heads, travels):
    """What a ring receives by kind, forward and backward, and the two all-to-alls of a direction."""
    inner = size // ulysses_size
    units = block_units(inner, ulysses_size, heads)
    # what goes round, and the results that are merged on the way or sent home, each A - 1 times
    moved = {"kv": (("kv",), ("kv", "dkv")), "q": (("q", "out"), ("q", "dq"))}[travels]
    ring = [
        {kind: (inner - 1) * units[direction][kind] for kind in kinds}
        for direction, kinds in zip(units, moved, strict=True)
    ]
    q, kv = units["forward"]["q"], units["forward"]["kv"]
    # (U - 1) / U of |q| + |kv| in, and of |o| out
    return ring, ((ulysses_size - 1) * (q + kv) // ulysses_size, (ulysses_size - 1) * q // ulysses_size)


@pytest.mark.parametrize("size", each_then_rest([4], [3, 8]))
@on_each_of("size")
def test_contiguous_causal_skips_moves_that_nobody_needs(size):
    for ulysses_size in (1, 2) if size % 2 == 0 else (1,):
        sp, forward, backward, plans = received(size, ulysses_size, "contiguous", (4, 1), "kv")
        inner, rank = size // ulysses_size, sp.runtime.rank
        unit = block_units(inner, ulysses_size, (4, 1))["forward"]["kv"]
        # only earlier tokens' k/v comes; of gradients, those passing by, and one's own once later ranks have it
        kv, dkv = rank * unit, (max(0, rank - 1) + (rank < inner - 1)) * unit
        assert forward["kv"] == kv
        assert (backward["kv"], backward["dkv"]) == (kv, dkv)
        assert plans == [kv, kv + dkv]


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
@pytest.mark.parametrize(("ranks", "config", "dtype"), [
    pytest.param(ranks, config, dtype, id=f"{name}-{word}", marks=[] if word == few else pytest.mark.whole)
    for name, ranks, few, config in (
        ("ring", 2, "bf16", {"ulysses": 1, "layout": "zigzag"}),
        ("ulysses", 2, "fp32", {"ulysses": 2, "layout": "zigzag"}),
        ("distflash", 4, "", {"ulysses": 1, "schedule": "distflash"}),  # messages as a ring's
        # all-gathers and all-to-alls of groups
        ("attention2d", 4, "bf16", {"ulysses": 1, "schedule": "attention2d", "rows": 2}),
        ("mesh", 4, "fp32", {"ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2],
                             "rotate_forward": "q", "rotate_backward": "q",
                             "overlap": True}),
    )
    for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
])  # fmt: skip
def test_bytes_on_the_wire_are_those_counted(ranks, config, dtype):
    results = on_ranks(ranks, on_the_wire, config, dtype, keep=None)
    counted, wire = ([sum(found) for found in zip(*by_rank, strict=True)] for by_rank in zip(*results, strict=True))
    assert min(counted) > 2**21  # so much that headers and the ranks' agreement do not matter
    assert wire == pytest.approx(counted, rel=0.05)

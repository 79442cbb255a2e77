"""What ranks receive: elements as the plan and the formulas say, and as many bytes on the loopback interface."""

import pathlib
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.ranks import leaves, make
from tests.launch import on_ranks

COUNTERS = pathlib.Path("/proc/net/dev")
BATCH, SEQ, DIM = 2, 48, 8


def received(size, degree, layout, heads, causal):
    """(forward counts, backward counts, what the plans say of this rank, inner rank)."""
    sp = make(size=size, ulysses=degree, layout=layout)
    q, k, v, do = oracle.tensors(BATCH, SEQ, heads, dim=DIM)
    out = sp.attention(*leaves(sp, q, k, v), causal=causal)
    forward = Counter(sp.comm.received)
    out.backward(sp.shard(do, 1))
    backward = Counter(sp.comm.received) - forward
    inner = size // degree
    units = block_units(inner, degree, heads)
    plans = [
        sp.runtime.plan(SEQ // inner, causal, direction).received(units)[sp.runtime.rank]
        for direction in ("forward", "backward")
    ]
    return forward, backward, plans, sp.runtime.rank


def block_units(inner, degree, heads):
    """Elements of one inner rank's block. k/v is never repeated: with U > Hkv a member has one head of it."""
    tokens = BATCH * SEQ // inner
    q, kv = tokens * heads[0] // degree * DIM, 2 * tokens * max(1, heads[1] // degree) * DIM
    return {"q": q, "kv": kv, "out": q + q // DIM, "dq": q, "dkv": kv}


def rows_of_ulysses(degree, q, kv):
    """Elements received by the two all-to-alls of one direction: (U - 1) / U of |q| + |kv|, then of |o|."""
    return (degree - 1) * (q + kv) // degree, (degree - 1) * q // degree


# size, ulysses, heads: rings of several sizes, Ulysses alone and around a ring, GQA, U > Hkv
CASES = [
    (2, 1, (4, 4)),
    (4, 1, (4, 2)),
    (3, 1, (4, 1)),
    (4, 2, (4, 4)),
    (4, 2, (4, 1)),
    (4, 4, (8, 4)),
    (4, 4, (8, 2)),
    (6, 2, (4, 2)),
    (8, 4, (8, 2)),
]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize(("size", "degree", "heads"), CASES)
def test_elements_follow_the_formulas(size, degree, heads, layout):
    inner = size // degree
    units = block_units(inner, degree, heads)
    rows = rows_of_ulysses(degree, units["q"], units["kv"])
    for forward, backward, plans, _ in on_ranks(size, received, size, degree, layout, heads, True):
        ring = {"kv": (inner - 1) * units["kv"]}
        assert +forward == +Counter({**ring, "qkv": rows[0], "out_heads": rows[1]})
        back = {"kv": (inner - 1) * units["kv"], "dkv": (inner - 1) * units["dkv"]}
        assert +backward == +Counter({**back, "dqkv": rows[0], "do_heads": rows[1]})
        assert plans == [sum(ring.values()), sum(back.values())]


@pytest.mark.parametrize(("size", "degree", "heads"), [(4, 1, (4, 2)), (3, 1, (4, 1)), (8, 2, (4, 1))])
def test_contiguous_causal_skips_moves_that_nobody_needs(size, degree, heads):
    inner = size // degree
    units = block_units(inner, degree, heads)
    for forward, backward, plans, rank in on_ranks(size, received, size, degree, "contiguous", heads, True):
        # only earlier tokens' k/v comes; of its gradients, those passing by, and one's own once later ranks have it
        kv, dkv = rank * units["kv"], (max(0, rank - 1) + (rank < inner - 1)) * units["dkv"]
        assert forward["kv"] == kv
        assert (backward["kv"], backward["dkv"]) == (kv, dkv)
        assert plans == [kv, kv + dkv]


def loopback():
    """Bytes that the loopback interface has received."""
    line = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


class Meter:
    """Bytes on the loopback between two moments that all ranks have reached, less its idle traffic of just before."""

    def __init__(self):
        dist.barrier()
        start, begin = loopback(), time.monotonic()
        time.sleep(0.1)
        self.idle = (loopback() - start) / (time.monotonic() - begin)
        dist.barrier()
        self.bytes, self.moment = loopback(), time.monotonic()
        dist.barrier()  # nobody sends before everybody has read the counter

    def reading(self):
        """(how busy others were, bytes)."""
        dist.barrier()
        return self.idle, loopback() - self.bytes - self.idle * (time.monotonic() - self.moment)


def on_the_wire(degree, attempts=5):
    """(bytes that this rank counts, bytes on the wire of all ranks in the quietest attempt), forward and backward."""
    sp = make(ulysses=degree, layout="zigzag")
    # few tokens with large heads: many bytes and little to compute
    q, k, v, do = oracle.tensors(1, 128, (128, 128), dim=128, dtype=torch.float32)
    local, do = leaves(sp, q, k, v), sp.shard(do, 1)
    readings, counted = ([], []), []
    for _ in range(attempts):
        sp.comm.received.clear()
        meter = Meter()
        out = sp.attention(*local)
        readings[0].append(meter.reading())
        forward = sum(sp.comm.received.values())
        meter = Meter()
        out.backward(do)
        readings[1].append(meter.reading())
        counted = [forward * q.element_size(), (sum(sp.comm.received.values()) - forward) * q.element_size()]
    return counted, [min(found)[1] for found in readings]


# element counts alone would not have shown that gloo's own reduce-scatter receives twice its share
@pytest.mark.skipif(not COUNTERS.exists(), reason="there is no /proc/net/dev to read the loopback's byte counter from")
@pytest.mark.parametrize("degree", [1, 2], ids=["ring", "ulysses"])
def test_bytes_on_the_wire_are_those_counted(degree):
    for _ in range(3):  # other programs' traffic on the loopback may spoil a whole run
        results = on_ranks(2, on_the_wire, degree)
        counted = [sum(counts[direction] for counts, _ in results) for direction in (0, 1)]
        off = [abs(wire / count - 1) for wire, count in zip(results[0][1], counted, strict=True)]
        if max(off) < 0.05:
            break
    assert min(counted) > 2**23  # so much that headers and the ranks' agreement do not matter
    assert max(off) < 0.05

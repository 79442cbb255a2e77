"""`check_finite`: the first place in which a NaN or inf appears is named on all ranks, wherever it comes from."""

import functools
import math

import torch
import torch.distributed as dist

from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.runtime.kernels import KERNELS
from tests import oracle
from tests.dist.ranks import SECONDS, attend, is_one_sentence, leaves, make, refusal
from tests.launch import on_ranks
from tests.words import missing

WORLD, BAD = 4, 2  # the rank that has or makes the number
SHAPES = {
    "ring": {"ulysses": 1, "rotate_forward": "kv", "rotate_backward": "kv"},
    "queries": {"ulysses": 1, "rotate_forward": "q", "rotate_backward": "q"},
    "heads": {"ulysses": 4},
    "heads of a mesh": {"ulysses": 2, "schedule": "attention2d", "rows": 2},
    "mesh": {"ulysses": 1, "schedule": "attention2d"},
}
# of a transport's functions: what the function fills
FILLED = {
    "post": lambda sends, receives: receives[0].buffer if receives else None,
    "exchange": lambda kind, sent, received, sizes: received,
    "all_gather": lambda ranks, kind, elements, sent, received: received,
    "all_to_all": lambda ranks, kind, elements, sent, received, sizes: received,
}


def spoil(x, value=math.nan):
    with torch.no_grad():
        x.view(-1)[:1] = value


@functools.cache
def prepared(shape):
    """A SequenceParallel that looks, and inputs in which it finds nothing, not in rows that see no key either."""
    sp, whole = make(check_finite=True, kernel="cpu_flash", **SHAPES[shape]), oracle.tensors(1, 48, (4, 4))
    attend(sp, *whole, mask=Mask(causal=False, documents=(0, 5)), sinks=torch.full((4,), -math.inf).double())
    return sp, whole


def told_of_input(shape, number):
    """number: of q, k, v, do."""
    sp, whole = prepared(shape)
    local, do = leaves(sp, *whole[:3]), sp.shard(whole[3], 1).clone()
    if dist.get_rank() == BAD:
        spoil([*local, do][number], -math.inf)
    return refusal(lambda: sp.attention(*local).backward(do))


def told_of_kernel(shape, direction, call, result):
    """result: which of the tensors that a kernel returns; call: the number of the call that is spoiled."""
    sp, whole = prepared(shape)
    kernel, real, calls = KERNELS["cpu_flash"], getattr(KERNELS["cpu_flash"], direction), []

    def spoiled(*args):
        found = real(*args)
        calls.append(spoil(found[result]) if len(calls) == call else None)
        return found

    if dist.get_rank() == BAD:
        setattr(kernel, direction, spoiled)
    told = refusal(attend, sp, *whole)
    setattr(kernel, direction, real)
    return told


def told_of_wire(shape, name, call):
    """name: of the transport's function whose transfer number `call` arrives spoiled, at its end."""
    sp, whole = prepared(shape)
    real, filled = getattr(sp.comm, name), []

    def spoiled(*args):
        handle, buffer = real(*args), FILLED[name](*args)
        if buffer is not None:
            filled.append(buffer)
            if len(filled) == call:
                wait = handle.wait
                handle.wait = lambda: (wait(), buffer.view(torch.uint8)[-8:].fill_(255))
        return handle

    if dist.get_rank() == BAD:
        setattr(sp.comm, name, spoiled)
    told = refusal(attend, sp, *whole)
    setattr(sp.comm, name, real)
    return told


FORWARD, BACKWARD = "in attention (call ", "in backward of attention (call "
CASES = {  # (function, arguments) -> words of the sentence
    (told_of_input, "ring", 0): ("-inf in 1 of 384 numbers", "q of attention (call "),
    (told_of_input, "mesh", 1): ("k of attention (call ",),
    (told_of_input, "heads", 2): ("v of attention (call ",),
    (told_of_input, "queries", 3): ("do of backward of attention (call ",),
    (told_of_kernel, "ring", "forward", 1, 1): ("q(2)*kv(1)'s lse, made in", FORWARD, "ring step 1"),
    (told_of_kernel, "queries", "forward", 0, 0): ("q(2)*kv(2)'s out, made in", FORWARD, "ring step 0"),
    (told_of_kernel, "ring", "backward", 0, 1): ("q(2)*kv(2)'s dk, made in", BACKWARD, "ring step 0"),
    (told_of_wire, "ring", "post", 2): ("kv(0)'s v, which came over the wire from rank 1", FORWARD, "ring step 1"),
    (told_of_wire, "queries", "post", 4): ("over the wire", FORWARD),
    (told_of_wire, "ring", "post", 6): ("dkv(", "over the wire from rank 1", BACKWARD),
    (told_of_wire, "heads", "exchange", 1): ("q and k and v, which came over the wire from rank 3", FORWARD),
    (told_of_wire, "heads of a mesh", "exchange", 1): ("q and k and v, which came over the wire from rank 3", FORWARD),
    (told_of_kernel, "mesh", "forward", 0, 0): ("'s out, made in", FORWARD),
    (told_of_wire, "heads", "exchange", 3): ("over the wire from rank 3", BACKWARD),
    (told_of_wire, "mesh", "all_gather", 1): ("over the wire from rank", FORWARD),
    (told_of_wire, "mesh", "all_to_all", 1): ("out(2)'s", "over the wire from rank", FORWARD),
}


def told():
    return [function(*args) for function, *args in CASES]


def test_each_place_is_named_on_all_ranks():
    by_rank = on_ranks(WORLD, told, timeout=SECONDS)
    for place, (case, words) in enumerate(CASES.items()):
        kind, sentence = by_rank[BAD][place]
        assert kind == "InputError", case
        assert missing(sentence, *words, f"on rank {BAD}") == [], (case, sentence)
        assert is_one_sentence(sentence), sentence
        others = [found[place] for rank, found in enumerate(by_rank) if rank != BAD]
        assert others == [("DisagreementError", f"rank {BAD} cannot go on: {sentence}")] * (WORLD - 1), case

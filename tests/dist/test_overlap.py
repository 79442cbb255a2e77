"""Transfers run beside products: what is posted when, on real ranks. Order is asserted, never time."""

import functools
import itertools

import pytest

from ds_seqpar.runtime.kernels import KERNELS
from tests import oracle
from tests.dist.ranks import leaves, make
from tests.launch import on_ranks


class Recorder:
    """Writes down, in order: (`post`, kinds, number), (`wait`, kinds, number) and (`compute`,)."""

    def __init__(self, sp):
        self.events, self.numbers, self.unfinished = [], itertools.count(), []
        self.real_post = sp.comm.post
        sp.comm.post = self.post
        kernel = KERNELS["cpu_flash"]
        for name in ("forward", "backward"):
            setattr(kernel, name, self.computing(getattr(type(kernel), name).__get__(kernel)))

    def computing(self, function):
        def compute(*args):
            self.events.append(("compute",))
            return function(*args)

        return compute

    def post(self, sends, receives):
        handle = self.real_post(sends, receives)
        kinds = tuple(sorted({message.kind for message in (*sends, *receives)}))
        if not kinds:
            return handle
        number, works, real_wait = next(self.numbers), handle.works, handle.wait
        self.events.append(("post", *kinds, number))

        def wait():
            real_wait()
            self.unfinished += [work for work in works if not work.is_completed()]
            self.events.append(("wait", *kinds, number))

        handle.wait = wait
        return handle

    def story(self):
        """The events so far without numbers, neighbouring computes as one. Forgets them."""
        events, self.events = [event[:-1] if len(event) > 1 else event for event in self.events], []
        return [" ".join(event) for event, _ in itertools.groupby(events)]


def record(ulysses_size, cases):
    """By case: forward story, backward story, handles posted, handles waited for, works not done after their wait."""
    found = []
    for layout, causal, travels in cases:
        sp = make(ulysses=ulysses_size, layout=layout, rotate_forward="kv", rotate_backward=travels, kernel="cpu_flash")
        recorder = Recorder(sp)
        q, k, v, do = oracle.tensors(1, 48, (4, 2))
        out = sp.attention(*leaves(sp, q, k, v), causal=causal)
        events = list(recorder.events)
        forward = recorder.story()
        out.backward(sp.shard(do, 1))
        events += recorder.events
        posted = [event[1:] for event in events if event[0] == "post"]
        waited = [event[1:] for event in events if event[0] == "wait"]
        found.append((forward, recorder.story(), posted, waited, len(recorder.unfinished)))
    return found


# on 4 CP ranks: the next k/v is under way while the present is computed
FORWARD = 3 * ["post kv", "compute", "wait kv"] + ["compute"]
# a rank's own product stays, so the first gradient leaves in step 1; it arrives beside the products of step 2 and is
# merged only then; the last one is on its way home when the plan ends
BACKWARD = [
    *("post kv", "compute", "wait kv"),
    *("post kv", "compute", "post dkv", "wait kv"),
    *("post kv", "compute", "wait dkv", "post dkv", "wait kv"),
    *("compute", "wait dkv", "post dkv", "wait dkv"),
]
BALANCED = list(itertools.product(("zigzag", "striped"), (True, False), ("kv", "q")))


UNBALANCED = [("contiguous", True, "kv"), ("contiguous", False, "kv"), ("contiguous", True, "q")]


@pytest.fixture(scope="module")
def recorded():
    """By (ranks, degree) and rank: what `record` says of the cases."""
    return functools.cache(lambda size, ulysses_size, cases: on_ranks(size, record, ulysses_size, cases))


@pytest.mark.parametrize(("size", "ulysses_size", "cases"), [
    (4, 1, BALANCED), (8, 2, BALANCED[1::4]), pytest.param(8, 2, BALANCED, marks=pytest.mark.whole),
])  # fmt: skip
def test_next_transfer_is_posted_before_the_present_block_is_computed(recorded, size, ulysses_size, cases):
    for found in recorded(size, ulysses_size, (*BALANCED, *UNBALANCED) if size == 4 else tuple(cases)):
        for case, (forward, backward, *_) in zip(cases, found, strict=False):
            assert forward == FORWARD, case
            assert backward == [event.replace("kv", case[2]) for event in BACKWARD], case


# a dropped isend loses its message: pytorch#174288, nccl#1967 and ring-flash-attention#39 hang on requests that do not
# match what is waited for
def test_every_handle_is_waited_for_once(recorded):
    cases = (*BALANCED, *UNBALANCED)
    for found in recorded(4, 1, cases):
        for case, (*_, posted, waited, unfinished) in zip(cases, found, strict=True):
            assert sorted(posted) == sorted(waited), case
            assert len(posted) == len(set(posted)) > 0, case
            assert unfinished == 0, case

"""The doctor passes what is right, and names each planted fault: its cause, its ranks, its blocks."""

import contextlib
import dataclasses
import importlib.metadata
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ds_seqpar.core.compiler import compile as compiling
from ds_seqpar.core.compiler.program import instructions as op
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS
from ds_seqpar.core.runtime import attention, walk
from ds_seqpar.core.runtime.kernels import KERNELS
from ds_seqpar.core.runtime.kernels.accumulate import Softmax, Sum
from ds_seqpar.core.runtime.transport import TorchComm
from ds_seqpar.data import batches
from ds_seqpar.doctor import CHECKS, Job, data, examine, ranks
from ds_seqpar.doctor import attention as attention_check
from tests.dist.ranks import make
from tests.launch import on_each_of
from tests.words import missing

OF_RANKS = {name: check for name, check in CHECKS if name not in ("batches", "loaders")}
SMALL = {"heads": (4, 2), "head_dim": 16, "quick": True}


def found(sp, *names, **job):
    """{check: (status, what is wrong)} of these checks, the same on all ranks; default: of all."""
    sp.runtime.last_bound.clear()  # programs that were compiled with another fault
    checks = [(name, OF_RANKS[name]) for name in names or OF_RANKS]
    return {one.check: (one.status, one.detail) for one in examine(Job(sp=sp, **{**SMALL, **job}), checks, len)}


def only(*wanted):
    """Of the masks of the check of attention these alone, for the time that it takes."""
    cases = attention_check._cases
    names = [name.removeprefix("attention, ") for name in wanted]
    return patch.object(attention_check, "_cases", lambda job: [case for case in cases(job) if case.name in names])


def failed(findings):
    return {check: detail for check, (status, detail) in findings.items() if status == "fail"}


def on_rank(rank, fault):
    """The fault on one rank."""
    return fault if dist.get_rank() == rank else contextlib.nullcontext()


def dropping(direction):
    """Walks that leave q(2)*kv(0) out."""
    product = walk.EXECUTE[op.Product]

    def execute(self, instruction):
        if (self.program.direction, instruction.q, instruction.kv) != (direction, (2,), (0,)):
            product(self, instruction)

    return patch.dict(walk.EXECUTE, {op.Product: execute})


def masked_by(**fields):
    """Programs that are compiled for a mask with other fields."""
    bound_call = compiling.Compiler.bound_call

    def bound(self, direction, mask, *rest):
        return bound_call(self, direction, dataclasses.replace(mask, **fields), *rest)

    return patch.object(compiling.Compiler, "bound_call", bound)


def scaled(which, factor):
    """A backward whose dq, dk or dv is a multiple of what it must be."""
    backward = attention.backward

    def scaling(*args):
        grads = backward(*args)
        grads[which] = grads[which] * factor
        return grads

    return patch.object(attention, "backward", scaling)


def other_heads(sp):
    attend = sp.attention

    def flipped(q, k, v, **options):
        return attend(q, k.flip(2), v.flip(2), **options)

    return patch.object(sp, "attention", flipped)


def paced(rank, peer, seconds):
    """A transport in which a link takes so many seconds for a message of many bytes."""
    post = TorchComm.post

    def posting(self, sends, receives):
        if any(len(m.buffer) > 2**16 and m.peer == (peer if dist.get_rank() == rank else rank) for m in sends):
            time.sleep(seconds * (dist.get_rank() in (rank, peer)))
        return post(self, sends, receives)

    return patch.object(TorchComm, "post", posting)


@contextlib.contextmanager
def summing_in_bf16():
    with contextlib.ExitStack() as stack:
        for accumulator in (Softmax, Sum):
            combine = accumulator._combine

            def rounded(self, targets, new, combine=combine):
                combine(self, targets, new)
                for x in targets:
                    x.copy_(x.bfloat16())

            stack.enter_context(patch.object(accumulator, "_combine", rounded))
        yield


def wrong_kernel(queries):
    """A kernel that is wrong for so many queries."""
    kernel = KERNELS["cpu_flash"]
    forward = kernel.forward

    def wrong(q, *rest):
        out, lse = forward(q, *rest)
        return (out * 1.01 if q.shape[1] == queries else out), lse

    return patch.object(kernel, "forward", wrong)


def version(of_torch):
    asked = importlib.metadata.version
    return patch.object(importlib.metadata, "version", lambda name: of_torch if name == "torch" else asked(name))


def other_layout(sp):
    return patch.object(sp.runtime, "config", dataclasses.replace(sp.config, layout="striped"))


def first_share(tokens, ranks, rank):
    return LAYOUTS["zigzag"].runs(tokens, ranks, 0)


@on_each_of(4)
def test_faults_are_named():
    with make(ulysses=1) as sp:
        state, counts = torch.get_rng_state(), dict(sp.comm.received)
        assert failed(found(sp)) == {}
        assert torch.equal(torch.get_rng_state(), state)
        assert dict(sp.comm.received) == counts
        padding_kept = patch.object(batches, "_padding_as_documents", lambda lengths, mask: lengths)
        striped = patch.dict(LAYOUTS, {"balanced": LAYOUTS["striped"]})
        held_twice = patch.dict(LAYOUTS, {"balanced": dataclasses.replace(LAYOUTS["zigzag"], runs=first_share)})
        wrong = {}
        for fault, name, expected in (
            (on_rank(1, version("2.1.0")), "environment",
             {"versions": ("ranks 0, 2-3: torch 2.", "rank 1: torch 2.1.0")}),
            (on_rank(2, other_layout(sp)), "agreement",
             {"settings": ("ranks 0-1, 3: layout 'balanced'", "rank 2: layout 'striped'")}),
            (on_rank(2, striped), "agreement", {"settings": ("rank 2: tokens of SP rank 0 0-28 by 4",)}),
            (held_twice, "agreement", {"shares": ("32 tokens must be held once; got 32, of which 8 are different",)}),
            (wrong_kernel(37), "kernels",
             {"kernels": ("cpu_flash, causal, 37 queries and 67 keys: out is 1.01 times",)}),
            (summing_in_bf16(), "sums", {"sums": ("not kept in fp32",)}),
            (paced(1, 2, 0.2), "links", {"links": ("the link of ranks 1 and 2",)}),
            (dropping("forward"), "attention", {"attention, full":
             ("rank 2: forward: the product q(2)*kv(0) is left out, which CP rank 2 computes in step",)}),
            (dropping("backward"), "attention", {"attention, causal":
             ("backward: the product q(2)*kv(0) is left out",)}),
            (masked_by(documents=(), window=None), "attention", {
                "attention, documents": ("forward: boundaries of documents dropped",),
                "attention, window": ("forward: the window dropped",),
            }),
            (padding_kept, "attention", {"attention, padding": ("forward: padding dropped",)}),
            (other_heads(sp), "attention", {"attention, full": ("head 0 of out is of key/value head 1, not 0",)}),
            (scaled(0, 4.0), "attention", {"attention, full": ("dq is 4 times",)}),
            (scaled(2, 0.5), "attention", {"attention, padding": ("dv is 0.5 times",)}),
        ):  # fmt: skip
            with fault, only(*expected):
                findings = failed(found(sp, name))
            for check, words in expected.items():
                if lacks := missing(findings.get(check, "passed"), *words):
                    wrong[check, words] = lacks, findings
        assert wrong == {}, wrong


def raising(job):
    """A check that fails on one rank, before others are waited for."""
    if dist.get_rank() == 1:
        raise KeyError("nothing")
    yield "ready"
    return []


@on_each_of(4)
def test_a_check_that_raises_on_one_rank_ends_on_all():
    """And what follows is not tried, since ranks may no longer be in step."""
    with make(ulysses=1) as sp:
        checks = [("first", raising), ("attention", OF_RANKS["attention"])]
        findings = examine(Job(sp=sp, **SMALL), checks, len)
        assert [(one.check, one.status) for one in findings] == [("first", "fail"), ("attention", "not tried")]
        assert not missing(findings[0].detail, "rank 1: ", "KeyError"), findings
        assert sp.attention(*(torch.zeros(1, 8, 4, 8) for _ in range(3))).shape == (1, 8, 4, 8)


# what is sent how, and what shapes of heads, dtypes and masks there are
GRID = [
    {"ulysses": 4, "job": {"quick": False}},
    {"ulysses": 2, "job": {"heads": (6, 3), "dtype": torch.bfloat16}},
    {"ulysses": 2, "head_chunks": 2, "job": {"heads": (8, 4), "window": 8}},
    {"ulysses": 1, "schedule": "distflash", "job": {"dtype": torch.bfloat16}},
    {"ulysses": 1, "schedule": "attention2d", "comm_dtype": "bf16", "overlap": True},
    {"ulysses": 2, "schedule": "mesh", "rotate_backward": "q", "job": {"dtype": torch.float64, "head_dim": 5}},
    {"ulysses": 1, "schedule": "wallfacer", "team": 2, "job": {"softcap": 5.0}},
    {"ulysses": 1, "schedule": "double_ring", "rotate_forward": "q", "rotate_backward": "q", "layout": "striped"},
    {"size": 2, "ulysses": 1, "kernel": "chunked", "job": {"dtype": torch.float16, "heads": (9, 3)}},
]


@pytest.mark.slow
@on_each_of(4, timeout=500)
def test_what_is_right_passes():
    for settings in GRID:
        job = {**SMALL, **settings.get("job", {})}
        config = {name: value for name, value in settings.items() if name != "job"}
        with make(heads=job["heads"], **config) as sp:
            findings = found(sp, **job)
            assert failed(findings) == {}, (settings, failed(findings))
            not_tried = {check for check, (status, _) in findings.items() if status == "not tried"}
            assert not_tried <= {"attention, full"}, settings


@on_each_of(1)
def test_one_process_has_no_links_to_try():
    with make() as sp:
        findings = found(sp)
    assert failed(findings) == {}
    assert {check for check, (status, _) in findings.items() if status == "not tried"} == {"links"}


@on_each_of(2)
def test_an_error_of_one_rank_in_the_check_of_attention_leaves_none_waiting():
    for name in ("random", "define"):
        fault = patch.object(attention_check, name, side_effect=ValueError("no room"))
        with on_rank(1, fault), only("attention, full"):
            assert failed(found(make(), "attention")) == {"attention": "rank 1: attention raised, ValueError: no room"}


@on_each_of(2)
def test_the_order_of_the_job_s_loader_is_that_of_a_run_without_the_doctor():
    def loader():
        return DataLoader(range(20), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))

    examined = loader()
    findings = examine(Job(sp=make(), loader=examined), [("loaders", data.loaders)], len)
    assert {finding.status for finding in findings} == {"pass"}
    assert data.OF_JOB in [finding.check for finding in findings]
    assert torch.equal(torch.cat([*examined]), torch.cat([*loader()]))


@pytest.mark.parametrize(("seconds", "slow"), [((1, 9, 1, 9), 0), ((1, 1, 1, 9), 1), ((1, 9), 1), ((9, 9, 1, 9), 0)])
def test_a_link_is_slow_if_most_are_faster(seconds, slow):
    seconds_of = {(rank, rank + 1): x for rank, x in enumerate(map(float, seconds))}
    assert len(ranks.slow_ones([(seconds_of, "host")] * 5, 0.0)[1]) == slow

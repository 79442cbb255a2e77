"""Drawn programs of several calls of attention and several losses, each rank of which runs them in its own way.

Wherever all ranks do the same, the gradients are those of dense attention. Where one differs, all raise one sentence.
"""

import dataclasses
import random
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_seqpar.base.errors import SeqParError
from tests import oracle
from tests.dist.ranks import is_one_sentence, leaves, make
from tests.grids import few_then_rest
from tests.launch import on_each_of
from tests.words import missing

HEADS, SEQUENCES = (4, 2), (16, 16, 32)  # of the q, k and v that calls take
SETTINGS = {  # by ranks
    2: ({"size": 2, "ulysses": 1}, {"size": 2, "ulysses": 2}, {"size": 2, "ulysses": 1, "recompute_attention": True}),
    4: ({"size": 4, "ulysses": 2}, {"size": 4, "schedule": "attention2d"}, {"size": 2, "head_chunks": 2}),
}
# what one rank does that the others do not, or all ranks in a second thread
FAULTS = ("none", "none", "order", "fewer", "no attention", "thread", "moved")


class Recomputed(torch.autograd.Function):
    """A user's own checkpoint."""

    @staticmethod
    def forward(ctx, attention, *given):
        ctx.attention = attention
        ctx.save_for_backward(*given)
        return attention(*given)

    @staticmethod
    def backward(ctx, grad):
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attention(*given)
        return None, *torch.autograd.grad(out, given, grad)


STYLES = {
    "plain": lambda sp, *given: sp.attention(*given),
    "checkpoint": lambda sp, *given: sp.checkpoint(sp.attention, *given),
    "reentrant": lambda sp, *given: sp.checkpoint(sp.attention, *given, use_reentrant=True),
    "torch's": lambda sp, *given: checkpoint(sp.attention, *given, use_reentrant=False),
    "torch's reentrant": lambda sp, *given: checkpoint(sp.attention, *given, use_reentrant=True),
    "nested": lambda sp, *given: checkpoint(STYLES["reentrant"], sp, *given, use_reentrant=True),
    "own": lambda sp, *given: Recomputed.apply(sp.attention, *given),
}


@dataclasses.dataclass
class Program:
    """calls: each (its style, which q, k and v, the call whose out is its q). losses: each of the outs of some calls.
    runs: the losses in the order of their backward, some of them twice. ways: how each is run. between: what ranks do
    after each call and each run. odd: the rank that differs, as `fault` says, from the run `at` on."""

    calls: list[tuple[str, int, int | None]]
    losses: list[list[int]]
    runs: list[int]
    ways: list[str]
    between: list[str]
    fault: str
    odd: int
    at: int

    @classmethod
    def drawn(cls, seed: int, world: int) -> "Program":
        draw = random.Random(f"{seed} {world}")
        count = draw.randint(2, 4)
        calls = []
        for number in range(count):
            given = draw.randrange(len(SEQUENCES))
            before = [at for at in range(number) if SEQUENCES[calls[at][1]] == SEQUENCES[given]]
            calls.append((draw.choice(list(STYLES)), given, draw.choice([None, *before])))
        losses = [sorted(draw.sample(range(count), draw.randint(1, count))) for _ in range(draw.randint(2, 3))]
        runs = draw.sample(range(len(losses)), len(losses)) + [0] * draw.randint(0, 1)
        by_inputs = not any("reentrant" in style or style == "nested" for style, _, _ in calls)  # torch has no such
        ways = [draw.choice(["backward", "grad", "inputs"]) if by_inputs else "backward" for _ in runs]
        between = [draw.choice(["nothing", "nothing", "look", "drop", "loss"]) for _ in range(count + len(runs))]
        return cls(
            calls, losses, runs, ways, between, draw.choice(FAULTS), draw.randrange(2), draw.randrange(len(runs))
        )

    def run(self, attend, given, around, rank=None):
        """The gradients of `given`. attend: takes a style, q, k and v. around: does what is between. rank: None for one
        that does as all others do."""
        odd, outs, between = rank == self.odd, [], iter(self.between)
        for style, which, before in self.calls:
            q, k, v = given[which]
            outs.append(attend(style, q if before is None else outs[before], k, v))
            around(next(between))
        runs = list(zip(self.runs, self.ways, strict=True))
        if odd and self.fault == "order":
            runs.reverse()
        for at, (run, way) in enumerate(runs):
            terms = self.losses[run]
            if odd and at == self.at and self.fault in ("fewer", "no attention"):
                terms = terms[:-1] if self.fault == "fewer" else []
            loss = sum((outs[term].square().sum() for term in terms), torch.zeros((), requires_grad=True).double())
            differentiate(loss, [x for its in given for x in its], way)
            around(next(between))
        around("loss")  # where a rank that left attention out meets those that wait for it
        return [x.grad for its in given for x in its]


def differentiate(loss, given, way):
    if way == "grad":
        for x, grad in zip(given, torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True), strict=True):
            if grad is not None:
                x.grad = grad if x.grad is None else x.grad + grad
    else:
        loss.backward(retain_graph=True, inputs=given[:2] if way == "inputs" else None)


def outcome(sp, program, rank):
    """(the sentence that this rank raised, or ""; how far its gradients are from those of dense attention)."""
    whole = [oracle.tensors(1, seq, HEADS, seed=seq + at)[:3] for at, seq in enumerate(SEQUENCES)]
    expected = program.run(
        lambda _, q, k, v: oracle.attention(q, k, v), [[x.clone().requires_grad_() for x in its] for its in whole], id
    )
    given = [leaves(sp, *its) for its in whole]

    def around(what):
        if what == "loss":
            sp.mean_loss(torch.ones(()))
        elif what != "nothing":
            with torch.set_grad_enabled(what == "drop"):
                sp.attention(*given[0])

    said, grads = in_threads(
        sp, program.fault, lambda: program.run(lambda style, *x: STYLES[style](sp, *x), given, around, rank)
    )
    if said:
        return said, 0.0
    far = [
        float((grad - sp.shard(one, 1)).abs().max()) if grad is not None and one is not None else float(grad is not one)
        for grad, one in zip(grads, expected, strict=True)
    ]
    return "", max(far)


def in_threads(sp, fault, function):
    """(the sentence of a SeqParError that a function raises, or ""; what it returns). It is called in a second thread
    where the fault is one of threads."""
    found = []

    def call():
        try:
            if fault == "moved":
                sp.bind_to_thread()
            found.append(("", function()))
        except SeqParError as error:
            found.append((f"{type(error).__name__}: {error}", None))

    if fault in ("thread", "moved"):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        sp.bind_to_thread()
    else:
        call()
    return found[0]


def check(program, said, far):
    """The outcome is the right one for what the ranks did. Another order may run the same calls."""
    if not said:
        assert program.fault != "thread", program
        assert far < 1e-10, program
        return
    assert program.fault not in ("none", "moved"), (program, said)
    words = ("ConfigError", "in one thread") if program.fault == "thread" else ("DisagreementError", "backward")
    assert missing(said, *words) == [], (program, said)
    assert is_one_sentence(said), said


@pytest.mark.parametrize("programs", few_then_rest(range(6), range(6, 50)))
@pytest.mark.parametrize("world", [2, 4])
@on_each_of("world", timeout=600)
def test_drawn_programs(world, programs):
    sps, refused = [make(**settings) for settings in SETTINGS[world]], 0
    rank = torch.distributed.get_rank()
    for seed in programs:
        sp, program = sps[seed % len(sps)], Program.drawn(seed, world)
        said, far = outcome(sp, program, sp.rank)
        check(program, said, far)
        refused += bool(said)
        assert sp.mean_loss(torch.tensor(float(rank))) == (world - 1) / 2, program  # all are in step, and go on
    assert len(programs) / 4 < refused < len(programs) * 3 / 4

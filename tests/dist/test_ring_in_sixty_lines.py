"""examples/ring_in_sixty_lines.py is the engine's ring: the same numbers, and the same messages in the same order."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.core.compiler.program.instructions import Post
from tests import oracle
from tests.dist.ranks import attend, gather_all, make
from tests.launch import on_each_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ring_in_sixty_lines.py"
SEQ, HEADS = 32, (4, 4)


def load():
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program_messages(sp, direction):
    """(to, what, from, what) of each post of the program that this rank has walked, in order."""
    program = sp.runtime.last_bound[direction][1][0].program
    posts = [instruction for instruction in program.code if isinstance(instruction, Post)]
    return [(s.peer, s.unit, r.peer, r.unit) for post in posts for s, r in zip(post.sends, post.receives, strict=True)]


class Units:
    """Which unit a message is, by what is in it."""

    def __init__(self, ring, whole):
        size = dist.get_world_size()
        tokens = [ring.tokens_of(rank, size, SEQ) for rank in range(size)]
        q, k, v, do = whole
        k, v = k.clone().requires_grad_(), v.clone().requires_grad_()
        out = oracle.attention(q, k, v)
        # [i]: what the queries of rank i add to the gradients of all keys
        shares = [torch.autograd.grad(out[:, at], (k, v), do[:, at], retain_graph=True) for at in tokens]
        self.kv = [torch.stack([k[:, at], v[:, at]]).detach() for at in tokens]
        self.dkv = [[torch.stack([x[:, at] for x in share]) for share in shares] for at in tokens]  # [block][i]

    def name(self, message, sender):
        """kv of a block, or the gradient that the ranks after its owner, up to the sender, have added up."""
        size = len(self.kv)
        expected = {("kv", (block,)): self.kv[block] for block in range(size)}
        for block in range(size):
            visited = [(block + hop) % size for hop in range(1, 1 + (sender - block) % size)]
            if visited:
                expected["dkv", (block,)] = sum(self.dkv[block][rank] for rank in visited)
        (unit,) = [unit for unit, x in expected.items() if torch.allclose(x, message, rtol=0, atol=1e-10)]
        return unit


@pytest.mark.parametrize("ranks", [2, 4])
@on_each_of("ranks", keep=None)
def test_it_is_the_ring_of_the_engine(ranks):
    ring, whole = load(), oracle.tensors(2, SEQ, HEADS)
    sp = make(size=ranks, ulysses=1, schedule="ring", layout="zigzag", rotate_forward="kv", rotate_backward="kv")
    by_engine = attend(sp, *whole)
    posted, real = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: posted.append(ops) or real(ops)
    local = [sp.shard(x, 1).requires_grad_() for x in whole[:3]]
    out = ring.RingAttention.apply(*local)
    in_forward = len(posted)
    out.backward(sp.shard(whole[3], 1))

    by_loop = gather_all(sp, out, *(x.grad for x in local))
    oracle.assert_exact(by_loop, by_engine)
    oracle.assert_exact(by_loop, oracle.dense(*whole))
    units = Units(ring, whole)
    for direction, posts in (("forward", posted[:in_forward]), ("backward", posted[in_forward:])):
        found = []
        for send, receive in posts:
            assert (send.op, receive.op) == (dist.isend, dist.irecv)
            what = units.name(send.tensor, dist.get_rank()), units.name(receive.tensor, receive.peer)
            found.append((send.peer, what[0], receive.peer, what[1]))
        assert found == program_messages(sp, direction)
        assert len(found) == (ranks - 1) * (2 if direction == "backward" else 1)


@on_each_of(3, keep=None, patience=None)
def test_it_runs_as_a_script_that_checks_itself():
    load().main()

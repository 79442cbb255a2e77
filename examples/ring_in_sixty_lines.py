"""Ring attention in sixty lines, forward and backward: the loop that ds_seqpar's engine generalizes.

    torchrun --nproc-per-node 4 examples/ring_in_sixty_lines.py

Each rank holds the queries, keys and values of its own tokens, and all ranks attend to the whole sequence. Queries stay
in place, while keys and values travel around the ring. In each step, a rank computes attention to the current block,
sends the block to the next rank in the meantime, and merges the result into its own. After `size` steps, every query
has been combined with every key, and no rank has ever stored more than two remote blocks. The script compares the
result with attention on one device, and prints the maximum error.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tokens_of(rank: int, size: int, seq: int) -> Tensor:
    """Return the positions of a rank's tokens: chunks r and 2 size - 1 - r of 2 size chunks ("zigzag").

    Under a causal mask, late queries see more keys than early queries. Since each rank has an early and a late chunk,
    all ranks have equal work in every step.
    """
    chunks = torch.arange(seq).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


class Hop:
    """Sends this rank's block to the next rank, and receives the previous rank's block.

    The send and the receive are posted together, because over NCCL a send posted alone may wait forever for its
    receive.
    """

    def __init__(self, block: Tensor) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.sent, self.received = block, torch.empty_like(block)  # referenced until `wait`, since not copied
        send = dist.P2POp(dist.isend, self.sent, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, self.received, (rank - 1) % size)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's q, k and v (batch, tokens, heads, head_dim)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:3], 1), float("-inf"))  # running log-sum-exp of each row's scores
        kv = torch.stack([k, v])  # one message instead of two
        for step in range(size):
            hop = Hop(kv) if step < size - 1 else None  # in transit during the product
            scores = scores_of(q, kv[0], rank, (rank - step) % size)
            # attention over all keys so far is a weighted mean of attention over earlier keys and over this block
            lse_before, lse = lse, torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
            out = out * (lse_before - lse).exp() + torch.einsum("bqhk,bkhd->bqhd", (scores - lse).exp(), kv[1])
            kv = hop.wait() if hop else kv
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        delta = (do * out).sum(-1, keepdim=True)  # all that softmax's gradient needs from other blocks
        dq, kv, gradient_hop = torch.zeros_like(q), torch.stack([k, v]), None
        for step in range(size):
            hop = Hop(kv) if step < size - 1 else None
            # with the lse of all keys, these are the weights of the whole softmax, so gradients add up
            weights = (scores_of(q, kv[0], rank, (rank - step) % size) - lse).exp()
            dscores = weights * (torch.einsum("bqhd,bkhd->bqhk", do, kv[1]) - delta) * q.shape[-1] ** -0.5
            dq += torch.einsum("bqhk,bkhd->bqhd", dscores, kv[0])
            dkv = torch.stack([torch.einsum("bqhk,bqhd->bkhd", *pair) for pair in ((dscores, q), (weights, do))])
            if step == 0:
                dkv_of_own = dkv  # this rank's own block
            else:  # a block's gradient follows one step behind the block, and each rank adds its share
                if gradient_hop:
                    dkv += gradient_hop.wait()
                gradient_hop = Hop(dkv)
            kv = hop.wait() if hop else kv
        if gradient_hop:  # the last hop returns the own block's gradient
            dkv_of_own += gradient_hop.wait()
        return dq, *dkv_of_own


def scores_of(q: Tensor, k: Tensor, q_rank: int, k_rank: int) -> Tensor:
    """Return the scores (batch, q, heads, k) of one rank's queries and another rank's keys, -inf for later keys."""
    size = dist.get_world_size()
    positions = [tokens_of(rank, size, size * q.shape[1]).to(q.device) for rank in (q_rank, k_rank)]
    later = positions[1] > positions[0][:, None]
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
    return scores.masked_fill(later[:, None], float("-inf"))


# ---- comparison with attention on one device


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention over a whole sequence on one device."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def main() -> None:
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    rank, size, seq = dist.get_rank(), dist.get_world_size(), 32 * dist.get_world_size()
    torch.manual_seed(0)  # the same whole sequence on every rank
    q, k, v, do = (torch.randn(2, seq, 4, 16, dtype=torch.float64).to(device) for _ in range(4))
    mine = tokens_of(rank, size, seq).to(device)

    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    dense_out = dense(*whole)
    dense_out.backward(do)
    local = [x[:, mine].requires_grad_() for x in (q, k, v)]
    out = RingAttention.apply(*local)
    out.backward(do[:, mine])

    pairs = [(out, dense_out[:, mine]), *((x.grad, y.grad[:, mine]) for x, y in zip(local, whole, strict=True))]
    error = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{size} ranks, {seq} tokens: out, dq, dk and dv differ from dense attention by at most {error:.1e}")
    assert error < 1e-10
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

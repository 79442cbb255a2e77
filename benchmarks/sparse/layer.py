"""Time a layer with sparse attention to picked latents, and measure its memory, on a simulated cluster or one rank.

    python -m benchmarks.sparse.layer --seq 4096
    python -m benchmarks.sparse.layer --nodes 1 --seq 2048 -- fast pieces plain

The layer is the attention of DeepSeek V3.2, forward and backward, including its projections. By default, the sizes of
latents and heads, and the numbers of heads and picks are an eighth of that model's, so that 4,096 and 16,384 tokens
represent eight times as many. Nodes, links, turns and the table are the same as in `cluster.layers`. Contenders:

- fast: the module runs once, and reads its picks from the gathered latents.
- pieces: the module runs on 256 tokens at a time with a gathering cache, and expands keys and values of all tokens.
- dense: the index of `fast`, followed by PyTorch's attention over keys and values of all tokens, with a mask for the
  picks.
- plain: the module as in transformers, on one rank.

Each contender is first compared with `fast` in one process. Rounding may change which keys an index picks last, which
affects few rows, so that the norm of all differences is compared.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from benchmarks import runner, tables
from benchmarks.cluster.layers import table
from benchmarks.contenders import Spec
from benchmarks.runner import Row, Step
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.operators.gathered import Piece
from ds_seqpar.operators.sparse import sparse_attention
from hf_integration import gathered_past, sparse
from hf_integration.context import SHARDED
from hf_integration.module_patch import patched

WAYS = ("fast", "pieces", "dense", "plain")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    its = runner.parser(
        __doc__, *WAYS[:3], nodes=8, per_node=1, link="200mbit", parse=way, seq=4096, hidden=256, heads=16, head_dim=16,
        latent=64, index_heads=16, picks=256, rounds=3,
    )  # fmt: skip
    return runner.checked(its, given)


def measure(args: argparse.Namespace) -> list[Row]:
    return runner.measure(args, reference(args), build, error=by_norm)


def way(text: str) -> Spec:
    """Parse a contender. Raises OptionError for another word."""
    if text not in WAYS:
        raise tables.OptionError(f"a contender must be one of {', '.join(WAYS)}; got {text!r}")
    return Spec(text, None, {})


def made(args: argparse.Namespace) -> tuple[DeepseekV32Attention, DeepseekV32RotaryEmbedding]:
    """Return the module, with the same weights on every rank."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=args.hidden, num_attention_heads=args.heads, num_key_value_heads=args.heads,
        q_lora_rank=3 * args.latent, kv_lora_rank=args.latent, qk_rope_head_dim=args.head_dim // 2,
        qk_nope_head_dim=args.head_dim, v_head_dim=args.head_dim, index_n_heads=args.index_heads,
        index_head_dim=args.head_dim, index_topk=args.picks, max_position_embeddings=args.seq,
        attn_implementation="sdpa",
    )  # fmt: skip
    return DeepseekV32Attention(config, 0), DeepseekV32RotaryEmbedding(config)


def inputs_of(rotary: DeepseekV32RotaryEmbedding, states: Tensor, positions: Tensor) -> dict[str, Any]:
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return {"hidden_states": states, "position_embeddings": rotary(states, positions[None]), "attention_mask": mask}


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """Return the inputs, the output's gradient, and the fp32 results of one process."""
    module, rotary = made(args)
    generator = torch.Generator().manual_seed(1)
    states, do = (torch.randn(1, args.seq, args.hidden, generator=generator) for _ in range(2))
    call = gathered_past.Pieces(module, None, (), inputs_of(rotary, states.requires_grad_(), torch.arange(args.seq)))
    rows = min(gathered_past.ROWS, args.seq)
    pieces = [Piece(start, min(rows, args.seq - start), start, 0) for start in range(0, args.seq, rows)]
    out = gathered_past.at_once(call, pieces, list)[0]
    out.backward(do)
    return {"states": states.detach(), "do": do, "results": {"out": out.detach(), "states": states.grad}}


def by_norm(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def build(spec: Spec, args: argparse.Namespace, whole: dict[str, Any]) -> Step:
    if spec.name == "plain" and dist.get_world_size() > 1:
        raise ValueError("the module as it is needs all tokens; give it one rank")
    sp = SequenceParallel(SequenceParallelConfig(size=dist.get_world_size()))
    module, rotary = made(args)
    positions = sp.shard(torch.arange(args.seq), 0)
    states, do = (whole[name][:, positions].contiguous() for name in ("states", "do"))
    patched(module).selecting = [] if spec.name == "pieces" else [module]

    def layer(states: Tensor) -> Tensor:
        given = inputs_of(rotary, states, positions)
        if spec.name == "plain":
            mask = torch.ones(args.seq, args.seq, dtype=torch.bool).tril()[None, None]
            return module(**{**given, "attention_mask": mask})[0]
        sparse.sparse_attention = dense if spec.name == "dense" else sparse_attention
        return gathered_past._shared(sp, SHARDED, gathered_past.Pieces(module, None, (), given))[0]

    def run() -> list[Tensor]:
        """Run forward and backward, including gradients of weights."""
        module.zero_grad()
        leaf = states.detach().requires_grad_()
        out = layer(leaf)
        out.backward(do)
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    return Step(run, positions, sp, [states, do])


def dense(q: Tensor, latent: Tensor, matrix: Tensor, picks: Tensor, pieces: list[Piece], scale: float,
          sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """Compute `sparse_attention` as one product with a mask.

    Values are padded to the width of keys, so that torch does not store scores.
    """
    widths, tokens = [q.shape[3], matrix.shape[2] - q.shape[3]], latent.shape[1]
    k, v = torch.einsum("btc,hce->bhte", latent, matrix).split(widths, 3)
    positions = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])[:, None]
    at = picks.where(picks <= positions, tokens)
    mask = torch.zeros(*picks.shape[:2], tokens + 1, dtype=torch.bool).scatter_(2, at, True)[:, None, :, :tokens]
    wide = functional.pad(v, (0, widths[0] - widths[1]))
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, wide, attn_mask=mask, scale=scale)
    return out[..., : widths[1]].transpose(1, 2)


def title(args: argparse.Namespace) -> str:
    width = args.latent + args.head_dim // 2 + args.head_dim
    least = args.seq * (width + args.seq // args.world) * 4 / 2**20
    return (
        f"{args.seq} tokens, {args.heads} heads of {args.head_dim}, a latent of "
        f"{args.latent}, {args.index_heads} index heads, {args.picks} picks, fp32; latents and rows x tokens take "
        f"{least:.0f} MiB; median of {args.rounds}"
    )


def main() -> None:
    runner.main(arguments, measure, title, table)


if __name__ == "__main__":
    main()

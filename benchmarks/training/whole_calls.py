"""Times a training step on whole batches beside one on sharded batches, by losses that need ever more of what it gives.

    python -m benchmarks.training.whole_calls
    python -m benchmarks.training.whole_calls --ranks 4 --seq 8192 --rounds 15

A LLaMA of 4 layers, hidden size 256, vocabulary 8,192, fp32, two sequences a step, on forked ranks over gloo. All
kinds of step take turns, in another order every round, so that a noisy machine is noisy for all. A round's time is that
of its slowest rank; the spread is the middle half of the rounds. Sharding is in the time of a sharded step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import hf_integration
from benchmarks import tables
from benchmarks.turns import in_turns, together
from ds_seqpar import SequenceParallel
from tests.launch import on_ranks

VOCABULARY = 8192


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, nargs="+", default=[1024, 4096], help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("\n" + tables.head("ranks", "tokens", "step", "s", "middle half", "over sharded"))
    for seq in args.seq:
        found = on_ranks(args.ranks, compare, seq, args.rounds, timeout=3600)[0]
        first = statistics.median(found["sharded, its loss"])
        for name, seconds in found.items():
            ratio = statistics.median(seconds) / first
            tables.row(args.ranks, seq, name, *tables.middle(seconds, 1, ".3f"), f"{ratio:.3f}")


def sharded(model: Any, sp: SequenceParallel, ids: Tensor) -> Tensor:
    return model(**sp.shard_batch({"input_ids": ids, "labels": ids})).loss


def whole(model: Any, sp: SequenceParallel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def preference(model: Any, sp: SequenceParallel, ids: Tensor) -> Tensor:
    logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))
    return -F.logsigmoid(0.01 * (logps[0] - logps[1]))


def cross_entropy(model: Any, sp: SequenceParallel, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gathered(model: Any, sp: SequenceParallel, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids).logits.whole()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


STEPS: dict[str, Callable[[Any, SequenceParallel, Tensor], Tensor]] = {
    "sharded, its loss": sharded,
    "whole, its loss": whole,
    "whole, a preference by logits in parts": preference,
    "whole, cross entropy of logits in parts": cross_entropy,
    "whole, cross entropy of gathered logits": gathered,
}


def compare(seq: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind of step, round by round."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )
    sp = hf_integration.share_sequences(model, size=dist.get_world_size())
    ids = torch.randint(0, VOCABULARY, (2, seq))
    steps = {name: lambda loss=loss: loss(model, sp, ids).backward() for name, loss in STEPS.items()}
    return in_turns(steps, rounds, together())


if __name__ == "__main__":
    main()

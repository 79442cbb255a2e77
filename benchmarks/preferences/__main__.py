"""Time a training step of DPO and GRPO, and measure its memory, with trl on one rank and with shared sequences.

    python -m benchmarks.preferences
    python -m benchmarks.preferences --lengths 4096 8192 16384 32768 --vocabs 32768 131072 --ranks 2 4 --tasks dpo

Ranks are gloo processes of this machine with one thread each, restarted for every measurement. All contenders train the
same LLaMA with checkpointed layers on the same rows. Losses and gradient norms must equal those of the first contender,
to 1e-3. DPO trains on one pair with a reference model. GRPO trains on --completions random rows, without generation and
without a reference model. The prompt is the same for all rows, and takes the fraction --share of a row. trl's head uses
tiles of --tile tokens. trl's own 4,096 tokens are meant for GPUs, where kernels work in place on a tile; on CPUs, torch
makes seven copies. The contenders are:

- trl plain, 1 rank: trl's `add_fused_lm_head`, which its trainers call, on the unpatched model.
- whole logits gathered: ranks share sequences and gather all logits, from which trl's `selective_log_softmax` computes
  one number per token.
- in parts: trl's head on the patched model with `shared_prompts` false. Ranks gather one number per token.
- in parts, shared prompts: the same with `shared_prompts` true.

"MiB" is the peak resident memory during a step (VmHWM, reset before the step), minus the resident memory before the
first step, for the rank that uses most. A contender stops if one of its ranks exceeds its share of --memory GiB
(default: the available memory), and its row says so. Seconds are the minimum over --steps steps after a warm-up step,
for the slowest rank.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks import tables
from benchmarks.memory.peers import outcome, unlike
from benchmarks.memory.ranks import Model, measure
from benchmarks.preferences.ranks import GATHERING, PARTS, PLAIN, SHARED, made

MIB, GIB = 2**20, 2**30
COLUMNS = "task", "tokens", "words", "ranks", "contender", "s", "to plain", "MiB a rank", "to plain"


def main() -> None:
    args = arguments()
    os.environ["PYTHONWARNINGS"] = "ignore"
    each = itertools.product(args.tasks, args.vocabs, args.lengths)
    tables.stream(COLUMNS, itertools.chain.from_iterable(itertools.starmap(functools.partial(compared, args), each)))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    parser = tables.parser(__doc__, tasks=["dpo", "grpo"], lengths=[4096], vocabs=[32768], ranks=[2], share=0.75,
                           completions=4, tile=64, steps=1, memory=0.0, timeout=900, hidden=64, intermediate=192,
                           layers=2, heads=8, kv_heads=4)  # fmt: skip
    args = parser.parse_args(given)
    args.memory = args.memory or 0.9 * psutil.virtual_memory().available / GIB
    return args


def compared(args: argparse.Namespace, task: str, vocab: int, tokens: int) -> Iterator[list[object]]:
    """Yield a row for each contender. Raises ArithmeticError if the work of contenders differs."""
    model = Model(vocab, args.hidden, args.intermediate, args.layers, args.heads, args.kv_heads)
    shape = 2 if task == "dpo" else args.completions, tokens, tokens - int(args.share * tokens), args.tile
    contenders = [(1, PLAIN), *itertools.product(args.ranks, (GATHERING, PARTS, SHARED))]
    first: Any = None
    plain: tuple[float, float] | None = None
    for world, kind in contenders:
        limit, place = int(args.memory * GIB / world), [task, f"{tokens:,}", f"{vocab:,}", world, kind]
        name = f"{task}, {tokens} tokens, {vocab} words, {world} ranks, {kind}"
        make = functools.partial(made, model, task, kind, shape)
        found = outcome(world, measure, make, args.steps, False, limit, timeout=args.timeout, name=name)
        if isinstance(found, str):
            yield [*place, "-", "-", found, "-"]
            continue
        seconds = min(map(max, zip(*(one.seconds for one in found), strict=True)))
        taken = max(one.rss - one.rest for one in found) / MIB
        first, plain = first or found[0], (seconds, taken) if kind == PLAIN else plain
        work = [(one.losses, one.norms) for one in (first, found[0])]
        if wrong := unlike(*work, 1e-3):
            raise ArithmeticError(f"{name}: {wrong}")
        tables.say(f"{name}: {seconds:.2f} s, {taken:.0f} MiB")
        ratios = [f"{x / y:.2f}" for x, y in zip((seconds, taken), plain, strict=True)] if plain else ["-", "-"]
        yield [*place, f"{seconds:.2f}", ratios[0], f"{taken:.0f}", ratios[1]]


if __name__ == "__main__":
    main()

"""Time generation from long prompts: the first token, and each further token.

    python -m benchmarks.inference
    python -m benchmarks.inference --ranks 2 --prompt 1024 --cache 1024 65536 --rounds 7 -- ring u2

Ranks are gloo processes of this machine with one thread each. All contenders run the same LLaMA on the same tokens, in
the same processes and in turns. Times start when all ranks begin, and end when the slowest rank is done. All contenders
must generate the same tokens. The contenders are:

- one rank: transformers' own `generate` of the unpatched model on one rank, while the other ranks wait.
- ring, u2, ...: the patched model (`benchmarks.contenders`). Decoding does not depend on the schedule, so only the
  first contender is timed.
- gathering: each rank caches its part of the keys and values, and gathers all of them in each layer before attention.
  In decoding, the cache of an unpatched model gathers; in prefill, the schedule `attention2d` with one column gathers.
- training's forward: a forward pass of the first contender on a training batch as long as the prompt, with gradients
  and without a cache.

"First token" is `generate` of one token. "A token" is `generate` of --tokens tokens divided by their number, from a
cache filled with random keys and values. The cache grows by --tokens tokens in each turn. Times are medians. Ratios
compare times of the same round, and are given as median, minimum and maximum.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator

from benchmarks import contenders, tables
from benchmarks.inference.ranks import GATHERING, ONE, TRAINING, Make, decode, prefill, take_turns
from tests.launch import on_ranks

FIRST_TOKEN = ["ranks", "prompt", "contender", "ms", "to one rank", "spread", "to training's forward", "spread"]
TOKEN = ["ranks", "cache", "contender", "ms a token", "to one rank", "spread"]


def main() -> None:
    args = arguments()
    names = [ONE, *(spec.name for spec in args.contenders), GATHERING]
    print(f"\n{title(args)}\n", flush=True)
    parts = [(prefill, args.prompt, [*names, TRAINING], 1, FIRST_TOKEN, (ONE, TRAINING)),
             (decode, args.cache, [*names[:2], GATHERING], args.tokens, TOKEN, (ONE,))]  # fmt: skip
    for make, lengths, contending, tokens, columns, others in parts:
        tables.head(*columns)
        for world, length in itertools.product(args.ranks, lengths):
            found = measure(args, world, make, contending, length)
            took = {name: [seconds / tokens for seconds in turns] for name, turns in found.items()}
            for line in lines(world, length, took, *others):
                tables.row(*line)
        print()


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    parser = tables.parser(__doc__, ranks=[2, 4], prompt=[1024, 4096], cache=[1024, 65536], tokens=8, rounds=5)
    contenders.add(parser, "ring")
    tables.add(parser, layers=8, hidden=1024, intermediate=2816, heads=16, kv_heads=4, vocab=1024, patience=300.0)
    args = parser.parse_args(given)
    if any(spec.peer for spec in args.contenders) or min(args.ranks) < 2:
        parser.error("contenders must be ours, on 2 ranks or more; one rank and gathering are compared in any case")
    return args


def measure(args: argparse.Namespace, world: int, make: Make, names: list[str], length: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's turns on new ranks. Raise ArithmeticError if generated tokens differ."""
    found, given = on_ranks(world, take_turns, args, make, names, length, timeout=3600, patience=args.patience)[0]
    for name in names:
        if name != TRAINING and given[name] != given[ONE]:
            raise ArithmeticError(f"{name} must give the tokens of one rank, {given[ONE]}; gave {given[name]}")
        tables.say(f"{world} ranks, {length} tokens, {name}: {statistics.median(found[name]):.3f} s")
    return found


def lines(world: int, length: int, seconds: dict[str, list[float]], *others: str) -> Iterator[list[object]]:
    """Yield a table row for each contender, with ratios to the times of `others` in the same round."""
    for name, took in seconds.items():
        ratios = ([mine / its for mine, its in zip(took, seconds[other], strict=True)] for other in others)
        cells = itertools.chain.from_iterable((f"{statistics.median(x):.2f}", tables.spread(x, 2)) for x in ratios)
        yield [world, f"{length:,}", name, f"{1e3 * statistics.median(took):.1f}", *cells]


def title(args: argparse.Namespace) -> str:
    """Describe the run in one line."""
    return (
        f"LLaMA of {args.layers} layers, hidden {args.hidden}, intermediate {args.intermediate}, "
        f"{args.heads}/{args.kv_heads} heads, vocabulary {args.vocab}, fp32; one thread a rank; "
        f"median of {args.rounds} rounds, {args.tokens} tokens a turn"
    )


if __name__ == "__main__":
    main()

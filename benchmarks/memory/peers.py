"""Measure the longest sequence whose training step fits a memory budget, and the time of a step.

    python -m benchmarks.memory.peers longest --budget 2.5GiB -- deepspeed u4
    python -m benchmarks.memory.peers speed --lengths 8192 -- deepspeed u4

`longest` finds the longest sequence by bisection, up to --most tokens and with a resolution of --resolution tokens.
`speed` times --steps steps in each of --rounds rounds. No launcher is needed: ranks are gloo processes of this machine,
restarted for every measurement.

Contenders (`benchmarks.contenders`) train the same LLaMA on the same tokens, in fp32 or with `--bf16`. All use ZeRO-3,
AdamW, clipping and gradient checkpointing (disabled by `u4+checkpointing=false`). Losses and gradient norms must equal
those of the first contender, to 1e-3 (bf16: 2e-2). Two peers are available:

- plain: every rank has the whole sequence, so the total number of tokens is multiplied by the number of ranks.
- deepspeed: DeepSpeed's recipe (`memory.ranks.alst`), with logits in tiles of 64 MiB. The recipe's own 1 GiB is meant
  for larger machines (`deepspeed+tile_bytes=1073741824`).

Figures are the maximum over ranks. --by selects the measure:

- rss: peak resident memory during a step (VmHWM, reset before the step), minus the resident memory before the first
  step. For all contenders, glibc returns every block of at least 128 KiB to the system when it is freed. This setting
  brings RSS closer to the memory in use, but makes steps slower.
- tensors: storages created by a step that are alive at the same time (tests/live.py), without a kernel's internal
  memory.

ZeRO's buckets are small for all contenders (`memory.ranks.ZERO`), since the default sizes would hide everything else. A
rank that exceeds `--limit` exits, and the run reports that.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import contenders, tables
from benchmarks.contenders import Spec, setting
from benchmarks.memory.ranks import OVER as CODE
from benchmarks.memory.ranks import Model, made, measure
from tests.launch import PRELOAD, Ranks

# settings of glibc: return freed blocks at once. Read at the start of the process that forks ranks
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
MIB = 2**20
OVER = "more than"  # prefix for a run stopped by --limit


def main() -> None:
    first = tables.parser(__doc__)
    first.add_argument("mode", choices=[*MODES])
    mode, args = MODES[first.parse_args(sys.argv[1:2]).mode], arguments(sys.argv[2:])
    os.environ.update({} if mode is speed else MALLOC, PYTHONWARNINGS="ignore")
    bench = Bench(args)
    print(f"\n{args.ranks} ranks, {bench.model}\n", flush=True)
    mode(bench, args)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = tables.parser(__doc__)
    contenders.add(parser, "deepspeed", "u4", "u2/ring")
    tables.add(parser, lengths=[8192, 16384], ranks=4, steps=3, rounds=2, by=("rss", "tensors"), most=2**19,
               resolution=2048, timeout=900)  # fmt: skip
    parser.add_argument("--budget", type=size, default=size("2.5GiB"), help="bytes a rank, for `longest`")
    parser.add_argument("--limit", type=size, default=size("5GiB"), help="RSS at which a rank ends")
    model_options(parser, vocab=131072, hidden=256, intermediate=1024, layers=2, heads=8, kv_heads=4)
    return parser.parse_args(given)


def model_options(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add options for every field of `memory.ranks.Model`, with defaults for the numbers."""
    tables.add(parser, **defaults, bf16=False)
    parser.add_argument("--zero", action="append", type=setting, default=[], metavar="KEY=VALUE",
                        help="of zero_optimization, in place of the benchmark's own")  # fmt: skip


def size(text: str) -> int:
    for unit, factor in (("GiB", 2**30), ("MiB", MIB)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def kind_of(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Return the name and options of a contender in `memory.ranks.made`."""
    return spec.peer or "ours", {**({"tiled_mlp": True} if spec.peer == "deepspeed" else {}), **spec.section}


class Bench:
    """Measures contenders, and compares each with the first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = Model(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Model)})
        self.first: dict[int, tuple[Any, ...]] = {}  # length -> contender, losses, norms
        self.tolerance = 2e-2 if args.bf16 else 1e-3

    def run(self, spec: Spec, seq: int, *, timed: int, follow: bool) -> list[Any] | str:
        """Return the figures of every rank, or the reason why figures are missing."""
        name, args = f"{spec.name}, {seq} tokens", self.args
        make = functools.partial(made, self.model, *kind_of(spec), seq)
        found = outcome(args.ranks, measure, make, timed, follow, args.limit, timeout=args.timeout, name=name)
        if not isinstance(found, str):
            self.check(spec.name, seq, found[0].losses, found[0].norms)
        return found

    def check(self, name: str, seq: int, *found: Sequence[float]) -> None:
        """Raise SystemExit if losses or gradient norms differ from those of the first contender."""
        other, *first = self.first.setdefault(seq, (name, *found))
        if wrong := unlike(first, found, self.tolerance):
            raise SystemExit(f"{other} and {name}, {seq} tokens: {wrong}")


def outcome(
    world: int, function: Callable[..., Any], *args: Any, timeout: float, name: str, patience: float | None = 60,
    preload: list[str] = PRELOAD,
) -> list[Any] | str:  # fmt: skip
    """Return the results of a function on newly started ranks, or the reason why results are missing.

    The last argument of the function is a memory limit, above which the function exits.
    """
    with Ranks(world, patience, preload) as ranks:
        results, errors = ranks.call(function, *args, timeout=timeout)
    if not errors:
        return [results[rank] for rank in range(world)]
    if any(said == f"exit code {CODE}" for _, said, _ in errors.values()):
        return f"{OVER} {args[-1] / 2**30:.3g} GiB"
    # ranks that were killed, or whose neighbor has ended, say less
    unsaid = re.compile("^(Hang|Died)|Connection|peer")
    kind, said, trace = min(errors.values(), key=lambda error: bool(unsaid.search(" ".join(error[:2]))))
    tables.say(f"{name}:\n{trace[-4000:]}")
    return f"not done after {timeout:g} s" if kind == "Hang" else f"{kind}: {said.partition(chr(10))[0][:200]}"


def unlike(right: Sequence[Sequence[float]], found: Sequence[Sequence[float]], tolerance: float) -> str | None:
    """Describe how losses or gradient norms differ, or return None if they agree."""
    for what, one, other in zip(("losses", "gradient norms"), right, found, strict=True):
        if any(abs(a - b) > tolerance * max(abs(a), abs(b)) for a, b in zip(one, other, strict=False)):
            return f"not the same work: {what} {one} and {other}"
    return None


MEASURES: dict[str, Callable[[Any], int]] = {
    "rss": lambda one: one.rss - one.rest, "tensors": lambda one: max(one.allocated.values()),
}  # fmt: skip


def speed(bench: Bench, args: argparse.Namespace) -> None:
    """Time steps alone, with glibc's own settings. Contenders take turns for `--rounds` rounds."""
    tables.head("contender", "tokens", "s", "to the first")
    for seq in args.lengths:
        seconds: dict[str, list[float]] = {spec.name: [] for spec in args.contenders}
        for spec in args.contenders * args.rounds:
            ranks = bench.run(spec, seq, timed=args.steps, follow=False)
            if isinstance(ranks, str):
                raise SystemExit(f"{spec.name}, {seq} tokens: {ranks}")
            seconds[spec.name] += [max(turn) for turn in zip(*(one.seconds for one in ranks), strict=True)]
            tables.say(f"{spec.name}, {seq} tokens: {seconds[spec.name][-1]:.2f} s")
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        for name, found in medians.items():
            tables.row(name, seq, f"{found:.2f}", f"{found / medians[args.contenders[0].name]:.3f}")


def longest(bench: Bench, args: argparse.Namespace) -> None:
    found = {spec.name: bisect(bench, spec) for spec in args.contenders}
    print(f"{args.budget / MIB:.0f} MiB of {args.by} a rank\n")
    tables.head("contender", "longest", "MiB of it", "to the first")
    first = next(iter(found.values()))[0]
    for name, (seq, taken, why) in found.items():
        tables.row(name, why or seq, f"{taken / MIB:.0f}", f"{seq / first if first else 0:.2f}")


def bisect(bench: Bench, spec: Spec) -> tuple[int, int, str]:
    """Return (the longest sequence within the budget, its memory, the reason if no longer sequence could be tried)."""
    args, reasons = bench.args, list[str]()

    def taken(seq: int) -> int | None:
        ranks = bench.run(spec, seq, timed=int(args.by == "rss"), follow=args.by == "tensors")
        if isinstance(ranks, str) and not ranks.startswith(OVER):
            reasons.append(f", then {ranks}")
            return None
        size = args.limit if isinstance(ranks, str) else max(map(MEASURES[args.by], ranks))
        tables.say(f"{spec.name}: {seq} tokens, {size / MIB:.0f} MiB")
        return size

    known = search(taken, args.budget, args.resolution, lambda: args.most, args.limit)
    low = max(seq for seq in known if known[seq] <= args.budget)
    if low >= args.most:
        reasons.append(" or more")
    return low, known[low], f"{low}{reasons[0]}" if reasons else ""


def search(
    taken: Callable[[int], int | None], budget: int, resolution: int, most: Callable[[], int], limit: int
) -> dict[int, int]:
    """Find the longest length within the budget, to `resolution`, and return the bytes of each measured length.

    Each next length is interpolated linearly from the measured lengths.

    Args:
        taken: Returns the bytes of a length: None if the length cannot be tried, at least `limit` if memory is
            exhausted.
        most: Returns the maximum number of tokens to try; called before every length except the first.
    """
    known, low, high, seq = {0: 0}, 0, 0, 4 * resolution
    while (not high or high - low > resolution) and seq > low:
        size = taken(seq)
        if size is None:
            break
        known[seq] = size
        low, high = (seq, high) if size <= budget else (low, seq)
        guess = int(estimate(known, budget, limit) // resolution) * resolution
        seq = min(max(guess, low + resolution), high - resolution if high else 4 * low, most())
    return known


def estimate(known: dict[int, int], budget: int, limit: int) -> float:
    """Return the length at which a line through the two lengths nearest to the budget reaches the budget."""
    nearest = sorted((seq for seq in known if known[seq] < limit), key=lambda seq: abs(known[seq] - budget))[:2]
    a, b = sorted(nearest)
    return a + (budget - known[a]) * (b - a) / max(1, known[b] - known[a])


MODES = {"speed": speed, "longest": longest}

if __name__ == "__main__":
    main()

"""Memory and time of a training step against the length of its sequence, and the longest one under a budget a rank.

    python -m benchmarks.memory steps --lengths 8192,16384 --contenders alst,u4,u2r2
    python -m benchmarks.memory longest --budget 2.5GiB --contenders alst,u4
    python -m benchmarks.memory peak --lengths 8192 --vocab 1024 --contenders u4

`steps` prints a table and, of two lengths and more, the bytes that a token of a rank takes; `longest` finds the longest
sequence by bisection; `peak` lists which tensors are alive when there are the most, and who made them. `--png FILE`
draws the first two. Needs no launcher: ranks are gloo processes of this machine, fresh ones for every measurement.

Contenders, all on the same LLaMA (from a config, fp32 or `--bf16`), the same tokens, ZeRO-3, AdamW and clipping:

- plain: DeepSpeed alone. Every rank has the whole sequence, the same one, so it works on as many times the tokens.
- alst: DeepSpeed's Ulysses with its recipe for long sequences; see `memory_peers.alst`. Logits in tiles of 64 MiB: the
  recipe's 1 GiB is for larger machines (`alst+tile_bytes=1073741824`).
- ours, by shape: u4 (Ulysses on all ranks), u2r2, ring, a2d, mesh; `CONTENDERS` has their settings. Gradient
  checkpointing is on (`u4+checkpointing=false`).

NAME+KEY=VALUE+... is a contender with other settings: ours takes every setting of the "sequence_parallel" section.
`--set KEY=VALUE` gives a setting to all of ours.

Nobody is compared on other work: the loss of each first step must be that of the whole model in one process, to 1e-4
(bf16: 2e-2), and all contenders' next losses and gradient norms must be those of the first of them, to 1e-3.

Figures are those of the rank with the most. *RSS*: the greatest resident memory during a step (VmHWM, begun again
before it) beyond that before the first step. glibc gives back every block from 128 KiB as soon as it is freed
(MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, one arena), for all alike: it is nearer to what was in use, and
slower. *Tensors*: the storages made by a step that are alive at once, seen after every operation (tests/live.py),
without what a kernel has for itself. ZeRO's buckets, whose defaults would hide the rest, are small for all
(`memory_peers.ZERO`). A run whose rank needs more than `--limit` ends, and is reported as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# of the ranks' glibc: freed blocks go back at once. Read when the processes start that ranks are forked from
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alst": {"tiled_mlp": True},
    "u4": {"ulysses": 4},
    "u2": {"ulysses": 2},
    "u2r2": {"ulysses": 2, "schedule": "ring"},
    "ring": {"ulysses": 1, "schedule": "ring"},
    "a2d": {"ulysses": 1, "schedule": "attention2d"},
    "mesh": {"ulysses": 1, "schedule": "mesh"},
    "auto": {"memory": "auto"},
}
PEERS = ("plain", "alst")
MIB = 2**20
OVER = "more than"  # of a run that ended because of --limit


def main() -> None:
    args = arguments()
    os.environ.update({} if args.mode == "speed" else MALLOC, PYTHONWARNINGS="ignore")
    {"steps": steps, "speed": speed, "longest": longest, "peak": peak}[args.mode](args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("steps", "speed", "longest", "peak"))
    parser.add_argument("--contenders", default="alst,u4,u2r2", help="names, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all of ours")
    parser.add_argument("--lengths", default="8192,16384", help="tokens of the whole sequence")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="with a clock, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="of `speed`")
    parser.add_argument("--budget", type=size, default=size("2.5GiB"), help="bytes a rank, for `longest`")
    parser.add_argument("--by", choices=("rss", "tensors"), default="rss", help="what the budget is of")
    parser.add_argument("--most", type=int, default=2**19, help="tokens that `longest` does not go beyond")
    parser.add_argument("--resolution", type=int, default=2048, help="tokens, for `longest`")
    parser.add_argument("--limit", type=size, default=size("5GiB"), help="RSS at which a rank ends")
    parser.add_argument("--timeout", type=int, default=900, help="seconds of a measurement")
    parser.add_argument("--rows", type=int, default=20, help="of `peak`")
    parser.add_argument("--png", type=Path, help="a chart")
    model_options(parser, vocab=131072, hidden=256, intermediate=1024, layers=2, heads=8, kv_heads=4)
    return parser.parse_args()


def model_options(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options for every field of `memory_peers.Model`, of which the numbers are given."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--zero", action="append", type=setting, default=[], metavar="KEY=VALUE",
                        help="for DeepSpeed's zero_optimization section, of all")  # fmt: skip


def size(text: str) -> int:
    """Bytes: 2.5GiB, 300MiB or a number."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By the name they were given on the command line: kind, and settings."""
    shared, found = dict(map(setting, args.set)), {}
    for name in args.contenders.split(","):
        base, *more = name.split("+")
        kind = base if base in PEERS else "ours"
        options = CONTENDERS[base] | (shared if kind == "ours" else {}) | dict(map(setting, more))
        found[name] = {"kind": kind, "options": options}
    return found


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


class Bench:
    """Measures, and holds every contender against the whole model and the others."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks import memory_peers  # imports DeepSpeed

        self.args, self.peers = args, memory_peers
        names = [field.name for field in dataclasses.fields(memory_peers.Model)]
        self.model = memory_peers.Model(**{name: getattr(args, name) for name in names})
        self.token_losses: Any = []
        self.first: dict[int, tuple[str, list[float], list[float]]] = {}  # length -> contender, losses, norms

    def run(self, name: str, contender: dict[str, Any], seq: int, *, timed: int, follow: bool) -> list[Any] | str:
        """Figures of every rank, or why there are none."""
        from tests.launch import on_ranks

        args = self.model, contender["kind"], contender["options"], seq, timed, follow, self.args.limit
        found = on_ranks(self.args.ranks, self.peers.measure, *args, timeout=self.args.timeout, check=False)
        failed = [one for one in found if isinstance(one, tuple)]
        if any(one[1] == f"exit code {self.peers.OVER}" for one in failed):
            return f"{OVER} {self.args.limit / 2**30:.3g} GiB"
        if failed:
            told = min(failed, key=lambda one: "Connection" in one[1] or "peer" in one[1])
            print(f"{name}, {seq} tokens:\n{told[2]}", file=sys.stderr)
            return f"{told[0]}: {told[1].splitlines()[0] if told[1] else ''}"
        self.check(name, seq, found[0])
        return found

    def check(self, name: str, seq: int, figures: Any) -> None:
        """Raises SystemExit where the losses are not those of the whole model, or of the other contenders."""
        if len(self.token_losses) < seq - 1:
            from tests.launch import on_ranks

            (self.token_losses,) = on_ranks(1, self.peers.token_losses, self.model, seq, timeout=self.args.timeout)
        right, tolerance = float(self.token_losses[: seq - 1].mean()), 2e-2 if self.args.bf16 else 1e-4
        agree(f"the whole model and {name}, {seq} tokens: first loss", [right], figures.losses[:1], tolerance)
        if seq not in self.first:
            self.first[seq] = name, figures.losses, figures.norms
        other, losses, norms = self.first[seq]
        for what, a, b in (("losses", losses, figures.losses), ("gradient norms", norms, figures.norms)):
            agree(f"{other} and {name}, {seq} tokens: {what}", a, b, max(1e-3, tolerance))


def agree(what: str, right: list[float], found: list[float], tolerance: float) -> None:
    if any(abs(a - b) > tolerance * max(abs(a), abs(b)) for a, b in zip(right, found, strict=False)):
        raise SystemExit(f"not the same work: {what} {right} and {found}")


def rss(ranks: list[Any]) -> int:
    return max(one.rss - one.rest for one in ranks)


def tensors(ranks: list[Any]) -> int:
    return max(max(one.allocated.values()) for one in ranks)


MEASURES: dict[str, Callable[[list[Any]], int]] = {"rss": rss, "tensors": tensors}


def progress(what: Iterable[Any], **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(what, file=sys.stderr, **options)


def steps(args: argparse.Namespace) -> None:
    bench, lengths, chosen = Bench(args), [int(n) for n in args.lengths.split(",")], contenders(args)
    found: dict[str, dict[int, Any]] = {name: {} for name in chosen}
    for seq, name in progress([(seq, name) for seq in lengths for name in chosen], desc="steps"):
        found[name][seq] = bench.run(name, chosen[name], seq, timed=args.steps, follow=True)
    print(f"\n{args.ranks} ranks, {bench.model}\n")
    print("| contender | tokens | RSS before | RSS of a step | tensors: forward | backward | step | s | to the first |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seq in lengths:
        clock = None
        for name in chosen:
            ranks = found[name][seq]
            if isinstance(ranks, str):
                print(f"| {name} | {seq} | {ranks} | | | | | | |")
                continue
            seconds = statistics.median(max(turn) for turn in zip(*(one.seconds for one in ranks), strict=True))
            clock = clock or seconds
            phases = [max(one.allocated[phase] for one in ranks) for phase in ("forward", "backward", "step")]
            sizes = [max(one.rest for one in ranks), rss(ranks), *phases]
            words = " | ".join(f"{bytes_ / MIB:.0f}" for bytes_ in sizes)
            print(f"| {name} | {seq} | {words} | {seconds:.2f} | {seconds / clock:.2f} |")
    print("\n(MiB, of the rank with the most)\n")
    if len(lengths) > 1:
        slopes(args, found, lengths)
    if args.png:
        good = {
            name: {seq: [measure(ranks) / MIB for measure in MEASURES.values()] for seq, ranks in row.items()
                   if not isinstance(ranks, str)} for name, row in found.items()
        }  # fmt: skip
        from benchmarks import memory_charts

        memory_charts.draw_steps(good, args.png)


def speed(args: argparse.Namespace) -> None:
    """Steps alone, with glibc's own settings, the contenders in turn, `--rounds` times over."""
    bench, chosen = Bench(args), contenders(args)
    print(f"\n{args.ranks} ranks, {bench.model}\n\n| contender | tokens | s | to the first |\n|---|---|---|---|")
    for seq in [int(n) for n in args.lengths.split(",")]:
        seconds: dict[str, list[float]] = {name: [] for name in chosen}
        for _, name in progress([(turn, name) for turn in range(args.rounds) for name in chosen], desc="speed"):
            ranks = bench.run(name, chosen[name], seq, timed=args.steps, follow=False)
            if isinstance(ranks, str):
                raise SystemExit(f"{name}, {seq} tokens: {ranks}")
            seconds[name] += [max(turn) for turn in zip(*(one.seconds for one in ranks), strict=True)]
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        clock = next(iter(medians.values()))
        for name, found in medians.items():
            print(f"| {name} | {seq} | {found:.2f} | {found / clock:.3f} |")


def slopes(args: argparse.Namespace, found: dict[str, dict[int, Any]], lengths: list[int]) -> None:
    unit = args.hidden * (2 if args.bf16 else 4)
    print("| contender | bytes a token of a rank: tensors | in hidden states | by rank | RSS | in hidden states |")
    print("|---|---|---|---|---|---|")
    for name, row in found.items():
        short, long = row[lengths[0]], row[lengths[-1]]
        if isinstance(short, str) or isinstance(long, str):
            continue
        tokens = (lengths[-1] - lengths[0]) / args.ranks

        def peaks(ranks: list[Any]) -> list[int]:
            return [max(one.allocated.values()) for one in ranks]

        by_rank = [(b - a) / tokens / unit for a, b in zip(peaks(short), peaks(long), strict=True)]
        ours, resident = ((measure(long) - measure(short)) / tokens for measure in (tensors, rss))
        words = " ".join(f"{value:.1f}" for value in by_rank)
        print(f"| {name} | {ours:.0f} | {ours / unit:.2f} | {words} | {resident:.0f} | {resident / unit:.2f} |")


def longest(args: argparse.Namespace) -> None:
    bench, chosen, found = Bench(args), contenders(args), {}
    print(f"\n{args.ranks} ranks, {args.budget / MIB:.0f} MiB of {args.by} a rank, {bench.model}\n", flush=True)
    for name in progress(chosen, desc="longest"):
        found[name] = bisect(bench, name, chosen[name])
    print("| contender | longest | MiB of it | to the first |\n|---|---|---|---|")
    first = next(iter(found.values()))[0]
    for name, (seq, taken, why) in found.items():
        print(f"| {name} | {why or seq} | {taken / MIB:.0f} | {seq / first if first else 0:.2f} |")
    if args.png:
        from benchmarks import memory_charts

        memory_charts.draw_longest({name: seq for name, (seq, *_) in found.items()}, args.budget, args.png)


def bisect(bench: Bench, name: str, contender: dict[str, Any]) -> tuple[int, int, str]:
    """(the longest sequence under the budget, what it took, why no longer one could be tried, if so). The line through
    what was measured says where to look next."""
    args, known = bench.args, {0: 0}
    low, high = 0, 0  # the longest that fits, the shortest that does not
    seq = 4 * args.resolution
    while not high or high - low > args.resolution:
        ranks = bench.run(name, contender, seq, timed=int(args.by == "rss"), follow=args.by == "tensors")
        if isinstance(ranks, str) and not ranks.startswith(OVER):
            return low, known[low], f"{low}, then {ranks}"
        known[seq] = args.limit if isinstance(ranks, str) else MEASURES[args.by](ranks)
        print(f"{name}: {seq} tokens, {known[seq] / MIB:.0f} MiB", file=sys.stderr)
        if known[seq] <= args.budget:
            low = seq
            if low >= args.most:
                return low, known[low], f"{low} or more"
        else:
            high = seq
        guess = int(estimate(known, args.budget, args.limit) // args.resolution) * args.resolution
        seq = min(max(guess, low + args.resolution), high - args.resolution if high else 4 * low, args.most)
    return low, known[low], ""


def estimate(known: dict[int, int], budget: int, limit: int) -> float:
    """Where the line through the two lengths that are nearest to the budget meets it."""
    nearest = sorted((seq for seq in known if known[seq] < limit), key=lambda seq: abs(known[seq] - budget))[:2]
    a, b = sorted(nearest)
    return a + (budget - known[a]) * (b - a) / max(1, known[b] - known[a])


def peak(args: argparse.Namespace) -> None:
    """Sizes are in hidden states of a rank: its tokens times the hidden size, in the model's dtype."""
    bench = Bench(args)
    for seq in [int(n) for n in args.lengths.split(",")]:
        unit = seq // args.ranks * args.hidden * (2 if args.bf16 else 4)
        for name, contender in contenders(args).items():
            ranks = bench.run(name, contender, seq, timed=0, follow=True)
            if isinstance(ranks, str):
                print(f"{name}, {seq} tokens: {ranks}")
                continue
            most = max(ranks, key=lambda one: sum(entry.bytes for entry in one.entries))
            phases = ", ".join(f"{phase} {taken / unit:.2f}" for phase, taken in most.allocated.items())
            total = sum(entry.bytes for entry in most.entries) / unit
            print(f"\n{name}, {seq} tokens, rank {ranks.index(most)}: {total:.2f} at once ({phases})\n")
            print("| hidden states | tensors | shape | operation | place |\n|---|---|---|---|---|")
            for one in most.entries[: args.rows]:
                print(f"| {one.bytes / unit:.2f} | {one.count} | {one.shape} | {one.operation} | {one.place} |")
            print("\n| most alive | during |\n|---|---|")
            for place, taken in list(most.moments.items())[: args.rows]:
                print(f"| {taken / unit:.2f} | {place} |")


if __name__ == "__main__":
    main()

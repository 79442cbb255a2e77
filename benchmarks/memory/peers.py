"""Memory and time of a training step against the length of its sequence, and the longest one under a budget a rank.

    python -m benchmarks.memory.peers steps --lengths 8192,16384 --contenders deepspeed u4 u2/ring
    python -m benchmarks.memory.peers longest --budget 2.5GiB --contenders deepspeed u4
    python -m benchmarks.memory.peers speed --lengths 8192 --contenders deepspeed u4

`steps` prints a table and, of two lengths and more, the bytes that a token of a rank takes; `longest` finds the longest
sequence by bisection; `speed` times steps alone. Needs no launcher: ranks are gloo processes of this machine, fresh
ones for every measurement.

Contenders (`benchmarks.contenders`) train the same LLaMA (from a config, fp32 or `--bf16`) on the same tokens, with
ZeRO-3, AdamW, clipping and gradient checkpointing (`u4+checkpointing=false`). `--set KEY=VALUE` is for all of ours. Of
the peers, every rank of `plain` has the whole sequence, the same one, so it works on as many times the tokens; see
`memory.ranks.alst` for `deepspeed`. Its logits are in tiles of 64 MiB: the 1 GiB of its recipe is for larger machines
(`deepspeed+tile_bytes=1073741824`).

All do the same work: the loss of each first step must be that of the whole model in one process, to 1e-4 (bf16: 2e-2),
and all contenders' next losses and gradient norms must be those of the first of them, to 1e-3.

Figures are those of the rank with the most. *RSS*: the greatest resident memory during a step (VmHWM, begun again
before it) beyond that before the first step. glibc gives back every block from 128 KiB as soon as it is freed
(MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, one arena), for all alike: RSS is then nearer to what was in use,
and steps are slower. *Tensors*: the storages made by a step that are alive at once, seen after every operation
(tests/live.py), without what a kernel has for itself. ZeRO's buckets, whose defaults would hide the rest, are small for
all (`memory.ranks.ZERO`). A run whose rank needs more than `--limit` ends, and is reported as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import contenders as spelled
from benchmarks import tables
from benchmarks.contenders import Spec, setting

# of the ranks' glibc: freed blocks go back at once. Read when the processes start that ranks are forked from
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
MIB = 2**20
OVER = "more than"  # of a run that ended because of --limit


def main() -> None:
    args = arguments()
    os.environ.update({} if args.mode == "speed" else MALLOC, PYTHONWARNINGS="ignore")
    {"steps": steps, "speed": speed, "longest": longest}[args.mode](args)


def arguments() -> argparse.Namespace:
    parser = tables.parser(__doc__)
    parser.add_argument("mode", choices=("steps", "speed", "longest"))
    contender_options(parser, "deepspeed", "u4", "u2/ring")
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
    model_options(parser, vocab=131072, hidden=256, intermediate=1024, layers=2, heads=8, kv_heads=4)
    return parser.parse_args()


def model_options(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options for every field of `memory.ranks.Model`, of which the numbers are given."""
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


def contender_options(parser: argparse.ArgumentParser, *default: str) -> None:
    """--contenders and --set, for `contenders`."""
    parser.add_argument("--contenders", nargs="+", type=spelled.spec, default=[*map(spelled.parse, default)],
                        help=f"default: {' '.join(default)}")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all of ours")


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By the name they were given on the command line: kind, and settings."""
    shared = dict(map(setting, args.set))
    return {spec.name: _contender(spec, {} if spec.peer else shared) for spec in args.contenders}


def _contender(spec: Spec, shared: dict[str, Any]) -> dict[str, Any]:
    given = {"tiled_mlp": True} if spec.peer == "deepspeed" else shared
    return {"kind": spec.peer or "ours", "options": {**given, **spec.section}}


class Bench:
    """Measures, and holds every contender against the whole model and the others."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks.memory import ranks  # imports DeepSpeed

        self.args, self.peers = args, ranks
        names = [field.name for field in dataclasses.fields(ranks.Model)]
        self.model = ranks.Model(**{name: getattr(args, name) for name in names})
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
    print(tables.head("contender", "tokens", "RSS before", "RSS of a step", "tensors: forward", "backward", "step", "s",
                      "to the first"))  # fmt: skip
    for seq in lengths:
        clock = None
        for name in chosen:
            ranks = found[name][seq]
            if isinstance(ranks, str):
                tables.row(name, seq, ranks, *[""] * 6)
                continue
            seconds = statistics.median(max(turn) for turn in zip(*(one.seconds for one in ranks), strict=True))
            clock = clock or seconds
            phases = [max(one.allocated[phase] for one in ranks) for phase in ("forward", "backward", "step")]
            sizes = [max(one.rest for one in ranks), rss(ranks), *phases]
            tables.row(name, seq, *(f"{n / MIB:.0f}" for n in sizes), f"{seconds:.2f}", f"{seconds / clock:.2f}")
    print("\n(MiB, of the rank with the most)\n")
    if len(lengths) > 1:
        slopes(args, found, lengths)


def speed(args: argparse.Namespace) -> None:
    """Steps alone, with glibc's own settings, the contenders in turn, `--rounds` times over."""
    bench, chosen = Bench(args), contenders(args)
    print(f"\n{args.ranks} ranks, {bench.model}\n\n{tables.head('contender', 'tokens', 's', 'to the first')}")
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
            tables.row(name, seq, f"{found:.2f}", f"{found / clock:.3f}")


def slopes(args: argparse.Namespace, found: dict[str, dict[int, Any]], lengths: list[int]) -> None:
    unit = args.hidden * (2 if args.bf16 else 4)
    print(tables.head("contender", "bytes a token of a rank: tensors", "in hidden states", "by rank", "RSS",
                      "in hidden states"))  # fmt: skip
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
        tables.row(name, f"{ours:.0f}", f"{ours / unit:.2f}", words, f"{resident:.0f}", f"{resident / unit:.2f}")


def longest(args: argparse.Namespace) -> None:
    bench, chosen, found = Bench(args), contenders(args), {}
    print(f"\n{args.ranks} ranks, {args.budget / MIB:.0f} MiB of {args.by} a rank, {bench.model}\n", flush=True)
    for name in progress(chosen, desc="longest"):
        found[name] = bisect(bench, name, chosen[name])
    print(tables.head("contender", "longest", "MiB of it", "to the first"))
    first = next(iter(found.values()))[0]
    for name, (seq, taken, why) in found.items():
        tables.row(name, why or seq, f"{taken / MIB:.0f}", f"{seq / first if first else 0:.2f}")


def bisect(bench: Bench, name: str, contender: dict[str, Any]) -> tuple[int, int, str]:
    """(the longest sequence under the budget, what it took, why no longer one could be tried, if so)."""
    args, reasons = bench.args, list[str]()

    def taken(seq: int) -> int | None:
        ranks = bench.run(name, contender, seq, timed=int(args.by == "rss"), follow=args.by == "tensors")
        if isinstance(ranks, str) and not ranks.startswith(OVER):
            reasons.append(f", then {ranks}")
            return None
        size = args.limit if isinstance(ranks, str) else MEASURES[args.by](ranks)
        print(f"{name}: {seq} tokens, {size / MIB:.0f} MiB", file=sys.stderr)
        return size

    known = search(taken, args.budget, args.resolution, lambda: args.most, args.limit)
    low = max(seq for seq in known if known[seq] <= args.budget)
    if low >= args.most:
        reasons.append(" or more")
    return low, known[low], f"{low}{reasons[0]}" if reasons else ""


def search(
    taken: Callable[[int], int | None], budget: int, resolution: int, most: Callable[[], int], limit: int
) -> dict[int, int]:
    """Lengths, and the bytes that they take, until the longest under the budget is known to `resolution`.

    The line through what was measured says where to look next. taken: bytes of a length, None where it cannot be tried,
    `limit` and more where memory ended. most: tokens that are tried at most, asked before every one but the first.
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
    """Where the line through the two lengths that are nearest to the budget meets it."""
    nearest = sorted((seq for seq in known if known[seq] < limit), key=lambda seq: abs(known[seq] - budget))[:2]
    a, b = sorted(nearest)
    return a + (budget - known[a]) * (b - a) / max(1, known[b] - known[a])


if __name__ == "__main__":
    main()

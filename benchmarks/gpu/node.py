"""Measure 2 to 8 GPUs of one node: links, hidden transfers in attention, training steps, and long sequences.

    python -m benchmarks.gpu.node                       # all GPUs; it starts the ranks itself
    python -m benchmarks.gpu.node --stand-in --ranks 2  # small sizes on CPU ranks, only to test the script

The output has the same form as the output of `python -m benchmarks.gpu`. The parts are:

- Links: the bus bandwidth of each operation, as defined by nccl-tests.
- Attention: contenders take turns, and each of ours also runs its programs without transfers.
- Steps: training steps of a LLaMA under ZeRO-3. Our contenders and DeepSpeed's Ulysses with its recipe for long
  sequences run twice, in turns and in separate processes. Losses and gradient norms must agree.
- Long sequences: the longest sequence that fits, as in `benchmarks.gpu`, on 1, 2, 4 and 8 ranks.

A part that fails or takes longer than --timeout is reported, and the remaining parts continue.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import contenders, tables
from benchmarks.attention.peers import made, step
from benchmarks.contenders import Spec, parse
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.bench import OUT, Bench, about_apart
from benchmarks.gpu.layers import reach, shape_of
from benchmarks.gpu.shares import Alone
from benchmarks.memory.peers import outcome, unlike
from benchmarks.turns import in_turns, order, slowest, together
from ds_seqpar import SequenceParallel
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime.admit import AttentionOptions, check_inputs
from ds_seqpar.core.runtime.transport import ALL_GATHER
from ds_seqpar.engine import start
from tests.launch import PRELOAD

CONTENDERS = ("deepspeed", "u{n}", "u{n}+head_chunks=2+overlap", "u{n}+head_chunks=4+overlap", "ring", "u2/ring",
              "attention2d=2+overlap")  # fmt: skip
TRAINING = ("deepspeed", "u{n}", "ring")
TOLERANCE = 2e-2  # relative tolerance of losses and norms in bf16
# both use tiled MLPs and losses, and DeepSpeed's default bucket sizes
OPTIONS = {"deepspeed": {"tiled_mlp": True, "tile_bytes": 2**30}, "ours": {"mlp_tiles": "auto", "loss_tiles": "auto"}}
BUCKETS = (
    ("reduce_bucket_size", 5 * 10**8), ("stage3_prefetch_bucket_size", 5 * 10**7), ("stage3_max_reuse_distance", 10**9),
    ("stage3_param_persistence_threshold", 10**5), ("stage3_max_live_parameters", 10**9),
)  # fmt: skip


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    devices = torch.cuda.device_count()
    parser = tables.parser(__doc__, stand_in=devices == 0, timeout=300.0, out=OUT)
    contenders.add(parser)
    parser.add_argument("--ranks", type=int, default=None, help="default: all GPUs; of a stand-in 2")
    args = parser.parse_args(given)
    args.ranks = args.ranks or (2 if args.stand_in else devices)
    if not 2 <= args.ranks <= 8 or not (args.stand_in or args.ranks <= devices):
        parser.error(f"--ranks must be 2 to 8, each with a GPU of its own; got {args.ranks} and {devices} GPUs")
    if "WORLD_SIZE" in os.environ:
        parser.error("benchmarks.gpu.node starts its ranks itself; got a launcher, start it with python -m")
    args.contenders = args.contenders or [parse(name.format(n=args.ranks)) for name in CONTENDERS]
    return args


# ---- on every rank


def on_rank(stand_in: bool, specs: list[Spec], part: str, seconds: float) -> dict[str, Any]:
    """Measure one part: "links", "longest", or the training step of the named contender.

    `seconds` limits the search for the longest sequence.
    """
    start()
    bench = Bench(stand_in)
    if part == "links":
        bench.enter("bus")
        bus(bench)
        bench.enter("overlap")
        attention(bench, specs)
    elif part == "longest":
        bench.enter("reach")
        bench.note(ranks=dist.get_world_size(), **reach(bench, OPTIONS["ours"], True, seconds))
    else:
        bench.enter("step")
        training(bench, parse(part))
    return {"records": bench.records, "left_out": bench.left_out}


def bus(bench: Bench) -> None:
    """Measure bus bandwidth: bytes per rank, multiplied by the operation's factor and divided by time.

    The factor makes the bandwidth equal to the required rate of each link, whatever the number of ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    others = (world - 1) / world
    for size in (2**16, 2**20) if bench.device == "cpu" else (2**20, 2**26, 2**29):
        x, y = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
        whole, one = size // world * world, size // world
        operations: dict[str, tuple[float, Callable[[], object]]] = {
            "all-reduce": (2 * others, functools.partial(dist.all_reduce, x)),
            "all-gather": (others, functools.partial(ALL_GATHER, y[:whole], x[:one])),
            "all-to-all": (others, functools.partial(dist.all_to_all_single, y[:whole], x[:whole])),
            "ring": (1.0, functools.partial(passed_on, x, y, rank, world)),
        }
        steps = {name: call for name, (_, call) in operations.items()}
        found = in_turns(steps, 10, together(bench.device), warm=2)
        for name, (factor, _) in operations.items():
            bench.note(operation=name, bytes=size, rate=factor * size / statistics.median(found[name]))


def passed_on(x: Tensor, y: Tensor, rank: int, world: int) -> None:
    sends = dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, y, (rank - 1) % world)
    for work in dist.batch_isend_irecv([*sends]):
        work.wait()


def attention(bench: Bench, specs: list[Spec]) -> None:
    """Measure all contenders in turns, and our contenders also without transfers."""
    sizes, world = bench.sizes, dist.get_world_size()
    tokens = max(sizes.shares) // (8 * world) * 8 * world
    steps, ours = dict[str, Callable[[], object]](), dict[str, SequenceParallel]()
    for spec in specs:
        found = bench.tried(spec.name, lambda spec=spec: made(spec, tokens, sizes.heads))
        if found is None:
            continue
        local = bench.attended(len(found.positions))
        steps[spec.name] = functools.partial(step, found.attend, *local)
        if found.sp is not None:
            ours[spec.name] = found.sp
            steps[f"{spec.name} alone"] = functools.partial(alone, found.sp, local)
    rounds, warm = (3, 1) if bench.device == "cpu" else (10, 2)
    seconds = in_turns(steps, rounds, together(bench.device), warm=warm)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rate = max((one["rate"] for one in bench.records if one.get("operation") == "ring"), default=None)
    first = next(iter(medians.values()), 0.0)
    for name in (name for name in medians if not name.endswith(" alone")):
        figures: dict[str, Any] = dict.fromkeys(("alone", "received", "transfer", "hidden"))
        if name in ours:
            quiet, received = medians[f"{name} alone"], ours[name].comm.received_bytes / (rounds + warm)
            transfer, seen = received / rate, max(0.0, medians[name] - quiet)
            hidden = max(0.0, 1 - seen / transfer) if transfer else None
            figures = {"alone": quiet, "received": received, "transfer": transfer, "hidden": hidden}
        bench.note(contender=name, tokens=tokens, seconds=medians[name], to_first=first / medians[name], **figures)


def alone(sp: SequenceParallel, local: list[Tensor]) -> None:
    """Run a step of the same programs on noise, without sending anything."""
    runtime, real_comm = sp.runtime, sp.runtime.comm

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_inputs(runtime, (q, k, v), AttentionOptions(CAUSAL, None, None, True, False))  # as in every call
        runtime.comm = Alone(runtime.rank, Alone(runtime.ulysses.rank))
        return sp.attention_agreed(q, k, v, AttentionOptions(CAUSAL, None, None))

    try:
        step(attend, *local)
    finally:
        runtime.comm = real_comm


def training(bench: Bench, spec: Spec) -> None:
    """Measure training steps of one contender, and record losses and norms."""
    from benchmarks.memory import ranks

    on_cpu, kind = bench.device == "cpu", spec.peer or "ours"
    tokens = min(bench.sizes.checkpoints) * dist.get_world_size()
    shape = shape_of(bench, min(bench.sizes.vocab, 32000), zero=() if on_cpu else BUCKETS)
    options = {**OPTIONS.get(kind, {}), **spec.section}
    make = functools.partial(ranks.made, shape, kind, options, tokens)
    found = ranks.measure(make, 2 if on_cpu else 5, False, 2**62)
    seconds = [slowest(value, bench.device) for value in found.seconds]
    peak = None if on_cpu else torch.get_device_module(bench.device).max_memory_allocated()
    bench.note(contender=spec.name, tokens=tokens, seconds=statistics.median(seconds), losses=found.losses,
               norms=found.norms, peak=peak)  # fmt: skip


# ---- in the process that starts them


def launched(args: argparse.Namespace, part: str, count: int) -> dict[str, Any] | str:
    """Return the results of newly started ranks, or the reason why results are missing."""
    name, given = f"{part}, {count} ranks", (args.stand_in, args.contenders, part, args.timeout / 4)
    tables.say(name)
    # with GPUs, import nothing before forking, since CUDA could not be initialized in the ranks
    preload = PRELOAD if args.stand_in else []
    found = outcome(count, on_rank, *given, timeout=args.timeout, name=name, patience=None, preload=preload)
    return found if isinstance(found, str) else found[0]


def summed(found: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Merge all training launches of a contender into one row, if their losses agree."""
    records, left_out = ([one for one in found["records"] if one["section"] != "step"], [*found["left_out"]])
    steps = [one for one in found["records"] if one["section"] == "step"]
    rows = [some for name in names if (some := [one for one in steps if one["contender"] == name])]
    for some in rows:
        row = {**some[0], "seconds": statistics.median(one["seconds"] for one in some)}
        if wrong := unlike(*((one["losses"], one["norms"]) for one in (rows[0][0], row)), TOLERANCE):
            left_out.append(f"step, {row['contender']}: {wrong}")
        else:
            records.append(row)
    return {**found, "records": records, "left_out": left_out}


def main() -> None:
    args, began = arguments(), time.perf_counter()
    if args.stand_in:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    found: dict[str, Any] = {"about": about_apart(args.stand_in, args.ranks), "records": [], "left_out": []}
    names = [name.format(n=args.ranks) for name in TRAINING]
    steps = [names[index] for turn in range(2) for index in order(len(names), turn)]
    counts = [count for count in (1, 2, 4, 8) if count <= args.ranks]
    for part, count in [*((part, args.ranks) for part in ("links", *steps)), *(("longest", count) for count in counts)]:
        its = launched(args, part, count)
        if isinstance(its, str):
            found["left_out"].append(f"{part}, {count} ranks: {its}")
        else:
            found["left_out"] += its["left_out"]
            found["records"] += its["records"]
        found["about"]["seconds"] = round(time.perf_counter() - began, 1)
        whole = summed(found, names)
        file = gpu_tables.write(whole, args.out)  # after every launch, so that no figures are lost if the process ends
    print(f"\n{gpu_tables.page(whole)}\nwrote {file}, and beside it the page and the chart")


if __name__ == "__main__":
    main()

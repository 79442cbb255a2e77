"""Predicted memory of a training step beside the measured one, part by part: tensors of the rank with the most.

    python -m benchmarks.memory.footprint --lengths 4096,8192 --contenders u4 u2/ring ring attention2d --vocab 16384
    python -m benchmarks.memory.footprint --contenders u4+mlp_tiles=8+loss_tiles=8 u4+checkpointing=false --peak
    python -m benchmarks.memory.footprint --zero stage=2 --zero 'offload_optimizer={"device": "cpu"}'

Models, contenders and their settings are those of benchmarks.memory.peers. *Between steps*: the storages of all tensors
there are. *Step*: with those that a step made, the most alive at once. What ZeRO offloads is beside it on a CPU, so
predicted is what a rank and its host have together. Needs no launcher.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from typing import Any

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes. resting: of tensors between steps; rss: of the process then; phases: made by a step, the most at once."""

    resting: int
    rss: int
    phases: dict[str, int]
    entries: list[Any]


def measured(model: Any, options: dict[str, Any], seq: int) -> Measured:
    """On a rank: the second step of two, followed."""
    from benchmarks.memory import ranks as peers

    step = peers.made(model, "ours", options, seq)
    for _ in range(2):
        step(lambda _: None)
    gc.collect()
    resting, rss = tensors(), peers.memory("VmRSS")
    return Measured(resting, rss, *peers.followed(step))


def tensors() -> int:
    """Bytes of the storages of all tensors that Python knows of."""
    import torch

    found = {}
    for x in gc.get_objects():
        if type.__instancecheck__(torch.Tensor, x) and x.device.type == "cpu" and x.layout == torch.strided:
            storage = x.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def predicted(model: Any, options: dict[str, Any], seq: int, ranks: int) -> Any:
    from ds_seqpar.planner.footprint import footprint

    return footprint(step_of(model, options, seq, ranks))


def checkpoints(said: Any) -> int:
    """Bytes of host memory that a step takes, and gives back."""
    return sum(said.host.parts.get(name, 0) for name in ("checkpoints", "kept attention"))


def step_of(model: Any, options: dict[str, Any], seq: int, ranks: int) -> Any:
    """The step that a contender of `memory.ranks` makes, as the planner knows it."""
    from benchmarks.memory import ranks as peers
    from ds_seqpar.config import SequenceParallelConfig
    from ds_seqpar.deepspeed_json import Zero
    from ds_seqpar.parallel import seen
    from ds_seqpar.planner.auto import Job, planned
    from ds_seqpar.planner.request import Model, Step
    from ds_seqpar.runtime.devices import own_host

    own = peers.own_of(options)
    section = peers.planned_for({name: value for name, value in options.items() if name not in peers.OWN}, seq)
    heads = model.heads, model.kv_heads
    dim = model.hidden // model.heads
    layer = model.hidden * (2 * dim * sum(heads) + 3 * model.intermediate + 2)
    numbers = Model(
        hidden=model.hidden, intermediate=model.intermediate, layers=model.layers, heads=model.heads,
        kv_heads=model.kv_heads, head_dim=dim, vocab=model.vocab, layer_parameters=layer,
        parameters=model.layers * layer + 2 * model.vocab * model.hidden + model.hidden,
    )  # fmt: skip
    trained: Any = {
        "model": numbers, "seq": seq, "dtype": "bfloat16" if model.bf16 else "float32",
        "zero": Zero.of(model.settings()["zero_optimization"]), "checkpointing": own["checkpointing"],
    }  # fmt: skip
    config = SequenceParallelConfig(**{"size": ranks, **section})
    found = planned(config, Job(**trained), heads, ranks, lambda dtype: seen(dtype, [own_host()] * ranks))
    return Step(config=found.config, world=ranks, **trained)


def main() -> None:
    from benchmarks import tables
    from benchmarks.memory import peers as memory

    parser = tables.parser(__doc__)
    memory.contender_options(parser, "u4", "u2/ring", "ring", "attention2d")
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--peak", action="store_true", help="also what was alive at the peak")
    memory.model_options(parser, vocab=16384, hidden=256, intermediate=1024, layers=3, heads=8, kv_heads=4)
    args = parser.parse_args()
    os.environ.update(memory.MALLOC, PYTHONWARNINGS="ignore")
    from benchmarks.memory import ranks as peers
    from tests.launch import on_ranks

    model = peers.Model(**{field.name: getattr(args, field.name) for field in dataclasses.fields(peers.Model)})
    print(f"{args.ranks} ranks, {model}\n\n{tables.head('', 'tokens', '', 'predicted', 'measured', '')}")
    for seq in map(int, args.lengths.split(",")):
        for name, contender in memory.contenders(args).items():
            said = predicted(model, contender["options"], seq, args.ranks)
            ranks = on_ranks(args.ranks, measured, model, contender["options"], seq, timeout=900)
            most = max(ranks, key=lambda one: max(one.phases.values()))
            host = said.host.total - said.host.parts.get("rounding", 0)  # processors pin nothing
            rows = [("between steps", said.resting.total + host - checkpoints(said), most.resting)]
            for phase in ("forward", "backward", "step"):
                moments = [moment for moment in said.moments if moment.name.startswith(phase)]
                rows.append((phase, max(m.total for m in moments) + host, most.resting + most.phases[phase]))
            peak = most.resting + max(most.phases.values())
            rows.append((f"peak: {said.peak.name}", said.peak.total + host, peak))
            for what, a, b in rows:
                tables.row(name, seq, what, f"{a / MIB:.1f}", f"{b / MIB:.1f}", f"{a / b - 1:+.1%}")
            if args.peak:
                for moment in said.moments:
                    print(
                        f"    {moment.name}: {moment.total / MIB:.1f}",
                        {k: round(v / MIB, 2) for k, v in moment.parts.items()},
                    )
                for one in most.entries[:30]:
                    print(f"      {one.bytes / MIB:7.2f} {one.count} {one.shape} {one.operation} {one.place}"[:200])
            print(f"rss {most.rss / MIB:.0f}", file=sys.stderr)


if __name__ == "__main__":
    main()

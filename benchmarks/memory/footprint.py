"""Compare the predicted memory of a training step with the measured memory, for the rank that uses most.

    python -m benchmarks.memory.footprint --lengths 4096 8192 --vocab 16384 -- u4 u2/ring ring attention2d
    python -m benchmarks.memory.footprint -- u4+mlp_tiles=8+loss_tiles=8 u4+checkpointing=false
    python -m benchmarks.memory.footprint --zero stage=2 --zero 'offload_optimizer={"device": "cpu"}'

Models, contenders and settings are the same as in benchmarks.memory.peers. "Between steps" counts the storages of all
tensors; the phases of a step add the peak of the tensors that the step creates. On CPUs, offloaded tensors are in the
same memory, so the prediction is the total of a rank and its host. Between steps, the host keeps memory for
checkpoints. No launcher is needed.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks import contenders, tables
from benchmarks.memory import peers, ranks
from ds_seqpar.base.hosts import this_host
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.planner.auto import resolve_with_plan
from ds_seqpar.planner.footprint import footprint
from ds_seqpar.planner.request import Job, TrainingStep
from ds_seqpar.planning import detected_machine
from hf_integration.look.sizes import config_sizes
from tests.launch import on_ranks

MIB = 2**20


def measured(model: Any, options: dict[str, Any], seq: int) -> tuple[int, dict[str, int]]:
    """Return, on a rank, (bytes of all tensors between steps, peak bytes created by the third step, by phase)."""
    step = ranks.made(model, "ours", options, seq)
    for _ in range(2):
        step()
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in ranks.tensors()}
    return sum(storages.values()), ranks.followed(step)


def step_of(model: Any, options: dict[str, Any], seq: int, world: int) -> TrainingStep:
    """Return the planner's description of the step of a contender in `memory.ranks`."""
    local, section = ranks.divided(options, seq)
    trained: Any = {
        "model": config_sizes(model.config), "seq": seq, "dtype": "bfloat16" if model.bf16 else "float32",
        "zero": DeepSpeedJson.read(model.settings()).known.zero_optimization, "checkpointing": local["checkpointing"],
    }  # fmt: skip
    config, heads = SequenceParallelConfig(**{"size": world, **section}), (model.heads, model.kv_heads)
    if config.asks_for_plan:
        hosts = [this_host()] * world
        config, _ = resolve_with_plan(config, Job(**trained), world, lambda: detected_machine(hosts))
    else:
        config = config.resolve(world, heads)
    return TrainingStep(config=config, world=world, **trained)


def main() -> None:
    parser = tables.parser(__doc__, lengths=[4096, 8192], ranks=4)
    contenders.add(parser, "u4", "u2/ring", "ring", "attention2d")
    peers.model_options(parser, vocab=16384, hidden=256, intermediate=1024, layers=3, heads=8, kv_heads=4)
    args = parser.parse_args()
    os.environ.update(peers.MALLOC, PYTHONWARNINGS="ignore")

    model = peers.Bench(args).model
    print(f"{args.ranks} ranks, {model}\n")
    tables.head("contender", "tokens", "MiB", "predicted", "measured", "error")
    for seq in args.lengths:
        for spec in args.contenders:
            said = footprint(step_of(model, spec.section, seq, args.ranks))
            by_rank = on_ranks(args.ranks, measured, model, spec.section, seq, timeout=900)
            resting, phases = max(by_rank, key=lambda one: max(one[1].values()))
            host = said.host.total - said.host.bytes_by_item.get("rounding", 0)  # CPUs have no pinned memory
            rows = [("between steps", said.resting.total + host, resting)]
            for phase, made in phases.items():
                moments = [moment.total for moment in said.moments if moment.name.startswith(phase)]
                rows.append((phase, max(moments) + host, resting + made))
            rows.append((f"peak: {said.peak.name}", said.peak.total + host, resting + max(phases.values())))
            for what, a, b in rows:
                tables.row(spec.name, seq, what, f"{a / MIB:.1f}", f"{b / MIB:.1f}", f"{a / b - 1:+.1%}")


if __name__ == "__main__":
    main()

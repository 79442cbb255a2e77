"""The longest sequence whose training step fits, by model, GPUs and what is in host memory. Figures: nothing is run.

    python -m benchmarks.memory.longest

Every row: bf16, ZeRO-3, checkpoints in host memory, a ring over all ranks with as many head stages as there are
key/value heads, MLPs and loss in tiles, attention run twice: what takes the least memory. --nodes: of 8 GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from benchmarks import tables
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.deepspeed_json import Offload, Zero
from ds_seqpar.planner.footprint import footprint, longest
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import Model, Room, Step

GIB = 2**30
# name -> hidden, intermediate, layers, heads, vocabulary; 8 key/value heads
SHAPES = {
    "8B (Llama-3)": (4096, 14336, 32, 32, 128256),
    "32B (Qwen2.5)": (5120, 27648, 64, 40, 152064),
    "70B (Llama-3)": (8192, 28672, 80, 64, 128256),
}
MACHINES = {"80 GB": "h100-ib", "141 GB": "h200-ib"}
OPTIMISER = {"on the GPU": "none", "in host memory": "cpu"}
FULL = {"rank": "the GPU", "host": "the host", "": "nothing"}
LEAN: dict[str, Any] = {"ulysses": 1, "head_stages": 8, "mlp_tiles": "auto", "loss_tiles": "auto",
                        "offload_checkpoints": True, "keep_attention": False}  # fmt: skip


@functools.cache
def model_of(name: str) -> Model:
    from transformers import LlamaConfig

    from hf_integration.job import numbers

    hidden, intermediate, layers, heads, vocab = SHAPES[name]
    return numbers(LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=vocab,
    ))  # fmt: skip


def row(name: str, memory: str, nodes: int) -> list[str]:
    model, machine = model_of(name), Machine.load(MACHINES[memory])
    ranks = nodes * machine.per_node
    room, cells = Room.of(machine, ranks), [name, f"{ranks} x {memory}"]
    config = SequenceParallelConfig(size=ranks, **LEAN).resolve(ranks, (model.heads, model.kv_heads))
    for device in OPTIMISER.values():
        zero = Zero(stage=3, offload_optimizer=Offload(device=device))
        step = Step(model=model, config=config, world=ranks, seq=2 * ranks, zero=zero)
        most = longest(step, room)
        if most.tokens:
            node = footprint(dataclasses.replace(step, seq=most.tokens)).host.total * room.together / GIB
            cells += [f"{most.tokens / 1e6:.2f}M", FULL[most.full], f"{node:,.0f}"]
        else:
            cells += ["-", FULL[most.full], "-"]
    return cells


def main() -> None:
    args = tables.parser(__doc__, nodes=[1, 2, 4]).parse_args()
    where = [name for place in OPTIMISER for name in (f"optimiser {place}: tokens", "then full", "GiB a host")]
    rows = (row(name, memory, nodes) for name in SHAPES for memory in MACHINES for nodes in args.nodes)
    print(tables.table(["model", "GPUs", *where], rows))


if __name__ == "__main__":
    main()

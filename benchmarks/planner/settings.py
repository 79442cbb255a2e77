"""What the planner predicts by hardware, model and length: sections, and the longest sequences. Nothing is run.

    python -m benchmarks.planner.settings            # writes the table of docs/settings.md anew
    python -m benchmarks.planner.settings --longest  # prints the longest sequences

Sections: bf16, ZeRO-3, checkpointed layers, one sequence a group, and as many sequences a step as ranks make. Longest:
one sequence on all ranks, with what takes the least memory. That is a ring with as many head stages as key/value heads,
MLPs and loss in tiles, checkpoints in host memory, and attention run twice.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from benchmarks import tables
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.deepspeed_json import Offload, Zero
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.footprint import footprint, longest
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.plan import plan
from ds_seqpar.planner.request import Model, Request, Room, Step
from hf_integration.job import numbers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
MARK = "<!-- python -m benchmarks.planner.settings -->\n"
GIB = 2**30
# name -> nodes; hidden, intermediate, layers, heads, vocabulary; 8 key/value heads
NODES = {"8B (Llama-3)": 1, "32B (Qwen2.5)": 4, "70B (Llama-3)": 8}
SHAPES = {"8B (Llama-3)": (4096, 14336, 32, 32, 128256), "32B (Qwen2.5)": (5120, 27648, 64, 40, 152064),
          "70B (Llama-3)": (8192, 28672, 80, 64, 128256)}  # fmt: skip
MACHINES = ("a100-ib", "h100-ib", "h200-ib")
LENGTHS = (32_768, 131_072, 524_288)
HEAD = ["model", "machine", "GPUs", "tokens", '`"sequence_parallel"`', "s a sequence", "GiB a GPU"]
LEAN: dict[str, Any] = {"ulysses": 1, "head_stages": 8, "mlp_tiles": "auto", "loss_tiles": "auto",
                        "offload_checkpoints": True, "keep_attention": False}  # fmt: skip
OPTIMISER = {"on the GPU": "none", "in host memory": "cpu"}
FULL = {"rank": "the GPU", "host": "the host", "": "nothing"}


@functools.cache
def model_of(name: str) -> Model:
    hidden, intermediate, layers, heads, vocab = SHAPES[name]
    return numbers(LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=vocab,
    ))  # fmt: skip


def row(name: str, place: str, seq: int) -> list[str]:
    machine = Machine.load(place)
    request = Request(model=model_of(name), machine=machine, world=NODES[name] * machine.per_node, seq=seq)
    said = [name, f"`{place}`", str(request.world), f"{seq:,}"]
    try:
        choice = plan(request)
    except ConfigError:
        return [*said, "does not fit", "", ""]
    best = choice.best
    return [*said, f"`{json.dumps(choice.section)}`", f"{best.seconds:.2f}", f"{best.memory.peak.total / GIB:.0f}"]


def longest_row(name: str, place: str, nodes: int) -> list[str]:
    model, machine = model_of(name), Machine.load(place)
    ranks = nodes * machine.per_node
    room, cells = Room.of(machine, ranks), [name, f"`{place}`", str(ranks)]
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
    if tables.parser(__doc__, longest=False).parse_args().longest:
        where = [name for place in OPTIMISER for name in (f"optimiser {place}: tokens", "then full", "GiB a host")]
        rows = itertools.starmap(longest_row, itertools.product(SHAPES, MACHINES[1:], (1, 2, 4)))
        print(tables.table(["model", "machine", "GPUs", *where], rows))
    else:
        rows = itertools.starmap(row, itertools.product(SHAPES, MACHINES, LENGTHS))
        tables.insert(PAGE, MARK, f"{tables.table(HEAD, rows)}\n")


if __name__ == "__main__":
    main()

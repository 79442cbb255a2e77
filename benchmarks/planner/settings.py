"""The settings page: hardware x model x length -> the section to paste, as the planner predicts it. Nothing is run.

    python -m benchmarks.planner.settings  # writes the table of docs/settings.md anew

bf16, ZeRO-3, checkpointed layers, one sequence a group, and as many sequences a step as ranks make.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

from transformers import LlamaConfig

from benchmarks import tables
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.plan import plan
from ds_seqpar.planner.request import Model, Request
from hf_integration.job import numbers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
MARK = "<!-- python -m benchmarks.planner.settings -->\n"
# name -> nodes; hidden, intermediate, layers, heads, vocabulary; 8 key/value heads
NODES = {"8B (Llama-3)": 1, "32B (Qwen2.5)": 4, "70B (Llama-3)": 8}
SHAPES = {"8B (Llama-3)": (4096, 14336, 32, 32, 128256), "32B (Qwen2.5)": (5120, 27648, 64, 40, 152064),
          "70B (Llama-3)": (8192, 28672, 80, 64, 128256)}  # fmt: skip
MACHINES = ("a100-ib", "h100-ib", "h200-ib")
LENGTHS = (32_768, 131_072, 524_288)
HEAD = ["model", "machine", "GPUs", "tokens", '`"sequence_parallel"`', "s a sequence", "GiB a GPU"]


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
    return [*said, f"`{json.dumps(choice.section)}`", f"{best.seconds:.2f}", f"{best.memory.peak.total / 2**30:.0f}"]


if __name__ == "__main__":
    tables.parser(__doc__).parse_args()
    rows = itertools.starmap(row, itertools.product(SHAPES, MACHINES, LENGTHS))
    tables.insert(PAGE, MARK, f"{tables.table(HEAD, rows)}\n")

"""Write the table of recommended settings by hardware, model and length, as chosen by `plan`. Nothing is run.

    python -m benchmarks.planner.settings  # updates the table in docs/settings_reference.md

The table assumes bf16, ZeRO-3, checkpointed layers, one sequence per group, and as many sequences per step as groups.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from transformers import LlamaConfig

from benchmarks import tables
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.deepspeed.config import Zero
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.plan import plan
from ds_seqpar.planner.request import Job, Model, Request
from hf_integration.look.sizes import config_sizes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings_reference.md"
MARK = "<!-- python -m benchmarks.planner.settings -->\n"
# name -> nodes; hidden, intermediate, layers, heads, vocabulary; 8 key/value heads
NODES = {"8B (Llama-3)": 1, "32B (Qwen2.5)": 4, "70B (Llama-3)": 8}
SHAPES = {"8B (Llama-3)": (4096, 14336, 32, 32, 128256), "32B (Qwen2.5)": (5120, 27648, 64, 40, 152064),
          "70B (Llama-3)": (8192, 28672, 80, 64, 128256)}  # fmt: skip
MACHINES = ("a100-ib", "h100-ib", "h200-ib")
LENGTHS = (32_768, 131_072, 524_288, 1_048_576)
HEAD = ["model, GPUs", "tokens", "machine", '`"sequence_parallel"`', "s a sequence", "GiB a GPU", "GiB a host"]


def config_of(name: str) -> LlamaConfig:
    hidden, intermediate, layers, heads, vocab = SHAPES[name]
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=vocab,
    )  # fmt: skip


@functools.cache
def model_of(name: str) -> Model:
    return config_sizes(config_of(name))


def best(name: str, place: str, seq: int) -> tuple[str, str, str, str]:
    """Return the section of the plan with the lowest estimate, its seconds per sequence, GiB per GPU and per host."""
    machine = Machine.load(place)
    job = Job(model=model_of(name), seq=seq, zero=Zero(stage=3), checkpointing=True)
    request = Request(job=job, machine=machine, world=NODES[name] * machine.per_node)
    try:
        choice = plan(request)
    except ConfigError:
        return "does not fit", "", "", ""
    # omit defaults: a ring and, on one rank, no Ulysses
    found, given = choice.best, choice.best.config.section()
    unsaid = {"schedule": "ring"} | ({"ulysses": 1} if given["size"] == 1 else {})
    section = {key: value for key, value in given.items() if unsaid.get(key) != value}
    memory, host = found.memory, found.memory.host.total * machine.per_node
    sizes = [f"{size / 2**30:,.0f}" for size in (memory.peak.total, host)]
    return f"`{json.dumps(section)}`", f"{found.seconds:.2f}", *sizes


def rows(name: str, seq: int) -> list[list[str]]:
    """Return a row for each distinct section; machines with the same section share a row."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for place in MACHINES:
        section, *figures = best(name, place, seq)
        found.setdefault(section, []).append((f"`{place}`", *figures))
    said = f"{name}, {NODES[name] * Machine.load(MACHINES[0]).per_node}", f"{seq:,}"
    return [
        [*said, places, section, *figures]
        for section, its in found.items()
        for places, *figures in [[", ".join(dict.fromkeys(column)) for column in zip(*its, strict=True)]]
    ]


if __name__ == "__main__":
    tables.parser(__doc__).parse_args()
    lines = [row for name in SHAPES for seq in LENGTHS for row in rows(name, seq)]
    tables.insert(PAGE, MARK, f"{tables.table(HEAD, lines)}\n")

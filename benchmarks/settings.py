"""The settings page: hardware x model x length -> the section to paste, as the planner predicts it. Nothing is run.

    python -m benchmarks.settings          # writes the table of docs/settings.md anew
    python -m benchmarks.settings --print

bf16, ZeRO-3, checkpointed layers, one sequence a group, and as many sequences a step as ranks make.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import tables
from benchmarks.memory.longest import GIB, SHAPES, model_of
from ds_seqpar.errors import ConfigError
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.plan import plan
from ds_seqpar.planner.request import Request

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
MARK = "<!-- python -m benchmarks.settings -->\n"
NODES = {"8B (Llama-3)": 1, "32B (Qwen2.5)": 4, "70B (Llama-3)": 8}
MACHINES = ("a100-ib", "h100-ib", "h200-ib")
LENGTHS = (32_768, 131_072, 524_288)
HEAD = ["model", "machine", "GPUs", "tokens", '`"sequence_parallel"`', "s a sequence", "GiB a GPU"]


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


def main() -> None:
    printed = tables.parser(__doc__, print=False).parse_args().print
    found = tables.table(HEAD, (row(name, place, seq) for name in SHAPES for place in MACHINES for seq in LENGTHS))
    if printed:
        print(found)
    else:
        tables.insert(PAGE, MARK, f"{found}\n")


if __name__ == "__main__":
    main()

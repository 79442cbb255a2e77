"""Compare the estimated order of plans with the measured order, for a small LLaMA on CPU ranks.

    python -m benchmarks.planner.order --ranks 4 --seq 4096 --top 8

The command runs `ds-seqpar tune` on ranks of this machine, all of which share each sequence. The rows are printed in
the estimated order. On one machine, communication is cheap, so that all plans take similar times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import tables

MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8,
         "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 1024}  # fmt: skip


def main() -> None:
    args = tables.parser(__doc__, ranks=4, seq=4096, top=8, steps=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "config.json")
        place.write_text(json.dumps(MODEL), encoding="utf-8")
        tune = f"-m torch.distributed.run --standalone --nproc-per-node {args.ranks} -m ds_seqpar tune --json"
        options = f"--model {place} --seq-len {args.seq} --top {args.top} --steps {args.steps} --set size={args.ranks}"
        command = [sys.executable, *tune.split(), *options.split(), "--set", "bf16.enabled=false"]
        rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["ranked"]
    estimated = [row["seconds_a_sequence"] for row in rows]
    measured = [row["measured"]["seconds_a_step"] for row in rows]
    tables.head("section", "estimated, s", "measured, s", "place measured")
    for row in sorted(rows, key=lambda row: row["seconds_a_sequence"]):
        seconds = row["measured"]["seconds_a_step"]
        place_of = sum(other < seconds for other in measured) + 1
        tables.row(json.dumps(row["section"]), f"{row['seconds_a_sequence']:.3f}", f"{seconds:.3f}", place_of)
    if len({*estimated}) > 1:
        orders = [[sorted(times).index(seconds) for seconds in times] for times in (estimated, measured)]
        print(f"\nrank correlation {statistics.correlation(*orders):.2f}")


if __name__ == "__main__":
    main()

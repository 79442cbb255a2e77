"""Start examples/finetune_llama.py with DeepSpeed's launcher on the devices of this machine (`make demo`).

    python examples/demo.py [--ranks N] [--config FILE] [--out FOLDER]

The demo trains in bf16 on 4 GPUs, or on 2 GPUs if the machine has only 2 or 3. With fewer GPUs, the demo trains in fp32
on 4 CPU ranks, from which the GPU is hidden. The choice is printed in one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "ds_configs"
# environment that hides all GPUs from torch and DeepSpeed; must be set before torch looks for GPUs
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
# run in a separate process: one that has used CUDA keeps memory on a GPU. Flash attention needs capability 8.0 (Ampere)
COUNT = """
import torch

count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(count if all(torch.cuda.get_device_capability(number) >= (8, 0) for number in range(count)) else 0)
"""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The number of ranks, the configuration and the kind of devices to use."""

    ranks: int
    config: Path  # DeepSpeed JSON
    on_gpus: bool  # whether each rank has a GPU, or all are on CPUs

    def __str__(self) -> str:
        devices = "GPUs" if self.on_gpus else "CPU ranks, which see no GPU"
        return f"demo: {self.config.stem} on {self.ranks} {devices}"


def choose(devices: int, ranks: int | None = None, config: Path | None = None) -> Choice:
    """Choose ranks, configuration and devices.

    GPUs are used if at least 2 ranks can have one GPU each, and if the configuration trains in bf16 or fp16, which fast
    kernels require.

    Args:
        devices: The number of GPUs on this machine.
        ranks: The requested number; default: the ranks of one sequence, at most four.
        config: The requested DeepSpeed JSON; default: the demo's JSON for this number of ranks.

    Raises:
        SystemExit: The requested ranks or configuration cannot be run.
    """
    if ranks is not None and ranks < 1:
        raise SystemExit(f"RANKS must be a whole number from 1; got {ranks}")
    if config is None:
        ranks = ranks or (2 if devices in (2, 3) else 4)
        on_gpus = ranks <= devices
        return Choice(ranks, CONFIGS / ("demo_auto_bf16.json" if on_gpus or ranks % 4 else "demo.json"), on_gpus)
    size, is_half = _needs(config)
    on_gpus = is_half and devices >= max(2, ranks or size)
    most = min(4, devices) if on_gpus else 4
    return Choice(ranks or max(size, most - most % size), config, on_gpus)


def _needs(config: Path) -> tuple[int, bool]:
    """Return (ranks per sequence in a DeepSpeed JSON, 1 for "auto"; whether the JSON trains in bf16 or fp16)."""
    from ds_seqpar import SeqParError, SequenceParallelConfig
    from ds_seqpar.deepspeed.config import DeepSpeedJson

    try:
        json = DeepSpeedJson.read(config)
        size = SequenceParallelConfig.from_dict(json.section).size
    except SeqParError as error:
        raise SystemExit(f"{error}") from None
    return 1 if size == "auto" else size, json.known.dtype != "float32"


def command(choice: Choice, out: str, visible: str | None) -> tuple[list[str], Mapping[str, str]]:
    """Return the launcher's command line, and the changes to its environment. `visible` is CUDA_VISIBLE_DEVICES if set.

    The launcher sets CUDA_VISIBLE_DEVICES even for CPU ranks, so `env` hides the GPUs again in each rank. The GPUs to
    use can be passed only by --include.
    """
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    script = [str(ROOT / "examples" / "finetune_llama.py"), "--deepspeed_config", str(choice.config), "--out", out]
    if not choice.on_gpus:
        hidden = [f"{name}={value}" for name, value in HIDDEN.items()]
        launcher += ["--num_gpus", str(choice.ranks), "--no_python", "--no_local_rank", "env", *hidden]
        return [*launcher, sys.executable, "-u", *script], HIDDEN
    gpus = visible.split(",") if visible else [str(number) for number in range(choice.ranks)]
    if not all(number.strip().isdecimal() for number in gpus):
        raise SystemExit(f"DeepSpeed's launcher needs numbers in CUDA_VISIBLE_DEVICES; got {visible}")
    chosen = ",".join(number.strip() for number in gpus[: choice.ranks])
    return [*launcher, "--include", f"localhost:{chosen}", *script], {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: 4, or 2 on a machine with 2 or 3 GPUs")
    parser.add_argument("--config", type=Path, help="DeepSpeed JSON; default: one of ds_configs, by ranks")
    parser.add_argument("--out", default="runs/demo", help="folder for the model, the loss curve and the log")
    args = parser.parse_args()
    counted = subprocess.run([sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True, check=True)
    choice = choose(int(counted.stdout), args.ranks, args.config)
    arguments, changes = command(choice, args.out, os.environ.get("CUDA_VISIBLE_DEVICES"))
    environment = {**os.environ, **changes}
    print(choice, flush=True)
    prepared = subprocess.run([sys.executable, "-m", "ds_seqpar", "prepare"], env=environment)
    return prepared.returncode or subprocess.run(arguments, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())

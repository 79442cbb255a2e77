"""A stand-in for CUDA: torch, its autograd and its groups believe in a number of devices. Tensors on them are fake.

Torch looks for CUDA once, when it is imported, which this module does not do. So what runs on a stand-in runs in
processes of its own. Ranks have real groups for CPU tensors, and agree by them as ever. What they send from a device
goes to torch's fake backend.
"""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_stand_in(*calls):
    """Of every call (devices, world, function): what function() gives on each of `world` ranks, which all see so many
    devices and have torch.distributed up. One process imports everything, and all ranks are forked from it."""
    with tempfile.TemporaryDirectory() as folder:
        given = [(devices, world, function.__module__, function.__name__) for devices, world, function in calls]
        Path(folder, "calls").write_bytes(pickle.dumps(given))
        ran = subprocess.run(
            [sys.executable, "-m", "tests.stand_in.process", folder],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-4000:]
        return [
            [pickle.loads(Path(folder, f"{number}-{rank}").read_bytes()) for rank in range(world)]
            for number, (_, world, _) in enumerate(calls)
        ]

"""A stand-in for CUDA: torch, its autograd and its groups believe in a number of devices. Tensors on them are fake.

Torch looks for CUDA once, when it is imported, which this module does not do. So what runs on a stand-in runs in
processes of its own. Ranks have real groups for CPU tensors, and agree by them as ever. What they send from a device
goes to torch's fake backend.
"""

import functools
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
        server = _server()
        server.stdin.write(f"{folder}\n")
        server.stdin.flush()
        said = server.stdout.readline()
        assert said == "done\n", Path(folder, "errors").read_text()[-20000:]
        return [
            [pickle.loads(Path(folder, f"{number}-{rank}").read_bytes()) for rank in range(world)]
            for number, (_, world, _) in enumerate(calls)
        ]


@functools.cache
def _server():
    """The process, which ends with this one: then its stdin does."""
    words = [sys.executable, "-m", "tests.stand_in.process"]
    return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

"""Print versions, devices and environment variables, to paste into a bug report."""

from __future__ import annotations

import argparse
import platform

import torch

from .. import __version__
from ..base.hosts import device_name
from ..doctor.ranks import installed, set_variables


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    devices = [device_name(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
    report = {
        "ds_seqpar": __version__,
        **installed(),
        "platform": platform.platform(),
        "GPUs": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "none",
        **set_variables(),
    }
    for name, value in report.items():
        print(f"{name}: {value}")

"""What a file of figures says of the machine and the versions that they were measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from ds_seqpar.runtime.devices import host_memory

PACKAGES = ("torch", "deepspeed", "transformers", "flash-attn", "flash-attn-3", "nvidia-nccl-cu12", "nvidia-cudnn-cu12")


def about(stand_in: bool, ranks: int = 1) -> dict[str, Any]:
    """stand_in: whether the figures are of a CPU that takes a GPU's place."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "stand_in": stand_in,
        "ranks": ranks,
        "device": f"CPU, {os.cpu_count()} cores" if stand_in else torch.cuda.get_device_name(),
        "host": f"{os.cpu_count()} cores, {host_memory() / 2**30:.0f} GiB, Python {platform.python_version()}",
        "commit": commit(),
        "versions": {name: version for name in PACKAGES if (version := installed(name))},
    }
    if not stand_in:
        properties = torch.cuda.get_device_properties()
        found["memory"] = properties.total_memory
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["versions"]["CUDA"] = torch.version.cuda or torch.version.hip
    return found


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """That of this checkout, with a plus sign where files have changed since; "unknown" without git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

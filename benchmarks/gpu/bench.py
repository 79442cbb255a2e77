"""Shared parts of all sections: sizes, remaining time, records, and a description of the machine."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import math
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.tables import say
from benchmarks.turns import settle
from ds_seqpar.base.hosts import host_memory

Result = TypeVar("Result")
OUT = Path("runs/gpu")  # the folder of the files with figures
PACKAGES = ("torch", "deepspeed", "transformers", "flash-attn", "flash-attn-3",
            *(f"nvidia-{name}-cu{cuda}" for cuda in (12, 13) for name in ("nccl", "cudnn")))  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes to measure.

    Attributes:
        heads: (query heads, key/value heads).
        matrix: Side of the matrix product whose speed is the ceiling.
        tokens: Lengths of the section "kernels".
        window: Tokens of a window.
        document: Tokens of a packed document.
        shares: Lengths of the section "ranks".
        checkpoints: Lengths of the section "checkpoints".
        intermediate, layers, vocab: Sizes of the model.
        room: Bytes in addition to parameters and gradients, for "longest".
        resolution: Resolution of the search for the longest sequence, in tokens.
        most: Maximum tokens of the search.
        host: Tokens of the section "host".
    """

    dtype: torch.dtype
    heads: tuple[int, int]
    head_dim: int
    matrix: int
    tokens: tuple[int, ...]
    window: int
    document: int
    shares: tuple[int, ...]
    checkpoints: tuple[int, ...]
    intermediate: int
    layers: int
    vocab: int
    room: int
    resolution: int
    most: int
    host: int

    @property
    def tolerance(self) -> float:
        """Maximum allowed difference between two kernels, as max|a - b| / max|b|."""
        return 2e-2 if self.dtype == torch.bfloat16 else 1e-4


# heads and sizes of Llama-3-8B
GPU = Sizes(
    dtype=torch.bfloat16, heads=(32, 8), head_dim=128, matrix=8192, tokens=(2048, 8192, 32768, 131072), window=1024,
    document=1024, shares=(32768, 131072), checkpoints=(8192, 16384, 32768), intermediate=14336, layers=4,
    vocab=128256, room=8 * 2**30, resolution=1024, most=2**19, host=256,
)  # fmt: skip
STAND_IN = Sizes(
    dtype=torch.float32, heads=(4, 2), head_dim=32, matrix=256, tokens=(128, 512), window=64, document=64,
    shares=(960,), checkpoints=(256, 512), intermediate=256, layers=2, vocab=2048, room=2**23, resolution=32,
    most=2**11, host=32,
)  # fmt: skip


class Bench:
    """Collects results: `records` are figures with their section, and `left_out` explains missing figures."""

    def __init__(self, stand_in: bool, room: int | None = None) -> None:
        self.device, self.sizes = ("cpu", STAND_IN) if stand_in else ("cuda", GPU)
        self.sizes = dataclasses.replace(self.sizes, room=room or self.sizes.room)
        self.records: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.name, self.seconds, self.until = "", 0.0, 0.0

    def enter(self, name: str, seconds: float = 0.0) -> None:
        """Start a section with a time limit in seconds."""
        self.name, self.seconds, self.until = name, seconds, time.perf_counter() + seconds
        say(f"{name}: {seconds:.0f} s" if seconds else name)

    def note(self, **figures: Any) -> None:
        self.records.append({"section": self.name, **figures})

    def leave_out(self, what: str, reason: str) -> None:
        self.left_out.append(f"{self.name}, {what}: {reason}")
        say(f"left out: {self.left_out[-1]}")

    @property
    def left(self) -> float:
        return self.until - time.perf_counter()

    def has_time(self, what: str, seconds: float = 0.0, share: float = 1.0) -> bool:
        """Return whether a measurement fits the remaining time and a share of the section's time. A measurement that
        does not fit is reported.
        """
        fits = seconds <= min(self.left, share * self.seconds)
        if not fits:
            self.leave_out(what, f"no time, it would take about {seconds:.1f} s" if seconds else "no time")
        return fits

    def tried(self, what: str, function: Callable[[], Result]) -> Result | None:
        """Return the function's result. If the function raises any exception, report the reason and return None."""
        try:
            found = function()
            settle(self.device)
            return found
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.leave_out(what, f"{type(error).__name__}: {lines[0][:200]}")
        self.free()  # after the exception is released, since its frames hold tensors
        return None

    def free(self) -> None:
        gc.collect()
        if self.device != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def unused(self) -> float:
        """Return the free bytes of the device."""
        self.free()
        return math.inf if self.device == "cpu" else torch.get_device_module(self.device).mem_get_info()[0]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.sizes.dtype)

    def attended(self, tokens: int) -> list[Tensor]:
        """Return random q, k, v and output gradient of one sequence."""
        q, kv = self.sizes.heads
        return [self.random(1, tokens, heads, self.sizes.head_dim) for heads in (q, kv, kv, q)]


def about(stand_in: bool, ranks: int = 1) -> dict[str, Any]:
    """Describe the machine and versions. `stand_in` means that a CPU replaces the GPU."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "stand_in": stand_in,
        "ranks": ranks,
        "device": f"CPU, {os.cpu_count()} cores" if stand_in else torch.cuda.get_device_name(),
        "host": f"{os.cpu_count()} cores, {host_memory() / 2**30:.0f} GiB, Python {platform.python_version()}",
        "commit": commit(),
        "versions": {one.name: one.version for one in importlib.metadata.distributions() if one.name in PACKAGES},
    }
    if not stand_in:
        properties = torch.cuda.get_device_properties()
        found["memory"] = properties.total_memory
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["versions"]["CUDA"] = torch.version.cuda or torch.version.hip
    return found


def about_apart(stand_in: bool, ranks: int) -> dict[str, Any]:
    """Call `about` in a separate process, so that this process allocates no GPU memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(about, stand_in, ranks).result()


def commit() -> str:
    """Return the commit of this checkout, with a plus sign if files have changed; "unknown" without git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

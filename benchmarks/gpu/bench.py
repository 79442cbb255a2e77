"""What all sections share: sizes, the time that is left, records, and what is said of what was left out."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.tables import say
from benchmarks.turns import settle

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured. heads: of queries, of keys. matrix: side of the product whose speed is the ceiling. tokens,
    shares, checkpoints: lengths of the sections "kernels", "ranks", "checkpoints"; host: of "host". window, document:
    tokens of a window, and of a packed document. intermediate, layers, vocab: of the model. room: bytes beside
    parameters and gradients, for "longest"; resolution: tokens of its search; most: beyond which it does not look."""

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
        """How far two kernels may differ, as max|a - b| / max|b|."""
        return 2e-2 if self.dtype == torch.bfloat16 else 1e-4


# heads and sides are Llama-3-8B's
GPU = Sizes(
    dtype=torch.bfloat16, heads=(32, 8), head_dim=128, matrix=8192, tokens=(2048, 8192, 32768, 131072), window=1024,
    document=1024, shares=(32768, 131072), checkpoints=(8192, 16384, 32768), intermediate=14336, layers=4,
    vocab=128256, room=8 * 2**30, resolution=1024, most=2**18, host=256,
)  # fmt: skip
STAND_IN = Sizes(
    dtype=torch.float32, heads=(4, 2), head_dim=32, matrix=256, tokens=(128, 512), window=64, document=64,
    shares=(960,), checkpoints=(256, 512), intermediate=256, layers=2, vocab=2048, room=2**23, resolution=32,
    most=2**11, host=32,
)  # fmt: skip


class Bench:
    """records: figures, each with its section. left_out: sentences."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.records: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.name, self.seconds, self.until = "", 0.0, 0.0

    def enter(self, name: str, seconds: float) -> None:
        """Begins a section, which has so many seconds."""
        self.name, self.seconds, self.until = name, seconds, time.perf_counter() + seconds
        say(f"{name}: {seconds:.0f} s")

    def note(self, **figures: Any) -> None:
        self.records.append({"section": self.name, **figures})

    def leave_out(self, what: str, reason: str) -> None:
        self.left_out.append(f"{self.name}, {what}: {reason}")
        say(f"left out: {self.left_out[-1]}")

    @property
    def left(self) -> float:
        return self.until - time.perf_counter()

    def has_time(self, what: str, seconds: float, share: float = 1.0) -> bool:
        """Whether what takes so long fits what is left, and a share of the section's time. If not, that is said."""
        fits = seconds <= min(self.left, share * self.seconds)
        if not fits:
            self.leave_out(what, f"no time, it would take about {seconds:.1f} s" if seconds else "no time")
        return fits

    def tried(self, what: str, function: Callable[[], Result]) -> Result | None:
        """What the function returns; None where it raises, whatever that is: the reason is said, and others go on."""
        try:
            found = function()
            settle(self.device)
            return found
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.leave_out(what, f"{type(error).__name__}: {lines[0][:200]}")
        self.free()  # not before the error, whose frames hold tensors, is gone
        return None

    def free(self) -> None:
        gc.collect()
        if self.device != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.sizes.dtype)

    def attended(self, tokens: int) -> list[Tensor]:
        """q, k, v and the output's gradient of one sequence."""
        q, kv = self.sizes.heads
        return [self.random(1, tokens, heads, self.sizes.head_dim) for heads in (q, kv, kv, q)]


def different(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The greatest max|a - b| / max|b|; NaN where one has it."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True))

"""Fast attention: PyTorch's flash attention for CPUs, and for CUDA PyTorch's three and the flash-attn package's.

That for CPUs takes fp64, fp32, bf16 and fp16, GQA natively, and aligns a causal mask top-left. A band is a mask on a
block of few rows, of which the hidden part is computed too.

Those for CUDA are one class around operators that differ in arguments. A causal block that they are given is square,
since most align it to the lower right corner. They are not yet measured on a GPU: `tests/cuda_models.py` has a model of
each operator, through which the wrappers are exact.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ...compiler.cuts import KernelSupport
from ...compiler.tiles import Segments
from .reference import BlockSpec, Reference, is_deterministic


class CpuFlash:
    name = "cpu_flash"
    support = KernelSupport(band=512, rows=192)  # of wider bands squares cost less; fewer than 192 rows are slow
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = []
        if spec.device != "cpu":
            found.append(f"runs on the CPU, not on {spec.device}")
        if spec.dtype not in self.tolerance:
            found.append(f"takes floating point, not {spec.dtype}")
        return found

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, width: int = 0
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, attn_mask=_band(q, k, width), scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        width: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        operands = (x.transpose(1, 2) for x in (do, q, k, v, out, lse))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, 0.0, causal, attn_mask=_band(q, k, width), scale=scale
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _band(q: Tensor, k: Tensor, width: int) -> Tensor | None:
    """What is added to the scores of a block: 0 where a row sees a column, and -inf elsewhere."""
    if not width:
        return None
    above = torch.full((q.shape[1], k.shape[1]), float("-inf"), dtype=q.dtype).triu_(width)
    return above.add_(torch.full_like(above, float("-inf")).tril_(-1))


# ---- CUDA


NOWHERE = "nowhere yet (no GPU was at hand): tests/gpu waits for one"
HALF = {torch.bfloat16: 8, torch.float16: 8}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What an operator is asked beside its operands: the softmax scale, and the window (-1: no limit). For several
    blocks also the first row and column of each (int32, on the device), and the largest block. sequences: of the
    batch."""

    scale: float
    left: int
    right: int
    rows: int
    columns: int
    first_rows: Tensor | None = None
    first_columns: Tensor | None = None
    sequences: int = 1

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, scale: float, segments: Segments | None) -> Asked:
        if segments is None:
            return cls(scale, -1, 0 if causal else -1, q.shape[1], k.shape[1])
        window = scale, segments.left, segments.right
        if len(segments.rows) == 1:
            return cls(*window, q.shape[1], k.shape[1])
        each = segments.rows * q.shape[0], segments.columns * q.shape[0]
        firsts = torch.tensor([[*itertools.accumulate(x, initial=0)] for x in each], dtype=torch.int32)
        first_rows, first_columns = firsts.to(q.device, non_blocking=True)  # no wait for the device
        # flash-attn supposes that blocks of one row at most have one each
        longest = max(2, *segments.rows), max(segments.columns)
        return cls(*window, *longest, first_rows, first_columns, q.shape[0])

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0

    @property
    def lengths(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        return self.first_rows, self.first_columns, self.rows, self.columns

    def join(self, x: Tensor) -> Tensor:
        """(B, n, ...) -> (B * n, ...) where there are several blocks."""
        return x if self.first_rows is None else x.flatten(0, 1)

    def part(self, x: Tensor) -> Tensor:
        return x if self.first_rows is None else x.unflatten(0, (self.sequences, -1))


class CudaKernel:
    """multiples: of a head's size, a dtype: others are filled up with zeros, which change nothing. one_shape: whether
    it makes a graph for every shape of a block, which documents of any lengths would have it do in every step."""

    name: str
    support = KernelSupport(square=True, windows=2, segments=True)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    multiples = HALF
    largest = 256  # size of a head
    one_shape = False
    ran_on = NOWHERE

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = []
        if spec.device != "cuda":
            found.append(f"runs on CUDA, not on {spec.device}")
        if spec.dtype not in self.tolerance:
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.tolerance)
            found.append(f"takes {names}, not {spec.dtype_name}")
        if spec.head_dim > self.largest:
            found.append(f"takes head_dim up to {self.largest}, not {spec.head_dim}")
        old = spec.device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
        if old and self.needs_ampere(spec.dtype):
            found.append("needs a GPU of compute capability 8.0 (Ampere) or later")
        return found

    def needs_ampere(self, dtype: torch.dtype) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        asked = Asked.of(q, k, causal, scale, segments)
        out, lse = self.attend(asked, *(asked.join(self.filled(x)) for x in (q, k, v)))
        lse = lse.transpose(-1, -2)
        if segments and 0 in segments.columns:  # rows without a key: an lse of inf, where the sum of nothing has -inf
            lse = lse.masked_fill(lse.isposinf(), -torch.inf)
        return asked.part(out)[..., : q.shape[3]], asked.part(lse)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        asked = Asked.of(q, k, causal, scale, segments)
        wide = asked.join(lse).transpose(-1, -2).contiguous()
        grads = self.gradients(asked, wide, *(asked.join(self.filled(x)) for x in (do, q, k, v, out)))
        dq, dk, dv = (asked.part(x)[..., : q.shape[3]] for x in grads)
        return dq, dk, dv

    def filled(self, x: Tensor) -> Tensor:
        lacking = -x.shape[3] % self.multiples.get(x.dtype, 1)
        return torch.nn.functional.pad(x, (0, lacking)) if lacking else x

    def attend(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, m, Hq, D), k and v (B, n, Hkv, D) -> out as q, lse (B, Hq, m); or several blocks without a B."""
        raise NotImplementedError

    def gradients(
        self, asked: Asked, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of dq, dk and dv. lse is contiguous."""
        raise NotImplementedError


class CudaFlash(CudaKernel):
    """Runs what `torch.nn.attention.activate_flash_attention_impl` has put in its place, too (FlashAttention 3, 4)."""

    name = "cuda_flash"

    def attend(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *asked.lengths, 0.0, asked.causal, False, **self.options(asked)
        )
        return out, lse

    def gradients(
        self, asked: Asked, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            do, q, k, v, out, lse, *asked.lengths, 0.0, asked.causal, _unused(q), _unused(q), **self.options(asked)
        )
        return dq, dk, dv

    def options(self, asked: Asked) -> dict[str, Any]:
        if asked.causal or asked.left == asked.right == -1:
            return {"scale": asked.scale}  # FlashAttention 4 takes no window, even one without limits
        return {"scale": asked.scale, "window_size_left": asked.left, "window_size_right": asked.right}


class CudaEfficient(CudaKernel):
    """PyTorch's memory-efficient attention: fp32, large heads and GPUs before Ampere. It takes as many key/value heads
    as query heads, and a window with a causal edge."""

    name = "cuda_efficient"
    support = KernelSupport(square=True, windows=1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    multiples = HALF | {torch.float32: 4}
    largest = 1024

    def needs_ampere(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def attend(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q) for x in (k, v))
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, self.mask(asked), True, **self.options(asked)
        )
        return out, lse[..., : q.shape[1]]  # which comes in blocks of 32 rows

    def gradients(
        self, asked: Asked, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, (k, v) = k.shape[2], (_repeated(x, q) for x in (k, v))
        lse = torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=torch.inf)
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            do, q, k, v, None, out, None, None, asked.rows, asked.columns, lse, 0.0, _unused(q), _unused(q),
            self.mask(asked), False, **self.options(asked),
        )  # fmt: skip
        if heads == q.shape[2]:
            return dq, dk, dv
        return dq, *(x.unflatten(2, (heads, -1)).sum(3) for x in (dk, dv))

    def mask(self, asked: Asked) -> int:
        """0 none; causal from the upper left corner, by which torch's own calls go, or from the lower right one."""
        return 0 if asked.right else 1 if asked.rows == asked.columns else 2

    def options(self, asked: Asked) -> dict[str, Any]:
        return {"scale": asked.scale} | ({"window_size": asked.left + 1} if asked.left >= 0 else {})


class Cudnn(CudaKernel):
    """cuDNN's attention, for a measurement or its name to choose: full and causal blocks of two rows and keys or more.

    trailing: whether the operator's lse has one more dimension, as its forward has given it and its backward wants it.
    """

    name = "cudnn"
    support = KernelSupport(square=True)
    largest = 128
    one_shape = True
    trailing = True

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = super().reasons(spec)
        if is_deterministic():
            found.append("has no deterministic backward")
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
            found.append("reads an lse of other strides while TORCH_CUDNN_SDPA_AVOID_RECOMPILE is 1")
        return found + ["is not there on AMD's GPUs"] * (torch.version.hip is not None)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        if 1 in (q.shape[1], k.shape[1]):
            return Reference().forward(q, k, v, causal, scale)
        return super().forward(q, k, v, causal, scale, segments)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if 1 in (q.shape[1], k.shape[1]):
            return Reference().backward(do, q, k, v, out, lse, causal, scale)
        return super().backward(do, q, k, v, out, lse, causal, scale, segments)

    def attend(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, asked.causal, False, scale=asked.scale
        )
        self.trailing = lse.dim() == 4
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def gradients(
        self, asked: Asked, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # older ones want do and out of the same strides
        operands = (x.transpose(1, 2) for x in (do.contiguous(), q, k, v, out.contiguous()))
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *operands, lse.unsqueeze(-1) if self.trailing else lse, _unused(q), _unused(q), None, None, None,
            asked.rows, asked.columns, 0.0, asked.causal, scale=asked.scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


class FlashAttn(CudaKernel):
    """The flash-attn package, from 2.7 on."""

    name = "flash_attn"

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap

    def capped(self, softcap: float) -> FlashAttn:
        return type(self)(softcap)

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = super().reasons(spec)
        version = _version("flash-attn") if importlib.util.find_spec("flash_attn") else None
        if version is None:  # a folder of that name is none, either
            found.append("needs the flash-attn package (pip install 'ds_seqpar[flash]')")
        elif version < Version("2.7"):
            found.append("needs flash-attn 2.7 or later")
        return found

    def attend(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        function, lengths = self.function("forward", asked)
        out, lse, *_ = function(q, k, v, *lengths, return_softmax=False, **self.options(asked))
        return out, lse

    def gradients(
        self, asked: Asked, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        function, lengths = self.function("backward", asked)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        exact = torch.are_deterministic_algorithms_enabled()  # as torch's own flash attention has it
        function(do, q, k, v, out, lse, *grads, *lengths, deterministic=exact, **self.options(asked))
        return grads

    def function(self, direction: str, asked: Asked) -> tuple[Any, tuple]:
        """A function of the package, and the lengths that it takes."""
        package = importlib.import_module("flash_attn.flash_attn_interface")
        if asked.first_rows is None:
            return getattr(package, f"_flash_attn_{direction}"), ()
        return getattr(package, f"_flash_attn_varlen_{direction}"), asked.lengths

    def options(self, asked: Asked) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": asked.scale,
            "causal": asked.causal,
            "window_size_left": asked.left,
            "window_size_right": asked.right,
            "softcap": self.softcap,
            "alibi_slopes": None,
        }


def _unused(q: Tensor) -> Tensor:
    """A random state: read only where dropout > 0."""
    return torch.empty(0, dtype=torch.int64, device=q.device)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Each key/value head for all of its query heads."""
    return x if x.shape[2] == q.shape[2] else x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _version(package: str) -> Version | None:
    """Of an installed package; None where it is not."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None

"""Fast kernels for CPUs and CUDA.

On CPUs, the kernel is PyTorch's flash attention. On CUDA, the kernels are PyTorch's three attention kernels and
flash-attn's kernels. The CPU kernel supports fp64, fp32, bf16 and fp16, supports GQA without repeating heads, and
aligns a causal mask to the upper left corner. The CPU kernel computes a band as a block of few rows with a mask,
including the masked pairs.

The CUDA kernels are subclasses that wrap operators with different arguments. Causal blocks on CUDA are square, since
most operators align the mask to the lower right corner. No CUDA kernel has been measured on a GPU yet. With the
operator models in `tests/cuda_models.py`, all CUDA kernels are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import os
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..base import compat
from ..base.errors import KernelError
from ..base.on_devices import DeviceCache
from ..core.compiler.tiles.launches import KernelSupport
from ..core.compiler.tiles.tiles import Segments
from ..core.runtime import kernels
from ..core.runtime.kernels.reference import BlockSpec, Kernel, Reference, is_deterministic
from .varlen import joined


class CpuFlash:
    name = "cpu_flash"
    support = KernelSupport(band=512, rows=192)  # wider bands cost more than squares; fewer than 192 rows are slow
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"

    def reasons(self, spec: BlockSpec) -> list[str]:
        reasons = []
        if spec.device != "cpu":
            reasons.append(f"runs on the CPU, not on {spec.device}")
        if spec.dtype not in self.tolerance:
            reasons.append(f"takes floating point, not {spec.dtype}")
        return reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, width: int = 0
    ) -> tuple[Tensor, Tensor]:
        out, lse = compat.cpu_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, attn_mask=_band(q, k, width), scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        width: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        operands = (x.transpose(1, 2) for x in (do, q, k, v, out, lse))
        grads = compat.cpu_backward(*operands, 0.0, causal, attn_mask=_band(q, k, width), scale=scale)
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _band(q: Tensor, k: Tensor, width: int) -> Tensor | None:
    """Return the mask to add to a block's scores, with -inf for hidden columns, or None without a band (width 0)."""
    if not width:
        return None
    above = torch.full((q.shape[1], k.shape[1]), float("-inf"), dtype=q.dtype).triu_(width)
    return above.add_(torch.full_like(above, float("-inf")).tril_(-1))


# ---- CUDA


NOWHERE = "nowhere yet (no GPU was at hand): tests/gpu waits for one"
MAX_INT, MAX_SHORT = 2**31 - 1, 2**15 - 1
HALF = {torch.bfloat16: 8, torch.float16: 8}
_LENGTHS = DeviceCache()  # results of `_first_of_each`, shared by all layers and directions for a layout


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """The arguments of an operator call, excluding tensors."""

    scale: float  # softmax scale
    left: int  # window limits, -1 for none
    right: int
    rows: int  # rows of the block, or of the largest block if there are several
    columns: int
    first_rows: Tensor | None = None  # start of each block if there are several, int32 on the device
    first_columns: Tensor | None = None
    sequences: int = 1  # batch size, for several blocks

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, scale: float, segments: Segments | None) -> OperatorCall:
        if segments is None:
            return cls(scale, -1, 0 if causal else -1, q.shape[1], k.shape[1])
        window = scale, segments.left, segments.right
        if len(segments.rows) == 1:
            return cls(*window, q.shape[1], k.shape[1])
        # tensors from one fake mode are invalid in another fake mode
        key = segments.rows, segments.columns, q.shape[0], getattr(q, "fake_mode", None)
        first_rows, first_columns = _LENGTHS.get(key, q.device, lambda: _first_of_each(segments, q.shape[0]))
        # if the maximum is one row, flash-attn assumes that every block has exactly one row
        longest = max(2, *segments.rows), max(segments.columns)
        return cls(*window, *longest, first_rows, first_columns, q.shape[0])

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0

    @property
    def lengths(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        return self.first_rows, self.first_columns, self.rows, self.columns

    def join(self, x: Tensor) -> Tensor:
        """Reshape (B, n, ...) to (B * n, ...) if there are several blocks."""
        return x if self.first_rows is None else x.flatten(0, 1)

    def split(self, x: Tensor) -> Tensor:
        """Reshape (B * n, ...) to (B, n, ...). The inverse of `join`."""
        return x if self.first_rows is None else x.unflatten(0, (self.sequences, -1))


def _first_of_each(segments: Segments, sequences: int) -> Tensor:
    """Return the first row and the first column of each block in a launch, followed by the ends: (2, blocks + 1)."""
    sizes = segments.rows * sequences, segments.columns * sequences
    return torch.tensor([[*itertools.accumulate(x, initial=0)] for x in sizes], dtype=torch.int32, device="cpu")


class CudaKernel:
    """Base class for kernels that call a CUDA operator.

    Attributes:
        multiples: The number that must divide head_dim, by dtype. Heads are zero-padded, which leaves results
            unchanged.
    """

    name: str
    support = KernelSupport(square=True, windows=2, segments=True, join=joined)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    multiples = HALF
    max_head_dim = 256
    ran_on = NOWHERE

    def reasons(self, spec: BlockSpec) -> list[str]:
        reasons = []
        if spec.device != "cuda":
            reasons.append(f"runs on CUDA, not on {spec.device}")
        if spec.dtype not in self.tolerance:
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.tolerance)
            reasons.append(f"takes {names}, not {spec.dtype_name}")
        if spec.head_dim > self.max_head_dim:
            reasons.append(f"takes head_dim up to {self.max_head_dim}, not {spec.head_dim}")
        least = self.least_capability(spec.dtype)
        if spec.device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < least:
            reasons.append("needs a GPU of compute capability {}.{} or later".format(*least))
        return reasons

    def least_capability(self, dtype: torch.dtype) -> tuple[int, int]:
        return 8, 0  # Ampere

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        call = OperatorCall.of(q, k, causal, scale, segments)
        out, lse = self.attend(call, *(call.join(self.padded(x)) for x in (q, k, v)))
        lse = lse.transpose(-1, -2)
        if segments and 0 in segments.columns:  # operators return inf instead of -inf for rows without a key
            lse = lse.masked_fill(lse.isposinf(), -torch.inf)
        return call.split(out)[..., : v.shape[3]], call.split(lse)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        call = OperatorCall.of(q, k, causal, scale, segments)
        joined_lse = call.join(lse).transpose(-1, -2).contiguous()
        grads = self.gradients(call, joined_lse, *(call.join(self.padded(x)) for x in (do, q, k, v, out)))
        dq, dk, dv = (call.split(grad)[..., : x.shape[3]] for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv

    def padded(self, x: Tensor) -> Tensor:
        padding = -x.shape[3] % self.multiples.get(x.dtype, 1)
        return torch.nn.functional.pad(x, (0, padding)) if padding else x

    def attend(self, call: OperatorCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Call the operator's forward function. For several blocks, the tensors have no batch dimension.

        Args:
            call: The arguments other than tensors.
            q: (B, m, Hq, D).
            k: (B, n, Hkv, D).
            v: (B, n, Hkv, D).

        Returns:
            (out, lse), with out in the shape of q, and lse of shape (B, Hq, m).
        """
        raise NotImplementedError

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the operator's backward function with the arguments of `attend` and a contiguous lse.

        Return (dq, dk, dv).
        """
        raise NotImplementedError


class CudaFlash(CudaKernel):
    """PyTorch's flash attention.

    `torch.nn.attention.activate_flash_attention_impl` may replace the operator with FlashAttention 3 or 4.
    """

    name = "cuda_flash"
    support = CudaKernel.support._replace(workspace=name)

    def attend(self, call: OperatorCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = compat.flash_forward(q, k, v, *call.lengths, 0.0, call.causal, False, **self.keywords(call))
        return out, lse

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        random_state = _random_state(q), _random_state(q)
        dq, dk, dv = compat.flash_backward(
            do, q, k, v, out, lse, *call.lengths, 0.0, call.causal, *random_state, **self.keywords(call)
        )
        return dq, dk, dv

    def keywords(self, call: OperatorCall) -> dict[str, Any]:
        if call.causal or call.left == call.right == -1:
            return {"scale": call.scale}  # FlashAttention 4 does not support windows, not even unlimited ones
        return {"scale": call.scale, "window_size_left": call.left, "window_size_right": call.right}


class CudaEfficient(CudaKernel):
    """PyTorch's memory-efficient attention, for fp32, large heads and GPUs before Ampere.

    The operator requires the same number of query and key/value heads, and supports windows with a causal edge. The
    forward function aligns a window to the lower right corner, and the backward function aligns it to the upper left
    corner.
    """

    name = "cuda_efficient"
    support = KernelSupport(square=True, windows=1, workspace=name, join=joined)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    multiples = HALF | {torch.float32: 4}
    max_head_dim = 1024

    def least_capability(self, dtype: torch.dtype) -> tuple[int, int]:
        # before Volta, fp32 dq is added to uninitialized memory unless its rows see key 0
        return {torch.bfloat16: (8, 0), torch.float32: (7, 0)}.get(dtype, (0, 0))

    def check_keys(self, heads: int, head_dim: int, keys: int) -> None:
        """Raise KernelError if there are more keys than a launch supports.

        The forward kernel indexes elements with 32 bits, and the backward kernel indexes blocks of 64 keys with 16
        bits. With more keys, the kernels would silently read wrong keys or omit gradients.
        """
        most = min(1 + MAX_INT // (heads * head_dim), 64 * MAX_SHORT)
        if keys > most:
            raise KernelError(
                f"{self.name} takes at most {most} keys of {heads} heads of {head_dim} in a launch; got {keys}, share "
                "the sequence between more ranks, or name another kernel"
            )

    def attend(self, call: OperatorCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (self.in_reach(_repeat_heads(x, q)) for x in (k, v))
        out, lse, *_ = compat.efficient_forward(
            q, k, v, None, None, None, None, None, 0.0, self.mask(call), True, **self.keywords(call)
        )
        return out, lse[..., : q.shape[1]]  # the operator pads rows to a multiple of 32

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, (k, v) = k.shape[2], (self.in_reach(_repeat_heads(x, q)) for x in (k, v))
        above = call.columns - call.rows if call.left >= 0 else 0
        if above:  # pad to a square, so that both alignments agree; rows whose lse is inf see nothing
            do, q, out = (torch.nn.functional.pad(x, (0, 0, 0, 0, above, 0)) for x in (do, q, out))
            call = dataclasses.replace(call, rows=call.columns)
        lse = torch.nn.functional.pad(lse, (above, -q.shape[1] % 32), value=torch.inf)
        # in half precision, the operator assumes a contiguous out
        dq, dk, dv, _ = compat.efficient_backward(
            do, q, k, v, None, out.contiguous(), None, None, call.rows, call.columns, lse, 0.0, _random_state(q),
            _random_state(q), self.mask(call), False, **self.keywords(call),
        )  # fmt: skip
        dq = dq[:, above:]
        if heads == q.shape[2]:
            return dq, dk, dv
        return dq, *(x.unflatten(2, (heads, -1)).sum(3) for x in (dk, dv))

    def in_reach(self, x: Tensor) -> Tensor:
        """Return k or v, copied if 32-bit offsets could not reach the last row (see `check_keys`)."""
        self.check_keys(x.shape[2], x.shape[3], x.shape[1])
        return x.contiguous() if (x.shape[1] - 1) * x.stride(1) > MAX_INT else x

    def mask(self, call: OperatorCall) -> int:
        """Return the operator's mask: 0 for none, 1 for causal from upper left, 2 for causal from lower right."""
        return 0 if call.right else 1 if call.rows == call.columns else 2

    def keywords(self, call: OperatorCall) -> dict[str, Any]:
        return {"scale": call.scale} | ({"window_size": call.left + 1} if call.left >= 0 else {})


class Cudnn(CudaKernel):
    """cuDNN's attention. The kernel is used if requested by name, or if no earlier kernel supports the blocks.

    The operator supports full and causal blocks with at least two rows and two keys.

    Attributes:
        lse_is_4d: Whether the operator's lse has four dimensions. The forward pass sets the attribute for the backward
            pass.
    """

    name = "cudnn"
    support = KernelSupport(square=True)
    max_head_dim = 128
    lse_is_4d = True

    def reasons(self, spec: BlockSpec) -> list[str]:
        reasons = super().reasons(spec)
        if is_deterministic():
            reasons.append("has no deterministic backward")
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
            reasons.append("reads an lse of other strides while TORCH_CUDNN_SDPA_AVOID_RECOMPILE is 1")
        return reasons + ["is not there on AMD's GPUs"] * (torch.version.hip is not None)

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

    def attend(self, call: OperatorCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = compat.cudnn_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, call.causal, False, scale=call.scale
        )
        self.lse_is_4d = lse.dim() == 4
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # older versions require equal strides of do and out
        operands = (x.transpose(1, 2) for x in (do.contiguous(), q, k, v, out.contiguous()))
        grads = compat.cudnn_backward(
            *operands, lse.unsqueeze(-1) if self.lse_is_4d else lse, _random_state(q), _random_state(q),
            None, None, None, call.rows, call.columns, 0.0, call.causal, scale=call.scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


class FlashAttn(CudaKernel):
    """The kernel from the flash-attn package, version 2.7 or later.

    Attributes:
        package: (module, distribution, minimum version).
        install: Installation instructions.
    """

    name = "flash_attn"
    support = CudaKernel.support._replace(workspace=name)
    package: tuple[str, str, str] = ("flash_attn.flash_attn_interface", "flash-attn", "2.7")
    install = "pip install flash-attn --no-build-isolation, after torch"

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap

    def capped(self, softcap: float) -> FlashAttn:
        return type(self)(softcap)

    def reasons(self, spec: BlockSpec) -> list[str]:
        reasons = super().reasons(spec)
        if not reasons and (missing := import_reason(*self.package)):  # imported only if usable
            reasons.append(f"{missing} ({self.install})")
        return reasons

    def attend(self, call: OperatorCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        function, lengths = self.function("forward", call)
        out, lse, *_ = function(q, k, v, *lengths, return_softmax=False, **self.keywords(call))
        return out, lse

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        function, lengths = self.function("backward", call)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        deterministic = torch.are_deterministic_algorithms_enabled()  # as in torch's own flash attention
        function(do, q, k, v, out, lse, *grads, *lengths, deterministic=deterministic, **self.keywords(call))
        return grads

    def function(self, direction: str, call: OperatorCall) -> tuple[Any, tuple]:
        """Return the package's function for one block or for several blocks, along with its length arguments."""
        several = call.first_rows is not None
        return compat.flash_attn_function(direction, several), call.lengths if several else ()

    def keywords(self, call: OperatorCall) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": call.scale,
            "causal": call.causal,
            "window_size_left": call.left,
            "window_size_right": call.right,
            "softcap": self.softcap,
            "alibi_slopes": None,
        }


class FlashAttn3(FlashAttn):
    """FlashAttention 3 for compute capability 9.x, from the hopper folder of flash-attention.

    The width of v may differ from the width of q and k. Supported are v widths of 97 to 128 with q and k widths of 129
    to 192, and any v width with q and k widths of at most 64.
    """

    name = "flash_attn_3"
    support = CudaKernel.support._replace(workspace=name)
    package = "flash_attn_interface", "flash_attn_3", "3.0"
    install = "python setup.py install in the folder hopper of flash-attention, of November 2025 or later"

    def reasons(self, spec: BlockSpec) -> list[str]:
        reasons = super().reasons(spec)
        if is_deterministic() and spec.head_dim > 192:
            reasons.append(f"has a deterministic backward for head_dim up to 192, not {spec.head_dim}")
        if spec.device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            reasons.append("needs a GPU of compute capability 9.x (Hopper)")
        return reasons

    def attend(self, call: OperatorCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        function = compat.flash_attn_3_function("forward")
        out, lse, *_ = function(q, k, v, causal=call.causal, **self.keywords(call))
        return out, lse

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        function = compat.flash_attn_3_function("backward")
        given = dict(zip(("dq", "dk", "dv"), grads, strict=True)) | self.keywords(call)
        deterministic = torch.are_deterministic_algorithms_enabled()
        function(do, q, k, v, out, lse, is_causal=call.causal, deterministic=deterministic, **given)
        return grads

    def keywords(self, call: OperatorCall) -> dict[str, Any]:
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        return (dict(zip(names, call.lengths, strict=True)) if call.first_rows is not None else {}) | {
            "softmax_scale": call.scale,
            "window_size_left": call.left,
            "window_size_right": call.right,
            "softcap": self.softcap,
        }


@functools.cache
def import_reason(module: str, distribution: str, oldest: str) -> str | None:
    """Return the reason why a package is unusable, or None.

    The package is actually imported, once per process, since a package built for another torch version may be installed
    but fail to import.
    """
    try:
        version = Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:  # also raised for a folder with this name that is not a package
        return f"needs the package {distribution}"
    if version < Version(oldest):
        return f"needs {distribution} {oldest} or later, not {version}"
    try:
        importlib.import_module(module)
    except Exception as error:  # ImportError, or OSError for a library, or RuntimeError for an unsupported GPU
        said = " ".join(str(error).split())
        return f"needs a {distribution} that imports; {version} raises {type(error).__name__}: {said}"
    return None


def _random_state(q: Tensor) -> Tensor:
    """Return a placeholder for the random state, which operators read only if dropout > 0."""
    return torch.empty(0, dtype=torch.int64, device=q.device)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of k or v for all its query heads."""
    return x if x.shape[2] == q.shape[2] else x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _slowness(kernel: Kernel, spec: BlockSpec) -> str:
    if spec.device != "cuda":
        return ""
    if kernel.name == "chunked":
        return (
            f'attention of {spec} runs by "kernel": "chunked", which is slow: no other that is installed caps scores, '
            f"install flash-attn ({FlashAttn.install})"
        )
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not hopper or kernel.name not in ("flash_attn", "cuda_flash"):
        return ""
    return (
        f'attention runs by FlashAttention 2 ("kernel": "{kernel.name}"), which leaves up to half of a Hopper GPU '
        f"(capability 9.x) idle: install FlashAttention 3 ({FlashAttn3.install}), or let `ds-seqpar tune` measure the "
        "others"
    )


# GPU kernels from fastest to most general, then the CPU kernel
FAST = (FlashAttn3(), FlashAttn(), CudaFlash(), Cudnn(), CudaEfficient(), CpuFlash())
kernels.register_first(*FAST)
kernels.SLOW.append(_slowness)

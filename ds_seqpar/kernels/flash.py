"""Fast kernels: PyTorch's flash attention for CPUs, and for CUDA PyTorch's three kernels and flash-attn's.

The kernel for CPUs takes fp64, fp32, bf16 and fp16, takes GQA without repeating heads, and aligns a causal mask to the
upper left corner. It computes a band as a mask over a block of few rows, and computes the masked pairs too.

The kernels for CUDA are subclasses that wrap operators with different arguments. Their causal blocks are square, since
most operators align the mask to the lower right corner. None has been measured on a GPU yet. `tests/cuda_models.py` has
a model of each operator, and with the models the kernels are exact.
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
    """Return the mask to add to a block's scores: 0 where a row sees a column, -inf elsewhere. None for width 0, i.e.
    no band.
    """
    if not width:
        return None
    above = torch.full((q.shape[1], k.shape[1]), float("-inf"), dtype=q.dtype).triu_(width)
    return above.add_(torch.full_like(above, float("-inf")).tril_(-1))


# ---- CUDA


NOWHERE = "nowhere yet (no GPU was at hand): tests/gpu waits for one"
MAX_INT, MAX_SHORT = 2**31 - 1, 2**15 - 1
HALF = {torch.bfloat16: 8, torch.float16: 8}
_LENGTHS = DeviceCache()  # what `_first_of_each` returns: layers and directions of a layout have the same


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """The arguments of a call of an operator, other than its tensors."""

    scale: float  # of the softmax
    left: int  # the window's limits, -1 for none
    right: int
    rows: int  # of the block, or of the largest of several blocks
    columns: int
    first_rows: Tensor | None = None  # where each of several blocks begins, int32 on the device
    first_columns: Tensor | None = None
    sequences: int = 1  # of the batch, for several blocks

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, scale: float, segments: Segments | None) -> OperatorCall:
        if segments is None:
            return cls(scale, -1, 0 if causal else -1, q.shape[1], k.shape[1])
        window = scale, segments.left, segments.right
        if len(segments.rows) == 1:
            return cls(*window, q.shape[1], k.shape[1])
        # one fake mode's tensors are nothing for another one
        key = segments.rows, segments.columns, q.shape[0], getattr(q, "fake_mode", None)
        first_rows, first_columns = _LENGTHS.get(key, q.device, lambda: _first_of_each(segments, q.shape[0]))
        # flash-attn takes a largest block of one row to mean that every block has one row
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
        """Reshape (B * n, ...) to (B, n, ...): the inverse of `join`."""
        return x if self.first_rows is None else x.unflatten(0, (self.sequences, -1))


def _first_of_each(segments: Segments, sequences: int) -> Tensor:
    """Return where the blocks of a launch begin: (2, blocks + 1), of rows and of columns."""
    sizes = segments.rows * sequences, segments.columns * sequences
    return torch.tensor([[*itertools.accumulate(x, initial=0)] for x in sizes], dtype=torch.int32, device="cpu")


class CudaKernel:
    """The base class of kernels that call an operator for CUDA.

    Attributes:
        multiples: The number that must divide head_dim, for each dtype. Heads are padded with zeros, which change
            nothing.
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
        if segments and 0 in segments.columns:  # operators return inf, not -inf, for rows without a key
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
        """Call the operator's forward. For several blocks the tensors have no dimension B.

        Args:
            call: The other arguments.
            q: (B, m, Hq, D).
            k: (B, n, Hkv, D).
            v: (B, n, Hkv, D).

        Returns:
            (out, lse), out as q, and lse (B, Hq, m).
        """
        raise NotImplementedError

    def gradients(
        self, call: OperatorCall, lse: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the operator's backward, with tensors as in `attend` and a contiguous lse. Returns (dq, dk, dv)."""
        raise NotImplementedError


class CudaFlash(CudaKernel):
    """PyTorch's flash attention, or its replacement by `torch.nn.attention.activate_flash_attention_impl`
    (FlashAttention 3 or 4)."""

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
            return {"scale": call.scale}  # FlashAttention 4 takes no window, even one without limits
        return {"scale": call.scale, "window_size_left": call.left, "window_size_right": call.right}


class CudaEfficient(CudaKernel):
    """PyTorch's memory-efficient attention, for fp32, large heads and GPUs before Ampere. The operator takes the same
    number of key/value heads and query heads, and a window with a causal edge. Its forward aligns a window to the lower
    right corner, its backward to the upper left corner.
    """

    name = "cuda_efficient"
    support = KernelSupport(square=True, windows=1, workspace=name, join=joined)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    multiples = HALF | {torch.float32: 4}
    max_head_dim = 1024

    def least_capability(self, dtype: torch.dtype) -> tuple[int, int]:
        # before Volta dq in fp32 is added to memory that nobody cleared, unless its rows see key 0
        return {torch.bfloat16: (8, 0), torch.float32: (7, 0)}.get(dtype, (0, 0))

    def check_keys(self, heads: int, head_dim: int, keys: int) -> None:
        """Raise KernelError for more keys than a launch may have.

        Forward counts the elements before a key in 32 bits, and backward counts blocks of 64 keys in 16 bits: beyond
        these limits they would silently read other keys or omit gradients.
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
        if above:  # a square, where both corners are one; rows of lse inf see nothing
            do, q, out = (torch.nn.functional.pad(x, (0, 0, 0, 0, above, 0)) for x in (do, q, out))
            call = dataclasses.replace(call, rows=call.columns)
        lse = torch.nn.functional.pad(lse, (above, -q.shape[1] % 32), value=torch.inf)
        # in half precision the operator reads out as if it were contiguous
        dq, dk, dv, _ = compat.efficient_backward(
            do, q, k, v, None, out.contiguous(), None, None, call.rows, call.columns, lse, 0.0, _random_state(q),
            _random_state(q), self.mask(call), False, **self.keywords(call),
        )  # fmt: skip
        dq = dq[:, above:]
        if heads == q.shape[2]:
            return dq, dk, dv
        return dq, *(x.unflatten(2, (heads, -1)).sum(3) for x in (dk, dv))

    def in_reach(self, x: Tensor) -> Tensor:
        """Return k or v, copied if rows are so far apart that 32 bits would not reach the last one (`check_keys`)."""
        self.check_keys(x.shape[2], x.shape[3], x.shape[1])
        return x.contiguous() if (x.shape[1] - 1) * x.stride(1) > MAX_INT else x

    def mask(self, call: OperatorCall) -> int:
        """Return the operator's mask: 0 none, 1 causal from the upper left corner, as torch calls it, 2 from the lower
        right."""
        return 0 if call.right else 1 if call.rows == call.columns else 2

    def keywords(self, call: OperatorCall) -> dict[str, Any]:
        return {"scale": call.scale} | ({"window_size": call.left + 1} if call.left >= 0 else {})


class Cudnn(CudaKernel):
    """cuDNN's attention, which is used if requested by name, or if no earlier kernel can take the blocks. It takes full
    and causal blocks of at least two rows and two keys.

    Attributes:
        lse_is_4d: Whether the operator's lse has a fourth dimension. Forward sets it, for backward.
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
        # older versions want do and out of the same strides
        operands = (x.transpose(1, 2) for x in (do.contiguous(), q, k, v, out.contiguous()))
        grads = compat.cudnn_backward(
            *operands, lse.unsqueeze(-1) if self.lse_is_4d else lse, _random_state(q), _random_state(q),
            None, None, None, call.rows, call.columns, 0.0, call.causal, scale=call.scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


class FlashAttn(CudaKernel):
    """The kernel of the flash-attn package, version 2.7 or later.

    Attributes:
        package: (its module, its distribution, the oldest version).
        install: How to install it.
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
        if not reasons and (missing := import_reason(*self.package)):  # imports only what could be used
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
        """Return the package's function for one block or for several, and the lengths that it takes."""
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
    """FlashAttention 3, for compute capability 9.x: the package of flash-attention's folder hopper. v may have another
    width than q and k: 97 to 128 with 129 to 192, or any width with at most 64.
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
    """Return why a package cannot be used, or None if it can. It is imported once: a package built for another torch is
    installed, but cannot be imported.
    """
    try:
        version = Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:  # also for a folder of that name that is no package
        return f"needs the package {distribution}"
    if version < Version(oldest):
        return f"needs {distribution} {oldest} or later, not {version}"
    try:
        importlib.import_module(module)
    except Exception as error:  # ImportError, OSError for a library, RuntimeError for a GPU that it is not for
        said = " ".join(str(error).split())
        return f"needs a {distribution} that imports; {version} raises {type(error).__name__}: {said}"
    return None


def _random_state(q: Tensor) -> Tensor:
    """Return a random state for operators, which read it only if dropout > 0."""
    return torch.empty(0, dtype=torch.int64, device=q.device)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return k or v with each head repeated for all of its query heads."""
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


# the fast ones for GPUs, where memory-efficient attention takes what flash does not, then that for CPUs
FAST = (FlashAttn3(), FlashAttn(), CudaFlash(), Cudnn(), CudaEfficient(), CpuFlash())
kernels.register_first(*FAST)
kernels.SLOW.append(_slowness)

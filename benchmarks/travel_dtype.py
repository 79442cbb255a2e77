"""Prints the error of bf16 attention for each dtype that partial outputs and gradients travel in, and its bytes.

    python benchmarks/travel_dtype.py

16 virtual ranks in one process. Error: max|a-b| / max|b| against dense fp64 attention of the same bf16 inputs, beside
that of the single-device kernel. Bytes: what the busiest rank receives, relative to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_seqpar import testing as virtual
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.runtime.kernels import KERNELS

RANKS, SEQ, HEADS, KV_HEADS, HEAD_DIM = 16, 2048, 8, 8, 64
SETTINGS = {
    "ring": {"schedule": "ring", "backward": "kv"},
    "ring, backward q": {"schedule": "ring", "backward": "q"},
    "distflash": {"schedule": "distflash"},
    "attention2d, rows 4": {"schedule": "attention2d", "rows": 4},
    "wallfacer, team 2": {"schedule": "wallfacer", "team": 2},
}


def main() -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, SEQ, h, HEAD_DIM).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    kernel, scale = KERNELS["cpu_flash"], HEAD_DIM**-0.5
    exact = whole(kernel, *(x.double() for x in (q, k, v, do)), scale)
    alone = errors(whole(kernel, q, k, v, do, scale), exact)
    print(f"\n{RANKS} ranks, {SEQ} tokens, {HEADS} heads of {HEAD_DIM}, bf16, causal; error x 1e-3\n")
    print("| schedule | travel dtype | out | dq | dk | dv | received bytes |\n|---|---|---|---|---|---|---|")
    print(row("one device", "-", alone, "-"))
    for name, setting in SETTINGS.items():
        bytes_fp32 = None
        for dtype in ("fp32", "bf16"):
            config = SequenceParallelConfig(size=RANKS, ulysses=1, travel_dtype=dtype, **setting)
            found = virtual.attention(config, q, k, v, do)
            wire = {"fp32": 4, "bf16": 2}[dtype]
            received = max(
                sum(n * (wire if kind in ("out", "dq", "dkv") else 2) for kind, n in counted.items())
                for counted in found.received
            )
            bytes_fp32 = bytes_fp32 or received
            gaps = errors((found.out, found.dq, found.dk, found.dv), exact)
            print(row(name, dtype, gaps, f"{received / bytes_fp32:.2f}"))


def whole(kernel: object, q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> tuple[Tensor, ...]:
    out, lse = kernel.forward(q, k, v, True, scale)
    return out, *kernel.backward(do, q, k, v, out, lse, True, scale)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)]


def row(name: str, dtype: str, gaps: list[float], received: str) -> str:
    return f"| {name} | {dtype} | {' | '.join(f'{1e3 * gap:.2f}' for gap in gaps)} | {received} |"


if __name__ == "__main__":
    main()

"""The section "kernels": each of our kernels, called by programs, compared with torch's own calls by mask and length.

Flops count the pairs that the mask leaves visible: 4 x head_dim per pair and query head in forward, and 2.5 times as
many in backward. A product of two large matrices takes turns with the calls, and its speed is the ceiling. Before
timing, the result of each call is compared with the result of the first call.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.shares import Bare, Share
from benchmarks.runner import largest
from benchmarks.turns import in_turns, of_device, settle
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.runtime.kernels import KERNELS, BlockSpec

BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WAYS = {"forward": 1.0, "backward": 2.5}  # flops relative to forward
CALLS = 4  # minimum calls of each direction, including the first one for checking
SHARE = 0.1  # maximum share of the section's time for one contender in one case


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask on a sequence of `tokens` tokens.

    With `ranks` 2, the case is the first rank of a striped ring, which has every other token and computes two products.
    """

    name: str
    mask: Mask
    tokens: int
    ranks: int = 1

    @functools.cached_property
    def pairs(self) -> int:
        edges = (self.mask.bounds(p) for p in range(0, self.tokens, self.ranks))
        return sum(min(hi, self.tokens) - lo for lo, hi in edges)

    def flops(self, heads: int, dim: int) -> float:
        """Return the flops of a forward call."""
        return 4.0 * dim * heads * self.pairs

    def __str__(self) -> str:
        return f"{self.name}, {self.tokens} tokens"


def cases(tokens: int, window: int, document: int) -> list[Case]:
    documents = Mask(documents=tuple(range(0, tokens, document)))
    return [
        Case("window", Mask(window=window), tokens), Case("packed", documents, tokens),
        Case("striped", CAUSAL, tokens, 2), Case("causal", CAUSAL, tokens), Case("full", FULL, tokens),
    ]  # fmt: skip


def by_backend(backend: SDPBackend, case: Case, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Compute attention with a backend of torch.

    A pack is a batch of documents; a striped pair of blocks is two causal calls.
    """
    parts, options = len(case.mask.documents) or 1, {"is_causal": case.mask.causal}
    if case.mask.window:
        seen = torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril().triu(1 - case.mask.window)
        options = {"attn_mask": seen}
    heads = [x.view(parts, -1, *x.shape[2:]).transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(backend):
        return [
            scaled_dot_product_attention(*heads, **options, enable_gqa=True).transpose(1, 2) for _ in range(case.ranks)
        ]


def by_lengths(case: Case, ends: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Compute attention with torch's varlen call. `ends` (int32) lists the start of each document, and the end of the
    last.
    """
    from torch.nn.attention.varlen import varlen_attn

    longest = case.tokens // (len(ends) - 1)
    window = (case.mask.window or 0) - 1, 0
    return [varlen_attn(q[0], k[0], v[0], ends, ends, longest, longest, window_size=window, enable_gqa=True)]


def contenders(bench: Bench, case: Case, given: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Return functions that create each contender, torch's contenders first."""
    found: dict[str, Callable[[], Any]] = {}
    on_cpu = bench.device == "cpu"
    for name, backend in BACKENDS.items():
        if backend == SDPBackend.FLASH_ATTENTION if on_cpu else not case.mask.window:
            found[name] = lambda b=backend: Bare(functools.partial(by_backend, b, case), given)
    if not on_cpu and case.mask.causal and case.ranks == 1:
        places = [*(case.mask.documents or (0,)), case.tokens]
        ends = torch.tensor(places, dtype=torch.int32, device=bench.device)
        found["torch varlen"] = lambda: Bare(functools.partial(by_lengths, case, ends), given)
    spec = BlockSpec(bench.device, bench.sizes.dtype, *bench.sizes.heads, bench.sizes.head_dim)
    for name in (name for name, kernel in KERNELS.items() if not kernel.reasons(spec)):
        section = {"kernel": name, "schedule": "ring", "layout": "striped" if case.ranks > 1 else "auto"}
        found[name] = lambda s=section: Share(s, case.ranks, 0, case.tokens, case.mask, given)
    return found


def kernels(bench: Bench) -> None:
    clock, rates = of_device(bench.device), dict[tuple[str, str], float]()
    a, b = (bench.random(bench.sizes.matrix, bench.sizes.matrix) for _ in range(2))
    for tokens in bench.sizes.tokens:
        for case in cases(tokens, bench.sizes.window, bench.sizes.document):
            if bench.has_time(str(case)):
                bench.tried(str(case), lambda case=case: _case(bench, case, lambda: a @ b, clock, rates))
                bench.free()


def _case(bench: Bench, case: Case, matrix: Callable[[], Any], clock: Any, rates: dict[tuple[str, str], float]) -> None:
    heads, dim = bench.sizes.heads[0], bench.sizes.head_dim
    flops = case.flops(heads, dim)
    given = bench.attended(case.tokens // case.ranks)
    ready, right = dict[str, Any](), list[Tensor]()
    for name, make in contenders(bench, case, given).items():
        what, rate = f"{case}: {name}", rates.get((name, case.name), float("inf"))
        if rate == 0 or not bench.has_time(what, CALLS * sum(WAYS.values()) * flops / rate, SHARE):
            continue
        one = bench.tried(what, lambda make=make: _tried(bench, case, make(), right))
        if one is None:
            rates[name, case.name] = 0.0  # do not retry failed contenders on more tokens
        else:
            ready[name] = one
    right.clear()
    steps = {"ceiling": matrix}
    for way, factor in WAYS.items():
        found = in_turns({**steps, **{name: getattr(one, way) for name, one in ready.items()}},
                         20, clock, warm=0, seconds=SHARE / 4 * bench.seconds)  # fmt: skip
        ceiling = 2 * bench.sizes.matrix**3 / statistics.median(found.pop("ceiling"))
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        bare = min((name for name in medians if name not in KERNELS), key=lambda name: medians[name], default=None)
        for name, seconds in found.items():
            beside = [b / a for a, b in zip(seconds, found[bare], strict=True)] if bare else []
            bench.note(
                mask=case.name, tokens=case.tokens, contender=name, ours=name in KERNELS, way=way,
                seconds=medians[name], calls=len(seconds), flops=factor * flops / medians[name], ceiling=ceiling,
                to_bare=statistics.median(beside) if beside else None, bare=bare,
            )  # fmt: skip
            rates[name, case.name] = factor * flops / medians[name]  # finally that of backward, the longer direction


def _tried(bench: Bench, case: Case, one: Any, right: list[Tensor]) -> Any:
    """Run a contender once in each direction. Raise an error if its results differ from the first contender's."""
    found = [*one.forward(), *one.backward()]
    settle(bench.device)
    if case.ranks > 1:  # a striped rank receives noise
        return one
    if not right:
        right += found
    error = max(map(largest, found, right))
    if not error <= bench.sizes.tolerance:
        raise ArithmeticError(f"differs from the first by {error:.1e}, at most {bench.sizes.tolerance:.0e} is right")
    return one

"""How much memory a whole call of attention takes around its programs (planning.memory): the exchange of heads, stages
of heads, and what a checkpoint keeps (running.stages). Bytes; no tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..compiler import heads as dealing
from ..compiler.compile import Bound, Compiler
from ..compiler.cuts import PLAIN, Takes
from ..compiler.masks import Mask
from ..compiler.memory import fewest_stages, peak
from ..compiler.shape import Shape, shape_of
from ..compiler.shards import EvenShards, tokens_of
from ..config import SequenceParallelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A stage: the programs of both directions. own: the shape of a rank's own tensors of its heads."""

    forward: Bound
    backward: Bound
    own: Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Bytes beyond a rank's own q, k, v and the gradient of its out. forward: the most at once, out included; kept:
    what stays of it for backward, out included; backward: the most at once, with what is kept and dq, dk, dv. inputs:
    whether backward also needs the rank's own q, k and v."""

    forward: int
    kept: int
    backward: int
    inputs: bool


def figures(parts: Sequence[Part], members: int, kept: bool | None = None) -> Figures:
    """members: ranks that trade heads. kept: whether the checkpoint around it keeps what backward needs; None: there is
    no checkpoint."""
    if len(parts) == 1 and kept is None:
        return _composed(parts[0], members)
    sizes = [_Sizes.of(part, members) for part in parts]
    arrived = [size.inner if members > 1 and (kept or len(parts) == 1) else 0 for size in sizes]
    stays = sum(size.q + size.lse for size in sizes) + sum(arrived)
    return Figures(
        forward=_forward(parts, sizes, members, arrived),
        kept=stays,
        backward=stays + _backward(parts, sizes, members, arrived),
        inputs=not any(arrived),
    )


def _composed(part: Part, members: int) -> Figures:
    """One stage, of ops that autograd knows: what it keeps are the inner q, k, v and out, and the own out."""
    size = _Sizes.of(part, members)
    forward, backward = peak(part.forward), peak(part.backward)
    if members == 1:
        kept = size.q + size.lse
        return Figures(forward=forward, kept=kept, backward=kept + backward, inputs=True)
    q, inner = size.q, size.inner
    kept = q + size.inner_q + inner + size.lse
    return Figures(
        forward=max(size.packed + inner, inner + forward, inner + size.inner_q + 2 * q + size.lse),
        kept=kept,
        backward=max(kept + q + size.inner_q, kept + size.inner_q + backward, q + inner + size.packed + q + size.kv),
        inputs=False,
    )


def _forward(parts: Sequence[Part], sizes: Sequence[_Sizes], members: int, arrived: Sequence[int]) -> int:
    """The most at once, stage by stage: each stage's out goes into the whole one."""
    most, before, whole = 0, 0, sum(size.q for size in sizes) if len(sizes) > 1 else 0
    for part, size, stays in zip(parts, sizes, arrived, strict=True):
        program = peak(part.forward)
        if members == 1:
            found = [program, size.q + size.lse + whole]
        else:
            gathered = size.inner + size.inner_q + 2 * size.q + size.lse
            found = [size.packed + size.inner, size.inner + program, gathered, stays + size.lse + size.q + whole]
        most = max(most, before + max(found))
        before += stays + size.lse + (0 if before or not whole else whole)
    return most


def _backward(parts: Sequence[Part], sizes: Sequence[_Sizes], members: int, arrived: Sequence[int]) -> int:
    """The most at once beyond what is kept: each stage's gradients go into those of all heads."""
    most, before, whole = 0, 0, sum(size.q + size.kv for size in sizes) if len(sizes) > 1 else 0
    for part, size, stays in zip(parts, sizes, arrived, strict=True):
        grads = size.q + size.kv
        if members == 1:
            found = [peak(part.backward)]
        else:
            again = size.inner - stays  # of operands that are sent again
            delta = size.lse
            found = [
                (size.packed if again else 0) + again,
                again + size.q + size.inner_q,
                again + size.inner_q + delta + peak(part.backward, delta=True),
                size.inner + size.inner_kv,  # and operands that were sent again are gone
                size.inner + (size.packed - size.q) + size.kv,
                size.kv + size.inner_q + 2 * size.q,
            ]
        most = max(most, before + max(found), before + grads + (whole if not before else 0))
        before = whole
    return most


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of a rank's own q, of its k and v, of the lse; of q, k and v as they are sent, a head once to each member
    that needs it; of the inner q, and of the inner k and v."""

    q: int
    kv: int
    lse: int
    packed: int
    inner_q: int
    inner_kv: int

    @property
    def inner(self) -> int:
        return self.inner_q + self.inner_kv

    @classmethod
    def of(cls, part: Part, members: int) -> _Sizes:
        own, inner, tokens = part.own, part.forward.shape, tokens_of(part.forward.shards, "q", 0)
        head = own.itemsize * own.batch * own.head_dim
        q, kv = (tokens // members * heads * head for heads in (own.q_heads, 2 * own.kv_heads))
        sent = tokens // members * 2 * max(own.kv_heads, members) * head
        lse = own.batch * tokens * inner.q_heads * (8 if own.wide == "float64" else 4)
        return cls(q, kv, lse, q + sent, tokens * inner.q_heads * head, tokens * 2 * inner.kv_heads * head)


def parts_of(
    config: SequenceParallelConfig,
    *,
    world: int,
    tokens: int,
    mask: Mask,
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
    batch: int = 1,
    rank: int = 0,
    member: int | None = None,
    takes: Takes = PLAIN,
    early: int = 0,
) -> tuple[Part, ...]:
    """The stages of a resolved configuration's attention over `tokens` of a rank.

    heads: (query heads, key/value heads, head_dim) of the model; rank: the inner one; member: of Ulysses, None for one
    with the most heads; takes: of the kernel; early: as `Comm.early`, which is 0
    but over gloo.
    """
    recipe = config.recipe(config.topology(world))
    shards = EvenShards(config.layout, tokens * config.size, recipe.size)
    q_heads, kv_heads, dim = heads
    own = shape_of(config.travel_dtype, dtype, batch, heads)
    count = config.head_stages
    if count == "auto":
        count = fewest_stages(recipe, config.ulysses, config.travel_dtype, own, mask, shards)
    compiler, parts = Compiler(recipe, rank, early), []
    for stage in dealing.stages(q_heads, kv_heads, count):
        dealt = dealing.most(*stage.counts, config.ulysses)
        if member is not None:
            q, kv = dealing.heads_of(*stage.counts, config.ulysses, member)
            dealt = q.stop - q.start, kv.stop - kv.start
        inner = shape_of(config.travel_dtype, dtype, batch, (*dealt, dim))
        bounds = [compiler.bound(way, mask, shards, inner, takes) for way in ("forward", "backward")]
        part_own = shape_of(config.travel_dtype, dtype, batch, (*stage.counts, dim))
        parts.append(Part(forward=bounds[0], backward=bounds[1], own=part_own))
    return tuple(parts)

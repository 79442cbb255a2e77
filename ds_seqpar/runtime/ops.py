"""Attention over a sequence shared by many ranks, with autograd: one function, and the same as torch.library ops.

Where a compiler or another mode is to see one op, it is an op, and so is its backward. torch.compile takes them as they
are. Checkpointing can save the result of `ds_seqpar::attention` and recompute the rest (DistFlashAttn, section 3.3).
What is no tensor or number goes by its handle there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..compiler.exchange import Heads, Members
from ..compiler.masks import Mask
from ..compiler.shards import Shards, UnevenShards, members_tokens
from ..errors import InputError
from ..handles import held, hold, of_handle
from . import checkpoints
from .buffers import Tensors, wide
from .call import Saved
from .inputs import Asked, agree_on_inputs, of_one_head_dim, traceable
from .kernels import Scores
from .runtime import Runtime, run
from .walk import Walk

Context: TypeAlias = Any  # of a backward to come: torch's own type of it has none of the attributes that one gives it
CONFIGURED = -1  # in place of a handle: shards of the configured layout


class _Given(NamedTuple):
    """A call but for its tensors. shards None: of the configured layout. stages, keep, lse: see `Runtime.forward`."""

    runtime: Runtime
    mask: Mask
    shards: UnevenShards | None
    scores: Scores
    stages: int
    keep: int
    lse: bool

    @classmethod
    def of(
        cls, handle: int, mask: int, shards: int, scale: float, softcap: float, stages: int, keep: int, lse: bool
    ) -> _Given:
        """Made from what `_numbers` gives."""
        return cls(of_handle(handle), of_handle(mask), _shards_of(shards), Scores(scale, softcap), stages, keep, lse)

    def attended(self, tokens: int) -> tuple[Mask, Shards, Scores]:
        """Mask, shards and scores for `tokens` of q on this rank."""
        if self.shards is not None:
            return self.mask, self.shards, self.scores
        return self.mask, self.runtime.shards(tokens * self.runtime.members.degree), self.scores


def agree(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor | None:
    """`inputs.agree_on_inputs`, unless a checkpoint knows the result. It is a part of a compiled graph: what it returns
    is for what must come after it."""
    if torch.compiler.is_compiling() and traceable(runtime, q, k, v, asked):
        mask, shards, *more = asked
        return agree_on(q, k, v, runtime.handle, mask.handle, handle_of_shards(shards), *more)
    if not checkpoints.is_replayed():
        agree_on_inputs(runtime, q, k, v, asked)
    return None


def attention(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, asked: Asked, agreed: bool = False, parts: int = 1
) -> tuple[Tensor, Tensor | None]:
    """q (B, s, Hq, D), k (B, t, Hkv, D), v (B, t, Hkv, Dv) of this rank's tokens -> (out, lse), differentiable.
    out (B, s, Hq, Dv), lse (B, s, Hq) or None where nobody asked for it.

    agreed: whether ranks have agreed on the inputs. parts: above 1 these are the heads of one of so many stages, and
    the caller goes through them.
    """
    after = None if agreed else agree(runtime, q, k, v, asked)
    scale = q.shape[-1] ** -0.5 if asked.scale is None else float(asked.scale)
    scores = Scores(scale, float(asked.softcap or 0.0))
    more = asked.mask, asked.shards, scores, asked.sinks, after, asked.lse, parts
    if q.shape[-1] == v.shape[-1]:
        return _attention(runtime, (q, k, v), *more)
    out, lse = _attention(runtime, tuple(of_one_head_dim(q, k, v)), *more)
    return out[..., : v.shape[-1]], lse


def _attention(
    runtime: Runtime, tensors: Tensors, mask: Mask, shards: UnevenShards | None, scores: Scores,
    sinks: Tensor | None, after: Tensor | None, lse: bool, parts: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same of one head_dim. after: what must have been computed before anything is sent.

    Whether backward finds the inner q, k and v, or has them sent again, is the setting `keep_exchanged`.
    """
    again = not torch.compiler.is_compiling() and checkpoints.is_checkpointed()
    q, k, _ = tensors
    stages = stages_of(runtime, q, k, mask, shards) if parts == 1 else 1
    keep = sum(runtime.config.kept(max(stages, parts), again, again and checkpoints.is_saved()))
    gathered = lse and runtime.members.degree > 1
    if _is_watched() and not again:
        numbers = _numbers(runtime, mask, shards, scores, stages, keep)
        out, *rest = attend(*tensors, sinks, *numbers, gathered, _place(runtime, tensors, shards), after)
    else:
        out, *rest = Attention.apply(*tensors, sinks, _Given(runtime, mask, shards, scores, stages, keep, gathered))
    if not lse:
        return out, None
    return out, rest[-1] if gathered else torch.cat(rest, dim=2) if stages > 1 else rest[0]


def _numbers(
    runtime: Runtime, mask: Mask, shards: UnevenShards | None, scores: Scores, stages: int, keep: int
) -> tuple:
    """What an op takes in place of them."""
    return runtime.handle, mask.handle, handle_of_shards(shards), *scores, stages, keep


def _is_watched() -> bool:
    """Whether somebody is to see attention as one op: a compiler, or a mode as selective checkpoints have it."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def stages_of(runtime: Runtime, q: Tensor, k: Tensor, mask: Mask, shards: UnevenShards | None) -> int:
    """In how many stages heads are attended to. q, k: of own tokens, of which shape and dtype count."""
    count = runtime.config.head_stages
    if count != "auto":
        return count
    if torch.compiler.is_compiling():
        return 1  # the figure of memory needs numbers, and the compiler may have symbols
    held_here = runtime.shards(q.shape[1] * runtime.members.degree) if shards is None else shards
    return runtime.fewest_stages(q, k, mask, held_here)


def _place(runtime: Runtime, tensors: Tensors, shards: UnevenShards | None) -> list[int]:
    """Of the rank: degree and member; the inner rank's tokens of q and of k/v; and whether each member has as many of
    both, so that they travel as one."""
    (q, k, _), degree = tensors, runtime.members.degree
    if shards is None:
        return [*runtime.members, q.shape[1] * degree, k.shape[1] * degree, 1]
    counts = [members_tokens(shards, side, runtime.rank, degree) for side in ("q", "kv")]
    return [*runtime.members, sum(counts[0]), sum(counts[1]), int(counts[0] == counts[1])]


def handle_of_shards(shards: UnevenShards | None) -> int:
    """The number of shards; None are those of the configured layout."""
    return CONFIGURED if shards is None else shards.handle


def _shards_of(handle: int) -> UnevenShards | None:
    return None if handle == CONFIGURED else of_handle(handle)


@torch.library.custom_op("ds_seqpar::agree", mutates_args=())
def agree_on(
    q: Tensor, k: Tensor, v: Tensor, handle: int, mask: int, shards: int, scale: float | None,
    backward: bool, lse: bool, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`inputs.agree_on_inputs` as a part of a compiled graph; the empty result is for what must come after it."""
    asked = Asked(of_handle(mask), _shards_of(shards), scale, backward, lse, softcap, sinks)
    agree_on_inputs(of_handle(handle), q, k, v, asked)
    return _nothing(q)


@agree_on.register_fake
def _nothing(q: Tensor, *more: object) -> Tensor:
    return q.new_empty(0, dtype=torch.int64)  # nothing that a gradient flows through


def _forward(given: _Given, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    attended = given.attended(q.shape[1])
    return _finish(given.runtime.forward(q, k, v, sinks, *attended, given.stages, given.keep, given.lse), q.device)


def _seen(given: _Given, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    """`_forward`, as the op where somebody is to see it."""
    if not _is_watched():
        return _forward(given, q, k, v, sinks)
    place = _place(given.runtime, (q, k, v), given.shards)
    return attend(q, k, v, sinks, *_numbers(*given[:-1]), given.lse, place, None)


def _backward(given: _Given, do: Tensor, sinks: Tensor | None, saved: Sequence[Tensor], kv_heads: int) -> list[Tensor]:
    own, rest, stages = {"do": do}, list(saved), given.stages
    if not given.keep:
        own |= zip(("v", "k", "q"), (rest.pop(), rest.pop(), rest.pop()), strict=True)
    if given.keep < 2:
        own["out"] = rest.pop()
    lses, rest = rest[:stages], rest[stages:]
    outs = rest[len(rest) - stages :] if given.keep > 1 else []
    left = Saved(lses, rest[: len(rest) - len(outs)], outs)
    return _finish(given.runtime.backward(own, kv_heads, sinks, left, *given.attended(do.shape[1])), do.device)


def _finish(walk: Walk, device: torch.device) -> list[Tensor]:
    if not torch.is_autocast_enabled(device.type):
        return run(walk)
    with torch.autocast(device.type, enabled=False):  # dtypes are chosen already, and sums stay wide
        return run(walk)


@torch.library.custom_op("ds_seqpar::attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, mask: int, shards: int,
    scale: float, softcap: float, stages: int, keep: int, lse: bool, place: Sequence[int], after: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """place: of `_place`, all that shapes depend on: a compiler's cache serves several ranks. Returns
    [out, the inner lse of every stage, what is kept (see `Runtime.forward`), with lse that of own rows, which is for
    ranks that have other members]."""
    hold(mask, *(() if shards == CONFIGURED else (shards,)))
    return _forward(_Given.of(handle, mask, shards, scale, softcap, stages, keep, lse), q, k, v, sinks)


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, mask: int, shards: int,
    scale: float, softcap: float, stages: int, keep: int, lse: bool, place: Sequence[int], after: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    degree, member, *tokens, together = place
    heads = Heads.of(q.shape[2], k.shape[2], Members(degree, member), stages)
    batch, dim, found = q.shape[0], q.shape[3], [q.new_empty(q.shape)]
    widths = [[part.stop - part.start for part in heads.inner(stage)] for stage in range(stages)]
    found += [q.new_empty(batch, tokens[0], width, dtype=wide(q.dtype)) for width, _ in widths]
    for q_width, kv_width in widths if keep else ():
        if together:
            found.append(q.new_empty(tokens[0], batch, q_width + 2 * kv_width, dim))
        else:
            found += [q.new_empty(n, batch, h, dim) for n, h in zip(tokens, (q_width, 2 * kv_width), strict=True)]
    if keep > 1:
        found += [q.new_empty(batch, tokens[0], width, dim) for width, _ in widths]
    return [*found, q.new_empty(q.shape[:-1], dtype=wide(q.dtype))] if lse else found


def _save(ctx: Context, own: Tensors, sinks: Tensor | None, found: Sequence[Tensor], keep: int, lse: bool) -> None:
    """own: q, k and v. found: what forward gave."""
    ctx.set_materialize_grads(False)
    out, *rest = found[: len(found) - lse]
    ctx.save_for_backward(sinks, *rest, *(() if keep > 1 else (out,)), *(() if keep else own))


def _save_of_op(ctx: Context, inputs: tuple, output: Sequence[Tensor]) -> None:
    q, k, v, sinks, *ctx.numbers, lse, _, _ = inputs
    ctx.held, ctx.k_shape = held(*ctx.numbers[:3]), list(k.shape)
    _save(ctx, (q, k, v), sinks, output, ctx.numbers[-1], lse)


def _differentiate_op(ctx: Context, grads: Sequence[Tensor | None]) -> tuple:
    found = _gradients(ctx, grads[0], lambda *given: attend_backward(*given, ctx.k_shape, *ctx.numbers))
    return *found, *[None] * 10


def _gradients(ctx: Context, do: Tensor | None, backward: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """Those of q, k, v and sinks. backward: takes do, sinks and what was saved."""
    if do is None:
        return [None] * 4
    sinks, *saved = ctx.saved_tensors
    with torch.no_grad():
        found = backward(do, sinks, saved)
    grads = _final(found, saved)
    return grads if len(grads) == 4 else [*grads, None]


attend.register_autograd(_differentiate_op, setup_context=_save_of_op)


class Attention(torch.autograd.Function):
    """The same without an op, whose own machinery takes as long as a kernel does for few tokens. In a checkpointed
    function the second run takes what the first one gave. That may have delta (B, s, Hq) in place of out, which then
    comes back as zeros."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, given: _Given) -> Tensors:
        found = checkpoints.replayed()
        if found is None:
            found = tuple(_seen(given, q, k, v, sinks))
            checkpoints.save(found)
        ctx.given, ctx.k_shape = given, k.shape
        _save(ctx, (q, k, v), sinks, found, given.keep, given.lse)
        ctx.mark_non_differentiable(*found[2:])  # the lse stays: by it `_final` finds the inputs
        return found if found[0].dim() == q.dim() else (q.new_zeros(()).expand(q.shape), *found[1:])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple:
        def backward(do: Tensor, sinks: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
            return _backward(ctx.given, do, sinks, saved, ctx.k_shape[2])

        return *_gradients(ctx, grads[0], backward), None


@torch.library.custom_op("ds_seqpar::attention_backward", mutates_args=())
def attend_backward(
    do: Tensor, sinks: Tensor | None, saved: Sequence[Tensor], k_shape: Sequence[int],
    handle: int, mask: int, shards: int, scale: float, softcap: float, stages: int, keep: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, with sinks theirs]. saved: as `_save` leaves it."""
    given = _Given.of(handle, mask, shards, scale, softcap, stages, keep, lse=False)
    return _backward(given, do, sinks, saved, k_shape[2])


@attend_backward.register_fake
def _(
    do: Tensor, sinks: Tensor | None, saved: Sequence[Tensor], k_shape: Sequence[int], *settings: object
) -> list[Tensor]:
    found = [do.new_empty(do.shape), do.new_empty(k_shape), do.new_empty(k_shape)]
    return found if sinks is None else [*found, sinks.new_empty(sinks.shape)]


class _Final(torch.autograd.Function):
    """The identity on gradients, which refuses their own gradient. saved: what backward had; more: the gradients."""

    @staticmethod
    def forward(ctx: Context, saved: int, *more: Tensor) -> Tensors:
        return tuple(grad.view_as(grad) for grad in more[saved:])

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> tuple:
        raise InputError(
            "sequence parallel attention has no second derivative; got a gradient of its gradient (create_graph=True), "
            "use torch's own attention where you need one"
        )


def _final(grads: Sequence[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """With create_graph=True these become a part of the graph that has the inputs, through what was saved. If they did
    not, a second derivative would be zero without a word."""
    return _Final.apply(len(saved), *saved, *grads) if torch.is_grad_enabled() else grads


class Constant(torch.autograd.Function):
    """The identity of x; a gradient that reaches it is refused, where one that is lost would go unnoticed. beside: what
    came with x: only where that has a gradient is one refused."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, beside: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple:
        if grad is None or not bool(grad.any()):  # a reentrant checkpoint gives zeros for what no loss depends on
            return None, None
        raise InputError(
            "the lse of sequence parallel attention has no gradient; got a loss that depends on it, use lse.detach()"
        )

"""Attention modules that compute some heads at a time, projections included.

A head chunk is a slice of heads: rows of the weights that make q, k and v, and columns of the output projection's
weight. It projects the layer's input, attends, and adds its part to the output. So q, k, v and the attention output
never exist for all heads at once. Backward goes through the head chunks again: it projects once more, uses the
attention results that forward saved, and adds the head chunk's part to the gradient of the input. The gradients of a
weight's slices fill one gradient of the weight, which reaches the parameter, and so ZeRO and DDP, once.

Between projections and attention, families have norms of q and k, RoPE, or sinks. These are computed by the forward of
the family's own class, on a copy of the module (its twin) that has the head chunk's heads.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ds_seqpar.compiler.sharding.heads import HeadChunk, head_chunks
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.runtime.checkpoints import HeadChunkReplay, HeadChunkResults, is_replayed
from ds_seqpar.runtime.ops import head_chunks_of
from ds_seqpar.runtime.work import rowsum

from ..families import FAMILIES
from .tiled_function import ForwardConditions, Source, tile_count, tile_slices, trained_parameters
from .tiled_loss import LEAF, STAGED, TILING
from .tiled_modules import before_leaf, normed
from .weight_slices import INWARD, OUTWARD, Gradients, Slice, heads_of


def use_head_chunks(module: Any) -> None:
    """Makes the sharded forwards of an attention module go through its heads in head chunks, as its SequenceParallel's
    settings say. ZeRO-3 then gathers all parameters of the module together, as a leaf."""
    config, unhooked = module.sequence_parallel.config, not hasattr(module, "ds_id") or hasattr(module, LEAF)
    if config.head_chunks == 1 or config.overlap or "forward" in vars(module) or not unhooked:
        return

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, *args, **kwargs) if STAGED in vars(self) else type(self).forward(self, *args, **kwargs)

    setattr(module, STAGED, module.register_forward_pre_hook(_before, with_kwargs=True))
    setattr(module, LEAF, True)
    module.forward = types.MethodType(forward, module)


def remove_head_chunks(module: Any) -> None:
    """Undoes `use_head_chunks`."""
    hook = vars(module).pop(STAGED, None)
    if hook is None:
        return
    hook.remove()
    del module.forward
    if not hasattr(module, "ds_id"):  # ZeRO-3 that has hooked a leaf asks it again
        vars(module).pop(LEAF, None)


def _before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Passes the input of the module by position: ZeRO-3 looks for a leaf's input among positional arguments."""
    if "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"), *args)
    return before_leaf(module, args) or args, kwargs


def _forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    own = type(module).forward
    if torch.compiler.is_compiling() or not kwargs.get("sequence_parallel") or not _has_head_chunks(module):
        return own(module, normed(module, x) if hasattr(module, TILING) else x, *args, **kwargs)
    q_heads, kv_heads = heads_of(module)
    count = _head_chunk_count(module, x, q_heads, kv_heads, kwargs["sequence_parallel"])
    if count == 1:
        return own(module, normed(module, x), *args, **kwargs)
    tiling = getattr(module, TILING, None)
    source = None if tiling is None else tiling.source(x, module)
    run = _HeadChunkForward(
        module, head_chunks(q_heads, kv_heads, count), x, functools.partial(own, **kwargs), args, source
    )
    return _ByHeadChunks.apply(run, None if source is None else source.x, x, *run.parameters), None


def _head_chunk_count(module: Any, x: Tensor, q_heads: int, kv_heads: int, given: bool | BatchLayout) -> int:
    """The number of head chunks of a forward. given: the batch's BatchLayout, if it has one."""
    sp, mask, shards = module.sequence_parallel, module.sequence_parallel_mask, None
    if sp.config.head_chunks != "auto":
        return sp.config.head_chunks
    if isinstance(given, BatchLayout):
        mask, shards = given.mask_with_window(mask.window), given.shards
    cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
    q, k = (torch.empty(*x.shape[:2], n, module.head_dim, dtype=dtype, device="meta") for n in (q_heads, kv_heads))
    return head_chunks_of(sp.runtime, q, k, mask, shards)


def _has_head_chunks(module: Any) -> bool:
    """Whether head chunks can project their own heads. They cannot where q and k have norms over all heads, where
    adapters have dropout, or where a projection is not a plain linear layer without hooks."""
    if FAMILIES[module.config.original.model_type].norms_heads:
        return False
    return all(_is_linear(child) for name, child in module.named_children() if name in (*INWARD, OUTWARD))


def _is_linear(module: Any) -> bool:
    if any("forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks for one in module.modules()):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    return _is_lora(module) and _is_linear(module.base_layer)


def _is_lora(module: Any) -> bool:
    """Whether this is peft's linear layer with plain LoRA: without dropout, magnitudes (DoRA) or biases."""
    if not hasattr(module, "lora_A") or not hasattr(module, "base_layer") or getattr(module, "lora_variant", None):
        return False
    plain = [*module.lora_A.values(), *module.lora_B.values()]
    drops = [one for one in module.lora_dropout.values() if module.training and getattr(one, "p", 0.0) > 0]
    return not drops and all(type(one) is nn.Linear and one.bias is None for one in plain)


# autograd nodes that only reshape or copy a tensor
SHAPED = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "CloneBackward0")


class _HeadChunkForward:
    """One forward of an attention module in head chunks, with all that its backward repeats. own: the forward of the
    module's class. source: what x stands for, if the norm before the module is deferred; x is then the norm's input."""

    def __init__(
        self,
        module: Any,
        its: Sequence[HeadChunk],
        x: Tensor,
        own: Callable[..., Any],
        args: tuple,
        source: Source | None,
    ) -> None:
        self.module, self.head_chunks, self.own, self.args = module, its, own, args
        self.norm = None if source is None else (source.norm, source.forward)
        self.parameters = (*trained_parameters(module), *([] if source is None else trained_parameters(source.norm)))
        self.conditions, self.dtype = ForwardConditions.of(x), x.dtype
        self.tiles = tile_slices(x.shape[1], tile_count(x.shape[0] * x.shape[1], x.shape[2]))
        self.wanted, self.keeps, self.lent = torch.is_grad_enabled(), False, HeadChunkResults.in_checkpoint()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(the output, the attention results of all head chunks that backward needs; [] where a checkpoint keeps
        them)."""
        out, given = torch.empty(0), list[Tensor]()
        for index in range(len(self.head_chunks)):
            part, kept = Slice(self.module, self.head_chunks, index, self.norm, grad=False), HeadChunkReplay()
            self.keeps = kept.checkpoint_saves
            inner = part.blank(x) if is_replayed() else part.project(x, self.tiles)
            attended = kept.run(part.attend, self.attention(x), inner)
            if self.lent is not None:
                self.lent.push(kept.tensors())
            elif self.wanted:
                given += kept.tensors()
            del kept
            for cut in self.tiles:
                tile = part.outward(attended[:, cut])
                if out.dim() == 1:
                    out = tile.new_empty(*x.shape[:2], tile.shape[-1])
                out[:, cut] = out[:, cut].add_(tile) if index else tile
        return out, given

    def attention(self, x: Tensor) -> Callable[..., tuple]:
        """The forward of the module's class as a function of a twin. Of x only the shape matters: twins have their
        projections' results."""
        return lambda twin: self.own(twin, x, *self.args)

    def backward(self, saved: Tensor, given: list[Tensor], grad: Tensor, wants_x: bool) -> Iterator[Tensor | None]:
        """Yields the gradient of the input x, and then those of the parameters. saved: x. given: the attention results
        of all head chunks; emptied, so that each is freed after its head chunk."""
        found, each = Gradients(), len(given) // len(self.head_chunks)
        dx: Tensor | None = None
        with self.conditions.restored():
            torch.set_autocast_cache_enabled(False)  # casts that were cached without a graph must not be used in one
            for index in reversed(range(len(self.head_chunks))):
                its = tuple(given[index * each :]) if self.lent is None else self.lent.pop()
                del given[index * each :]
                dx = self.head_chunk_backward(self.part(index), saved, its, grad, dx, found, wants_x)
                del its
                if self.plain and self.lent is not None and index == len(self.head_chunks) - 1:
                    self.without_outs(self.lent.on_device(), grad, found)
        yield dx
        yield from map(found.pop, self.parameters)

    def part(self, index: int) -> Slice:
        return Slice(self.module, self.head_chunks, index, self.norm, grad=True)

    def without_outs(self, its: list[Any], grad: Tensor, found: Gradients) -> None:
        """Replaces out by delta = rowsum(do * out) (B, s, heads) in the attention results of head chunks, `its`. Once
        the output projection has its gradients, backward needs nothing else of out."""
        for index, (out, lse, *common) in enumerate(its):
            do = self.outward_backward(self.part(index), out.flatten(2), grad, found)
            its[index] = [rowsum(do.view(out.shape), out, lse.dtype), lse, *common]
            del out, do

    def outward_backward(self, part: Slice, attended: Tensor, grad: Tensor, found: Gradients | None) -> Tensor:
        """The gradient of a head chunk's attention output (B, s, heads x head_dim). grad: of the module's output.
        found: takes the gradients of the output projection; None: it has them already."""
        d_attended = torch.empty_like(attended)
        with (found or Gradients()).adding([] if found is None else part.leaves_out) as differentiate:
            for cut in self.tiles:
                with torch.enable_grad():
                    tile = attended[:, cut].detach().requires_grad_()
                    out = part.outward(tile)
                (d_attended[:, cut],) = differentiate([out], [tile], [grad[:, cut]])
        return d_attended

    def head_chunk_backward(
        self, part: Slice, saved: Tensor, its: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None, found: Gradients,
        wants_x: bool,
    ) -> Tensor | None:  # fmt: skip
        """Adds the gradients of one head chunk to `found`, and to dx, the gradient of x, which it returns. dx None:
        this is the first head chunk."""
        anchor = torch.zeros((), requires_grad=True, device=saved.device)
        has_delta = its[0].dim() == 3  # `without_outs` has replaced out
        with torch.enable_grad():
            inner = {name: _GraphStart.apply(anchor, one) for name, one in part.project(saved, self.tiles).items()}
            asked = [get_gradient_edge(one) for one in inner.values()]  # edges do not keep the tensors alive
            attended = HeadChunkReplay(its, self.keeps).run(part.attend, self.attention(saved), inner)
        self.plain = all(one.dim() == 2 for one in its[2:]) and _is_all(attended)  # beside out and lse a common part
        d_attended = self.outward_backward(part, attended, grad, None if has_delta else found)
        ends = [get_gradient_edge(attended)]
        del attended
        with found.adding(part.leaves_between) as differentiate:
            d_inner = differentiate(ends, asked, [d_attended])
        del d_attended, ends
        first, total = dx is None, torch.empty_like(saved, dtype=self.dtype) if wants_x and dx is None else dx
        with found.adding(part.leaves_in) as differentiate:
            for cut in self.tiles:
                with torch.enable_grad():
                    tile = saved[:, cut].detach().requires_grad_(wants_x)
                    given = part.normed(tile)
                    outs = [projection(given) for projection in part.inward.values()]
                of_tile = differentiate(outs, [tile] if wants_x else [], [one[:, cut] for one in d_inner])
                if total is not None:
                    total[:, cut] = of_tile[0] if first else total[:, cut].add_(of_tile[0])
        return total


def _is_all(attended: Tensor) -> bool:
    """Whether nothing but reshaping stands between attention and the output projection."""
    node: Any = attended.grad_fn
    while node is not None and node.name() in SHAPED:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "AttentionBackward"


class _GraphStart(Function):
    """x, unchanged, at the start of a graph. Unlike a leaf's, its edge does not keep the tensor alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _ByHeadChunks(Function):
    """The module's output (B, s, d). Saves the module's input, or the source of it, and attention's results."""

    @staticmethod
    def forward(
        ctx: Any, run: _HeadChunkForward, source: Tensor | None, x: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.run, real = run, x if source is None else source
        out, given = run.forward(real)
        ctx.save_for_backward(real, *given)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, *given = ctx.saved_tensors
        return None, None, *ctx.run.backward(saved, given, grad, ctx.needs_input_grad[2])

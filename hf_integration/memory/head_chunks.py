"""Attention modules that compute a few heads at a time, including projections.

A head chunk is a slice of heads. The slice consists of rows of the weights that compute q, k and v, and columns of the
output projection's weight. Each head chunk projects the layer's input, computes attention, and adds its part to the
output. Therefore q, k, v and the attention output never exist for all heads at once.

Backward repeats the head chunks. Each head chunk repeats its projections, uses the attention results saved in forward,
and adds its part to the gradient of the input. The gradients of a weight's slices fill a single gradient tensor, so
that ZeRO and DDP see one gradient per parameter.

Between projections and attention, model families have different steps, such as norms of q and k, RoPE, or sinks. The
forward of the family's own class computes the intermediate steps, on a copy of the module (its twin) that has only the
head chunk's heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ds_seqpar.base.errors import SECTION
from ds_seqpar.base.log import log_once
from ds_seqpar.core.compiler.sharding.heads import HeadChunk, head_chunks
from ds_seqpar.core.runtime.dense import is_delta, rowsum
from ds_seqpar.core.runtime.operator import DENSE
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.memory.checkpoints import HeadChunkReplay, HeadChunkResults, current

from ..compat import LEAF, ZERO_ID, forward_hooks, forward_pre_hooks, is_plain_lora
from ..context import KEYWORD, ForwardContext
from ..look.facts import TESTED
from ..module_patch import override, override_forward, patched
from .tiled_function import ForwardConditions, tile_count, tile_slices, trained_parameters
from .tiled_modules import before_leaf
from .weight_slices import INWARD, OUTWARD, Gradients, Slice, heads_of

ALL_HEADS = SECTION + ".head_chunks: projections are computed for all heads at once in {}"


def use_head_chunks(module: Any) -> None:
    """Make an attention module compute its heads in head chunks in sharded forwards.

    The settings of the module's SequenceParallel determine the number of chunks. ZeRO-3 treats the module as a leaf,
    and gathers all its parameters together.
    """
    own = patched(module)
    if own.sp.config.head_chunks == 1 or own.sp.config.overlap:
        return
    if "forward" in vars(module) or (hasattr(module, ZERO_ID) and not hasattr(module, LEAF)):
        log_once(ALL_HEADS.format("attention with a forward of its own, or that DeepSpeed had before it was patched"))
        return
    own.hooks.append(module.register_forward_pre_hook(_before, with_kwargs=True))
    override(module, LEAF, True)
    override_forward(module, _forward)


def _before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pass the module's input by position, since ZeRO-3 searches for a leaf's input among the positional arguments."""
    if "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"), *args)
    return before_leaf(module, args) or args, kwargs


def _forward(class_forward: Callable[..., Any], module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    context: ForwardContext | None = kwargs.get(KEYWORD)
    if context is None or context.mode == "local" or context.cached is not None or not _has_head_chunks(module):
        return class_forward(module, x, *args, **kwargs)
    q_heads, kv_heads = heads_of(module)
    count = _head_chunk_count(module, x, q_heads, kv_heads, context.layout)
    if count == 1:
        return class_forward(module, x, *args, **kwargs)
    chunks = head_chunks(q_heads, kv_heads, count)
    run = _HeadChunkForward(module, chunks, x, functools.partial(class_forward, **kwargs), args)
    return _ByHeadChunks.apply(run, x, *run.parameters), None


def _head_chunk_count(module: Any, x: Tensor, q_heads: int, kv_heads: int, layout: BatchLayout | None) -> int:
    own = patched(module)
    sp, mask, shards = own.sp, own.mask, None
    if sp.config.head_chunks != "auto":
        return sp.config.head_chunks
    if layout is not None:
        mask, shards = layout.mask_with_window(mask.window), layout.shards
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    q = torch.empty(*x.shape[:2], q_heads, module.head_dim, dtype=dtype, device="meta")
    return sp.runtime.head_chunks(q, kv_heads, mask, shards)


def _has_head_chunks(module: Any) -> bool:
    """Return whether head chunks can project their own heads.

    If they cannot, only attention itself runs in head chunks.
    """
    if torch.compiler.is_compiling():
        log_once(ALL_HEADS.format("a compiled model"))
    elif (facts := TESTED.get(module.config.model_type)) is None or facts.norms_heads:
        log_once(ALL_HEADS.format("a model that norms them all together, or is not of a tested family"))
    elif not all(_is_linear(child) for name, child in module.named_children() if name in (*INWARD, OUTWARD)):
        log_once(ALL_HEADS.format("projections with hooks, with dropout in LoRA, or that are not plain linear layers"))
    else:
        return True
    return False


def _is_linear(module: Any) -> bool:
    if any("forward" in vars(m) or forward_hooks(m) or forward_pre_hooks(m) for m in module.modules()):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    return is_plain_lora(module) and _is_linear(module.base_layer)


class _HeadChunkForward:
    """One forward of an attention module in head chunks, with the state that its backward needs.

    Args:
        chunks: The head chunks.
        x: The input of the module.
        class_forward: The forward of the module's class.
        args: All other arguments of the forward.
    """

    def __init__(
        self, module: Any, chunks: Sequence[HeadChunk], x: Tensor, class_forward: Callable[..., Any], args: tuple
    ) -> None:
        self.module, self.head_chunks, self.class_forward, self.args = module, chunks, class_forward, args
        self.parameters = tuple(trained_parameters(module))
        self.conditions, self.dtype = ForwardConditions.of(x), x.dtype
        self.tiles = tile_slices(x.shape[1], tile_count(x.shape[0] * x.shape[1], x.shape[2]))
        self.needs_grad, self.keeps, self.stack = torch.is_grad_enabled(), False, HeadChunkResults.in_checkpoint()

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the module's forward in head chunks.

        Returns:
            (the output; the attention results of all head chunks for backward, or [] if a checkpoint stores the
            results).
        """
        out, results = torch.empty(0), list[Tensor]()
        for index in range(len(self.head_chunks)):
            chunk, replay = Slice(self.module, self.head_chunks, index, grad=False), HeadChunkReplay()
            self.keeps = replay.checkpoint_saves
            outer = current()
            replayed = outer is not None and outer.replays_next
            projected = chunk.blank(x) if replayed else chunk.project(x, self.tiles)
            attended = replay.run(chunk.attend, self.attention(x), projected)
            if self.stack is not None:
                self.stack.push(replay.tensors())
            elif self.needs_grad:
                results += replay.tensors()
            del replay
            for cut in self.tiles:
                tile = chunk.outward(attended[:, cut])
                if out.dim() == 1:
                    out = tile.new_empty(*x.shape[:2], tile.shape[-1])
                out[:, cut] = out[:, cut].add_(tile) if index else tile
        return out, results

    def attention(self, x: Tensor) -> Callable[..., tuple]:
        """Return a function that calls the forward of the module's class on a twin.

        Only the shape of x matters, since twins already contain the results of their projections.
        """
        return lambda twin: self.class_forward(twin, x, *self.args)

    def backward(self, x: Tensor, results: list[Tensor], grad: Tensor, wants_x: bool) -> Iterator[Tensor | None]:
        """Yield the gradient of the input x, followed by the gradients of the parameters.

        Args:
            x: The saved input.
            results: The attention results of all head chunks. The list is emptied, so that each result is freed after
                its head chunk.
            grad: The gradient of the module's output.
            wants_x: Whether x needs a gradient.
        """
        gradients, per_chunk = Gradients(), len(results) // len(self.head_chunks)
        dx: Tensor | None = None
        with self.conditions.restored():
            # casts that were cached without a graph must not be used in a graph
            torch.set_autocast_cache_enabled(False)
            for index in reversed(range(len(self.head_chunks))):
                chunk_results = tuple(results[index * per_chunk :]) if self.stack is None else self.stack.pop()
                del results[index * per_chunk :]
                dx = self.head_chunk_backward(self.chunk(index), x, chunk_results, grad, dx, gradients, wants_x)
                del chunk_results
                if self.plain and self.stack is not None and index == len(self.head_chunks) - 1:
                    self.without_outs(self.stack.on_device(), grad, gradients)
        yield dx
        yield from map(gradients.pop, self.parameters)

    def chunk(self, index: int) -> Slice:
        return Slice(self.module, self.head_chunks, index, grad=True)

    def without_outs(self, results: list[Any], grad: Tensor, gradients: Gradients) -> None:
        """Replace `out` by `delta = rowsum(do * out)` (B, s, heads) in the attention results of head chunks.

        Only delta is needed after the output projection's backward.
        """
        for index, (out, lse, *common) in enumerate(results):
            do = self.outward_backward(self.chunk(index), out.flatten(2), grad, gradients)
            results[index] = [rowsum(do.view(out.shape), out, lse.dtype), lse, *common]
            del out, do

    def outward_backward(self, chunk: Slice, attended: Tensor, grad: Tensor, gradients: Gradients | None) -> Tensor:
        """Return the gradient of a head chunk's attention output (B, s, heads x head_dim).

        Args:
            grad: The gradient of the module's output.
            gradients: The object to which the output projection's gradients are added, or None if they are already
                computed.
        """
        d_attended = torch.empty_like(attended)
        with (gradients or Gradients()).adding([] if gradients is None else chunk.leaves_out) as differentiate:
            for cut in self.tiles:
                with torch.enable_grad():
                    tile = attended[:, cut].detach().requires_grad_()
                    out = chunk.outward(tile)
                (d_attended[:, cut],) = differentiate([out], [tile], [grad[:, cut]])
        return d_attended

    def head_chunk_backward(
        self, chunk: Slice, x: Tensor, results: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None,
        gradients: Gradients, wants_x: bool,
    ) -> Tensor | None:  # fmt: skip
        """Add the gradients of one head chunk to `gradients`, and to dx.

        Args:
            results: The head chunk's attention results.
            dx: The gradient of x so far, or None for the first head chunk.

        Returns:
            The gradient of x, or None if x needs no gradient.
        """
        anchor = torch.zeros((), requires_grad=True, device=x.device)
        has_delta = is_delta(results[0])  # `without_outs` has replaced out
        with torch.enable_grad():
            projected = {
                name: _GraphStart.apply(anchor, tensor) for name, tensor in chunk.project(x, self.tiles).items()
            }
            # unlike tensors, edges keep no memory alive
            input_edges = [get_gradient_edge(tensor) for tensor in projected.values()]
            attended = HeadChunkReplay(results, self.keeps).run(chunk.attend, self.attention(x), projected)
        # results that contain only out, lse and possibly the keys' common part; see `without_outs`
        self.plain = len(results) == 2 + DENSE.has_common(x.dtype) and _is_viewed(attended, results[0])
        d_attended = self.outward_backward(chunk, attended, grad, None if has_delta else gradients)
        output_edges = [get_gradient_edge(attended)]
        del attended
        with gradients.adding(chunk.leaves_between) as differentiate:
            d_projected = differentiate(output_edges, input_edges, [d_attended])
        del d_attended, output_edges
        first, total = dx is None, torch.empty_like(x, dtype=self.dtype) if wants_x and dx is None else dx
        with gradients.adding(chunk.leaves_in) as differentiate:
            for cut in self.tiles:
                with torch.enable_grad():
                    tile = x[:, cut].detach().requires_grad_(wants_x)
                    outs = [projection(tile) for projection in chunk.inward.values()]
                tile_dx = differentiate(outs, [tile] if wants_x else [], [tensor[:, cut] for tensor in d_projected])
                if total is not None:
                    total[:, cut] = tile_dx[0] if first else total[:, cut].add_(tile_dx[0])
        return total


def _is_viewed(attended: Tensor, out: Tensor) -> bool:
    """Return whether the output projection's input is attention's output itself, possibly reshaped."""
    is_same = attended.numel() == out.numel() and attended.storage_offset() == out.storage_offset()
    return is_same and attended.is_contiguous() and attended.untyped_storage() is out.untyped_storage()


class _GraphStart(Function):
    """The identity of x at the start of a graph.

    Unlike a leaf's edge, the result's edge does not keep the tensor alive.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _ByHeadChunks(Function):
    """The module's output (B, s, d) as an autograd function that saves the input and the attention results."""

    @staticmethod
    def forward(ctx: Any, run: _HeadChunkForward, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run = run
        out, results = run.forward(x)
        ctx.save_for_backward(x, *results)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *results = ctx.saved_tensors
        return None, *ctx.run.backward(x, results, grad, ctx.needs_input_grad[1])

"""Make all ranks call the towers if any rank has images.

Ranks gather partitioned parameters (ZeRO-3, FSDP2) together, in both forward and backward. Ranks also reduce gradients
together (ZeRO-1, ZeRO-2, DDP), so every rank needs gradients for the same parameters. Before a forward, all ranks
therefore report whether they have images. If any rank has images, ranks without images encode the smallest image of
another rank. The extra image is encoded after the embeddings, like a rank's own images, and does not affect the loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ds_seqpar import SequenceParallel
from ds_seqpar.base.compat import tree_leaves, tree_map
from ds_seqpar.base.errors import InputError, SeqParError, as_seqpar_error
from ds_seqpar.guards.agreement import all_reduce_sum, maximum
from ds_seqpar.guards.waits import explaining_failure

from ..compat import ZERO_ID, has_zero_hooks
from ..context import LOCAL, current, entered
from .cuts import Cut, Images, features_in

CALL = "the forward of a model with images"


def join(
    owner: nn.Module, embedding: nn.Module, sp: SequenceParallel, cuts: Mapping[str, Cut], methods: tuple[str, ...]
) -> list[RemovableHandle]:
    """Hook the module that computes features so that all ranks call its towers together.

    Args:
        owner: The module whose forward takes images.
        embedding: The model's token embedding, which runs before the towers.
        sp: The SequenceParallel whose ranks share sequences.
        cuts: The division of each method, by name.
        methods: The names of the methods that compute features.
    """
    return [owner.register_forward_pre_hook(_Joining(embedding, sp, cuts, methods).before, with_kwargs=True)]


class _Joining:
    """The hook that makes ranks without images encode another rank's smallest image."""

    def __init__(
        self, embedding: nn.Module, sp: SequenceParallel, cuts: Mapping[str, Cut], methods: tuple[str, ...]
    ) -> None:
        self.embedding, self.sp, self.cuts, self.methods = embedding, sp, cuts, methods
        # each method's arguments for the smallest image, on the CPU and the same on all ranks
        self.smallest: dict[str, dict[str, Any]] = {}
        self.hook: RemovableHandle | None = None  # the hook of the embedding, for one call

    def before(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        is_partitioned = _is_partitioned(owner)
        if not self._joins(owner, is_partitioned):
            return
        inputs = dict(zip(inspect.signature(owner.forward).parameters, args, strict=False)) | kwargs
        given = {name: self._given(getattr(owner, name), inputs) for name in self.methods}
        lacks = [not given[name] and (name not in self.smallest) for name in self.methods]
        has_no_ids = not any(given.values()) and inputs.get("input_ids") is None
        world, ranks = self.sp.control_world, dist.get_world_size(self.sp.control_world)
        sums = all_reduce_sum(world, [*map(bool, given.values()), *lacks, has_no_ids], CALL)
        having = {name: int(x) for name, x in zip(self.methods, sums, strict=False) if x}
        if all(x == ranks for x in having.values()):
            return
        if (is_partitioned and len(having) > 1) or sums[-1]:
            told = " and ".join(f"{name} would be called on {x}" for name, x in having.items())
            raise InputError(
                f"partitioned parameters need images of one kind, or text as input_ids, on all {ranks} ranks in a "
                f"forward; got ranks of which {told}, make micro-batches alike"
            )
        for name in having:
            if sums[len(self.methods) + self.methods.index(name)]:
                self._tell_smallest(name, given[name])
        # runs after the hooks that gather the embedding's parameters, in backward too
        if lacking := [name for name in having if not given[name]]:
            self.hook = self.embedding.register_forward_hook(functools.partial(self._behind_embedding, owner, lacking))

    def _joins(self, owner: nn.Module, is_partitioned: bool) -> bool:
        """Return whether all ranks must call the same towers in a forward."""
        context = current()
        if is_partitioned:
            return context is None or context.mode != "decode"
        is_shared = context is not None and context.mode in ("whole", "sharded")
        return is_shared and self.sp.data_size > 1 and owner.training and torch.is_grad_enabled()

    @staticmethod
    def _given(method: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a method's arguments taken from a forward's inputs, or {} if the first argument is missing."""
        names = [*inspect.signature(method).parameters]
        return {} if inputs.get(names[0]) is None else {name: inputs[name] for name in names if name in inputs}

    def _tell_smallest(self, name: str, given: dict[str, Any]) -> None:
        """Broadcast and store the smallest image of the first rank that has images.

        The call is collective across all ranks.
        """
        world, told = self.sp.control_world, list[Any]([None])
        ranks, rank = dist.get_world_size(world), dist.get_rank(world)
        first = ranks - maximum(world, ranks - rank if given else 0, CALL)
        if rank == first:
            try:
                smallest = Images(given, self.cuts[name]).smallest() if name in self.cuts else given
                told = [tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, smallest)]
            except Exception as reason:  # sent to the other ranks, which are waiting for an image
                told = [as_seqpar_error("telling ranks without images the smallest one failed", reason)]
        with explaining_failure(CALL, world):
            dist.broadcast_object_list(told, group=world, group_src=first)
        if isinstance(told[0], SeqParError):
            raise told[0]
        self.smallest[name] = told[0]

    def _behind_embedding(
        self, owner: nn.Module, names: list[str], embedding: nn.Module, args: tuple, output: Tensor
    ) -> Any:
        assert self.hook is not None
        self.hook.remove()
        features: list[Any] = []
        for name in names:
            arguments = tree_map(lambda x: x.to(output.device) if isinstance(x, Tensor) else x, self.smallest[name])
            with entered(LOCAL):
                result = getattr(owner, name)(**arguments)
            # no rank runs backward through internal fields
            features += tree_leaves([result[field] for field in features_in(result)])
        return _Beside.apply(output, *(x for x in features if isinstance(x, Tensor) and x.requires_grad))


def _is_partitioned(module: nn.Module) -> bool:
    """Return whether ranks gather a module's parameters in its forward."""
    first = next(module.parameters())
    return isinstance(first, DTensor) or (hasattr(first, ZERO_ID) and has_zero_hooks(module))


class _Beside(Function):
    """The identity of x. All other inputs get zero gradients, so that backward runs through their graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)

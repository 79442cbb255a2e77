"""Moves tensors between global order and one rank's tokens, by the configured layout or a Placement; and averages
losses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .compiler.layout import multiple
from .compiler.masks import Mask
from .compiler.shards import EvenShards
from .config import SequenceParallelConfig
from .errors import InputError
from .placement import Placement, positions_held
from .runtime import inputs
from .runtime.agreement import agree, sums
from .runtime.backward import Calls
from .runtime.comm import TorchComm, explaining_failure
from .runtime.groups import Groups, check_thread

Vocabulary = tuple[int, int]  # (how many token ids a model embeds, how many classes its head has logits for)


class Sharding:
    """The methods of SequenceParallel that shard and gather tensors. SequenceParallel sets the attributes."""

    config: SequenceParallelConfig
    size: int
    rank: int
    data_rank: int
    data_size: int
    comm: TorchComm
    calls: Calls
    mask_users: weakref.WeakSet[Any]
    vocabularies: weakref.WeakKeyDictionary[Any, Callable[[Any], Vocabulary]]

    @property
    def groups(self) -> Groups:
        """This rank's process groups. Raises ConfigError in a thread that may not communicate."""
        check_thread()
        return self.comm.groups

    @property
    def keeps_masks(self) -> bool:
        """Whether `shard_batches` returns this rank's part of an attention_mask that has zeros."""
        return bool(self.mask_users)

    @property
    def control_world(self) -> dist.ProcessGroup:
        """The process group of all ranks, for CPU tensors."""
        return self.groups.world

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The largest vocabularies (of tokens, of labels) of the patched models now; None where no model is patched."""
        sizes = [read(model) for model, read in self.vocabularies.items()]
        return (max(tokens for tokens, _ in sizes), max(labels for _, labels in sizes)) if sizes else None

    @property
    def multiple(self) -> int:
        """All ranks share a sequence equally if its tokens are a multiple of this number."""
        return multiple(self.config.layout, self.size, self.config.ulysses)

    def place(self, seq: int, documents: tuple[int, ...] | None = None, *, causal: bool = True) -> Placement | None:
        """How a sequence of `seq` tokens is shared: None where the configured layout says so alone. documents: the
        lengths of those that lie end to end in it. Raises InputError. The same on every rank."""
        if type(seq) is not int or seq < 1:
            raise InputError(f"a sequence must have one token or more; got {seq!r}")
        if documents is None and seq % self.multiple == 0:
            return None
        lengths = (seq,) if documents is None else tuple(documents)
        starts = Mask.documents_of(lengths)
        mask = Mask(causal=causal, documents=starts)
        if sum(lengths) != seq:
            raise InputError(f"documents must have all {seq} tokens of the sequence; got {sum(lengths)}")
        from .compiler.balance import shards_of  # of lengths that ranks cannot share equally

        shards = shards_of(self.config.layout, lengths, self.size // self.config.ulysses)
        return Placement(mask, shards, restarts=starts)

    def position_ids(self, seq: int, placement: Placement | None = None) -> Tensor:
        """The positions of this rank's tokens of a sequence of `seq`, int64 (its tokens,), on the CPU. They are global;
        with a placement those in their documents, and `seq` is not read. Ranks may have some tokens more or less than
        others where seq / size is no whole number."""
        if placement is not None:
            return placement.position_ids(self.config.ulysses, self.rank)
        positions = self.held(seq, self.place(seq), self.rank)
        return positions.clone()  # the cached tensor must not be the caller's to change

    def shard(self, x: Tensor, dim: int, placement: Placement | None = None) -> Tensor:
        """This rank's tokens of a tensor that has the whole sequence, in global order, on `dim`. Local. placement: of
        a batch from `shard_batches` that has one; where rows lie end to end in it, x has (rows, tokens) on dim - 1 and
        dim. Raises InputError for a tensor of other tokens."""
        if placement is not None:
            _check_tokens(x, dim, placement)
        if placement is not None and placement.rows is not None:
            x = x.flatten(dim - 1, dim).unsqueeze(dim - 1)
        seq = x.shape[dim]
        return x.index_select(dim, self.held(seq, placement or self.place(seq), self.rank).to(x.device))

    def gather(self, x: Tensor, dim: int, placement: Placement | None = None) -> Tensor:
        """The inverse of `shard`: every rank gets the whole, in global order. Collective over the sequence's ranks.
        placement: that of the batch, where it has one; nothing in a tensor shows that it was left out.

        Raises InputError for a tensor that autograd follows: only the caller knows whether the gradients that ranks
        send it are parts to be summed or copies of one another.
        """
        shape = list(getattr(x, "shape", ()))
        other_dims = tuple(size for at, size in enumerate(shape) if type(dim) is not int or at != dim % len(shape))
        compared = {"shape beside the tokens": other_dims, "dtype": getattr(x, "dtype", type(x)), "dim": dim}
        if placement is not None:
            compared["placement"] = str(placement)
        error = self._gather_error(x, dim, placement)
        agree(self.groups.control, "tensor to gather", compared, error=error, call="gather")
        if placement is None:
            seq = x.shape[dim] * self.size
            if self.groups.control is not None:
                seq = int(sums(self.groups.control, [x.shape[dim]], "gather")[0])
            placement = self.place(seq)
            error = self._gather_error(x, dim, placement, seq)
            agree(self.groups.control, "tokens to gather", seq, error=error, call="gather")
        else:
            seq = placement.tokens
        orders = [self.held(seq, placement, rank) for rank in self.groups.sp_order]
        whole = assembled(x.movedim(dim, 0), orders, seq, self.groups.sp, "gather")
        whole = whole.movedim(0, dim)
        if placement is not None and placement.rows is not None:
            at = dim % whole.dim()
            whole = whole.unflatten(at, (placement.rows, -1)).squeeze(at - 1)
        return whole

    def held(self, seq: int, placement: Placement | None, rank: int) -> Tensor:
        """The positions of an SP rank's tokens in a sequence of `seq`, or in that of a placement, int64, on the CPU."""
        inner = self.size // self.config.ulysses
        shards = placement.shards if placement else EvenShards(self.config.layout, seq, inner)
        return positions_held(shards, self.config.ulysses, rank)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of x, any shape, over the ranks that share the sequence, for a loss that every one of them has whole,
        and that is not linear in tokens. The gradient that reaches this rank's x is `size` times the loss's own, which
        is right where gradients are averaged over ranks, as ZeRO and DDP do. Collective over the sequence's ranks.
        """
        if (group := self.groups.sp) is None:
            return x
        total = x.detach().clone()
        with explaining_failure("sum_over_ranks", group):
            dist.all_reduce(total, group=group)
        return total + self.size * (x - x.detach())

    def _gather_error(
        self, x: Tensor, dim: int, placement: Placement | None, seq: int | None = None
    ) -> InputError | None:
        if not isinstance(x, Tensor) or type(dim) is not int or not -x.dim() <= dim < x.dim():
            return InputError(
                f"gather needs a tensor and one of its dims; got {inputs.shape_of(x)} and dim {dim}, "
                "give it this rank's tokens and the dim that they are on"
            )
        if x.requires_grad and torch.is_grad_enabled():
            return InputError(
                "gather needs a tensor that autograd does not follow; got one with requires_grad, "
                "gather x.detach() or call it under torch.no_grad()"
            )
        if placement is None and seq is None:
            return None  # until all ranks' tokens are known
        wanted = len(self.held(seq or 0, placement, self.rank))
        if x.shape[dim] != wanted:
            return InputError(
                f"gather needs this rank's {wanted} tokens of {seq or 'the placement'}; got {x.shape[dim]}, give it "
                "what was sharded, and the placement that shard_batches returned where it did"
            )
        if placement is not None and placement.rows is not None and (dim % x.dim() == 0 or x.shape[dim - 1] != 1):
            return InputError(
                "gather of rows that lie end to end needs a tensor with 1 before the tokens; got "
                f"{inputs.shape_of(x)} and dim {dim}, give it (1, tokens, ...) as sharded tensors are"
            )
        return None


def assembled(local: Tensor, orders: Sequence[Tensor], seq: int, group: dist.ProcessGroup | None, call: str) -> Tensor:
    """The whole tensor (seq, ...) of all members' parts. local (own tokens, ...): this rank's part. orders: for each
    member the positions of its tokens. Collective over the group; None: this rank alone. call: the user's call, for
    errors."""
    longest = max(len(order) for order in orders)
    parts = local.new_empty(len(orders), longest, *local.shape[1:])
    if group is None:
        parts[0].copy_(local)
    else:
        if len(local) < longest:  # all_gather needs parts of one size
            local = torch.cat([local, local.new_zeros(longest - len(local), *local.shape[1:])])
        with explaining_failure(call, group):
            dist.all_gather(list(parts.unbind()), local.contiguous(), group=group)
    whole = local.new_empty(seq, *local.shape[1:])
    for part, order in zip(parts, orders, strict=True):
        whole[order.to(whole.device)] = part[: len(order)]
    return whole


def _check_tokens(x: Tensor, dim: int, placement: Placement) -> None:
    """Raises InputError unless a tensor has all tokens of the placement, in the placement's rows."""
    wanted: tuple[int, ...] = (placement.tokens,)
    if placement.rows is not None:
        wanted = placement.rows, placement.tokens // placement.rows
    axes = [dim - len(wanted) + 1 + at for at in range(len(wanted))]
    if dim % x.dim() < len(wanted) - 1 or tuple(x.shape[axis] for axis in axes) != wanted:
        raise InputError(
            f"shard needs the {' x '.join(map(str, wanted))} tokens of the placement; got {inputs.shape_of(x)} and dim "
            f"{dim}, give it a tensor of the batch that the placement was returned for"
        )


# ---- losses


def mean_of(groups: Groups, given: object) -> tuple[float, Tensor]:
    """(the mean of all ranks' losses, in double precision; the mean of this rank's losses in their own dtype, with
    their graph). Collective. Raises InputError or DisagreementError on all ranks."""
    losses, error = _losses(given)
    own = torch.zeros((), device="cpu") if error else torch.stack([loss.reshape(()) for loss in losses]).mean()
    exact = 0.0 if error else float(torch.stack([x.detach().double().cpu().reshape(()) for x in losses]).mean())
    number = {"number of losses": len(losses)}
    agree(groups.world, "losses", number, error=error, after=groups.control, call="mean_loss")
    return sums(groups.world, [exact], "mean_loss")[0] / dist.get_world_size(), own


def _losses(given: object) -> tuple[list[Tensor], InputError | None]:
    wanted = (
        "mean_loss needs what the model returned as loss, a floating point tensor of one element, or a list of such"
    )
    losses: list[Any] = list(given) if isinstance(given, Iterable) and getattr(given, "dim", lambda: 1)() else [given]
    if not losses:
        return losses, InputError(f"{wanted}; got none")
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            return losses, InputError(f"{wanted}; got {what}")
    return losses, None

"""Moves tensors between global order and one rank's tokens, by the configured layout or a BatchLayout; and averages
losses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..compiler.sharding.layout import multiple
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import EvenShards
from ..config.settings import SequenceParallelConfig
from ..errors import InputError, as_seqpar_error, whole_number
from ..runtime import input_checks
from ..runtime.agreement import all_reduce_sum, assert_ranks_agree
from ..runtime.backward import Calls
from ..runtime.comm import TorchComm, explaining_failure
from ..runtime.groups import Groups, check_thread
from .batch_layout import BatchLayout, positions_held

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
        """Whether `shard_batches` returns this rank's shard of an attention_mask that has zeros."""
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

    def place(self, seq: int, documents: tuple[int, ...] | None = None, *, causal: bool = True) -> BatchLayout | None:
        """How a sequence of `seq` tokens is shared: None where the configured layout says so alone. documents: the
        lengths of those that lie end to end in it. Raises InputError. The same on every rank."""
        count = whole_number(seq)
        if count is None or count < 1:
            raise InputError(f"a sequence must have a whole number of tokens, one token or more; got {seq!r:.80}")
        if documents is None and count % self.multiple == 0:
            return None
        starts = Mask.documents_of((count,) if documents is None else documents)
        lengths = (count,) if documents is None else tuple(map(int, documents))
        mask = Mask(causal=causal, documents=starts)
        if sum(lengths) != count:
            raise InputError(f"documents must have all {count} tokens of the sequence; got {sum(lengths)}")
        from ..compiler.sharding.balance import shards_of  # of lengths that ranks cannot share equally

        shards = shards_of(self.config.layout, lengths, self.size // self.config.ulysses)
        return BatchLayout(mask, shards, restarts=starts)

    def position_ids(self, seq: int, placement: BatchLayout | None = None) -> Tensor:
        """The positions of this rank's tokens of a sequence of `seq`, int64 (its tokens,), on the CPU. They are global;
        with a placement those in their documents, and `seq` is not read. Ranks may have some tokens more or less than
        others where seq / size is no whole number."""
        if placement is not None:
            return placement.position_ids(self.config.ulysses, self.rank)
        positions = self.held(_as_int(seq), self.place(seq), self.rank)
        return positions.clone()  # the cached tensor must not be the caller's to change

    def shard(self, x: Tensor, dim: int, placement: BatchLayout | None = None) -> Tensor:
        """This rank's tokens of a tensor that has the whole sequence, in global order, on `dim`. Local. placement: of
        a batch from `shard_batches` that has one; where rows lie end to end in it, x has (rows, tokens) on dim - 1 and
        dim. Raises InputError for a tensor of other tokens."""
        dim = _as_int(dim)
        if not _has_dim(x, dim):
            raise InputError(
                f"shard needs a tensor and one of its dims; got {input_checks.shape_of(x)} and dim {dim!r}"
            )
        if placement is not None:
            _check_tokens(x, dim, placement)
        if placement is not None and placement.rows is not None:
            x = x.flatten(dim - 1, dim).unsqueeze(dim - 1)
        seq = x.shape[dim]
        own = self.held(seq, placement or self.place(seq), self.rank).to(x.device)
        return x[None].index_select(dim % x.dim() + 1, own)[0]  # of one dim torch has none for uint16, 32 and 64

    def gather(self, x: Tensor, dim: int, placement: BatchLayout | None = None) -> Tensor:
        """The inverse of `shard`: every rank gets the whole, in global order. Collective over the sequence's ranks.
        placement: that of the batch, where it has one; nothing in a tensor shows that it was left out.

        Raises InputError for a tensor that autograd follows: only the caller knows whether the gradients that ranks
        send it are parts to be summed or copies of one another.
        """
        dim = _as_int(dim)
        compared: dict[str, object] = {"dim": dim}
        error = self._gather_error(x, dim, placement)
        if error is None:
            other_dims = (*x.shape[: dim % x.dim()], *x.shape[dim % x.dim() + 1 :])
            compared |= {"shape beside the tokens": other_dims, **_kind(x)}
        if placement is not None:
            compared["placement"] = str(placement)
        assert_ranks_agree(self.groups.control, "tensor to gather", compared, error=error, call="gather")
        if placement is None:
            seq = x.shape[dim] * self.size
            if self.groups.control is not None:
                seq = int(all_reduce_sum(self.groups.control, [x.shape[dim]], "gather")[0])
            placement = self.place(seq)
            error = self._gather_error(x, dim, placement, seq)
            assert_ranks_agree(self.groups.control, "tokens to gather", seq, error=error, call="gather")
        else:
            seq = placement.tokens
        orders = [self.held(seq, placement, rank) for rank in self.groups.sp_order]
        whole = assembled(x.movedim(dim, 0), orders, seq, self.group_for(x), "gather")
        whole = whole.movedim(0, dim)
        if placement is not None and placement.rows is not None:
            at = dim % whole.dim()
            whole = whole.unflatten(at, (placement.rows, -1)).squeeze(at - 1)
        return whole

    def held(self, seq: int, placement: BatchLayout | None, rank: int) -> Tensor:
        """The positions of an SP rank's tokens in a sequence of `seq`, or in that of a placement, int64, on the CPU."""
        inner = self.size // self.config.ulysses
        shards = placement.shards if placement else EvenShards(self.config.layout, seq, inner)
        return positions_held(shards, self.config.ulysses, rank)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of x, any shape, over the ranks that share the sequence, for a loss that every one of them has whole,
        and that is not linear in tokens. The gradient that reaches this rank's x is `size` times the loss's own, which
        is right where gradients are averaged over ranks, as ZeRO and DDP do. Backward communicates nothing.

        Collective over the sequence's ranks. Raises InputError or DisagreementError on all of them for other shapes or
        dtypes on some, and for a dtype that has no sums between processes.
        """
        error = _tensor_error("sum_over_ranks", x) or _sum_error(x)
        compared = {} if error else {"shape": tuple(x.shape), **_kind(x)}
        assert_ranks_agree(
            self.groups.control, "tensor to sum over ranks", compared, error=error, call="sum_over_ranks"
        )
        if (group := self.group_for(x)) is None:
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with explaining_failure("sum_over_ranks", group):
            dist.all_reduce(total, group=group)
        return WithValue.apply(x, total, self.size)

    def group_for(self, x: Tensor) -> dist.ProcessGroup | None:
        """The group of the sequence's ranks that carries tensors of x's device; None where this rank is alone."""
        return self.groups.control if x.device.type == "cpu" else self.groups.sp

    def _gather_error(
        self, x: Tensor, dim: int, placement: BatchLayout | None, seq: int | None = None
    ) -> InputError | None:
        if error := _tensor_error("gather", x):
            return error
        if not _has_dim(x, dim) or not isinstance(placement, BatchLayout | None):
            got = "" if placement is None else f" and placement {type(placement).__name__}"
            return InputError(
                f"gather needs a tensor and one of its dims; got {input_checks.shape_of(x)} and dim {dim!r}{got}, "
                "give it this rank's tokens, the dim that they are on, and their batch's placement where it has one"
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
                f"{input_checks.shape_of(x)} and dim {dim}, give it (1, tokens, ...) as sharded tensors are"
            )
        return None


def assembled(local: Tensor, orders: Sequence[Tensor], seq: int, group: dist.ProcessGroup | None, call: str) -> Tensor:
    """The whole tensor (seq, ...) of all Ulysses ranks' parts. local (local tokens, ...): this rank's shard. orders:
    for each Ulysses rank the positions of its tokens. Collective over the group; None: this rank alone. call: the
    user's call, for errors."""
    dtype, longest = local.dtype, max(len(order) for order in orders)
    local = _viewed(local.resolve_conj().resolve_neg(), CARRIERS[dtype.itemsize])
    parts = local.new_empty(len(orders), longest, *local.shape[1:])
    if group is None:
        parts[0].copy_(local)
    else:
        if len(local) < longest:  # all_gather needs parts of one size
            local = torch.cat([local, local.new_zeros(longest - len(local), *local.shape[1:])])
        with explaining_failure(call, group):
            received = list(parts.flatten(1).view(torch.uint8).unbind())
            dist.all_gather(received, local.flatten().view(torch.uint8), group=group)
    whole = local.new_empty(seq, *local.shape[1:])
    for part, order in zip(parts, orders, strict=True):
        whole[order.to(whole.device)] = part[: len(order)]
    return _viewed(whole, dtype)


# bytes of an element -> the dtype as which it is moved: transports and torch's indexing do not know every dtype
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SUMMED_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)  # that every transport adds up


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as elements of another dtype of as many bytes."""
    return x.flatten().view(dtype).view(x.shape)


def _as_int(x: Any) -> Any:
    """A whole number of numpy or torch as an int; anything else as it is."""
    number = whole_number(x)
    return x if number is None else number


def _has_dim(x: object, dim: object) -> bool:
    return isinstance(x, Tensor) and type(dim) is int and -x.dim() <= dim < x.dim()


def _kind(x: Tensor) -> dict[str, object]:
    return {"dtype": x.dtype, "device": x.device.type}


def _tensor_error(call: str, x: object) -> InputError | None:
    """The error for what has no elements that could be sent; None for a tensor that has them."""
    got = input_checks.unreadable(x) or ("" if isinstance(x, Tensor) else type(x).__name__)
    if isinstance(x, Tensor) and not got:
        got = "a quantized one" if x.is_quantized else "one on the meta device" if x.is_meta else ""
    return InputError(f"{call} needs a dense tensor of this rank's own; got {got}") if got else None


def _sum_error(x: Tensor) -> InputError | None:
    if x.dtype in SUMMED_INTEGERS or (x.dtype.itemsize > 1 and (x.is_floating_point() or x.is_complex())):
        return None
    return InputError(f"sum_over_ranks needs a dtype that can be added up; got {x.dtype}, convert it, as by x.float()")


class WithValue(Function):
    """(x, value, factor) -> value, whose gradient reaches x times the factor: for numbers that other ranks have a part
    in. x + (value - x.detach()) would be NaN where x is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None


def _check_tokens(x: Tensor, dim: int, placement: BatchLayout) -> None:
    """Raises InputError unless a tensor has all tokens of the placement, in the placement's rows."""
    wanted: tuple[int, ...] = (placement.tokens,)
    if placement.rows is not None:
        wanted = placement.rows, placement.tokens // placement.rows
    axes = [dim - len(wanted) + 1 + at for at in range(len(wanted))]
    if dim % x.dim() < len(wanted) - 1 or tuple(x.shape[axis] for axis in axes) != wanted:
        raise InputError(
            f"shard needs the {' x '.join(map(str, wanted))} tokens of the placement; got {input_checks.shape_of(x)} "
            f"and dim {dim}, give it a tensor of the batch that the placement was returned for"
        )


# ---- losses


def mean_of(groups: Groups, given: object) -> tuple[float, Tensor]:
    """(the mean of all ranks' losses, in double precision; the mean of this rank's losses in their own dtype, with
    their graph). Collective. Raises InputError or DisagreementError on all ranks."""
    losses, own, exact, error = [], torch.zeros((), device="cpu"), 0.0, None
    try:
        losses = _losses(given)
        own = torch.stack([loss.reshape(()) for loss in losses]).mean()
        exact = float(torch.stack([x.detach().double().cpu().reshape(()) for x in losses]).mean())
    except Exception as reason:  # of a generator of losses, of tensors on several devices
        error = as_seqpar_error("averaging losses failed", reason)
    number = {"number of losses": len(losses)}
    assert_ranks_agree(groups.world, "losses", number, error=error, after=groups.control, call="mean_loss")
    return all_reduce_sum(groups.world, [exact], "mean_loss")[0] / dist.get_world_size(), own


def _losses(given: object) -> list[Tensor]:
    wanted = (
        "mean_loss needs what the model returned as loss, a floating point tensor of one element, or a list of such"
    )
    several = isinstance(given, Iterable) and not isinstance(given, Mapping) and getattr(given, "dim", lambda: 1)()
    losses: list[Any] = list(given) if several else [given]  # type: ignore[call-overload]
    if not losses:
        raise InputError(f"{wanted}; got none")
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"{wanted}; got {what}")
    return losses

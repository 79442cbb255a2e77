"""Shard tensors to one rank's tokens, gather tensors in global order, and average losses across ranks.

The configured layout or a `BatchLayout` assigns tokens to ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..base.errors import InputError, SeqParError, whole_number
from ..base.on_devices import DeviceCache
from ..core.compiler.sharding.layout import Topology, multiple
from ..core.compiler.sharding.masks import Mask
from ..core.compiler.sharding.shards import EvenShards, UnevenShards
from ..core.runtime import operator
from ..core.runtime.groups import Groups
from ..core.runtime.transport import ALL_GATHER, TorchComm
from ..core.settings import SequenceParallelConfig
from ..guards.agreement import all_reduce_sum, together
from ..guards.backward_order import Calls
from ..guards.consistency import ConsistencyChecker
from ..guards.one_thread import check_thread
from ..guards.waits import explaining_failure
from .batch_layout import EQUAL, BatchLayout, Placement, positions_held
from .inputs import INPUTS, InputSpec, joined
from .unused_sharding import UnusedSharding

Vocabulary = tuple[int, int]  # (number of token ids that a model embeds, number of classes of the model's head)


class Sharding:
    """Assignment of a sequence's tokens to this rank, with methods that shard and gather tensors.

    Args:
        config: The resolved settings.
        topology: Named axes that span all ranks in the job.
        comm: Transport with this rank's process groups.
        calls: Counter for calls of attention and of stateful layers.
        checker: Checker that compares calls across the ranks that share a sequence.

    Attributes:
        size: Number of ranks that share a sequence.
        rank: Index of this rank among the ranks that share its sequence.
        data_size: Number of groups of ranks that share a sequence.
        data_rank: Index of this rank's group.
        layout_tensors: Cache, for each device, of tensors that depend only on a batch's layout.
        unused: Detector of models that do not use the sharded tensors.
        mask_users: Patched models whose loss uses an attention_mask to count tokens.
        vocabularies: Maps each patched model to a function that returns the model's numbers of token ids and labels.
        inputs: Maps each patched model to the declarations of its inputs.
        ulysses_sizes: Ulysses sizes that a batch may have.
        shards_of: Maps a pack's document lengths to the pack's own shards, which may have another Ulysses size.
    """

    def __init__(
        self, config: SequenceParallelConfig, topology: Topology, comm: TorchComm, calls: Calls,
        checker: ConsistencyChecker,
    ) -> None:  # fmt: skip
        self.config, self.comm, self.calls, self.checker = config, comm, calls, checker
        rank, self.size, self.data_size = dist.get_rank(), config.size, topology.size("data")
        self.rank = topology.index(rank, "ulysses", *topology.cp_axes)
        self.data_rank = topology.index(rank, "data")
        self.layout_tensors, self.unused = DeviceCache(), UnusedSharding(calls)
        self.mask_users = weakref.WeakSet[Any]()
        self.vocabularies = weakref.WeakKeyDictionary[Any, Callable[[Any], Vocabulary]]()
        self.inputs = weakref.WeakKeyDictionary[Any, Mapping[str, InputSpec]]()
        self.ulysses_sizes, self.shards_of = [config.ulysses], dict[tuple[int, ...], UnevenShards]()

    def __deepcopy__(self, memo: dict) -> Sharding:
        return self  # process groups cannot be copied

    @property
    def groups(self) -> Groups:
        """This rank's process groups. Access from a thread that may not communicate raises ConfigError."""
        check_thread()
        return self.comm.groups

    @property
    def keeps_masks(self) -> bool:
        """Whether `shard_batches` returns this rank's shard of an attention_mask with zeros."""
        return bool(self.mask_users)

    @property
    def control_world(self) -> dist.ProcessGroup:
        """The process group of all ranks for CPU tensors."""
        return self.groups.world

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The largest vocabulary sizes (tokens, labels) of the patched models, or None if no model is patched."""
        sizes = [read(model) for model, read in self.vocabularies.items()]
        return (max(tokens for tokens, _ in sizes), max(labels for _, labels in sizes)) if sizes else None

    def inputs_with(self, declared: Mapping[str, InputSpec] | None = None) -> dict[str, InputSpec]:
        """Merge the input declarations of all patched models and of one call.

        Raises:
            ConfigError: Two declarations of the same name differ.
        """
        return joined(INPUTS, *self.inputs.values(), declared)

    @property
    def multiple(self) -> int:
        """The number that must divide a sequence length so that all ranks have the same number of tokens."""
        return multiple(self.config.layout, self.size, self.config.ulysses)

    def place(
        self, seq: int, documents: tuple[int, ...] | None = None, *, causal: bool = True, parents: tuple[int, ...] = ()
    ) -> BatchLayout | None:
        """Return the layout of a sequence if the configured layout alone does not determine the sharding.

        All ranks compute the same layout.

        Args:
            seq: Number of tokens in the sequence.
            documents: Lengths in tokens of the concatenated documents in the sequence. None means a single document.
            causal: Whether attention is causal.
            parents: Number of each document's parent, as in `Mask`.

        Returns:
            The sequence's layout, or None if there are no documents and `multiple` divides `seq`.

        Raises:
            InputError: `seq` is not a positive integer, `documents` do not add up to `seq`, or the parents are not
                valid for a `Mask`.
        """
        count = whole_number(seq)
        if count is None or count < 1:
            raise InputError(f"a sequence must have a whole number of tokens, one token or more; got {seq!r:.80}")
        lengths = (count,) if documents is None else tuple(map(int, documents))
        shards = None if parents else self.shards_of.get(lengths)
        if documents is None and not parents and count % self.multiple == 0 and shards is None:
            return None
        starts = Mask.documents_of(lengths if documents is None else documents)
        mask = Mask(causal=causal, documents=starts, parents=parents)
        if sum(lengths) != count:
            raise InputError(f"documents must have all {count} tokens of the sequence; got {sum(lengths)}")
        from .balance import shards_of  # used for lengths that ranks cannot share equally

        if shards is None:
            shards = shards_of(self.config.layout, lengths, self.size // self.config.ulysses, mask.parents)
        return BatchLayout(mask, shards, restarts=starts)

    def ulysses(self, placement: BatchLayout | None) -> int:
        """Return the Ulysses size for a batch."""
        return self.config.ulysses if placement is None else self.size // placement.shards.size

    def position_ids(self, seq: int, placement: Placement | None = None) -> Tensor:
        """Return the positions of this rank's tokens in a sequence.

        Args:
            seq: Number of tokens in the sequence. `seq` is ignored if a placement is passed.
            placement: The batch's placement, as returned by `shard_batches`.

        Returns:
            An int64 CPU tensor of shape (local tokens,) with global positions, or with positions within documents if a
            placement is passed. If `size` does not divide `seq`, ranks have different numbers of tokens.
        """
        self.unused.read()
        return self._position_ids(seq, layout_of(placement))

    def _position_ids(self, seq: int, placement: BatchLayout | None) -> Tensor:
        if placement is not None:
            return placement.position_ids(self.ulysses(placement), self.rank)
        positions = self.held(_as_int(seq), self.place(seq), self.rank)
        return positions.clone()  # the caller must not change the cached tensor

    def local_positions(self, layout: int | BatchLayout, device: torch.device | str) -> Tensor:
        """Return the position_ids of this rank's tokens as an int64 tensor of shape (local tokens,) on a device.

        The host does not wait for the device. The returned tensor is cached and must not be modified.

        Args:
            layout: Number of tokens in a sequence that is sharded as configured, or the batch's `BatchLayout`.
            device: Device of the returned tensor.
        """
        return self.layout_tensors.get(
            ("position_ids", layout),
            device,
            lambda: self._position_ids(layout, None) if isinstance(layout, int) else self._position_ids(0, layout),
        )

    def shard(self, x: Tensor, dim: int, placement: Placement | None = None) -> Tensor:
        """Return this rank's part of a tensor that covers the whole sequence.

        No communication takes place.

        Args:
            x: Tensor (..., seq, ...) in global order, or (..., rows, seq, ...) with a placement that concatenates rows.
            dim: Dimension of the tokens. If rows are concatenated, the preceding dimension contains the rows.
            placement: The batch's placement, if `shard_batches` returned one.

        Returns:
            Tensor (..., local tokens, ...), or (..., 1, local tokens, ...) if rows are concatenated.

        Raises:
            InputError: `x` lacks the dimension, or does not have the tokens of the placement.
        """
        dim, layout = _as_int(dim), layout_of(placement)
        if not _has_dim(x, dim):
            raise InputError(f"shard needs a tensor and one of its dims; got {operator.shape_of(x)} and dim {dim!r}")
        if layout is not None:
            _check_tokens(x, dim, layout)
        if layout is not None and layout.rows is not None:
            x = x.flatten(dim - 1, dim).unsqueeze(dim - 1)
        seq = x.shape[dim]
        # torch cannot select from 1-d uint16, 32 and 64
        return x[None].index_select(dim % x.dim() + 1, self._held_here(seq, layout, x.device))[0]

    def gather(self, x: Tensor, dim: int, placement: Placement | None = None) -> Tensor:
        """Return the whole tensor in global order on every rank, the inverse of `shard`.

        All ranks that share the sequence must call this function.

        Args:
            x: This rank's tokens (..., local tokens, ...), or (..., 1, local tokens, ...) if rows are concatenated.
            dim: Dimension of the tokens.
            placement: The batch's placement, if any. A missing placement cannot be detected from the tensor.

        Returns:
            Tensor (..., seq, ...), or (..., rows, seq, ...) if rows are concatenated.

        Raises:
            InputError: `x` does not have this rank's tokens, or requires grad. Gradients are not supported because
                `gather` cannot determine whether the ranks' gradients must be summed or are copies of each other.
            DisagreementError: Raised on all ranks if ranks pass different dims, shapes, dtypes, devices or placements.
        """
        dim, layout = _as_int(dim), layout_of(placement)
        compared: dict[str, object] = {"dim": dim}
        error = self._gather_error(x, dim, layout)
        if error is None:
            other_dims = (*x.shape[: dim % x.dim()], *x.shape[dim % x.dim() + 1 :])
            compared |= {"shape beside the tokens": other_dims, **_dtype_and_device(x)}
        if layout is not None:
            compared["placement"] = str(layout)
        # without a layout, the length can only be determined from all ranks together
        compare = self.checker.check_now if layout is None else self.checker.check_deferred
        compare("tensor to gather", compared, error=error, call="gather")
        if layout is None:
            seq = x.shape[dim] * self.size
            if self.groups.control is not None:
                seq = int(all_reduce_sum(self.groups.control, [x.shape[dim]], "gather")[0])
            layout = self.place(seq)
            error = self._gather_error(x, dim, layout, seq)
            self.checker.check_now("tokens to gather", seq, error=error, call="gather")
        else:
            seq = layout.tokens
        order = self.layout_tensors.get(
            ("whole", seq if layout is None else layout),
            x.device,
            lambda: order_of([self.held(seq, layout, rank) for rank in self.groups.sp_order]),
        )
        whole = assembled(x.movedim(dim, 0), order, self.group_for(x), "gather")
        whole = whole.movedim(0, dim)
        if layout is not None and layout.rows is not None:
            token_dim = dim % whole.dim()
            whole = whole.unflatten(token_dim, (layout.rows, -1)).squeeze(token_dim - 1)
        return whole

    def held(self, seq: int, placement: BatchLayout | None, rank: int) -> Tensor:
        """Return the positions of an SP rank's tokens, for a length or a placement, as an int64 CPU tensor."""
        ulysses = self.ulysses(placement)
        shards = placement.shards if placement else EvenShards(self.config.layout, seq, self.size // ulysses)
        return positions_held(shards, ulysses, rank)

    def _held_here(self, seq: int, placement: BatchLayout | None, device: torch.device | str) -> Tensor:
        key = "held", seq if placement is None else placement
        return self.layout_tensors.get(key, device, lambda: self.held(seq, placement or self.place(seq), self.rank))

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor across the ranks that share the sequence.

        Use the sum for a loss that every rank needs in full and that is not linear in tokens. The gradient of this
        rank's `x` is `size` times the gradient of the loss, which is correct if gradients are averaged across ranks, as
        in ZeRO and DDP. The backward pass does not communicate. All ranks that share the sequence must call this
        function.

        Args:
            x: Tensor of any shape, with the same shape on all ranks.

        Returns:
            The sum, with the shape and dtype of `x`.

        Raises:
            InputError: The dtype cannot be summed across processes.
            DisagreementError: Raised on all ranks if shapes, dtypes or devices differ.
        """
        error = _tensor_error("sum_over_ranks", x) or _sum_error(x)
        compared = {} if error else {"shape": tuple(x.shape), **_dtype_and_device(x)}
        self.checker.check_deferred("tensor to sum over ranks", compared, error=error, call="sum_over_ranks")
        if (group := self.group_for(x)) is None:
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with explaining_failure("sum_over_ranks", group):
            dist.all_reduce(total, group=group)
        return WithValue.apply(x, total, self.size)

    def group_for(self, x: Tensor) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that share the sequence, for tensors on the device of `x`, or None for
        a single rank.
        """
        return self.groups.control if x.device.type == "cpu" else self.groups.sp

    def _gather_error(
        self, x: Tensor, dim: int, placement: BatchLayout | None, seq: int | None = None
    ) -> InputError | None:
        if error := _tensor_error("gather", x):
            return error
        if not _has_dim(x, dim) or not isinstance(placement, BatchLayout | None):
            got = "" if placement is None else f" and placement {type(placement).__name__}"
            return InputError(
                f"gather needs a tensor and one of its dims; got {operator.shape_of(x)} and dim {dim!r}{got}, "
                "give it this rank's tokens, the dim that they are on, and their batch's placement where it has one"
            )
        if x.requires_grad and torch.is_grad_enabled():
            return InputError(
                "gather needs a tensor that autograd does not follow; got one with requires_grad, "
                "gather x.detach() or call it under torch.no_grad()"
            )
        if placement is None and seq is None:
            return None  # the other ranks' token counts are still unknown
        expected = len(self._held_here(seq or 0, placement, "cpu"))
        if x.shape[dim] != expected:
            return InputError(
                f"gather needs this rank's {expected} tokens of {seq or 'the placement'}; got {x.shape[dim]}, give it "
                "what was sharded, and the placement that shard_batches returned where it did"
            )
        if placement is not None and placement.rows is not None and (dim % x.dim() == 0 or x.shape[dim - 1] != 1):
            return InputError(
                "gather of rows that lie end to end needs a tensor with 1 before the tokens; got "
                f"{operator.shape_of(x)} and dim {dim}, give it (1, tokens, ...) as sharded tensors are"
            )
        return None


def layout_of(placement: Any) -> Any:
    """Return the `BatchLayout` from a batch's "placement", or None for `EQUAL`."""
    return None if placement is EQUAL else placement


class WholeOrder(NamedTuple):
    """The index that assembles a whole tensor from all ranks' shards."""

    places: Tensor  # int64: index of each token in the concatenated shards, which are padded to the longest shard
    ranks: int
    longest: int  # number of tokens in the longest shard


def order_of(positions: Sequence[Tensor]) -> WholeOrder:
    """Return the order in which shards form the whole tensor, given the positions of each rank's tokens."""
    longest = max(map(len, positions))
    places = torch.empty(sum(map(len, positions)), dtype=torch.int64, device="cpu")
    for rank, held in enumerate(positions):
        places[held] = torch.arange(rank * longest, rank * longest + len(held), device="cpu")
    return WholeOrder(places, len(positions), longest)


def assembled(local: Tensor, order: WholeOrder, group: dist.ProcessGroup | None, call: str) -> Tensor:
    """Assemble the whole tensor (seq, ...) from the shards of all ranks.

    All ranks in the group must call this function.

    Args:
        local: This rank's shard (local tokens, ...).
        order: Order of the ranks' shards, on the device of `local`.
        group: Group of the ranks that have shards; None for a single rank.
        call: Name of the user's call in errors.
    """
    dtype = local.dtype
    local = _viewed(local.resolve_conj().resolve_neg(), CARRIERS[dtype.itemsize])
    if len(local) < order.longest:  # all_gather needs shards of one size
        local = torch.cat([local, local.new_zeros(order.longest - len(local), *local.shape[1:])])
    shards = local.unsqueeze(0)
    if group is not None:
        shards = local.new_empty(order.ranks, *local.shape)
        with explaining_failure(call, group):
            sent = local.contiguous().flatten().view(torch.uint8)
            ALL_GATHER(shards.flatten().view(torch.uint8), sent, group=group)
    return _viewed(shards.flatten(0, 1).index_select(0, order.places), dtype)


# dtype used to move elements of each byte size, since transports and torch's indexing do not support every dtype
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SUMMED_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)  # dtypes that every transport can sum


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret a tensor's bits as another dtype of the same size."""
    return x.flatten().view(dtype).view(x.shape)


def _as_int(x: Any) -> Any:
    number = whole_number(x)
    return x if number is None else number


def _has_dim(x: object, dim: object) -> bool:
    return isinstance(x, Tensor) and type(dim) is int and -x.dim() <= dim < x.dim()


def _dtype_and_device(x: Tensor) -> dict[str, object]:
    return {"dtype": x.dtype, "device": x.device.type}


def _tensor_error(call: str, x: object) -> InputError | None:
    """Return an error if a value's elements cannot be sent, or None for a valid tensor."""
    got = operator.unreadable(x) or ("" if isinstance(x, Tensor) else type(x).__name__)
    if isinstance(x, Tensor) and not got:
        got = "a quantized one" if x.is_quantized else "one on the meta device" if x.is_meta else ""
    return InputError(f"{call} needs a dense tensor of this rank's own; got {got}") if got else None


def _sum_error(x: Tensor) -> InputError | None:
    if x.dtype in SUMMED_INTEGERS or (x.dtype.itemsize > 1 and (x.is_floating_point() or x.is_complex())):
        return None
    return InputError(f"sum_over_ranks needs a dtype that can be added up; got {x.dtype}, convert it, as by x.float()")


class WithValue(Function):
    """Replace the value of `x` with `value`, and scale the gradient of `x` by a factor.

    The new value contains contributions from other ranks. The formula `x + (value - x.detach())` would return NaN if
    `x` is infinite.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None


def _check_tokens(x: Tensor, dim: int, placement: BatchLayout) -> None:
    """Raise InputError unless a tensor has all of the placement's rows and tokens."""
    expected: tuple[int, ...] = (placement.tokens,)
    if placement.rows is not None:
        expected = placement.rows, placement.tokens // placement.rows
    axes = [dim - len(expected) + 1 + offset for offset in range(len(expected))]
    if dim % x.dim() < len(expected) - 1 or tuple(x.shape[axis] for axis in axes) != expected:
        raise InputError(
            f"shard needs the {' x '.join(map(str, expected))} tokens of the placement; got {operator.shape_of(x)} "
            f"and dim {dim}, give it a tensor of the batch that the placement was returned for"
        )


# ---- losses


def mean_of(groups: Groups, losses: object, error: SeqParError | None = None) -> tuple[float, Tensor]:
    """Return the mean loss over all ranks, and the mean of this rank's losses with its autograd graph.

    Every rank in the job must call this function.

    Args:
        groups: This rank's groups.
        losses: A floating-point tensor with one element, or an iterable with one such tensor per micro-batch.
        error: This rank's error, if any. If one rank has an error, all ranks raise an error.

    Returns:
        The mean over all ranks, computed in fp64, and the mean of this rank's losses as a 0-dim tensor in their dtype.

    Raises:
        InputError: Raised on a rank on which `losses` has any other type or shape.
        DisagreementError: Raised on all other ranks, or on all ranks if the numbers of losses differ.
    """
    peers = groups.control
    with together(groups.world, "averaging losses", "losses", error=error, peers=peers, call="mean_loss") as agreed:
        checked = _losses(losses)
        agreed.value = {"number of losses": len(checked)}
        local_mean = torch.stack([loss.reshape(()) for loss in checked]).mean()
        exact_mean = float(torch.stack([x.detach().double().cpu().reshape(()) for x in checked]).mean())
    return all_reduce_sum(groups.world, [exact_mean], "mean_loss")[0] / groups.world.size(), local_mean


def _losses(value: object) -> list[Tensor]:
    requirement = (
        "mean_loss needs what the model returned as loss, a floating point tensor of one element, or a list of such"
    )
    several = isinstance(value, Iterable) and not isinstance(value, Mapping) and getattr(value, "dim", lambda: 1)()
    losses: list[Any] = list(value) if several else [value]  # type: ignore[call-overload]
    if not losses:
        raise InputError(f"{requirement}; got none")
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"{requirement}; got {got}")
    return losses

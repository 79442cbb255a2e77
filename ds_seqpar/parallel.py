"""SequenceParallel: what user code holds. Attention, and moving data between global order and this rank's tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from . import batches
from .config import SequenceParallelConfig
from .errors import ConfigError, InputError, SeqParError, as_error
from .losses import mean_of
from .planning.layout import multiple
from .planning.masks import CAUSAL, FULL, Mask
from .planning.shards import UnevenShards, positions
from .running import devices, groups, inputs, ops, runtime
from .running.agreement import agree
from .running.comm import TorchComm, failing
from .running.telling import told_once


class SequenceParallel:
    """One sequence on `config.size` ranks. Make it on every rank of the job, once torch.distributed is up.

    config: with every "auto" resolved. topology: named axes of all ranks. rank: this rank's place among those that
    share its sequence (0 .. size-1). data_rank, data_size: which sequence of a batch it works on, and of how many.
    device: where this rank's tensors belong: the accelerator of LOCAL_RANK, where the process group works on one.
    accumulation_steps: micro-steps an optimiser step, where known (`initialize` sets it); None takes what
    `shard_batches` is given.
    """

    @told_once
    def __init__(self, config: SequenceParallelConfig | None = None, *, heads: tuple[int, int] | None = None) -> None:
        """heads: the model's (query heads, key/value heads), so that ulysses "auto" can use them.

        Collective over the world. Raises ConfigError on every rank where one rank's settings do not fit.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "SequenceParallel needs torch.distributed up; it is not, "
                "call deepspeed.init_distributed() or torch.distributed.init_process_group() first"
            )
        device, no_device = _own_device()
        self.device, world = device, groups.control_world()
        try:
            self.config = _agreed(world, config, heads, no_device)
        except SeqParError:
            groups.free([world] if world is not groups.all_ranks() else [])
            raise
        self.topology = self.config.topology(dist.get_world_size())
        self.size, self.data_size = self.config.size, self.topology.size("data")
        rank = dist.get_rank()
        self.data_rank = self.topology.index(rank, "data")
        self.rank = self.topology.index(rank, "ulysses", *self.topology.inner_axes)
        with failing("making process groups", world):
            self.groups = groups.create(self.topology, rank, world)
            dist.barrier(world)  # nobody frees, or ends with, a group that others are still connecting to
        self.comm = TorchComm(self.groups)
        member = self.topology.index(rank, "ulysses")
        self.runtime = runtime.Runtime(self.config, self.topology, self.groups.inner_rank, self.comm, member)
        self.accumulation_steps: int | None = None

    @property
    def control_world(self) -> dist.ProcessGroup:
        """All ranks, for CPU tensors."""
        return self.groups.world

    def close(self) -> None:
        """Frees its process groups, with their threads and sockets; whatever communicates then raises ConfigError.

        Without it they are freed once nobody refers to the SequenceParallel: no model that is patched with it, no
        backward pass that is still to come. NCCL's are freed by `close` alone, which all ranks must then call.
        """
        self.groups.close()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:  # an error leaves other ranks where nobody knows: as if it were dropped
            self.close()

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = True,
        scale: float | None = None,
        *,
        mask: Mask | None = None,
        shards: UnevenShards | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention over the whole sequence, of which each rank gives its own tokens. Differentiable, once.

        q (batch, local_seq, heads, head_dim), k and v (batch, local_seq, kv_heads, head_dim), all of one dtype; heads a
        multiple of kv_heads (GQA: query head h reads kv head h * kv_heads // heads). scale: default head_dim ** -0.5.
        mask: in place of `causal`, which keys a query sees by global position (causal, window, documents). shards: in
        place of the configured layout, the runs of q and of k/v that each inner rank holds; they may differ, and in
        length from rank to rank. Returns out, as q; a row that sees no key is 0. With return_lse also the log-sum-exp
        of each row's scores, (batch, local_seq, heads) in fp32 (fp64 for fp64): a gradient that reaches it raises
        InputError. Collective over the ranks that share the sequence, backward too: raises InputError, ConfigError,
        KernelError or DisagreementError on all of them, before anything is sent, where one was given something that
        does not fit.
        """
        q, k, v = _autocast(q, k, v)
        backward = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v))
        after, lse_too = None, bool(return_lse)
        meant = inputs.mask_of(causal, mask)
        if torch.compiler.is_compiling() and inputs.traceable(q, k, v, meant, shards, scale):
            handles = meant.handle, ops.handle_of_shards(shards)
            after = ops.agree_on(q, k, v, self.runtime.handle, *handles, scale, backward, lse_too)
        else:
            inputs.agree_on_inputs(self.runtime, q, k, v, inputs.Asked(meant, shards, scale, backward, lse_too))
        out, lse = self._attention((q, k, v), meant, shards, scale, after)
        if not lse_too:
            return out
        return out, ops.Constant.apply(ops.gather_lse(self.runtime, lse, (q, k, v), shards))

    def attention_agreed(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
        """`attention` for a caller whose ranks have agreed on the inputs already (a patched model, once a forward)."""
        inputs.check_derivatives(q, k, v)
        q, k, v = _autocast(q, k, v)
        return self._attention((q, k, v), CAUSAL if causal else FULL, None, scale)[0]

    def _attention(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Mask,
        shards: UnevenShards | None,
        scale: float | None,
        after: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scale = tensors[0].shape[-1] ** -0.5 if scale is None else float(scale)
        return ops.attention(self.runtime, tensors, mask, shards, scale, after)

    @property
    def multiple(self) -> int:
        """What a sequence's length, in tokens, must be a multiple of."""
        return multiple(self.config.layout, self.size, self.config.ulysses)

    def check_length(self, seq: int) -> None:
        """Raises InputError, naming the next length that fits, unless a sequence of `seq` tokens can be shared."""
        inputs.check_length(self.config, seq)

    def position_ids(self, seq: int) -> Tensor:
        """Global positions of this rank's tokens of a sequence of `seq`, int64 (seq / size,), on the CPU."""
        self.check_length(seq)
        mine = _positions(self.config.layout, seq, self.size, self.config.ulysses, self.rank)
        return mine.clone()  # the cached one must not be the caller's to change

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that has the whole sequence, in global order, on `dim`. Local."""
        return x.index_select(dim, self.position_ids(x.shape[dim]).to(x.device))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `shard`: every rank gets the whole, in global order. Collective over the sequence's ranks.

        Raises InputError for a tensor that autograd follows: each rank's loss would send it a gradient, and whether
        those are parts to be summed or copies of one another only the caller knows.
        """
        given = tuple(getattr(x, "shape", ())), getattr(x, "dtype", type(x)), dim
        agree(self.groups.control, "tensor to gather", given, error=self._gather_error(x, dim), call="gather")
        local = x.movedim(dim, 0).contiguous()
        parts = local.new_empty(self.size, *local.shape)
        if (group := self.groups.sp) is None:
            parts.copy_(local)
        else:
            with failing("gather", group):
                dist.all_gather(list(parts.unbind()), local, group=group)
        parts = parts.flatten(0, 1)
        seq = parts.shape[0]
        settings = self.config.layout, seq, self.size, self.config.ulysses
        order = torch.cat([_positions(*settings, rank) for rank in self.groups.sp_order])
        whole = torch.empty_like(parts)
        whole[order.to(parts.device)] = parts
        return whole.movedim(0, dim)

    def _gather_error(self, x: Tensor, dim: int) -> InputError | None:
        if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
            return InputError(
                f"gather needs a tensor and one of its dims; got {inputs.shape_of(x)} and dim {dim}, "
                "give it this rank's tokens and the dim that they are on"
            )
        if x.requires_grad and torch.is_grad_enabled():
            return InputError(
                "gather needs a tensor that autograd does not follow; got one with requires_grad, "
                "gather x.detach() or call it under torch.no_grad()"
            )
        try:
            self.check_length(x.shape[dim] * self.size)
        except InputError as error:
            return error
        return None

    def shard_batches(
        self,
        window: Sequence[Mapping[str, Any]],
        *,
        causal: bool = True,
        training: bool = True,
        device: torch.device | str | None = None,
    ) -> list[dict[str, Any]]:
        """This rank's part of every micro-batch of one accumulation window: see `ds_seqpar.batches.shard_window` for
        what goes in and comes out. Without DeepSpeed call `(loss / len(window)).backward()`. training=False: a window
        of any length, whose `mean_loss` is the evaluation loss. device: where to put it (`engine.device`); default:
        where the window is. Whole sequences are best left on the CPU."""
        steps = self.accumulation_steps if training else None
        return batches.shard_window(self, window, causal, steps, device)

    def shard_batch(
        self,
        batch: Mapping[str, Any],
        *,
        causal: bool = True,
        training: bool = True,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """`shard_batches` for a window of one micro-batch."""
        return self.shard_batches([batch], causal=causal, training=training, device=device)[0]

    def __deepcopy__(self, memo: dict) -> SequenceParallel:
        """A copied model shares it: process groups cannot be copied."""
        return self

    @overload
    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: Literal[False] = False) -> float: ...

    @overload
    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: Literal[True]) -> Tensor: ...

    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: bool = False) -> float | Tensor:
        """The loss of an optimiser step: the mean, over all ranks and the window's micro-steps, of what each rank's
        model returned for batches from `shard_batches`. A single rank's loss is only its own part of it.

        losses: one or several, each a floating point tensor of one element. differentiable: returns it as a 0-dim
        tensor of their dtype and device, to call backward on in place of the mean of this rank's `losses`: it has the
        gradients of that, because DeepSpeed and DDP average gradients over ranks.
        Collective over the world: all ranks must call it. Raises InputError or DisagreementError on all of them.
        """
        mean, own = mean_of(self.control_world, losses)
        return own + (mean - own.detach()) if differentiable else mean


def _own_device() -> tuple[torch.device, ConfigError | None]:
    """This rank's device, set, and why it has none, for all ranks to hear."""
    try:
        return devices.bind(groups.all_ranks()) or torch.device("cpu"), None
    except ConfigError as reason:
        return torch.device("cpu"), reason


def _agreed(
    world: dist.ProcessGroup, given: object, heads: tuple[int, int] | None, error: SeqParError | None
) -> SequenceParallelConfig:
    """The configuration with every "auto" replaced. Raises on every rank where one rank's does not fit, or where one
    has an error already."""
    settings = {}
    try:
        config = _config(given)
        resolved = config.resolve(dist.get_world_size(), heads)
        settings = {**config.settings(), "heads": heads}
    except Exception as reason:  # a schedule of one's own may raise anything
        error = error or as_error("SequenceParallel needs a configuration that can be read; reading it failed", reason)
    agree(world, "sequence parallel configuration", settings, error=error, call="SequenceParallel")
    return resolved


def _config(given: object) -> SequenceParallelConfig:
    if given is None:
        return SequenceParallelConfig()
    if not isinstance(given, SequenceParallelConfig):
        raise ConfigError(
            f"SequenceParallel needs a SequenceParallelConfig; got {type(given).__name__}, "
            "make one by SequenceParallelConfig.from_dict or from_deepspeed"
        )
    return given


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Under torch.autocast, in its dtype: what it does for scaled_dot_product_attention (RoPE mixes fp32 and bf16)."""
    return [
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor)
        and x.is_floating_point()
        and x.dtype != torch.float64
        and torch.is_autocast_enabled(x.device.type)
        else x
        for x in tensors
    ]


@functools.lru_cache(maxsize=64)
def _positions(layout: str, seq: int, size: int, ulysses: int, rank: int) -> Tensor:
    return torch.tensor(positions(layout, seq, size, ulysses, rank), device="cpu")  # whatever the default device is

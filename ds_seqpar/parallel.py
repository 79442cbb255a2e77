"""SequenceParallel: what user code holds. Attention, and moving data between global order and this rank's tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from . import auto, renamed
from .compiler.sharding.masks import Mask
from .compiler.sharding.shards import UnevenShards
from .config.settings import CONFIGURATION, UNREADABLE, SequenceParallelConfig
from .data.sharding import Sharding, WithValue, mean_of
from .errors import ConfigError, SeqParError, as_seqpar_error
from .runtime import checkpoints, devices, groups, input_checks, kernels, ops, runtime
from .runtime.agreement import Fields, assert_ranks_agree
from .runtime.comm import TorchComm, explaining_failure
from .runtime.process_exit import printed_once

if TYPE_CHECKING:
    from .auto import Job
    from .data.loader import Loader
    from .runtime.offload import Store
    from .runtime.recording import Record


MAKING = "making a SequenceParallel, as share_sequences and initialize do,"  # how errors call it


class SequenceParallel(Sharding):
    """One sequence on `config.size` ranks. Make it on every rank of the job, once torch.distributed is up.

    config: with every "auto" resolved. topology: named axes of all ranks. rank: this rank's place among those that
    share its sequence (0 .. size-1). data_rank, data_size: which sequence of a batch it works on, and of how many.
    device: where this rank's tensors belong: the accelerator of LOCAL_RANK, where the process group works on one.
    accumulation_steps: micro-steps an optimiser step, where known (`initialize` sets it); None takes what
    `shard_batches` is given. mask_users: patched models whose loss counts tokens by an attention_mask; while there is
    one, `shard_batches` returns this rank's shard of a mask that has zeros. vocabularies: of each patched model a
    function that reads how many tokens and labels it knows. store: host memory of offloaded checkpoints.
    """

    @printed_once
    def __init__(
        self,
        config: SequenceParallelConfig | None = None,
        *,
        heads: tuple[int, int] | None = None,
        job: Job | None = None,
        error: SeqParError | None = None,
    ) -> None:
        """heads: the model's (query heads, key/value heads), so that ulysses "auto" can use them. job: what is to be
        trained, for which the planner chooses what is "auto" (`initialize` and the Trainer say it by themselves).
        error: why this rank has no config, which all ranks then raise.

        Collective over the world. Raises ConfigError on every rank where one rank's settings do not fit.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "SequenceParallel needs torch.distributed up; it is not, "
                "call deepspeed.init_distributed() or torch.distributed.init_process_group() first"
            )
        device, no_device = _this_device()
        with explaining_failure(MAKING, groups.all_ranks()):  # which may make a group
            self.device, world = device, groups.control_world()
        try:
            self.config, measured = _agreed(world, config, heads, job, device, error or no_device)
        except SeqParError:
            groups.free([world] if world is not groups.all_ranks() else [])
            raise
        self.topology = self.config.topology(dist.get_world_size())
        self.size, self.data_size = self.config.size, self.topology.size("data")
        rank = dist.get_rank()
        self.data_rank = self.topology.index(rank, "data")
        self.rank = self.topology.index(rank, "ulysses", *self.topology.cp_axes)
        with explaining_failure("making process groups", world):
            made = groups.create(self.topology, rank, world)
            dist.barrier(world)  # nobody frees, or ends with, a group that others are still connecting to
        groups.bind_thread()
        self.comm = TorchComm(made)
        ulysses_rank = self.topology.index(rank, "ulysses")
        self.runtime = runtime.Runtime(self.config, self.topology, made.cp_rank, self.comm, ulysses_rank, measured)
        self.calls = self.runtime.calls
        self.accumulation_steps: int | None = None
        self.mask_users = weakref.WeakSet()
        self.vocabularies = weakref.WeakKeyDictionary()
        self.store: Store | None = None

    def close(self) -> None:
        """Frees its process groups, with their threads and sockets; whatever communicates then raises ConfigError.

        Without it they are freed once nobody refers to the SequenceParallel: no model that is patched with it, no
        backward pass that is still to come. NCCL's are freed by `close` alone, which all ranks must then call.
        """
        self.comm.groups.close()

    def bind_to_thread(self) -> None:
        """Makes the current thread the one that may call what communicates, in place of the thread that made the last
        SequenceParallel: ranks could pair calls of two threads wrongly. To be called on every rank, while no other
        thread is in such a call. It holds for every SequenceParallel of the process."""
        groups.bind_thread()

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
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention over the whole sequence, of which each rank gives its own tokens. Differentiable, once.

        q (batch, local_seq, heads, head_dim), k and v (batch, local_seq, kv_heads, head_dim), all of one dtype. heads
        is a multiple of kv_heads: query head h reads kv head h * kv_heads // heads. v may have another head_dim, which
        out then has (the smaller of both is filled up with zeros, which are computed and sent). scale: default head_dim
        ** -0.5, of q. mask: in place of `causal`, which keys a query sees by global position (causal, window,
        documents). shards: in place of the configured layout, the runs of q and of k/v that each CP rank holds; they
        may differ, and in length from rank to rank. softcap: scores x become softcap * tanh(x / softcap) (Gemma 2).
        sinks (heads,), of all the model's query heads on every rank: one more score a head, which every row's softmax
        counts and which brings nothing (gpt-oss). A rank's gradient of them is a part; the sum over ranks is the whole.
        Returns out, as q with v's head_dim; a row that sees no key is 0. With return_lse also the log-sum-exp of each
        row's scores, sink included, (batch, local_seq, heads) in fp32 (fp64 for fp64): a gradient that reaches it
        raises InputError.
        Collective over the ranks that share the sequence, backward too. Raises InputError, ConfigError, KernelError or
        DisagreementError on all of them, before anything is sent, where one was given what does not fit.
        """
        q, k, v = _autocast(q, k, v)
        followed = any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sinks))
        backward = torch.is_grad_enabled() and followed
        mask = input_checks.mask_of(causal, mask)
        options = input_checks.AttentionOptions(mask, shards, scale, backward, bool(return_lse), softcap, sinks)
        out, lse = ops.attention(self.runtime, q, k, v, options)
        return out if lse is None else (out, ops.LseWithoutGradient.apply(lse, out))

    def attention_agreed(
        self, q: Tensor, k: Tensor, v: Tensor, options: input_checks.AttentionOptions, parts: int = 1
    ) -> Tensor:
        """`attention` for a caller whose ranks have agreed on the inputs already (a patched model, once a forward).
        parts: above 1 these are the heads of one of so many head chunks."""
        input_checks.check_derivatives(q, k, v)
        q, k, v = _autocast(q, k, v)
        return ops.attention(self.runtime, q, k, v, options, agreed=True, parts=parts)[0]

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint` for layers of a model of your own. It keeps the results of `attention` in
        the function, which is then neither computed nor sent again, unless the settings say recompute_attention true.
        With offload_checkpoints what is saved goes to host memory. A patched model's `gradient_checkpointing_enable`
        does the same."""
        return self.checkpointing(checkpoint)(function, *args, use_reentrant=use_reentrant, **kwargs)

    def checkpointing(self, checkpoint: Callable[..., Any]) -> checkpoints.Checkpoint:
        """The same of another checkpoint function."""
        if self.config.offload_checkpoints and self.store is None:
            from .runtime.offload import store_of

            self.store = store_of(self.device)
        return checkpoints.Checkpoint(checkpoint, not self.config.recompute_attention, self.store)

    def record(self, *, watch: bool = False) -> Record:
        """`with sp.record() as record:` writes down when this rank computes, waits, sends and receives; afterwards
        `record.events`, `record.save("trace.json")`, or all ranks' by `record.gather()`. watch: on CPUs, a thread waits
        for each message, so that its end is known where the rank itself waits later. Not collective; where it is not
        used nothing is kept. Entering it raises ConfigError inside another one."""
        from .runtime.recording import Record

        return Record(self.runtime, self.rank, self.device, self.groups.control, watch)

    def shard_batches(
        self,
        microbatches: Sequence[Mapping[str, Any]] = (),
        *,
        causal: bool = True,
        training: bool = True,
        device: torch.device | str | None = None,
        **old: Any,
    ) -> list[dict[str, Any]]:
        """Shard the micro-batches of an optimizer step: give this rank its tokens of every sequence.

        Without DeepSpeed call `(loss / len(microbatches)).backward()`. `data.batches.shard_microbatches` says what
        comes out. Collective over the world.

        Args:
            microbatches: All micro-batches of the step, the same on all ranks of a sequence. Each has labels, int64
                (B, S), -100 for tokens that do not count, and tensors (B, S, ...) such as input_ids; packed documents
                are told by position_ids. Whole sequences are best left on the CPU.
            causal: False for bidirectional attention, whose labels are not shifted.
            training: False takes any number of micro-batches, whose `mean_loss` is the evaluation loss.
            device: Where to put the result, such as `engine.device`; default: where the micro-batches are.

        Returns:
            The same number of batches, with this rank's tokens.

        Raises:
            InputError, DisagreementError: A batch is wrong, or differs between ranks; on all ranks.
        """
        microbatches = renamed.argument("shard_batches", "window", "microbatches", old, microbatches, default=())
        steps = self.accumulation_steps if training else None
        from .data.batches import shard_microbatches  # attention alone does without

        return shard_microbatches(self, microbatches, causal, steps, device)

    def shard_batch(
        self,
        batch: Mapping[str, Any],
        *,
        causal: bool = True,
        training: bool = True,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """`shard_batches` for one micro-batch."""
        return self.shard_batches([batch], causal=causal, training=training, device=device)[0]

    def sampler(self, dataset: Any, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> DistributedSampler:
        """torch's DistributedSampler, over groups in place of ranks: its indices are those of a run without sequence
        parallelism on `data_size` ranks. Call its `set_epoch` before each epoch."""
        parts = {"num_replicas": self.data_size, "rank": self.data_rank}
        return DistributedSampler(dataset, **parts, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def loader(self, loader: DataLoader, read_once: bool = False) -> Loader:
        """A DataLoader's batches: the same on the ranks of a sequence, other ones in each group, whole and on the CPU.

        loader: over the whole data set, the same on every rank, with a sampler or none; group d takes the batches d,
        d + data_size, ... of it, and the first ones again where the last are too few. One with `sampler` has its part
        already. `IterableDataset`, workers and torchdata's StatefulDataLoader work too. `set_epoch`, `state_dict` and
        `load_state_dict` go on in the middle of an epoch. For Accelerators use `hf_integration.prepare_loader`.
        read_once: one rank of each group reads, and sends each batch to the others: augmentation and collators that
        draw random numbers agree then, and nothing is read twice.
        Collective over the world, as is each batch. Raises ConfigError or DisagreementError on every rank where a
        sampler is for ranks and not for groups, loading fails on one rank, or ranks have other orders or numbers."""
        from .data.loader import Loader

        return Loader(self, loader, read_once)

    def __deepcopy__(self, memo: dict) -> SequenceParallel:
        """A copied model shares it: process groups cannot be copied."""
        return self

    def __copy__(self) -> SequenceParallel:
        return self

    def __reduce__(self) -> NoReturn:
        """Raises ConfigError: process groups cannot be saved either."""
        raise ConfigError(
            "a SequenceParallel cannot be pickled, nor a model that is patched with one; save model.state_dict(), call "
            "model.save_pretrained(folder), or call unpatch_attention(model) first"
        )

    @overload
    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: Literal[False] = False) -> float: ...

    @overload
    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: Literal[True]) -> Tensor: ...

    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: bool = False) -> float | Tensor:
        """The loss of an optimiser step: the mean, over all ranks and the step's micro-batches, of what each rank's
        model returned for batches from `shard_batches`. A single rank's loss is only its local part of it.

        losses: one or several, each a floating point tensor of one element. differentiable: returns a 0-dim tensor of
        their dtype and device to call backward on. Its gradients are those of the mean of this rank's `losses`, because
        DeepSpeed and DDP average gradients over ranks.
        Collective over the world: all ranks must call it. Raises InputError or DisagreementError on all of them.
        """
        mean, own = mean_of(self.groups, losses)
        return WithValue.apply(own, torch.full_like(own, mean), 1) if differentiable else mean


def _this_device() -> tuple[torch.device, ConfigError | None]:
    """(this rank's device, which is now the current one; the error to tell all ranks where it has none)."""
    try:
        return devices.bind_device(groups.all_ranks()) or torch.device("cpu"), None
    except ConfigError as reason:
        return torch.device("cpu"), reason


def _agreed(
    world: dist.ProcessGroup,
    given: object,
    heads: tuple[int, int] | None,
    job: Job | None,
    device: torch.device,
    error: SeqParError | None,
) -> tuple[SequenceParallelConfig, auto.Orders]:
    """(the configuration with every "auto" but the kernel's replaced; the measured orders by which kernel "auto" is
    chosen). error: of this rank, which all ranks then raise. Raises on every rank where one rank's settings do not fit.
    Where the settings ask for a plan, each rank plans for itself, and rank 0 prints the result."""
    settings: dict[str, Any] = {}
    measured: auto.Orders = {}
    try:
        config, ranks = _config(given), dist.get_world_size()
        resolved = config.resolve(ranks, heads)
        settings = {**config.settings(), "heads": heads}
        if config.kernel == "auto":
            measured = auto.measured_orders(config.machine, device)
            settings |= {"kernels here": kernels.available(device.type)}
            settings |= {f"kernels measured in {config.machine}": measured}
    except Exception as reason:  # a schedule of one's own may raise anything
        error = error or as_seqpar_error(UNREADABLE, reason)
    assert_ranks_agree(world, CONFIGURATION, settings, error=error, call=MAKING, advice=_advice)
    if config.kernel == "auto" and config.machine != "auto" and not measured and dist.get_rank() == 0:
        auto.warn_of_unmeasured_device(config.machine, device)
    return auto.planned_by_all(world, config, heads, job, MAKING) if config.asks_for_plan else resolved, measured


def _advice(given: Mapping[int, Fields]) -> str:
    from .runtime.mismatch_hints import of_kernels  # only runs whose ranks differ need it

    return of_kernels(given)


def _config(given: object) -> SequenceParallelConfig:
    if given is None:
        return SequenceParallelConfig()
    if not isinstance(given, SequenceParallelConfig):
        raise ConfigError(
            f"SequenceParallel needs a SequenceParallelConfig; got {type(given).__name__}, "
            "make one by SequenceParallelConfig.from_dict or from_deepspeed"
        )
    return given


def _autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Under torch.autocast, in its dtype: what it does for scaled_dot_product_attention (RoPE mixes fp32 and bf16)."""
    if not any(map(_is_cast, tensors)):
        return tensors
    return [x.to(torch.get_autocast_dtype(x.device.type)) if _is_cast(x) else x for x in tensors]


def _is_cast(x: object) -> bool:
    """Whether autocast changes its dtype. Some devices (meta) have no autocast to ask about."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return False
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)

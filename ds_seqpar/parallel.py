"""SequenceParallel, the user-facing class for sharding data and computing attention."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from . import planning
from .base.errors import ConfigError, SeqParError
from .compiled import custom_ops
from .core.compiler.sharding.masks import FULL, Mask
from .core.compiler.sharding.shards import UnevenShards
from .core.runtime import admit, attention, devices, groups, kernels, runtime
from .core.runtime.admit import AdmittedCall, AttentionOptions, admitted_call
from .core.runtime.groups import Groups
from .core.runtime.transport import TorchComm
from .core.settings import CONFIGURATION, UNREADABLE, SequenceParallelConfig
from .data.inputs import InputSpec
from .data.sharding import Sharding, WithValue, mean_of
from .guards.agreement import together
from .guards.backward_order import Calls
from .guards.consistency import ConsistencyChecker, InputAgreement
from .guards.finite import Finite, LooksAtWalks
from .guards.interfaces import gloo_meets_hosts
from .guards.labels import Labels
from .guards.mismatch_hints import of_kernels
from .guards.one_thread import bind_thread
from .guards.process_exit import wait_at_exit
from .guards.waits import explaining_failure
from .guards.watchdog import watch
from .memory import checkpoints
from .models import patcher_of_class
from .operators import decode
from .operators.latent import LATENT, expanded, sends_latent

if TYPE_CHECKING:
    from .data.loader import Loader
    from .lengths import PackLoader, StepDealer
    from .memory.offload import Store
    from .planning import Job


MAKING = "making a SequenceParallel, as share_sequences and initialize do,"  # the call's name in error messages


class SequenceParallel:
    """Sequence parallelism in groups of `config.size` ranks.

    Construct a SequenceParallel on every rank after init_process_group(). `initialize`, `share_sequences` and the
    Trainer construct a SequenceParallel internally. If used as a context manager, a SequenceParallel is closed on exit.

    Args:
        config: The settings. The default is `SequenceParallelConfig()`.
        heads: The model's (query heads, key/value heads), required to resolve `ulysses="auto"`.
        job: The training job for which the planner chooses settings. `initialize` and the Trainer pass the job
            themselves.
        error: The error because of which this rank has no config. All ranks will raise the error.

    Raises:
        ConfigError: The settings are invalid on one rank. Raised on every rank, since the constructor is collective
            across all ranks.

    Attributes:
        config (SequenceParallelConfig): The settings, with every `"auto"` resolved.
        rank (int): This rank's index among the `size` ranks that share a sequence.
        size (int): The number of ranks that share a sequence.
        multiple (int): If a sequence's length is a multiple of this number, all ranks hold the same number of tokens.
        data_rank (int): The index of this rank's group. The index selects the sequences on which the group trains.
        data_size (int): The number of groups.
        device (torch.device): The device for this rank's tensors. The process's current device is used if one has been
            set, otherwise the device whose index is the launcher's local rank.
        topology (Topology): All ranks in the job, arranged along named axes.
        sharding (Sharding): The assignment of tokens to ranks, with the methods `shard`, `gather`, `place`,
            `position_ids` and `sum_over_ranks`.
        accumulation_steps (int | None): The number of micro-batches per optimizer step, set by `initialize`. If None,
            `shard_batches` accepts any number of micro-batches.
    """

    def __init__(
        self,
        config: SequenceParallelConfig | None = None,
        *,
        heads: tuple[int, int] | None = None,
        job: Job | None = None,
        error: SeqParError | None = None,
    ) -> None:
        wait_at_exit()
        if not dist.is_initialized():
            launched = "RANK" in os.environ
            found = "it is not, call" if launched else "got no launcher, start the script with torchrun and call"
            raise ConfigError(
                f"SequenceParallel needs a process a rank, with torch.distributed up; {found} "
                "torch.distributed.init_process_group() or deepspeed.init_distributed() first"
            )
        device, no_device = _this_device()
        with explaining_failure(MAKING, groups.all_ranks()):  # may create a group
            self.device, world = device, groups.control_world(gloo_meets_hosts)
        try:
            self.config = _agreed(world, config, heads, job, device, error or no_device)
        except SeqParError:
            groups.free([world] if world is not groups.all_ranks() else [])
            raise
        self.topology = self.config.topology(world.size())
        rank = dist.get_rank()
        with explaining_failure("making process groups", world):
            created = groups.create(self.topology, rank, world, self.config.max_ctas, gloo_meets_hosts)
            dist.barrier(world)  # no rank frees a group, or exits, while others are still connecting
        bind_thread()
        self.comm = TorchComm(created, explaining_failure)
        ulysses_rank = self.topology.index(rank, "ulysses")
        self.runtime = runtime.Runtime(self.config, self.topology, created.cp_rank, self.comm, ulysses_rank)
        self.runtimes = {self.runtime.size: self.runtime}  # runtimes by number of CP ranks; packs may use other sizes
        self.ulysses_is_free = config is None or config.ulysses == "auto"
        self.checker = ConsistencyChecker(created, self.config.agreement)
        self.calls = Calls(self.checker)
        self.runtime.guards += [self.calls, InputAgreement(self.checker)]
        self.sharding = sharding = Sharding(self.config, self.topology, self.comm, self.calls, self.checker)
        self.size, self.rank, self.multiple = sharding.size, sharding.rank, sharding.multiple
        self.data_size, self.data_rank = sharding.data_size, sharding.data_rank
        self.shard, self.gather, self.place = sharding.shard, sharding.gather, sharding.place
        self.position_ids, self.sum_over_ranks = sharding.position_ids, sharding.sum_over_ranks
        self.finite = Finite(created, self.calls, self.data_size) if self.config.check_finite else None
        if self.finite is not None:
            self.runtime.guards.append(self.finite)
            self.runtime.observers.append(LooksAtWalks(self.finite))
        self.runtime.fewest_head_chunks = planning.fewest_head_chunks
        self.runtime.observers += [Labels(), *watch(self.config, self.calls)]
        self.accumulation_steps: int | None = None
        self.store: Store | None = None  # host memory of offloaded checkpoints

    @property
    def groups(self) -> Groups:
        """This rank's process groups. Raises ConfigError in a thread that may not communicate."""
        return self.sharding.groups

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        """All ranks in the job as a torch DeviceMesh with the dims "dp", "cp" and "ulysses", for example for FSDP2.

        The "cp" and "ulysses" dims use attention's process groups. The first access is collective across all ranks.

        Raises:
            ConfigError: The setting `rank_order` is neither "auto" nor the order that "auto" selects.
        """
        return groups.device_mesh(self.topology, self.groups, self.device)

    @property
    def control_world(self) -> dist.ProcessGroup:
        """The process group of all ranks for CPU tensors."""
        return self.groups.world

    def close(self) -> None:
        """Free the process groups with their threads and sockets.

        Communication after `close` raises ConfigError. Without `close`, the groups are freed when no patched model and
        no pending backward pass refers to the SequenceParallel. NCCL communicators are only freed by `close`, which all
        ranks must call.

        Raises:
            SeqParError: A pending comparison of ranks fails, or the device reports an invalid tensor.
        """
        try:
            self.checker.flush(last=True)
        finally:
            self.runtime.observers.clear()
            vars(self).pop("device_mesh", None)
            for used in reversed(self.runtimes.values()):
                cast(TorchComm, used.comm).groups.close()

    def bind_to_thread(self) -> None:
        """Make the current thread the only thread in this process that may communicate.

        By default, only the thread that constructed the last SequenceParallel may communicate, because calls from two
        threads could be mismatched between ranks. Call `bind_to_thread` on every rank while no other thread is
        communicating.
        """
        bind_thread()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:  # after an exception the state of peers is unknown, so the collective close() is skipped
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
        """Compute exact attention over the whole sequence, given each rank's local tokens.

        Double backward is not supported. The call and its backward pass are collective across the ranks that share the
        sequence.

        Args:
            q: Queries (batch, local_seq, heads, head_dim), in the dtype of k and v.
            k: Keys (batch, local_seq, kv_heads, head_dim). heads must be a multiple of kv_heads. Query head h reads
                key/value head `h * kv_heads // heads`.
            v: Values (batch, local_seq, kv_heads, v_dim). If v_dim and head_dim differ, the smaller one is padded with
                zeros, which are computed and sent like all other values.
            causal: Whether each query sees only its own and earlier positions.
            scale: Factor applied to the scores. The default is `head_dim ** -0.5`.
            mask: The keys that each query sees, by global position. Replaces `causal`.
            shards: The runs of q and k/v tokens that each CP rank holds, in place of the configured layout. The runs of
                q and k/v may differ, and ranks may hold different numbers of tokens.
            softcap: Soft bound on the scores. Each score x becomes `softcap * tanh(x / softcap)` (Gemma 2).
            sinks: Attention sinks (heads,), with one extra logit per query head in the softmax denominator (gpt-oss).
                Every rank must pass the sinks of all heads. Sum the gradient of the sinks over ranks.
            return_lse: Whether to also return the log-sum-exp of the scores.

        Returns:
            The output (batch, local_seq, heads, v_dim), which is 0 for queries that see no key. With `return_lse`, also
            the log-sum-exp of each row's scores, including the sink, of shape (batch, local_seq, heads) in fp32 (fp64
            for fp64 inputs). The log-sum-exp is not differentiable, so a gradient with respect to the log-sum-exp
            raises InputError.

        Raises:
            InputError, ConfigError, KernelError, DisagreementError: The arguments on one rank are invalid. All ranks
                raise the error before any data is sent.

        Examples:
            >>> q, k, v = (sp.shard(x, 1) for x in (q, k, v))  # whole tensors -> this rank's tokens
            >>> out = sp.attention(q, k, v)
            >>> whole = sp.gather(out, 1)
        """
        mask = admit.mask_of(causal, mask)
        options = AttentionOptions(mask, shards, scale, False, bool(return_lse), softcap, sinks)
        return self.operator_attention((q, k, v), options)

    def latent_attention(
        self,
        q: Tensor,
        latent: Tensor,
        expand: Tensor,
        causal: bool = True,
        scale: float | None = None,
        *,
        mask: Mask | None = None,
        shards: UnevenShards | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `attention` with keys and values that are expanded from a latent (MLA).

        For head h, `latent @ expand[h]` yields the keys followed by the values. The setting `latent_attention`
        determines whether ranks send the latent or the expanded keys and values.

        Args:
            q: Queries (batch, local_seq, heads, head_dim).
            latent: The latent (batch, local_seq, width) from which keys and values are expanded.
            expand: The expansion matrices (heads, width, head_dim + v_dim) for all heads. Every rank must pass all
                matrices. Sum the gradient of `expand` over ranks.
            causal: See `attention`, as for the remaining arguments, the result and the errors.

        Examples:
            >>> k, v = torch.einsum("bsr,hre->bshe", latent, expand).split([head_dim, v_dim], dim=-1)
            >>> sp.attention(q, k, v)  # the same
            >>> sp.latent_attention(q, latent, expand)
        """
        mask = admit.mask_of(causal, mask)
        options = AttentionOptions(mask, shards, scale, False, bool(return_lse), softcap, sinks)
        q, latent, expand = _autocast(q, latent, expand)
        if sends_latent(self.config, (q, latent, expand), shards):
            return self.operator_attention((q, latent, expand), options._replace(operator=LATENT))
        return self.operator_attention((q, *expanded(latent, expand, q.shape[-1])), options)

    def operator_attention(self, tensors: Sequence[Tensor], options: AttentionOptions) -> Any:
        """Compute a custom operator, which may take tensors other than q, k and v.

        Args:
            tensors: The inputs of `options.operator` (see `core.runtime.operator`).
            options: The operator and all remaining arguments.

        Returns:
            The output, as in `attention`, and with `options.lse` also the log-sum-exp.
        """
        tensors = _autocast(*tensors)
        options = options._replace(backward=_is_differentiated(*tensors, options.sinks))
        call = admitted_call(self.runtime_of(options.shards), tensors, options)
        out, lse = _attend(call)
        return out if lse is None else (out, attention.LseWithoutGradient.apply(lse, out))

    def attention_agreed(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, parts: int = 1) -> Any:
        """Compute `attention` for a caller whose ranks have already agreed on the inputs, such as a patched model.

        Args:
            k: Keys as in `attention`, or the second tensor of another `options.operator`.
            v: Values as in `attention`, or the third tensor of another `options.operator`.
            parts: Number of head chunks that the caller computes one by one. Each call passes the tensors of one chunk.

        Returns:
            The output, or (output, log-sum-exp) with `options.lse`.
        """
        runtime = self.runtime_of(options.shards)
        call = admitted_call(runtime, _autocast(q, k, v), options, agreed=True, parts=parts)
        out, lse = _attend(call)
        return out if lse is None else (out, lse)

    def runtime_of(self, shards: object) -> runtime.Runtime:
        """Return the runtime for the number of CP ranks in a call's shards."""
        size = shards.size if isinstance(shards, UnevenShards) else self.runtime.size
        return self.runtimes.get(size, self.runtime)

    def cache_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, shards: UnevenShards, scale: float | None = None,
        softcap: float | None = None, agreed: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute attention from each rank's new tokens to the cached keys of all ranks.

        Ranks send either queries or cached keys, whichever takes fewer bytes. To include the new keys, compute
        `attention` among the new tokens, and merge both outputs by their log-sum-exps. Inputs must not require
        gradients. The call is collective across the ranks that share the sequence.

        Args:
            q: Queries of this rank's new tokens (batch, new tokens, heads, head_dim).
            k: Keys cached on this rank (batch, cached tokens, kv_heads, head_dim).
            v: Values cached on this rank (batch, cached tokens, kv_heads, v_dim).
            mask: The keys that each query sees, by position.
            shards: The new tokens (q, starting at `q_start`) and cached tokens (kv) of each of the `size` SP ranks.
            scale: See `attention`.
            softcap: See `attention`.
            agreed: Whether the ranks have already agreed on the inputs. If so, all checks are skipped.

        Returns:
            The output (batch, new tokens, heads, v_dim) and the log-sum-exp of each row (batch, new tokens, heads), as
            in `attention`.

        Raises:
            InputError, ConfigError, KernelError, DisagreementError: See `attention`. Also raised if inputs require
                gradients.
        """
        q, k, v = _autocast(q, k, v)
        options = AttentionOptions(mask, shards, scale, _is_differentiated(q, k, v), True, softcap)
        return decode.attend(self.runtime, q, k, v, options, agreed)

    def decode_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, counts: Sequence[tuple[int, int]] | None = None,
        scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, agreed: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute attention from one new token per row, replicated on all ranks, to the cached keys of all ranks.

        Inputs must not require gradients. The call is collective across the ranks that share the sequence.

        Args:
            q: Queries (batch, 1, heads, head_dim), the same on all ranks.
            k: Keys cached on this rank (batch, cached tokens, kv_heads, head_dim). Exactly one rank's cache must
                include the key of the new token. Ranks may have cached different numbers of tokens, or no tokens.
            v: Values cached on this rank (batch, cached tokens, kv_heads, v_dim).
            counts: (first, end) for each row, to select the keys `k[row, first:end]`. The default is all keys.
            scale: See `attention`.
            softcap: See `attention`.
            sinks: See `attention`.
            agreed: Whether the ranks have already agreed on the inputs. If so, all checks are skipped.

        Returns:
            The output (batch, 1, heads, v_dim), bitwise identical on all ranks.

        Raises:
            InputError, ConfigError, KernelError, DisagreementError: See `attention`. Also raised if inputs require
                gradients.
        """
        q, k, v = _autocast(q, k, v)
        options = AttentionOptions(FULL, None, scale, _is_differentiated(q, k, v, sinks), False, softcap, sinks)
        return decode.decode(self.runtime, q, k, v, counts, options, agreed)

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """Checkpoint a layer like `torch.utils.checkpoint.checkpoint`, but without recomputing attention.

        The results of `attention` inside `function` are kept, so the backward pass neither recomputes attention nor
        sends blocks again, unless `recompute_attention` is set. With `offload_checkpoints`, saved tensors are moved to
        host memory. On a patched model, `gradient_checkpointing_enable` has the same effect.
        """
        return self.checkpointing(checkpoint)(function, *args, use_reentrant=use_reentrant, **kwargs)

    def checkpointing(self, checkpoint: Callable[..., Any]) -> checkpoints.Checkpoint:
        """Return a variant of `checkpoint` that uses the given checkpoint function instead of torch's checkpoint."""
        if self.config.offload_checkpoints and self.store is None:
            from .memory.offload import store_of

            self.store = store_of(self.device)
        return checkpoints.Checkpoint(checkpoint, not self.config.recompute_attention, self.store)

    def shard_batches(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        *,
        causal: bool = True,
        training: bool = True,
        device: torch.device | str | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
    ) -> list[dict[str, Any]]:
        """Return this rank's tokens of each micro-batch of an optimizer step.

        Without DeepSpeed, call `(loss / len(microbatches)).backward()`. See `data.batches.shard_microbatches` for the
        contents of the result. The call is collective across all ranks.

        Args:
            microbatches: All micro-batches of the step, identical on all ranks that share a sequence. Each micro-batch
                contains input_ids and labels, int64 (B, S), with -100 for ignored tokens. position_ids mark packed
                documents. Keep whole sequences on the CPU.
            causal: Whether attention is causal. False means bidirectional attention.
            training: Whether the batches are for training. For evaluation, any number of micro-batches is accepted, and
                `mean_loss` of their losses is the evaluation loss.
            device: Device for the result, such as `engine.device`. The default is the device of the micro-batches.
            inputs: How to shard custom tensors, by name, for example {"weights": tokens()} from
                `ds_seqpar.data.inputs`. The inputs of a patched model need no declaration.

        Returns:
            The same number of batches, with this rank's tokens.

        Raises:
            InputError, DisagreementError: A batch is invalid or differs between ranks. Raised on all ranks.
        """
        if training and self.config.tokens_per_rank != "auto":
            raise ConfigError(
                "with tokens_per_rank a step's batches are those of sp.packs; got shard_batches, give the model "
                "the batches of sp.packs as they are, or leave tokens_per_rank out"
            )
        steps = self.accumulation_steps if training else None
        from .data.batches import shard_microbatches  # not needed for attention alone

        return shard_microbatches(self.sharding, microbatches, causal, steps, device, inputs)

    def shard_batch(
        self,
        batch: Mapping[str, Any],
        *,
        causal: bool = True,
        training: bool = True,
        device: torch.device | str | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
    ) -> dict[str, Any]:
        """Shard a single micro-batch, as in `shard_batches`."""
        return self.shard_batches([batch], causal=causal, training=training, device=device, inputs=inputs)[0]

    def sampler(self, dataset: Any, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> DistributedSampler:
        """Return a torch DistributedSampler for groups instead of ranks.

        The sampled indices are the same as in a run on `data_size` ranks without sequence parallelism. Call `set_epoch`
        on the sampler before each epoch.
        """
        group = {"num_replicas": self.data_size, "rank": self.data_rank}
        return DistributedSampler(dataset, **group, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def loader(self, loader: DataLoader, read_once: bool = False) -> Loader:
        """Load the same batches on all ranks that share a sequence, and different batches in each group.

        Batches are whole and on the CPU. `IterableDataset`, workers and torchdata's StatefulDataLoader are supported.
        With `set_epoch`, `state_dict` and `load_state_dict`, a run can resume in the middle of an epoch. Constructing
        the loader and fetching each batch are collective across all ranks. With an Accelerator, use
        `hf_integration.prepare_loader`.

        Args:
            loader: A loader over the whole data set, identical on every rank. Group d receives batches d, d +
                data_size, and so on. If too few batches remain for all groups at the end, the first batches are
                repeated. A loader with a sampler from `SequenceParallel.sampler` already yields its own group's
                batches.
            read_once: Whether one rank of each group reads each batch and sends it to the group's other ranks. Random
                augmentations and collators then agree across ranks, and no data is read twice.

        Raises:
            ConfigError, DisagreementError: A sampler divides the data among ranks instead of groups, loading fails on
                one rank, or the order or number of batches differs between ranks. Raised on every rank.
        """
        from .data.loader import Loader

        return Loader(self.sharding, loader, read_once)

    @functools.cached_property
    def step_dealer(self) -> StepDealer:
        """The object that arranges a step's samples in packs. The first access is collective across all ranks."""
        from .lengths import StepDealer

        return StepDealer(self)

    def packs(self, loader: DataLoader, read_once: bool = False) -> PackLoader:
        """Return a loader that arranges the samples of each optimizer step in packs.

        Short samples stay whole on one rank, and long samples are shared by all ranks of a group. The setting
        `tokens_per_rank` limits the size of a pack. Each step has the same samples as in a plain run with the same
        loader, and therefore the same loss, gradients and weights. Constructing the loader and fetching each step are
        collective across all ranks.

        Args:
            loader: The loader of a plain run on one rank, with the same data set, sampler, seed and collator. Each
                batch of the loader must contain all samples of an optimizer step. The collator receives one sample at a
                time.
            read_once: See `loader`.

        Returns:
            A loader with `set_epoch`, `state_dict` and `load_state_dict`. For each step, the loader yields a list of
            whole batches, of the same length on every rank. Call the model with each batch, call `backward` on each
            loss, and step the optimizer after the last batch. Average gradients over ranks, as in DDP. A pack's loss
            may be only this rank's part, so that ranks need not wait for one another. The step's loss is
            `sp.mean_loss(sum(losses))`.

        Raises:
            ConfigError, InputError, DisagreementError: `tokens_per_rank` is not set, a sample is longer than
                `tokens_per_rank * size` tokens, or ranks have different samples. Raised on every rank.

        Examples:
            >>> for packs in sp.packs(DataLoader(dataset, batch_size=64, shuffle=True)):
            ...     for batch in packs:
            ...         model(**batch).loss.backward()
            ...     optimizer.step()
        """
        from .lengths import PackLoader

        return PackLoader(self, loader, read_once)

    def log_probs(
        self, model: Any, input_ids: Tensor, *, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        temperature: float = 1.0, return_entropy: bool = False, **inputs: Any,
    ) -> Any:  # fmt: skip
        """Compute the log-probability of each label, given the preceding tokens, with a patched model.

        Ranks gather a single number per token, but no logits or hidden states. At any time, logits exist for at most
        one tile of tokens, even in the backward pass. A prompt shared by several rows is computed only once (see
        `shared_prompts`). The call and its backward pass are collective across the ranks that share the sequence.

        Args:
            model: A transformers causal language model that is patched with this SequenceParallel. If the model is
                inside DDP, a DeepSpeed engine or a peft model, pass the wrapper.
            input_ids: Whole rows (rows, tokens), identical on the ranks that share them.
            attention_mask: A mask (rows, tokens) that is 0 for padding on either side.
            labels: Unshifted labels (rows, tokens), with -100 for ignored tokens. The default is input_ids without
                padding.
            temperature: Divisor of the logits.
            return_entropy: Whether to also return the entropy of each distribution.
            **inputs: Additional arguments for the model, such as position_ids of packed documents.

        Returns:
            The log-probabilities (rows, tokens - 1) in fp32 (fp64 for fp64 models), with 0 for ignored labels. The
            result is complete and differentiable on every rank. With `return_entropy`, a tuple of the log-probabilities
            and the entropies, both of shape (rows, tokens - 1).

        Raises:
            ConfigError, InputError, DisagreementError: The model is not patched, or a batch is invalid or differs
                between ranks. Raised on all ranks that share the sequence.

        Examples:
            >>> chosen = sp.log_probs(model, ids, labels=labels).sum(1)  # of each row's answer
        """
        if (patcher := patcher_of_class(model)) is None:
            raise ConfigError(
                f"log_probs needs a transformers model; got {type(model).__name__}, compute them from your own model"
            )
        how = {"attention_mask": attention_mask, "labels": labels, "temperature": temperature}
        return patcher.log_probs(self, model, input_ids, **how, return_entropy=return_entropy, **inputs)

    def __deepcopy__(self, memo: dict) -> SequenceParallel:
        return self  # process groups cannot be copied, so a copied model shares them

    def __copy__(self) -> SequenceParallel:
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a SequenceParallel cannot be pickled, nor a model that is patched with one; save model.state_dict(), call "
            "model.save_pretrained(folder), or call unpatch_attention(model) first"
        )

    @overload
    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: Literal[False] = False) -> float: ...

    @overload
    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: Literal[True]) -> Tensor: ...

    def mean_loss(self, losses: Tensor | Sequence[Tensor], *, differentiable: bool = False) -> float | Tensor:
        """Return the loss of an optimizer step, which is the mean of the model's losses over all micro-batches and
        ranks.

        The loss for a batch from `shard_batches` is only this rank's share. The call is collective across all ranks.

        Args:
            losses: One or more losses, each a floating-point tensor with one element.
            differentiable: Whether to return a 0-dim tensor that supports `backward`, with the dtype and device of the
                losses. The gradients are the gradients of the mean of this rank's `losses`, since DeepSpeed and DDP
                average gradients over ranks.

        Raises:
            InputError, DisagreementError: A loss is not a floating-point tensor with one element, or ranks pass
                different numbers of losses. Raised on all ranks.
            ConfigError: Since batches were sharded, the model has not called this SequenceParallel's attention, or a
                custom model has not read position_ids. Raised on all ranks.
        """
        groups = self.groups
        self.checker.flush()  # first, since reading a loss waits for the device
        mean, local = mean_of(groups, losses, self.sharding.unused.error())
        if self.finite is not None:
            self.finite.look("the loss", "which came into mean_loss", local, "see what computes it")
            self.finite.agree(groups.world)
        return WithValue.apply(local, torch.full_like(local, mean), 1) if differentiable else mean


def _attend(call: AdmittedCall) -> tuple[Tensor, Tensor | None]:
    return custom_ops.attention(call) if custom_ops.runs_as_op() else attention.attention(call)


def _is_differentiated(*inputs: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _this_device() -> tuple[torch.device, ConfigError | None]:
    """Make this rank's device the current device. Return (device, error to raise on all ranks or None)."""
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
) -> SequenceParallelConfig:
    """Return the configuration with every "auto" resolved except for the kernel.

    All ranks raise an error if the settings are invalid or `error` is set on any rank. If the settings request a plan,
    each rank computes the plan, and rank 0 logs the plan.
    """
    with together(world, UNREADABLE, CONFIGURATION, error=error, call=MAKING, advice=of_kernels) as agreed:
        config, ranks = _config(given), world.size()
        resolved, machine = config.resolve(ranks, heads), planning.named_machine(config)
        settings = {**config.settings(), "heads": heads, "plan": config.chosen_schedule.digest}
        if config.kernel == "auto":
            settings |= {"kernels here": kernels.available(device.type)}
        agreed.value = settings
    return planning.planned_by_all(world, config, machine, job, MAKING) if config.asks_for_plan else resolved


def _config(given: object) -> SequenceParallelConfig:
    if given is None:
        return SequenceParallelConfig()
    if not isinstance(given, SequenceParallelConfig):
        raise ConfigError(
            f"SequenceParallel needs a SequenceParallelConfig; got {type(given).__name__}, "
            "make one by SequenceParallelConfig.from_dict or ds_seqpar.read_config"
        )
    return given


def _autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Cast tensors under torch.autocast, as in scaled_dot_product_attention, since RoPE mixes fp32 and bf16."""
    if not any(map(_is_cast, tensors)):
        return tensors
    return [x.to(torch.get_autocast_dtype(x.device.type)) if _is_cast(x) else x for x in tensors]


def _is_cast(x: object) -> bool:
    """Return whether autocast changes a tensor's dtype. Devices such as meta have no autocast state."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return False
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)

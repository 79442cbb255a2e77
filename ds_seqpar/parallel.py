"""SequenceParallel: the object that user code holds, for attention and for moving data to and from shards."""

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


MAKING = "making a SequenceParallel, as share_sequences and initialize do,"  # how errors call it


class SequenceParallel:
    """Shard each sequence over `config.size` ranks. Construct it on every rank after init_process_group().

    `initialize`, `share_sequences` and the Trainer construct one. It is a context manager that closes it at the end.

    Args:
        config: The settings; default: all `"auto"`.
        heads: The model's (query heads, key/value heads), which `ulysses="auto"` needs.
        job: The job, for settings that are planned. `initialize` and the Trainer pass it themselves.
        error: Why this rank has no config; all ranks then raise it.

    Raises:
        ConfigError: The settings do not fit on one rank; raised on every rank. Collective over the world.

    Attributes:
        config (SequenceParallelConfig): The settings, with every `"auto"` resolved.
        rank (int): This rank's number among the `size` ranks of its sequence.
        size (int): Number of ranks that share a sequence.
        multiple (int): The number that must divide a sequence's length for all ranks to have the same number of tokens.
        data_rank (int): The number of this rank's group, which determines the sequences that it works on.
        data_size (int): The number of groups.
        device (torch.device): The device of this rank's tensors: the device that the process has set, or the device
            with its local rank, from the launcher.
        topology (Topology): All ranks of the job as named axes.
        sharding (Sharding): Which tokens each rank has; `shard`, `gather`, `place`, `position_ids` and
            `sum_over_ranks` are its methods.
        accumulation_steps (int | None): Micro-batches of an optimizer step, if known (`initialize` sets it). With None,
            any number of micro-batches may be passed to `shard_batches`.
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
        with explaining_failure(MAKING, groups.all_ranks()):  # which may make a group
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
            dist.barrier(world)  # nobody frees, or ends with, a group that others are still connecting to
        bind_thread()
        self.comm = TorchComm(created, explaining_failure)
        ulysses_rank = self.topology.index(rank, "ulysses")
        self.runtime = runtime.Runtime(self.config, self.topology, created.cp_rank, self.comm, ulysses_rank)
        self.runtimes = {self.runtime.size: self.runtime}  # by CP ranks: with other Ulysses sizes, those of packs
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
        """All ranks of the job as torch's DeviceMesh with the dims "dp", "cp" and "ulysses", for FSDP2 and the like.

        Its "cp" and "ulysses" dims use attention's process groups. The first access is collective over the world.

        Raises:
            ConfigError: The setting `rank_order` is neither "auto" nor the order of "auto".
        """
        return groups.device_mesh(self.topology, self.groups, self.device)

    @property
    def control_world(self) -> dist.ProcessGroup:
        """The process group of all ranks that carries CPU tensors."""
        return self.groups.world

    def close(self) -> None:
        """Free the process groups, with their threads and sockets. Communication afterwards raises ConfigError.

        Without `close`, they are freed when nothing refers to the SequenceParallel any more: no patched model and no
        pending backward pass. NCCL's communicators are freed only by `close`, which all ranks must then call.

        Raises:
            SeqParError: A pending comparison fails, or a device reports only now that a tensor was wrong.
        """
        try:
            self.checker.flush(last=True)
        finally:
            self.runtime.observers.clear()
            vars(self).pop("device_mesh", None)
            for used in reversed(self.runtimes.values()):
                cast(TorchComm, used.comm).groups.close()

    def bind_to_thread(self) -> None:
        """Let the current thread communicate, instead of the thread that made the last SequenceParallel.

        Ranks could pair the calls of two threads wrongly. So one thread of a process communicates for all its
        SequenceParallels. Call this on every rank, while no other thread is in a call that communicates.
        """
        bind_thread()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:  # after an exception the peers' state is unknown, so skip the collective close()
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
        """Compute exact attention over the whole sequence; each rank passes its local tokens.

        Differentiable, once. Collective over the ranks that share the sequence, in backward too.

        Args:
            q: Queries (batch, local_seq, heads, head_dim), of the dtype of k and v.
            k: Keys (batch, local_seq, kv_heads, head_dim). heads is a multiple of kv_heads: query head h reads
                key/value head h * kv_heads // heads.
            v: Values (batch, local_seq, kv_heads, v_dim). If v_dim differs from head_dim, the smaller is padded with
                zeros, which are computed and sent.
            causal: Whether a query sees no later position.
            scale: Factor of the scores; default: head_dim ** -0.5.
            mask: Which keys a query sees, by global position, instead of `causal`.
            shards: Which runs of q and of k/v each CP rank holds, instead of the configured layout. q and k/v may have
                different runs, and ranks different lengths.
            softcap: Scores x become softcap * tanh(x / softcap) (Gemma 2).
            sinks: Attention sinks (heads,), for all query heads on every rank: one extra logit per head, only in the
                softmax denominator (gpt-oss). Sum their gradient over ranks.
            return_lse: Whether to also return the log-sum-exp.

        Returns:
            The output (batch, local_seq, heads, v_dim), 0 for a query that sees no key. With `return_lse`, also the
            log-sum-exp of each row's scores, sink included: (batch, local_seq, heads) in fp32 (fp64 for fp64). It is
            not differentiable: a gradient that reaches it raises InputError.

        Raises:
            InputError, ConfigError, KernelError, DisagreementError: One rank's arguments do not fit; on all ranks,
                before anything is sent.

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
        """Compute `attention` to the keys and values of a latent (MLA): head h has `latent @ expand[h]`, k before v.

        The setting `latent_attention` determines whether ranks send the latent or the expanded keys and values.

        Args:
            q: Queries (batch, local_seq, heads, head_dim).
            latent: The tensor from which keys and values are expanded (batch, local_seq, width).
            expand: The matrices (heads, width, head_dim + v_dim), for all heads on every rank. Sum their gradient over
                ranks.
            causal: As for `attention`; the other arguments, the result and the errors too.

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
        """Compute an operator in place of `attention`; it may take other tensors than q, k and v.

        Args:
            tensors: What `options.operator` takes (`core.runtime.operator`).
            options: The operator and the other arguments.

        Returns:
            As `attention`; with `options.lse`, also the log-sum-exp.
        """
        tensors = _autocast(*tensors)
        options = options._replace(backward=_is_differentiated(*tensors, options.sinks))
        call = admitted_call(self.runtime_of(options.shards), tensors, options)
        out, lse = _attend(call)
        return out if lse is None else (out, attention.LseWithoutGradient.apply(lse, out))

    def attention_agreed(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, parts: int = 1) -> Any:
        """Compute `attention` for a caller whose ranks have already agreed on the inputs, such as a patched model.

        Args:
            k: As for `attention`; for another `options.operator`, its second tensor.
            v: As for `attention`; for another `options.operator`, its third tensor.
            parts: Number of head chunks that the caller goes through; these tensors are one of them.

        Returns:
            The output; with `options.lse`, (output, log-sum-exp).
        """
        runtime = self.runtime_of(options.shards)
        call = admitted_call(runtime, _autocast(q, k, v), options, agreed=True, parts=parts)
        out, lse = _attend(call)
        return out if lse is None else (out, lse)

    def runtime_of(self, shards: object) -> runtime.Runtime:
        """Return the runtime of a call, which depends on the number of CP ranks of its shards."""
        size = shards.size if isinstance(shards, UnevenShards) else self.runtime.size
        return self.runtimes.get(size, self.runtime)

    def cache_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, shards: UnevenShards, scale: float | None = None,
        softcap: float | None = None, agreed: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute attention of each rank's new tokens to the keys of earlier tokens that all ranks have kept.

        Ranks send either queries or kept keys, whichever takes fewer bytes. To include the new keys, merge the result
        with that of `attention` among the new tokens, using their log-sum-exps. No gradients. Collective over the ranks
        that share the sequence.

        Args:
            q: Queries of this rank's new tokens (batch, new tokens, heads, head_dim).
            k: The keys that this rank has kept (batch, kept tokens, kv_heads, head_dim).
            v: Their values (batch, kept tokens, kv_heads, v_dim).
            mask: Which keys a query sees, by position.
            shards: The new tokens (q, from `q_start` on) and the kept tokens (kv) of each of the `size` SP ranks.
            scale: As for `attention`.
            softcap: As for `attention`.
            agreed: Whether the ranks have agreed on the inputs already. Then nothing is checked.

        Returns:
            The output (batch, new tokens, heads, v_dim) and each row's log-sum-exp (batch, new tokens, heads), as in
            `attention`.

        Raises:
            InputError, ConfigError, KernelError, DisagreementError: As `attention`; also for inputs that require
                gradients.
        """
        q, k, v = _autocast(q, k, v)
        options = AttentionOptions(mask, shards, scale, _is_differentiated(q, k, v), True, softcap)
        return decode.attend(self.runtime, q, k, v, options, agreed)

    def decode_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, counts: Sequence[tuple[int, int]] | None = None,
        scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, agreed: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute attention of one new token per row, which all ranks have, to the keys that all ranks have kept.

        No gradients. Collective over the ranks that share the sequence.

        Args:
            q: Queries (batch, 1, heads, head_dim), the same on all ranks.
            k: The keys that this rank has kept (batch, kept tokens, kv_heads, head_dim); one rank has the new token's
                key. Ranks may have kept different numbers of tokens, or none.
            v: Their values (batch, kept tokens, kv_heads, v_dim).
            counts: (first, end) for each row: its keys are k[row, first:end]; None: all.
            scale: As for `attention`.
            softcap: As for `attention`.
            sinks: As for `attention`.
            agreed: Whether the ranks have agreed on the inputs already. Then nothing is checked.

        Returns:
            The output (batch, 1, heads, v_dim), bitwise the same on all ranks.

        Raises:
            InputError, ConfigError, KernelError, DisagreementError: As `attention`; also for inputs that require
                gradients.
        """
        q, k, v = _autocast(q, k, v)
        options = AttentionOptions(FULL, None, scale, _is_differentiated(q, k, v, sinks), False, softcap, sinks)
        return decode.decode(self.runtime, q, k, v, counts, options, agreed)

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """Checkpoint a layer of your own model like `torch.utils.checkpoint.checkpoint`, but compute attention only
        once.

        The results of `attention` in the function are kept, so attention is neither computed nor sent again, unless
        `recompute_attention` is set. With `offload_checkpoints`, saved tensors go to host memory. A patched model's
        `gradient_checkpointing_enable` does the same.
        """
        return self.checkpointing(checkpoint)(function, *args, use_reentrant=use_reentrant, **kwargs)

    def checkpointing(self, checkpoint: Callable[..., Any]) -> checkpoints.Checkpoint:
        """Return `checkpoint` based on another checkpoint function than torch's."""
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
        """Shard the micro-batches of an optimizer step: give this rank its tokens of every sequence.

        Without DeepSpeed call `(loss / len(microbatches)).backward()`. `data.batches.shard_microbatches` describes the
        result. Collective over the world.

        Args:
            microbatches: All micro-batches of the step, the same on all ranks of a sequence. Each has labels, int64
                (B, S), -100 for tokens that do not count, and input_ids; position_ids mark packed documents. Whole
                sequences are best left on the CPU.
            causal: Whether attention is causal; False for bidirectional attention.
            training: False accepts any number of micro-batches; their `mean_loss` is the evaluation loss.
            device: Where to put the result, such as `engine.device`; default: where the micro-batches are.
            inputs: How ranks share your own tensors, by name, for example {"weights": tokens()} from
                `ds_seqpar.data.inputs`. A patched model's declarations are already known.

        Returns:
            The same number of batches, with this rank's tokens.

        Raises:
            InputError, DisagreementError: A batch is wrong, or differs between ranks; on all ranks.
        """
        if training and self.config.tokens_per_rank != "auto":
            raise ConfigError(
                "with tokens_per_rank a step's batches are those of sp.packs; got shard_batches, give the model "
                "the batches of sp.packs as they are, or leave tokens_per_rank out"
            )
        steps = self.accumulation_steps if training else None
        from .data.batches import shard_microbatches  # attention alone does without

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
        """Shard one micro-batch, as in `shard_batches`."""
        return self.shard_batches([batch], causal=causal, training=training, device=device, inputs=inputs)[0]

    def sampler(self, dataset: Any, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> DistributedSampler:
        """Return torch's DistributedSampler over groups instead of ranks. Its indices are the same as in a run without
        sequence parallelism on `data_size` ranks. Call its `set_epoch` before each epoch.
        """
        group = {"num_replicas": self.data_size, "rank": self.data_rank}
        return DistributedSampler(dataset, **group, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def loader(self, loader: DataLoader, read_once: bool = False) -> Loader:
        """Give the ranks of a sequence the same batches of a DataLoader, and different batches to each group.

        Batches come whole and on the CPU. `IterableDataset`, workers and torchdata's StatefulDataLoader work too; with
        `set_epoch`, `state_dict` and `load_state_dict` a run resumes in the middle of an epoch. This call and each
        batch are collective over the world. For Accelerators use `hf_integration.prepare_loader`.

        Args:
            loader: A loader over the whole data set, the same on every rank, with or without a sampler. Group d takes
                the batches d, d + data_size, ...; if the last ones do not suffice for all groups, the first are
                repeated. A loader with `sampler` already has its group's batches.
            read_once: Let one rank of each group read, and send each batch to the others. Random augmentation and
                collators then agree, and nothing is read twice.

        Raises:
            ConfigError, DisagreementError: On every rank, if a sampler is for ranks and not for groups, loading fails
                on one rank, or orders or numbers of batches differ between ranks.
        """
        from .data.loader import Loader

        return Loader(self.sharding, loader, read_once)

    @functools.cached_property
    def step_dealer(self) -> StepDealer:
        """The object that makes packs from a step's samples. The first access is collective over the world."""
        from .lengths import StepDealer

        return StepDealer(self)

    def packs(self, loader: DataLoader, read_once: bool = False) -> PackLoader:
        """Yield each optimizer step as packs: short samples are whole on one rank, long ones shared by a whole group.

        The setting `tokens_per_rank` determines their size. The samples of a step, and so losses, gradients and
        weights, are the same as in a plain run with this loader. This call and each step are collective over the world.

        Args:
            loader: The loader of a plain run on one rank, with the same data set, sampler, seed and collator, and with
                batches of all samples of an optimizer step. The collator receives one sample at a time.
            read_once: As for `loader`.

        Returns:
            A loader with `set_epoch`, `state_dict` and `load_state_dict`, which yields a list of whole batches for each
            step, the same number on every rank. Call the model with each batch, call `backward` on each loss, and step
            after the last. Average gradients over ranks, as DDP does. A pack's loss may be this rank's part of it, so
            that ranks need not wait; the step's loss is `sp.mean_loss(sum(losses))`.

        Raises:
            ConfigError, InputError, DisagreementError: `tokens_per_rank` is not set, a sample is longer than
                `tokens_per_rank * size` tokens, or ranks have different samples; on every rank.

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
        """Compute the log-probability of each label given the tokens before it, with a patched model.

        Only one number per token is gathered, and neither logits nor hidden states. Logits exist for at most a tile of
        tokens, in backward too. A prompt that rows share is computed once (`shared_prompts`). Collective over the ranks
        that share the sequence, in backward too.

        Args:
            model: A causal language model of transformers that shares sequences by this SequenceParallel. If it is
                inside DDP, a DeepSpeed engine or a peft model, pass the wrapper.
            input_ids: Whole rows (rows, tokens), the same on the ranks that share them.
            attention_mask: (rows, tokens), 0 for padding on either side.
            labels: (rows, tokens), not shifted, -100 for tokens that do not count; default: input_ids except padding.
            temperature: What logits are divided by.
            return_entropy: Whether to also return the entropy of each distribution.
            **inputs: More arguments of the model, such as position_ids of packed documents.

        Returns:
            The log-probabilities (rows, tokens - 1) in fp32 (fp64 for fp64), whole on every rank, with gradients; 0
            where no label counts. With `return_entropy`, a tuple of these and the entropies, in the same form.

        Raises:
            ConfigError, InputError, DisagreementError: The model is not patched, or a batch is wrong or differs between
                ranks; on all ranks of the sequence.

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
        return self  # a copied model shares it: process groups cannot be copied

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
        """Return the loss of an optimizer step: the mean over all ranks and micro-batches of the model's losses. A
        single rank's loss of a batch from `shard_batches` is only its share. Collective over the world.

        Args:
            losses: One or several losses, each a floating point tensor of one element.
            differentiable: Return a 0-dim tensor of their dtype and device to call `backward` on. Its gradients are
                those of the mean of this rank's `losses`, since DeepSpeed and DDP average gradients over ranks.

        Raises:
            InputError, DisagreementError: A loss is not such a tensor, or ranks pass different numbers of losses; on
                all ranks.
            ConfigError: The model has not called attention of this SequenceParallel since batches were sharded, or a
                custom model has not read their position_ids; on all ranks.
        """
        groups = self.groups
        self.checker.flush()  # before a loss is looked at, which waits for the device
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
    """Return (this rank's device, now the current one; the error to raise on all ranks if it has none)."""
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
    """Return the configuration with every "auto" but the kernel's replaced. error: of this rank, which all ranks then
    raise. Raises on every rank if one rank's settings do not fit. If the settings request a plan, each rank plans for
    itself, and rank 0 prints the result.
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
    """Cast under torch.autocast, as it does for scaled_dot_product_attention (RoPE mixes fp32 and bf16)."""
    if not any(map(_is_cast, tensors)):
        return tensors
    return [x.to(torch.get_autocast_dtype(x.device.type)) if _is_cast(x) else x for x in tensors]


def _is_cast(x: object) -> bool:
    """Whether autocast changes a tensor's dtype. Some devices (meta) have no autocast state."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return False
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)

"""Register sequence parallel attention with transformers, and switch models to it.

A forward is sharded or local. A local forward is that of the unpatched model: with a kv cache (`generate`), inside
`whole_sequences`, and, on one rank, for batches that `shard_batches` did not make. A forward on a whole batch is
sharded internally, and its output is whole (`whole_calls`). Before a sharded forward its ranks agree, once, that each
was given its own tokens with their global positions. A hook on the base model does that, and passes the result to
attention in keyword arguments that reach every layer. Checkpoints keep these arguments, so a layer that backward
recomputes runs as it did in forward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.compiler.sharding.heads import check_heads
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.errors import ConfigError, InputError, as_seqpar_error
from ds_seqpar.runtime.agreement import assert_ranks_agree
from ds_seqpar.runtime.input_checks import AttentionOptions
from ds_seqpar.runtime.log import log_once
from ds_seqpar.runtime.process_exit import printed_once

from .. import accelerators, dropout
from ..families import (
    NAME,
    ConfigView,
    attentions,
    check_adapters,
    check_model,
    heads,
    heads_around,
    is_causal_lm,
    is_plain_head,
    local_attention,
    token_modules,
    unwrapped,
    vocabulary,
    windows,
)
from ..graph_breaks import between_graphs
from ..memory import head_chunks, tiled_modules
from ..memory.weight_slices import CHUNKS
from . import checkpointing, rope, whole_calls
from .agreement import UNSHIFTED, WHOLE_ONLY, Agreement, agree_on_shard, tokens_of, warn_of_cache, wrong_inputs
from .losses import ExpertBalance, check_output, has_experts, has_loss, shard_loss_error, tried_loss

SP, MASK = "sequence_parallel", "sequence_parallel_mask"  # attributes of an attention module
# passed to the base model so that it makes no mask of (local tokens)^2: four dims reach the layers unchanged
NO_MASK = torch.empty(1, 1, 0, 0)


@dataclasses.dataclass(kw_only=True)
class _Patch:
    """The state of a patched base model."""

    sp: SequenceParallel
    hooks: tuple[RemovableHandle, ...]
    agreement: Agreement
    layers: tuple[Any, ...]  # those that can be checkpointed
    ropes: tuple[nn.Module, ...] = ()  # embeddings that need the longest position
    experts: ExpertBalance | None = None  # None where the loss has no term that balances experts
    above: tuple[nn.Module, ...] = ()  # modules around the base model that get its whole outputs: their loss may be any
    untried: tuple[nn.Module, ...] = ()  # modules whose loss on a sharded batch is still to be checked
    whole: bool = False  # whether `whole_sequences` is active, which makes forwards local
    local: bool = False  # whether the last forward was local

    def __deepcopy__(self, memo: dict) -> _Patch:
        """Copy the state; a copy of a model is not inside `whole_sequences`, even where it is made there."""
        return _Patch(**{**{name: copy.deepcopy(x, memo) for name, x in vars(self).items()}, "whole": False})


@printed_once
def patch_attention(model: PreTrainedModel, sp: SequenceParallel) -> PreTrainedModel:
    """Make every attention of a model exact over sequences that are shared by `sp.size` ranks.

    Call the patched model with whole batches, the same on the ranks that share them, to get whole outputs; or with what
    `sp.shard_batches` returns, to get this rank's shards. A model that is already patched with `sp` is returned
    unchanged.

    Args:
        model: A transformers model, also inside a peft model or `torch.compile`. It is patched in place.
        sp: The SequenceParallel whose ranks share each sequence.

    Returns:
        The model.

    Raises:
        ConfigError: The model cannot be patched (see `families`), its heads do not fit, or it is patched with another
            SequenceParallel.

    Examples:
        >>> sp = SequenceParallel(SequenceParallelConfig(size=2), heads=heads(model))
        >>> model = patch_attention(model, sp)
    """
    if not isinstance(sp, SequenceParallel):
        raise ConfigError(
            f"patch_attention needs a SequenceParallel; got {type(sp).__name__}, make one of a SequenceParallelConfig"
        )
    check_patch(model, sp)
    inner = unwrapped(model)
    if patched_with(inner) is sp:
        return model
    AttentionInterface.register(NAME, _attention)
    for module, window in zip(attentions(inner), windows(inner), strict=True):
        module.config = ConfigView(module.config)
        setattr(module, SP, sp)
        setattr(module, MASK, Mask(window=window))
        head_chunks.use_head_chunks(module)
    above = heads_around(model)
    hooks = [_hook(inner.base_model, _before_base), *(_hook(head, _before_head) for head in above)]
    hooks += [m.register_forward_hook(_after, with_kwargs=True) for m in (inner.base_model, *above)]
    ropes = rope.embeddings(inner.base_model)
    hooks += [handle for module in ropes for handle in rope.hook(module)]
    hooks += [handle for module in token_modules(inner) for handle in whole_calls.compute_on_parts(module)]
    sp.vocabularies[inner] = vocabulary
    experts = ExpertBalance(sp) if has_experts(inner) else None
    agreement = Agreement(sp, inner)
    tiled_modules.tile(inner, sp.config)
    tiled = tiled_modules.has_tiled_loss(inner)  # a custom forward then runs once for each tile
    inner.base_model._sequence_parallel_patch = _Patch(
        sp=sp,
        hooks=tuple(hooks),
        agreement=agreement,
        layers=checkpointing.layers_of(inner.base_model),
        ropes=ropes,
        experts=experts,
        above=tuple(head for head in above if not tiled and not is_plain_head(head)),
        untried=tuple(above) if is_causal_lm(inner) else (),
    )
    accelerators.watch(inner.base_model)
    return model


@printed_once
def share_sequences(model: PreTrainedModel, **settings: Any) -> SequenceParallel:
    """Make a SequenceParallel, and patch a model with it.

    The model is then called as before, with whole batches that are the same on the ranks of a sequence: those of
    `sp.data_rank` of `sp.data_size`. Collective over the world.

    Args:
        model: As for `patch_attention`.
        **settings: Settings by name, as in the "sequence_parallel" section of a DeepSpeed JSON.

    Returns:
        The SequenceParallel.

    Raises:
        ConfigError: The settings do not fit, or `patch_attention` cannot patch the model.

    Examples:
        >>> sp = share_sequences(model, size=2)
        >>> sampler = sp.sampler(data, shuffle=False)  # in place of DistributedSampler(data, shuffle=False)
    """
    config, model_heads, error = None, None, None
    try:
        check_patch(model, None)
        config, model_heads = SequenceParallelConfig.from_dict(settings), heads(unwrapped(model))
    except Exception as reason:  # reported to all ranks, which would wait for this one otherwise
        error = as_seqpar_error("reading a model that is to share sequences failed", reason)
    sp = SequenceParallel(config, heads=model_heads, error=error)
    try:
        patch_attention(model, sp)
    except Exception as reason:
        error = as_seqpar_error("patching a model failed", reason)
    assert_ranks_agree(
        sp.control_world, "models", {"model": type(unwrapped(model)).__name__}, error=error, call="share_sequences"
    )
    return sp


def check_patch(model: nn.Module, sp: SequenceParallel | None) -> None:
    """Check that `patch_attention(model, sp)` can patch the model; changes nothing.

    Args:
        model: As for `patch_attention`.
        sp: The SequenceParallel to patch with; None checks only what does not depend on one.

    Raises:
        ConfigError: As `patch_attention` does.
    """
    check_adapters(model)
    inner = unwrapped(model)
    check_model(inner)
    if sp is None:
        return
    if patched_with(inner) not in (None, sp):
        raise ConfigError("the model is patched with another SequenceParallel; call unpatch_attention(model) first")
    check_heads(sp.config.ulysses, *heads(inner), size=sp.size, head_chunks=sp.config.head_chunks)
    tiled_modules.check_tiles(inner, sp.config)


def unpatch_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the attention that a patched model had. A model that is not patched stays unchanged.

    Args:
        model: As for `patch_attention`.

    Returns:
        The model.
    """
    inner = unwrapped(model)
    patch = _patch_of(inner)
    if patch is None:
        return model
    for hook in patch.hooks:
        hook.remove()
    for module in attentions(inner):
        if hasattr(module, SP):  # modules that were added after the patch have none
            module.config = module.config.original
            head_chunks.remove_head_chunks(module)
            delattr(module, SP)
            delattr(module, MASK)
    checkpointing.forget(inner)
    patch.sp.vocabularies.pop(inner, None)
    if patch.experts is not None:
        patch.experts.close()
    tiled_modules.untile(inner)
    dropout.restore_modules(inner)
    del inner.base_model._sequence_parallel_patch
    return model


def patched_with(model: PreTrainedModel) -> SequenceParallel | None:
    """Return the SequenceParallel that a model is patched with.

    Args:
        model: As for `patch_attention`.

    Returns:
        The SequenceParallel; None if the model is not patched.
    """
    patch = _patch_of(unwrapped(model))
    return patch.sp if patch else None


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Context manager in which forwards of a patched model are local, as those of the unpatched model.

    Each rank evaluates whole sequences of its own, with padding masks, labels that the model shifts, or a kv cache.
    Under ZeRO-3 all ranks must make the same number of forwards, since they fetch parameters from one another.

    Args:
        model: As for `patch_attention`, or a DeepSpeed engine or DDP module that contains such a model.

    Examples:
        >>> with whole_sequences(model):
        ...     loss = model(**batch).loss
    """
    inner = unwrapped(model)
    patch = _patch_of(inner)
    if patch is None or patch.whole:
        yield
        return
    patch.whole = True
    try:
        yield
    finally:
        patch.whole = False


def sees_whole_outputs(model: nn.Module) -> bool:
    """Return whether a patched model's own forward gets whole outputs of its base model; its loss may be any."""
    patch = _patch_of(unwrapped(model))
    return patch is not None and bool(patch.above)


def _patch_of(model: nn.Module) -> _Patch | None:
    return getattr(getattr(model, "base_model", None), "_sequence_parallel_patch", None)


def _hook(module: nn.Module, function: Callable[..., tuple]) -> RemovableHandle:
    """Register `function(argument_names, module, args, kwargs)` to be called before each forward."""
    argument_names = tuple(inspect.signature(module.forward).parameters)
    return module.register_forward_pre_hook(functools.partial(function, argument_names), with_kwargs=True)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sequence_parallel: bool | BatchLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query (B, H, S, D), key and value (B, Hkv, S, D) -> out (B, S, H, D)."""
    if sequence_parallel is None:
        raise InputError("patched attention was reached past its model's forward; call the model that was patched")
    if sequence_parallel is False:
        optional = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: value for name, value in optional.items() if value is not None}
        return local_attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout:
        raise ConfigError(f"sequence parallel attention needs attention_dropout 0; got {dropout}")
    mask = getattr(module, MASK)
    if sliding_window != mask.window:
        raise ConfigError(
            f"layer {module.layer_idx} needs one sliding window in its attention and in the config; got "
            f"{sliding_window} and {mask.window}, make sliding_window and layer_types agree, then patch the model"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options, chunks = AttentionOptions(mask, None, scaling, softcap=softcap, sinks=s_aux), getattr(module, CHUNKS, 1)
    if isinstance(sequence_parallel, BatchLayout):
        return _attention_with_layout(module.sequence_parallel, q, k, v, options, chunks, sequence_parallel), None
    return module.sequence_parallel.attention_agreed(q, k, v, options, chunks), None


def _attention_with_layout(
    sp: SequenceParallel, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, chunks: int, layout: BatchLayout
) -> Tensor:
    """Compute attention with a batch's BatchLayout, outside of compiled graphs: each batch has another mask."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_attention_with_layout)(sp, q, k, v, options, chunks, layout)
    mask = layout.mask_with_window(options.mask.window)
    return sp.attention_agreed(q, k, v, options._replace(mask=mask, shards=layout.shards), chunks)


def _arguments_by_name(argument_names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(argument_names, args, strict=False)), **kwargs}


def _is_local(patch: _Patch, module: nn.Module, inputs: dict[str, Any]) -> bool:
    """Return whether a forward is local.

    A kv cache means generation, which is local, unless the model is trained or the labels are sharded. One rank has
    whole sequences in any case, so there a forward is local too, except for batches of `shard_batches` and a Trainer's
    batches with labels, which have tiles and checkpoints as on several ranks.
    """
    if patch.whole or (
        patch.sp.size == 1
        and inputs.get("shift_labels") is None
        and inputs.get("placement") is None
        and not (inputs.get("labels") is not None and whole_calls.is_moved_batch(tokens_of(inputs)))
    ):
        return True
    cached = inputs.get("past_key_values") is not None or bool(inputs.get("use_cache"))
    return cached and inputs.get("shift_labels") is None and not (module.training and torch.is_grad_enabled())


def _noisy_modules(patch: _Patch, module: nn.Module) -> list[Any]:
    """Return the modules that draw by token in a forward. In a compiled one they draw torch's numbers, or raise."""
    if torch.compiler.is_compiling() or not module.training or patch.whole or (patch.local and patch.sp.size > 1):
        return []
    model = patch.agreement.model()
    return dropout.noisy_modules(module if model is None else model)


def _begin_noise(patch: _Patch, seed: int, inputs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        dropout.begin_forward(patch.sp, seed, tokens_of(inputs), inputs.get("placement"), patch.local)


def _before_head(
    argument_names: tuple[str, ...], module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Shard a whole batch, unless the module gets whole outputs: then the base model shards it.

    For a sharded batch that the module cannot take it sets "wrong_shard", a sentence, which the base model's hook
    raises on all ranks.
    """
    inputs, inner = _arguments_by_name(argument_names, args, kwargs), unwrapped(module)
    patch = _patch_of(inner)
    if patch is None or _is_local(patch, module, inputs):
        return args, kwargs
    if patch.experts is not None:
        check_output(inner, inputs)
    if whole_calls.is_whole(patch.sp, inputs):
        if module not in patch.above:
            return (), whole_calls.shard_inputs(module, patch.agreement, inputs)
        whole_calls.compare_inputs(patch.sp, inner, inputs, torch.compiler.is_compiling())
    elif not is_causal_lm(inner):
        kwargs["wrong_shard"] = WHOLE_ONLY.format(type(inner).__name__)
    elif inputs.get("labels") is not None and inputs.get("shift_labels") is None:
        kwargs["wrong_shard"] = UNSHIFTED
    elif inputs.get("labels") is not None and module in patch.untried:
        tiled_modules.add_up_losses(inner, True)
    return args, kwargs


def _after(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    inner = unwrapped(module)
    patch = _patch_of(inner)
    if patch is None or _is_local(patch, module, kwargs):
        return output
    call = whole_calls.call_of(module, kwargs)
    sharded_loss = call is None and module in patch.untried and kwargs.get("shift_labels") is not None
    if sharded_loss and (module in patch.above or not torch.compiler.is_compiling()):  # a library's stays one graph
        _try_shard_loss(patch, module, kwargs, output)
    if patch.experts is not None and module is not inner.base_model:
        output = patch.experts.correct(inner, kwargs, output, 1.0 if call is None else 1 / patch.sp.size)
    return output if call is None else whole_calls.gather_outputs(patch.sp, call, output)


@between_graphs
def _try_shard_loss(patch: _Patch, module: nn.Module, kwargs: dict[str, Any], output: Any) -> None:
    if _tried_on_shard(patch.sp, module, kwargs, output):
        patch.untried = tuple(head for head in patch.untried if head is not module)


def _tried_on_shard(
    sp: SequenceParallel, module: nn.Module, kwargs: dict[str, Any], output: Any, error: ConfigError | None = None
) -> bool:
    """Raise ConfigError on all ranks of a sequence where the loss of a sharded batch is more than token losses.

    Args:
        kwargs: The forward's arguments.
        output: What it returned.
        error: Another error of this rank.

    Returns:
        Whether the batch has what the trial needs.
    """
    labels, items = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
    if labels is None or items is None or kwargs.get("labels") is None:
        return False
    tried = tried_loss(unwrapped(module), labels, float(items), output, 1.0)
    error = shard_loss_error(sp, tried) or error
    assert_ranks_agree(sp.groups.control, "loss of the model", None, error=error)
    return True


def check_engine(engine: Any, sp: SequenceParallel) -> None:
    """Check that an engine's model calls sp.attention, and its loss, in its first forward with labels.

    A patched model does so by itself. Only causal language models of transformers are checked.
    """
    if _patch_of(unwrapped(engine.module)) is not None or not has_loss(engine.module):
        return
    received_before = sum(sp.comm.received.values())

    @between_graphs
    def check(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        silent = sp.size > 1 and sum(sp.comm.received.values()) == received_before
        error = ConfigError(
            "a model that is given with sequence_parallel=sp must call sp.attention; got "
            f"{type(unwrapped(module)).__name__}, in whose forward nobody communicated, see docs/other_models.md"
        )
        if _tried_on_shard(sp, module, kwargs, output, error if silent else None):
            hook.remove()

    hook = engine.module.register_forward_hook(check, with_kwargs=True)


def trust_loss(model: nn.Module) -> None:
    """Skip the check of a patched model's loss in its first sharded forward."""
    if (patch := _patch_of(unwrapped(model))) is not None:
        patch.untried = ()


def _before_base(
    argument_names: tuple[str, ...], module: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    patch, inputs = module._sequence_parallel_patch, _arguments_by_name(argument_names, args, kwargs)
    wrong = inputs.pop("wrong_shard", "")
    patch.local = _is_local(patch, module, inputs)
    checkpointing.keep_attention(patch.layers, module, patch.sp)
    sources = _noisy_modules(patch, module)
    if patch.local:
        rope.tell(patch.ropes, None)
        if not patch.whole and inputs.get("use_cache") and inputs.get("past_key_values") is None:
            warn_of_cache(patch.sp.rank)
        if mistake := wrong_inputs(inputs):
            raise InputError(mistake)
        _begin_noise(patch, dropout.prepare_and_seed(sources, shared=False), inputs)
        return (), {**inputs, "sequence_parallel": False}
    if not wrong and whole_calls.is_whole(patch.sp, inputs):
        inputs = whole_calls.shard_inputs(module, patch.agreement, inputs)
    backward = torch.is_grad_enabled() and module.training
    positions, seed = agree_on_shard(patch.agreement, inputs, wrong, backward, sources)
    _begin_noise(patch, seed, inputs)
    if not module.training and inputs.get("use_cache") is None and getattr(module.config, "use_cache", False):
        log_once("sequence_parallel: use_cache is switched off where ranks share sequences, so past_key_values is None")
    inputs |= {"attention_mask": NO_MASK, "position_ids": positions, "use_cache": False}
    placement = inputs.pop("placement", None)
    if patch.ropes:
        local_tokens = tokens_of(inputs).shape[1]
        rope.tell(patch.ropes, rope.tokens_up_to_the_longest(local_tokens, patch.sp.size, placement))
    return (), {**inputs, "sequence_parallel": True if placement is None else placement}

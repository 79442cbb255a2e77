"""Registers sequence parallel attention with transformers, and switches models to it.

A forward is sharded or local. A local forward is that of the unpatched model: with a kv cache (`generate`), under
`whole_sequences`, and, on one rank, for batches that `shard_batches` did not make. A forward on a whole batch is
sharded inside, and its output is whole (`whole_calls`). Before a sharded forward its ranks agree, once, that each was
given its own tokens with their global positions. A hook on the base model does that. It tells attention by keyword
arguments that reach every layer. Checkpoints keep these, so a layer that backward computes again is the same.
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
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.config.settings import check_heads
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.errors import ConfigError, InputError, as_seqpar_error
from ds_seqpar.runtime.agreement import assert_ranks_agree
from ds_seqpar.runtime.input_checks import AttentionOptions
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
from ..memory.weight_slices import PARTS
from . import checkpointing, rope, whole_calls
from .agreement import UNSHIFTED, WHOLE_ONLY, Agreement, agree_on_shard, tokens_of, warn_of_cache, wrong_inputs
from .losses import ExpertBalance, check_output, has_experts, shard_loss_error, tried_loss

SP, MASK = "sequence_parallel", "sequence_parallel_mask"  # attributes of an attention module
# given to the base model so that it makes no mask of (local tokens)^2: a mask of four dims reaches the layers unchanged
NO_MASK = torch.empty(1, 1, 0, 0)


@dataclasses.dataclass(kw_only=True)
class _Patch:
    """The state of a patched base model. layers: those that can be checkpointed. ropes: embeddings that are told the
    longest position. experts: None where the loss has no part that balances experts. above: modules around the base
    model that are given its outputs whole, since their loss may be any. untried: those whose loss of a sharded batch is
    still to be tried. whole: whether `whole_sequences` is active, which makes forwards local. local: whether the last
    forward was local."""

    sp: SequenceParallel
    hooks: tuple[RemovableHandle, ...]
    agreement: Agreement
    layers: tuple[Any, ...]
    ropes: tuple[nn.Module, ...] = ()
    experts: ExpertBalance | None = None
    above: tuple[nn.Module, ...] = ()
    untried: tuple[nn.Module, ...] = ()
    whole: bool = False
    local: bool = False

    def __deepcopy__(self, memo: dict) -> _Patch:
        """A copy of a model is not inside `whole_sequences`, even where it is made there."""
        return _Patch(**{**{name: copy.deepcopy(x, memo) for name, x in vars(self).items()}, "whole": False})


@printed_once
def patch_attention(model: PreTrainedModel, sp: SequenceParallel) -> PreTrainedModel:
    """Makes every attention of the model exact over sequences that are shared by `sp.size` ranks. Returns the model.

    model: a transformers model, also inside a peft model or torch.compile. Call it with whole batches, the same on the
    ranks that share them, and it gives whole outputs; or with what `sp.shard_batches` gives, and it gives parts.
    Raises ConfigError for a model that cannot be patched (see families), whose heads do not fit, or that is patched
    with another SequenceParallel.
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
    tiled = tiled_modules.has_tiled_loss(inner)  # a forward of its own then runs once for each tile
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
    """Makes a SequenceParallel with these settings (`size=2`, as in the "sequence_parallel" section of a DeepSpeed
    JSON), patches the model with it, and returns it. The model is then called as before, with whole batches that are
    the same on the ranks of a sequence: those of `sp.data_rank` of `sp.data_size`.

    Collective over the world. Raises ConfigError as `patch_attention` does, and for settings that do not fit.
    """
    config, its_heads, error = None, None, None
    try:
        check_patch(model, None)
        config, its_heads = SequenceParallelConfig.from_dict(settings), heads(unwrapped(model))
    except Exception as reason:  # told to all ranks, which would wait for this one
        error = as_seqpar_error("reading a model that is to share sequences failed", reason)
    sp = SequenceParallel(config, heads=its_heads, error=error)
    try:
        patch_attention(model, sp)
    except Exception as reason:
        error = as_seqpar_error("patching a model failed", reason)
    assert_ranks_agree(
        sp.control_world, "models", {"model": type(unwrapped(model)).__name__}, error=error, call="share_sequences"
    )
    return sp


def check_patch(model: nn.Module, sp: SequenceParallel | None) -> None:
    """Raises ConfigError where `patch_attention(model, sp)` would; sp None: with any."""
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
    """Gives the model back the attention it had. A model that is not patched stays as it is. Returns the model."""
    inner = unwrapped(model)
    patch = _patch_of(inner)
    if patch is None:
        return model
    for hook in patch.hooks:
        hook.remove()
    for module in attentions(inner):
        if hasattr(module, SP):  # modules that were added after the patch have none
            module.config = module.config.own
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
    """The SequenceParallel that the model is patched with."""
    patch = _patch_of(unwrapped(model))
    return patch.sp if patch else None


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """A context in which forwards of a patched model are local, as those of the unpatched model. Each rank gives whole
    sequences of its own, with padding masks, labels that the model shifts, or a kv cache.

    model: as for patch_attention, or a DeepSpeed engine or DDP module with it. Under ZeRO-3 all ranks must make as many
    forwards, since they fetch parameters from one another.
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
    """Whether a patched model's own forward is given whole outputs of the base model, of which its loss may be any."""
    patch = _patch_of(unwrapped(model))
    return patch is not None and bool(patch.above)


def _patch_of(model: nn.Module) -> _Patch | None:
    return getattr(getattr(model, "base_model", None), "_sequence_parallel_patch", None)


def _hook(module: nn.Module, function: Callable[..., tuple]) -> RemovableHandle:
    """Registers function(names of the forward's arguments, module, args, kwargs) to be called before each forward."""
    names = tuple(inspect.signature(module.forward).parameters)
    return module.register_forward_pre_hook(functools.partial(function, names), with_kwargs=True)


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
        given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: value for name, value in given.items() if value is not None}
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
    options, parts = AttentionOptions(mask, None, scaling, softcap=softcap, sinks=s_aux), getattr(module, PARTS, 1)
    if isinstance(sequence_parallel, BatchLayout):
        return _placed(module.sequence_parallel, q, k, v, options, parts, sequence_parallel), None
    return module.sequence_parallel.attention_agreed(q, k, v, options, parts), None


def _placed(
    sp: SequenceParallel, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, parts: int, placement: BatchLayout
) -> Tensor:
    """Attention with a batch's BatchLayout. It runs outside of compiled graphs, since each batch has another mask."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_placed)(sp, q, k, v, options, parts, placement)
    mask = placement.mask_with_window(options.mask.window)
    return sp.attention_agreed(q, k, v, options._replace(mask=mask, shards=placement.shards), parts)


def _named(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_local(patch: _Patch, module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether a forward is local. A kv cache means generation, which is local, unless the model is trained or the
    labels are sharded. One rank has whole sequences in any case. There a forward is local too, but not for batches of
    `shard_batches` or batches with labels of a Trainer, which have tiles and checkpoints as on several ranks."""
    if patch.whole or (
        patch.sp.size == 1
        and given.get("shift_labels") is None
        and given.get("placement") is None
        and not (given.get("labels") is not None and whole_calls.is_moved_batch(tokens_of(given)))
    ):
        return True
    cached = given.get("past_key_values") is not None or bool(given.get("use_cache"))
    return cached and given.get("shift_labels") is None and not (module.training and torch.is_grad_enabled())


def _sources(patch: _Patch, module: nn.Module) -> list[Any]:
    """The modules that draw by token in a forward. In a compiled one they draw torch's numbers, or raise."""
    if torch.compiler.is_compiling() or not module.training or patch.whole or (patch.local and patch.sp.size > 1):
        return []
    model = patch.agreement.model()
    return dropout.noisy_modules(module if model is None else model)


def _begin(patch: _Patch, seed: int, given: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        dropout.begin_forward(patch.sp, seed, tokens_of(given), given.get("placement"), patch.local)


def _before_head(
    names: tuple[str, ...], module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Shards a whole batch, unless the module is given whole outputs: then the base model shards it. For a sharded
    batch that the module cannot take it sets "wrong_shard", a sentence. The base model's hook then raises it, on all
    ranks."""
    given, inner = _named(names, args, kwargs), unwrapped(module)
    patch = _patch_of(inner)
    if patch is None or _is_local(patch, module, given):
        return args, kwargs
    if patch.experts is not None:
        check_output(inner, given)
    if whole_calls.is_whole(patch.sp, given):
        if module not in patch.above:
            return (), whole_calls.shard_inputs(module, patch.agreement, given)
        whole_calls.compare_inputs(patch.sp, inner, given, torch.compiler.is_compiling())
    elif not is_causal_lm(inner):
        kwargs["wrong_shard"] = WHOLE_ONLY.format(type(inner).__name__)
    elif given.get("labels") is not None and given.get("shift_labels") is None:
        kwargs["wrong_shard"] = UNSHIFTED
    elif given.get("labels") is not None and module in patch.untried:
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
    """Raises ConfigError on all ranks of a sequence where the loss of a sharded batch is more than token losses."""
    sp, items = patch.sp, kwargs.get("num_items_in_batch")
    if items is None or kwargs.get("labels") is None:
        return
    tried = tried_loss(unwrapped(module), kwargs["shift_labels"], float(items), output, 1.0)
    error = shard_loss_error(sp.groups.control, sp, tried, "initialize")
    assert_ranks_agree(sp.groups.control, "loss of the model", None, error=error)
    patch.untried = tuple(head for head in patch.untried if head is not module)


def trust_loss(model: nn.Module) -> None:
    """Leaves out the trial of a patched model's loss in its first sharded forward, as `initialize` does: it has tried
    the loss, or was told not to."""
    if (patch := _patch_of(unwrapped(model))) is not None:
        patch.untried = ()


def _before_base(
    names: tuple[str, ...], module: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    patch, given = module._sequence_parallel_patch, _named(names, args, kwargs)
    wrong = given.pop("wrong_shard", "")
    patch.local = _is_local(patch, module, given)
    checkpointing.keep_attention(patch.layers, module, patch.sp)
    sources = _sources(patch, module)
    if patch.local:
        rope.tell(patch.ropes, None)
        if not patch.whole and given.get("use_cache") and given.get("past_key_values") is None:
            warn_of_cache(patch.sp.rank)
        if mistake := wrong_inputs(given):
            raise InputError(mistake)
        _begin(patch, dropout.prepare_and_seed(sources, shared=False), given)
        return (), {**given, "sequence_parallel": False}
    if not wrong and whole_calls.is_whole(patch.sp, given):
        given = whole_calls.shard_inputs(module, patch.agreement, given)
    backward = torch.is_grad_enabled() and module.training
    positions, seed = agree_on_shard(patch.agreement, given, wrong, backward, sources)
    _begin(patch, seed, given)
    given |= {"attention_mask": NO_MASK, "position_ids": positions, "use_cache": False}
    placement = given.pop("placement", None)
    if patch.ropes:
        own = tokens_of(given).shape[1]
        rope.tell(patch.ropes, rope.tokens_up_to_the_longest(own, patch.sp.size, placement))
    return (), {**given, "sequence_parallel": True if placement is None else placement}

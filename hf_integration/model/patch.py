"""Register sequence parallel attention with transformers, and patch models to use it. The hooks are in the module
`forward`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.base.errors import ConfigError, InputError, as_seqpar_error
from ds_seqpar.core.compiler.sharding.heads import check_heads
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.core.runtime.buffers import sum_dtype
from ds_seqpar.core.runtime.operator import DENSE
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.data.inputs import InputSpec, joined
from ds_seqpar.guards.agreement import together
from ds_seqpar.operators.latent import LATENT
from ds_seqpar.operators.segments import segments_of

from .. import accelerators, gathered_past, latent, mixers, sparse
from ..compat import ATTENTION
from ..context import KEYWORD, ForwardContext, current
from ..families import (
    NAME,
    base_of,
    check_adapters,
    check_config,
    check_model,
    heads_around,
    is_causal_lm,
    is_plain_head,
    keep_name,
    local_attention,
    name_before,
    patch_of,
    switch_attention,
    token_modules,
    unwrapped,
    vocabulary,
)
from ..generation import generate
from ..graph_breaks import between_graphs
from ..inputs import TABLE
from ..look.facts import Facts, masks, modules_of, text_config
from ..look.known import facts_of, heads, heads_by_layer, is_tested
from ..look.prove import prove
from ..media import towers
from ..memory import head_chunks, tiled_modules
from ..module_patch import is_overridden, patch_on, patched, restore
from . import checkpointing, finite, media, rope, whole_calls
from .agreement import Agreement
from .forward import NO_MASK, Patch, before_base, before_head, before_stack, hook
from .losses import ExpertBalance, check_loss, has_loss
from .weights import check_not_flattened

# optional attention arguments; the first may be positional
OPTIONS = ("dropout", "scaling", "sliding_window", "softcap", "s_aux")


def patch_attention(
    model: PreTrainedModel, sp: SequenceParallel, inputs: Mapping[str, InputSpec] | None = None
) -> PreTrainedModel:
    """Make every attention in a model exact for sequences that `sp.size` ranks share.

    Call the patched model with whole batches, which must be the same on the ranks that share them, to get whole
    outputs. Alternatively, call the model with the output of `sp.shard_batches` to get outputs for this rank's shards.
    If a model is already patched with `sp`, only new `inputs` are added.

    Args:
        model: A transformers model, possibly inside a peft model or `torch.compile`. The model is patched in place.
        sp: The SequenceParallel whose ranks share each sequence.
        inputs: How ranks share the model's custom arguments, by name, for example {"weights": tokens()} with `tokens`
            from `ds_seqpar.data.inputs`. transformers' own arguments need no entry.

    Returns:
        The model.

    Raises:
        ConfigError: The model cannot be patched (see `families`), its numbers of heads are unsuitable, the model is
            already patched with another SequenceParallel, or `inputs` contradict a known name.

    Examples:
        >>> sp = SequenceParallel(SequenceParallelConfig(size=2), heads=heads(model))
        >>> model = patch_attention(model, sp)
    """
    if not isinstance(sp, SequenceParallel):
        raise ConfigError(
            f"patch_attention needs a SequenceParallel; got {type(sp).__name__}, make one of a SequenceParallelConfig"
        )
    inner = unwrapped(model)
    if (patch := patch_of(inner)) is not None:
        check_patch(model, sp)
        patch.agreement.inputs = joined(patch.agreement.inputs, inputs)
        patch.agreement.compared &= not inputs
        _patch_heads(patch, model)
        return model
    declared = joined(TABLE, inputs)
    facts, is_new = _checked(model, inner, sp), not is_tested(inner)
    cuts = towers.cuts_for(inner, sp)
    if sp.size > 1 and (sp.config.prove == "always" or (sp.config.prove == "auto" and is_new)):
        patch = functools.partial(patch_by, sp=sp, facts=facts, cuts=cuts)
        no_media = prove(inner, sp, facts, lambda small: patch(small, small), unpatch_attention)
        facts = dataclasses.replace(facts, no_media=no_media)
    return patch_by(model, inner, sp, facts, declared, cuts)


def _checked(model: Any, inner: Any, sp: SequenceParallel) -> Facts:
    """Check that a model can be patched, and return the model's facts.

    The call is collective across the ranks of `sp` if the facts must be detected at run time.
    """
    if not isinstance(inner, PreTrainedModel) or is_tested(inner):
        check_patch(model, sp)
        return facts_of(inner)
    with together(sp.groups.control, "looking at a model", "facts of a model", call="patch_attention") as agreed:
        check_patch(model, sp)
        agreed.value = facts = facts_of(inner)
    return facts


def patch_by(
    model: PreTrainedModel,
    inner: Any,
    sp: SequenceParallel,
    facts: Facts,
    inputs: Mapping[str, InputSpec] = TABLE,
    cuts: Mapping[str, towers.Cut] | None = None,
) -> PreTrainedModel:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    attending = modules_of(inner, facts)
    before = switch_attention(inner, NAME, attending)
    keep_name(text_config(inner.config), before)
    patched(inner).base = facts.base
    for module, (shape, length) in zip(attending.values(), masks(inner, facts), strict=True):
        own = patched(module)
        own.sp, own.mask = sp, Mask(window=length if shape == "window" else None)
        own.chunk = length if shape == "chunk" else None
        head_chunks.use_head_chunks(module)
        latent.use_latent(module)
    mixing = modules_of(inner, facts, "mixers")
    for module in mixing.values():
        mixers.share(module, sp)
    gathered = modules_of(inner, facts, "gathered")
    for module, (_, length) in zip(gathered.values(), masks(inner, facts, "gathered"), strict=True):
        gathered_past.share(module, sp, length)
    selecting = [*filter(sparse.selects, gathered.values())] if facts.selects else []
    for module in selecting:
        patched(module).selecting = selecting
    ropes = rope.embeddings(base_of(inner))
    stack = None if facts.stack is None else inner.get_submodule(facts.stack)
    patch = Patch(
        sp=sp,
        facts=facts,
        stack=stack,
        hooks=[
            *finite.watch(model, sp),
            *hook(base_of(inner), before_base),
            *(hook(stack, before_stack) if stack is not None else ()),
            *(handle for module in ropes for handle in rope.hook(module)),
            *towers.divide(inner, sp, cuts or {}),
        ],
        agreement=Agreement(sp, inner, (*attending, *mixing, *gathered), facts.skips, inputs),
        layers=checkpointing.layers_of(base_of(inner)),
        ropes=ropes,
        takes_keys=gathered_past.takes_keys(gathered.values()),
        experts=ExpertBalance(sp) if facts.balance and hasattr(inner, "num_experts_per_tok") else None,
        tiled=tiled_modules.tile(inner, sp.config),
    )
    for module in {base_of(inner), stack} - {None}:
        patched(module).model = patch
    _patch_heads(patch, model)
    accelerators.watch(base_of(inner))
    return model


def _patch_heads(patch: Patch, model: nn.Module) -> None:
    """Hook all modules that wrap a patched base model and have no hooks yet.

    Several heads may share one base model.
    """
    inner = unwrapped(model)
    around = tuple(head for head in heads_around(model) if head not in patch.heads)
    tiled = is_overridden(inner, "forward")  # a custom forward then runs once per loss tile
    patch.heads += around
    patch.above += tuple(
        head for head in around if not tiled and not (is_plain_head(head) and patch.facts.shift_labels)
    )
    patch.untried += around if is_causal_lm(inner) else ()
    patch.hooks += [handle for head in around for handle in hook(head, before_head)]
    if inner in around or inner is base_of(inner):
        patch.hooks += [handle for x in token_modules(inner) for handle in whole_calls.compute_on_parts(x, patch.sp)]
    patch.sp.sharding.vocabularies[inner] = vocabulary
    patch.sp.sharding.inputs[inner] = patch.agreement.inputs
    generate.install(inner)


def share_sequences(
    model: PreTrainedModel, *, inputs: Mapping[str, InputSpec] | None = None, **settings: Any
) -> SequenceParallel:
    """Make a SequenceParallel, and patch a model with it.

    Call the model as before, with whole batches that are equal on all ranks that share a sequence. Distribute batches
    by `sp.data_rank` and `sp.data_size`. The call is collective across all ranks.

    Args:
        model: See `patch_attention`.
        inputs: See `patch_attention`.
        **settings: Settings by name, as in the "sequence_parallel" section of a DeepSpeed JSON.

    Returns:
        The SequenceParallel.

    Raises:
        ConfigError: The settings are unsuitable, or `patch_attention` cannot patch the model.

    Examples:
        >>> sp = share_sequences(model, size=2)
        >>> sampler = sp.sampler(data, shuffle=False)  # in place of DistributedSampler(data, shuffle=False)
    """
    config, model_heads, error = None, None, None
    try:
        check_patch(model, None)
        config, model_heads = SequenceParallelConfig.from_dict(settings), heads(unwrapped(model))
    except Exception as reason:  # reported to all ranks, which would otherwise keep waiting for this rank
        error = as_seqpar_error("reading a model that is to share sequences failed", reason)
    sp = SequenceParallel(config, heads=model_heads, error=error)
    with together(sp.control_world, "patching a model", "models", call="share_sequences") as agreed:
        agreed.value = {"model": type(unwrapped(model)).__name__}
        patch_attention(model, sp, inputs)
    return sp


def check_patch(model: nn.Module, sp: SequenceParallel | None) -> None:
    """Check that `patch_attention(model, sp)` can patch the model, without changing the model.

    Args:
        model: See `patch_attention`.
        sp: The SequenceParallel to patch with, or None to skip the checks that depend on `sp`.

    Raises:
        ConfigError: The model cannot be patched; see `patch_attention`.
    """
    check_adapters(model)
    check_not_flattened(model)
    inner = unwrapped(model)
    check_model(inner)
    facts = facts_of(inner)
    check_config(inner, facts.outside)
    mixers.check(modules_of(inner, facts, "mixers").values())
    gathered_past.check(modules_of(inner, facts, "gathered").values())
    if sp is None:
        return
    if patched_with(inner) not in (None, sp):
        raise ConfigError("the model is patched with another SequenceParallel; call unpatch_attention(model) first")
    for numbers in heads_by_layer(inner):
        check_heads(sp.config.ulysses, *numbers, size=sp.size, head_chunks=sp.config.head_chunks)
    if facts.mixers or facts.gathered:
        segments_of(sp.runtime.shards(4 * sp.multiple), (), sp.config.ulysses)
    tiled_modules.check_tiles(inner, sp.config)


def unpatch_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Restore a patched model's original attention. An unpatched model stays unchanged.

    Args:
        model: See `patch_attention`.

    Returns:
        The model.
    """
    inner = unwrapped(model)
    patch = patch_of(inner)
    if patch is None:
        return model
    for handle in patch.hooks:
        handle.remove()
    setattr(config := text_config(inner.config), ATTENTION, name_before(config))
    for head in (inner, *patch.heads):
        patch.sp.sharding.vocabularies.pop(head, None)
        patch.sp.sharding.inputs.pop(head, None)
    if patch.experts is not None:
        patch.experts.close()
    restore(inner, *patch.heads)
    return model


def patched_with(model: PreTrainedModel) -> SequenceParallel | None:
    """Return the SequenceParallel with which a model is patched.

    Args:
        model: See `patch_attention`.

    Returns:
        The SequenceParallel, or None if the model is not patched.
    """
    patch = patch_of(unwrapped(model))
    return patch.sp if patch else None


@contextlib.contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Context manager in which forwards of a patched model are local, as in the unpatched model.

    Each rank runs its own whole sequences, possibly with padding masks, labels that the model shifts, or a kv cache.
    Under ZeRO-3, all ranks must run the same number of forwards, since they fetch parameters from one another.

    Args:
        model: See `patch_attention`. May also be a DeepSpeed engine or DDP module that contains a patched model.

    Examples:
        >>> with whole_sequences(model):
        ...     loss = model(**batch).loss
    """
    inner = unwrapped(model)
    patch = patch_of(inner)
    if patch is None:
        yield
        return
    patch.whole.append(None)
    patch.sp.sharding.unused.is_met = True  # local evaluation does not use sharded batches
    try:
        yield
    finally:
        patch.whole.pop()


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Implement transformers' attention interface with sequence parallel attention.

    The query has shape (B, H, S, D), the key and value have shape (B, Hkv, S, D), and the output has shape (B, S, H,
    D). If key and value have three dims, they are a latent and its expansion matrix (see `latent`).
    """
    context: ForwardContext | None = kwargs.pop(KEYWORD, None)
    if context is None and not torch.compiler.is_compiling():
        context = current()  # for models that do not pass keywords to attention
    own: Any = patch_on(module)
    if context is None and own is not None:
        raise InputError("patched attention was reached past its model's forward; call the model that was patched")
    if context is None or context.mode == "local":
        return local_attention(module, query, key, value, attention_mask, *args, **kwargs)
    if own is None:
        raise ConfigError(
            f"sequence parallel attention needs layers that patch_attention has found; got a {type(module).__name__} "
            "that is new, call unpatch_attention(model), then patch it again"
        )
    kwargs |= dict(zip(OPTIONS, args, strict=False))
    dropout, scaling, sliding_window, softcap, sinks = map(kwargs.get, OPTIONS)
    if dropout:
        raise ConfigError(f"sequence parallel attention needs attention_dropout 0; got {dropout}")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        query = _scaled_by_position(module, query, kwargs.get("position_ids", context.positions), context)
    sp, mask, chunk = own.sp, own.mask, own.chunk
    if sliding_window not in (None, mask.window):  # None if the model sets the window only in the mask
        raise ConfigError(
            f"layer {module.layer_idx} needs one sliding window in its attention and in the config; got "
            f"{sliding_window} and {mask.window}, make sliding_window and layer_types agree, then patch the model"
        )
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (query, key, value))
    operator = LATENT if value.dim() == 3 else DENSE
    layer = None if torch.compiler.is_compiling() else getattr(module, "layer_idx", None)
    options = AttentionOptions(mask, None, scaling, softcap=softcap, sinks=sinks, operator=operator, layer=layer)
    layout, cached = context.layout, context.cached
    if cached is not None:
        made = context.media
        masks = () if made is None else media.masks_of_rows(mask, made.blocks(attention_mask), cached)
        return cached.attend(getattr(module, "layer_idx", None) or 0, q, k, v, options, chunk, masks), None
    if layout is not None or chunk is not None:
        call = context.media, attention_mask
        return _attention_with_layout(sp, q, k, v, options, own.head_chunks, layout, chunk, *call), None
    return sp.attention_agreed(q, k, v, options, own.head_chunks), None


def _mask(*, config: Any, **given: Any) -> Any:
    """Implement transformers' mask interface. Return the unpatched model's mask, or a stand-in in sharded forwards."""
    context = None if torch.compiler.is_compiling() else current()
    if context is not None and context.mode not in (None, "local"):
        if context.media is None or context.spec is not None or context.mode == "decode":
            return NO_MASK
        return context.media.add_mask(given["mask_function"], given)
    if (name := name_before(config)) not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    if getattr(config, "num_kv_shared_layers", 0):  # Gemma-4 drops queries unless its attention is named "sdpa"
        given["allow_is_causal_skip"] = False
    return ALL_MASK_ATTENTION_FUNCTIONS[name](config=config, **given)


def _scaled_by_position(module: Any, query: Tensor, positions: Tensor | None, context: ForwardContext) -> Tensor:
    """Scale queries (B, H, S, D) by position, as in Llama 4.

    Llama 4's own code would scale a rank's tokens as if they were the first new tokens.
    """
    cached, first = context.cached, 0
    if cached is not None:
        if cached.is_decode:
            return query
        first, positions = cached.kept.columns, cached.held_columns()
    if positions is None:
        raise InputError("attention that scales queries by position needs position_ids; got none, compile the layers")

    def factors(positions: Tensor) -> Tensor:
        scales = torch.log1p(torch.floor((positions.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        return scales.to(sum_dtype(query.dtype))[:, None, :, None]

    taken = torch.arange(first, first + query.shape[2], device=query.device)[None]
    return (query * (factors(positions.to(query.device)) / factors(taken))).to(query.dtype)


@between_graphs
def _attention_with_layout(
    sp: SequenceParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    head_chunks: int,
    layout: BatchLayout | None,
    chunk: int | None,
    call: media.MediaCall | None,
    made: Tensor | None,
) -> Tensor:
    """Compute attention with a batch's mask.

    The function runs outside compiled graphs, since the mask differs between batches.
    """
    mask, tokens = options.mask, q.shape[1] * sp.size
    if layout is not None:
        mask, tokens = layout.mask_with_window(mask.window), layout.tokens
    if chunk is not None and not (layout is not None and layout.fits(chunk)):
        mask = _in_chunks(mask, chunk, tokens)
    if call is not None:
        mask = media.with_blocks(mask, call.blocks(made))
    shards = None if layout is None else layout.shards
    return sp.attention_agreed(q, k, v, options._replace(mask=mask, shards=shards), head_chunks)


@functools.lru_cache(maxsize=64)
def _in_chunks(mask: Mask, chunk: int, tokens: int) -> Mask:
    """Return a mask under which each chunk of a document attends only to itself."""
    if mask.parents:
        raise InputError(
            f"layers that attend in chunks need documents without parents; got a layout with {mask}, give each "
            "document a row of its own, behind copies of its parents"
        )
    documents = itertools.pairwise((*(mask.documents or (0,)), tokens))
    return dataclasses.replace(mask, documents=tuple(x for a, b in documents for x in range(a, b, chunk)))


def check_engine(engine: Any, sp: SequenceParallel) -> None:
    """Check in an engine's first forward with labels that the loss is correct and that the model calls `sp.attention`.

    Patched models run the same checks themselves. Only transformers causal language models are checked.
    """
    if patch_of(unwrapped(engine.module)) is not None or not has_loss(engine.module):
        return

    @between_graphs
    def check(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if check_loss(sp, module, kwargs, output, error=sp.sharding.unused.error()):
            handle.remove()

    handle = engine.module.register_forward_hook(check, with_kwargs=True)


def trust_loss(model: nn.Module) -> None:
    """Skip the check of a patched model's loss in its first sharded forward."""
    if (patch := patch_of(unwrapped(model))) is not None:
        patch.untried = ()

"""Hooks around a patched model's forwards that decide each forward's mode and change its arguments.

A forward is sharded, whole, a decode step, or local.

- Local forwards compute the unpatched model. Forwards are local inside `whole_sequences`. On a single rank, forwards
  are also local for batches that do not come from `shard_batches`.
- Whole forwards shard a whole batch and return whole outputs (see `whole_calls`). A whole forward can use a kv cache
  that is distributed across ranks (see `generation`).
- Decode steps have one new token per row. All ranks compute the new token.

Before each forward that is not local, the ranks check once that each rank received its own tokens with global positions
(see `agreement`). The outermost module in the call decides the mode from all its arguments, and creates the
`ForwardContext`. The base model passes the context to its layers. Checkpoints store the context, so that backward
recomputes a layer in the original mode.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import InputError
from ds_seqpar.base.log import log_once
from ds_seqpar.data.random_states import torch_states
from ds_seqpar.data.sharding import layout_of
from ds_seqpar.guards.one_thread import check_thread

from ..context import KEYWORD, LOCAL, SHARDED, ForwardContext, ForwardState, Mode, current, set_current
from ..families import base_of, is_causal_lm, keep_name, patch_of, unwrapped
from ..generation.forward import takes_cache
from ..graph_breaks import between_graphs
from ..inputs import TABLE
from ..look.facts import Facts, text_config
from ..module_patch import patched
from ..noise import OwnNoise, drawn_since
from . import checkpointing, media, rope, whole_calls
from .agreement import UNSHIFTED, WHOLE_ONLY, Agreement, agree_in_graph, tokens_of, wrong_inputs
from .losses import ExpertBalance, check_loss, check_output
from .prompts import may_share

# prevents the base model from making a (local tokens)^2 mask, since a 4-dim mask reaches the layers unchanged
NO_MASK = torch.empty(1, 1, 0, 0)
WHOLE_COMPILED = (
    "a model in torch.compile needs batches of sp.shard_batches; got a whole batch, or a kv cache, compile its layers "
    "instead (layer.compile()), which take any"
)


NUMBERED = (
    "a cache of {0}, whose positions are one list for all rows, needs rows without padding; got some, give it prompts "
    "of one length"
)


@dataclasses.dataclass(kw_only=True)
class Patch:
    """The state of a patched base model."""

    sp: SequenceParallel
    facts: Facts
    hooks: list[Any]  # handles whose `remove` undoes the patch
    agreement: Agreement
    layers: tuple[Any, ...]  # the layers that can be checkpointed
    ropes: tuple[nn.Module, ...] = ()  # position embeddings that need the longest position
    takes_keys: bool = False  # whether the model computes a layer argument from a 2-dim mask
    experts: ExpertBalance | None = None  # None if the loss has no expert balance term
    stack: nn.Module | None = None  # the module in the base model that shards calls with media
    heads: tuple[nn.Module, ...] = ()  # modules around the base model
    above: tuple[nn.Module, ...] = ()  # modules in `heads` that get whole outputs and may compute any loss
    untried: tuple[nn.Module, ...] = ()  # modules whose loss on a sharded batch has not been checked yet
    tiled: bool = False  # whether any module is tiled
    evaluating: bool = False  # whether forwards without gradients also compute the loss in tiles
    # one item per active `whole_sequences` in any thread; forwards are local unless the list is empty
    whole: list[None] = dataclasses.field(default_factory=list)

    def __deepcopy__(self, memo: dict) -> Patch:
        """Copy the patch state. A copied model is not inside `whole_sequences`, even if the original is."""
        return Patch(**{**{name: copy.deepcopy(x, memo) for name, x in vars(self).items()}, "whole": []})

    @property
    def is_one_graph(self) -> bool:
        """Whether a compiled forward never reads the context between its graphs."""
        return self.facts.keywords and not self.ropes and not self.tiled


def text_of(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch for a patched model without its media.

    Raise an error if the model does not support these media.
    """
    inner: Any = unwrapped(model)
    patch = patch_of(inner)
    return batch if patch is None else media.text_of(patch.facts, batch, inner.config)


def hook(module: nn.Module, before: Before) -> list[RemovableHandle]:
    """Register the hooks of a patched base model, of its stack, or of a module that wraps the base model.

    Args:
        module: The module.
        before: The function that runs before the module's forward: `before_base`, `before_stack` or `before_head`.
    """
    bind = functools.partial(_by_name, _argument_names(module))
    before = functools.partial(before, bind)
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(functools.partial(_after, bind), with_kwargs=True),
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a forward's positional arguments.

    For wrappers that only pass arguments through, return the inner module's argument names.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    inner = unwrapped(module)
    return names if names or inner is module else _argument_names(inner)


def _by_name(names: tuple[str, ...], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


Bind = Callable[[tuple, Mapping[str, Any]], dict[str, Any]]
Before = Callable[[Bind, Any, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]]

# ---- which mode


def _is_local(patch: Patch, module: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether a forward is local.

    A single rank always has whole sequences, so its forwards are usually local too. On a single rank, forwards for
    batches from `shard_batches` are not local. Forwards for a Trainer's batches with labels are not local either, since
    they use tiles and checkpoints as on several ranks. Calls whose rows may share prompts are not local either.
    """
    if patch.whole or patch.sp.size > 1:
        return bool(patch.whole)
    moved = inputs.get("labels") is not None and whole_calls.is_moved_batch(tokens_of(inputs))
    shares = may_share(patch.sp, unwrapped(module), patch.facts, inputs)
    if not _is_sharded(inputs) and media.names_of(patch.facts, inputs):
        return True
    return not (_is_sharded(inputs) or moved or shares) or takes_cache(module, inputs)


def _is_sharded(inputs: Mapping[str, Any]) -> bool:
    """Return whether the arguments include a tensor that `shard_batches` adds to every shard."""
    return inputs.get("placement") is not None or inputs.get("shift_labels") is not None


def _mode(patch: Patch, module: nn.Module, inputs: Mapping[str, Any]) -> Mode:
    if _is_local(patch, module, inputs):
        return "local"
    if not torch.compiler.is_compiling():
        check_thread()
    if wrong_inputs(inputs) or _is_sharded(inputs):  # the agreement will report the error
        return "sharded"
    return "decode" if takes_cache(module, inputs) and tokens_of(inputs).shape[1] == 1 else "whole"


def _begin(patch: Patch, module: nn.Module, inputs: Mapping[str, Any]) -> ForwardContext:
    """Return a context for a module's forward.

    The context is complete if an enclosing module has already decided the mode. The context is current until `_leave`,
    and becomes current before any code can fail, so that `_leave` also ends the context after an exception.
    """
    outer = current()
    context = ForwardContext(module=module, outer=outer)
    around = outer is not None and (outer.module in patch.heads or outer.media is not None)
    if outer is not None and around and outer.module is not module:
        if outer.is_undecided:
            context = context.replace(within=True, media=outer.media)
        elif not outer.state.begun and _continues(patch, inputs, outer):
            context = outer.replace(module=module, outer=outer, within=True)
    set_current(context)
    return context


def _continues(patch: Patch, inputs: Mapping[str, Any], outer: ForwardContext) -> bool:
    """Return whether a module is called with the enclosing context's shard."""
    given = inputs.get("position_ids")
    if given is None and not patch.facts.attention and outer.positions is not None and not wrong_inputs(inputs):
        return tokens_of(inputs).shape[1] == outer.positions.shape[1]  # heads do not pass positions on
    return given is outer.positions


def _complete(
    patch: Patch, module: nn.Module, inputs: dict[str, Any], context: ForwardContext, wrong: str, compiled: bool = False
) -> tuple[dict[str, Any], ForwardContext]:
    """Shard a whole batch, agree with the other ranks, and complete the context of a forward.

    Args:
        module: The outermost module that does not receive whole outputs from an inner module.
        inputs: The module's arguments by name.
        context: The module's context, with the mode set.
        wrong: A sentence that describes a known error in the arguments, or "" if none is known.
        compiled: Whether the call runs between the graphs of a compiled model.

    Returns:
        (the arguments, with this rank's shard; the context).
    """
    if context.mode == "whole":
        inputs, context = whole_calls.shard_inputs(patch.agreement, patch.facts, inputs, context)
    elif context.mode == "decode":
        context = whole_calls.with_cache(patch.agreement, patch.facts, inputs, context)
    layout, rope_tokens, cached = None, None, context.cached
    if cached is not None and len(cached.rows) > 1 and any(map(rope.counts, patch.ropes)):
        wrong = NUMBERED.format(unwrapped(module).config.model_type)
    if context.mode == "decode":
        assert context.compared is not None
        patch.agreement.agree_on_step(inputs, context.compared)
    elif context.mode == "local":
        if mistake := wrong_inputs(inputs):
            raise InputError(mistake)
    else:
        if context.mode == "sharded" and (names := media.names_of(patch.facts, inputs)):
            wrong = wrong or TABLE["pixel_values"].sentence.format(names[0])
        layout, backward = layout_of(inputs.get("placement")), torch.is_grad_enabled() and module.training
        patch.agreement.agree(inputs, wrong, backward, compiled, context.compared)
        if patch.ropes and cached is not None:
            rope_tokens = int(cached.positions.max()) + 1
        elif patch.ropes and context.shared is not None:
            rope_tokens = context.shared.shape[1]
        elif patch.ropes:
            rope_tokens = tokens_of(inputs).shape[1] * patch.sp.size if layout is None else layout.longest
    if cached is not None:
        cached.kept.running = True
    if not context.has_all_tokens and not compiled:
        context.state.noise = OwnNoise(patch.sp, unwrapped(module), tokens_of(inputs).shape[1], layout)
    return inputs, context.replace(layout=layout, positions=inputs.get("position_ids"), rope_tokens=rope_tokens)


# ---- modules around the base model


def before_head(bind: Bind, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Begin a forward of a module that wraps the base model.

    A module that receives whole outputs leaves sharding to the base model.
    """
    inner, inputs = unwrapped(module), bind(args, kwargs)
    patch = patch_of(inner)
    if patch is None:
        return args, kwargs
    if torch.compiler.is_compiling():  # in a graph, only the base model's hooks are active
        if not wrong_inputs(inputs):
            _check_compiled(patch, module, inputs)
        return args, kwargs
    context = _begin(patch, module, inputs)
    if context.mode is not None or wrong_inputs(inputs):  # arguments may have module-specific names
        return args, kwargs
    mode, wrong = _mode(patch, module, inputs), ""
    context = context.replace(mode=mode)
    if not context.has_all_tokens and patch.experts is not None:
        check_output(inner, inputs)
    if _begins_media(patch, inputs, context):
        context = _begin_media(patch, inner, inputs, context)
        set_current(context)
        return ((), context.media.around(inputs)) if context.media.documents else (args, kwargs)
    if context.is_undecided and context.media is None and module in patch.above:
        whole_calls.compare_inputs(patch.agreement, inner, inputs)
    elif context.media is None:
        if mode == "sharded":
            wrong = _wrong_shard(inner, inputs)
            tries_loss = module in patch.untried and inputs.get("labels") is not None
            context = context.replace(state=ForwardState(losses=[] if tries_loss else None))
        inputs, context = _complete(patch, module, inputs, context, wrong)
    set_current(context)
    if context.cached is not None and patch.facts.keywords:
        return (), {**inputs, KEYWORD: context}  # a compiled base model cannot read the ContextVar
    return ((), inputs) if context.spec is not None else (args, kwargs)


def _check_compiled(patch: Patch, module: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise InputError on all ranks for a batch that a compiled model does not support."""
    inner, mode = unwrapped(module), _mode(patch, module, inputs)
    wrong = WHOLE_COMPILED if mode in ("whole", "decode") else ""
    if mode == "sharded" and module is not base_of(inner):
        wrong = _wrong_shard(inner, inputs)
    if wrong:
        torch.compiler.disable(patch.agreement.agree)(inputs, wrong, False, True)


def _begins_media(patch: Patch, inputs: Mapping[str, Any], context: ForwardContext) -> bool:
    """Return whether a module is the outermost module of a call that is sharded at the inner stack."""
    return context.is_undecided and context.media is None and media.is_shared_by_stack(patch.facts, inputs)


def _begin_media(patch: Patch, inner: Any, inputs: dict[str, Any], context: ForwardContext) -> ForwardContext:
    """Compare the arguments of a call with media, and return the call's context. The inner stack will shard its own
    arguments.
    """
    documents, error = media.checked(patch.facts, inputs, inner.config)
    whole_calls.compare_inputs(patch.agreement, inner, inputs, media.names_of(patch.facts, inputs), error)
    shape, states = tokens_of(inputs).shape[:2], torch_states(patch.sp.device)
    documents = documents if patch.facts.outside else ()
    return context.replace(media=media.MediaCall(shape, media.layout_in(inputs), states, documents=documents))


def _wrong_shard(inner: nn.Module, inputs: Mapping[str, Any]) -> str:
    """Return the reason why a module around the base model does not support a sharded batch, or "" if it does."""
    if not is_causal_lm(inner):
        return WHOLE_ONLY.format(type(inner).__name__)
    return UNSHIFTED if inputs.get("labels") is not None and inputs.get("shift_labels") is None else ""


# ---- the base model


def before_base(bind: Bind, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    patch, inputs = patched(module).model, bind(args, kwargs)
    keep_name(text_config(module.config))  # copying the model or calling set_attn_implementation changes the name
    checkpointing.keep_attention(patch.layers, module, patch.sp)
    if not torch.compiler.is_compiling():
        return (), _arguments(patch, module, inputs)
    if KEYWORD not in inputs:  # only an uncompiled head passes KEYWORD
        _check_compiled(patch, module, inputs)
        if patch.is_one_graph and layout_of(inputs.get("placement")) is None:
            return (), _in_graph(patch, module, inputs)
    return (), torch.compiler.disable(_arguments)(patch, module, inputs, compiled=True)


def before_stack(bind: Bind, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Shard the stack's arguments in a call with media.

    In all other calls the surrounding base model has already sharded the arguments.
    """
    context = None if torch.compiler.is_compiling() else current()
    if context is None or context.media is None or context.spec is not None:
        return args, kwargs
    return before_base(bind, module, args, kwargs)


def _in_graph(patch: Patch, module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a base model whose forward is part of a single graph."""
    if _mode(patch, module, inputs) == "local":
        if wrong := wrong_inputs(inputs):
            raise InputError(wrong)
        return {**inputs, KEYWORD: LOCAL}
    positions = agree_in_graph(patch.agreement, inputs, torch.is_grad_enabled() and module.training)
    return {**_for_layers(patch, module, {**inputs, "position_ids": positions}, SHARDED), KEYWORD: SHARDED}


def _arguments(patch: Patch, module: Any, inputs: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """Return a base model's arguments by name, with this rank's shard and the context for the layers."""
    given = inputs.pop(KEYWORD, None)  # the context of an uncompiled head
    context = _begin(patch, module, inputs)
    if given is not None:
        context = given.replace(module=module, outer=given, within=True)
    if context.mode is None:
        context = context.replace(mode=_mode(patch, module, inputs))
        is_stack = module is patch.stack
        if not is_stack and _begins_media(patch, inputs, context):
            context = _begin_media(patch, module, inputs, context)
            inputs = context.media.around(inputs)
        if not is_stack and context.media is not None:
            set_current(context)
            return inputs
        inputs, context = _complete(patch, module, inputs, context, "", compiled)
    context.state.begun = True
    set_current(context)
    if context.mode != "local":
        inputs = _for_layers(patch, module, inputs, context)
    return {**inputs, KEYWORD: context} if patch.facts.keywords else inputs


def _for_layers(patch: Patch, module: Any, inputs: dict[str, Any], context: ForwardContext) -> dict[str, Any]:
    """Return the arguments, changed so that the base model creates neither a mask nor its own cache."""
    call = context.media
    mask = NO_MASK if call is None or call.mask is None else call.mask
    inputs = {name: x for name, x in inputs.items() if name != "placement"} | {"attention_mask": mask}
    if (cached := context.cached) is not None:
        inputs |= {"use_cache": True, "past_key_values": cached.cache}
        if patch.takes_keys:
            inputs["attention_mask"] = cached.mask_of_keys()
        return inputs | ({"position_ids": cached.positions} if cached.is_decode else {})
    if not module.training and inputs.get("use_cache") is None and getattr(module.config, "use_cache", False):
        log_once("sequence_parallel: use_cache is switched off where ranks share sequences, so past_key_values is None")
    positions, facts, sp = inputs.get("position_ids"), patch.facts, patch.sp
    if positions is not None and (call is None or not call.counts):
        if context.layout is not None and not facts.counts_padding:
            counted = context.layout.position_ids(sp.sharding.ulysses(context.layout), sp.rank, after_padding=True)
            positions = counted.to(positions.device).expand_as(positions)
        positions = positions + facts.first_position if facts.first_position else positions
    if patch.takes_keys:
        tokens = tokens_of(inputs)
        longest = tokens.shape[1] * sp.size if context.layout is None else context.layout.longest
        inputs["attention_mask"] = torch.ones(len(tokens), longest, dtype=torch.long, device=tokens.device)
    return inputs | {"position_ids": positions, "use_cache": False}


# ---- after a forward


def _after(bind: Bind, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    inner, inputs = unwrapped(module), bind(args, kwargs)
    patch = patch_of(inner)
    context = None if patch is None else _context_after(patch, module, inputs)
    if patch is None or context is None or context.mode == "local":
        if patch is not None and patch.sp.size == 1 and context is not None and context.is_outermost:
            _agree_on_finite(patch)
        return output
    is_base, is_whole = module is base_of(inner), context.spec is not None
    if is_base and patch.experts is not None and context.module is not None:  # not in a graph
        context.state.router_logits = getattr(output, "router_logits", None)
    if not context.is_outermost:
        return output
    if context.cached is not None:
        context.cached.end()
    if context.mode == "decode":
        return output
    sharded_loss = context.mode == "sharded" and module in patch.untried and inputs.get("shift_labels") is not None
    if sharded_loss and (module in patch.above or context.module is not None):  # library heads stay in one graph
        _try_shard_loss(patch, module, inputs, output, context)
    _agree_on_finite(patch)
    if patch.experts is not None and not is_base:
        router_logits, context.state.router_logits = (
            context.state.router_logits,
            None,
        )  # without a reference to the autograd graph
        output = patch.experts.correct(inner, inputs, output, 1 / patch.sp.size if is_whole else 1.0, router_logits)
    return whole_calls.gather_outputs(patch.agreement, context, inputs, output) if is_whole else output


def _agree_on_finite(patch: Patch) -> None:
    if patch.sp.finite is not None and not torch.compiler.is_compiling():
        patch.sp.finite.forwards += 1
        patch.sp.finite.agree_on_call()


def _context_after(patch: Patch, module: nn.Module, inputs: Mapping[str, Any]) -> ForwardContext | None:
    if not torch.compiler.is_compiling():
        context = current()
        return context if context is not None and context.module is module else None
    if KEYWORD in inputs:
        return inputs[KEYWORD]
    return LOCAL if _mode(patch, module, inputs) == "local" else SHARDED


def _leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """End the context of a module's forward, even if the forward ended with an exception."""
    if torch.compiler.is_compiling() and (KEYWORD not in kwargs or kwargs[KEYWORD].module is None):
        return
    _end(module)


@between_graphs
def _end(module: nn.Module) -> None:
    context = current()
    if context is None or context.module is not module:
        return
    set_current(outer := context.outer)
    patch, state = patch_of(unwrapped(module)), context.state
    if context.is_outermost and state.noise is not None:
        shared, state.noise = state.noise.end(), None
        if context.is_in_whole and outer is not None:
            outer.state.shared = shared
    elif state.shared is not None and patch is not None:
        patch.agreement.drawn = drawn_since(patch.sp, state.shared)


@between_graphs
def _try_shard_loss(
    patch: Patch, module: nn.Module, inputs: Mapping[str, Any], output: Any, context: ForwardContext
) -> None:
    if check_loss(patch.sp, module, inputs, output, tiles=context.state.losses):
        patch.untried = tuple(head for head in patch.untried if head is not module)

"""Observe how a model's tokens interact in forwards of a small copy, in attention and in any other modules that mix
tokens.

The copy's attention is our own function. In some forwards, the function computes softmax attention. In all other
forwards, each token attends only to itself. If each token attends only to itself, a token's result must not depend on
which other tokens are present. A rank computes only its own tokens, and all information from other tokens must arrive
through attention. Modules that mix tokens in other ways are reported by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.base.log import log_once
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.data.random_states import random_state, unchanged
from ds_seqpar.operators.gathered import Piece

from .. import gathered_past, mixers, sparse
from ..families import balance_weight, is_causal_lm, switch_attention
from ..module_patch import override, restore
from ..noise import configs_of, noise_of
from .facts import LENGTHS, Facts, config_heads, kind_of_layer, masks, starred, text_config, with_class
from .small import call, parameters_of, small_copy, takes, tokens_for

LOOK = "ds_seqpar_look"  # the name of our attention function in transformers
PROBE = "sequence_parallel"  # the keyword argument that passes a forward's context to the layers of a patched model
ROWS = 2
TOKENS = 23  # unlikely to equal any size of a model
# the tokens of a rank, irregularly spaced and without the first token
SHARD = (1, 4, 5, 9, 10, 11, 16, 17, 18, 20, 22)
PIECES = (Piece(0, 9, 0, 0), Piece(9, 1, 9, 0), Piece(10, TOKENS - 10, 10, 0))
TOLERANCE = 1e-4
REPEATED = 16  # number of forwards in which to search for random behavior
LOWEST = torch.finfo(torch.float32).min
UNDERSTOOD = {"dropout", "scaling", "softcap", "s_aux", "sliding_window", "position_ids", "cache_position", PROBE}
OWN_MODEL = "call sp.attention from a model of your own (docs/models.md)"


@unchanged()
def look(model: PreTrainedModel) -> Facts:
    """Determine a model's facts from forwards of a small copy.

    Args:
        model: An unwrapped transformers model. The model's tensors are not read, so they may be partitioned or on the
            meta device.

    Returns:
        The facts that a patch needs.

    Raises:
        ConfigError: The model computes something that ranks sharing a sequence cannot compute. The message names the
            computation and the module, and suggests a solution.
    """
    small, not_small = small_copy(model)
    gathered: dict[str, nn.Module] = {}
    first, indexed = None, False
    while True:  # unknown modules that take a cache gather keys instead
        try:
            return _look(model, small.train(), not_small, gathered, indexed)
        except Exception as error:
            found = error if isinstance(error, _NotUnderstoodError) else None
            first, named = first or found, {} if found is None else _alike(small, found.module)
            more = {name: x for name, x in named.items() if name not in gathered}
            if not more and first is not None:
                raise ConfigError(str(first)) from error
            if found is None:
                raise
            gathered, indexed = gathered | more, indexed or found.indexed


def _look(
    model: PreTrainedModel, small: Any, not_small: tuple[str, ...], gathered: dict[str, nn.Module], indexed: bool
) -> Facts:
    """Return a model's facts, given the modules that gather keys in its small copy."""
    watch = Watch(small, gathered)
    ids, positions = tokens_for(small.config, ROWS, TOKENS), torch.arange(TOKENS).expand(ROWS, -1)
    plain, *others = _forwards(watch, ids)
    if noisy := [name for other in others if (name := _first_difference(plain, other)) is not None]:
        _refuse(f"{_described(small, noisy[0])} that draws random numbers, with no number of its config to turn it off")
    base = watch.base = _called_base(small, plain)
    prefix, first, counts_padding, stack = watch.names[base], 0, True, _stack(small, plain, base)
    if given := takes(base, "position_ids"):
        first, counts_padding = _default_positions(watch, ids, positions)
        if indexed and counts_padding:
            counts_padding = _sees_no_padding(watch, ids, positions + first)
    _check_tokens(watch, ids, positions + first if given else None)
    if not plain.calls and not any(plain.mixed.values()) and not gathered:
        _refuse("one without attention that goes through transformers' attention interface")
    heads = tuple(dict.fromkeys((one.q.shape[1], one.k.shape[1]) for one in plain.calls))
    if not heads and any(plain.mixed.values()):
        heads = (min((x, x) for x in plain.mixed.values() if x),)
    facts = Facts(
        attention=_names(base, [watch.small.get_submodule(one.name) for one in plain.calls]),
        mixers=_names(base, [watch.small.get_submodule(name) for name in plain.mixed]),
        gathered=_names(base, list(gathered.values())),
        base=None if base is small.base_model else prefix,
        stack=stack,
        outside=stack is not None and _makes_masks_outside(plain, stack),
        no_media=Facts.no_media if stack is None else "",
        masks=_masks(text_config(small.config), plain),
        heads=() if heads == (config_heads(small.config),) else heads,
        keywords=_reaches(watch, ids),
        first_position=first,
        counts_padding=counts_padding,
        **_loss(small, ids),
        skips=_skips(model, ids),
        not_small=not_small,
    )
    if gathered:
        _check_pieces(watch, ids, facts, plain)
        facts = dataclasses.replace(facts, selects=_selects(watch, ids, plain))
    return facts


@dataclasses.dataclass
class Call:
    """A call of attention."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    keywords: dict[str, Any]

    def inputs(self) -> list[Tensor]:
        """Return the attention inputs for each token, which are the query, key, value and settings."""
        settings = [self.keywords.get(name) for name in ("scaling", "softcap", "s_aux")]
        tokens = self.q.shape[2]
        each = [torch.as_tensor(x).float().flatten().expand(tokens, -1) for x in settings if x is not None]
        return [self.q, self.k, self.v, *each]


@dataclasses.dataclass
class MadeMask:
    """A mask that transformers made for a model, with the arguments passed to the mask interface.

    The arguments reveal the kind of mask, and whether the mask depends on the batch, as with blocks for images.
    """

    mask: Tensor
    function: Callable[..., Tensor]  # (row, head, query, key) -> whether the query sees the key
    local_size: int | None  # the window or chunk length
    events: int  # the number of events recorded before the mask was made


@dataclasses.dataclass
class Seen:
    """The record of one forward of a small copy."""

    output: Any = None
    calls: list[Call] = dataclasses.field(default_factory=list)
    masks: list[MadeMask] = dataclasses.field(default_factory=list)
    # tensors by (module name, call index, whether they are outputs), in the order of events
    events: dict[tuple[str, int, bool], list[Tensor]] = dataclasses.field(default_factory=dict)
    probes: list[object] = dataclasses.field(default_factory=list)  # values of the keyword PROBE that mixers received
    # number of state heads (0 if none) by the name of each mixer that ran
    mixed: dict[str, int] = dataclasses.field(default_factory=dict)
    # masks by the name of each module that gathers keys
    gathered: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    counts: Counter[tuple[str, bool]] = dataclasses.field(default_factory=Counter)  # number of events of each module

    def states(self, base: str) -> Tensor:
        """Return the hidden states that the base model returned."""
        return next(x for x in self.events[base, 0, True] if x.dim() == 3)

    def result(self, base: str) -> list[Tensor]:
        """Return all tensors that affect a rank's results: the model's outputs and the inputs of attention."""
        attention = [x for one in self.calls for x in one.inputs()]
        return [self.states(base), *(x for x in tensors_in(self.output) if x.dim() == 3), *attention]


class Watch:
    """Runs forwards of a small copy and records the inputs of its modules and attention.

    Args:
        small: The copy.
        gathered: The modules that gather keys, by name.
    """

    def __init__(self, small: Any, gathered: Mapping[str, nn.Module] = types.MappingProxyType({})) -> None:
        AttentionInterface.register(LOOK, _attention)
        AttentionMaskInterface.register(LOOK, _mask)
        switch_attention(small, LOOK)
        # window lengths by the name of each module that continues from a cache
        self.gathered, self.pieced = gathered, dict[str, int | None]()
        self.selecting: list[nn.Module] = []  # modules in `gathered` that run on all tokens at once
        self.small, self.base, self.alone, self.seen = small, small, False, Seen()
        self.names = {module: name for name, module in small.named_modules()}

    def __call__(self, ids: Tensor, *, alone: bool = False, positions: Tensor | None = None, **inputs: Any) -> Seen:
        """Run a forward of the copy and return its record.

        Args:
            alone: Whether each token attends only to itself.
            positions: The position_ids for the module that heads call, even if the heads do not pass on position_ids.
        """
        self.alone, self.seen = alone, Seen()
        with torch.no_grad(), torch.autocast("cpu", enabled=False), self._attached(positions):
            self.seen.output = call(self.small, ids, **inputs)
        return self.seen

    def states(self, ids: Tensor, positions: Tensor | None = None, **inputs: Any) -> Tensor:
        """Run a forward and return the base model's hidden states."""
        return self(ids, positions=positions, **inputs).states(self.names[self.base])

    @contextlib.contextmanager
    def _attached(self, positions: Tensor | None) -> Iterator[None]:
        def give(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return args, {**kwargs, "position_ids": positions}

        hooks = [] if positions is None else [self.base.register_forward_pre_hook(give, with_kwargs=True)]
        for module in self.names:
            hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after))
        inside = {inner for module in self.gathered.values() for inner in module.modules()}
        for module in filter(mixers.is_mixer, self.names.keys() - inside):
            override(module, "forward", mixers.with_engine(module, functools.partial(self._engine, self.names[module])))
        for name, module in self.gathered.items():
            gathered_past.keep_config(module, "eager")
            override(module, "forward", functools.partial(self._gather, name, module))
        token = _watch.set(self)
        try:
            yield
        finally:
            _watch.reset(token)
            restore(self.small)
            for hook in hooks:
                hook.remove()

    def _engine(self, name: str, keywords: dict[str, Any]) -> mixers.Engine:
        self.seen.mixed.setdefault(name, 0)
        self.seen.probes.append(keywords.get(PROBE))
        return _Engine(self, name)

    def _gather(self, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.probes.append(kwargs.get(PROBE))
        if self.alone:
            return gathered_past.alone(module, *args, **kwargs)
        if name in self.pieced:
            call = gathered_past.Pieces(module, self.pieced[name], args, kwargs)
            way = gathered_past.at_once if module in self.selecting else gathered_past.in_pieces
            return way(call, PIECES, lambda xs: xs)
        mask = gathered_past.arguments(module, args, kwargs).get("attention_mask")
        self.seen.gathered[name] = None
        if isinstance(mask, Tensor) and mask.dim() == 4:
            # eager attention gets a numeric mask; a bool mask made by the model is True at nonzero elements, which are
            # masked
            self.seen.gathered[name] = ~mask if mask.dtype == torch.bool else mask
        return type(module).forward(module, *args, **kwargs)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._add(module, False, [*args, *kwargs.values()])

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._add(module, True, output)

    def _add(self, module: nn.Module, is_output: bool, values: Any) -> None:
        name = self.names[module]
        count = self.seen.counts[name, is_output]
        self.seen.counts[name, is_output] += 1
        # square tensors are skipped, since they may be masks, indexed by pairs of tokens
        kept = [x.clone() for x in tensors_in(values) if x.is_floating_point() and x.shape[-1:] != x.shape[-2:-1]]
        self.seen.events[name, count, is_output] = kept


_watch: ContextVar[Watch] = ContextVar("hf_integration_look")  # the Watch of a small copy's forward


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **given: Any) -> Tensor:
    """Implement transformers' mask interface by making and recording the mask for eager attention."""
    mask = ALL_MASK_ATTENTION_FUNCTIONS["eager"](mask_function=mask_function, **given)
    seen = _watch.get().seen
    seen.masks.append(MadeMask(mask, mask_function, local_size, len(seen.events)))
    return mask


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **keywords: Any
) -> tuple[Tensor, None]:
    watch = _watch.get()
    keywords |= {"dropout": args[0]} if args else {}
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    seen, name = watch.seen, watch.names[module]
    seen.calls.append(Call(name, query, key, value, mask, keywords))
    _check_call(seen.calls[-1], watch.small)
    seen.events[name, -len(seen.calls), True] = seen.calls[-1].inputs()
    k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    if watch.alone:
        return v[:, :, -query.shape[2] :].transpose(1, 2).contiguous(), None
    scale, softcap, sinks = (keywords.get(name) for name in ("scaling", "softcap", "s_aux"))
    scores = query @ k.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(mask, query.shape[2], key.shape[2]), LOWEST)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ v).transpose(1, 2).contiguous(), None


@dataclasses.dataclass
class _Engine:
    """An engine that runs a mixer's layers either unchanged or on each token separately."""

    watch: Watch
    name: str

    def recurrence(self, function: Any, tokens: Sequence[Tensor], parameters: Sequence[Tensor], cell: Any) -> Tensor:
        self.watch.seen.mixed[self.name] = tokens[0].shape[2]
        return self._run(lambda *tokens: function([*tokens], [*parameters], False).out, tokens)

    def conv(self, function: Any, x: Tensor, kernel_size: int) -> Tensor:
        return self._run(function, [x])

    def _run(self, function: Any, tokens: Sequence[Tensor]) -> Tensor:
        if not self.watch.alone:
            return function(*tokens)
        return function(*(x.flatten(0, 1)[:, None] for x in tokens)).unflatten(0, tokens[0].shape[:2])[:, :, 0]


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    inner = values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
    return [x for value in inner for x in tensors_in(value)]


class _NotUnderstoodError(ConfigError):
    """Raised for a module that mixes tokens in an unknown way."""

    module, indexed = "", False


def _refuse(found: str, advice: str = OWN_MODEL, module: str = "", indexed: bool = False) -> NoReturn:
    """Raise ConfigError for an unsupported model.

    Args:
        found: The model's unsupported property.
        advice: The advice for the user.
        module: The name of a module that may gather keys instead, or "" if there is none.
        indexed: Whether the module selects keys with an index.
    """
    error = (_NotUnderstoodError if module else ConfigError)(
        "patch_attention needs a model whose tokens meet in causal attention, or in layers with a state that are "
        f"known; got {found}, {advice}"
    )
    if isinstance(error, _NotUnderstoodError):
        error.module, error.indexed = module, indexed
    raise error


def _alike(model: Any, name: str) -> dict[str, nn.Module]:
    """Return all modules of the same kind as the named module or its nearest parent with a cache argument.

    Return {} if neither the module nor any parent takes a cache.
    """
    while name:
        module = model.get_submodule(name)
        if isinstance(module, GradientCheckpointingLayer | PreTrainedModel):
            break
        if gathered_past.cache_argument(module) is not None:
            modules = model.named_modules()
            return {other: x for other, x in modules if starred(other) == starred(name) and type(x) is type(module)}
        name = name.rpartition(".")[0]
    return {}


def _called_base(model: Any, seen: Seen) -> nn.Module:
    """Return the outermost module in the call that is not a head. That module is the base model or one of its parts."""
    base: nn.Module = model.base_model
    called = [model.get_submodule(name) for name, _, is_output in seen.events if not is_output]
    inside = {*base.modules()} - ({model} if model.get_output_embeddings() is not None else set())
    attending = _attending(model, seen)
    return next((m for m in called if m in inside and attending <= {*m.modules()}), base)


def _stack(model: Any, seen: Seen, base: nn.Module) -> str | None:
    """Return the name of the innermost model in `base` with embeddings as input and attention, or None for `base`."""
    inside, attending = {*base.modules()} - {base}, _attending(model, seen)
    called = dict.fromkeys(name for name, _, is_output in seen.events if not is_output)
    stacks = [
        name
        for name, module in ((name, model.get_submodule(name)) for name in called)
        if module in inside and isinstance(module, PreTrainedModel) and attending <= {*module.modules()}
    ]
    return next((x for x in reversed(stacks) if "inputs_embeds" in parameters_of(model.get_submodule(x))), None)


def _makes_masks_outside(seen: Seen, stack: str) -> bool:
    began = [*seen.events].index((stack, 0, False))
    return any(made.events <= began for made in seen.masks)


def _attending(model: Any, seen: Seen) -> set[nn.Module]:
    return {model.get_submodule(name) for name in (*(one.name for one in seen.calls), *seen.mixed)}


# ---- tokens


def _check_tokens(watch: Watch, ids: Tensor, positions: Tensor | None) -> None:
    """Raise ConfigError if a token's result depends on other tokens although each token attends only to itself."""
    shard = list(SHARD)
    whole = watch(ids, alone=True, positions=positions)
    part = watch(ids[:, shard], alone=True, positions=None if positions is None else positions[:, shard])
    base = watch.names[watch.base]
    if not _differ(whole.result(base), part.result(base)):
        return
    changed_ids, others = ids.clone(), [token for token in range(TOKENS) if token not in SHARD]
    changed_ids[:, others] = ids[:, others].roll(1, 1)
    changed = watch(changed_ids, alone=True, positions=positions)
    if (name := _first_difference(whole, changed)) is not None:
        found = f"{_described(watch.small, name)} that mixes tokens outside of transformers' attention interface"
        _refuse(found, module=name)
    name = _first_difference(whole, part) or ""
    _refuse(f"{_described(watch.small, name)} that depends on the index of a token in its batch, not on position_ids")


def _check_pieces(watch: Watch, ids: Tensor, facts: Facts, plain: Seen) -> None:
    """Raise ConfigError for modules whose results change if they continue from a cache.

    Ranks would detect the change during training too, but not all at the same time.
    """
    lengths = [length for _, length in masks(watch.small, facts, "gathered")]
    watch.pieced = dict(zip(watch.gathered, lengths, strict=True))
    name = next(iter(watch.pieced))
    found = f"{_described(watch.small, name)} that mixes tokens in a way of its own"
    try:
        pieced = watch(ids)
    except Exception as error:
        _refuse(f"{found}, and does not go on with a cache ({' '.join(str(error).split()):.200})")
    if _differs(plain.states(watch.names[watch.base]), pieced.states(watch.names[watch.base])):
        _refuse(f"{found}, and gives something else where it goes on with a cache")


def _selects(watch: Watch, ids: Tensor, plain: Seen) -> bool:
    """Return whether modules with latents and an index return the same results when run on all tokens at once.

    If the results differ, the modules run in pieces, which is also exact.
    """
    watch.selecting = [*filter(sparse.selects, watch.gathered.values())]
    try:
        found = watch(ids) if sparse.can_run(watch.selecting) else None
    except Exception as error:  # the module may use operations that our objects do not support
        kind, said = type(watch.small).__name__, " ".join(str(error).split())
        log_once(f"{kind}: an index runs in pieces, since at once it raised {type(error).__name__}: {said:.200}")
        return False
    base = watch.names[watch.base]
    return found is not None and not _differs(plain.states(base), found.states(base))


def _described(model: Any, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{name or 'the model'}, {'a convolution' if 'Conv' in kind else f'a module {kind}'}"


def _first_difference(whole: Seen, other: Seen) -> str | None:
    """Return the name of the first module whose results differ for the tokens of a shard."""
    for (name, count, is_output), values in whole.events.items():
        if _differ(values, other.events.get((name, count, is_output), [])):
            return name if is_output else re.sub(r"(^|\.)[^.]*(\.\d+)?$", "", name)
    return None


def _differ(whole: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors differ for the tokens of a shard.

    The second list contains either all tokens or only the shard's tokens. Tensors without a token dimension, such as
    expert tensors, are ignored.
    """
    return any(_differs(_of_shard(a), _of_shard(b)) for a, b in zip(whole, other, strict=False) if TOKENS in a.shape)


def _of_shard(x: Tensor) -> Tensor:
    for axis, size in enumerate(x.shape):
        x = x.index_select(axis, torch.tensor(SHARD)) if size == TOKENS else x
    return x


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors differ by more than rounding."""
    return a.shape == b.shape and not bool(((a - b).abs() <= TOLERANCE * a.abs().max().clamp(min=1e-6)).all())


# ---- positions


def _default_positions(watch: Watch, ids: Tensor, positions: Tensor) -> tuple[int, bool]:
    """Return (the first token's default position, whether padding before a sequence takes up positions)."""
    length, pad = TOKENS // 4, getattr(text_config(watch.small.config), "pad_token_id", None) or 0
    mask = (positions >= length).long()
    ids = ids.masked_fill(mask == 0, pad)
    plain = watch.states(ids, attention_mask=mask)[:, length:]
    for first, begin in itertools.product((0, pad + 1), (0, length)):
        given = (positions - begin).clamp(min=0) + first
        if not _differs(plain, watch.states(ids, given, attention_mask=mask)[:, length:]):
            return first, begin == 0
    _refuse(f"a model that counts positions neither from 0 nor from {pad + 1} where it is given no position_ids")


def _sees_no_padding(watch: Watch, ids: Tensor, positions: Tensor) -> bool:
    """Return whether padding before rows leaves the rows' results unchanged, given the same position_ids.

    Some indexes count blocks from the start of the padding, but ranks count blocks from a row's first token.
    """
    length = TOKENS // 4
    plain = watch.states(ids, attention_mask=(torch.arange(TOKENS) >= length).long().expand_as(ids))
    try:
        without = watch.states(ids[:, length:], positions[:, length:])
    except Exception:  # positions may index keys, of which there are fewer here
        return False
    return not _differs(plain[:, length:], without)


# ---- attention


def _check_call(one: Call, model: Any) -> None:
    """Raise ConfigError for a call of attention that uses unsupported features."""
    numbers = {name for name, x in one.keywords.items() if isinstance(x, Tensor) or type(x) in (int, float)}
    if strange := sorted(numbers - UNDERSTOOD - parameters_of(model)):
        picked = " of keys that an indexer picks" if any("indices" in name for name in strange) else ""
        _refuse(f"{one.name}, whose attention takes {', '.join(strange)}{picked}", module=one.name, indexed=True)
    if one.q.shape[2] != one.k.shape[2]:
        found = f"{one.name}, which attends from {one.q.shape[2]} to {one.k.shape[2]} states"
        _refuse(found, module=one.name, indexed=True)
    scale, sinks = (one.keywords.get(name) for name in ("scaling", "s_aux"))
    if isinstance(scale, Tensor) and scale.numel() > 1:
        _refuse(f"{one.name}, whose scores have a scale of {scale.numel()} numbers")
    if sinks is not None and sinks.numel() != one.q.shape[1]:
        _refuse(f"{one.name}, which has {sinks.numel()} sinks for {one.q.shape[1]} heads")


def _reaches(watch: Watch, ids: Tensor) -> bool:
    probe: Any = object()
    if not takes(watch.small, PROBE):
        return False
    seen = watch(ids, sequence_parallel=probe)
    return all(x is probe for x in (*(one.keywords.get(PROBE) for one in seen.calls), *seen.probes))


def _names(base: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the modules' starred names relative to `base`, with class names if the starred names are ambiguous."""
    names, classes = {module: name for name, module in base.named_modules()}, dict[str, set[type]]()
    for module, name in names.items():
        classes.setdefault(starred(name), set()).add(type(module))
    plain = [starred(names[module]) for module in modules]
    found = [name if len(classes[name]) == 1 else with_class(name, x) for name, x in zip(plain, modules, strict=True)]
    return tuple(dict.fromkeys(found))


def _masks(text: Any, seen: Seen) -> tuple[tuple[str, str], ...]:
    rules: dict[str, str] = {}
    got = [(one.name, one.mask) for one in seen.calls]
    got += [(name, mask) for name, mask in seen.gathered.items() if mask is not None]
    for module, mask in got:
        made = next((x for x in seen.masks if x.mask is mask), None)
        length = _length_of(module, mask, made, text)
        if rules.setdefault(kind_of_layer(text, module), length) != length:
            _refuse(f"{module}, whose window is not that of other layers, though layer_types does not tell them apart")
    return tuple((kind, length) for kind, length in rules.items() if length)


def _length_of(module: str, mask: Tensor | None, made: MadeMask | None, text: Any) -> str:
    """Return the name of the setting that specifies a causal mask's window or chunk, or "" for a plain causal mask.

    Args:
        module: The name of the module that received the mask.
        mask: The mask.
        made: How transformers made the mask, or None if the model made the mask itself.
        text: The config of the model's text part.
    """
    if mask is None:
        _refuse(f"{module}, which gets no mask, so that tokens see later ones", "use a causal model")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask > -1e4)).any()):
        _refuse(f"{module}, whose mask has values that are added to scores", module=module, indexed=True)
    visible = _visible(mask, TOKENS, TOKENS).expand(ROWS, mask.shape[1], TOKENS, TOKENS)
    if bool((visible != visible[:1, :1]).any()):
        _refuse(f"{module}, whose mask differs from head to head", module=module, indexed=True)
    visible, at = visible[0, 0], torch.arange(TOKENS)
    distance = at[:, None] - at
    if bool(visible[distance < 0].any()):
        _refuse(f"{module}, whose mask lets tokens see later ones", "use a causal model")
    lengths = {name: getattr(text, name, None) for name in LENGTHS}
    window, chunk = (length or TOKENS for length in lengths.values())
    shapes = {
        "": distance >= 0,
        "sliding_window": (distance >= 0) & (distance < window),
        "attention_chunk_size": (distance >= 0) & (at[:, None] // chunk == at // chunk),
    }
    for name, expected in shapes.items():
        if torch.equal(visible, expected) and (made is None or made.local_size == lengths.get(name)):
            return name
    gaps = (visible.long().diff() == 1).sum(1) + visible[:, 0] != 1
    found = "not one interval" if bool(gaps.any()) else f"neither all before it nor those of its {' or '.join(LENGTHS)}"
    _refuse(f"{module}, in whose mask the keys of a query are {found}", module=module, indexed=True)


def _visible(mask: Tensor | None, queries: int, keys: int) -> Tensor:
    if mask is None:
        return torch.ones(queries, keys, dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask > -1e4


# ---- noise


def _forwards(watch: Watch, ids: Tensor) -> Iterator[Seen]:
    """Yield several forwards with different random numbers, or only one forward if the model is deterministic."""
    before = _numbers_to_come()
    yield watch(ids)
    for _ in range(REPEATED if _numbers_to_come() != before else 0):
        yield watch(ids)


def _numbers_to_come() -> tuple:
    """Return the state of the host's random generators for comparison."""
    python, (_, words, *others), torchs, _ = random_state()
    return python, words.tobytes(), others, torchs.numpy().tobytes()


def _skips(model: PreTrainedModel, ids: Tensor) -> bool:
    """Return whether training skips layers at random if noise settings are nonzero."""
    if not any(any(noise_of(x).values()) for x in (*configs_of(model), *model.modules())):
        return False
    watch = Watch(small_copy(model, noise=0.5)[0].train())
    return len({(*(one.name for one in seen.calls), *seen.mixed) for seen in _forwards(watch, ids)}) > 1


# ---- the loss


def divides_by_items(model: PreTrainedModel) -> bool:
    """Return whether a model's loss for whole batches is the sum of token losses divided by `num_items_in_batch`."""
    small = small_copy(model)[0]
    ids, items = tokens_for(small.config, ROWS, TOKENS), 2.0 * ROWS * TOKENS
    shifted = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
    if not takes(small, "num_items_in_batch"):
        return False
    return _balances(small, ids, shifted, items, num_items_in_batch=torch.tensor(items)) is not None


def _loss(model: Any, ids: Tensor) -> dict[str, Any]:
    """Return the facts about a head's loss."""
    switch_attention(model, "eager")
    if not is_causal_lm(model):
        return {}
    shifted, number = F.pad(ids[:, 1:], (0, 1), value=IGNORE), ids.shape[0] * (TOKENS - 1)
    plain = _balances(model, ids, shifted, number)
    if plain is None and _balances(model, ids, ids, ids.numel()) is not None:
        _refuse("a loss that predicts a token from itself", "shift labels in the forward")
    given = {"shift_labels": shifted, "num_items_in_batch": torch.tensor(2.0 * number, dtype=torch.float32)}
    taken = _balances(model, ids, shifted, 2 * number, **given) if all(takes(model, x) for x in given) else None
    routed = hasattr(text_config(model.config), "output_router_logits") and takes(model, "output_router_logits")
    balance = _balances(model, ids, shifted, number, output_router_logits=True) if routed else plain
    return {"shift_labels": plain is not None and plain == taken, "balance": bool(balance)}


def _balances(model: Any, ids: Tensor, labels: Tensor, items: float, **given: Any) -> bool | None:
    """Return whether a loss includes an expert balance term.

    Return None if the rest of the loss is not the sum of token losses divided by `items`.
    """
    with torch.no_grad():
        output = call(model, ids, labels=ids, **given)
    part = getattr(output, "aux_loss", None)
    losses = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    rest = output.loss - losses / items - (0.0 if part is None else balance_weight(model) * part)
    return part is not None if abs(float(rest)) <= TOLERANCE * abs(float(output.loss)) else None

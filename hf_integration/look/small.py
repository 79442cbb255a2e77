"""Make a small copy of a model, with the same classes and kinds of layers but fewer layers and smaller sizes.

The way in which a model's tokens interact depends on the model's classes and config, not on its size. A copy that takes
one second to create and run is therefore enough, even for a model on the meta device or partitioned by ZeRO-3.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds_seqpar.base.errors import ConfigError

from .. import mixers
from ..compat import copy_hooks, new_model, outside_zero_init
from ..families import QUANTIZERS, is_of_library
from ..mixers import CHUNK
from ..noise import noise_of
from .facts import text_config

VOCABULARY, WIDTH, INNER, RANK, FEW, POOL = 96, 64, 48, 32, 4, 2
HEAD, CHANNELS = 8, 32  # the size of a head, and the number of channels of a convolution layer
PATCHES, FRAMES = 8, 100  # number of patches along an image's side, and number of frames of an audio input
LARGEST = 1 << 27  # the maximum number of parameters of a copy
# the length of a config's first window; each further window is one token longer, so that lengths identify windows
WINDOW = 5
# patterns for the names of a config's numbers
LAYERS = re.compile(r"(num_|n_)?((hidden|decoder|encoder)_)?layers?|depth")
TOKENS = re.compile(r"(?!type_).*vocab_size(_.*)?")
WIDTHS = re.compile(r"hidden_size|d_model|n_embd|emb_dim|dim|embedding_(size|dim)|word_embed_proj_dim")
INNERS = re.compile(r".*(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_inner|dff|dim_ff|d_ff).*")
RANKS = re.compile(r".*lora_rank")
WINDOWS = re.compile(r"(?!.*(layer|pattern)).*(window|local_attention|attention_chunk).*")
# number of keys that an index selects; the unreduced number would cover a short sequence
INDEXED = re.compile(r"index.*_(topk.*|block_size|budget)")
# number of tokens that an index treats as one
POOLED = re.compile(r"compress_rates|index_kpool|indexer_compress_ratio")
CHUNKS = re.compile(r"(mamba_)?chunk_size|block_size")  # number of tokens that a layer with a state computes at a time
# a Mamba-2 layer's width as a multiple of the model's width, its number of heads, and the size of a head
EXPANDED = [
    re.compile(x)
    for x in (r"(mamba_)?expand", r"mamba_n_heads|n_mamba_heads|num_heads", r"mamba_d_head|mamba_headdim|head_dim")
]
HEAD_SIZE = re.compile(r"head_dim|d_kv|d_head|kv_channels|.*_head_dim|attention_head_size|dim_head")
TOWER_WIDTHS = ("embed_dim", "d_model", "hidden_size", "hidden_dim")
TOWER_HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads", "attention_heads")
MEDIA_TOKENS = re.compile(r"(?!pad|eos|bos).*(token|start|end|newline|patch)_(id|index|ids)")
NOT_KINDS = re.compile(r"_.*|training|.*(idx|index|layer_id)")  # attributes that differ between layers of the same kind


def small_copy(
    model: PreTrainedModel, device: str | torch.device = "cpu", seed: int = 0, *, noise: float = 0.0
) -> tuple[Any, tuple[str, ...]]:
    """Make a small copy of a model, with random fp32 weights and without dropout modules.

    The copy does not depend on zero.Init, the default device and dtype, or torch's random generators.

    Args:
        model: An unwrapped transformers model. The model's tensors are not read.
        device: The device of the copy.
        seed: The seed of the copy's weights.
        noise: The value to which all nonzero noise settings in the copy's config and modules are set.

    Returns:
        (the copy, in evaluation mode; the sizes that could not be reduced).

    Raises:
        ConfigError: No reduced config yields a working model.
    """
    reason, layers = "", layers_of(model)
    number = len(layers)
    few = _prefix([_kind(model.config, layer, index, number) for index, layer in enumerate(layers)])
    plans = {(few, False): "the sizes of layers", (number, True): "the number of layers", (few, True): ""}
    for (count, sizes), kept in reversed(plans.items()):
        try:
            copied = _made(model, number, count, sizes, seed, noise)
            carry_over(model, copied, noise)
            for module in copied.modules():
                if isinstance(getattr(module, "p", None), float) and "Dropout" in type(module).__name__:
                    module.p = 0.0
            mixers.use_torch(copied)
            if missing := _classes(layers) - _classes(layers_of(copied)):
                raise ValueError(f"a copy with {count} layers has no {missing.pop()[0].__name__} as the model has")
            with torch.no_grad():
                call(copied, tokens_for(copied.config, 1, 8))
            return copied.to(device), (kept,) if kept else ()
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
    raise ConfigError(
        f"a model that is not among the tested families needs a small copy, to look at; got {type(model).__name__}, of "
        f"whose config none could be made that runs ({reason}), call sp.attention from a model of your own "
        "(docs/models.md)"
    )


def call(model: nn.Module, input_ids: Tensor, **inputs: Any) -> Any:
    """Call a model without a cache."""
    return model(input_ids=input_ids, **{"use_cache": False} if takes(model, "use_cache") else {}, **inputs)


def takes(model: nn.Module, name: str) -> bool:
    """Return whether a model's forward accepts an argument with the given name."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def parameters_of(model: nn.Module) -> set[str]:
    """Return the argument names of a model's forward."""
    return {*inspect.signature(model.forward).parameters}


def tokens_for(config: PreTrainedConfig, rows: int, tokens: int, seed: int = 1) -> Tensor:
    """Return (rows, tokens) random token ids, excluding special tokens unless all tokens are special."""
    text = text_config(config)
    named = [x for c in (config, text) for n, x in vars(c).items() if n.endswith("_id") or MEDIA_TOKENS.fullmatch(n)]
    special = {y for x in named for y in (x if isinstance(x, list | tuple) else [x]) if isinstance(y, int)}
    known = range(getattr(text, "vocab_size", VOCABULARY))
    plain = torch.tensor([x for x in known if x not in special][:VOCABULARY] or [*known])
    return plain[torch.randint(len(plain), (rows, tokens), generator=torch.Generator().manual_seed(seed))]


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model's text part, which is the largest stack whose length is in the config."""
    text = text_config(model.config)
    numbers = [x for name, x in vars(text).items() if type(x) is int and LAYERS.fullmatch(name)]
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and type(m.config) is type(text)]
    stacks = [m for m in (models or [model])[0].modules() if isinstance(m, nn.ModuleList) and len(m) in numbers]
    return list(max(stacks, key=lambda stack: len(list(stack.modules())), default=()))


def _kind(config: PreTrainedConfig, layer: nn.Module, index: int, number: int) -> tuple:
    """Return the properties that distinguish kinds of layers."""
    lists = [x for x in vars(text_config(config)).values() if isinstance(x, list | tuple) and len(x) == number]
    by_layer = [x[index] for x in lists if [*x] != [*range(number)]]
    attributes = [
        (name, type(module), *sorted((key, str(x)) for key, x in vars(module).items() if _tells(key, x)))
        for name, module in layer.named_modules()
    ]
    return str(by_layer), *attributes


def _tells(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | str | types.NoneType) and not NOT_KINDS.fullmatch(name)


def _prefix(kinds: list[tuple]) -> int:
    """Return the number of first layers that include all kinds, and at least two so that layers can interact."""
    return min(len(kinds), max(2, 1 + max(map(kinds.index, kinds), default=0)))


def _classes(layers: list[nn.Module]) -> set[tuple]:
    """Return the classes of each layer's modules, excluding modules that adapters and quantizers add."""
    types = [[type(module) for module in layer.modules()] for layer in layers]
    return {tuple(x for x in each if not x.__module__.startswith(("torch.", "peft.", *QUANTIZERS))) for each in types}


def _made(model: PreTrainedModel, number: int, layers: int, sizes: bool, seed: int, noise: float) -> Any:
    config = copy.deepcopy(model.config)
    text = text_config(config)
    for part, cut in _cuts(config, number, layers):
        part.__dict__ |= {name: noise if x else 0.0 for name, x in noise_of(part).items()}
        _shrink(part, cut, sizes)
    if sizes and any(part is text for part in _parts(config)):
        _renumber([config, *_parts(config)])
    with _own_world(seed):
        with torch.device("meta"):
            if (numbers := sum(x.numel() for x in type(model)(copy.deepcopy(config)).parameters())) > LARGEST:
                raise ValueError(f"a copy with {layers} layers has {numbers} parameters")
        small = new_model(type(model), config)
        for name, parameter in small.named_parameters():
            spread, wanted = float(parameter.std(correction=0)), 0.25 * (1, *parameter.shape)[-1] ** -0.5
            # norms, biases, sinks and gates are random, since values of 0 or 1 would hide their effect
            if parameter.dim() < 2 or spread == 0:
                parameter.add_(0.1 * torch.randn_like(parameter))
                # heads as wide as the original model's, with unscaled scores, would amplify rounding errors
                parameter.mul_(0.25 if name.endswith("q_norm.weight") else 1)
            elif spread < wanted:
                parameter.mul_(wanted / spread)
            # zero rows for padding are replaced, since dividing by their norm would have no gradient
            if parameter.dim() > 1:
                parameter.add_((parameter == 0).all(-1, keepdim=True) * wanted * torch.randn_like(parameter))
    # set after the model is created, since modules read the pad token; without a pad token, heads accept only one row
    for part in (config, text):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    return small.float().eval()


@contextlib.contextmanager
def _own_world(seed: int) -> Iterator[None]:
    """Context manager that sets torch's settings to the defaults of a new process, and restores them on exit."""
    dtype = torch.get_default_dtype()
    with outside_zero_init(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield part
            yield from _parts(part)


Rules = list[tuple[re.Pattern[str], Callable[["_Cut", str, int], int]]]


class _Cut:
    """The rules for reducing a config's numbers."""

    def __init__(
        self, config: PreTrainedConfig, rules: Rules, widths: dict[int, int], number: int = 0, layers: int = 0
    ):
        self.values, self.rules, self.widths, self.is_text = vars(config), rules, widths, rules is TEXT
        self.names = config.attribute_map  # some configs rename common sizes
        self.number = number or self._first(name for name in self.values if LAYERS.fullmatch(name))
        lists = [x for x in self.values.values() if isinstance(x, list | tuple) and len(x) == self.number]
        self.layers = layers or _prefix([*zip(*lists, strict=True)] or [()] * self.number)
        self.width = self._first(["hidden_size"] if self.is_text else TOWER_WIDTHS)
        self.heads = self._first(["num_attention_heads"] if self.is_text else TOWER_HEADS) or 1
        self.sized = self.is_text and any(type(x) is int and HEAD_SIZE.fullmatch(n) for n, x in self.values.items())
        # a head's size defaults to width / heads; several position axes share the head's channels
        head = HEAD * (2 if "mrope_section" in str(self.values.get("rope_parameters")) else 1)
        self._narrow = WIDTH if self.sized else self.heads * min(head, max(1, self.width // self.heads))
        if self.width:  # equal widths stay equal
            widths[self.width] = min(self.width, math.lcm(self._narrow, widths.get(self.width, 1)))
        side, patch = self._first(["image_size"]), self._first(["patch_size"])
        self.side = Fraction(PATCHES * patch, side) if side and patch else Fraction(1)
        self.area = Fraction(PATCHES, side // patch) ** 2 if side and patch else Fraction(1)

    def _first(self, names: Iterable[str]) -> int:
        """Return the first integer with one of the given names, alone or in a list. Return 0 if no name is found."""
        found = (
            x[0] if isinstance(x, list | tuple) and x else x
            for x in map(self.values.get, (self.names.get(name, name) for name in names))
        )
        return next((x for x in found if type(x) is int), 0)

    @property
    def narrow(self) -> int:
        return self.widths.get(self.width, self._narrow)

    def layer_count(self, name: str, value: int) -> int:
        return value // self.number * self.layers if value >= self.number > 2 else min(value, self.layers)

    def layer_index(self, name: str, value: int) -> int:
        return value * self.layers // max(self.number, self.layers, 1) if value >= 0 else max(value, -self.layers)

    def window(self, name: str, value: int) -> int:
        windows = [name for name, x in self.values.items() if type(x) is int and WINDOWS.fullmatch(name)]
        return min(value, WINDOW + windows.index(name))

    def scaled(self, name: str, value: int) -> int:
        """Return a size that keeps its ratio to a reduced width, if the result is an integer."""
        others = sorted((x for x in self.widths if value % x == 0), reverse=True)
        for width in [value, self.width, *others]:
            small = self.narrow if width == self.width else self.widths.get(width, 0)
            if width and small and value * small % width == 0:
                return value * small // width
        return value * self.narrow // self.width if self.width and INNERS.fullmatch(name) else value


# (pattern for names of a config's numbers, the rule that reduces them); the first matching pattern applies
DEPTHS: Rules = [
    (LAYERS, _Cut.layer_count),
    (re.compile(r".*(feature_layers?|_(indexes|indices|target_layers)|insert_layer_id)"), _Cut.layer_index),
]
TEXT: Rules = [
    (WINDOWS, _Cut.window),
    # sizes of model inputs other than hidden states
    (re.compile(r"attention_hidden_size"), lambda cut, name, value: value // cut.width * cut.narrow),
    (re.compile(r"pad_token_id"), lambda cut, name, value: value if value < VOCABULARY else 0),
    (TOKENS, lambda cut, name, value: min(value, VOCABULARY)),
    (WIDTHS, lambda cut, name, value: min(value, cut.narrow)),
    (INNERS, lambda cut, name, value: min(value, INNER)),
    (RANKS, lambda cut, name, value: min(value, RANK)),
    (INDEXED, lambda cut, name, value: min(value, FEW)),
    (POOLED, lambda cut, name, value: min(value, POOL)),
    (CHUNKS, lambda cut, name, value: min(value, CHUNK)),
]
# rules for towers, which encode images and audio, and for the config that contains the towers and the text model
TOWER: Rules = [
    (re.compile(r"image_size|.*pinpoints"), lambda cut, name, value: int(value * cut.side)),
    (re.compile(r"(mm|num_image)_tokens.*|.*query_dict"), lambda cut, name, value: math.ceil(value * cut.area)),
    (re.compile(r"base_channels"), lambda cut, name, value: min(value, CHANNELS)),
    (re.compile(r"max_source_positions"), lambda cut, name, value: min(value, FRAMES)),
    (re.compile(r".*(hidden_size|_dim|d_model|_channels|intermediate_size|input_size)"), _Cut.scaled),
]


def _cuts(config: PreTrainedConfig, number: int, layers: int) -> list[tuple[PreTrainedConfig, _Cut]]:
    """Return the rules for reducing the numbers of each part of a config.

    Args:
        number: The number of layers of the text model.
        layers: The reduced number of layers.
    """
    text, widths = text_config(config), dict[int, int]()
    towers = [part for part in _parts(config) if part is not text]
    # otherwise the config itself belongs to the text model, or was copied for the text model
    has_text = len(towers) < len([*_parts(config)])
    cuts = [(part, _Cut(part, TOWER, widths)) for part in towers]
    of_text = text if has_text else config
    cuts.append((of_text, _Cut(of_text, TEXT, widths, number, layers)))
    if has_text:  # the outer config specifies the text model's width and the tower's layers and images
        around = _Cut(config, [*TOWER, *TEXT], {})
        around.widths, around.width = widths, cuts[-1][1].width
        tower = max((cut for _, cut in cuts), key=lambda cut: (cut.side != 1, cut.number > 0))
        around.number, around.layers, around.side, around.area = tower.number, tower.layers, tower.side, tower.area
        cuts.append((config, around))
    return cuts


def _shrink(config: PreTrainedConfig, cut: _Cut, sizes: bool) -> None:
    """Reduce a config's number of layers and its sizes."""
    values = vars(config)
    for name, value in list(values.items()):
        rules = [*DEPTHS, *cut.rules] if sizes else DEPTHS
        rule = next((rule for pattern, rule in rules if pattern.fullmatch(name)), None)
        if isinstance(value, list | tuple) and len(value) == cut.number:
            setattr(config, name, value[: cut.layers])
        elif rule and (type(value) is int or INNERS.fullmatch(name) or POOLED.fullmatch(name) or not cut.is_text):
            setattr(config, name, _of_each(functools.partial(rule, cut, name), value))
        elif sizes and name in ("rope_parameters", "rope_scaling") and cut.is_text and not cut.sized:
            setattr(config, name, _sections(value, cut.narrow // cut.heads, cut.width // cut.heads))
    expand, inner_heads, head_dim = ([name for name in values if x.fullmatch(name)] for x in EXPANDED)
    if sizes and expand and inner_heads and head_dim:  # a Mamba-2 layer's heads are `expand` times as wide as the model
        setattr(config, head_dim[0], values[expand[0]] * values["hidden_size"] // values[inner_heads[0]])


def _of_each(rule: Callable[[int], int], value: Any) -> Any:
    """Apply a rule to each integer in a possibly nested value."""
    if isinstance(value, dict):
        return {rule(key): _of_each(rule, x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_of_each(rule, x) for x in value)
    return rule(value) if type(value) is int else value


def _sections(rope: Any, head: int, before: int) -> Any:
    """Scale a RoPE config down to a smaller head whose channels the position axes share."""
    if not isinstance(rope, dict):
        return rope
    axes = rope.get("mrope_section") or []
    parts = [x * head // before for x in axes]
    cut = {"mrope_section": [*parts[:-1], sum(axes) * head // before - sum(parts[:-1])]} if axes else {}
    return {name: _sections(x, head, before) for name, x in rope.items()} | cut


def _renumber(parts: list[PreTrainedConfig]) -> None:
    """Renumber media placeholder tokens to ids in the small vocabulary."""
    ids: dict[int, int] = {}
    for part in parts:
        for name in [name for name in vars(part) if MEDIA_TOKENS.fullmatch(name)]:
            rule = lambda x: x if x < VOCABULARY else ids.setdefault(x, VOCABULARY - 1 - len(ids))  # noqa: E731
            setattr(part, name, _of_each(rule, getattr(part, name)))


def carry_over(model: PreTrainedModel, small: PreTrainedModel, noise: float) -> None:
    """Copy user changes to a model's small copy, including hooks, forwards, replaced modules and noise settings."""
    replaced: tuple[str, ...] = ()
    twins = dict(small.named_modules())
    for name, module in list(model.named_modules()):
        twin = twins.get(name)
        if twin is None or name.startswith(replaced) or type(module).__module__.startswith(QUANTIZERS):
            continue
        if type(twin) is not type(module) and not is_of_library(type(module)):
            configs = {id(model.config): small.config, id(text_config(model.config)): text_config(small.config)}
            small.set_submodule(name, copy.deepcopy(module, configs).float())
            replaced += (f"{name}.",)
            continue
        copy_hooks(module, twin, lambda hook: not is_of_library(hook))
        twin.__dict__ |= {name: noise if x else 0.0 for name, x in noise_of(module).items()} if noise else {}
        forward: Any = vars(module).get("forward")
        if forward is not None and not is_of_library(forward):
            bound = getattr(forward, "__self__", None) is module
            twin.forward = types.MethodType(forward.__func__, twin) if bound else forward

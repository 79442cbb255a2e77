"""Tiled MLPs and a tiled loss for patched models: which modules, in how many tiles, and when.

An MLP is tiled inside its own module call, and so is the head with the loss: to whatever hooks a module - ZeRO-3, which
fetches its parameters, above all - each is one call with one backward, and ranks may cut unequal lengths into unequal
numbers of tiles. The modules inside an MLP would be hooked tile by tile: the MLP is declared a leaf of ZeRO-3, whose
parameters are fetched and reduced together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.errors import SECTION, ConfigError, InputError

from .families import unwrapped
from .tiles import tiled, tiled_sum

TILING, LEAF = "_sequence_parallel_tiling", "_z3_leaf"  # attributes of modules: ours, and DeepSpeed's mark of a leaf
LOGITS = 2**28  # bytes of a tile's logits in fp32, at most, with loss_tiles "auto"


@dataclasses.dataclass(kw_only=True)
class Tiling:
    """What a tiled model's modules share. mlp, loss: numbers of tiles. local: the forward that runs is local and stays
    as it is. evaluated: what a forward without gradients is to give, its loss alone, in tiles; with "logits" these too,
    whole; None: the model's own."""

    mlp: int | str
    loss: int | str
    modules: tuple[nn.Module, ...]
    hooks: tuple[RemovableHandle, ...] = ()
    local: bool = False
    evaluated: Literal["loss", "logits"] | None = None


def check_tiles(model: Any, config: SequenceParallelConfig) -> None:
    """Raises ConfigError where a model cannot have the tiles that it is to have."""
    if _tiling(model) is not None:
        return
    mlps, head = _mlps(model, config.mlp_tiles), _head(model, config.loss_tiles)
    if config.mlp_tiles not in (1, "auto") and not mlps:
        raise ConfigError(
            f"{SECTION}.mlp_tiles needs dense MLPs; got {config.mlp_tiles} for a model of family "
            f"{model.config.model_type!r} with experts, whose routers are read a layer at a time, leave it out"
        )
    if config.loss_tiles not in (1, "auto") and head is None:
        raise ConfigError(
            f"{SECTION}.loss_tiles needs a causal language model; got {config.loss_tiles} for a "
            f"{type(model).__name__}, leave it out"
        )
    for module in [*mlps, *([head, model] if head is not None else [])]:
        if "forward" in vars(module):
            raise ConfigError(
                f"tiles need modules with the forward of their class; got a {type(module).__name__} with one of its "
                f"own (trl's SFTTrainer sets one, whose loss is in chunks already), leave {SECTION}."
                f"{'mlp_tiles' if module in mlps else 'loss_tiles'} out"
            )
        if module is not model and _has_inner(module) and hasattr(module, "ds_id") and not getattr(module, LEAF, False):
            raise ConfigError(
                "tiles under ZeRO-3 need a model that is patched before DeepSpeed has it; got one that an engine has, "
                "call patch_attention first, or ds_seqpar.initialize"
            )


def tile(model: Any, config: SequenceParallelConfig) -> None:
    """Gives MLPs and loss of a patched model their tiles, as the config says."""
    mlps, head = _mlps(model, config.mlp_tiles), _head(model, config.loss_tiles)
    if not mlps and head is None:
        return
    modules = (*mlps, *((head, model) if head is not None else ()))
    tiling = Tiling(mlp=config.mlp_tiles, loss=config.loss_tiles, modules=(*modules, model.base_model))
    for module in tiling.modules:
        setattr(module, TILING, tiling)
    for module in modules[: len(mlps) + (head is not None)]:
        if _has_inner(module):
            setattr(module, LEAF, True)
    base = model.base_model
    hooks = [base.register_forward_pre_hook(_before_base, with_kwargs=True)]
    hooks.append(base.register_forward_hook(_after_base, always_call=True))
    hooks += [mlp.register_forward_pre_hook(_before_mlp) for mlp in mlps]
    for mlp in mlps:
        _replace(mlp, _mlp_forward)
    if head is not None:
        _replace(head, _head_forward)
        _replace(model, _model_forward)
    tiling.hooks = tuple(hooks)


def untile(model: Any) -> None:
    """Takes tiles back."""
    tiling = _tiling(model)
    if tiling is None:
        return
    for hook in tiling.hooks:
        hook.remove()
    for module in tiling.modules:
        delattr(module, TILING)
        if hasattr(vars(module).get("forward"), TILING):  # nobody has put another around it
            del module.forward
        if not hasattr(module, "ds_id"):  # ZeRO-3 that has hooked a leaf asks it again
            vars(module).pop(LEAF, None)


@contextlib.contextmanager
def evaluated(model: nn.Module, what: Literal["loss", "logits"] | None) -> Iterator[None]:
    """A context in which forwards without gradients compute the loss in tiles too: with whole logits beside it, or
    without any; None: not. A model that has no tiles for it stays as it is."""
    tiling = _tiling(unwrapped(model))
    if tiling is None:
        yield
        return
    before, tiling.evaluated = tiling.evaluated, what
    try:
        yield
    finally:
        tiling.evaluated = before


def _tiling(model: Any) -> Tiling | None:
    return getattr(getattr(model, "base_model", None), TILING, None)


def _mlps(model: Any, tiles: int | str) -> list[nn.Module]:
    """Those that are dense: of experts, routers are read by hooks, for the loss that balances them."""
    layers = getattr(model.base_model, "layers", ()) if tiles != 1 else ()
    return [layer.mlp for layer in layers if hasattr(layer.mlp, "down_proj")]


def _head(model: Any, tiles: int | str) -> nn.Module | None:
    return getattr(model, "lm_head", None) if tiles != 1 else None


def _has_inner(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _replace(module: nn.Module, function: Callable[..., Any]) -> None:
    """A method of the instance, so that a copy of the module has its own; with the signature of the class's."""

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (function if hasattr(self, TILING) else type(self).forward)(self, *args, **kwargs)

    setattr(forward, TILING, True)
    module.forward = types.MethodType(forward, module)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _before_base(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    getattr(module, TILING).local = not kwargs.get("sequence_parallel", False)  # which the patch says


def _after_base(module: Any, args: tuple, output: Any) -> None:
    getattr(module, TILING).local = False  # a checkpoint may compute layers again at any time


def _before_mlp(module: nn.Module, args: tuple) -> tuple | None:
    """Of a leaf whose input wants no gradient (LoRA in a first layer) ZeRO-3 would take the gradients too early."""
    if args and hasattr(module, "ds_id") and torch.is_grad_enabled() and not args[0].requires_grad and _trained(module):
        return (args[0].detach().requires_grad_(), *args[1:])
    return None


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_mlp_forward)(module, x)
    own, tiling = type(module).forward, getattr(module, TILING)
    tokens = x.shape[0] * x.shape[1]
    tiles = _ceil(tokens, x.shape[2]) if tiling.mlp == "auto" else tiling.mlp
    if tiling.local or tiles == 1:
        return own(module, x)
    return tiled(lambda tile, _: own(module, tile), x, _trained(module), tiles)


def _ceil(a: int, b: int) -> int:
    return max(1, -(-a // b))


def _head_forward(module: Any, x: Tensor, *args: Any, in_tiles: Any = None, **kwargs: Any) -> Tensor:
    own = functools.partial(type(module).forward, module)
    return own(x, *args, **kwargs) if in_tiles is None else in_tiles(own, x)


def _model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a causal language model, by its class's own: once without tokens between base model and loss, and
    once for the loss of each tile."""
    given = {**dict(zip(_names(model), args, strict=False)), **kwargs}
    if not _wants_tiles(model, given):
        return type(model).forward(model, *args, **kwargs)
    if given.get("num_items_in_batch") is None:
        raise InputError(
            "a tiled loss needs num_items_in_batch, which the sum of token losses is divided by; got none, give the "
            "model what sp.shard_batches returns"
        )
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_in_tiles)(model, given)
    return _in_tiles(model, given)


def _names(model: Any) -> tuple[str, ...]:
    """Of the arguments of a model's forward."""
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def _wants_tiles(model: Any, given: dict[str, Any]) -> bool:
    tiling = getattr(model, TILING)
    if given.get("labels") is None or given.get("shift_labels") is None or given.get("logits_to_keep"):
        return False
    if model.base_model._sequence_parallel_patch.whole:
        return False
    return torch.is_grad_enabled() or tiling.evaluated is not None


def _in_tiles(model: Any, given: dict[str, Any]) -> Any:
    given = {**given}
    as_dict = given.pop("return_dict", None)
    base, around = _around(model, given)
    logits: list[Tensor] = []
    in_tiles = functools.partial(_sum_of_tiles, model, given, type(base), logits)
    loss = model.lm_head(base.last_hidden_state, in_tiles=in_tiles)
    if around.get("aux_loss") is not None:
        loss = loss + model.router_aux_loss_coef * around.aux_loss.to(loss.device)
    output = type(around)(**{**around, "loss": loss, "logits": torch.cat(logits, 1) if logits else None})
    return output if (getattr(model.config, "return_dict", True) if as_dict is None else as_dict) else output.to_tuple()


def _around(model: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """(the output of the base model, that of the model for none of its tokens): all but the loss of tokens."""
    outputs: list[Any] = []

    def base(*args: Any, **kwargs: Any) -> Any:
        outputs.append(output := model.base_model(*args, **kwargs))
        return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, :0]})

    around = _own(model, base, lambda x: x, {**given, "labels": None})
    return outputs[0], around


def _sum_of_tiles(
    model: Any, given: dict[str, Any], kind: type, logits: list[Tensor], head: Callable[..., Tensor], x: Tensor
) -> Tensor:
    """The loss of tokens from x (B, s, d), the base model's last hidden state. kind: of the base model's output.
    logits: takes those of tiles, where they are wanted."""
    wanted = not torch.is_grad_enabled() and getattr(model, TILING).evaluated == "logits"
    shape = given["shift_labels"].shape
    by_token = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.shape[:2] == shape}
    if "output_router_logits" in _names(model):  # what balances experts is whole, in `_around`
        given = {**given, "output_router_logits": False}

    def loss_of(tile: Tensor, cut: slice) -> Tensor:
        part = given | {name: x[:, cut].contiguous() for name, x in by_token.items()}
        output = _own(model, lambda *args, **kwargs: kind(last_hidden_state=tile), head, part)
        logits.extend([output.logits] if wanted else [])
        return output.loss

    return tiled_sum(loss_of, x, _trained(model.lm_head), _loss_tiles(model, x))


def _own(model: Any, base: Callable[..., Any], head: Callable[..., Tensor], given: dict[str, Any]) -> Any:
    """The forward of the model's class with another base model and head. self is of the same class still, so that what
    a subclass overrides stays so."""
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    vars(twin).update({model.base_model_prefix: base, "lm_head": head})
    return type(model).forward(twin, **given, return_dict=True)


def _loss_tiles(model: Any, x: Tensor) -> int:
    tiles = getattr(model, TILING).loss
    return _ceil(x.shape[0] * x.shape[1] * model.config.vocab_size * 4, LOGITS) if tiles == "auto" else tiles

"""Tiled MLPs, norms and a tiled loss for patched models: which modules, in how many tiles, and when.

An MLP is tiled inside its own module call, and so is the head with the loss: to whatever hooks a module - ZeRO-3, which
fetches its parameters, above all - each is one call with one backward, and ranks may cut unequal lengths into unequal
numbers of tiles. The modules inside an MLP would be hooked tile by tile: the MLP is declared a leaf of ZeRO-3, whose
parameters are fetched and reduced together.

Families scale or cap their logits before the loss, and add a loss that balances experts. None of that is written again
here: the forward of the model's own class runs for each tile, on a twin of the model whose base model gives that tile
of the last hidden state, and once more for all the rest, on one whose base model is the real one but gives no tokens.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.errors import SECTION, ConfigError

from .families import attentions, unwrapped
from .graphs import between_graphs
from .liger import is_of_liger
from .tiled_loss import LEAF, TILING, Tiling, model_forward
from .tiles import Source, ceil_of, tiled, trained

OWN = "_sequence_parallel_own_forward"  # an attribute of tiled modules that had a forward beside their class's: it
# norms of a layer by the names that families have for them: the first that there is comes before the MLP, the last
# before attention, where the layer has norms before and not behind
BEFORE = ("pre_feedforward_layernorm", "post_attention_layernorm", "input_layernorm")


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
    if config.loss_tiles not in (1, "auto") and not head:
        raise ConfigError(
            f"{SECTION}.loss_tiles needs a causal language model; got {config.loss_tiles} for a "
            f"{type(model).__name__}, leave it out"
        )
    if head and is_of_liger(model.forward):
        raise ConfigError(
            f"{SECTION}.loss_tiles needs a loss that is not fused; got {config.loss_tiles} for a model with Liger's, "
            'which makes no whole logits either, leave it out, or say "auto"'
        )
    for name, modules in (("mlp_tiles", mlps), ("loss_tiles", [*head, model] if head else [])):
        if other := [module for module in modules if _has_other_forward(module)]:
            raise ConfigError(
                f"tiles need modules with the forward of their class; got a {type(other[0]).__name__} with one of its "
                f"own (as trl's SFTTrainer sets, whose loss is in chunks already), leave {SECTION}.{name} out"
            )
    if any(hasattr(module, "ds_id") and not hasattr(module, LEAF) for module in _leaves(mlps, head)):
        raise ConfigError(
            "tiles under ZeRO-3 need a model that is patched before DeepSpeed has it; got one that an engine has, call "
            "patch_attention first, or ds_seqpar.initialize"
        )


def tile(model: Any, config: SequenceParallelConfig) -> None:
    """Gives MLPs, norms and loss of a patched model their tiles, as the config says."""
    mlps, head = _mlps(model, config.mlp_tiles), _head(model, config.loss_tiles)
    norms = _norms(model) if mlps or config.mlp_tiles == "auto" else []
    if not mlps and not norms and not head:
        return
    base, forwards = model.base_model, [(module, _tiled_forward) for module in (*mlps, *norms)]
    if head:
        forwards.append((model, model_forward))
    hooks = [base.register_forward_pre_hook(_before_base, with_kwargs=True)]
    hooks.append(base.register_forward_hook(_after_base, always_call=True))
    hooks += [mlp.register_forward_pre_hook(_before_mlp) for mlp in mlps]
    modules = (*(module for module, _ in forwards), *head, base)
    tiling = Tiling(mlp=config.mlp_tiles, loss=config.loss_tiles, modules=modules, hooks=tuple(hooks))
    tiling.norms.update(_norms_before(model, mlps))
    for module in (*modules, *attentions(model)):
        setattr(module, TILING, tiling)
    for module in _leaves(mlps, head):
        setattr(module, LEAF, True)
    for module, forward in forwards:
        _replace(module, forward)


def untile(model: Any) -> None:
    """Takes tiles back."""
    tiling = _tiling(model)
    if tiling is None:
        return
    for hook in tiling.hooks:
        hook.remove()
    for module in {*tiling.modules, *model.modules()}:  # layers may have been added, as copies of others
        if vars(module).pop(TILING, None) is None:
            continue
        own = vars(module).pop(OWN, None)
        if hasattr(vars(module).get("forward"), TILING):  # nobody has put another around it
            del module.forward
            if own is not None:
                module.forward = types.MethodType(own, module)
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


def add_up_losses(model: Any, add_up: bool) -> float | None:
    """Whether tiles of the forwards to come add up `token_losses`. Returns what those before did; None where the loss
    had no tiles."""
    tiling = _tiling(model)
    if tiling is None:
        return None
    found, tiling.losses = tiling.losses, [] if add_up else None
    return sum(found) if found else None


def _tiling(model: Any) -> Tiling | None:
    return getattr(getattr(model, "base_model", None), TILING, None)


def _mlps(model: Any, tiles: int | str) -> list[nn.Module]:
    """Those that are dense: of experts, routers are read by hooks, for the loss that balances them."""
    layers = getattr(model.base_model, "layers", ()) if tiles != 1 else ()
    return [layer.mlp for layer in layers if hasattr(layer.mlp, "down_proj")]


def _norms(model: Any) -> list[nn.Module]:
    """Those of whole tokens. With the fp32 copies that they make they hold more than an attention does."""
    base = model.base_model
    around = [module for layer in getattr(base, "layers", ()) for module in layer.children()]
    norms = [module for module in (*around, *base.children()) if _is_norm(module)]
    return [module for module in norms if not _has_other_forward(module)]


def _norms_before(model: Any, mlps: list[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(an attention or tiled MLP, the norm before it) of layers whose MLP has tiles."""
    for layer in getattr(model.base_model, "layers", ()):
        if layer.mlp not in mlps:
            continue
        for user, names in ((layer.self_attn, BEFORE[-1:]), (layer.mlp, BEFORE)):
            if norm := next((getattr(layer, name) for name in names if hasattr(layer, name)), None):
                yield user, norm


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _head(model: Any, tiles: int | str) -> list[nn.Module]:
    """The head, if the model has one and it is to have tiles: "auto" leaves the loss to Liger where that is fused."""
    if tiles == 1 or (tiles == "auto" and is_of_liger(model.forward)):
        return []
    return [model.lm_head] if hasattr(model, "lm_head") else []


def _has_other_forward(module: nn.Module) -> bool:
    """Whether a module has a forward that is neither its class's nor Liger's."""
    return "forward" in vars(module) and not is_of_liger(module.forward)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return vars(module).get(OWN, type(module).forward)


def _leaves(mlps: list[nn.Module], head: list[nn.Module]) -> list[nn.Module]:
    """Those with modules inside: an MLP, or a head with LoRA."""
    return [module for module in (*mlps, *head) if next(module.children(), None) is not None]


def _replace(module: nn.Module, function: Callable[..., Any]) -> None:
    """A method of the instance, so that a copy of the module has its own; with the signature of the class's."""

    if "forward" in vars(module):
        setattr(module, OWN, vars(module)["forward"].__func__)

    @functools.wraps(_own_forward(module))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (function if hasattr(self, TILING) else _own_forward(self))(self, *args, **kwargs)

    setattr(forward, TILING, True)
    module.forward = types.MethodType(forward, module)


def _before_base(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    getattr(module, TILING).local = not kwargs.get("sequence_parallel", False)  # which the patch says


def _after_base(module: Any, args: tuple, output: Any) -> None:
    tiling = getattr(module, TILING)
    tiling.local, tiling.made = False, None  # a checkpoint may compute layers again at any time


def _before_mlp(module: Any, args: tuple) -> tuple | None:
    """Of a leaf whose input wants no gradient (LoRA in a first layer) ZeRO-3 would take the gradients too early. It is
    to have the parameters of the norm before it, too, before it is fetched."""
    getattr(module, TILING).lend(module)
    if args and hasattr(module, "ds_id") and torch.is_grad_enabled() and not args[0].requires_grad and trained(module):
        return (args[0].detach().requires_grad_(), *args[1:])
    return None


@between_graphs
def _tiled_forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
    (x,) = (*args, *kwargs.values())
    own, tiling = _own_forward(module), getattr(module, TILING)
    tokens = x.shape[0] * x.shape[1]
    tiles = ceil_of(tokens, x.shape[2]) if tiling.mlp == "auto" else tiling.mlp
    if tiling.local or tiles == 1:
        return own(module, x)
    is_norm = _is_norm(module)
    source = None if is_norm else tiling.source(x, module)
    out = tiled(lambda tile, _: own(module, tile), x, trained(module), tiles, source)
    tiling.made = None
    if is_norm and torch.is_grad_enabled() and module in tiling.norms.values():
        source = Source(x.detach(), functools.partial(own, module))
        tiling.made = StorageWeakRef(out.untyped_storage()), module, source
    return out

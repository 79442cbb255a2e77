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
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.batches import IGNORE
from ds_seqpar.config import most_logits
from ds_seqpar.errors import SECTION, ConfigError, InputError

from .families import unwrapped
from .graphs import between_graphs
from .liger import is_of_liger
from .tiles import Sums, ceil_of, tiled, tiled_sum, trained

OWN = "_sequence_parallel_own_forward"  # an attribute of tiled modules that had a forward beside their class's: it


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
    for module in modules:
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


def token_losses(logits: Tensor, labels: Tensor) -> float:
    """The sum of the losses of tokens, logits (B, s, vocabulary), shift_labels (B, s); few are made fp32 at once."""
    flat, targets = logits.detach().flatten(0, 1), labels.to(logits.device).flatten()
    parts = zip(flat.split(TOGETHER), targets.split(TOGETHER), strict=True)
    losses = [F.cross_entropy(x.float(), of.long(), ignore_index=IGNORE, reduction="sum") for x, of in parts]
    return float(torch.stack(losses).sum())


def add_up_losses(model: Any, add_up: bool) -> float | None:
    """Whether tiles of the forwards to come add up `token_losses`. Returns what those before did, None: nothing."""
    tiling = _tiling(model)
    if tiling is None:
        return None
    found, tiling.losses = tiling.losses, 0.0 if add_up else None
    return found


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
    norms = [module for module in (*around, *base.children()) if type(module).__name__.endswith("Norm")]
    return [module for module in norms if not _has_other_forward(module)]


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
    getattr(module, TILING).local = False  # a checkpoint may compute layers again at any time


def _before_mlp(module: nn.Module, args: tuple) -> tuple | None:
    """Of a leaf whose input wants no gradient (LoRA in a first layer) ZeRO-3 would take the gradients too early."""
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
    return tiled(lambda tile, _: own(module, tile), x, trained(module), tiles)


TILING = "_sequence_parallel_tiling"  # an attribute of modules that have tiles: their Tiling
LEAF = "_z3_leaf"  # DeepSpeed's mark of a module
TOGETHER = 1024  # tokens whose logits are made fp32 at once


@dataclasses.dataclass(kw_only=True)
class Tiling:
    """What a tiled model's modules share. mlp, loss: numbers of tiles. local: the forward that runs is local and stays
    as it is. evaluated: what a forward without gradients is to give, its loss alone, in tiles; with "logits" these too,
    whole; None: the model's own. losses: where somebody looks at the loss, the sum of token losses by tiles' logits."""

    mlp: int | str
    loss: int | str
    modules: tuple[nn.Module, ...]
    hooks: tuple[RemovableHandle, ...] = ()
    local: bool = False
    evaluated: Literal["loss", "logits"] | None = None
    losses: float | None = None

    @contextlib.contextmanager
    def being(self, local: bool) -> Iterator[None]:
        """A context in which a layer is computed again, of a forward that was local or not."""
        before, self.local = self.local, local
        try:
            yield
        finally:
            self.local = before


def model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a causal language model, by its class's own: once without tokens between base model and loss, and
    once for the loss of each tile."""
    given = {**dict(zip(_names(model), args, strict=False)), **kwargs} if args else kwargs
    if not _wants_tiles(model, given):
        return type(model).forward(model, *args, **kwargs)
    if given.get("num_items_in_batch") is None:
        raise InputError(
            "a tiled loss needs num_items_in_batch, which the sum of token losses is divided by; got none, give the "
            "model what sp.shard_batches returns"
        )
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
    loss = _loss(model, given, base, logits)
    if around.get("aux_loss") is not None:
        loss = loss + model.router_aux_loss_coef * around.aux_loss.to(loss.device)
    output = type(around)(**{**around, "loss": loss, "logits": torch.cat(logits, 1) if logits else None})
    return output if (getattr(model.config, "return_dict", True) if as_dict is None else as_dict) else output.to_tuple()


@between_graphs
def _loss(model: Any, given: dict[str, Any], base: Any, logits: list[Tensor]) -> Tensor:
    """Of tokens, from the base model's output. logits: takes those of tiles, where they are wanted."""
    in_tiles = functools.partial(_sum_of_tiles, model, given, type(base), logits)
    return _through(model.lm_head, in_tiles, base.last_hidden_state)


def _through(head: Any, in_tiles: Callable[..., Tensor], x: Tensor) -> Tensor:
    """What in_tiles makes of the head and of x, inside one call of the head: what has hooked it, as ZeRO-3 has, sees no
    tiles. Until that call the head's forward is its own: it may have been replaced at any time before."""
    own, before = head.forward, vars(head).get("forward")
    has_parts, partitioned = any(head.children()), any(hasattr(p, "ds_id") for p in head.parameters())
    if has_parts and partitioned and not hasattr(head, LEAF):
        raise ConfigError(
            "a tiled loss under ZeRO-3 needs the head that the model had when it was patched; got one of type "
            f"{type(head).__name__}, patch the model after its adapters are there"
        )

    def forward(x: Tensor) -> Tensor:
        sums = Sums(trained(head))
        plain = before is None and type(head).forward is nn.Linear.forward
        return in_tiles((lambda tile: sums.linear(tile, head.weight, head.bias)) if plain else own, x, sums)

    head.forward = forward
    try:
        return head(x)
    finally:
        del head.forward
        if before is not None:
            head.forward = before


def _around(model: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """(the output of the base model, that of the model for none of its tokens): all but the loss of tokens."""
    outputs: list[Any] = []

    def base(*args: Any, **kwargs: Any) -> Any:
        return _without_tokens(model.base_model(*args, **kwargs), outputs)

    around = _own(model, base, lambda x: x, {**given, "labels": None})
    return outputs[0], around


@between_graphs
def _without_tokens(output: Any, outputs: list[Any]) -> Any:
    """A base model's output with a last hidden state of no tokens; outputs takes what it was."""
    outputs.append(output)
    return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, :0]})


def _sum_of_tiles(
    model: Any,
    given: dict[str, Any],
    kind: type,
    logits: list[Tensor],
    head: Callable[..., Tensor],
    x: Tensor,
    sums: Sums,
) -> Tensor:
    """The loss of tokens from x (B, s, d), the base model's last hidden state. kind: of the base model's output.
    logits: takes those of tiles, where they are wanted."""
    tiling: Tiling = getattr(model, TILING)
    wanted = not torch.is_grad_enabled() and tiling.evaluated == "logits"
    shape = given["shift_labels"].shape
    by_token = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.shape[:2] == shape}
    if "output_router_logits" in _names(model):  # what balances experts is whole, in `_around`
        given = {**given, "output_router_logits": False}

    def loss_of(tile: Tensor, cut: slice) -> Tensor:
        part = given | {name: x[:, cut].contiguous() for name, x in by_token.items()}
        output = _own(model, lambda *args, **kwargs: kind(last_hidden_state=tile), head, part)
        logits.extend([output.logits] if wanted else [])
        if tiling.losses is not None:
            tiling.losses += token_losses(output.logits, part["shift_labels"])
        return output.loss

    return tiled_sum(loss_of, x, sums, _loss_tiles(model, x))


def _own(model: Any, base: Callable[..., Any], head: Callable[..., Tensor], given: dict[str, Any]) -> Any:
    """The forward of the model's class with another base model and head."""
    return type(model).forward(_twin(model, base, head), **given, return_dict=True)


@between_graphs
def _twin(model: Any, base: Callable[..., Any], head: Callable[..., Tensor]) -> Any:
    """The model with another base model and head. Of the same class: what a subclass overrides stays so."""
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    vars(twin).update({model.base_model_prefix: base, "lm_head": head})
    return twin


def _loss_tiles(model: Any, x: Tensor) -> int:
    tiles, vocab = getattr(model, TILING).loss, model.config.vocab_size
    return ceil_of(x.shape[0] * x.shape[1] * vocab * 4, most_logits(vocab, x.shape[2])) if tiles == "auto" else tiles

"""The loss of a causal language model in tiles, whatever lies between its head and the loss.

Families scale or cap their logits, and add a loss that balances experts. No code here repeats that. The forward of the
model's own class runs once for each tile, on a copy of the model (a twin). The twin's base model returns that tile of
the last hidden state. It runs once more with the real base model, whose output is cut to no tokens, for everything
else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules import module as of_all
from torch.utils.hooks import RemovableHandle

from ds_seqpar.config.settings import most_logits
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.errors import ConfigError, InputError

from ..graph_breaks import between_graphs
from .tiled_function import Deferred, GradientSums, Source, tile_count, tiled_sum, trained_parameters

TILING = "_sequence_parallel_tiling"  # an attribute of modules that have tiles: their Tiling
STAGED = "_sequence_parallel_head_chunks"  # an attribute of an attention module that has head chunks: its hook
LEAF = "_z3_leaf"  # DeepSpeed's mark of a module
TOGETHER = 1024  # tokens whose logits are cast to fp32 at once
# kinds of hooks that see a module's inputs or outputs; packages whose hooks do not read the values
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
BLIND = ("hf_integration", "deepspeed", "accelerate", "transformers", "torch.distributed", "torch.utils")


@dataclasses.dataclass(kw_only=True)
class Tiling:
    """The state that the modules of a tiled model share.

    mlp, loss: numbers of tiles, or "auto". local: whether the running forward is local, and so has no tiles. evaluated:
    what forwards without gradients compute, as in `tiling.evaluated`. losses: sums of token losses, one for each tile
    so far; None: they are not collected.

    Deferred norms: norms: attention or MLP -> the norm before it, which no other module reads. layers: norm -> its
    layer. deferred: (storage of the output, source) of the norm that ran last, until all its readers have read it;
    unread: how many have not. watched: norms whose output another hook may see in this forward. in_layer: whether a
    transformers checkpoint computes a layer now, and has made the input of the MLP's norm in it.
    """

    mlp: int | str
    loss: int | str
    modules: tuple[nn.Module, ...]
    hooks: tuple[RemovableHandle, ...] = ()
    local: bool = False
    evaluated: Literal["loss", "logits"] | None = None
    losses: list[float] | None = None
    norms: dict[nn.Module, nn.Module] = dataclasses.field(default_factory=dict)
    deferred: tuple[StorageWeakRef, Source] | None = None
    unread: int = 0
    layers: dict[nn.Module, nn.Module] = dataclasses.field(default_factory=dict)
    watched: frozenset[nn.Module] = frozenset()
    in_layer: bool = False

    def defers(self, norm: nn.Module) -> bool:
        """Whether a norm may be deferred: no module or hook but its readers sees its output, or its gradient. What a
        forward has decided holds when checkpoints compute it again, since hooks may be gone by then."""
        readers = [reader for reader, its in self.norms.items() if its is norm]
        if not readers:
            return False
        layer = self.layers[norm]
        others = "forward" in vars(layer) or not type(layer).forward.__module__.startswith("transformers.")
        if others or not {norm, *readers} <= {*layer.children()} or any(map(_is_watched, (norm, *readers))):
            self.watched |= {norm}
        return norm not in self.watched

    def defer(self, x: Tensor, norm: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Defers a norm of x (B, s, d): returns a placeholder, of which the norm's readers compute tiles."""
        self.check_read()
        out = Deferred.apply(x)
        self.deferred = StorageWeakRef(out.untyped_storage()), Source(x.detach(), norm, forward)
        self.unread = self.readers(norm)
        return out

    def readers(self, norm: nn.Module) -> int:
        """How many modules read this norm."""
        return sum(one is norm for one in self.norms.values())

    def source(self, x: Tensor, reader: nn.Module) -> Source | None:
        """What x stands for, if the norm before `reader` has deferred it; else None."""
        if reader not in self.norms or any(x.stride()):
            return None
        if self.deferred is not None and self.deferred[0].cdata == x.untyped_storage()._cdata:
            (_, source), self.unread = self.deferred, self.unread - 1
            if not self.unread:
                self.deferred = None
            return source
        raise ConfigError(
            f"tiled norms need to be computed together with what reads them; got a {type(reader).__name__} that a "
            "checkpoint of its own computes again, or a copy of its norm: checkpoint whole layers and patch the model "
            "after its adapters are there, or leave mlp_tiles out"
        )

    def check_read(self) -> None:
        """Raises ConfigError where the last norm's output went elsewhere."""
        if self.unread:
            raise ConfigError(
                "tiled norms need layers whose norms are read by attention or the MLP alone; got a layer that changes "
                "or reads a norm's output before these do, leave mlp_tiles out"
            )

    def forget(self) -> None:
        self.deferred, self.unread = None, 0

    def lend(self, user: Any) -> None:
        """Makes ZeRO-3 gather the parameters of the norm before `user` with the user's own, since backward may compute
        that norm again. All ranks do so, even if only some of them need to."""
        if user in self.norms and hasattr(user, "ds_id"):
            from deepspeed.runtime.zero import register_external_parameter

            for parameter in self.norms[user].parameters(recurse=False):
                register_external_parameter(user, parameter)

    @contextlib.contextmanager
    def being(self, local: bool) -> Iterator[None]:
        """A context in which a checkpoint computes a layer, of a forward that was local or not."""
        before, self.local, self.in_layer = (self.local, self.in_layer), local, True
        try:
            yield
        finally:
            self.local, self.in_layer = before
            self.forget()


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks that may read values: all do but those of packages in BLIND."""
    kinds = [*(getattr(module, f"_{kind}") for kind in HOOKS), *(getattr(of_all, f"_global_{kind}") for kind in HOOKS)]
    return any(not _is_blind(hook) for kind in kinds for hook in kind.values())


def _is_blind(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or ""
    return any(name == one or name.startswith(f"{one}.") for one in BLIND)


def token_losses(logits: Tensor, labels: Tensor) -> float:
    """The sum of token losses, in fp32. logits (B, s, vocabulary), labels: shift_labels (B, s)."""
    flat, targets = logits.detach().flatten(0, 1), labels.to(logits.device).flatten()
    parts = zip(flat.split(TOGETHER), targets.split(TOGETHER), strict=True)
    losses = [F.cross_entropy(x.float(), of.long(), ignore_index=IGNORE, reduction="sum") for x, of in parts]
    return float(torch.stack(losses).sum())


def model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a causal language model with a tiled loss, in place of its class's; without tiles it calls
    that."""
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
    """The loss of tokens, from the base model's output. logits: takes the logits of each tile, if they are wanted."""
    in_tiles = functools.partial(_sum_of_tiles, model, given, type(base), logits)
    return _through(model.lm_head, in_tiles, base.last_hidden_state)


def _through(head: Any, in_tiles: Callable[..., Tensor], x: Tensor) -> Tensor:
    """in_tiles(head's forward, x, sums), run inside one call of the head, so that hooks on the head, as ZeRO-3's, see
    no tiles. For that call alone the head's forward is replaced; others may have replaced it before."""
    own, before = head.forward, vars(head).get("forward")
    has_parts, partitioned = any(head.children()), any(hasattr(p, "ds_id") for p in head.parameters())
    if has_parts and partitioned and not hasattr(head, LEAF):
        raise ConfigError(
            "a tiled loss under ZeRO-3 needs the head that the model had when it was patched; got one of type "
            f"{type(head).__name__}, patch the model after its adapters are there"
        )

    def forward(x: Tensor) -> Tensor:
        sums = GradientSums(trained_parameters(head))
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
    """(the output of the base model, the output of the model for no tokens): everything but the loss of tokens."""
    outputs: list[Any] = []

    def base(*args: Any, **kwargs: Any) -> Any:
        return _without_tokens(model.base_model(*args, **kwargs), outputs)

    around = _own(model, base, lambda x: x, {**given, "labels": None})
    return outputs[0], around


@between_graphs
def _without_tokens(output: Any, outputs: list[Any]) -> Any:
    """A base model's output, cut to no tokens. outputs: takes the output as it was."""
    outputs.append(output)
    return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, :0]})


def _sum_of_tiles(
    model: Any,
    given: dict[str, Any],
    kind: type,
    logits: list[Tensor],
    head: Callable[..., Tensor],
    x: Tensor,
    sums: GradientSums,
) -> Tensor:
    """The loss of tokens from x (B, s, d), the base model's last hidden state. kind: type of the base model's output.
    logits: takes the logits of each tile, if they are wanted."""
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
            tiling.losses.append(token_losses(output.logits, part["shift_labels"]))
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
    return tile_count(x.shape[0] * x.shape[1] * vocab * 4, most_logits(vocab, x.shape[2])) if tiles == "auto" else tiles

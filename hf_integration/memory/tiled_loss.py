"""The loss of a causal language model in tiles, whatever lies between its head and the loss.

Families scale or cap their logits, and add a loss that balances experts. No code here repeats that. The forward of the
model's own class runs once for each tile, on a copy of the model (a twin). The twin's base model returns that tile of
the last hidden state. It runs once more with the real base model, whose output is cut to no tokens, for everything
else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ds_seqpar.config.settings import most_logits
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.errors import ConfigError, InputError

from ..compat import LEAF, ZERO_ID, hooks_around
from ..context import ForwardState, current
from ..families import BASE, balance_weight, base_of
from ..graph_breaks import between_graphs
from .tiled_function import Deferred, GradientSums, Source, tile_count, tiled_sum, trained_parameters

TILING = "_sequence_parallel_tiling"  # an attribute of modules that have tiles: their Tiling
STAGED = "_sequence_parallel_head_chunks"  # an attribute of an attention module that has head chunks: its hook
TOGETHER = 1024  # tokens whose logits are cast to fp32 at once
# packages whose hooks do not read the values
WATCHING = "hf_integration.model.finite"  # whose hooks do
BLIND = ("hf_integration", "deepspeed", "accelerate", "transformers", "torch.distributed", "torch.utils")


@dataclasses.dataclass(kw_only=True)
class Tiling:
    """What the modules of a tiled model share.

    Fields from `norms` on are about deferred norms.
    """

    mlp: int | str  # the number of tiles, or "auto"
    loss: int | str  # the number of tiles, or "auto"
    modules: tuple[nn.Module, ...]
    hooks: tuple[RemovableHandle, ...] = ()
    evaluating: bool = False  # whether forwards without gradients compute the loss in tiles too
    # attention or MLP -> the norm before it, which no other module reads
    norms: dict[nn.Module, nn.Module] = dataclasses.field(default_factory=dict)
    layers: dict[nn.Module, nn.Module] = dataclasses.field(default_factory=dict)  # norm -> its layer
    # the state of what runs outside of a forward, as checkpoints other than transformers' do in backward
    outside: ForwardState = dataclasses.field(default_factory=ForwardState)

    @property
    def state(self) -> ForwardState:
        context = current()
        return self.outside if context is None else context.state

    def defers(self, norm: nn.Module) -> bool:
        """Return whether a norm may be deferred: no module or hook other than its readers gets its output or gradient.

        The decision of a forward holds when checkpoints recompute it, since hooks may be gone by then.
        """
        readers = [reader for reader, source_norm in self.norms.items() if source_norm is norm]
        if not readers:
            return False
        layer = self.layers[norm]
        custom_layer = "forward" in vars(layer) or not type(layer).forward.__module__.startswith("transformers.")
        watched = self.state.watched
        if custom_layer or not {norm, *readers} <= {*layer.children()} or any(map(_is_watched, (norm, *readers))):
            watched.add(norm)
        return norm not in watched

    def defer(self, x: Tensor, norm: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Defer a norm of x (B, s, d): return a placeholder, from which the norm's readers compute tiles."""
        state = self.state
        check_read(state)
        out = Deferred.apply(x)
        state.deferred = StorageWeakRef(out.untyped_storage()), Source(x.detach(), norm, forward)
        state.unread = self.readers(norm)
        return out

    def readers(self, norm: nn.Module) -> int:
        """Return how many modules read this norm."""
        return sum(source_norm is norm for source_norm in self.norms.values())

    def source(self, x: Tensor, reader: nn.Module) -> Source | None:
        """Return the computation that x replaces, if the norm before `reader` was deferred; else None."""
        if reader not in self.norms or any(x.stride()):
            return None
        state = self.state
        if state.deferred is not None and state.deferred[0] == StorageWeakRef(x.untyped_storage()):
            (_, source), state.unread = state.deferred, state.unread - 1
            if not state.unread:
                state.deferred = None
            return source
        raise ConfigError(
            f"tiled norms need to be computed together with what reads them; got a {type(reader).__name__} that a "
            "checkpoint of its own computes again, or a copy of its norm: checkpoint whole layers and patch the model "
            "after its adapters are there, or leave mlp_tiles out"
        )

    def lend(self, reader: Any) -> None:
        """Make ZeRO-3 gather the parameters of the norm before `reader` with the reader's own.

        Backward may recompute that norm. All ranks do so, even if only some of them need to.
        """
        if reader in self.norms and hasattr(reader, ZERO_ID):
            from deepspeed.runtime.zero import register_external_parameter

            for parameter in self.norms[reader].parameters(recurse=False):
                register_external_parameter(reader, parameter)


def check_read(state: ForwardState) -> None:
    """Raise ConfigError where the last deferred norm's output went elsewhere."""
    if state.unread:
        raise ConfigError(
            "tiled norms need layers whose norms are read by attention or the MLP alone; got a layer that changes "
            "or reads a norm's output before these do, leave mlp_tiles out"
        )


def _is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks that may read values: all do but those of packages in BLIND."""
    return any(not _is_blind(hook) for hook in hooks_around(module))


def _is_blind(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or ""
    return name != WATCHING and any(name == package or name.startswith(f"{package}.") for package in BLIND)


def token_losses(logits: Tensor, labels: Tensor) -> float:
    """Return the sum of token losses, in fp32, of logits (B, s, vocabulary) and shift_labels (B, s)."""
    flat, targets = logits.detach().flatten(0, 1), labels.to(logits.device).flatten()
    pairs = zip(flat.split(TOGETHER), targets.split(TOGETHER), strict=True)
    losses = [F.cross_entropy(x.float(), target.long(), ignore_index=IGNORE, reduction="sum") for x, target in pairs]
    return float(torch.stack(losses).sum())


def model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a causal language model's forward with a tiled loss; without tiles, call the forward of its class."""
    inputs = {**dict(zip(_argument_names(model), args, strict=False)), **kwargs} if args else kwargs
    if not _wants_tiles(model, inputs):
        return type(model).forward(model, *args, **kwargs)
    if inputs.get("num_items_in_batch") is None:
        raise InputError(
            "a tiled loss needs num_items_in_batch, which the sum of token losses is divided by; got none, give the "
            "model what sp.shard_batches returns"
        )
    return _tiled_output(model, inputs)


def _argument_names(model: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def _wants_tiles(model: Any, inputs: dict[str, Any]) -> bool:
    tiling = getattr(model, TILING)
    if inputs.get("labels") is None or inputs.get("shift_labels") is None or inputs.get("logits_to_keep"):
        return False
    if base_of(model)._sequence_parallel_patch.whole:
        return False
    return torch.is_grad_enabled() or tiling.evaluating


def _tiled_output(model: Any, inputs: dict[str, Any]) -> Any:
    inputs = {**inputs}
    as_dict = inputs.pop("return_dict", None)
    base, rest = _output_without_tokens(model, inputs)
    loss = _loss(model, inputs, base)
    if rest.get("aux_loss") is not None:
        loss = loss + balance_weight(model) * rest.aux_loss.to(loss.device)
    output = type(rest)(**{**rest, "loss": loss, "logits": None})
    return output if (getattr(model.config, "return_dict", True) if as_dict is None else as_dict) else output.to_tuple()


@between_graphs
def _loss(model: Any, inputs: dict[str, Any], base: Any) -> Tensor:
    """Compute the loss of tokens from the base model's output."""
    sum_tiles = functools.partial(_sum_of_tiles, model, inputs, type(base))
    return through(model.lm_head, sum_tiles, base.last_hidden_state)


def through(head: Any, sum_tiles: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute sum_tiles(head's forward, x, sums) inside one call of the head.

    So hooks on the head, such as ZeRO-3's, get no tiles. For that call alone the head's forward is replaced; others may
    have replaced it before.
    """
    head_forward, instance_forward = head.forward, vars(head).get("forward")
    has_children, partitioned = any(head.children()), any(hasattr(p, ZERO_ID) for p in head.parameters())
    if has_children and partitioned and not hasattr(head, LEAF):
        raise ConfigError(
            "a tiled loss, as log_probs has, needs under ZeRO-3 the head that the model had when it was patched with "
            f"loss_tiles; got one of type {type(head).__name__}, set them, and patch the model after its adapters are "
            "there"
        )

    def forward(x: Tensor) -> Tensor:
        sums = GradientSums(trained_parameters(head))
        plain = instance_forward is None and type(head).forward is nn.Linear.forward
        return sum_tiles((lambda tile: sums.linear(tile, head.weight, head.bias)) if plain else head_forward, x, sums)

    head.forward = forward
    try:
        return head(x)
    finally:
        del head.forward
        if instance_forward is not None:
            head.forward = instance_forward


def _output_without_tokens(model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Return (the base model's output, the model's output for no tokens): all but the loss of tokens."""
    outputs: list[Any] = []

    def base(*args: Any, **kwargs: Any) -> Any:
        return without_tokens(base_of(model)(*args, **kwargs), outputs)

    rest = class_forward(model, base, lambda x: x, {**inputs, "labels": None})
    return outputs[0], rest


@between_graphs
def without_tokens(output: Any, outputs: list[Any]) -> Any:
    """Cut a base model's output to no tokens.

    Args:
        outputs: Takes the output as it was.
    """
    outputs.append(output)
    return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, :0]})


def _sum_of_tiles(
    model: Any, inputs: dict[str, Any], output_type: type, head: Callable[..., Tensor], x: Tensor, sums: GradientSums
) -> Tensor:
    """Compute the loss of tokens from x (B, s, d), the base model's last hidden state.

    Args:
        output_type: The type of the base model's output.
    """
    tiling: Tiling = getattr(model, TILING)
    shape = inputs["shift_labels"].shape
    by_token = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.shape[:2] == shape}
    # the loss that balances experts is computed for all tokens, in `_output_without_tokens`
    if "output_router_logits" in _argument_names(model):
        inputs = {**inputs, "output_router_logits": False}

    def loss_of(tile: Tensor, cut: slice) -> Tensor:
        tile_inputs = inputs | {name: x[:, cut].contiguous() for name, x in by_token.items()}
        output = class_forward(model, lambda *args, **kwargs: output_type(last_hidden_state=tile), head, tile_inputs)
        if (losses := tiling.state.losses) is not None:
            losses.append(token_losses(output.logits, tile_inputs["shift_labels"]))
        return output.loss

    return tiled_sum(loss_of, x, sums, loss_tiles(model, x))


def class_forward(model: Any, base: Callable[..., Any], head: Callable[..., Tensor], inputs: dict[str, Any]) -> Any:
    """Call the forward of the model's class with another base model and head."""
    return type(model).forward(_twin(model, base, head), **inputs, return_dict=True)


@between_graphs
def _twin(model: Any, base: Callable[..., Any], head: Callable[..., Tensor]) -> Any:
    """Return a copy of the model with another base model and head.

    It is of the same class, so a subclass's overrides hold.
    """
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    name, *inside = vars(model).get(BASE, model.base_model_prefix).split(".")
    called: Any = Instead(base_of(model), base)
    for part in reversed(inside):  # where the head calls a part of its base model
        called = types.SimpleNamespace(**{part: called})
    vars(twin).update({name: called, "lm_head": Instead(model.lm_head, head)})
    return twin


class Instead:
    """A function in the place of a module, of which a forward may read other attributes."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def loss_tiles(model: Any, x: Tensor) -> int:
    """Return in how many tiles to compute the logits of the last hidden state x (B, s, d)."""
    tiling, vocab = getattr(model, TILING, None), model.config.get_text_config(decoder=True).vocab_size
    if tiling is None or tiling.loss in (1, "auto"):
        return tile_count(x.shape[0] * x.shape[1] * vocab * 4, most_logits(vocab, x.shape[2]))
    return tiling.loss

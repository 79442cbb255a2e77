"""Call a patched model with whole batches and get whole outputs.

A whole batch is the same on all ranks that share it. The outermost module in the call shards the batch before its
forward and makes the output whole afterwards. Inner modules, such as the base model under a head, get the same
arguments as with `shard_batches`. A whole output stays sharded until its values are read (`ds_seqpar.whole`). Only the
loss is summed over ranks at once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_seqpar import SequenceParallel
from ds_seqpar.base.compat import tensor_version
from ds_seqpar.base.errors import ConfigError, InputError, SeqParError, as_seqpar_error
from ds_seqpar.base.on_devices import to_device
from ds_seqpar.core.runtime.operator import describe
from ds_seqpar.data.batches import shard_call, shard_shared_prompts
from ds_seqpar.data.placing import Apart
from ds_seqpar.data.random_states import OwnStream
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.whole import WholeTensor, plain, whole_loss, whole_of
from ds_seqpar.whole.shard_spec import ShardSpec

from ..context import ForwardContext, ForwardState, current
from ..families import base_of, is_of_liger, unwrapped
from ..generation.forward import cached_forward, takes_cache
from ..graph_breaks import between_graphs
from ..inputs import POSITIONS, by_row, with_axes
from ..look.facts import Facts
from ..noise import drawn_since, own_stream
from .agreement import Agreement, common_misuse, compare_batch, tokens_of
from .losses import check_loss, loss_function_error
from .prompts import prompts_of_call, unshared, wants_token_numbers

FUSED = (
    "a model that adds to its loss needs whole logits; got Liger's fused loss inside, leave that out: "
    "fused_linear_cross_entropy=False, cross_entropy=False"
)

# for each device tensor of a whole batch: (CPU copy, the tensor's version when it was copied)
_on_cpu = WeakTensorKeyDictionary()


def moved_batch(batch: Any, device: torch.device) -> Any:
    """Move a whole batch from the CPU to a device, and remember the batch's CPU tensors.

    A later call then need not copy tensors back, which would make the host wait, or ask other ranks whether the batch
    is whole. Objects other than mappings are returned unchanged.
    """
    if not isinstance(batch, Mapping):
        return batch
    batch_type: Any = type(batch)
    return batch_type({name: _moved(x, device) for name, x in batch.items()})


def _moved(x: Any, device: torch.device) -> Any:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_inference() or x.device.type != "cpu":
        return x
    moved = to_device(x, device)
    _on_cpu[moved] = None if moved is x else x, tensor_version(moved)
    return moved


@between_graphs
def is_moved_batch(x: Any) -> bool:
    """Return whether a tensor comes from `moved_batch` and has not been modified since."""
    return isinstance(x, Tensor) and x in _on_cpu and _on_cpu[x][1] == tensor_version(x)


def shard_inputs(
    agreement: Agreement, facts: Facts, inputs: Mapping[str, Any], context: ForwardContext
) -> tuple[dict[str, Any], ForwardContext]:
    """Shard a call's whole batch. Ranks compare the batch later, in the base model's forward.

    Args:
        agreement: The agreement of the patched model.
        facts: The facts of the patched model.
        inputs: The call's arguments by name.
        context: The call's context.

    Returns:
        (the forward's arguments by name, with this rank's shard; the context with the shard's specs).

    Raises:
        InputError, ConfigError, DisagreementError: On all ranks that share the sequence, if the batch cannot be
            sharded.
    """
    try:
        return _sharded(agreement, facts, {name: x for name, x in inputs.items() if x is not None}, context)
    except Exception as reason:
        compare_batch(agreement.sp, None, as_seqpar_error("sharding a whole batch failed", reason))
        raise


def with_cache(
    agreement: Agreement, facts: Facts, inputs: Mapping[str, Any], context: ForwardContext
) -> ForwardContext:
    """Return the context of a decode step, with its cache and the values that ranks will compare.

    Raises:
        InputError: On all ranks that share the sequence, if the cache or the mask does not match the call.
    """
    try:
        checks = _compared(inputs)
        inputs = inputs if context.media is None else context.media.of_stack(inputs)
        model: Any = unwrapped(context.module)  # type: ignore[arg-type]
        cached, _ = cached_forward(agreement.sp, model.config, facts, inputs, checks, agreement.inputs)
        cached.begin()
    except Exception as reason:
        compare_batch(agreement.sp, None, as_seqpar_error("reading a cache failed", reason))
        raise
    checks.fields["cache"] = str(cached.kept)
    return context.replace(cached=cached, compared=checks)


def _sharded(
    agreement: Agreement, facts: Facts, inputs: dict[str, Any], context: ForwardContext
) -> tuple[dict[str, Any], ForwardContext]:
    assert context.module is not None  # only the contexts for compiled graphs have no module
    model: Any = unwrapped(context.module)
    sp, labeled = agreement.sp, inputs.get("labels") is not None
    checks, cached, table = _compared(inputs), None, agreement.inputs
    if context.media is not None:
        inputs = context.media.of_stack(inputs)
        checks.fields |= drawn_since(sp, context.media.states)  # for example for dropout in towers
    if takes_cache(context.module, inputs):
        cached, inputs = cached_forward(sp, model.config, facts, inputs, checks, table)
        checks.fields["cache"] = str(cached.kept)
    if wrong := _misuse(inputs):
        raise InputError(wrong)
    has_own_loss = labeled and model is not base_of(model) and not wants_token_numbers(inputs)
    tries_loss = has_own_loss and agreement.loss_option_of is not None
    if tries_loss and (wrong_loss := loss_function_error(model, agreement.loss_option_of or "")):
        raise wrong_loss
    on_cpu, (rows, tokens) = _copies(inputs), tokens_of(inputs).shape[:2]
    if shared := prompts_of_call(sp, model, facts, inputs, on_cpu):
        batch = {name: inputs.pop(name) for name in ("input_ids", "labels")}
        shard, counted = shard_shared_prompts(sp.sharding, batch, shared, checks, on_cpu)
        shard |= {name: x for name, x in inputs.items() if name != "attention_mask"}
        rows, tokens = 1, len(shared.tokens)
        checks.fields["shared prompts"] = str(shard["placement"])
    else:
        end_to_end = cached is None and context.media is not None and any(x.spans for x in context.media.masks)
        shard, counted = shard_call(sp.sharding, inputs, checks, on_cpu, with_axes(table, inputs), end_to_end)
    if labeled:
        shard.setdefault("num_items_in_batch", counted)
    if cached is not None:
        cached.begin(shard.get("placement"))
    if POSITIONS in shard:
        shard["position_ids"] = shard.pop(POSITIONS)
    spec = logits = ShardSpec.of(sp.sharding, rows, tokens, shard.get("placement"), "outputs")
    if keep := shard.pop("logits_to_keep", 0):
        chosen: slice | tuple[int, ...] = slice(-keep, None)
        if cached is not None:
            cached.logits = tuple(range(cached.columns)[-keep:])
            chosen = cached.picked(cached.logits)
        logits, shard["logits_to_keep"] = spec.narrow(slice(None), chosen, tokens_of(shard).device)
    return shard, context.replace(
        positions=shard["position_ids"],
        spec=spec,
        logits=logits,
        cached=cached,
        shared=shared,
        compared=checks,
        state=ForwardState(losses=[] if tries_loss else None),
    )


def _copies(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the CPU copies of tensors that are on a device, by name."""
    copies = {name: _on_cpu[x][0] for name, x in inputs.items() if is_moved_batch(x)}
    return {name: x for name, x in copies.items() if x is not None}


def _compared(inputs: Mapping[str, Any]) -> ValueChecks:
    checks = ValueChecks(at_once=("cpu",))
    checks.compare(inputs, _copies(inputs))
    fields: dict[str, Any] = checks.fields
    fields |= {name: x for name, x in inputs.items() if isinstance(x, bool | int | float | str)}
    if isinstance(items := inputs.get("num_items_in_batch"), Tensor):
        if items.device.type == "cpu":
            fields["num_items_in_batch"] = float(items)
        else:
            checks.compare({"num_items_in_batch": items.reshape(1)})
    return checks


def compare_inputs(
    agreement: Agreement,
    model: Any,
    inputs: Mapping[str, Any],
    media: Collection[str] = (),
    error: SeqParError | None = None,
) -> None:
    """Compare the arguments of a module that gets whole outputs. The inner model shards the arguments.

    Args:
        media: The names of media arguments, whose values are compared too.
        error: A known error of the call.

    Raises:
        ConfigError, DisagreementError: On all ranks that share the sequence, if the ranks' arguments differ or if the
            inner model does not return the outputs that the module needs.
    """
    fused = is_of_liger(model.forward) and inputs.get("labels") is not None
    error = ConfigError(FUSED) if fused else error or unshared(agreement.sp, model, inputs)
    checks = _compared(inputs)
    checks.compare(by_row(inputs, media))
    checks.fields |= agreement.drawn
    compare_batch(agreement.sp, checks, error)


def _misuse(inputs: Mapping[str, Any]) -> str:
    """Return an error message for arguments that are not supported with a whole batch, or "" if there are none."""
    if wrong := common_misuse(inputs):
        return wrong
    if inputs.get("return_token_accuracy") or inputs.get("return_predicted_tokens"):
        return (
            "token_accuracy and predicted_tokens, which Liger gives, are of a rank's shard; got a request, leave it out"
        )
    keep = inputs.get("logits_to_keep", 0)
    if type(keep) is not int or keep < 0:
        return f"logits_to_keep of a patched model must be a number of tokens; got {describe(keep)}, index the logits"
    if keep and inputs.get("labels") is not None:
        return "labels need the logits of all tokens; got logits_to_keep too, leave one of them out"
    return ""


def gather_outputs(agreement: Agreement, context: ForwardContext, inputs: Mapping[str, Any], output: Any) -> Any:
    """Replace this rank's shards in a whole call's output with whole tensors.

    Args:
        inputs: The arguments of the forward by name, with this rank's shard.
    """
    sp, labeled, tiles = agreement.sp, inputs.get("labels") is not None, context.state.losses
    if tiles is not None and context.module is not None:
        share, option_of = 1 / sp.size, agreement.loss_option_of or ""  # the fraction of the expert balance loss
        check_loss(sp, context.module, inputs, output, share=share, tiles=tiles, option_of=option_of)
        agreement.loss_option_of = None  # set only after the check, so that a rejected loss is rejected again
    whole = functools.partial(_whole, sp, context, labeled, bool(inputs.get("fused_lm_head")))
    if isinstance(output, dict):
        whole_outputs = {name: whole(name, x) for name, x in output.items()}
        return type(output)(**whole_outputs)
    if isinstance(output, tuple):
        names = [*(["loss"] if labeled else []), "logits"]
        return tuple(whole((names[at:] or ["outputs"])[0], x) for at, x in enumerate(output))
    return whole("outputs", output)


class _OnPart:
    """Hooks that make a token-wise module outside the base model compute only this rank's shard.

    Like the base model's parameters, the module's parameters get this rank's part of their gradient, times `size`.
    """

    shard_spec: ShardSpec | None = None  # the spec of the current output
    stream: OwnStream | None = None  # the random stream of the current forward

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp

    def before(self, module: nn.Module, args: tuple) -> tuple | None:
        self.shard_spec = None
        if not args or not isinstance(args[0], WholeTensor) or args[0].flat:
            return None
        self.shard_spec = args[0].shard_spec.named("logits")
        self.stream = own_stream(self.sp)
        return args[0].local, *args[1:]

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self.stream is not None:
            shared, self.stream = self.stream.end(), None
            if (context := current()) is not None and context.mode == "whole":
                context.state.shared = shared
        return output if self.shard_spec is None or output is None else whole_of(output, self.shard_spec)


def compute_on_parts(module: nn.Module, sp: SequenceParallel) -> tuple[RemovableHandle, RemovableHandle]:
    """Hook a module that processes tokens independently so that it accepts and returns whole tensors that are sharded
    across ranks."""
    hooks = _OnPart(sp)
    return module.register_forward_pre_hook(hooks.before), module.register_forward_hook(hooks.after, always_call=True)


def _whole(sp: SequenceParallel, context: ForwardContext, labeled: bool, shifted: bool, name: str, x: Any) -> Any:
    """Return the whole tensor of which this rank's output is a shard.

    Args:
        labeled: Whether the output has a loss.
        shifted: Whether per-token outputs have no number for the last token.
        name: The name of the output.
        x: This rank's shard of the output.
    """
    if isinstance(x, tuple | list) and name != "past_key_values":
        return type(x)(_whole(sp, context, labeled, shifted, name, element) for element in x)
    if not isinstance(x, Tensor):
        return x
    if name == "loss" and labeled:
        apart = context.layout is not None and isinstance(context.layout.shards, Apart) and x.requires_grad
        return x * sp.size if apart else whole_loss(sp.sharding, x)
    spec: Any = context.logits if name == "logits" else context.spec
    spec = spec.named(name)
    if x.shape[:2] == spec.lead:
        whole: Tensor = whole_of(x, spec)
        if (cached := context.cached) is not None:
            columns = cached.logits if name == "logits" else None
            # logits for generate must be gathered here, since a streamer may read tokens on one rank alone
            if columns is not None:
                whole = plain(whole)
            whole = cached.with_padding(whole, columns)
        if context.shared is not None:
            whole = context.shared.by_row(plain(whole))
        return whole[:, :-1] if shifted else whole
    if name == "router_logits" and x.dim() == 2:
        return whole_of(x.unflatten(0, spec.lead), spec).flatten(0, 1)
    return x

"""Calls of a patched model with whole batches, the same on the ranks that share them, which return whole outputs.

The outermost module that is called shards the batch before its forward, and makes the output whole after it. Modules
inside it, such as the base model under a head, get what `shard_batches` would return. A whole output stays sharded
until its values are read (`ds_seqpar.whole`); only the loss is summed at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_seqpar import SequenceParallel
from ds_seqpar.compat import tensor_version
from ds_seqpar.data.batches import fingerprint, shard_call
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.errors import ConfigError, InputError, as_seqpar_error
from ds_seqpar.runtime import mismatch_hints
from ds_seqpar.runtime.agreement import Fields, assert_ranks_agree
from ds_seqpar.runtime.input_checks import describe
from ds_seqpar.whole import WholeTensor, whole_loss, whole_of
from ds_seqpar.whole.shard_spec import ShardSpec

from ..families import is_of_liger
from ..graph_breaks import between_graphs
from ..memory.tiled_modules import add_up_losses
from .agreement import FORWARD, Agreement, common_misuse, tokens_of, whose_positions, wrong_inputs
from .losses import loss_function_error, tried_loss

CALL = "whole_call"  # an attribute of the position_ids that a call continues with: its WholeCall
MOVED = "whole_batch"  # an attribute of a tensor of a whole batch: (its tensor on the CPU, its version)
FUSED = (
    "a model that adds to its loss needs whole logits; got Liger's fused loss inside, leave that out: "
    "fused_linear_cross_entropy=False, cross_entropy=False"
)
COMPILED = (
    "a model that is given whole outputs of its base model needs to run uncompiled; got one inside torch.compile, "
    "compile its layers instead (layer.compile())"
)
PASSED = ("num_items_in_batch", "logits_to_keep")  # arguments that are not sharded even where they are tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeCall:
    """One call of a patched model with a whole batch."""

    module: nn.Module  # the outermost one that was called
    agreement: Agreement
    # (this rank's shift_labels, the divisor of their losses) where the loss is still to be checked
    loss_inputs: tuple[Tensor, float] | None
    shard_spec: ShardSpec  # of the batch's tokens
    logits: ShardSpec  # of the tokens that get logits
    labelled: bool  # whether the output has a loss
    shifted: bool  # whether outputs of one number per token have none for the last token


def is_whole(sp: SequenceParallel, inputs: Mapping[str, Any]) -> bool:
    """Return whether a call that is not local was given a whole batch, and not this rank's shard of one.

    Shards have what `shard_batches` adds. On one rank position_ids of another origin may fit both a shard and a whole
    batch; then the other ranks' positions decide.

    Args:
        inputs: The call's arguments by name.
    """
    positions = inputs.get("position_ids")
    if inputs.get("shift_labels") is not None or inputs.get("placement") is not None or wrong_inputs(inputs):
        return False
    if positions is None or torch.compiler.is_compiling():
        return positions is None
    if hasattr(positions, CALL):
        return False
    if is_moved_batch(positions):
        return True
    fits_shard, fits_whole = whose_positions(sp, inputs)
    fits_shard_only = assert_ranks_agree(
        sp.groups.control, "position_ids of a batch", None, number=int(fits_shard and not fits_whole), call=FORWARD
    )
    return not fits_shard_only and fits_whole


def moved_batch(batch: Any, device: torch.device) -> Any:
    """Move a whole batch from the CPU to a device.

    Its tensors keep their CPU values, and a mark that they are whole. So a call need not copy them back, for which the
    host would wait, nor ask other ranks. A batch that is no mapping is returned unchanged.
    """
    if not isinstance(batch, Mapping):
        return batch
    batch_type: Any = type(batch)
    return batch_type({name: _moved(x, device) for name, x in batch.items()})


def _moved(x: Any, device: torch.device) -> Any:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_inference() or x.device.type != "cpu":
        return x
    moved = x.to(device)
    setattr(moved, MOVED, (None if moved is x else x, tensor_version(moved)))
    return moved


def is_moved_batch(x: Any) -> bool:
    """Return whether a tensor is from `moved_batch`, and was not written to since."""
    return hasattr(x, MOVED) and getattr(x, MOVED)[1] == tensor_version(x)


def set_loss_check(model: Any, option_of: str | None) -> None:
    """Set whether a patched model's loss is checked in its first whole call.

    Args:
        option_of: The name of what takes check_loss=False, for the error message; "" where nothing does. None: the loss
            is not checked.
    """
    model.base_model._sequence_parallel_patch.agreement.loss_option_of = option_of


@between_graphs
def shard_inputs(module: nn.Module, agreement: Agreement, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the whole batch of a call.

    Args:
        module: The module that is called.
        agreement: The patched model's.
        inputs: The call's arguments by name.

    Returns:
        The forward's arguments by name, with this rank's shard.

    Raises:
        InputError, ConfigError, DisagreementError: On all ranks of the sequence.
    """
    sp = agreement.sp
    sharded: dict[str, Any] = {}
    call, value, error = None, None, None
    try:
        sharded, call, value = _prepare(module, agreement, inputs)
    except Exception as reason:
        error = as_seqpar_error("sharding a whole batch failed", reason)
    assert_ranks_agree(sp.groups.control, "whole batch", value, error=error, call=FORWARD, advice=_advice)
    setattr(sharded["position_ids"], CALL, call)
    return sharded


def _advice(fields_by_rank: Mapping[int, Fields]) -> str:
    """Return why ranks were given different batches, and what to do."""
    reason = mismatch_hints.of_batches(fields_by_rank)
    return reason and (
        f"{reason}; parts of one sequence need all that sp.shard_batches returns for them, batches of each rank's own "
        "hf_integration.whole_sequences(model)"
    )


def _prepare(
    module: nn.Module, agreement: Agreement, inputs: Mapping[str, Any]
) -> tuple[dict[str, Any], WholeCall, dict[str, Any]]:
    """Return (the forward's arguments, the call, what ranks compare)."""
    inputs = {name: x for name, x in inputs.items() if x is not None}
    model: Any = agreement.model()
    sp, labelled = agreement.sp, inputs.get("labels") is not None
    if wrong := _misuse(inputs):
        raise InputError(wrong)
    tries_loss = labelled and model is not model.base_model and agreement.loss_option_of is not None
    if tries_loss and (wrong_loss := loss_function_error(model, agreement.loss_option_of or "")):
        raise wrong_loss
    if tries_loss:
        add_up_losses(model, True)
    others = {name: x for name, x in inputs.items() if name in PASSED or not isinstance(x, Tensor) or x.dim() == 0}
    batch = {name: _on_cpu(x) for name, x in inputs.items() if name not in others}
    shard, counted = shard_call(sp, batch, ValueChecks())
    if labelled:
        shard.setdefault("num_items_in_batch", counted)
    rows, tokens = tokens_of(inputs).shape[:2]
    shard_spec = logits = ShardSpec.of(sp, rows, tokens, shard.get("placement"), "outputs")
    if keep := others.pop("logits_to_keep", 0):
        logits, kept = shard_spec.narrow(slice(None), slice(-keep, None))
        others["logits_to_keep"] = kept.to(tokens_of(inputs).device)
    call = WholeCall(
        module=module,
        agreement=agreement,
        loss_inputs=(shard["shift_labels"], float(inputs.get("num_items_in_batch", counted))) if tries_loss else None,
        shard_spec=shard_spec,
        logits=logits,
        labelled=labelled,
        shifted=bool(inputs.get("fused_lm_head")),
    )
    return {**shard, **others}, call, _compared({**inputs, **batch})


def _compared(inputs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.dim()}
    small = {name: x for name, x in tensors.items() if not x.is_floating_point() or x.dim() == 1}
    compared: dict[str, Any] = {name: describe(x) for name, x in tensors.items()} | fingerprint(small)
    compared |= {name: x for name, x in inputs.items() if isinstance(x, bool | int | float | str)}
    if isinstance(items := inputs.get("num_items_in_batch"), Tensor):
        compared["num_items_in_batch"] = float(items)
    return compared


@between_graphs
def compare_inputs(sp: SequenceParallel, model: Any, inputs: Mapping[str, Any], compiled: bool) -> None:
    """Compare the arguments of a module that gets whole outputs; the model inside shards them.

    Args:
        compiled: Whether the module is compiled; its gradients would end at the base model.

    Raises:
        ConfigError, DisagreementError: On all ranks of the sequence, unless all call the module with the same
            arguments, and the model inside makes the outputs that it needs.
    """
    fused = is_of_liger(model.forward) and inputs.get("labels") is not None
    error = ConfigError(FUSED) if fused else ConfigError(COMPILED) if compiled else None
    assert_ranks_agree(sp.groups.control, "whole batch", _compared(inputs), error=error, call=FORWARD, advice=_advice)


def _misuse(inputs: Mapping[str, Any]) -> str:
    """Return the sentence for arguments that no whole batch may have; "" where it has none."""
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


def _on_cpu(x: Tensor) -> Tensor:
    """Copy a whole tensor of integers to the CPU, where it is checked; other tensors stay where they are."""
    if x.is_floating_point():
        return x
    on_cpu = getattr(x, MOVED)[0] if is_moved_batch(x) else None
    return x.cpu() if on_cpu is None else on_cpu


@between_graphs
def gather_outputs(sp: SequenceParallel, call: WholeCall, output: Any) -> Any:
    """Replace this rank's shards in the output of a whole call by whole tensors."""
    if call.loss_inputs is not None:
        _check_loss(call, *call.loss_inputs, output)
    if isinstance(output, dict):
        whole_outputs = {name: _whole(sp, call, name, x) for name, x in output.items()}
        return type(output)(**whole_outputs)
    if isinstance(output, tuple):
        names = [*(["loss"] if call.labelled else []), "logits"]
        return tuple(_whole(sp, call, (names[at:] or ["outputs"])[0], x) for at, x in enumerate(output))
    return _whole(sp, call, "outputs", output)


def _check_loss(call: WholeCall, labels: Tensor, items: float, output: Any) -> None:
    """Raise ConfigError on all ranks of the sequence where a rank's loss is not its token losses' sum over `items`."""
    agreement, model = call.agreement, call.agreement.model()
    tried = tried_loss(model, labels, items, output, 1 / agreement.sp.size)  # of the balance, each rank has a share
    error = tried.error(agreement.loss_option_of or "") if tried is not None and tried.rest else None
    assert_ranks_agree(agreement.sp.groups.control, "loss of the model", None, error=error)
    agreement.loss_option_of = None  # not before: a loss that was refused is refused again


class _OnPart:
    """Hooks of a module around the base model that treats tokens independently: it computes this rank's shard alone.

    Its parameters get a part of their gradient, times `size`, as the base model's do.
    """

    shard_spec: ShardSpec | None = None  # of the tensor that is computed

    def before(self, module: nn.Module, args: tuple) -> tuple | None:
        self.shard_spec = None
        if not args or not isinstance(args[0], WholeTensor) or args[0].flat:
            return None
        self.shard_spec = args[0].shard_spec.named("logits")
        return args[0].local, *args[1:]

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return output if self.shard_spec is None else whole_of(output, self.shard_spec)


def compute_on_parts(module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Hook a module that treats tokens independently, so that it takes and returns sharded whole tensors."""
    hooks = _OnPart()
    return module.register_forward_pre_hook(hooks.before), module.register_forward_hook(hooks.after)


def call_of(module: nn.Module, kwargs: Mapping[str, Any]) -> WholeCall | None:
    """Return the whole call that a module was the outermost module of; None for any other forward."""
    call = getattr(kwargs.get("position_ids"), CALL, None)
    return call if call is not None and call.module is module else None


def _whole(sp: SequenceParallel, call: WholeCall, name: str, x: Any) -> Any:
    if isinstance(x, tuple | list) and name != "past_key_values":
        return type(x)(_whole(sp, call, name, element) for element in x)
    if not isinstance(x, Tensor):
        return x
    if name == "loss" and call.labelled:
        return whole_loss(sp, x)
    shard_spec = (call.logits if name == "logits" else call.shard_spec).named(name)
    if x.shape[:2] == shard_spec.lead:
        whole = whole_of(x, shard_spec)
        return whole[:, :-1] if call.shifted else whole
    if name == "router_logits" and x.dim() == 2:
        return whole_of(x.unflatten(0, shard_spec.lead), shard_spec).flatten(0, 1)
    return x

"""A patched model is called with whole batches, the same on the ranks that share them, and gives whole outputs.

The outermost call shards the batch where it enters, and makes its output whole where it leaves. Calls inside it, of the
base model under a head, see what `shard_batches` would have given. A whole output stays in parts until somebody looks
(`ds_seqpar.whole`); only the loss is summed at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_seqpar import SequenceParallel
from ds_seqpar.batches import fingerprint, shard_call
from ds_seqpar.errors import InputError, as_error
from ds_seqpar.runtime import causes, trusted
from ds_seqpar.runtime.agreement import Fields, agree
from ds_seqpar.runtime.inputs import describe
from ds_seqpar.spread import Spread
from ds_seqpar.whole import whole_loss, whole_of

from .graphs import between_graphs
from .losses import loss_error, loss_function_error
from .sharded import Agreement, fits, misused, tokens_of, wrong_inputs
from .tiled_loss import token_losses
from .tiling import add_up_losses

CALL = "whole_call"  # an attribute of the position_ids that a call goes on with: its Call
BROUGHT = "whole_batch"  # an attribute of a tensor of a whole batch: what it was on the CPU; its version
PASSED = ("num_items_in_batch", "logits_to_keep")  # what may be a tensor of no tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """module: the one that was called. spread: of its tokens; logits: of those that it gives logits of. labelled: its
    output has a loss. shifted: its outputs of one number a token leave the last one out. untried: where nobody has
    looked at the model's loss yet, this rank's shift_labels and what their losses are divided by."""

    module: nn.Module
    agreement: Agreement
    untried: tuple[Tensor, float] | None
    spread: Spread
    logits: Spread
    labelled: bool
    shifted: bool


def is_whole(sp: SequenceParallel, given: Mapping[str, Any]) -> bool:
    """Whether a call that is not local was given a whole batch; else it is this rank's part of one. given: its
    arguments by name. What is sharded shows by what `shard_batches` adds. Positions that somebody else made may fit
    both on one rank: then its peers say."""
    positions = given.get("position_ids")
    if given.get("shift_labels") is not None or given.get("placement") is not None or wrong_inputs(given):
        return False
    if positions is None or torch.compiler.is_compiling():
        return positions is None
    if hasattr(positions, CALL) or trusted.is_trusted_of_any(positions):
        return False
    if is_brought(positions):
        return True
    part, whole = fits(sp, given)
    sharded = bool(agree(sp.groups.control, "position_ids of a batch", None, number=int(part and not whole)))
    if sharded and part:
        trusted.trust(positions, sp)
    return not sharded and whole


def brought(batch: Any, device: torch.device) -> Any:
    """A whole batch on the device, from the CPU. A call with it need not fetch it to look at it, for which the host
    would wait for the device, nor ask its peers whether it is whole. Not a mapping: as it is."""
    if not isinstance(batch, Mapping):
        return batch
    kind: Any = type(batch)
    return kind({name: _brought(x, device) for name, x in batch.items()})


def _brought(x: Any, device: torch.device) -> Any:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_inference() or x.device.type != "cpu":
        return x
    moved = x.to(device)
    setattr(moved, BROUGHT, (None if moved is x else x, moved._version))
    return moved


def is_brought(x: Any) -> bool:
    """Whether `brought` gave the tensor, and nobody has written to it since."""
    return hasattr(x, BROUGHT) and getattr(x, BROUGHT)[1] == x._version


def look_at_loss(model: Any, taker: str | None) -> None:
    """Whose check_loss=False is named where the loss of a patched model is wrong in its first whole call; None: nobody
    looks at it."""
    model.base_model._sequence_parallel_patch.agreement.loss_of = taker


@between_graphs
def enter(module: nn.Module, agreement: Agreement, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to go on with, by name. module: the one that is called; agreement: of the model that is patched.
    Raises InputError, ConfigError or DisagreementError on all ranks of the sequence."""
    sp = agreement.sp
    sharded: dict[str, Any] = {}
    call, value, error = None, None, None
    try:
        sharded, call, value = _prepare(module, agreement, given)
    except Exception as reason:
        error = as_error("sharding a whole batch failed", reason)
    agree(sp.groups.control, "whole batch", value, error=error, call="a forward", advice=_cause)
    setattr(sharded["position_ids"], CALL, call)
    return sharded


def _cause(given: Mapping[int, Fields]) -> str:
    """Why ranks were given other batches, and what to do."""
    why = causes.of_batches(given)
    return why and (
        f"{why}; parts of one sequence need all that sp.shard_batches returns for them, batches of each rank's own "
        "hf_integration.whole_sequences(model)"
    )


def _prepare(
    module: nn.Module, agreement: Agreement, given: Mapping[str, Any]
) -> tuple[dict[str, Any], Call, dict[str, Any]]:
    """(the arguments to go on with, the call, what peers compare)."""
    given = {name: x for name, x in given.items() if x is not None}
    model: Any = agreement.model()
    sp, labelled = agreement.sp, given.get("labels") is not None
    if wrong := _misuse(given):
        raise InputError(wrong)
    untried = labelled and model is not model.base_model and agreement.loss_of is not None
    if untried and (wrong_loss := loss_function_error(model, agreement.loss_of or "")):
        raise wrong_loss
    if untried:
        add_up_losses(model, True)
    rest = {name: x for name, x in given.items() if name in PASSED or not isinstance(x, Tensor) or x.dim() == 0}
    batch = {name: _on_cpu(x) for name, x in given.items() if name not in rest}
    shard, counted = shard_call(sp, batch)
    if labelled:
        shard.setdefault("num_items_in_batch", counted)
    rows, tokens = tokens_of(given).shape[:2]
    spread = logits = Spread.of(sp, rows, tokens, shard.get("placement"), "outputs")
    if keep := rest.pop("logits_to_keep", 0):
        logits, kept = spread.narrow(slice(None), slice(-keep, None))
        rest["logits_to_keep"] = kept.to(tokens_of(given).device)
    call = Call(
        module=module,
        agreement=agreement,
        untried=(shard["shift_labels"], float(given.get("num_items_in_batch", counted))) if untried else None,
        spread=spread,
        logits=logits,
        labelled=labelled,
        shifted=bool(given.get("fused_lm_head")),
    )
    compared: dict[str, Any] = fingerprint({name: x for name, x in batch.items() if not x.is_floating_point()})
    compared |= {name: describe(x) for name, x in batch.items() if x.is_floating_point()}
    compared |= {name: x for name, x in given.items() if isinstance(x, bool | int | float | str)}
    if isinstance(items := given.get("num_items_in_batch"), Tensor):
        compared["num_items_in_batch"] = float(items)
    return {**shard, **rest}, call, compared


def _misuse(given: Mapping[str, Any]) -> str:
    """What no whole batch may have, as a sentence."""
    if said := misused(given):
        return said
    if given.get("return_token_accuracy") or given.get("return_predicted_tokens"):
        return (
            "token_accuracy and predicted_tokens, which Liger gives, are of a rank's part; got a request, leave it out"
        )
    keep = given.get("logits_to_keep", 0)
    if type(keep) is not int or keep < 0:
        return f"logits_to_keep of a patched model must be a number of tokens; got {describe(keep)}, index the logits"
    if keep and given.get("labels") is not None:
        return "labels need the logits of all tokens; got logits_to_keep too, leave one of them out"
    return ""


def _on_cpu(x: Tensor) -> Tensor:
    """Whole ids, labels and masks are looked at there."""
    if x.is_floating_point():
        return x
    before = getattr(x, BROUGHT)[0] if is_brought(x) else None
    return x.cpu() if before is None else before


@between_graphs
def leave(sp: SequenceParallel, call: Call, output: Any) -> Any:
    """The output of a whole call, whole."""
    if call.untried is not None:
        _look_at_loss(call, *call.untried, output)
    if isinstance(output, dict):
        found = {name: _whole(sp, call, name, x) for name, x in output.items()}
        return type(output)(**found)
    if isinstance(output, tuple):
        names = [*(["loss"] if call.labelled else []), "logits"]
        return tuple(_whole(sp, call, (names[at:] or ["outputs"])[0], x) for at, x in enumerate(output))
    return _whole(sp, call, "outputs", output)


def _look_at_loss(call: Call, labels: Tensor, items: float, output: Any) -> None:
    """Raises ConfigError on all ranks of the sequence where this rank's part of a loss is not the sum of its token
    losses over `items`. Nothing is looked at where these are not known: without logits, but for a tiled loss."""
    named = output if isinstance(output, Mapping) else dict(zip(("loss", "logits"), output, strict=False))
    loss, logits, experts = (named.get(name) for name in ("loss", "logits", "aux_loss"))
    model: Any = call.agreement.model()
    taker, call.agreement.loss_of = call.agreement.loss_of or "", None
    losses = add_up_losses(model, False)  # of a tiled loss, which gives no logits
    if isinstance(logits, Tensor) and logits.shape[:2] == labels.shape:
        losses = token_losses(logits, labels)
    if loss is None or losses is None or not items:
        return
    aside = 0.0
    if experts is not None:  # of which the loss has this rank's share
        aside = model.router_aux_loss_coef * float(experts.detach()) / call.agreement.sp.size
    lost = 8 * torch.finfo(loss.dtype).eps * abs(aside)  # in adding both
    error = loss_error(float(loss.detach()) - aside, losses / items, taker, lost)
    agree(call.agreement.sp.groups.control, "loss of the model", None, error=error)


def call_of(module: nn.Module, kwargs: Mapping[str, Any]) -> Call | None:
    """The whole call that a module's forward was, if it was one."""
    call = getattr(kwargs.get("position_ids"), CALL, None)
    return call if call is not None and call.module is module else None


def _whole(sp: SequenceParallel, call: Call, name: str, x: Any) -> Any:
    if isinstance(x, tuple | list) and name != "past_key_values":
        return type(x)(_whole(sp, call, name, one) for one in x)
    if not isinstance(x, Tensor):
        return x
    if name == "loss" and call.labelled:
        return whole_loss(sp, x)
    spread = (call.logits if name == "logits" else call.spread).named(name)
    if x.shape[:2] == spread.lead:
        found = whole_of(x, spread)
        return found[:, :-1] if call.shifted else found
    if name == "router_logits" and x.dim() == 2:
        return whole_of(x.unflatten(0, spread.lead), spread).flatten(0, 1)
    return x

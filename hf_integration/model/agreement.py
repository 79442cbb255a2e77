"""Make ranks agree before each forward that is not local.

All ranks must have valid shards of the same batch. The agreement checks tokens, positions and masks. Under
torch.compile the agreement is an op in the graph, so compiled models also compare their ranks in every forward.

Reading a tensor from a device would make the host wait until the device finishes all its work. Positions and masks on a
device are therefore compared on the device, and the next forward raises any error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError, SeqParError
from ds_seqpar.base.fingerprint import Fields
from ds_seqpar.core.compiler.sharding.op_handles import handle_of, object_of
from ds_seqpar.core.runtime.operator import describe, shape_of
from ds_seqpar.data.inputs import InputSpec, refusal
from ds_seqpar.data.shard_checks import HOW, check_shard, check_tokens
from ds_seqpar.data.sharding import layout_of
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.guards import mismatch_hints
from ds_seqpar.guards.agreement import Advice

from ..families import base_of, patch_of
from ..generation.forward import has_cache
from ..inputs import TABLE
from ..module_patch import patch_on
from ..noise import noise_numbers
from .checkpointing import is_checkpointed
from .weights import check_not_flattened, compares_weights, fingerprint, trained_weights

COMPILED = (
    "noise in training on a shared sequence needs a model that is not compiled; got a compiled one with {}, compile "
    "its layers instead, or set that to 0"
)
SKIPS = (
    "training whose sequences ranks share needs all layers in each forward; got layers that are left out by chance, "
    "set layerdrop to 0 in the config before the model is made"
)
# the name used for a sharded forward in error messages
FORWARD = (
    "a forward of a model that shares sequences (a forward of one rank alone needs "
    "hf_integration.whole_sequences(model))"
)


class Agreement:
    """The agreement between the ranks that share a sequence on each sharded forward of a patched model.

    The first forward also compares the ranks' models, and some later forwards compare trained weights.
    """

    # the name of the object that accepts check_loss=False, or "", while the loss of whole calls is unchecked. None if
    # the loss has been checked or needs no check
    loss_option_of: str | None = ""

    def __init__(
        self, sp: SequenceParallel, model: PreTrainedModel, patched: tuple[str, ...] = (), skips: bool = False,
        inputs: Mapping[str, InputSpec] = TABLE,
    ) -> None:  # fmt: skip
        self.sp, self.model, self.compared = sp, weakref.ref(model), False
        self.patched = patched  # names of attention modules and mixers in the base model
        self.skips = skips  # whether training skips layers at random
        self.drawn: dict[str, str] = {}  # values to compare if the last forward drew noise for whole tensors
        self.inputs = inputs  # how ranks share the model's arguments
        self.trained = 0  # the number of forwards that may have been followed by a backward
        self.handle = handle_of(self)

    def __deepcopy__(self, memo: dict) -> Agreement:
        """Return the agreement for a copied model, which counts as compared if the original does."""
        model: Any = self.model()
        if model is None:
            return self
        copied = Agreement(self.sp, memo.get(id(model), model), self.patched, self.skips, self.inputs)
        copied.compared, copied.loss_option_of = self.compared, self.loss_option_of
        return copied

    def agree(
        self, inputs: Mapping[str, Any], wrong: str, backward: bool, compiled: bool, batch: ValueChecks | None = None
    ) -> None:
        """Agree on one forward before any rank that shares the sequence sends data.

        Args:
            inputs: The forward's arguments by name, with this rank's shard.
            wrong: A sentence that describes a known error in the arguments, or "" if none is known.
            backward: Whether a backward will follow.
            compiled: Whether the forward is compiled.
            batch: The values of a whole batch to compare between ranks, or None if the batch was passed sharded.

        Raises:
            InputError, ConfigError, DisagreementError: On all ranks that share the sequence, if any rank has an error.
        """
        model, checker, like = self.model(), self.sp.checker, dict[str, Any]()
        layout = layout_of(inputs.get("placement"))
        checks, tokens = batch or ValueChecks(at_once=("cpu",)), None
        try:
            if sentence := wrong_inputs(inputs) or wrong or _misuse(inputs) or self._replaced(model):
                raise InputError(sentence)
            tokens = tokens_of(inputs)
            if not self.compared and model is not None:
                check_not_flattened(model)
            if self.skips and self.sp.size > 1 and model is not None and model.training:
                raise ConfigError(SKIPS)
            if compiled and backward and model is not None and (numbers := noise_numbers(model)):
                raise ConfigError(COMPILED.format(next(iter(numbers))))
            check_tokens(self.sp.sharding, tokens, layout)
            if batch is None:
                like = {"shape": tuple(tokens.shape)} if layout is None else {"placement": str(layout)}
                check_shard(
                    self.sp.sharding, tokens, inputs.get("position_ids"), inputs.get("attention_mask"), layout, checks
                )
            error = None
        except SeqParError as reason:
            error = reason
        like |= {"backward": backward, "autocast": _autocast_dtype(tokens)}
        like["checkpointed layers"] = sum(map(is_checkpointed, () if model is None else patch_of(model).layers))
        if not self.compared and model is not None:
            # accelerate applies autocast inside the forward, after ranks have compared
            precision = AcceleratorState().mixed_precision if is_initialized() else "no"
            noise = ", ".join(f"{count} of {number}" for number, count in noise_numbers(model).items())
            own = sorted(self.inputs.keys() - TABLE.keys())
            declared = ", ".join(f"{name} as {self.inputs[name].kind}" for name in own)
            models = {"noise": noise, "inputs": declared, **fingerprint(model), "mixed_precision": precision}
            checker.check_now("models", models, error=error, call=FORWARD, advice=mismatch_hints.of_models)
            self.compared = True
        name, advice = "whole batch", _advice_of(self.sp)
        if batch is None:
            name, advice = "model inputs", mismatch_hints.of_models
        value = {**(batch.fields if batch else {}), **like}
        checker.check_deferred(name, value, error=error, call=FORWARD, advice=advice, like=like)
        checks.post(checker)
        if backward and model is not None and self.sp.size > 1:
            self._compare_weights(model)

    def agree_on_step(self, inputs: Mapping[str, Any], batch: ValueChecks) -> None:
        """Agree on a decode step.

        Args:
            inputs: The forward's arguments by name.
            batch: See `agree`.
        """
        name, like = "tokens of a decode step", {"shape": tuple(tokens_of(inputs).shape)}
        self.sp.checker.check_deferred(name, {**batch.fields, **like}, call=FORWARD, advice=_advice_of_step, like=like)
        batch.post(self.sp.checker)

    def _replaced(self, model: PreTrainedModel | None) -> str:
        """Return an error message if a patched module was replaced after patching, otherwise ""."""
        for name in self.patched if model is not None else ():
            module = functools.reduce(lambda outer, child: getattr(outer, child, None), name.split("."), base_of(model))
            # other code may have wrapped the module
            if module is not None and not any(map(patch_on, module.modules())):
                return (
                    f"a patched model must keep its attention and its layers with a state; got another {name} since, "
                    "call unpatch_attention(model), then patch it again"
                )
        return ""

    def _compare_weights(self, model: nn.Module) -> None:
        """Compare weights between ranks in some training forwards. The results are checked in the next forward."""
        self.trained += 1
        if not compares_weights(self.trained) or not (sizes := trained_weights(model)):
            return
        names = list(sizes)

        def fields(values: Tensor) -> dict[str, object]:
            pairs = zip(names, values.tolist(), strict=True)
            return {f"{mismatch_hints.WEIGHT}{name}": float(f"{x:.6g}") for name, x in pairs}

        self.sp.checker.check_values(torch.stack([*sizes.values()]), fields)


def compare_batch(sp: SequenceParallel, batch: ValueChecks | None, error: SeqParError | None = None) -> None:
    """Compare a whole batch that the base model will shard, or raise this rank's error on all ranks."""
    fields = None if batch is None else batch.fields
    sp.checker.check_deferred("whole batch", fields, error=error, call=FORWARD, advice=_advice_of(sp), like=())
    if batch is not None:
        batch.post(sp.checker)


def _advice_of(sp: SequenceParallel) -> Advice:
    """Return the function that returns advice on whole batches, without keeping a reference to `sp`."""
    return functools.partial(_advice, sp.calls.count > 0)


def _advice(began: bool, fields_by_rank: Mapping[int, Fields]) -> str | None:
    """Return the likely reason why ranks have different batches or models, and how to fix the difference."""
    if not (reason := mismatch_hints.of_batches(fields_by_rank, began)):
        return mismatch_hints.of_models(fields_by_rank)
    return (
        f"{reason}; parts of one sequence need all that sp.shard_batches returns for them, batches of each rank's own "
        "hf_integration.whole_sequences(model)"
    )


def _advice_of_step(fields_by_rank: Mapping[int, Fields]) -> str | None:
    return (
        "they chose other tokens, or go on with other caches: seed them alike, let all of them stop by the same "
        "criteria, or let each go on alone in hf_integration.whole_sequences(model)"
    )


def agree_in_graph(agreement: Agreement, inputs: Mapping[str, Any], backward: bool) -> Tensor | None:
    """Agree on a sharded forward in a compiled graph.

    Returns:
        The position_ids that the forward must use from then on.
    """
    tokens, positions = tokens_of(inputs), inputs.get("position_ids")
    if wrong_inputs(inputs) or positions is None:
        torch.compiler.disable(agreement.agree)(inputs, "", backward, True)
        return positions
    return _agree_on_shard(tokens, positions, inputs.get("attention_mask"), agreement.handle, _misuse(inputs), backward)


def _autocast_dtype(tokens: Tensor | None) -> torch.dtype | None:
    """Return the autocast dtype on the tokens' device, or None if autocast is disabled."""
    device_type = "cpu" if tokens is None else tokens.device.type
    enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def tokens_of(inputs: Mapping[str, Any]) -> Any:
    """Return input_ids or inputs_embeds, whichever was passed."""
    return inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")


def wrong_inputs(inputs: Mapping[str, Any]) -> str:
    """Return an error message for wrong arguments of a base model's local or sharded forward.

    Args:
        inputs: The forward's arguments by name.

    Returns:
        A sentence, or "" if the arguments are correct.
    """
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return f"a patched model needs input_ids or inputs_embeds; got {'neither' if ids is None else 'both'}, {HOW}"
    tokens = tokens_of(inputs)
    fits = isinstance(tokens, Tensor) and tokens.dim() == (3 if ids is None else 2) and tokens.shape[0] > 0
    if not fits or (ids is not None and ids.dtype not in (torch.int64, torch.int32)):
        needed = "input_ids (rows, tokens) of int64" if ids is not None else "inputs_embeds (rows, tokens, hidden_size)"
        return f"a patched model needs {needed}, a tensor with at least one row; got {describe(tokens)}, {HOW}"
    for name in ("position_ids", "attention_mask"):
        if isinstance(x := inputs.get(name), Sequence) or (hasattr(x, "__array__") and not isinstance(x, Tensor)):
            return f"a patched model needs {name} as a tensor; got {type(x).__name__}, {HOW}"
    return ""


@torch.library.custom_op("ds_seqpar::agree_on_shard", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def _agree_on_shard(
    tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool
) -> Tensor:
    tokens_by_name = {"input_ids" if tokens.dim() == 2 else "inputs_embeds": tokens}
    inputs = {**tokens_by_name, "position_ids": positions, "attention_mask": mask}
    object_of(handle).agree(inputs, wrong, backward, True)
    return positions.clone()  # the model's forward needs the result, so the compiler cannot drop the agreement


@_agree_on_shard.register_fake
def _(tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool) -> Tensor:
    return positions.clone()


def common_misuse(inputs: Mapping[str, Any]) -> str:
    """Return an error message for arguments that no forward on shards supports, or "" if there are none."""
    if has_cache(inputs):
        return "training, and evaluation on shards, take no kv cache; got one, leave out use_cache and past_key_values"
    if refused := refusal(TABLE, inputs):
        return refused
    if inputs.get("is_causal") is False:
        return "sharded attention of this model is causal; got is_causal=False, leave it out"
    return ""


UNSHIFTED = f"a batch with a placement looks sharded: it needs shift_labels; got no shift_labels, {HOW}"
WHOLE_ONLY = "a {} needs whole batches, of which its head sees whole outputs; got a sharded one, give it the whole"


def _misuse(inputs: Mapping[str, Any]) -> str:
    """Return an error message for a sharded batch with wrong names or shapes, or "" if the batch is correct."""
    if wrong := common_misuse(inputs):
        return wrong
    labels, tokens = inputs.get("shift_labels"), tokens_of(inputs)
    if labels is not None and not inputs.get("logits_to_keep") and shape_of(labels) != str(tuple(tokens.shape[:2])):
        return f"shift_labels must be one for each token, {tuple(tokens.shape[:2])}; got {shape_of(labels)}, {HOW}"
    return ""

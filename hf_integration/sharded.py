"""Before a sharded forward its ranks agree that each was given its own tokens, with their global positions and no mask.

Under torch.compile the same is an op in the graph, so that a compiled model asks its peers in every forward too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.errors import InputError
from ds_seqpar.running.agreement import agree
from ds_seqpar.handles import handle_of, of_handle

from .fingerprint import fingerprint

HOW = "give the model what sp.shard_batches returns"


class Agreement:
    """Of a patched model: in its first sharded forward the ranks of a sequence compare their models too."""

    def __init__(self, sp: SequenceParallel, model: PreTrainedModel) -> None:
        self.sp, self.model, self.compared = sp, weakref.ref(model), False
        self.handle = handle_of(self)

    def __deepcopy__(self, memo: dict) -> Agreement:
        """A copied model has been compared with its first one, or is with it."""
        return self

    def ask(self, tokens: Tensor | None, positions: Tensor | None, mask: Tensor | None, wrong: str, back: bool) -> None:
        """Raises InputError or DisagreementError on all ranks that share the sequence, before any of them sends."""
        error = InputError(wrong) if wrong else shard_error(self.sp, tokens, positions, mask)
        value = {"shape": None if tokens is None else tuple(tokens.shape), "backward": back}
        model = None if self.compared else self.model()
        value |= fingerprint(model) if model is not None else {}
        agree(self.sp.groups.control, "model inputs", value, error=error)
        self.compared = True


def agree_on_shard(agreement: Agreement, given: Mapping[str, Any], unshifted: bool, backward: bool) -> Tensor | None:
    """The position_ids to go on with. given: a base model's arguments, by name."""
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    positions, mask, wrong = given.get("position_ids"), given.get("attention_mask"), _misuse(given, unshifted)
    if torch.compiler.is_compiling() and isinstance(tokens, Tensor) and isinstance(positions, Tensor):
        return _agree_on_shard(tokens, positions, mask, agreement.handle, wrong, backward)
    ask = torch.compiler.disable(agreement.ask) if torch.compiler.is_compiling() else agreement.ask
    ask(tokens, positions, mask, wrong, backward)
    return positions


@torch.library.custom_op("ds_seqpar::agree_on_shard", mutates_args=())
def _agree_on_shard(
    tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool
) -> Tensor:
    of_handle(handle).ask(tokens, positions, mask, wrong, backward)
    return positions.clone()  # the model's forward hangs on it, so that no compiler leaves the question out


@_agree_on_shard.register_fake
def _(tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool) -> Tensor:
    return positions.clone()


def _misuse(given: Mapping[str, Any], unshifted: bool) -> str:
    """What is wrong whatever the tensors hold, as a sentence."""
    if unshifted:
        return f"labels must be shifted before sharding; got no shift_labels, {HOW}"
    if given.get("past_key_values") is not None or given.get("use_cache"):
        return "training and evaluation take no kv cache; got one, leave out use_cache and past_key_values"
    if given.get("is_causal") is False:
        return "sharded attention of this model is causal; got is_causal=False, leave it out"
    return ""


def shard_error(
    sp: SequenceParallel, tokens: Tensor | None, positions: Tensor | None, mask: Tensor | None
) -> InputError | None:
    """What shows that this rank was not given its own tokens, positions and no mask."""
    if tokens is None:
        return InputError(f"a patched model needs input_ids or inputs_embeds; got neither, {HOW}")
    if mask is not None and not bool((mask != 0).all()):
        return InputError(
            f"a sharded forward takes no padding mask; got one with zeros, {HOW} (it checks and drops it)"
        )
    try:
        expected = sp.position_ids(tokens.shape[1] * sp.size)
    except InputError as error:
        return error
    given_here = None if positions is None else positions.cpu().expand(tokens.shape[0], -1)
    if given_here is None or not torch.equal(given_here, expected.expand(tokens.shape[0], -1)):
        what = "none" if positions is None else "those of other tokens"
        return InputError(
            f"a patched model needs this rank's tokens with their global position_ids; got {what}, {HOW}, or run it "
            "on whole sequences: with hf_integration.whole_sequences(model)"
        )
    return None

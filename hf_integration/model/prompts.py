"""Compute per-token numbers for rows that share a prompt, running each shared prompt through the model only once.

The rows become one row of documents, in which a prompt is the parent of its continuations. Outputs are copied back into
the original rows, so the caller sees no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import SECTION, ConfigError
from ds_seqpar.base.log import log_once
from ds_seqpar.data.batches import checked_mask
from ds_seqpar.data.checks import labels_of
from ds_seqpar.data.shared_prompts import SharedPrompts, shared_prompts

from ..look.facts import Facts, masks
from ..noise import noise_numbers

LEAST = 0.1  # the minimum fraction of tokens that "auto" must save
TENSORS = {"input_ids", "attention_mask", "labels", "num_items_in_batch"}


def wants_token_numbers(inputs: Mapping[str, Any]) -> bool:
    """Return whether a call requests per-token numbers for its labels, like the calls of trl's trainers."""
    return bool(inputs.get("fused_lm_head")) and inputs.get("labels") is not None


def may_share(sp: SequenceParallel, model: Any, facts: Facts, inputs: Mapping[str, Any]) -> bool:
    """Return whether the settings and a call's arguments allow the call's rows to share prompts."""
    setting = sp.config.shared_prompts
    if setting is False or not wants_token_numbers(inputs):
        return False
    return setting is True or not _refusal(model, facts, inputs)


def unshared(sp: SequenceParallel, model: Any, inputs: Mapping[str, Any]) -> ConfigError | None:
    """Return an error if prompts must be shared but the call's head gets whole outputs, otherwise None."""
    if sp.config.shared_prompts is not True or not wants_token_numbers(inputs):
        return None
    return ConfigError(
        f"{SECTION}.shared_prompts true needs a causal language model, and rows without images; got a "
        f'{type(model).__name__}, around whose stack rows are whole, leave the setting out, or say "auto"'
    )


def prompts_of_call(
    sp: SequenceParallel, model: Any, facts: Facts, inputs: Mapping[str, Any], on_cpu: Mapping[str, Tensor]
) -> SharedPrompts | None:
    """Find the prompts that a call's rows share.

    Args:
        sp: The SequenceParallel of the model.
        model: The patched model.
        facts: The model's facts.
        inputs: The call's arguments by name, with a whole batch.
        on_cpu: CPU copies of tensors that are on a device, by name.

    Returns:
        The prompts, or None to compute the rows unchanged.

    Raises:
        ConfigError: The settings require sharing prompts, which is impossible for the call.
        InputError: The mask is not a padding mask, or the labels are not token ids.
    """
    if not may_share(sp, model, facts, inputs):
        return None
    setting = sp.config.shared_prompts
    if refusal := _refusal(model, facts, inputs):
        if setting is True:
            raise ConfigError(f'{SECTION}.shared_prompts true needs {refusal}, leave the setting out, or say "auto"')
        return None
    if labels_of(inputs).shape != inputs["input_ids"].shape:
        return None  # sharding will report the mismatch
    known = {**inputs, **on_cpu}
    mask = checked_mask(known.get("attention_mask"), inputs["input_ids"].shape)
    least = 0.0 if setting is True else LEAST
    prompts = shared_prompts(
        known["input_ids"].cpu(), mask, known["labels"].cpu(), least, keep_all=_balances(model, inputs)
    )
    if prompts is None:
        return None
    log_once("sequence_parallel: prompts that rows of a batch share are computed once (shared_prompts)")
    return prompts.to(inputs["input_ids"].device)


def _balances(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether a call's loss includes an expert balance term over all tokens."""
    asked = inputs.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked)


def _refusal(model: Any, facts: Facts, inputs: Mapping[str, Any]) -> str:
    """Return "NEEDED; got GIVEN" if a call's rows cannot share prompts, otherwise ""."""
    if facts.mixers or facts.gathered:
        return "a model without layers that have a state or gather keys; got one with some"
    columns = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    if narrow := [length for _, length in masks(model, facts) if length is not None and length < columns]:
        return f"windows and chunks of {columns} tokens or more, as rows have; got one of {narrow[0]}"
    if model.training and noise_numbers(model):
        return "a forward without dropout, whose noise differs between rows; got one that drops"
    if _balances(model, inputs) and not facts.balance:
        return "a model whose balance of experts counts a token as often as rows have it; got output_router_logits"
    others = [name for name, x in inputs.items() if isinstance(x, Tensor) and name not in TENSORS]
    others += [name for name in ("output_hidden_states", "output_attentions", "logits_to_keep") if inputs.get(name)]
    return f"a call with input_ids, attention_mask and labels alone; got {others[0]}" if others else ""

"""Compute `sp.log_probs`, the log-probability of each label, from a patched model without materializing whole logits.

The model is called through all its wrappers, just as for logits. When the base model returns the last hidden state, the
head computes per-token numbers in tiles, and the rest of the forward continues with zero tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError, as_seqpar_error
from ds_seqpar.core.runtime.operator import describe
from ds_seqpar.data.batches import counted_labels
from ds_seqpar.data.checks import IGNORE
from ds_seqpar.whole import plain

from ..families import base_of, is_causal_lm, patch_of, unwrapped, vocabulary
from ..memory.tiled_function import GradientSums, tiled_by_token
from ..memory.tiled_loss import Instead, class_forward, loss_tiles, through, without_tokens
from .agreement import compare_batch
from .forward import Patch

TEMPERATURE, ENTROPY = "log_probs_temperature", "log_probs_entropy"  # arguments that ranks compare
# all arguments that are removed before the model's own forward
TAKEN = {TEMPERATURE, ENTROPY, "fused_lm_head", "labels", "shift_labels", "num_items_in_batch"}


@dataclasses.dataclass
class TokenNumbers(ModelOutput):
    """Numbers (rows, tokens) for the token that each position predicts, or 0 if the predicted token has no label."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def log_probs(
    sp: SequenceParallel, model: nn.Module, input_ids: Tensor, *, attention_mask: Tensor | None = None,
    labels: Tensor | None = None, temperature: float = 1.0, return_entropy: bool = False, **inputs: Any,
) -> Any:  # fmt: skip
    """See `SequenceParallel.log_probs`."""
    patch = None
    try:
        inner, patch = _patched(sp, model)
        if isinstance(input_ids, Tensor) and not input_ids.numel():
            raise InputError(f"log_probs needs a row of tokens; got {describe(input_ids)}")
        if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise InputError(f"log_probs needs a temperature above 0; got {temperature!r:.80}, leave it out for 1")
        if labels is None:
            labels = _labels_of(input_ids, attention_mask)
        if sharded := {"shift_labels", "placement"} & inputs.keys():
            raise InputError(f"log_probs needs whole rows; got {min(sharded)} of a shard, give it the rows before that")
    except Exception as reason:
        if sp.size > 1 and not (patch and patch.whole):  # other ranks compare the call's batch
            compare_batch(sp, None, as_seqpar_error("asking for log-probabilities failed", reason))
        raise
    inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "use_cache": False}
    inputs |= {"fused_lm_head": True, TEMPERATURE: float(temperature), ENTROPY: bool(return_entropy)}
    if getattr(inner.config.get_text_config(decoder=True), "output_router_logits", False):
        inputs["output_router_logits"] = False  # router logits would only be used for an unrequested balance loss
    call = _Call(sp, inner, temperature, return_entropy)
    hooks = [base_of(inner).register_forward_hook(call.after_base)]
    for head in patch.heads:  # peft may call the inner model without running its hooks
        hooks.append(head.register_forward_pre_hook(call.before, with_kwargs=True))
        hooks.append(head.register_forward_hook(call.after, prepend=True))
    try:
        output = model(**inputs)
    finally:
        vars(inner).pop("lm_head", None)
        for hook in hooks:
            hook.remove()
    numbers = [plain(x)[:, :-1] for x in output.values()]
    return tuple(numbers) if return_entropy else numbers[0]


def _patched(sp: SequenceParallel, model: nn.Module) -> tuple[Any, Patch]:
    """Return (the inner transformers model, its patch).

    Raises ConfigError if the inner model does not compute logits itself.
    """
    inner = unwrapped(model)
    patch = patch_of(inner)
    if patch is None or patch.sp is not sp:
        raise ConfigError(
            f"log_probs needs a model that is patched with this SequenceParallel; got a {type(inner).__name__} that is "
            "not, call sp = share_sequences(model, ...), or model.patch_attention(sp)"
        )
    if patch.above or not is_causal_lm(inner) or not isinstance(getattr(inner, "lm_head", None), nn.Module):
        raise ConfigError(
            "log_probs needs a causal language model with the forward of transformers and an lm_head; got a "
            f"{type(inner).__name__}, compute them from the whole logits that it returns (docs/own_loop.md)"
        )
    return inner, patch


def _labels_of(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return labels for all real tokens that directly follow a real token."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise InputError(f"log_probs needs input_ids (rows, tokens); got {describe(input_ids)}, give such")
    labels = input_ids.long()
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return labels  # the model's call will report a wrong mask
    real = mask.bool().to(labels.device)
    return labels.masked_fill(~(real & nn.functional.pad(real[:, :-1], (1, 0))), IGNORE)


class _Call:
    """One call of a model, with the hooks that replace logits with per-token numbers."""

    shift_labels: Tensor
    numbers: TokenNumbers | None = None

    def __init__(self, sp: SequenceParallel, model: Any, temperature: float, entropy: bool) -> None:
        self.sp, self.model, self.temperature, self.entropy = sp, model, temperature, entropy

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Remove the request's arguments from the call, after the hook that shards the batch."""
        if TEMPERATURE in kwargs:
            shifted = kwargs.get("shift_labels")
            if shifted is None:  # the forward is local
                given = {name: x for name, x in kwargs.items() if x is not None}
                shifted = counted_labels(self.sp.sharding, given).roll(-1, 1)
            self.shift_labels = shifted
        return args, {name: x for name, x in kwargs.items() if name not in TAKEN}

    def after_base(self, module: nn.Module, args: tuple, output: Any) -> Any:
        def of_tiles(head: Any, x: Tensor, sums: GradientSums) -> Tensor:
            return tiled_by_token(lambda tile, cut: self.of_tile(type(output), head, tile, cut), x, sums, tiles)

        head, tiles = self.model.lm_head, loss_tiles(self.model, output.last_hidden_state)
        numbers = through(head, of_tiles, output.last_hidden_state)
        self.numbers = TokenNumbers(*numbers.unbind(-1))
        # the rest of the forward must not call the head again, since ZeRO-3 would fetch its weight
        classes = vocabulary(self.model)[1]
        vars(self.model)["lm_head"] = Instead(head, lambda x: x.new_empty(*x.shape[:-1], classes))
        return without_tokens(output, [])

    def of_tile(self, output_type: type, head: Any, tile: Tensor, cut: slice) -> Tensor:
        """Return (rows, tokens, numbers) for a tile of the last hidden state."""
        labels = self.shift_labels[:, cut].to(tile.device)
        logits = class_forward(
            self.model, lambda *args, **kwargs: output_type(last_hidden_state=tile), head, {"input_ids": labels}
        ).logits
        likely = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature).log_softmax(-1)
        numbers = [likely.gather(-1, labels.clamp(min=0)[..., None])]
        if self.entropy:
            numbers.append(-(likely.exp() * likely).sum(-1, keepdim=True))
        return torch.cat(numbers, -1).masked_fill((labels == IGNORE)[..., None], 0)

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return self.numbers

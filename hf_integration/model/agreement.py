"""Agreement of ranks, before a sharded forward, that each was given its own tokens, with global positions and no mask.

Under torch.compile the agreement is an op in the graph, so a compiled model compares its ranks in every forward too.

To read a tensor on a device, the host must wait until the device has done all its work. So positions and masks on a
device are read in a model's first forward only. Later ones pass unread if `shard_batches` made them. Others are
compared on the device, and the next forward raises what was wrong.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.compiler.sharding import shards
from ds_seqpar.compiler.sharding.handles import handle_of, object_of
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.data.batches import whole_error
from ds_seqpar.errors import ConfigError, InputError, SeqParError
from ds_seqpar.runtime import mismatch_hints
from ds_seqpar.runtime.agreement import assert_ranks_agree
from ds_seqpar.runtime.input_checks import describe, shape_of

from .. import dropout
from .checkpointing import is_checkpointed, layers_of
from .weights import compares_weights, fingerprint, trained_weights

COMPILED = (
    "dropout and NEFTune of a shared sequence need a model that is not compiled; got a compiled one, compile its "
    "layers instead, or set dropout to 0"
)
# what error messages call a sharded forward
FORWARD = (
    "a forward of a model that shares sequences (one rank alone makes it in hf_integration.whole_sequences(model))"
)
HOW = "give the model what sp.shard_batches returns, its placement included, or a whole batch"


class Agreement:
    """The agreement of a sequence's ranks on each sharded forward of a patched model.

    In the first forward they compare their models too, and in some later ones the weights that are trained.
    """

    # while the model's loss is still to be checked in a whole call, the name of what takes check_loss=False ("" where
    # nothing does); None: it was checked, or need not be
    loss_option_of: str | None = ""

    def __init__(self, sp: SequenceParallel, model: PreTrainedModel) -> None:
        self.sp, self.model, self.compared, self.device_checks = sp, weakref.ref(model), False, DeviceChecks()
        self.trained = 0  # forwards that a backward may follow
        self.weights: tuple[list[str], Tensor] | None = None  # from one of these forwards, for the next one to compare
        self.layers: list[weakref.ref] | None = None
        self.handle = handle_of(self)

    def __deepcopy__(self, memo: dict) -> Agreement:
        """Return the agreement of a copied model, which counts as compared if the model was."""
        model: Any = self.model()
        if model is None:
            return self
        copied = Agreement(self.sp, memo.get(id(model), model))
        copied.compared, copied.loss_option_of = self.compared, self.loss_option_of
        return copied

    def agree(
        self,
        tokens: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | None,
        wrong: str,
        backward: bool,
        placement: BatchLayout | None = None,
        sources: list[Any] | None = None,
    ) -> int:
        """Agree on one forward, before any rank of the sequence sends.

        Args:
            tokens: input_ids or inputs_embeds of this rank; None where they are of a wrong type.
            positions: This rank's position_ids.
            mask: This rank's attention_mask.
            wrong: What is wrong on this rank, as a sentence; "" for nothing.
            backward: Whether a backward will follow.
            placement: The batch's layout; None: sequences are shared equally.
            sources: Modules that draw noise by token; None: the forward is compiled.

        Returns:
            The seed of the forward's noise, from the sequence's first rank; 0: there is no noise.

        Raises:
            InputError, ConfigError, DisagreementError: On all ranks that share the sequence.
        """
        device_checks, model = self.device_checks if self.compared else None, self.model()
        if self.layers is None:  # not in __init__: a model that is being copied has no layers yet
            self.layers = [] if model is None else [weakref.ref(layer) for layer in layers_of(model)]
        error: SeqParError | None = InputError(wrong) if wrong else self.device_checks.error()
        seed = 0
        try:
            if sources is None and backward and model is not None and dropout.noisy_modules(model):
                raise ConfigError(COMPILED)
            seed = dropout.prepare_and_seed(sources or [], shared=True)
        except ConfigError as reason:
            error = error or reason
        if error is None and tokens is not None:
            error = shard_error(self.sp, tokens, positions, mask, device_checks, placement)
        value: dict[str, object] = {"shape": None if tokens is None else tuple(tokens.shape), "backward": backward}
        if placement is not None and error is None:
            value = {"placement": str(placement), "backward": backward}
        value["autocast"] = _autocast_dtype(tokens)
        value["checkpointed layers"] = sum(is_checkpointed(layer()) for layer in self.layers)
        value["dropout"] = dropout.describe_modules(sources or [])
        value |= fingerprint(model) if model is not None and not self.compared else {}
        if backward and model is not None and self.sp.size > 1:
            value |= self._compared_weights(model)
        number = seed if self.sp.rank == 0 else 0
        agreed_seed = assert_ranks_agree(
            self.sp.groups.control,
            "model inputs",
            value,
            error=error,
            number=number,
            call=FORWARD,
            advice=mismatch_hints.of_models,
        )
        self.compared = True
        return agreed_seed

    def _compared_weights(self, model: nn.Module) -> dict[str, float]:
        """Return what ranks compare of the weights of some training forwards, each in the next forward.

        By then the values are on the CPU, so the host does not wait.
        """
        names, values = self.weights or ([], torch.empty(0))
        self.weights, self.trained = None, self.trained + 1
        if compares_weights(self.trained) and (sizes := trained_weights(model)):
            self.weights = list(sizes), self.device_checks.copied(torch.stack([*sizes.values()]))
        return {
            f"{mismatch_hints.WEIGHT}{name}": float(f"{x:.6g}") for name, x in zip(names, values.tolist(), strict=True)
        }


def agree_on_shard(
    agreement: Agreement, inputs: Mapping[str, Any], wrong_shard: str, backward: bool, sources: list[Any]
) -> tuple[Tensor | None, int]:
    """Agree on a base model's forward.

    Args:
        inputs: The forward's arguments by name.
        wrong_shard: Why a module around the base model cannot take them, as a sentence; "" where it can.
        sources: Modules that draw noise by token.

    Returns:
        (the position_ids, the seed of noise) for the forward to continue with.
    """
    positions, mask, placement = inputs.get("position_ids"), inputs.get("attention_mask"), inputs.get("placement")
    if wrong := wrong_inputs(inputs):
        tokens = positions = mask = None  # they may be of any type
    else:
        tokens, wrong = tokens_of(inputs), _origin_error(agreement, inputs) or wrong_shard or _misuse(inputs)
    if torch.compiler.is_compiling() and placement is None and tokens is not None and positions is not None:
        return _agree_on_shard(tokens, positions, mask, agreement.handle, wrong, backward), 0
    if torch.compiler.is_compiling():
        torch.compiler.disable(agreement.agree)(tokens, positions, mask, wrong, backward, placement)
        return positions, 0
    return positions, agreement.agree(tokens, positions, mask, wrong, backward, placement, sources)


def _autocast_dtype(tokens: Tensor | None) -> torch.dtype | None:
    """Return the dtype of autocast on the tokens' device; None where it is off."""
    device_type = "cpu" if tokens is None else tokens.device.type
    enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def tokens_of(inputs: Mapping[str, Any]) -> Any:
    """Return input_ids or inputs_embeds, whichever was given."""
    return inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")


def wrong_inputs(inputs: Mapping[str, Any]) -> str:
    """Return what is wrong with arguments that no forward of a base model can take, local or sharded.

    Args:
        inputs: The forward's arguments by name.

    Returns:
        A sentence; "" where the arguments are right.
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


@torch.library.custom_op("ds_seqpar::agree_on_shard", mutates_args=())
def _agree_on_shard(
    tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool
) -> Tensor:
    object_of(handle).agree(tokens, positions, mask, wrong, backward)
    return positions.clone()  # the model's forward needs the result, so that no compiler drops the agreement


@_agree_on_shard.register_fake
def _(tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool) -> Tensor:
    return positions.clone()


def common_misuse(inputs: Mapping[str, Any]) -> str:
    """Return the sentence for arguments that only a local forward can take; "" where there are none."""
    if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
        return "training and evaluation take no kv cache; got one, leave out use_cache and past_key_values"
    if inputs.get("is_causal") is False:
        return "sharded attention of this model is causal; got is_causal=False, leave it out"
    return ""


@functools.cache
def warn_of_cache(rank: int) -> None:
    """Warn once in a process, on the first rank of a sequence."""
    if rank == 0:
        warnings.warn(
            "a forward with use_cache=True and without labels is taken for the beginning of generation: every rank "
            "computes whole sequences by itself; leave use_cache out, and ranks share them",
            stacklevel=2,
        )


UNSHIFTED = f"a batch with this rank's position_ids looks sharded: it needs shift_labels; got no shift_labels, {HOW}"
WHOLE_ONLY = "a {} needs whole batches, of which its head sees whole outputs; got a sharded one, give it the whole"


def _origin_error(agreement: Agreement, inputs: Mapping[str, Any]) -> str:
    """Return the sentence for position_ids that are neither a whole batch's nor this rank's.

    "" where they are right, where another argument says which they should be, or where the host would have to wait for
    them.
    """
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("shift_labels") is not None or inputs.get("placement") is not None:
        return ""
    if torch.compiler.is_compiling():
        return ""
    if positions.device.type != "cpu" and agreement.compared:
        return ""
    tokens = tokens_of(inputs)
    error = shard_error(agreement.sp, tokens, positions) and whole_error(inputs, *tokens.shape[:2])
    return f"{error} (or give the part of a batch, with all that sp.shard_batches returns for it)" if error else ""


def _misuse(inputs: Mapping[str, Any]) -> str:
    """Return the sentence for a sharded batch that is wrong whatever values its tensors have; "" where it is right."""
    if wrong := common_misuse(inputs):
        return wrong
    labels, tokens = inputs.get("shift_labels"), tokens_of(inputs)
    if labels is not None and not inputs.get("logits_to_keep") and shape_of(labels) != str(tuple(tokens.shape[:2])):
        return f"shift_labels must be one for each token, {tuple(tokens.shape[:2])}; got {shape_of(labels)}, {HOW}"
    return ""


def shard_error(
    sp: SequenceParallel,
    tokens: Tensor,
    positions: Tensor | None,
    mask: Tensor | None = None,
    device_checks: DeviceChecks | None = None,
    placement: BatchLayout | None = None,
) -> InputError | None:
    """Return the error for a rank that was not given its own tokens, its own positions and no mask.

    Args:
        device_checks: Takes the checks of tensors on a device; None: the host waits for them.
        placement: The batch's layout; None: sequences are shared equally.

    Returns:
        The error; None where all is right.
    """
    error = _placement_error(sp, tokens, placement) if placement is not None else _equal_shards_error(sp, tokens)
    if error is not None:
        return error
    if positions is None or not _are_for(positions, tokens):
        return InputError(_wrong_positions(placement, "none" if positions is None else "those of other tokens"))
    layout = tokens.shape[1] * sp.size if placement is None else placement
    if device_checks is not None and positions.device.type != "cpu":
        device_checks.start(sp, layout, positions, mask)
        return None
    if mask is not None and not sp.keeps_masks and not bool((mask == 1).all()):
        return InputError(WRONG_MASK)
    wrong = bool((positions.cpu() != _expected(sp, layout)).any())
    return InputError(_wrong_positions(layout)) if wrong else None


def _expected(sp: SequenceParallel, layout: int | BatchLayout) -> Tensor:
    """Return the position_ids of this rank.

    Args:
        layout: The tokens of a sequence that is shared equally, or else a BatchLayout.
    """
    if isinstance(layout, BatchLayout):
        return layout.position_ids(sp.config.ulysses, sp.rank)
    return sp.position_ids(layout)


def _equal_shards_error(sp: SequenceParallel, tokens: Tensor) -> InputError | None:
    if tokens.shape[1] and tokens.shape[1] * sp.size % sp.multiple == 0:
        return None
    return InputError(
        f"a patched model needs {sp.multiple // sp.size} tokens on each rank, or a multiple of it, or a placement; got "
        f"{tokens.shape[1]} tokens and none, {HOW}"
    )


def _placement_error(sp: SequenceParallel, tokens: Tensor, placement: object) -> InputError | None:
    if not isinstance(placement, BatchLayout):
        return InputError(f"placement must be a BatchLayout, or None; got {type(placement).__name__}, {HOW}")
    cp_size = sp.size // sp.config.ulysses
    if placement.shards.size != cp_size:
        return InputError(f"a placement must be of the {cp_size} CP ranks; got {placement.shards.size}, {HOW}")
    if min(shards.tokens_of(placement.shards, "q", rank) for rank in range(cp_size)) < sp.config.ulysses:
        return InputError(
            f"a patched model needs a token for each of its {sp.size} ranks; got {placement.tokens} tokens, of which "
            "some ranks would have none, give it longer sequences, or fewer ranks a sequence"
        )
    local_tokens = len(placement.positions(sp.config.ulysses, sp.rank))
    if tokens.shape[1] == local_tokens and (placement.rows is None or tokens.shape[0] == 1):
        return None
    got = tuple(tokens.shape[:2])
    return InputError(
        f"a patched model needs the {local_tokens} tokens that the placement gives this rank; got {got}, {HOW}"
    )


WRONG_MASK = (
    f"a sharded forward takes no padding mask; got one with zeros or other numbers, {HOW} (it checks and drops it)"
)


def _wrong_positions(layout: int | BatchLayout | None, got: str = "those of other tokens") -> str:
    if isinstance(layout, BatchLayout):
        return (
            f"a patched model needs the position_ids of the tokens that its placement gives this rank; got {got}, {HOW}"
        )
    return (
        "a batch with shift_labels, or with this rank's position_ids, looks sharded: a patched model needs this rank's "
        f"tokens with their global position_ids; got {got}, {HOW}"
    )


def whose_positions(sp: SequenceParallel, inputs: Mapping[str, Any]) -> tuple[bool, bool]:
    """Check position_ids of unknown origin against both kinds of batch.

    Returns:
        (whether they fit this rank's shard of equally shared sequences, whether they fit whole sequences).
    """
    tokens, positions = tokens_of(inputs), inputs["position_ids"]
    fits_shard = shard_error(sp, tokens, positions) is None
    return fits_shard, whole_error(inputs, *tokens.shape[:2]) is None


def _are_for(positions: Tensor, tokens: Tensor) -> bool:
    """Return whether the positions have a shape that fits the tokens."""
    batch, seq = tokens.shape[:2]
    return positions.dim() > 0 and positions.shape in ((seq,), (1, seq), (batch, seq))


class DeviceChecks:
    """Checks of tensors on a device, started in one forward and read in the next.

    By then the device has done them, so the host does not wait.
    """

    def __init__(self) -> None:
        self.expected: dict[tuple[int | BatchLayout, torch.device], Tensor] = {}
        self.started: list[tuple[str, Tensor]] = []
        self.arrived: torch.cuda.Event | None = None

    def start(self, sp: SequenceParallel, layout: int | BatchLayout, positions: Tensor, mask: Tensor | None) -> None:
        """Start the checks of positions and mask on their device."""
        wrong = (positions != self._of_device(sp, layout, positions.device)).any()
        self._start(_wrong_positions(layout), wrong)
        if mask is not None and not sp.keeps_masks:
            self._start(WRONG_MASK, (mask != 1).any())

    def error(self) -> InputError | None:
        """Return the error of the checks that were started since the last call; None where all were right."""
        if self.arrived is not None:
            self.arrived.synchronize()
        started, self.started, self.arrived = self.started, [], None
        wrong = [sentence for sentence, is_wrong in started if bool(is_wrong)]
        return InputError(f"{wrong[0]} (in an earlier forward: on a device it is seen one later)") if wrong else None

    def copied(self, x: Tensor) -> Tensor:
        """Copy x to the CPU, to be read after the next `error`."""
        copy = x.to("cpu", non_blocking=True)
        if x.is_cuda and torch.cuda.is_available():
            self.arrived = torch.cuda.current_stream(x.device).record_event()
        return copy

    def _start(self, sentence: str, wrong: Tensor) -> None:
        self.started.append((sentence, self.copied(wrong)))

    def _of_device(self, sp: SequenceParallel, layout: int | BatchLayout, device: torch.device) -> Tensor:
        """Return the expected positions on the device.

        They are cached while the length stays the same: a copy would make the host wait, too.
        """
        if (layout, device) not in self.expected:
            self.expected = {(layout, device): _expected(sp, layout).to(device)}
        return self.expected[layout, device]

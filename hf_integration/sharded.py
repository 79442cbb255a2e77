"""Before a sharded forward its ranks agree that each was given its own tokens, with their global positions and no mask.

Under torch.compile the same is an op in the graph, so that a compiled model asks its peers in every forward too.

To look at a tensor on a device the host must wait for all that the device has still to do. So positions and masks there
are looked at in a model's first forward. Later they pass unseen if `shard_batches` made them. Others are compared on
the device, and what came out is said in the next forward."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel
from ds_seqpar.batches import is_whole
from ds_seqpar.compiler import shards
from ds_seqpar.errors import ConfigError, InputError, SeqParError
from ds_seqpar.handles import handle_of, of_handle
from ds_seqpar.placement import Placement
from ds_seqpar.runtime import causes
from ds_seqpar.runtime.agreement import agree
from ds_seqpar.runtime.inputs import describe, shape_of
from ds_seqpar.runtime.trusted import is_trusted

from . import noise
from .checkpointing import is_checkpointed, layers_of

COMPILED = (
    "dropout and NEFTune of a shared sequence need a model that is not compiled; got a compiled one, compile its "
    "layers instead, or set dropout to 0"
)
HOW = "give the model what sp.shard_batches returns, its placement included, or a whole batch"


class Agreement:
    """Of a patched model: in its first sharded forward the ranks of a sequence compare their models too. loss_of: who
    takes check_loss=False, "" for nobody, while the model's loss must still be looked at in a whole call; then None."""

    loss_of: str | None = ""

    def __init__(self, sp: SequenceParallel, model: PreTrainedModel) -> None:
        self.sp, self.model, self.compared, self.later = sp, weakref.ref(model), False, Later()
        self.layers: list[weakref.ref] | None = None
        self.handle = handle_of(self)

    def __deepcopy__(self, memo: dict) -> Agreement:
        """That of a copied model, which has been compared where the first one has."""
        model: Any = self.model()
        if model is None:
            return self
        copied = Agreement(self.sp, memo.get(id(model), model))
        copied.compared, copied.loss_of = self.compared, self.loss_of
        return copied

    def ask(
        self,
        tokens: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | None,
        wrong: str,
        back: bool,
        placement: Placement | None = None,
        sources: list[Any] | None = None,
    ) -> int:
        """Raises InputError, ConfigError or DisagreementError on all ranks that share the sequence, before any of them
        sends. sources: what draws by token in the forward; None: in one graph. Returns the seed of its noise (0: there
        is none), which is that of the sequence's first rank."""
        later, model = self.later if self.compared else None, self.model()
        if self.layers is None:  # not sooner: a model that is being copied has none yet
            self.layers = [] if model is None else [weakref.ref(layer) for layer in layers_of(model)]
        error: SeqParError | None = InputError(wrong) if wrong else self.later.error()
        seed = 0
        try:
            if sources is None and back and model is not None and noise.sources(model):
                raise ConfigError(COMPILED)
            seed = noise.seed_of(sources or [], shared=True)
        except ConfigError as reason:
            error = error or reason
        if error is None and tokens is not None:
            error = shard_error(self.sp, tokens, positions, mask, later, placement)
        value: dict[str, object] = {"shape": None if tokens is None else tuple(tokens.shape), "backward": back}
        if placement is not None and error is None:
            value = {"placement": str(placement), "backward": back}
        value["checkpointed layers"] = sum(is_checkpointed(layer()) for layer in self.layers)
        value["dropout"] = noise.in_words(sources or [])
        value |= fingerprint(model) if model is not None and not self.compared else {}
        number = seed if self.sp.rank == 0 else 0
        found = agree(
            self.sp.groups.control, "model inputs", value, error=error, number=number, advice=causes.of_models
        )
        self.compared = True
        return found


def agree_on_shard(
    agreement: Agreement, given: Mapping[str, Any], unshifted: bool, backward: bool, sources: list[Any]
) -> tuple[Tensor | None, int]:
    """(the position_ids, the seed of noise) to go on with. given: a base model's arguments, by name."""
    positions, mask, placement = given.get("position_ids"), given.get("attention_mask"), given.get("placement")
    if wrong := wrong_inputs(given):
        tokens = positions = mask = None  # nothing of them may be fit to be looked at
    else:
        tokens, wrong = tokens_of(given), _misuse(given, unshifted)
    if torch.compiler.is_compiling() and placement is None and tokens is not None and positions is not None:
        return _agree_on_shard(tokens, positions, mask, agreement.handle, wrong, backward), 0
    if torch.compiler.is_compiling():
        torch.compiler.disable(agreement.ask)(tokens, positions, mask, wrong, backward, placement)
        return positions, 0
    return positions, agreement.ask(tokens, positions, mask, wrong, backward, placement, sources)


def tokens_of(given: Mapping[str, Any]) -> Any:
    """input_ids or inputs_embeds, whichever was given."""
    return given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")


def wrong_inputs(given: Mapping[str, Any]) -> str:
    """What no forward of a base model can take, local or sharded, as a sentence. given: its arguments, by name."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return f"a patched model needs input_ids or inputs_embeds; got {'neither' if ids is None else 'both'}, {HOW}"
    tokens = tokens_of(given)
    fits = isinstance(tokens, Tensor) and tokens.dim() == (3 if ids is None else 2) and tokens.shape[0] > 0
    if not fits or (ids is not None and ids.dtype not in (torch.int64, torch.int32)):
        needed = "input_ids (rows, tokens) of int64" if ids is not None else "inputs_embeds (rows, tokens, hidden_size)"
        return f"a patched model needs {needed}, a tensor with at least one row; got {describe(tokens)}, {HOW}"
    for name in ("position_ids", "attention_mask"):
        if isinstance(x := given.get(name), Sequence) or (hasattr(x, "__array__") and not isinstance(x, Tensor)):
            return f"a patched model needs {name} as a tensor; got {type(x).__name__}, {HOW}"
    return ""


@torch.library.custom_op("ds_seqpar::agree_on_shard", mutates_args=())
def _agree_on_shard(
    tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool
) -> Tensor:
    of_handle(handle).ask(tokens, positions, mask, wrong, backward)
    return positions.clone()  # the model's forward hangs on it, so that no compiler leaves the question out


@_agree_on_shard.register_fake
def _(tokens: Tensor, positions: Tensor, mask: Tensor | None, handle: int, wrong: str, backward: bool) -> Tensor:
    return positions.clone()


def misused(given: Mapping[str, Any]) -> str:
    """What no forward can take that is not local, as a sentence; "" where there is nothing."""
    if given.get("past_key_values") is not None or given.get("use_cache"):
        return "training and evaluation take no kv cache; got one, leave out use_cache and past_key_values"
    if given.get("is_causal") is False:
        return "sharded attention of this model is causal; got is_causal=False, leave it out"
    return ""


def _misuse(given: Mapping[str, Any], unshifted: bool) -> str:
    """What is wrong whatever the tensors hold, as a sentence."""
    if unshifted:
        return (
            "a batch with this rank's position_ids, or with some that do not count through its tokens from 0, looks "
            f"sharded: it needs shift_labels; got no shift_labels, {HOW}"
        )
    if said := misused(given):
        return said
    labels, tokens = given.get("shift_labels"), tokens_of(given)
    if labels is not None and not given.get("logits_to_keep") and shape_of(labels) != str(tuple(tokens.shape[:2])):
        return f"shift_labels must be one for each token, {tuple(tokens.shape[:2])}; got {shape_of(labels)}, {HOW}"
    return ""


def shard_error(
    sp: SequenceParallel,
    tokens: Tensor,
    positions: Tensor | None,
    mask: Tensor | None = None,
    later: Later | None = None,
    placement: Placement | None = None,
) -> InputError | None:
    """What shows that this rank was not given its own tokens, positions and no mask. later: to whom the look at tensors
    on a device is left."""
    error = _placement_error(sp, tokens, placement) if placement is not None else _share_error(sp, tokens)
    if error is not None:
        return error
    if positions is None or not _are_for(positions, tokens):
        return InputError(_wrong_positions(placement, "none" if positions is None else "those of other tokens"))
    share = tokens.shape[1] * sp.size if placement is None else placement
    if later is not None and positions.device.type != "cpu":
        later.look(sp, share, positions, mask)
        return None
    if mask is not None and not is_trusted(mask, sp) and not bool((mask != 0).all()):
        return InputError(WRONG_MASK)
    wrong = bool((positions.cpu() != _expected(sp, share)).any())
    return InputError(_wrong_positions(share)) if wrong else None


def _expected(sp: SequenceParallel, share: int | Placement) -> Tensor:
    """The position_ids of this rank. share: the tokens of a sequence that is shared equally, or who has which."""
    if isinstance(share, Placement):
        return share.position_ids(sp.config.ulysses, sp.rank)
    return sp.position_ids(share)


def _share_error(sp: SequenceParallel, tokens: Tensor) -> InputError | None:
    if tokens.shape[1] and tokens.shape[1] * sp.size % sp.multiple == 0:
        return None
    return InputError(
        f"a patched model needs {sp.multiple // sp.size} tokens on each rank, or a multiple of it, or a placement; got "
        f"{tokens.shape[1]} tokens and none, {HOW}"
    )


def _placement_error(sp: SequenceParallel, tokens: Tensor, placement: object) -> InputError | None:
    if not isinstance(placement, Placement):
        return InputError(f"placement must be a Placement, or None; got {type(placement).__name__}, {HOW}")
    inner = sp.size // sp.config.ulysses
    if placement.shards.size != inner:
        return InputError(f"a placement must be of the {inner} inner ranks; got {placement.shards.size}, {HOW}")
    if min(shards.tokens_of(placement.shards, "q", rank) for rank in range(inner)) < sp.config.ulysses:
        return InputError(
            f"a patched model needs a token for each of its {sp.size} ranks; got {placement.tokens} tokens, of which "
            "some ranks would have none, give it longer sequences, or fewer ranks a sequence"
        )
    own = len(placement.positions(sp.config.ulysses, sp.rank))
    if tokens.shape[1] == own and (placement.rows is None or tokens.shape[0] == 1):
        return None
    got = tuple(tokens.shape[:2])
    return InputError(f"a patched model needs the {own} tokens that the placement gives this rank; got {got}, {HOW}")


WRONG_MASK = f"a sharded forward takes no padding mask; got one with zeros, {HOW} (it checks and drops it)"


def _wrong_positions(share: int | Placement | None, got: str = "those of other tokens") -> str:
    if isinstance(share, Placement):
        return (
            f"a patched model needs the position_ids of the tokens that its placement gives this rank; got {got}, {HOW}"
        )
    return (
        "a batch with shift_labels, or with position_ids that do not count through its tokens from 0, looks sharded: a "
        f"patched model needs this rank's tokens with their global position_ids; got {got}, {HOW}"
    )


def fits(sp: SequenceParallel, given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a call's position_ids, of which nobody knows who made them, are those of this rank's part of sequences
    that are shared equally; whether they are those of whole ones."""
    tokens, positions = tokens_of(given), given["position_ids"]
    part = shard_error(sp, tokens, positions) is None
    return part, is_whole(given, *tokens.shape[:2])


def _are_for(positions: Tensor, tokens: Tensor) -> bool:
    """Whether they have a shape that suits the tokens."""
    batch, seq = tokens.shape[:2]
    return positions.dim() > 0 and positions.shape in ((seq,), (1, seq), (batch, seq))


class Later:
    """What was wrong with tensors of a device, asked for in one forward and read in the next: by then the device has
    long passed it, so that nobody waits."""

    def __init__(self) -> None:
        self.expected: dict[tuple[int | Placement, torch.device], Tensor] = {}
        self.found: list[tuple[str, Tensor]] = []
        self.arrived: torch.cuda.Event | None = None

    def look(self, sp: SequenceParallel, share: int | Placement, positions: Tensor, mask: Tensor | None) -> None:
        """Compares on the device, and sends for the result."""
        if not is_trusted(positions, share if isinstance(share, Placement) else sp):
            wrong = (positions != self._of_device(sp, share, positions.device)).any()
            self._send_for(_wrong_positions(share), wrong)
        if mask is not None and not is_trusted(mask, sp):
            self._send_for(WRONG_MASK, (mask == 0).any())

    def error(self) -> InputError | None:
        """What was found since the last time, all of it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found, self.found, self.arrived = self.found, [], None
        said = [sentence for sentence, wrong in found if bool(wrong)]
        return InputError(f"{said[0]} (in an earlier forward: on a device it is seen one later)") if said else None

    def _send_for(self, sentence: str, wrong: Tensor) -> None:
        self.found.append((sentence, wrong.to("cpu", non_blocking=True)))
        if wrong.is_cuda and torch.cuda.is_available():
            self.arrived = torch.cuda.current_stream(wrong.device).record_event()

    def _of_device(self, sp: SequenceParallel, share: int | Placement, device: torch.device) -> Tensor:
        """Kept for forwards of one length: the host waits for a copy too."""
        if (share, device) not in self.expected:
            self.expected = {(share, device): _expected(sp, share).to(device)}
        return self.expected[share, device]


SAMPLES = 8  # values of a parameter that are compared


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Name -> what to compare: dtypes, layers, RoPE, and of every parameter its shape and some values, what says most
    first.

    Values are those that a rank holds whole: not of parameters that ZeRO-3 or FSDP partitions, or that are on meta.
    """
    parameters = dict(model.named_parameters())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    values = _samples({name: p for name, p in parameters.items() if _is_whole(p)})
    return {
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})),
        "layers": getattr(model.config, "num_hidden_layers", None),
        "rope": getattr(model.config, "rope_parameters", None),
        "trained parameters": len(trained),
        **{f"shape of {name}": shape for name, shape in shapes.items()},
        **{f"values of {name}": digest for name, digest in values.items()},
    }


def _is_whole(p: nn.Parameter) -> bool:
    return not hasattr(p, "ds_shape") and not p.is_meta and type(p.data) is Tensor and p.numel() > 0


def _samples(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """A digest of some values of each, copied from a device together."""
    taken = [_spread(p) for p in parameters.values()]
    values = torch.cat(taken).cpu().split([len(x) for x in taken]) if taken else []
    return {
        name: hashlib.blake2b(x.numpy().tobytes(), digest_size=4).hexdigest()
        for name, x in zip(parameters, values, strict=True)
    }


def _spread(p: nn.Parameter) -> Tensor:
    flat = p.detach().reshape(-1)
    at = torch.linspace(0, len(flat) - 1, min(SAMPLES, len(flat)), device=flat.device).long()
    return flat[at].double()

"""Calls with images, videos or audio. The stack of layers runs on shards, and all other modules run whole on each rank.

Models encode media into features, insert the features in place of token embeddings, and call the stack of layers with
the resulting `inputs_embeds`. All code before the stack therefore runs unchanged on all ranks, and the stack's call is
a whole call. Padding and documents are taken from the outermost call, even if the model has changed them since.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ds_seqpar.base.errors import ConfigError, InputError, SeqParError
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.runtime.operator import describe
from ds_seqpar.data.batches import checked_mask, documents_in
from ds_seqpar.data.documents import Lengths
from ds_seqpar.data.inputs import INPUTS, LAYOUT

from ..generation.forward import CachedForward, has_cache
from ..inputs import MEDIA, POSITIONS, TYPES
from ..look.facts import Facts
from ..look.media import placeholders


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Spans of tokens that see one another under a mask, with all rows concatenated."""

    spans: tuple[tuple[int, int], ...] = ()
    whole: bool = False  # whether tokens see their whole span even if it exceeds the window


@dataclasses.dataclass(eq=False)
class MediaCall:
    """State of the enclosing call of a model with media, for use in the stack."""

    shape: tuple[int, int]  # rows and tokens
    layout: dict[str, Any]  # the arguments that specify padding and documents
    states: list[Tensor] = dataclasses.field(default_factory=list)  # the random states at the start of the call
    masks: list[Blocks] = dataclasses.field(default_factory=list)  # the masks made outside the stack
    mask: Any = None  # the attention_mask for the layers
    counts: bool = False  # whether the stack was called with position_ids
    documents: Lengths = ()  # the documents of a pack if masks are made outside the stack

    def add_mask(self, function: Callable[..., Tensor], given: Mapping[str, Any]) -> Tensor:
        """Record a mask's blocks. Return a 4-dim stand-in for the mask, which reaches the layers unchanged."""
        begin = given["q_offset"]  # the number of cached tokens, which new tokens see causally
        if (given["batch_size"], given["q_length"]) != self.shape or given["kv_length"] != begin + self.shape[1]:
            raise InputError(
                f"a mask must be of the call's rows and tokens, {self.shape}; got {given['q_length']} tokens"
            )
        padding = given["attention_mask"]
        padding = None if padding is None else padding[:, begin:]
        self.masks.append(blocks_of(function, self.shape, padding, given["device"], begin, self.documents))
        return torch.empty(1, 1, 0, len(self.masks), device=given["device"])

    def around(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the outermost module.

        For a pack of documents, position_ids are removed, since the layout already contains the documents. With
        position_ids, transformers would also create a document mask, and would look up blocks by position in a document
        instead of position in the pack.
        """
        positions = inputs.get("position_ids")
        has_axes = isinstance(positions, Tensor) and positions.dim() > 2
        return {name: x for name, x in inputs.items() if not self.documents or has_axes or name != "position_ids"}

    def blocks(self, mask: Any) -> Blocks:
        """Return the blocks of a mask that a layer received."""
        number = mask.shape[-1] if _stands_for_mask(mask) else 0
        return self.masks[number - 1] if number else Blocks()

    def of_stack(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for the stack's call."""
        rows, length = self.shape
        if tuple(given["inputs_embeds"].shape[:2]) != self.shape:
            raise InputError(
                f"features must come in place of tokens, of which there are {self.shape}; got inputs_embeds "
                f"{describe(given['inputs_embeds'])} of the model, which ranks cannot share"
            )
        made = given.get("attention_mask")
        masks = [*made.values()] if isinstance(made, Mapping) else [made]
        if isinstance(made, Mapping) or _stands_for_mask(made):
            self.mask = made
        elif isinstance(made, Tensor) and made.dim() == 2:  # the padding of the call, possibly changed by the model
            masks = []
        if wrong := [x for x in masks if x is not None and not _stands_for_mask(x)]:
            raise InputError(
                f"masks must be made by transformers' makers of masks; got {describe(wrong[0])} of the model"
            )
        inputs = {name: x for name, x in given.items() if name not in MEDIA and INPUTS.get(name) != LAYOUT}
        positions = given.get("position_ids")
        if isinstance(positions, Tensor) and not (self.documents and positions.dim() < 3):
            self.counts = True
            positions = positions.to(given["inputs_embeds"].device)
            inputs[POSITIONS] = positions.expand(*positions.shape[:-2], rows, length)
        return inputs | self.layout


def names_of(facts: Facts, inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that require whole rows in all modules outside the stack."""
    return [
        name for name, x in inputs.items() if x is not None and (name in MEDIA or (facts.outside and name in TYPES))
    ]


def is_shared_by_stack(facts: Facts, inputs: Mapping[str, Any]) -> bool:
    """Return whether all modules around the stack run on whole sequences in a call.

    The result is true for calls with media or with a cache, since positions after a cache depend on earlier media.
    """
    return bool(names_of(facts, inputs)) or (not facts.no_media and has_cache(inputs))


def text_of(facts: Facts, batch: Mapping[str, Any], config: PreTrainedConfig) -> Mapping[str, Any]:
    """Return a batch without its media. Raise an error if the model does not support these media."""
    if not names_of(facts, batch):
        return batch
    if error := checked(facts, batch, config)[1]:
        raise error
    text = {name: x for name, x in batch.items() if name not in MEDIA and INPUTS.get(name) != LAYOUT}
    return text | layout_in(batch)


def layout_in(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that specify padding and documents."""
    layout = {name: x for name, x in inputs.items() if INPUTS.get(name) == LAYOUT and x is not None}
    positions = layout.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3:  # text axis first, then three others, if any
        layout |= {"position_ids": positions[0]} if len(positions) == 4 else {}
        layout = layout if len(positions) == 4 else {n: x for n, x in layout.items() if n != "position_ids"}
    return layout


def checked(facts: Facts, inputs: Mapping[str, Any], config: PreTrainedConfig) -> tuple[Lengths, SeqParError | None]:
    """Return (the documents of a pack with media; an error if the model does not support the call, otherwise None)."""
    if not (names := names_of(facts, inputs)):
        return (), None
    if facts.no_media:
        return (), ConfigError(
            f"ranks that share a {config.model_type} need batches of text alone; got {names[0]}, but {facts.no_media}, "
            "leave images, videos and audio out of the batch"
        )
    ids, layout = inputs.get("input_ids"), layout_in(inputs)
    says_documents, mask = bool(layout.keys() - {"attention_mask"}), layout.get("attention_mask")
    if ids is None or has_cache(inputs) or not (says_documents or getattr(mask, "ndim", 2) != 2):
        return (), None
    try:
        documents = documents_in(layout, checked_mask(mask, ids.shape), *ids.shape) or ()
    except SeqParError as error:
        return (), error
    starts = torch.tensor([0, *documents[:-1]], device="cpu").cumsum(0)
    starts = starts[starts % ids.shape[1] > 0].to(ids.device)
    is_place = torch.isin(ids.flatten(), ids.new_tensor(placeholders(config)))
    if not len(cut := starts[is_place[starts] & is_place[starts - 1]]):
        return documents, None
    return (), InputError(
        "a document of a pack must hold whole images, videos and audio; got one that begins between two tokens of "
        f"them, at token {int(cut[0])}, cut packs between documents, and begin each with a token of text"
    )


def blocks_of(
    function: Callable[..., Tensor],
    shape: tuple[int, int],
    padding: Tensor | None,
    device: torch.device,
    begin: int = 0,
    documents: Lengths = (),
) -> Blocks:
    """Return the blocks of a causal mask. Neighboring tokens that see each other share a block.

    Args:
        function: Returns whether a query sees a key, given (row, head, query, key), like transformers' mask functions.
        shape: The numbers of rows and tokens.
        padding: A mask (rows, tokens) that is 0 for padding. Padding belongs to no block.
        device: The device of the tensors that the function reads.
        begin: The index of the first token.
        documents: The documents of a pack, or () if each row is one document. No block crosses the end of a document.

    Raises:
        InputError: The keys that a query sees do not form one interval.
    """
    rows, length = shape

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if not len(row):
            return torch.zeros(0, dtype=torch.bool, device=device)
        return torch.vmap(function)(row, torch.zeros_like(row), query + begin, key + begin)

    at = torch.arange(rows * length, device=device)
    row, token = at // length, at % length
    lengths = torch.tensor(documents or (length,) * rows, device=device)
    of = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    joined = sees(row, token, (token + 1).clamp(max=length - 1)) & (of == of.roll(-1)) & (at + 1 < len(at))
    if padding is not None:
        real = padding.bool().flatten()
        joined &= real & real.roll(-1)
    before = torch.nn.functional.pad(joined[:-1], (1, 0), value=False)
    first, last = (joined & ~before).nonzero().flatten(), (~joined & before).nonzero().flatten()
    row, first_token, last_token = first // length, first % length, last % length
    next_token, of = first_token.roll(-1), of[first]
    apart = (of == of.roll(-1)) & (first_token < next_token)
    if bool((~sees(row, first_token, last_token) | (apart & sees(row, first_token, next_token))).any()):
        raise InputError(
            "ranks share attention in which the keys of a token are one interval; got images of a row that see one "
            "another, give each image a row of its own"
        )
    whole = bool(sees(row, last_token, first_token).all())
    return Blocks(tuple(zip(first.tolist(), (last + 1).tolist(), strict=True)), whole and len(first) > 0)


@functools.lru_cache(maxsize=64)
def with_blocks(mask: Mask, blocks: Blocks) -> Mask:
    return dataclasses.replace(mask, blocks=blocks.spans, whole_blocks=blocks.whole) if blocks.spans else mask


def masks_of_rows(mask: Mask, blocks: Blocks, cached: CachedForward) -> list[Mask]:
    """Return each row's mask in a cached forward, without padding, or a single mask if all masks are equal."""
    spans: list[list[tuple[int, int]]] = [[] for _ in range(cached.count)]
    for first, end in blocks.spans:
        row, token = divmod(first, cached.columns)
        place = token if cached.places is None else int(cached.places[row, token])
        spans[row].append((place, place + end - first))
    masks = [with_blocks(mask, Blocks(tuple(x), blocks.whole)) for x in spans]
    return masks if len({*masks}) > 1 else masks[:1]


def _stands_for_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4 and tuple(x.shape[:3]) == (1, 1, 0)

"""Check that a rank received its own shard of a batch, with the global positions of its tokens and no mask."""

from __future__ import annotations

import functools

from torch import Tensor

from ..base.errors import InputError
from ..core.compiler.sharding import shards
from .batch_layout import BatchLayout
from .sharding import Sharding
from .value_checks import ValueChecks

HOW = "give the model what sp.shard_batches returns, its placement included, or a whole batch"


def check_tokens(sp: Sharding, tokens: Tensor, layout: object) -> None:
    """Raise InputError if a rank's tokens do not match its shard of the layout.

    Args:
        sp: The SequenceParallel.
        tokens: Tensor (rows, local tokens, ...).
        layout: The batch's `BatchLayout`; None if ranks share sequences equally.
    """
    if error := _equal_shards_error(sp, tokens) if layout is None else _placement_error(sp, tokens, layout):
        raise error


def check_shard(
    sp: Sharding, tokens: Tensor, positions: Tensor | None, mask: Tensor | None, layout: BatchLayout | None,
    checks: ValueChecks,
) -> None:  # fmt: skip
    """Raise InputError if a rank did not receive the positions of its tokens, or if it received a mask.

    Args:
        sp: The SequenceParallel.
        tokens: Tensor (rows, local tokens, ...).
        positions: Value of position_ids.
        mask: Value of attention_mask.
        layout: The batch's `BatchLayout`; None if ranks share sequences equally.
        checks: Collector that checks the values immediately or later.
    """
    if positions is None or not _are_for(positions, tokens):
        raise InputError(_wrong_positions(layout, "none" if positions is None else "those of other tokens"))
    if mask is not None:
        checks.require(_is_wrong_mask(sp, mask, layout).long().reshape(1), functools.partial(_judge, WRONG_MASK))
    expected = sp.local_positions(tokens.shape[1] * sp.size if layout is None else layout, positions.device)
    wrong = (positions != expected).any().long().reshape(1)
    checks.require(wrong, functools.partial(_judge, _wrong_positions(layout)))


def _judge(sentence: str, wrong: list[int]) -> InputError | None:
    return InputError(sentence) if wrong[0] else None


def _is_wrong_mask(sp: Sharding, mask: Tensor, layout: BatchLayout | None) -> Tensor:
    """Return whether a sharded batch's mask is invalid, because it is not all ones or, if masks are kept, marks more
    than padding.
    """
    if not sp.keeps_masks:
        return (mask != 1).any()
    wrong = ((mask != 0) & (mask != 1)).any()
    return wrong if layout is not None else wrong | (mask[..., 1:] > mask[..., :-1]).any()


def _equal_shards_error(sp: Sharding, tokens: Tensor) -> InputError | None:
    if tokens.shape[1] and tokens.shape[1] * sp.size % sp.multiple == 0:
        return None
    return InputError(
        f"a patched model needs {sp.multiple // sp.size} tokens on each rank, or a multiple of it, or a placement; got "
        f"{tokens.shape[1]} tokens and none, {HOW}"
    )


def _placement_error(sp: Sharding, tokens: Tensor, placement: object) -> InputError | None:
    if not isinstance(placement, BatchLayout):
        return InputError(f"placement must be a BatchLayout, or None; got {type(placement).__name__}, {HOW}")
    cp_size, ulysses = placement.shards.size, sp.ulysses(placement)
    if ulysses not in sp.ulysses_sizes or cp_size * ulysses != sp.size:
        expected = sp.size // sp.config.ulysses
        return InputError(f"a placement must be of the {expected} CP ranks; got {cp_size}, {HOW}")
    if min(shards.tokens_of(placement.shards, "q", rank) for rank in range(cp_size)) < ulysses:
        return InputError(
            f"a patched model needs a token for each of its {sp.size} ranks; got {placement.tokens} tokens, of which "
            "some ranks would have none, give it longer sequences, or fewer ranks a sequence"
        )
    local_tokens = len(placement.positions(ulysses, sp.rank))
    if tokens.shape[1] == local_tokens and (placement.rows is None or tokens.shape[0] == 1):
        return None
    got = tuple(tokens.shape[:2])
    return InputError(
        f"a patched model needs the {local_tokens} tokens that the placement gives this rank; got {got}, {HOW}"
    )


WRONG_MASK = (
    f"a sharded forward takes no padding mask; got one with zeros or other numbers, {HOW} (it checks and drops it)"
)


def _wrong_positions(layout: BatchLayout | None, got: str = "those of other tokens") -> str:
    if layout is not None:
        return (
            f"a patched model needs the position_ids of the tokens that its placement gives this rank; got {got}, {HOW}"
        )
    return (
        "a batch with shift_labels or a placement looks sharded: a patched model needs this rank's "
        f"tokens with their global position_ids; got {got}, {HOW}"
    )


def _are_for(positions: Tensor, tokens: Tensor) -> bool:
    """Return whether the positions have a shape that matches the tokens."""
    batch, seq = tokens.shape[:2]
    return positions.dim() > 0 and positions.shape in ((seq,), (1, seq), (batch, seq))

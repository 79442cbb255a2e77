"""What position_ids say on padding changes nothing, and those of a placement begin again with each document."""

import pytest
import torch

from tests.dist.ranks import make
from tests.launch import on_warm_ranks as on_ranks

SEQ = 16
PADDED = {
    "left": [(5, 16), (0, 16)],
    "right": [(0, 11), (0, 16)],
    "both": [(2, 9), (4, 16)],
    "a row": [(0, 16), (0, 0)],
}
FILLED = {
    "1, as transformers has it": lambda counted, real: counted.masked_fill(~real, 1),
    "0": lambda counted, real: counted.masked_fill(~real, 0),
    "what a sum gives": lambda counted, real: counted,
    "anything": lambda counted, real: torch.where(real, counted, torch.arange(SEQ) * 7 % 5),
}


def sharded(real, positions):
    """(what each rank holds, the documents) of a batch with these position_ids."""
    sp = make(ulysses=1)
    ids = torch.arange(2 * SEQ).view(2, SEQ) + 1
    batch = {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}
    found = sp.shard_batch({**batch, **({} if positions is None else {"position_ids": positions})})
    kept = ["input_ids", "shift_labels", "position_ids"]
    return [found[name].tolist() for name in kept], getattr(found.get("placement"), "mask", None)


def all_fillings(real, counted):
    return {name: sharded(real, fill(counted, real)) for name, fill in FILLED.items()}


@pytest.mark.parametrize("padded", PADDED)
def test_positions_on_padding_may_be_anything(padded):
    at = torch.arange(SEQ)
    real = torch.stack([(at >= first) & (at < end) for first, end in PADDED[padded]])
    for found in on_ranks(2, all_fillings, real, real.cumsum(1) - 1):
        first, *others = found.values()
        assert all(other == first for other in others), found
        assert first[1] is None or len(first[1].documents) <= 5  # padding is a document, not one a token
    assert on_ranks(2, sharded, real, at[None]) == on_ranks(2, sharded, real, None)


def placed(lengths):
    sp = make(ulysses=2)
    seq, placement = sum(lengths), sp.place(sum(lengths), lengths)
    whole = torch.cat([torch.arange(length) for length in lengths])
    return torch.equal(sp.position_ids(seq, placement), sp.shard(whole, 0, placement)), len(
        placement.position_ids(2, 0)
    )


def test_positions_of_a_placement_begin_again_with_each_document():
    assert on_ranks(4, placed, (5, 1, 17, 9)) == [(True, 8)] * 4

"""Rows without repeated prompts: what is left of them, and where it goes back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.data.shared_prompts import shared_prompts
from tests import oracle
from tests.grids import examples
from tests.hf.llama import IGNORE

COLUMNS = 9


@st.composite
def batches(draw):
    """Rows with a few prompts, which begin or end together: (ids, mask or None, labels)."""
    token = st.integers(0, 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=4), min_size=1, max_size=3))
    rows = draw(
        st.lists(st.tuples(st.sampled_from(prompts), st.lists(token, max_size=COLUMNS - 4)), min_size=2, max_size=6)
    )
    ids = torch.zeros(len(rows), COLUMNS, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids, dtype=torch.bool), torch.full_like(ids, IGNORE)
    together = draw(st.booleans())
    for row, (prompt, completion) in enumerate(rows):
        begin = 4 - len(prompt) if together else 0
        end = begin + len(prompt) + len(completion)
        ids[row, begin:end], mask[row, begin:end] = torch.tensor([*prompt, *completion]), True
        for at in range(begin + len(prompt), end):
            if draw(st.integers(0, 3)):
                labels[row, at] = ids[row, at]
    return ids, None if bool(mask.all()) else mask, labels


@examples(300)
@given(batches(), st.booleans())
def test_each_label_is_predicted_once_from_the_tokens_before_it(batch, keep_all):
    ids, mask, labels = batch
    shared = shared_prompts(ids, mask, labels, keep_all=keep_all)
    if shared is None:
        return
    flat = Mask(documents=Mask.documents_of(shared.documents), parents=shared.parents)
    places = range(len(shared.tokens))
    seen = oracle.seen(flat, places, places)
    begins = torch.zeros(len(ids), dtype=torch.int64) if mask is None else mask.int().argmax(1)
    positions = shared.tokens % COLUMNS - (shared.offsets if shared.offsets is not None else 0)
    predicted = []
    for place in shared.own.tolist():
        row, token = divmod(int(shared.tokens[place]), COLUMNS)
        before = shared.tokens[seen[place]]
        assert torch.equal(ids.flatten()[before], ids[row, int(begins[row]) : token + 1])
        assert positions[seen[place]].tolist() == list(range(token + 1 - int(begins[row])))
        if token + 1 < COLUMNS and labels[row, token + 1] != IGNORE:
            predicted.append((row, token + 1))
    counted = (labels != IGNORE).nonzero().tolist()
    assert sorted(predicted) == sorted(map(tuple, counted))
    numbers = torch.arange(1.0, len(shared.tokens) + 1)[None]
    back, own = shared.by_row(numbers), {*shared.own.tolist()}
    for place, token in enumerate(shared.tokens.tolist()):
        if place in own:
            assert back.flatten()[token] == place + 1
    assert int((back != 0).sum()) == len(own)
    real = ids.numel() if mask is None else int(mask.sum())
    assert len(shared.tokens) < real
    assert not keep_all or int(shared.weights.sum()) == real

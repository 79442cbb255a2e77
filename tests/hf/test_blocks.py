"""Blocks of tokens that see one another, read from what transformers' makers of masks give to their interface."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.sharding.masks import Mask
from hf_integration.model.media import blocks_of

ROWS, TOKENS, WINDOW = 3, 19, 4


def numbers_of(generator):
    """The number of each token's block, -1 outside; blocks are neighbors, or have text between them."""
    lengths = torch.randint(1, 7, (ROWS, TOKENS), generator=generator)
    numbers = torch.stack([torch.arange(TOKENS).repeat_interleave(row)[:TOKENS] for row in lengths])
    return numbers.masked_fill(torch.rand(TOKENS, generator=generator)[numbers] < 0.5, -1)


KINDS = {
    "causal": lambda blocks: (or_masks(causal_mask_function, blocks), None),
    "a window, and in it blocks": lambda blocks: (
        and_masks(or_masks(causal_mask_function, blocks), sliding_window_overlay(WINDOW)),
        WINDOW,
    ),
    "a window, or blocks": lambda blocks: (or_masks(sliding_window_causal_mask_function(WINDOW), blocks), WINDOW),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_with_blocks_sees_what_the_function_says(kind):
    at = torch.arange(TOKENS)
    for seed in range(20):
        numbers = numbers_of(torch.Generator().manual_seed(seed))
        function, window = KINDS[kind](blockwise_overlay(numbers))
        found = blocks_of(function, (ROWS, TOKENS), None, torch.device("cpu"))
        documents = tuple(range(0, ROWS * TOKENS, TOKENS))
        mask = Mask(window=window, documents=documents, blocks=found.spans, whole_blocks=found.whole)
        for row, start in enumerate(documents):
            seen = function(torch.tensor(row), torch.tensor(0), at[:, None], at[None])
            bounds = [mask.bounds(start + token) for token in range(TOKENS)]
            assert seen.tolist() == [[lo <= start + key < hi for key in range(TOKENS)] for lo, hi in bounds]


def test_padding_is_in_no_block():
    padding = torch.ones(1, 8, dtype=torch.bool)
    padding[0, :2] = False
    function = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[0, 0, 0, 0, -1, -1, 1, 1]])))
    assert blocks_of(function, (1, 8), padding, torch.device("cpu")).spans == ((2, 4), (6, 8))


def test_images_that_see_one_another_are_refused():
    function = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[-1, 0, 0, -1, 0, 0]])))
    with pytest.raises(InputError, match="one interval"):
        blocks_of(function, (1, 6), None, torch.device("cpu"))

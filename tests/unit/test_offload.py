"""Host memory for checkpoints: in pieces, which are used again."""

import gc
import sys

import pytest
import torch

from ds_seqpar.core.settings import HOST_PIECE
from ds_seqpar.memory.offload import Store


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_larger_than_a_piece_comes_back_and_its_pieces_serve_others(dtype):
    store, width = Store(), HOST_PIECE // torch.empty((), dtype=dtype).element_size() // 4
    x = torch.randn(5, width + 1, dtype=dtype)[:, :width].t()  # 5 / 4 of a piece, and not contiguous
    packed = store.pack(x)
    assert [piece.numel() for piece in packed.pieces] == [HOST_PIECE, HOST_PIECE // 4]
    assert torch.equal(store.unpack(packed), x)
    allocated = store.bytes_allocated
    assert store.bytes_in_use == allocated == 5 * HOST_PIECE // 4
    del packed
    assert store.bytes_in_use == 0
    whole = torch.randn(4, width, dtype=dtype)
    packed = store.pack(whole)  # takes the same piece
    assert (store.bytes_allocated, store.bytes_in_use) == (allocated, HOST_PIECE)
    assert torch.equal(store.unpack(packed), whole)


class Full(Store):
    """With room for one piece."""

    def allocate(self, size):
        if self.bytes_in_use:
            raise MemoryError
        return super().allocate(size)


def test_what_finds_no_room_gives_back_what_it_has_taken():
    store, unraised = Full(), []
    before, sys.unraisablehook = sys.unraisablehook, unraised.append
    try:
        with pytest.raises(MemoryError):
            store.pack(torch.zeros(HOST_PIECE // 4 + 1))
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert not unraised
    assert (store.bytes_allocated, store.bytes_in_use) == (HOST_PIECE, 0)

"""Who tells whom in an agreement: after the last step every rank has heard of all."""

import pytest

from ds_seqpar.runtime.comm import distances


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 63, 64, 65, 1000, 1024])
def test_every_rank_hears_of_all_in_log4_steps(size):
    known = {0}  # how far behind a rank are those that it knows of: the same for all ranks
    for step in distances(size):
        known |= {(far + behind) % size for far in step for behind in known}
    assert known == set(range(size))
    assert 4 ** (len(distances(size)) - 1) < size <= 4 ** len(distances(size)) or size == 1

"""Who tells whom in an agreement: in the end every rank has heard of all, and no message is left over."""

import pytest

from ds_seqpar.runtime.comm import FAN, steps_of_max


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 13, 16, 17, 18, 19, 63, 64, 65, 300, 1000, 1024])
def test_every_rank_hears_of_all(size):
    known, on_the_way = [{rank} for rank in range(size)], {}

    def rank_of(rank):
        for sends, receives in steps_of_max(size, rank):
            assert len(receives) <= FAN
            on_the_way.update({(rank, peer): {*known[rank]} for peer in sends})
            for peer, awaited in receives:
                while (peer, rank) not in on_the_way:
                    yield
                heard = on_the_way.pop((peer, rank))
                assert awaited is None or heard == {
                    last % size for last in range(awaited[0] - awaited[1] + 1, awaited[0] + 1)
                }
                known[rank] |= heard

    running = [rank_of(rank) for rank in range(size)]
    for _ in range(10):  # more than the tree is high
        running = [one for one in running if next(one, "ended") != "ended"]
    assert not running
    assert not on_the_way
    assert known == [set(range(size))] * size

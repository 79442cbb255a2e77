"""Virtual ranks that run what a rank runs, including backward, each in its own thread. Messages wait in a mailbox."""

import contextlib
import queue
import threading
from collections import Counter

from ds_seqpar.core.runtime.runtime import Runtime
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.testing import _VirtualComm

PATIENCE = 30  # seconds that a rank waits for a message


class _Queue(queue.SimpleQueue):
    """Messages from one rank to another, for which the receiver waits."""

    append = queue.SimpleQueue.put

    def __init__(self, failed):
        self.failed = failed  # whether another rank has failed

    def popleft(self):
        for _ in range(PATIENCE):
            with contextlib.suppress(queue.Empty):
                return self.get(timeout=1)
            if self.failed:
                break
        raise TimeoutError("a message that never came")


class _Mailbox(dict):
    def __init__(self, failed):
        self.failed = failed

    def __missing__(self, key):
        return self.setdefault(key, _Queue(self.failed))  # two threads that ask at once both get the first one's


def on_virtual_ranks(function, **config):
    """Call function(runtime, sp_rank) on each of `size` virtual ranks.

    Args:
        config: The fields of a `SequenceParallelConfig`.

    Returns:
        (the result of each rank, the number of elements that each rank received, by kind).
    """
    config = SequenceParallelConfig(**config)
    size, count = config.size, config.ulysses
    topology, results, received, errors = config.topology(size), [None] * size, [Counter() for _ in range(size)], []
    everyone, boxes = _Mailbox(errors), [[_Mailbox(errors) for _ in range(n)] for n in (count, size // count)]

    def rank(number):
        cp_rank, ulysses_rank = divmod(number, count)
        comms = (
            _VirtualComm(cp_rank, boxes[0][ulysses_rank], _VirtualComm(ulysses_rank, boxes[1][cp_rank])),
            _VirtualComm(number, everyone),
        )
        runtime = Runtime(config, topology, cp_rank, comms[0], ulysses_rank)
        runtime.one_ring.comm = comms[1]
        for comm in (*comms, comms[0].ulysses):
            comm.received = received[number]
        try:
            results[number] = function(runtime, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # others only waited for the first
        raise errors[0]
    mailboxes = [everyone, *boxes[0], *boxes[1]]
    assert all(box.empty() for mailbox in mailboxes for box in mailbox.values()), "a message nobody received"
    return results, received

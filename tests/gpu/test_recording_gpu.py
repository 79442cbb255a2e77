"""The clock of a record on a GPU: events of the stream, in seconds of the host's clock."""

import time

import torch

from ds_seqpar.runtime.recorder import DeviceClock
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


def test_marks_are_of_what_the_device_does():
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    before = time.perf_counter()
    clock = DeviceClock(x.device)
    marks = [clock.mark()]
    for _ in range(3):
        x @ x
        marks.append(clock.mark())
    seconds = [clock.seconds(mark) for mark in marks]
    after = time.perf_counter()
    assert seconds == sorted(set(seconds))
    assert before - 0.01 <= seconds[0] <= seconds[-1] <= after + 0.01

"""A job that hangs says who waits for whom, at which instruction of which layer, and why."""

import contextlib
import io
import os
import pdb
import signal
import sys
import threading
import time
from datetime import timedelta
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.core.runtime import call as call_io
from ds_seqpar.core.runtime.kernels import KERNELS
from ds_seqpar.guards import watchdog
from hf_integration import patch_attention
from tests.dist.ranks import make
from tests.grids import each_then_rest, few_then_rest
from tests.hf.llama import SEQ, llama
from tests.launch import on_ranks
from tests.words import missing

WORLD, LATE = 4, 2
AFTER = "ds_seqpar: after 1 s of waiting"


def watched(mode, **config):
    return make(watchdog=mode, watchdog_s=1.0, kernel="cpu_flash", rotate_forward="kv", rotate_backward="kv", **config)


def forward(model, sp):
    ids = torch.arange(SEQ)[None] % 60
    batch = sp.shard_batch({"input_ids": ids, "labels": ids})
    return model(**batch).loss


def step(model, sp):
    forward(model, sp).backward()


class Hang:
    """What a rank does until the report is there."""

    def __init__(self, file):
        self.file, self.late = file, dist.get_rank() == LATE

    def told(self):
        until = time.monotonic() + 30
        while AFTER not in self.file.read_text():
            time.sleep(0.02)
            assert time.monotonic() < until

    def then(self, call):
        """Call once the report is there, beside what this rank does."""
        thread = threading.Thread(target=lambda: (self.told(), call()))
        thread.start()
        return thread


def in_its_loader(hang, sp, model):
    if hang.late:
        list(torch.utils.data.DataLoader([0], collate_fn=lambda examples: hang.told()))
    step(model, sp)


def in_a_debugger(hang, sp, model):
    if hang.late:
        read, write = os.pipe()
        hang.then(lambda: os.write(write, b"c\n"))
        with os.fdopen(read) as stdin, open(os.devnull, "w") as stdout:
            pdb.Pdb(stdin=stdin, stdout=stdout).set_trace()
            step(model, sp)
        return
    step(model, sp)


def layer_now():
    """Of the attention call that this rank is in."""
    (watched,) = watchdog._dog.users
    return watched.calls.current.layer


def in_layer(number, direction, call):
    """Call once in a kernel of this layer."""
    kernel, real = KERNELS["cpu_flash"], getattr(KERNELS["cpu_flash"], direction)

    def planted(*args):
        if layer_now() == number:
            setattr(kernel, direction, real)
            call()
        return real(*args)

    setattr(kernel, direction, planted)


def stopped(hang, sp, model):
    process = [0] * WORLD
    dist.all_gather_object(process, os.getpid())
    if hang.late:
        in_layer(1, "forward", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    elif dist.get_rank() == 0:
        hang.then(lambda: os.kill(process[LATE], signal.SIGCONT))
    step(model, sp)


def in_backward(hang, sp, model):
    if hang.late:
        in_layer(0, "backward", hang.told)
    step(model, sp)


def in_save(hang, sp, model):
    class Disk(io.BytesIO):
        def write(self, data):
            hang.told()
            return super().write(data)

    if hang.late:
        torch.save(torch.ones(2), Disk())
    step(model, sp)


def before_a_group_is_made(hang, sp, model):
    if hang.late:
        hang.told()
    group = dist.new_group()
    dist.barrier()  # nobody leaves the group while others are still connecting to it
    dist.destroy_process_group(group)


def before_a_future(hang, sp, model):
    """What others wait for has a name, and is no Work."""
    if hang.late:
        hang.told()
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.wait()


def after_close(hang, sp, model):
    """The last case: it takes the SequenceParallel away."""
    if hang.late:
        sp.close()
        hang.told()
    dist.barrier()


class Later:
    """The work of a message that a thread sends."""

    def __init__(self, thread, waits):
        self.thread, self.waits = thread, waits

    def wait(self):
        if self.waits:
            self.thread.join()


def on_link(sender, receiver, start):
    """What `start` makes of the first message between these ranks in layer 1."""
    if dist.get_rank() == sender:
        real, dist.isend = dist.isend, None

        def isend(tensor, group=None, tag=0, group_dst=None):
            in_walk = any(user.walk for user in watchdog._dog.users) and layer_now() == 1
            if not in_walk or group_dst != receiver:
                return real(tensor, group=group, tag=tag, group_dst=group_dst)
            dist.isend = real
            return start(lambda to=receiver: real(tensor, group=group, tag=tag, group_dst=to))

        dist.isend = isend


def on_a_dead_link(hang, sp, model):
    on_link(1, LATE, lambda send: Later(hang.then(lambda: send().wait()), waits=False))
    step(model, sp)


def on_a_slow_link(hang, sp, model):
    def start(send):
        thread = threading.Thread(target=lambda: (time.sleep(2), send().wait()))
        thread.start()
        return Later(thread, waits=True)

    on_link(1, LATE, start)
    step(model, sp)


def to_a_wrong_peer(hang, sp, model):
    lost = []

    def start(send):
        lost.append(send(3))
        return Later(hang.then(lambda: send().wait()), waits=True)

    on_link(1, LATE, start)
    step(model, sp)


LINK = "in different calls, or a link is slow or down"
# rank 2 is in `told`, where it sleeps or looks into the file
RELEASED = {
    in_its_loader: ("rank 2 is ", "test_watchdog.py:", "in told; "),
    in_a_debugger: ("rank 2 is in ", "(test_watchdog.py:", "in in_a_debugger)"),
    stopped: ("rank 2 is stopped, by a signal", "of ring forward, layer 1 for rank 2 ("),
    in_backward: (
        "rank 2 is ",
        "in told at step 0 of ring backward, layer 0",
        "of ring backward, layer 0 for ",
    ),
    in_save: ("rank 2 is ", "test_watchdog.py:", "in told"),
    before_a_group_is_made: ("rank 2 is ", "in told", " in new_group (test_watchdog.py"),
    before_a_future: ("rank 2 is ", "in told", "ranks 0-1, 3 wait in wait (test_watchdog.py", "in before_a_future)"),
    on_a_dead_link: ("rank 2 waits in a transfer", "of ring forward, layer 1 for rank 1 (", LINK),
    on_a_slow_link: ("rank 2 waits in a transfer at step 0 of ring forward, layer 1 for rank 1 (", LINK),
    to_a_wrong_peer: ("rank 2 waits in a transfer at step 0 of ring forward, layer 1 for rank 1 (", LINK),
    after_close: ("rank 2 has closed its last SequenceParallel", "ranks 0-1, 3 wait in barrier ("),
}


def hang_each(folder, cases):
    sp = watched("report", size=WORLD, ulysses=1)
    model, found = patch_attention(llama(), sp), {}
    step(model, sp)
    for case in cases:
        file = folder / case
        file.touch()
        dist.barrier()
        with file.open("a") as sys.stderr:
            globals()[case](Hang(file), sp, model)
            dist.barrier()
        found[case] = file.read_text()
    return found


class OneLayerFewer(torch.nn.Module):
    def forward(self, hidden_states, **kwargs):
        return hidden_states


def one_layer_fewer(sp, model):
    if dist.get_rank() == LATE:
        model.model.layers[1] = OneLayerFewer()
    step(model, sp)


def one_micro_batch_fewer(sp, model):
    """In a loop that sums gradients by itself."""
    for _ in range(1 if dist.get_rank() == LATE else 2):
        step(model, sp)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def an_error_that_was_caught(sp, model):
    def fail():
        raise ArithmeticError

    if dist.get_rank() == LATE:
        in_layer(1, "forward", fail)
    with contextlib.suppress(ArithmeticError):
        step(model, sp)
    step(model, sp)


def one_sequence_fewer(sp, model):
    """In the second group, which has two ranks of its own."""
    for _ in range(2 - sp.data_rank):
        step(model, sp)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


# what ends the job -> (ranks that share a sequence, words)
ENDS = {
    one_layer_fewer: (4, "of waiting rank 2 waits in backward of attention", "over ranks, layer 1 for"),
    one_micro_batch_fewer: (4, "of waiting rank 2 waits in all_reduce (test_watchdog.py", "wait in shard_batches"),
    an_error_that_was_caught: (4, "rank 2 waits in shard_batches for", "ring forward, layer 1 for rank"),
    one_sequence_fewer: (2, "ranks 2-3 wait in all_reduce (test_watchdog.py", "in shard_batches"),
}


def hang_and_end(file, case, size):
    sp = watched("end", size=size, ulysses=1)
    model = patch_attention(llama(), sp)
    step(model, sp)
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w")
    globals()[case](sp, model)
    return "went on"


SELDOM = (in_a_debugger, in_save, before_a_group_is_made, on_a_dead_link, to_a_wrong_peer)


@pytest.mark.parametrize("cases", few_then_rest([case for case in RELEASED if case not in SELDOM], SELDOM))
def test_a_report_names_the_rank_the_instruction_and_the_layer(cases, tmp_path):
    found, *_ = on_ranks(WORLD, hang_each, tmp_path, [case.__name__ for case in cases])
    wrong = {}
    for case in cases:
        words = RELEASED[case]
        text = found[case.__name__]
        *_, last = text.splitlines()
        if text.count(AFTER) != 1 or missing(last, AFTER, *words):
            wrong[case.__name__] = text
    assert not wrong, "\n".join(f"==== {name}\n{text}" for name, text in wrong.items())


@pytest.mark.parametrize("case", each_then_rest([one_sequence_fewer], [x for x in ENDS if x is not one_sequence_fewer]))
def test_a_report_ends_the_job_where_nothing_else_would(case, tmp_path):
    """Every rank ends by exit code 1, and one prints the sentence, which is the last that is printed."""
    size, *words = ENDS[case]
    ended = on_ranks(WORLD, hang_and_end, tmp_path / "said", case.__name__, size, check=False)
    assert [outcome[:2] for outcome in ended] == [("Died", "exit code 1")] * WORLD
    text = (tmp_path / "said").read_text()
    *_, last = text.splitlines()
    assert text.count("Error: after 1 s of waiting") == 1
    assert missing(last, "CommunicationError: after 1 s of waiting", *words) == [], text


def killed_before_a_group_is_made(file):
    sp = make(size=WORLD)  # noqa: F841, whose watchdog is as patient as it is by default
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w")
    if dist.get_rank() == LATE:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.new_group()


def test_a_rank_that_is_killed_while_others_make_a_group_is_told_at_once(tmp_path):
    """They waited for the group's timeout, or without a launcher for the watchdog's half of it."""
    ended = on_ranks(WORLD, killed_before_a_group_is_made, tmp_path / "said", check=False, timeout=30)
    codes = ["exit code -9" if rank == LATE else "exit code 1" for rank in range(WORLD)]
    assert [outcome[:2] for outcome in ended] == [("Died", code) for code in codes]
    text = (tmp_path / "said").read_text()
    *_, last = text.splitlines()
    assert text.count("Error: ") == 1, text
    assert missing(last, "waiting rank 2 has ended (process ", "ranks 0-1, 3 wait in new_group (test_watch") == [], text


def ended_without_its_store():
    """Of a rank whose report comes after the rank that has the store has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = watchdog._Watchdog()
    dog.store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    dog.end("the sentence")


def test_a_rank_ends_though_its_store_has_ended():
    assert on_ranks(1, ended_without_its_store, check=False, timeout=20) == [("Died", "exit code 1", ANY)]


def own_thread():
    """The exit code of a process that os.fork() has made: whether it sees its own main thread."""
    if (child := os.fork()) == 0:
        os._exit(watchdog._slept() == "")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_sees_its_own_thread():
    assert on_ranks(1, own_thread) == [0]


def wait_soundly():
    """For a child, at the end of a program, and in a group that may wait longer than the others."""
    with make(size=2), watched("end", size=2):  # of several the most patient settings count
        assert watchdog._dog.seconds == 60.0
    sp, slow = watched("end", size=2), dist.get_rank() == 1
    assert watchdog._dog.seconds == 1.0
    if os.fork() == 0:
        time.sleep(1.5)
        os._exit(0)
    os.wait()
    results = call_io.ForwardCall.results
    call_io.ForwardCall.results = lambda call: (time.sleep(1.5 * slow), watchdog._state(None), results(call))[-1]
    sp.attention(*torch.randn(3, 1, 8, 1, 8))
    for user in watchdog._dog.users:
        user.is_auto = True
    group = dist.new_group(timeout=timedelta(hours=3))
    time.sleep(1.5 * slow)
    dist.barrier(group=group)
    return "went on"


def test_a_job_that_waits_soundly_goes_on():
    assert on_ranks(2, wait_soundly) == ["went on"] * 2

"""What has to end before the interpreter does: gloo's threads drop the tensors of finished operations.

They need the interpreter's lock for it, and a thread that waits for that lock when the end begins aborts the process,
all work done and whatever its exit code was to be: "terminate called without an active exception", with torch 2.13.
Destroying groups would not do: threads are joined when nobody refers to their group any more, and DeepSpeed keeps its
own.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

TASKS = "/proc/self/task"
PATIENCE = 5.0  # seconds; a thread that never gets the processor is not waited for any longer


def wait_at_exit() -> None:
    """From now on the process ends only once gloo's threads are idle. Called wherever communication begins."""
    atexit.unregister(wait_until_idle)  # once is enough, however many SequenceParallel there are
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Returns once no thread of gloo's has run, or waited for the interpreter's lock, for a while; or after PATIENCE.

    One that waits for the lock wakes up every switch interval, which its counters show, and gets it while this sleeps.
    """
    if not os.path.isdir(TASKS):  # not Linux
        return time.sleep(0.2)
    until, before = time.monotonic() + PATIENCE, None
    while (now := _gloo_threads()) != before or not all(state.startswith("S") for state in now.values()):
        if time.monotonic() > until:
            return None
        before = now
        time.sleep(max(0.01, 2 * min(sys.getswitchinterval(), 1.0)))
    return None


def _gloo_threads() -> dict[str, str]:
    """Thread -> its state, and how often it has left the processor."""
    found = {}
    for thread in os.listdir(TASKS):
        try:
            with open(f"{TASKS}/{thread}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if status["Name"] == "pt_gloo_runloop":
            switches = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"]
            found[thread] = " ".join((status["State"], *switches))
    return found

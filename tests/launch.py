"""Runs a function on several real ranks, which are gloo processes on this machine.

The processes are forked from a server that has imported the heavy packages once, so a test with 4 ranks takes a
fraction of a second instead of 4 imports of DeepSpeed. A test gets its own processes, unless it declares that it leaves
nothing behind in them. Two environment variables change this:

    RANKS_FRESH=1   every test gets new ranks, so a test that depends on what another left behind fails
    RANKS_SPAWN=1   ranks are spawned with pytest's stdin and without time limits, so one of them can call breakpoint()
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.util  # before `_close_kept` is registered
import os
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from tests import costs, plants

# modules that ranks import sooner or later; names that a release lacks are skipped
PRELOAD = [
    "tests.preloading",
    "torch.distributed",
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # every ZeRO engine imports it, and it imports torch's compiler
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "ds_seqpar.engine",
    "ds_seqpar.__main__",
    "hf_integration.trainer.job",
    "hf_integration.trainer.trainer",
    "trl.trainer.utils",
    "hypothesis",
    "matplotlib.pyplot",
    "pytest",
    "tests.preloaded",
]


class RankFailure(AssertionError):
    """A rank raised; the message holds its traceback. `errors`: rank -> (type name, message, traceback)."""

    def __init__(self, errors: dict) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{error[2]}" for rank, error in sorted(errors.items())))
        self.errors = errors


def on_ranks(world, function, *args, timeout=120, check=True, patience=60, keep=None):
    """Calls function(*args) on `world` ranks with torch.distributed up; returns their results by rank.

    Raises RankFailure if a rank raised; with check=False that rank's result is (type name, message, traceback). A rank
    that is still running after `timeout` seconds is killed and fails as ("Hang", ...); a rank that ended without a
    result fails as ("Died", ...). patience: the timeout, in seconds, of the group of all ranks; None does not start
    torch.distributed, for functions that start it themselves (once one rank has left a group, others can no longer join
    it). keep: a key. Ranks are shared by the functions with the same key; None: new ranks.
    """
    if keep is None or patience != 60 or os.environ.get("RANKS_FRESH"):
        with Ranks(world, patience) as ranks:
            results, errors = ranks.call(function, *args, timeout=timeout)
    else:
        results, errors = _call_kept(keep, world, function, *args, timeout=timeout)
    if errors and check:
        raise RankFailure(errors)
    return [errors.get(rank, results.get(rank)) for rank in range(world)]


# for functions that leave nothing behind in their process: no settings, patched functions or groups
on_warm_ranks = functools.partial(on_ranks, keep="plain")
# for functions that leave behind what DeepSpeed's engines or Trainers do: groups and accelerate's settings
on_engine_ranks = functools.partial(on_ranks, keep="deepspeed")
on_trainer_ranks = functools.partial(on_ranks, keep="trainer")
_kept = {}  # world -> (key, Ranks that wait for the next function)
_found = {}  # on a rank: the state of a new process
KEPT_WORLD = 4  # larger ones would fill the memory
KEPT_FILES = 200  # the most open files in a rank: tests leave groups with their sockets


def on_each_of(ranks, **options):
    """Turns a function that each rank calls into a test with the same arguments. ranks: the number of ranks, or the
    name of the argument that specifies it. options: those of `on_ranks`."""

    def made(function):
        @functools.wraps(function)
        def test(**arguments):
            world = arguments[ranks] if isinstance(ranks, str) else ranks
            on_ranks(world, _body, function.__module__, function.__name__, arguments, **{"keep": "plain", **options})

        return test

    return made


def _body(module, name, arguments):
    """On a rank: runs the function that `on_each_of` turned into a test."""
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def _call_kept(word, world, function, *args, timeout):
    """`Ranks.call` on ranks that are kept for the next one, unless one of them failed."""
    known, ranks = _kept.pop(world, (word, None))
    if ranks is not None and (known != word or ranks.environment != _environment()):
        ranks.close()
        ranks = None
    ranks = ranks or Ranks(world)
    with contextlib.ExitStack() as end:
        end.callback(ranks.close)
        results, errors = ranks.call(_afresh, function, *args, timeout=timeout)
        if not errors and world <= KEPT_WORLD and ranks.files() <= KEPT_FILES:
            end.pop_all()
            ranks.count()
            _kept[world] = word, ranks
    return results, errors


def _afresh(function, *args):
    """On a rank: gives the function the random state of a new process, without groups that hang in a reference cycle,
    and without another Trainer's ZeRO-3, with which transformers would shard new models."""
    import torch
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    gc.collect()
    unset_hf_deepspeed_config()
    torch.set_rng_state(_found.setdefault("numbers", torch.get_rng_state()))
    return function(*args)


def _environment():
    """The environment that ranks are given, without pytest's own variable, which changes with every test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@atexit.register  # after multiprocessing's own, which waits for all processes, and so called before it
def _close_kept():
    while _kept:
        _kept.popitem()[1][1].close()


class Ranks:
    """`world` ranks with torch.distributed running, for successive calls in the same processes."""

    def __init__(self, world, patience=60, preload=PRELOAD):
        os.environ["OMP_NUM_THREADS"] = "1"
        self.is_debugged = bool(os.environ.get("RANKS_SPAWN"))
        context = multiprocessing.get_context("spawn" if self.is_debugged else "forkserver")
        context.set_forkserver_preload(preload)  # of the first ranks of a process: it has one server
        if self.is_debugged:
            patience = patience and 24 * 3600
        self.folder, self.environment = tempfile.TemporaryDirectory(), _environment()
        self.pipes, self.processes, self.counted = [], [], [None] * world
        port = free_port()
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = self.folder.name, port, patience
            stdin = Connection(os.dup(0), writable=False) if self.is_debugged else None  # a child's own is closed
            process = context.Process(target=_rank, args=(rank, world, *place, self.environment, theirs, stdin))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def call(self, function, *args, timeout=120):
        """({rank: result}, {rank: (type name, message, traceback)}); after a rank has failed, only `close` may be
        called."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # the process may have ended
                pipe.send((function, args))
        results, errors, deadline = {}, {}, time.monotonic() + (timeout if not self.is_debugged else 24 * 3600)
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    good, value = pipe.recv()
                    (results if good else errors)[rank] = value
                else:
                    errors[rank] = ("Hang", "still running", "still running when the time was up")
            except (EOFError, ConnectionResetError):
                process.join(10)
                errors[rank] = ("Died", f"exit code {process.exitcode}", f"ended with exit code {process.exitcode}")
        return results, errors

    def files(self):
        """The largest number of files that a rank has open; 0 on systems without /proc."""
        places = [Path(f"/proc/{process.pid}/fd") for process in self.processes]
        return max(len(list(place.iterdir())) if place.exists() else 0 for place in places)

    def count(self):
        """Adds the time that the ranks took since the last count to the costs of this test."""
        if costs.FOLDER in os.environ:
            for rank, process in enumerate(self.processes):
                with contextlib.suppress(OSError):  # it had already ended
                    phases = json.loads(Path(self.folder.name, f"{rank}.json").read_text())
                    self.counted[rank] = costs.rank_took(process.pid, phases, self.counted[rank])

    def close(self, patience=10):
        """Ends the ranks; those still running after `patience` seconds are killed."""
        self.count()
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank, world, folder, port, patience, environment, pipe, stdin):
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        sys.stdin = os.fdopen(0)
    os.environ.clear()  # the server's, which is that of the test which first needed ranks
    os.environ.update(
        environment,
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
        # one NUMA node: ZeRO-3 runs numactl in every backward where this is not set; and where it is the number of
        # ranks DeepSpeed makes buffers for all of them in shared memory
        **({"LOCAL_SIZE": "1"} if world > 1 else {}),
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    # what launched ranks have: a loader's worker would come from a server that imports everything anew
    multiprocessing.set_start_method("fork", force=True)
    if plants.PLANTED in os.environ:
        plants.plant(*json.loads(os.environ[plants.PLANTED]))
    torch.set_num_threads(1)
    began = time.process_time()
    outcome = True, None
    if patience is not None:
        store = f"file://{folder}/store"
        outcome = _outcome(dist.init_process_group, ("gloo", store, timedelta(seconds=patience), world, rank))
    if costs.FOLDER in os.environ:
        Path(folder, f"{rank}.json").write_text(json.dumps([began, time.process_time()]))
    # no rank leaves while another may still send to it: the parent closes the pipe after all are done
    with contextlib.suppress(EOFError, BrokenPipeError):
        if not outcome[0]:
            pipe.send(outcome)
        while outcome[0]:
            outcome = _outcome(*pipe.recv())
            pipe.send(outcome)
    os._exit(0)  # without destroy_process_group, which would wait for ranks that have ended


def _outcome(function, args):
    try:
        return True, function(*args)
    except BaseException as error:
        return False, (type(error).__name__, str(error), traceback.format_exc())

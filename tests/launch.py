"""Runs a function on several real ranks: gloo processes on this machine.

The processes are forked from a server that has imported the heavy packages once, so a test with 4 ranks costs a
fraction of a second and not 4 imports of DeepSpeed; each test still gets fresh processes.
"""

import gc
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from datetime import timedelta

PRELOAD = [
    "torch",
    "torch.distributed",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # every ZeRO engine imports it, and it imports torch's compiler
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]


class RankFailure(AssertionError):
    """A rank raised; the message holds its traceback. `errors`: rank -> (type name, message, traceback)."""

    def __init__(self, errors: dict) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{error[2]}" for rank, error in sorted(errors.items())))
        self.errors = errors


def on_ranks(world, function, *args, timeout=120, check=True, patience=60):
    """Calls function(*args) on `world` ranks with torch.distributed up; returns their results by rank.

    Raises RankFailure if a rank raised; with check=False that rank's result is (type name, message, traceback). A rank
    that is still running after `timeout` seconds is killed and fails as ("Hang", ...); one that ended without a
    word as ("Died", ...). patience: the timeout, in seconds, of the group of all ranks.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        port = free_port()
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, world, folder, port, patience, theirs, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results, errors = _collect(pipes, processes, time.monotonic() + timeout)
    if errors and check:
        raise RankFailure(errors)
    return [errors.get(rank, results.get(rank)) for rank in range(world)]


def _collect(pipes, processes, deadline):
    results, errors = {}, {}
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                good, value = pipe.recv()
                (results if good else errors)[rank] = value
            else:
                errors[rank] = ("Hang", "still running", "still running when the time was up")
        except EOFError:
            process.join(10)
            errors[rank] = ("Died", f"exit code {process.exitcode}", f"ended with exit code {process.exitcode}")
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    return results, errors


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank, world, folder, port, patience, pipe, function, args):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # ZeRO-3 collects garbage for every engine: not among all that was imported
    try:
        store, patience = f"file://{folder}/store", timedelta(seconds=patience)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
        outcome = True, function(*args)
    except BaseException as error:
        outcome = False, (type(error).__name__, str(error), traceback.format_exc())
    pipe.send(outcome)
    if outcome[0]:
        pipe.poll(600)  # nobody leaves while a peer may still talk to it: the parent closes the pipe once all are done
    os._exit(0)  # not by way of destroy_process_group, which would wait for ranks that are gone

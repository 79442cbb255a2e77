"""How processes of a launch end: a refusal is read once, not once a rank; it ends by exit code 1."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.base import compat
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.guards import process_exit
from tests import scripts
from tests.dist.ranks import make
from tests.grids import each_then_rest
from tests.launch import free_port, on_each_of, on_ranks

pytestmark = pytest.mark.usefixtures("compiled")

REFUSED = """
import os, sys, threading, time
import torch, torch.distributed as dist
from ds_seqpar import SequenceParallel, SequenceParallelConfig

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
# gloo's threads are the last to run, as on a busy machine: they drop tensors when the process is about to end
for thread in map(int, os.listdir("/proc/self/task")):
    if thread != threading.get_native_id():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
usual = sys.excepthook
def slowly(*error):
    time.sleep(1.0)
    usual(*error)

sys.excepthook = slowly
SequenceParallel(SequenceParallelConfig(size=4))
"""
WORKING = """
import os, threading, time
from ds_seqpar.guards import process_exit
from ds_seqpar.guards.process_exit import wait_until_idle

done = []
def work(seconds):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write("pt_gloo_runloop")
    end = time.monotonic() + seconds
    started.set()
    while time.monotonic() < end:
        pass
    done.append(seconds)

for seconds, process_exit.IDLE_TIMEOUT in ((0.0, 60.0), (0.5, 60.0), (1000.0, 1.0)):
    started = threading.Event()
    threading.Thread(target=work, args=(seconds,), daemon=True).start()
    started.wait()
    began = time.monotonic()
    wait_until_idle()
    print(len(done), time.monotonic() - began)
"""


def test_the_end_waits_for_gloos_threads_but_not_for_ever():
    ran = subprocess.run([sys.executable, "-c", WORKING], capture_output=True, text=True, timeout=100, check=True)
    (idle, soon), (worked, later), (endless, _) = [map(float, line.split()) for line in ran.stdout.splitlines()]
    assert (idle, worked, endless) == (1, 2, 2)
    assert max(soon, later) < 50


BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.mark.parametrize(("ranks", "busy"), [(2, 0), pytest.param(6, 4, marks=pytest.mark.slow)])
def test_a_refusal_ends_every_rank_by_exit_code_1(ranks, busy, tmp_path):
    """It was SIGABRT, "terminate called without an active exception", on one rank of four. No rank ends before another
    has printed the sentence, for a launcher ends all ranks after the first."""
    (tmp_path / "refused.py").write_text(REFUSED)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        codes, printed, summaries = run_ranks(ranks, tmp_path / "refused.py")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert codes == [1] * ranks, printed
    said = "".join(printed)
    (teller,) = (rank for rank, text in enumerate(printed) if "Traceback" in text)
    assert f"size 4 on {ranks}" in printed[teller].splitlines()[-1]
    assert "terminate called" not in said
    assert said.count(f"size 4 on {ranks}") == said.count("Traceback") == 1
    assert said.count(f"ConfigError, see rank {teller}\n") == ranks - 1
    assert printed[teller].endswith(f"{summaries.pop(teller)}\n")
    assert summaries == [f"see rank {teller}"] * (ranks - 1)


def run_ranks(world, script):
    """Of every rank, in a file of its own: its exit code, what it printed, and what torchrun would say of it."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    files, ranks = [script.with_name(f"{rank}.txt") for rank in range(world)], []
    for rank, file in enumerate(files):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": f"{file}.json"}
        with file.open("w") as printed:
            given = {**os.environ, **shared, **own, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen([sys.executable, script], env=given, stdout=printed, stderr=printed))
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)
    assert any("ConfigError: " in file.read_text() for file in files)
    codes = [rank.wait(200) for rank in ranks]
    summaries = [json.loads(file.with_name(f"{file.name}.json").read_text())["message"]["message"] for file in files]
    return codes, [file.read_text() for file in files], summaries


DISAGREE = """
import torch, torch.distributed as dist
from ds_seqpar import SequenceParallel, SequenceParallelConfig

dist.init_process_group("gloo")
q = torch.ones(1, 8, 4, 8)
SequenceParallel(SequenceParallelConfig(size=2)).attention(q, q, q, scale=1.0 + dist.get_rank())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options", "copies"),
    [("deepspeed", [], 1), ("torchrun", [], 2), ("accelerate", ["--use_deepspeed"], 2)],
)
def test_a_launch_prints_the_sentence_once_and_torchs_launcher_in_its_summary(launcher, options, copies, tmp_path):
    (tmp_path / "disagree.py").write_text(DISAGREE)
    ran = scripts.launch(launcher, 2, tmp_path, *options, tmp_path / "disagree.py", threads=1)
    assert ran.failed
    assert ran.stderr.count("DisagreementError: all ranks must be given the same") == copies, ran.stderr
    assert ran.stderr.count("DisagreementError") == copies, ran.stderr


def prints(error, file):
    """What Python does with an error that nobody catches, and where a launcher lets a rank write."""
    before = os.dup(2)
    with file.open("a") as errors:
        os.dup2(errors.fileno(), 2)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
    os.dup2(before, 2)


CALLS = {
    # rank 2 is in a call of torch's own, as inside DeepSpeed
    "ours and torch's": lambda sp, module: (
        sp.gather(torch.ones(2), 0) if dist.get_rank() < 2 else dist.all_reduce(torch.ones(2))
    ),
    "a collective": lambda sp, module: dist.all_reduce(torch.ones(2)),
    "DDP": lambda sp, module: module(torch.ones(2)).sum().backward(),
}


def loses_a_rank(folder, call):
    """Rank 3 is killed while the others are in `call`."""
    sp, module = make(size=4), DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        CALLS[call](sp, module)
    except RuntimeError as error:
        prints(error, folder / "shared")
        os._exit(1)  # others wait for this rank
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("call", each_then_rest(["ours and torch's", "a collective"], ["DDP"]))
def test_a_killed_rank_is_told_once(call, tmp_path):
    """It was 635 lines of 4 ranks, and in torch's own calls gloo's text of a socket."""
    ended = on_ranks(4, loses_a_rank, tmp_path, call, check=False)
    assert [outcome[0] for outcome in ended] == ["Died"] * 4, ended
    lines = (tmp_path / "shared").read_text().splitlines()
    assert len(lines) <= 8, lines
    assert sum("Error: " in line for line in lines) == 1, lines
    assert "CommunicationError: " in lines[-1]
    assert "ours" in call or "the process of rank 3 is gone" in lines[-1], lines
    assert not any("site-packages" in line or "/ds_seqpar/" in line for line in lines)


@on_each_of(2)
def test_a_refusal_is_told_once_where_ranks_write_to_one_place(tmp_path, monkeypatch):
    """Also one on which they have not agreed. Elsewhere a rank names the one that says it."""
    make(size=2)
    me = dist.get_rank()
    for number, (places, whole) in enumerate((("00", False), ("01", False), ("00", True))):
        monkeypatch.setenv("DS_SEQPAR_TRACEBACK", "full" if whole else "")
        try:
            SequenceParallelConfig(size=f"2{number}")
        except ConfigError as error:
            prints(error, tmp_path / f"{number}{places[me]}")
        dist.barrier()
        compat.default_store().delete_key(process_exit.ENDED)
        dist.barrier()
        said = "".join((tmp_path / f"{number}{place}").read_text() for place in sorted({*places}))
        assert said.count("Traceback") == said.count(f"got '2{number}'\n") == 1, said
        assert said.count("see rank") == len({*places}) - 1, said
        assert ("settings.py" in said) == whole, said
        assert said.count("test_ends.py") == 1, said

"""A SIGTERM saves a checkpoint that a run goes on from; the files of examples/launch, for torchrun, slurm and
DeepSpeed's launcher."""

import base64
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_integration.trainer.preemption import PreemptionCallback
from tests import scripts
from tests.dist.ranks import is_one_sentence
from tests.hf.trainers import documents, end_workers, make, trained
from tests.launch import free_port, on_trainer_ranks
from tests.scripts import EXAMPLE, ROOT, save_texts

pytestmark = pytest.mark.usefixtures("compiled")
LAUNCH = ROOT / "examples" / "launch"
CONFIG = ROOT / "ds_configs" / "zero2_sp2_dp.json"
COMMANDS = {
    # slurm's: srun starts as many tasks as there are, each with its numbers, which is written down here
    "scontrol": 'echo localhost; echo "another node"',
    "srun": """shift
        for task in $(seq 0 $((SLURM_NTASKS - 1))); do
            SLURM_PROCID=$task SLURM_LOCALID=$task PATH=$TASKS:$PATH "$@"
        done""",
    "tasks/python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"; echo "$@"',
    "pdsh": 'printf "%s\\n" "$@"',
    "ssh": "hostname",  # by which DeepSpeed tries a node
}


ENDED = re.compile("'train_runtime'")


def environment(folder, commands=(), **more):
    """Of launched processes: they see no GPU, and find this Python, and what the cluster's commands would be."""
    for name in commands:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{COMMANDS[name]}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join(filter(None, [scripts.HIDDEN, str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", **more}


def words(folder, steps):
    given = {"output_dir": folder / "out", "data": folder / "texts", "seq_len": 64, "documents": 8, "eval_documents": 1}
    given |= {"max_steps": steps, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no", "deepspeed": CONFIG}
    given |= {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 1, "enable_jit_checkpoint": True}
    given |= {"dataloader_num_workers": 1}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def losses(text):
    return [float(loss) for loss in re.findall(r"\{'loss': '?([\d.]+)", text)]


def signalled(pid):
    """Sends SIGTERM as a launcher does, from another process."""
    subprocess.run(["kill", "-TERM", "--", str(pid)], check=True, start_new_session=True)


class Signal(TrainerCallback):
    """Sends SIGTERM to the process group of rank 1 alone, in its second step: the workers of its loaders are in it."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == 1:
            assert len(multiprocessing.active_children()) == 2
            signalled(-os.getpgrp())


WORKERS = {"num_workers": 1, "persistent_workers": True}


def preempted(folder):
    """The losses up to the signal, and the checkpoint's steps; those of the run that goes on, and of an undisturbed
    one; whether the handler is the one before."""
    given, before = {"save_strategy": "no", "enable_jit_checkpoint": True}, signal.getsignal(signal.SIGTERM)

    def run(name, steps, resume=None, callbacks=(), **more):
        parts = {"callbacks": list(callbacks), "eval_dataset": documents(1)}
        trainer = make(f"{folder}/{name}", 2, {"size": 2}, max_steps=steps, parts=parts, **given, **more)
        trainer.args.lr_scheduler_type = "constant"
        return trained(trainer, resume_from_checkpoint=resume)["loss"]

    group = os.getpgrp()
    os.setpgid(0, 0)
    workers = {f"dataloader_{name}": x for name, x in WORKERS.items()}
    seen = run("told", 100, callbacks=[Signal()], eval_on_start=True, **workers)
    os.setpgid(0, group)
    end_workers()
    dist.barrier()
    checkpoints = [path.name for path in Path(folder, "told").glob("checkpoint-*")]
    again = run("again", 3, f"{folder}/told/checkpoint-2")
    return seen, checkpoints, again, run("whole", 3), signal.getsignal(signal.SIGTERM) == before


def test_a_signal_to_one_rank_saves_the_same_step_on_all(tmp_path):
    """What goes on is what an undisturbed run is."""
    for seen, checkpoints, again, whole, handler in on_trainer_ranks(2, preempted, tmp_path):
        assert checkpoints == ["checkpoint-2"]
        assert (seen, again) == (whole[:2], whole)
        assert handler


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        return os.environ["WORKER"]


def name_worker(number):
    os.environ["WORKER"] = f"worker {number}"


def read_after_a_signal(process, batches):
    """torch raises at once, or with the next batch."""
    signalled(process)
    list(batches)


def test_workers_ignore_a_signal_only_while_training_listens():
    callback, others = PreemptionCallback(None), {*multiprocessing.active_children()}
    loader = DataLoader(Named(), 1, num_workers=1, worker_init_fn=name_worker)
    for _ in range(2):
        callback.guard(loader)
    batches = iter(loader)
    (worker,) = {*multiprocessing.active_children()} - others
    with callback.listening():
        assert next(batches) == ["worker 0"]
        signalled(worker.pid)
        assert [next(batches) for _ in range(9)] == [["worker 0"]] * 9
    with pytest.raises(RuntimeError, match=f"pid.*{worker.pid}"):
        read_after_a_signal(worker.pid, batches)


def by_torchrun(folder):
    """The losses of a run by two agents of torchrun. The second is sent SIGTERM once two steps are logged; the first,
    which would wait for it, when training has ended."""
    given = environment(folder, HEAD="127.0.0.1", NODES="2", RANKS="1", PORT=str(free_port()))
    command = [LAUNCH / "torchrun.sh", EXAMPLE, *words(folder, 10_000)]
    logs = [folder / "node0.log", folder / "node1.log"]
    agents = [
        subprocess.Popen(command, cwd=folder, env=given, stdout=log.open("w"), stderr=subprocess.STDOUT) for log in logs
    ]
    try:
        for agent, has_come in ((agents[1], lambda text: len(losses(text)) >= 2), (agents[0], ENDED.search)):
            text, until = "", time.monotonic() + 200
            while not has_come(text) and time.monotonic() < until:
                time.sleep(0.2)
                text = "".join(log.read_text() for log in logs)
            assert has_come(text), text[-3000:]
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait(60)
    finally:
        for agent in agents:
            agent.kill()
    return losses(text)


@pytest.mark.slow
def test_a_signal_to_one_node_saves_by_torchrun(tmp_path):
    save_texts(tmp_path / "texts")
    seen = by_torchrun(tmp_path)
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    steps = int(checkpoint.name.removeprefix("checkpoint-"))
    assert steps == json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == len(seen) < 10_000


@pytest.mark.parametrize("restarts", [0, 1])
def test_slurms_script_starts_a_rank_a_task_and_goes_on_when_it_is_queued_again(restarts, tmp_path):
    given = environment(
        tmp_path, ("srun", "scontrol", "tasks/python"), SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", MASTER_PORT="123",
        SLURM_JOB_NODELIST="node[1-2]", SLURM_RESTART_COUNT=str(restarts), TASKS=str(tmp_path / "tasks"),
    )  # fmt: skip
    ran = subprocess.run([LAUNCH / "slurm.sh", EXAMPLE, "--x", "1"], env=given, capture_output=True, text=True)
    resume = " --resume_from_checkpoint last" * restarts
    expected = [line for rank in (0, 1) for line in (f"{rank} {rank} 2 2 localhost 123", f"{EXAMPLE} --x 1{resume}")]
    assert ran.stdout.splitlines() == expected, ran.stderr


def test_the_hostfile_and_scripts_are_what_launchers_read(tmp_path):
    for script in LAUNCH.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        assert os.access(script, os.X_OK)
    given = environment(tmp_path, ("pdsh", "ssh"))
    command = [LAUNCH / "pdsh.sh", EXAMPLE, "--deepspeed", CONFIG]
    ran = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "node1,node2" in ran.stdout.splitlines()
    (world,) = set(re.findall(r"--world_info=(\S+)", ran.stdout))
    assert json.loads(base64.urlsafe_b64decode(world)) == {"node1": [*range(8)], "node2": [*range(8)]}
    assert "--master_addr=node1" in ran.stdout
    assert ran.stdout.splitlines()[-3:] == [str(EXAMPLE), "--deepspeed", str(CONFIG)]


def test_a_node_that_does_not_know_the_head_is_told(tmp_path):
    given = {name: value for name, value in environment(tmp_path).items() if name != "HEAD"}
    ran = subprocess.run([LAUNCH / "torchrun.sh", EXAMPLE], env=given, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0
    assert "HEAD: the name of one node" in ran.stderr
    assert is_one_sentence(ran.stderr.strip())

"""The files of examples/launch: two agents of torchrun, one of which is told to end; slurm's script, which goes on from
the checkpoint that they left; and what DeepSpeed's launcher makes of the hostfile."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import scripts
from tests.dist.ranks import is_one_sentence
from tests.hf.test_trainer_scripts import EXAMPLE, ROOT, save_texts
from tests.launch import free_port

pytestmark = pytest.mark.usefixtures("compiled")
LAUNCH = ROOT / "examples" / "launch"
CONFIG = ROOT / "ds_configs" / "trainer_zero2_sp2dp.json"
# what slurm has on a machine: srun starts as many tasks as there are, each with its numbers
COMMANDS = {
    "scontrol": 'echo localhost; echo "another node"',
    "srun": """shift
        for task in $(seq 0 $((SLURM_NTASKS - 1))); do
            SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!)
        done
        for task in "${tasks[@]}"; do wait "$task" || exit 1; done""",
    "pdsh": 'printf "%s\\n" "$@"',
    "ssh": "hostname",  # by which DeepSpeed tries a node
}


ENDED = re.compile("'train_runtime'")


def environment(folder, commands=(), **more):
    """Of launched processes: they see no GPU, and find this Python, and what the cluster's commands would be."""
    for name in commands:
        (folder / name).write_text(f"#!/bin/bash\n{COMMANDS[name]}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join(filter(None, [scripts.HIDDEN, str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", **more}


def words(folder, steps):
    given = {"output_dir": folder / "out", "data": folder / "texts", "seq_len": 64, "documents": 8, "eval_documents": 1}
    given |= {"max_steps": steps, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no", "deepspeed": CONFIG}
    given |= {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 1, "enable_jit_checkpoint": True}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def losses(text):
    return [float(loss) for loss in re.findall(r"\{'loss': '?([\d.]+)", text)]


def preempted(folder):
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


def test_a_signal_to_one_node_saves_and_slurm_goes_on(tmp_path):
    """Ranks save the same step, though one alone was told; what goes on is what an undisturbed run is."""
    save_texts(tmp_path / "texts")
    seen = preempted(tmp_path)
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    steps = int(checkpoint.name.removeprefix("checkpoint-"))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert steps == state["global_step"] == len(seen) < 10_000
    given = environment(
        tmp_path, ("srun", "scontrol"), SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_NODELIST="node[1-2]",
        SLURM_RESTART_COUNT="1", MASTER_PORT=str(free_port()),
    )  # fmt: skip
    command = [LAUNCH / "slurm.sh", EXAMPLE, *words(tmp_path, steps + 1)]
    again = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-3000:]
    whole = scripts.run(2, tmp_path, EXAMPLE, *words(tmp_path, steps + 1))
    assert not whole.failed, whole.stderr[-3000:]
    expected = losses(whole.stdout)
    assert len(expected) == steps + 1
    assert seen + losses(again.stdout) == pytest.approx(expected, rel=1e-3)  # which are printed with 4 digits


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

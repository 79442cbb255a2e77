"""Runs training scripts, either on forked ranks that behave like a launcher's processes, or with a launcher itself."""

import contextlib
import dataclasses
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ds_seqpar.base.errors import SeqParError
from tests.launch import free_port, on_ranks

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "finetune_trainer.py"
# a folder on the path of launched processes: it hides GPUs from them
HIDDEN = str(Path(__file__).with_name("hidden"))
# launcher -> its module, and its options up to the number of ranks
LAUNCHERS = {
    "deepspeed": ["deepspeed.launcher.runner", "--master_port", "PORT", "--num_gpus"],
    "accelerate": ["accelerate.commands.launch", "--main_process_port", "PORT", "--num_processes"],
    "torchrun": ["torch.distributed.run", "--master-port", "PORT", "--nproc-per-node"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """The outcome of a script. failed: whether a rank ended with an exit code other than 0."""

    failed: bool
    stdout: str
    stderr: str


def launch(launcher, ranks, folder, *words, threads=None):
    """A `Ran` of the launcher, with the script and arguments in `words`, which may begin with more launcher options."""
    port = str(free_port())  # other tests may be launching too
    options = [port if word == "PORT" else word for word in LAUNCHERS[launcher]]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join([HIDDEN, *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-m", *options, str(ranks), *map(str, words)],
        cwd=folder, capture_output=True, text=True, timeout=300,
        env={**environment, **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
    )  # fmt: skip
    return Ran(failed=ran.returncode != 0, stdout=ran.stdout, stderr=ran.stderr)


def run(ranks, folder, script, *arguments, environment=None, timeout=200):
    """A `Ran` of the script on forked ranks: 4 launched ranks take half a minute of imports, forked ranks none. stdout
    and stderr are those of all ranks, one after another. environment: what a launcher sets, or None for what it does
    not set; LOCAL_RANK in arguments becomes the rank."""
    words = [*map(str, arguments)]
    arguments = str(folder), str(script), words, environment or {}
    outcomes = on_ranks(ranks, as_process, *arguments, timeout=timeout, patience=None)
    failed, stdout, stderr = zip(*outcomes, strict=True)
    return Ran(failed=any(failed), stdout="".join(stdout), stderr="".join(stderr))


def as_process(folder, script, arguments, environment):
    """(whether it failed, stdout, stderr) of a script in this rank's process; it fails with SystemExit or one of our
    errors. Other exceptions are raised."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")  # not the user's
    out, err, failed = io.StringIO(), io.StringIO(), False
    sys.argv = [script, *(word.replace("LOCAL_RANK", os.environ["LOCAL_RANK"]) for word in arguments)]
    sys.path.insert(0, str(Path(script).parent))
    for name, value in environment.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            failed = end.code not in (None, 0)
            print(end.code if isinstance(end.code, str) else "", file=err)
        except SeqParError as error:
            failed = True
            print(f"rank {os.environ['RANK']}: {error}", file=err)
    return failed, out.getvalue(), err.getvalue()


def set_by_accelerate(ranks, *options):
    """What `accelerate launch` sets for the processes it starts: it is stopped before it starts any."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    words, found, before = [*options, "--num_processes", str(ranks), "script.py"], {}, dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.run.run", lambda args: found.update(os.environ))
        launch_command(launch_command_parser().parse_args(words))
    return {name: value for name, value in found.items() if before.get(name) != value}


def save_texts(folder):
    """A few short ones: all of Python's own take seconds to be listed and read, on every rank."""
    folder.mkdir()
    for number in range(15):
        (folder / f"{number}.txt").write_text(f"document {number} says so. " * (4 + number % 7))

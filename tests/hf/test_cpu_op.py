"""The lock of DeepSpeed's CPU op: one that nobody holds is removed, one that is held is waited for, aloud."""

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ds_seqpar
import hf_integration
from ds_seqpar.deepspeed.cpu_launch import op_lock
from tests.hf.llama import llama, settings
from tests.launch import on_ranks
from tests.words import missing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs leases of files")
HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(60)"


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Where the lock is in a folder of extensions of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    return op_lock.lock_file()


def held(lock):
    """A process that holds the lock as torch's does while it compiles."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def aged(lock):
    """The lock as if it were a minute old."""
    past = time.time() - 60
    os.utime(lock, (past, past))


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lock_of_a_process_that_is_gone_is_removed(lock):
    """Every later start waited for ever, without a word."""
    end(held(lock))
    aged(lock)
    said = []
    op_lock.wait_for_compiler(say=said.append)
    assert not lock.exists()
    (sentence,) = said
    assert missing(sentence, f"removed {lock}", "ended") == []


def test_a_lock_that_is_held_is_waited_for_aloud(lock):
    process, said = held(lock), []
    aged(lock)

    def say(sentence):
        said.append(sentence)
        assert lock.exists()
        lock.unlink()  # as its owner does when it is done

    try:
        op_lock.wait_for_compiler(patience=0.5, say=say)
    finally:
        end(process)
    (sentence,) = said
    assert missing(sentence, "waiting", "deepspeed_shm_comm", f"remove {lock}") == []


@pytest.fixture(scope="module")
def compiled_folder(compiled):
    """Where the op was compiled for all tests."""
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], op_lock.OP)


def test_initialize_goes_on_after_an_interrupted_run(compiled_folder, lock):
    shutil.copytree(compiled_folder, lock.parent, dirs_exist_ok=True)
    end(held(lock))
    aged(lock)
    assert on_ranks(2, started_in, str(lock.parent.parent), timeout=60) == [2, 2]


def started_in(folder):
    """A second start goes on while another job compiles: this one has loaded the op."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    engine, *_ = ds_seqpar.initialize(model=llama(), config=settings({"size": 2}, "2", 1, 1))
    os.open(op_lock.lock_file(), os.O_CREAT)
    op_lock.prepare_start()  # as a Trainer does
    ds_seqpar.initialize(model=llama(), config=settings({"size": 2}, "2", 1, 1))
    return engine.sequence_parallel.size


def test_python_m_ds_seqpar_prepare_goes_on_after_an_interrupted_run(compiled_folder, lock):
    shutil.copytree(compiled_folder, lock.parent, dirs_exist_ok=True)
    end(held(lock))
    aged(lock)
    ((code, stdout, stderr),) = on_ranks(1, prepared, patience=None, timeout=300)
    assert code == 0, stderr
    assert f"ds_seqpar: removed {lock}" in stderr
    assert "DeepSpeed's CPU op is compiled" in stdout


def prepared():
    """(exit code, stdout, stderr) of `python -m ds_seqpar prepare` in this rank's process."""
    sys.argv = ["ds_seqpar", "prepare"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_module("ds_seqpar", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code, out.getvalue(), err.getvalue()


def test_a_start_that_will_compile_says_so_and_one_that_will_not_is_silent(compiled_folder, lock, caplog):
    op_lock.prepare_start()
    assert missing(caplog.text, "deepspeed_shm_comm is not compiled", "minutes", str(lock.parent), "prepare") == []
    caplog.clear()
    shutil.copytree(compiled_folder, lock.parent, dirs_exist_ok=True)
    op_lock.prepare_start()
    assert "compiled" not in caplog.text


def test_what_takes_long_says_how_long_it_has_been(capsys):
    with op_lock.telling_time("compiling", every=0.05):
        time.sleep(0.3)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert {*lines} == {"compiling: 0 s"}
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_prepare_compiles_aloud(lock):
    words = [sys.executable, "-m", "ds_seqpar", "prepare"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (ran.returncode, lock.with_name(f"{op_lock.OP}.so").exists()) == (0, True), ran.stderr
    assert missing(ran.stderr + ran.stdout, "is not compiled", "compiling: 10 s", "CPU op is compiled") == []


def test_what_deepspeed_compiles_stays_with_the_environment(tmp_path, monkeypatch):
    """Launchers pass on no variable that `make` sets: each rank finds the folder when it imports the package."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    asked = "import os, ds_seqpar.deepspeed.cpu_launch.op_lock; print(os.environ['TORCH_EXTENSIONS_DIR'])"
    words = [sys.executable, "-c", asked]
    own = Path(sys.prefix, "torch_extensions")
    assert subprocess.run(words, env=environment, capture_output=True, text=True).stdout.strip() == str(own)
    ours = subprocess.run(words, env={**environment, "TORCH_EXTENSIONS_DIR": "/own"}, capture_output=True, text=True)
    assert ours.stdout.strip() == "/own"
    assert hf_integration.op_lock is op_lock
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    op_lock._use_environment()
    assert "TORCH_EXTENSIONS_DIR" not in os.environ

"""Runs drawn commands, each in a process of its own that is forked from a server with everything imported, and judges
what they said: an answer and code 0, or one sentence and code 2."""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

from tests.dist.ranks import is_one_sentence
from tests.fuzz.commands import expanded
from tests.launch import PRELOAD

MEMORY = 2 * 2**30  # bytes beyond what the imports take
SECONDS = 30  # of processor time, and twice that on the clock: only a guard against hanging


def run(case):
    """(exit code, stdout, stderr). A process that was ended by a signal has minus its number."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in case["files"].items():
            path = Path(folder, "work", name)
            (path if text is None else path.parent).mkdir(parents=True, exist_ok=True)
            if text is not None:
                path.write_bytes(expanded(text).encode("utf-8", "surrogateescape"))
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        process = context.Process(target=_process, args=(case["words"], case["env"], folder))
        process.start()
        process.join(2 * SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode, *(path.read_text("utf-8", "backslashreplace") for path in outputs)


def _process(words, env, folder):
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY), number)
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors=getattr(sys, name).errors))
    os.chdir(Path(folder, "work"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update({name: expanded(value) for name, value in env.items()})
    from ds_seqpar.__main__ import main

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        code = main([expanded(word) for word in words])
    except SystemExit as end:  # argparse's
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def verdict(case, code, out, err):
    """(what it came to, None or a fault)."""
    told = f"python -m ds_seqpar {case['words']} ended with code {code}\n{err[-3000:]}"
    if code == 0:
        if err or not out:
            return "failed", f"{told}\nan answer is on stdout, alone"
        if "--json" in case["words"] and "--help" not in case["words"]:
            try:
                json.loads(out, parse_constant=float.fromhex)  # which takes no NaN for a number
            except ValueError as error:
                return "failed", f"{told}\nno JSON is printed: {error}"
        return f"answered, {case['words'][0]}", None
    if code == 2 and err.startswith("usage: "):
        return "refused, argparse", None
    sentence = err.removeprefix("ds-seqpar: ").removesuffix("\n")
    if code == 2 and err.startswith("ds-seqpar: ") and is_one_sentence(sentence) and len(sentence) < 2000:
        return f"refused, {case['words'][0]}", None
    return "failed", f"{told}\nneither an answer and code 0, nor one sentence and code 2"


def try_one(case):
    return verdict(case, *run(case))

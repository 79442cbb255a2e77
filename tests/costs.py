"""The processor time of a test run, by test file and by cause.

    python -m tests.costs -m "not slow" -n 2 tests        # all of pytest's own options

Ranks are forked from a server, so the shell's `time` does not count them. Here each rank's time is read while the rank
exists. As a pytest plugin (`-p tests.costs`, with TESTS_COSTS set to a folder) this module collects without the table.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

FOLDER = "TESTS_COSTS"  # environment variable: the folder in which every process writes its costs
CAUSES = {
    "imports": "what test workers import",
    "rank servers": "what servers of ranks import, and their part of forks",
    "collection": "pytest, making the list of tests",
    "launches": "processes that tests start, launchers and their ranks too",
    "forks": "ranks, until they run",
    "rendezvous": "ranks, making the group of all ranks",
    "cases on ranks": "ranks, in what tests hand them",
    "dense attention": "workers, in the dense attention that others are compared with",
    "kernels": "workers, in attention kernels",
    "hypothesis": "workers, in the rest of tests that hypothesis draws",
    "the rest of tests": "workers",
}
TICK = os.sysconf("SC_CLK_TCK")

found: dict[str, Counter] = {}  # test -> cause -> seconds, for this worker
_inside = Counter()  # cause -> seconds in watched functions


def seconds_of(pid):
    """The processor seconds of a running process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def add(test, cause, seconds):
    found.setdefault(test, Counter())[cause] += seconds


def rank_took(pid, phases, before=None):
    """Called by `tests.launch` after a test's call, with a rank's seconds so far. phases: the seconds until it ran, and
    until it had a group. before: what this function returned after the previous call."""
    started, together = phases
    if before is None:
        add(_now.test, "forks", started)
        add(_now.test, "rendezvous", together - started)
        before = together
    now = seconds_of(pid)
    add(_now.test, "cases on ranks", now - before)
    return now


class _Now:
    """The current test, and whether hypothesis draws its cases."""

    test, draws = "(before and after)", False


_now = _Now()


def _watch(owner, name, cause):
    """Adds the time of a function's calls to `_inside`, except for inner calls of the same kind."""
    function, depth = getattr(owner, name), [0]

    def timed(*args, **kwargs):
        began = time.process_time()
        depth[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth[0] -= 1
            if not depth[0]:
                _inside[cause] += time.process_time() - began

    setattr(owner, name, timed)


def pytest_configure(config):
    if FOLDER not in os.environ or (config.getoption("numprocesses", None) and not hasattr(config, "workerinput")):
        return
    from tests import oracle

    add(_now.test, "imports", time.process_time())
    _watch(oracle, "attention", "dense attention")
    for kernel in _kernels():
        _watch(kernel, "forward", "kernels")
        _watch(kernel, "backward", "kernels")
    config.pluginmanager.register(_Plugin(), "costs of a worker")


def _kernels():
    from ds_seqpar.core.runtime import kernels

    return [type(kernel) for kernel in kernels.KERNELS.values()]


class _Plugin:
    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        began = time.process_time()
        try:
            return (yield)
        finally:
            add(_now.test, "collection", time.process_time() - began)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        _now.test = item.nodeid
        _now.draws = hasattr(getattr(item, "obj", None), "hypothesis")
        began, children = time.process_time(), _children()
        _inside.clear()
        try:
            return (yield)
        finally:
            rest = time.process_time() - began - sum(_inside.values())
            for cause, seconds in _inside.items():
                add(_now.test, cause, seconds)
            add(_now.test, "hypothesis" if _now.draws else "the rest of tests", rest)
            add(_now.test, "launches", _children() - children)
            _now.test = _Now.test

    def pytest_sessionfinish(self):
        from multiprocessing import forkserver

        server = forkserver._forkserver._forkserver_pid
        if server is not None:
            add(_now.test, "rank servers", seconds_of(server))
        Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(found))


def _children():
    spent = os.times()
    return spent.children_user + spent.children_system


def table(folder, tests=40):
    """The costs by cause and by file, and the most expensive tests."""
    total, by_file, by_test = Counter(), {}, {}
    for path in Path(folder).glob("*.json"):
        for test, causes in json.loads(path.read_text()).items():
            total.update(causes)
            for rows, name in ((by_file, test.partition("::")[0]), (by_test, test)):
                rows.setdefault(name, Counter()).update(causes)
    lines = [f"{seconds:>9.1f} s  {cause}: {CAUSES[cause]}" for cause, seconds in total.most_common()]
    lines += [f"{sum(total.values()):>9.1f} s  in all", "", "by file"]
    lines += [*_rows(by_file), "", f"the {tests} tests that take most", *_rows(by_test)[:tests]]
    return "\n".join(lines)


def _rows(counts):
    """Lines, the most expensive first, with the causes that matter."""
    lines = []
    for name, causes in sorted(counts.items(), key=lambda item: -sum(item[1].values())):
        words = ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in causes.most_common(3) if seconds >= 0.05)
        lines.append(f"{sum(causes.values()):>9.1f} s  {name}: {words}")
    return lines


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        code = pytest.main(["-p", "tests.costs", *sys.argv[1:]])
        print(table(folder))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())

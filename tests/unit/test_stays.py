"""How far q travels through the files: few stays, and never up to a file that imports the one that it comes from.

A stay is a visit of a file by a value on its way through calls, returns to a file included; a climb is a call into a
file that imports the caller's file, directly or not."""

import json
import subprocess
import sys

from tests.unit import test_imports

MOST = {"first": 15, "second": 12}  # stays of q in the first call of a shape, and in the next one
WAY = """
import json, sys
import torch, torch.distributed as dist
import ds_seqpar

def visit(frame, event, _):
    if event != "call" or not carries(frame) or not (file := ours(frame)) or frame.f_code.co_name[0] == "<":
        return
    back = frame.f_back
    while back is not None and (not ours(back) or back.f_code.co_name[0] == "<"):
        back = back.f_back
    calls.append((ours(back) if back else "", file))

def ours(frame):
    name = frame.f_globals.get("__name__", "")
    return name if name.startswith("ds_seqpar.") else ""

def carries(frame):
    given = [y for x in frame.f_locals.values() for y in (x.values() if isinstance(x, dict) else
                                                          x if isinstance(x, (tuple, list)) else (x,))]
    return any(isinstance(x, torch.Tensor) and x.data_ptr() == q.data_ptr() for x in given)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sp, found = ds_seqpar.SequenceParallel(), {}
for name in ("first", "second"):
    q, k, v = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3))
    calls = found[name] = []
    sys.setprofile(visit)
    sp.attention(q, k, v)
    sys.setprofile(None)
print(json.dumps(found))
"""


def reached(name):
    """All that a module imports, directly or not."""
    found, todo = set(), [name]
    while todo:
        new = {x for x in test_imports.loaded()[todo.pop()] if x in test_imports.MODULES} - found
        found |= new
        todo += new
    return found


def test_q_comes_by_few_files_and_never_climbs():
    done = subprocess.run(
        [sys.executable, "-c", WAY], cwd=test_imports.ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for name, calls in json.loads(done.stdout).items():
        ends = [file for call in calls for file in call if file]
        stays = [file for before, file in zip(["", *ends], ends, strict=False) if file != before]
        assert 8 < len(stays) <= MOST[name], stays
        assert [call for call in calls if call[0] and call[0] != call[1] and call[0] in reached(call[1])] == []

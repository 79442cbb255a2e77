"""How far q, and the configuration, travel through the files: few stays, and hardly ever up to a file that imports the
one that they come from.

A stay is a visit of a file by a value on its way through calls, returns to a file included; a climb is a call into a
file that imports the caller's file, directly or not."""

import json
import subprocess
import sys

import pytest

from tests.unit import test_imports

WAY = """
import json, sys
import torch, torch.distributed as dist
import ds_seqpar
found = {}

def visit(frame, event, _):
    if event != "call" or not carries(frame) or not (file := ours(frame)) or frame.f_code.co_name[0] == "<":
        return
    back = frame.f_back
    while back is not None and (not ours(back) or back.f_code.co_name[0] == "<"):
        back = back.f_back
    calls.append((ours(back) if back else "", file))

def ours(frame):
    name = frame.f_globals.get("__name__", "")
    return name if name.startswith(("ds_seqpar.", "hf_integration.")) else ""

def carries(frame):
    given = [y for x in frame.f_locals.values() for y in (x.values() if isinstance(x, dict) else
                                                          x if isinstance(x, (tuple, list)) else (x,))]
    return any(map(is_it, [*frame.f_locals.values(), *given]))

def follow(name, function, *args, **kwargs):
    global calls
    calls = found[name] = []
    sys.setprofile(visit)
    function(*args, **kwargs)
    sys.setprofile(None)
"""
Q = """
def is_it(x):
    return isinstance(x, torch.Tensor) and x.data_ptr() == q.data_ptr()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sp = ds_seqpar.SequenceParallel()
for name in ("first", "second"):
    q, k, v = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3))
    follow(name, sp.attention, q, k, v)
print(json.dumps(found))
"""
CONFIGURATION = """
import hf_integration
from transformers import LlamaConfig, LlamaForCausalLM

def is_it(x):  # the DeepSpeed JSON, its section, and what is made of that
    return isinstance(x, ds_seqpar.SequenceParallelConfig) or (
        isinstance(x, dict) and (x == section or x.get("sequence_parallel") == section))

section = {"size": 1, "ulysses": 1}
optimizer = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "optimizer": optimizer}
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
follow("initialize", ds_seqpar.initialize, model=model, model_parameters=list(model.parameters()),
       config={**config, "sequence_parallel": section})
print(json.dumps(found))
"""
# a way -> its script; of each call on it, in turn, the most stays; the most climbs
WAYS = {"q": (Q, (15, 12), 0), "the configuration": (CONFIGURATION, (40,), 5)}


def reached(name):
    """All that a module imports, directly or not."""
    found, todo = set(), [name]
    while todo:
        new = {x for x in test_imports.loaded()[todo.pop()] if x in test_imports.MODULES} - found
        found |= new
        todo += new
    return found


@pytest.mark.parametrize("name", WAYS)
def test_it_comes_by_few_files_and_seldom_climbs(name):
    script, most, climbs = WAYS[name]
    done = subprocess.run(
        [sys.executable, "-c", WAY + script], cwd=test_imports.ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for calls, stays_at_most in zip(found.values(), most, strict=True):
        ends = [file for call in calls for file in call if file]
        stays = [file for before, file in zip(["", *ends], ends, strict=False) if file != before]
        assert 8 < len(stays) <= stays_at_most, stays
        climbed = [call for call in calls if call[0] and call[0] != call[1] and call[0] in reached(call[1])]
        assert len(climbed) <= climbs, climbed

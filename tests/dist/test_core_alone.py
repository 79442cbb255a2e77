"""The core computes attention, forward and backward, in a package that has the core and the base alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ds_seqpar"
PROGRAM = """
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import scaled_dot_product_attention

SIZE, LOCAL = 4, 8
TOKENS = SIZE * LOCAL


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    from ds_seqpar.core.compiler.sharding.masks import Mask
    from ds_seqpar.core.settings import SequenceParallelConfig

    for settings in ({"schedule": "ring", "ulysses": 2}, {"schedule": "mesh", "ulysses": 1}):
        config = SequenceParallelConfig(size=SIZE, layout="contiguous", **settings).resolve(SIZE, (4, 2))
        for mask in (Mask(), Mask(window=5), Mask(documents=(0, 5, 19)), Mask(window=3, documents=(0, 11))):
            error = compare(rank, config, mask)
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(f"{config.schedule}, {mask}: {error.item()}", flush=True)
    dist.destroy_process_group()


def compare(rank, config, mask):
    from ds_seqpar.core.runtime import attention, groups
    from ds_seqpar.core.runtime.admit import AttentionOptions, admitted_call
    from ds_seqpar.core.runtime.runtime import Runtime
    from ds_seqpar.core.runtime.transport import TorchComm

    topology = config.topology(SIZE)
    made = groups.create(topology, rank, groups.control_world())
    runtime = Runtime(config, topology, made.cp_rank, TorchComm(made), topology.index(rank, "ulysses"))
    torch.manual_seed(0)
    whole = [torch.randn(1, TOKENS, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    number = topology.index(rank, "ulysses", *topology.cp_axes)
    mine = slice(number * LOCAL, (number + 1) * LOCAL)
    local = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
    out, _ = attention.attention(admitted_call(runtime, tuple(local), AttentionOptions(mask, None, None, True)))
    out.square().sum().backward()
    bounds = [mask.bounds(p) for p in range(TOKENS)]
    seen = torch.tensor([[lo <= key < hi for key in range(TOKENS)] for lo, hi in bounds])
    heads_first = [x.transpose(1, 2) for x in whole]
    expected = scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    expected.square().sum().backward()
    pairs = [(out, expected), *((x.grad, full.grad) for x, full in zip(local, whole))]
    dist.barrier()
    made.close()
    return torch.stack([(found.detach() - x[:, mine]).abs().max() / x.abs().max() for found, x in pairs]).max().detach()


if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), SIZE, start_method="fork")  # with the torch that is imported here
"""


def test_the_core_alone_computes_attention_on_four_ranks(tmp_path):
    for folder in ("core", "base"):
        shutil.copytree(PACKAGE / folder, tmp_path / "ds_seqpar" / folder)
    (tmp_path / "ds_seqpar" / "__init__.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "program.py", str(tmp_path)]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, timeout=300, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    errors = dict(line.rsplit(": ", 1) for line in ended.stdout.splitlines())
    assert len(errors) == 8  # ring and mesh with four masks each
    assert all(float(error) < 1e-12 for error in errors.values()), errors  # which a NaN is not

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


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    from ds_seqpar.core.compiler.sharding.masks import CAUSAL
    from ds_seqpar.core.runtime import attention, groups
    from ds_seqpar.core.runtime.admit import AttentionOptions, admitted_call
    from ds_seqpar.core.runtime.runtime import Runtime
    from ds_seqpar.core.runtime.transport import TorchComm
    from ds_seqpar.core.settings import SequenceParallelConfig

    config = SequenceParallelConfig(size=SIZE, ulysses=2, schedule="ring", layout="contiguous").resolve(SIZE, (4, 2))
    topology = config.topology(SIZE)
    made = groups.create(topology, rank, groups.control_world())
    runtime = Runtime(config, topology, made.cp_rank, TorchComm(made), topology.index(rank, "ulysses"))
    torch.manual_seed(0)
    whole = [torch.randn(1, SIZE * LOCAL, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    local = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
    out, _ = attention.attention(admitted_call(runtime, tuple(local), AttentionOptions(CAUSAL, None, None, True)))
    out.square().sum().backward()
    heads_first = [x.transpose(1, 2) for x in whole]
    expected = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected[:, mine])
    for x, full in zip(local, whole):
        torch.testing.assert_close(x.grad, full.grad[:, mine])
    dist.barrier()
    made.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), SIZE)
"""


def test_the_core_alone_computes_attention_on_four_ranks(tmp_path):
    for folder in ("core", "base"):
        shutil.copytree(PACKAGE / folder, tmp_path / "ds_seqpar" / folder)
    (tmp_path / "ds_seqpar" / "__init__.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "program.py", str(tmp_path)], cwd=tmp_path, env=environment, check=True, timeout=300
    )

"""The scripts of docs/masks.md run as they stand there, and the sentence that it quotes is the one that is said."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import Mask, SeqParError, SequenceParallelConfig
from ds_seqpar.running import virtual
from tests.launch import on_ranks

MASKS = (Path(__file__).resolve().parents[2] / "docs" / "masks.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", MASKS, re.S)


def as_script(path):
    """Runs it as a launcher's process would; returns the output that it ends with."""
    dist.destroy_process_group()  # it makes its own
    return runpy.run_path(str(path), run_name="__main__")["out"].detach()


def test_scripts_run(tmp_path):
    tokens = {}
    for script in SCRIPTS:
        name = re.match(r"# (\S+\.py): torchrun --nproc-per-node 4 \1\n", script)[1]
        (tmp_path / name).write_text(script, encoding="utf-8")
        outs = on_ranks(4, as_script, tmp_path / name)
        assert all(out.isfinite().all() for out in outs)
        tokens[name] = [out.shape[1] for out in outs]
    assert tokens == {"masks.py": [128] * 4, "packed.py": [1024] * 4}


def test_distflash_says_what_is_quoted():
    q = torch.zeros(1, 8, 2, 4)
    config = SequenceParallelConfig(size=4, ulysses=1, schedule="distflash")
    with pytest.raises(SeqParError) as refused:
        virtual.attention(config, q, q, q, mask=Mask(causal=False, window=3))
    assert f'"{refused.value}"' in " ".join(MASKS.split())

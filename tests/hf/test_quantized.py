"""QLoRA: weights of four bits under adapters give what the plain Trainer gives with them."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests import scripts

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="waits for bitsandbytes, which `make test-all` installs"
)
def test_a_trainer_with_qlora_is_the_plain_trainer_with_it(tmp_path, monkeypatch):
    """Under ZeRO-2 with tiles and checkpoints, and under ZeRO-3."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    found = {}
    for ranks in (1, 2):
        ran = scripts.launch("torchrun", ranks, tmp_path, ROOT / "tests" / "hf" / "qlora_runs.py", tmp_path, threads=1)
        assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-4000:]
        found[ranks] = json.loads((tmp_path / f"{ranks}.json").read_text())
    for model, (plain,) in found[1].items():
        assert len(found[2][model]) == 2
        for logs in found[2][model]:
            for name in ("loss", "grad_norm"):
                assert len(logs[name]) == 2
                assert logs[name] == pytest.approx(plain[name], rel=1e-5), (model, name)

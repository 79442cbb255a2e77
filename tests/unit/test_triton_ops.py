"""Triton's kernels: exact in its interpreter, and without spills in what it compiles for each generation of GPUs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import launches
from ds_seqpar.base import log
from ds_seqpar.kernels import fused
from tests.fake_cuda import no_device
from tests.words import missing

ROOT = Path(__file__).parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="waits for triton, which is there on Linux alone")


def test_kernels_compute_what_torchs_operations_do():
    """In a process of its own: what is imported before TRITON_INTERPRET is set runs on GPUs alone."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "tests.triton_runs"]
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    worst, (calls, counted) = found["worst"], found["calls"]
    assert worst.pop("out_with_rowsum, rounded") <= 2**-7  # where one rounds up what the other rounds down
    assert worst.keys() == counted.keys() == {"merge_", "rowsum", "out_with_rowsum"}
    assert max(worst.values()) <= 1e-6
    assert max(calls.values()) <= 1e-6
    assert min(counted.values()) >= 3


# ---- compiled

# kernel -> dtypes of the tensors it takes, and the registers of a thread on compute capability 8.0, 9.0 and 10.0, for
# bf16 and head_dim 128. Up to 64 a GPU has 32 warps at work on each of its multiprocessors
CAPABILITIES = (80, 90, 100)
REGISTERS = {
    "merge_kernel": ({"out": "fp32", "lse": "fp32", "new_out": "bf16", "new_lse": "fp32"}, (48, 48, 54)),
    "rowsum_kernel": ({"do": "bf16", "out": "bf16", "delta": "fp32"}, (32, 32, 32)),
    "out_with_rowsum_kernel": ({"do": "bf16", "delta": "fp32", "out": "bf16"}, (32, 37, 38)),
}
WIDE = {"of_out", "of_new_out", "of_do"}  # the strides of tensors with a head_dim


def source(kernel, dtypes, width, options):
    """As Triton compiles it for contiguous tensors of one sequence."""
    from triton import next_power_of_2
    from triton.compiler import ASTSource

    from ds_seqpar.kernels.triton_ops import ELEMENTS

    constants = {"ROWS": max(1, ELEMENTS // next_power_of_2(width)), "WIDTH": next_power_of_2(width)}
    signature, ones, aligned = {}, {}, []
    for number, name in enumerate(kernel.arg_names):
        if name in dtypes:
            signature[name] = f"*{dtypes[name]}"
            aligned.append((number,))
        elif name in constants:
            signature[name], ones[number,] = "constexpr", constants[name]
        elif name in ("rows", "width"):
            signature[name] = "i32"
            aligned += [(number,)] * (name == "width")
        else:
            last = {"sizes": 4}.get(name, 4 if name in WIDE else 3)
            signature[name] = ("i32",) * last + ("constexpr",) * (name != "sizes")
            ones |= {(number, last): 1} if name != "sizes" else {}
            aligned += [(number, dim) for dim in range(4)] * (name in WIDE)
    return ASTSource(kernel, signature, ones, {at: [["tt.divisibility", 16]] for at in aligned})


def resources(name, capability, dtypes, width, tmp_path):
    """(registers, bytes of stack of a thread). What does not fit registers spills to the stack."""
    import triton
    from triton.backends.compiler import GPUTarget

    from ds_seqpar.kernels import triton_ops

    given = source(getattr(triton_ops, name), dtypes, width, triton_ops.OPTIONS)
    compiled = triton.compile(given, target=GPUTarget("cuda", capability, 32), options=triton_ops.OPTIONS)
    assert ".v4.b32" in compiled.asm["ptx"]  # 16 bytes of a tensor at a time
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups()))


@pytest.fixture
def _compiles_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize("capability", [90, *(pytest.param(x, marks=pytest.mark.slow) for x in (80, 100))])
def test_compiled_kernels_take_no_more_registers_than_the_table_and_none_spills(capability, tmp_path):
    found = {name: resources(name, capability, dtypes, 128, tmp_path) for name, (dtypes, _) in REGISTERS.items()}
    limits = {name: most[CAPABILITIES.index(capability)] for name, (_, most) in REGISTERS.items()}
    assert {name: stack for name, (_, stack) in found.items()} == dict.fromkeys(REGISTERS, 0)
    assert {name: taken for name, (taken, _) in found.items() if taken > limits[name]} == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_compiles_anew")
@pytest.mark.parametrize("width", [16, 80, 1024])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_none_spills_in_other_sizes(dtype, width, tmp_path):
    for name, (dtypes, _) in REGISTERS.items():
        given = {tensor: dtype if kind == "bf16" else kind for tensor, kind in dtypes.items()}
        for capability in CAPABILITIES:
            registers, stack = resources(name, capability, given, width, tmp_path)
            assert (registers <= 128, stack) == (True, 0), (name, capability)


# ---- where they run


def test_they_run_on_gpus_alone():
    assert fused.ops(torch.zeros(1)) is None
    assert fused.ops(torch.zeros(1, device="meta")) is None
    with no_device():
        assert fused.ops(torch.zeros(1, device="cuda")) is torch.ops.ds_seqpar
        assert fused.ops(torch.zeros(1, device="cuda", dtype=torch.float64)) is None


def test_without_triton_a_line_says_why_and_torchs_operations_do_it(monkeypatch, caplog):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    fused.missing.cache_clear()
    try:
        found = launches.counts("ring of 8", 4096)
    finally:
        fused.missing.cache_clear()
    (line,) = caplog.messages
    assert missing(line, "Triton", "triton.runtime") == []
    kernels = launches.load()["counts"]["ring of 8"]["forward"]["now"]["kernels"]
    assert found["forward"]["kernels"] > 2 * kernels

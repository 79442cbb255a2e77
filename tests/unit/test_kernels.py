"""Block kernels on this machine's CPU, and which of them is chosen."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.base import log
from ds_seqpar.base.errors import KernelError
from ds_seqpar.core.runtime import runtime
from ds_seqpar.core.runtime.kernels import KERNELS, BlockSpec, KernelSupport, is_deterministic, select, slowness
from ds_seqpar.testing import attention
from tests.cuda_models import flash_attn, packages
from tests.kernel_suite import KernelSuite, LowerRight, cases
from tests.words import missing

CPU = BlockSpec("cpu", torch.float32, 8, 2, 64)
CUDA = BlockSpec("cuda", torch.bfloat16, 8, 2, 64)
WIDE = dataclasses.replace(CUDA, dtype=torch.float32)
CAPPED = dataclasses.replace(CUDA, softcap=30.0)


@pytest.mark.parametrize(("kernel", "dtype"), cases([*KERNELS.values(), LowerRight()]))
class TestKernelsOnTheCpu(KernelSuite):
    device = "cpu"


@pytest.fixture
def fresh():
    """`select` remembers what it chose."""
    select.cache_clear()
    yield
    select.cache_clear()


def test_kernels_say_what_they_are():
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        assert kernel.ran_on
        assert kernel.tolerance
        assert isinstance(kernel.support, KernelSupport)


def test_auto_takes_the_first_that_can(fresh, monkeypatch):
    assert select("auto", CPU).name == "cpu_flash"
    for name in list(KERNELS)[::-1]:
        monkeypatch.setattr(KERNELS[name], "reasons", lambda spec: [])
        select.cache_clear()
        order = list(KERNELS)
        assert order.index(select("auto", CUDA).name) <= order.index(name) or name == "reference"
    assert select("auto", CUDA).name == next(iter(KERNELS))


def test_a_folder_that_only_has_the_name_of_a_package_is_no_kernel(fresh, monkeypatch, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    with packages(tmp_path):
        assert select("auto", CPU).name == "cpu_flash"
        assert any("no-build-isolation" in reason for reason in KERNELS["flash_attn"].reasons(CUDA))


def install(folder, distribution, version, module, text):
    """A package in a folder."""
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    path = folder / Path(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


COUNTED = """
import sys
sys.imports_of_it = getattr(sys, "imports_of_it", 0) + 1
raise ImportError("{}.so: undefined symbol: _ZN3c104cuda9SetDeviceEa")
"""


@pytest.mark.parametrize(("name", "module", "version"), [
    ("flash_attn", "flash_attn.flash_attn_interface", "2.8.3"),
    ("flash_attn_3", "flash_attn_interface", "3.0.0"),
])  # fmt: skip
def test_a_package_that_was_built_for_another_torch_is_passed_over(name, module, version, fresh, monkeypatch, tmp_path):
    """It is there, and its import raises: as after an upgrade of torch."""
    install(tmp_path, name, version, module, COUNTED.format(name))
    monkeypatch.setattr(sys, "imports_of_it", 0, raising=False)
    with packages(tmp_path):
        assert select("auto", CUDA).name == "cuda_flash"
        for _ in range(2):
            (reason,) = KERNELS[name].reasons(CUDA)
            assert missing(reason, KERNELS[name].package[1], version, "ImportError") == []
            assert "undefined symbol" in reason
        with pytest.raises(KernelError, match="undefined symbol"):
            select(name, CUDA)
    assert sys.imports_of_it == 1


def test_an_old_package_is_passed_over(fresh, tmp_path):
    install(tmp_path, "flash_attn", "2.6.3", "flash_attn.flash_attn_interface", "")
    with packages(tmp_path):
        (reason,) = KERNELS["flash_attn"].reasons(CUDA)
        assert missing(reason, "2.7", "2.6.3") == []


HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.mark.parametrize(
    ("capability", "name"), [(HOPPER, "flash_attn_3"), (AMPERE, "flash_attn"), (BLACKWELL, "flash_attn")]
)
def test_flash_attention_3_is_first_on_hopper_alone(capability, name, fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with flash_attn():
        assert select("auto", CUDA).name == name
        assert select("auto", dataclasses.replace(CUDA, softcap=50.0)).softcap == 50.0
        wide = dataclasses.replace(CUDA, head_dim=256)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert select("auto", wide, is_deterministic()).name == "flash_attn"


@pytest.mark.parametrize(("spec", "capability", "words"), [
    (CUDA, HOPPER, ("cuda_flash", "hopper", "tune")),
    (CUDA, AMPERE, None),
    (CAPPED, AMPERE, ("chunked", "flash-attn", "softcap")),
    (dataclasses.replace(CAPPED, device="cpu"), AMPERE, None),
])  # fmt: skip
def test_what_auto_misses_has_a_sentence(spec, capability, words, fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    said = slowness(select("auto", spec), spec)
    assert missing(said, *words) == [] if words else said == ""
    with flash_attn():
        assert slowness(select("auto", spec), spec) == ""


@pytest.mark.parametrize(("kernel", "lines"), [("auto", 1), ("chunked", 0)])
def test_a_call_says_so_once_unless_its_kernel_is_named(kernel, lines, monkeypatch, caplog):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(runtime, "slowness", lambda kernel, spec: f"{kernel.name} is slow here, as on a GPU")
    for tokens in (8, 16):
        q = torch.zeros(1, tokens, 2, 8)
        attention(SequenceParallelConfig(size=2, kernel=kernel), q, q, q, q, softcap=30.0)
    assert sum("chunked is slow" in record.message for record in caplog.records) == lines


def test_a_named_kernel_is_taken_where_it_can_and_no_other(fresh):
    assert select("reference", CPU).name == "reference"
    with pytest.raises(KernelError) as caught:
        select("cuda_flash", CPU)
    message = str(caught.value)
    assert missing(message, "float32 on cpu", "8/2 heads of 64", *KERNELS["cuda_flash"].reasons(CPU)) == []
    assert [name for name in KERNELS if name in message] == ["cuda_flash"]


def test_without_any_kernel_all_reasons_are_given(fresh):
    spec = BlockSpec("cpu", torch.int64, 8, 2, 64)
    with pytest.raises(KernelError) as caught:
        select("auto", spec)
    for name, kernel in KERNELS.items():
        assert kernel.reasons(spec)
        for reason in kernel.reasons(spec):
            assert reason in str(caught.value), name
        assert f" {name} " in str(caught.value)


def test_reasons_name_what_is_asked_and_what_is_taken():
    cuda_flash, cpu_flash = KERNELS["cuda_flash"], KERNELS["cpu_flash"]
    assert cuda_flash.reasons(CUDA) == []
    (reason,) = cpu_flash.reasons(CUDA)
    assert missing(reason, "CPU", "cuda") == []
    odd = BlockSpec("cuda", torch.bfloat16, 8, 2, 260)
    (reason,) = cuda_flash.reasons(odd)
    assert missing(reason, "head_dim", "256", "260") == []


def test_the_reference_is_never_chosen_by_itself_on_a_gpu(fresh):
    wide = BlockSpec("cuda", torch.float64, 8, 2, 64)
    with pytest.raises(KernelError) as caught:
        select("auto", wide)
    assert "reference" not in str(caught.value)
    assert '"kernel": "chunked"' in str(caught.value)
    assert select("reference", wide).name == "reference"


@pytest.mark.parametrize(("dtype", "head_dim", "name"), [
    (torch.bfloat16, 64, "cuda_flash"),
    (torch.float16, 20, "cuda_flash"),
    (torch.float32, 64, "cuda_efficient"),
    (torch.bfloat16, 260, "cuda_efficient"),
])  # fmt: skip
def test_a_gpu_takes_what_is_fastest_for_dtype_and_head(fresh, dtype, head_dim, name):
    assert select("auto", BlockSpec("cuda", dtype, 8, 2, head_dim)).name == name


def test_a_gpu_without_flash_attention_takes_another_kernel(fresh, monkeypatch):
    """Before Ampere: PyTorch's operator would raise in the middle of a step. Before Volta its memory-efficient one
    would add gradients in fp32 to memory that is not cleared."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert ["7.0" in reason for reason in KERNELS["cuda_efficient"].reasons(WIDE)] == [True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert KERNELS["cuda_efficient"].reasons(WIDE) == []
    assert [("8.0" in reason) for reason in KERNELS["cuda_flash"].reasons(CUDA)] == [True]
    assert select("auto", BlockSpec("cuda", torch.float16, 8, 2, 64)).name == "cuda_efficient"


def test_cudnn_is_refused_where_its_gradients_would_be_wrong_or_not_the_same_twice(monkeypatch):
    cudnn = KERNELS["cudnn"]
    assert cudnn.reasons(CUDA) == []
    assert select("cudnn", CUDA, is_deterministic()) is cudnn
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert cudnn.reasons(CUDA)
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert "TORCH_CUDNN_SDPA_AVOID_RECOMPILE" in cudnn.reasons(CUDA)[0]


def test_cudnn_is_refused_on_gpus_of_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = KERNELS["cudnn"].reasons(CUDA)
    assert "AMD" in reason
    assert KERNELS["cuda_flash"].reasons(CUDA) == []

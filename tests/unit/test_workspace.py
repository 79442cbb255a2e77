"""What kernels allocate for themselves is in the memory of a call, by the formulas of their sources."""

import pytest

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.analysis.memory import fewest_head_chunks
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL
from ds_seqpar.core.compiler.tiles.workspace import WORKSPACES, LaunchSize, planned_kernel
from ds_seqpar.core.runtime.kernels import KERNELS
from ds_seqpar.planner.attention_memory import call_figures

GIB = 2**30
K = 1024


def size(rows, q_heads, kv_heads, head_dim=128, itemsize=2, forward=False):
    return LaunchSize(1, rows, rows, q_heads, kv_heads, head_dim, itemsize, forward)


@pytest.mark.parametrize(("kernel", "launch", "gib"), [
    ("flash_attn", size(512 * K, 4, 1), 2.0),  # dq in fp32, and dk and dv of all query heads in bf16, a half each
    ("flash_attn", size(128 * K, 32, 8), 4.0),
    ("flash_attn", size(128 * K, 32, 32), 2.0),
    ("cuda_flash", size(128 * K, 32, 8, head_dim=65), 1.5 + 2 * 65 / 128),  # in heads of 96
    ("flash_attn_3", size(128 * K, 32, 8), 3.0),  # dk and dv in fp32, of key/value heads
    ("flash_attn_3", size(128 * K, 32, 32), 2.0),
    ("cuda_efficient", size(128 * K, 32, 32, itemsize=4), 2.0),
    ("cuda_efficient", size(128 * K, 32, 8, itemsize=4), 2.0 + 4 * 2.0),  # k, v, dk and dv of all query heads
    ("cuda_efficient", size(128 * K, 32, 8, itemsize=4, forward=True), 2 * 2.0),
    ("flash_attn", size(128 * K, 32, 8, forward=True), 0.0),
])  # fmt: skip
def test_a_launch_takes_what_its_source_allocates(kernel, launch, gib):
    found = WORKSPACES[kernel](launch) / GIB
    assert gib <= found <= gib * 1.02  # with delta, a number a row and head


def test_every_kernel_names_its_own():
    assert {name for name, kernel in KERNELS.items() if kernel.support.workspace} == WORKSPACES.keys()
    assert all(KERNELS[name].support.workspace == name for name in WORKSPACES)


@pytest.mark.parametrize("heads", [(8, 2, 64), (8, 8, 64)])
def test_it_is_in_the_peak_of_backward(heads):
    config = SequenceParallelConfig(size=1).resolve(1, heads=heads[:2])
    plain, found = (
        call_figures(config, tokens=4096, mask=CAUSAL, heads=heads, support=PLAIN_KERNEL._replace(workspace=name))
        for name in ("", "flash_attn")
    )
    assert (found.forward, found.saved) == (plain.forward, plain.saved)
    assert found.backward - plain.backward == WORKSPACES["flash_attn"](size(4096, *heads))


def test_head_chunks_that_are_auto_count_it():
    config = SequenceParallelConfig(size=4, ulysses=4)
    recipe = config.recipe(config.topology(4))
    shards, local = EvenShards("contiguous", 65536, recipe.size), shape_of("fp32", "bfloat16", 1, (32, 8, 128))
    counts = [fewest_head_chunks(recipe, 4, local, CAUSAL, shards, name) for name in ("", "flash_attn")]
    assert counts == [1, 2]


@pytest.mark.parametrize(("given", "kernel"), [
    (("auto", "bfloat16", 128, True), "cuda_flash"),
    (("auto", "float16", 320, True), "cuda_efficient"),
    (("auto", "float32", 128, True), "cuda_efficient"),
    (("auto", "bfloat16", 128, False), "auto"),
    (("flash_attn_3", "bfloat16", 128, True), "flash_attn_3"),
])  # fmt: skip
def test_a_plan_counts_that_of_the_likeliest_kernel(given, kernel):
    assert planned_kernel(*given) == kernel

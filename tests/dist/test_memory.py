"""What attention takes beyond its inputs, seen at every operation, is what the program says, and little enough."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.runtime.kernels import BlockSpec, select
from ds_seqpar.memory.checkpoints import replaying
from ds_seqpar.planner.attention_memory import call_figures
from tests import live
from tests.launch import on_warm_ranks as on_ranks

HEADS, DIM, TOKENS = 8, 64, 512  # of fewer tokens products end before gloo lets go of what it has sent
UNIT = TOKENS * HEADS * DIM * torch.bfloat16.itemsize  # one rank's q
# settings -> the most units at once: forward; backward with its gradients and with what forward kept
WANTED = {
    "world 1": ({"size": 1}, 1.1, 4.2),
    "ulysses": ({"size": 4, "ulysses": 4}, 6.2, 10.3),
    "ring": ({"size": 4, "ulysses": 1, "schedule": "ring"}, 9.5, 20.5),
    "mesh": ({"size": 4, "ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2]}, 12.4, 21.7),
    "attention2d": ({"size": 4, "ulysses": 1, "schedule": "attention2d", "rows": 2}, 13.4, 31.2),
}
OTHERS = {
    "q travels": ({"size": 4, "schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"}, Mask(), 8),
    "bf16 travels": ({"size": 4, "schedule": "ring", "comm_dtype": "bf16"}, Mask(), 8),
    "grouped heads": ({"size": 4, "schedule": "distflash"}, Mask(), 2),
    "window in bands": ({"size": 1}, Mask(window=100), 8),
    "window in bands, grouped heads": ({"size": 2, "schedule": "ring", "layout": "contiguous"}, Mask(window=200), 2),
    "documents of one length": ({"size": 1}, Mask(documents=tuple(range(0, TOKENS, 64))), 8),
    "documents of one length on each rank": (
        {"size": 2, "schedule": "ring"},
        Mask(documents=tuple(range(0, 2 * TOKENS, 128))),
        8,
    ),
    "documents with a window": ({"size": 1}, Mask(window=40, documents=tuple(range(0, TOKENS, 128))), 4),
    "window": ({"size": 4, "schedule": "double_ring", "layout": "contiguous"}, Mask(window=600), 8),
    "overlap": ({"size": 4, "schedule": "wallfacer", "overlap": True}, Mask(), 8),
    "ulysses around": ({"size": 4, "ulysses": 2, "schedule": "ring"}, Mask(), 4),
    "heads dealt unevenly": ({"size": 3, "ulysses": 3}, Mask(), 8),
    "grouped heads dealt unevenly": ({"size": 3, "ulysses": 3}, Mask(), 4),
    "Ulysses ranks that share heads": ({"size": 4, "ulysses": 4}, Mask(), 2),
    "Ulysses ranks that share heads unevenly": ({"size": 3, "ulysses": 3}, Mask(), 2),
    "two blocks a rank": ({"size": 6, "schedule": "triangle"}, Mask(), 8),
    "two blocks a rank, bf16 travels": ({"size": 3, "schedule": "triangle", "comm_dtype": "bf16"}, Mask(), 2),
    "two blocks a rank, overlap": ({"size": 3, "schedule": "triangle", "overlap": True}, Mask(window=700), 8),
    "two blocks of a rank's Ulysses ranks": ({"size": 6, "ulysses": 2, "schedule": "triangle"}, Mask(), 4),
    "head chunks that hide exchanges": ({"size": 4, "ulysses": 4, "head_chunks": 2, "overlap": True}, Mask(), 8),
    "head chunks that hide exchanges, around": (
        {"size": 4, "ulysses": 2, "head_chunks": 4, "overlap": True},
        Mask(),
        4,
    ),
}


STAGES = {
    f"{name}, {head_chunks} head chunks{', kept' if kept else ''}": ({**settings, "head_chunks": head_chunks}, kept)
    for name, settings in {
        "ring": {"size": 4, "ulysses": 1, "schedule": "ring"},
        "ulysses": {"size": 4, "ulysses": 4},
        "u2r2": {"size": 4, "ulysses": 2, "schedule": "ring"},
    }.items()
    for head_chunks, kept in ((1, True), (2, False), (2, True), (4, False), (4, True))
    if head_chunks < 4 or name != "ulysses"
}
# of other settings what no other case has; of head chunks each number of them, kept and not, and each exchange
FEW_OTHERS = (
    "documents of one length on each rank", "window", "overlap", "two blocks a rank, bf16 travels",
    "heads dealt unevenly", "head chunks that hide exchanges",
)  # fmt: skip
FEW_STAGES = ("ring, 1 head chunks, kept", "u2r2, 2 head chunks, kept")


def names(table, few):
    return [pytest.param(name, marks=[] if name in few else pytest.mark.slow) for name in table]


def _measured(setting, mask, kv_heads, kept=None):
    """(measured, the program's own) bytes, each (forward, what is kept, backward); what is left. kept: under a
    checkpoint that keeps it."""
    torch.manual_seed(0)
    q, do = torch.randn(2, 1, TOKENS, HEADS, DIM).bfloat16()
    k, v = torch.randn(2, 1, TOKENS, kv_heads, DIM).bfloat16()
    with SequenceParallel(SequenceParallelConfig(**{"ulysses": 1, **setting})) as sp:

        def attend(*tensors):
            if kept:
                return checkpoint(replaying(lambda *x: sp.attention(*x, mask=mask)), *tensors, use_reentrant=False)
            return sp.attention(*tensors, mask=mask)

        seen = live.least(lambda: live.measure(attend, q, k, v, do))
        support = select(sp.config.kernel, BlockSpec("cpu", torch.bfloat16, HEADS, kv_heads, DIM)).support
        place = {"rank": sp.runtime.rank, "ulysses_rank": sp.runtime.ulysses.rank, "early": sp.comm.early}
        its = {"heads": (HEADS, kv_heads, DIM), "kept": True if kept else None, "support": support}
        said = call_figures(sp.config, tokens=TOKENS, mask=mask, **its, **place)
    return (seen.forward, seen.kept, seen.backward), (said.forward, said.saved, said.backward), seen.left


@pytest.mark.parametrize("name", names(WANTED, ("ulysses", "ring", "attention2d")))
def test_attention_takes_what_its_program_says_and_no_more_than_its_buffers(name):
    setting, forward, backward = WANTED[name]
    for measured, said, left in on_ranks(setting["size"], _measured, setting, Mask(), HEADS):
        assert measured[0] <= forward * UNIT
        assert measured[2] <= backward * UNIT
        assert said == pytest.approx(measured, rel=0.05)
        assert left == 0


@pytest.mark.parametrize("name", names(OTHERS, FEW_OTHERS))
def test_the_program_knows_its_memory_for_other_settings(name):
    setting, mask, kv_heads = OTHERS[name]
    for measured, said, left in on_ranks(setting["size"], _measured, setting, mask, kv_heads):
        assert said == pytest.approx(measured, rel=0.05)
        assert left == 0


@pytest.mark.parametrize("name", names(STAGES, FEW_STAGES))
def test_stages_and_what_a_checkpoint_keeps(name):
    """Buffers are those of one head chunk; a checkpoint keeps what backward needs, and no more."""
    setting, kept = STAGES[name]
    for measured, said, left in on_ranks(setting["size"], _measured, setting, Mask(), HEADS, kept):
        assert said == pytest.approx(measured, rel=0.05)
        assert left == 0

"""Virtual ranks refuse what real ones do."""

import pytest

from ds_seqpar.base.errors import ConfigError, InputError, KernelError
from ds_seqpar.core.compiler.sharding.layout import Run, multiple
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.settings import LAYOUTS, SequenceParallelConfig
from ds_seqpar.testing import attention
from tests.oracle import dense, error, tensors


# deepspeed#8291: a Ulysses rank without a head, and a hang
def test_every_illegal_ulysses_degree_is_refused():
    for size in (1, 3, 4, 6):
        for heads in ((24, 2), (5, 5), (3, 1)):
            for ulysses in range(1, size + 2):
                config = SequenceParallelConfig(size=size, ulysses=ulysses)
                if size % ulysses or ulysses > heads[0]:
                    with pytest.raises(ConfigError, match=f"ulysses {ulysses}"):
                        attention(config, *tensors(1, 48, heads, 8)[:3])
                else:
                    attention(config, *tensors(1, 48, heads, 8)[:3])


# deepspeed#7384, #7842: a sequence length that the ranks do not divide silently corrupts the result
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_that_cannot_be_shared_is_refused(layout):
    for ulysses in (1, 2, 4):
        config = SequenceParallelConfig(size=4, ulysses=ulysses, layout=layout)
        step = multiple(layout, 4, ulysses)
        for seq in (n for n in range(1, 2 * step) if n != step):
            with pytest.raises(InputError, match=f"multiple of {step} .*got {seq},"):
                attention(config, *tensors(1, seq, (4, 4), 8)[:3])


def test_what_does_not_fit_is_refused():
    q, k, v, do = tensors(1, 16, (4, 2), 8)
    two, ring = SequenceParallelConfig(size=2), SequenceParallelConfig(size=2, ulysses=1)
    halves = UnevenShards([[(0, 1, 4)], [(4, 1, 4)]])
    refused = [
        (InputError, "got None", lambda: attention(two, q, k, v, causal=None)),
        (InputError, "got nan", lambda: attention(two, q, k, v, scale=float("nan"))),
        (InputError, r"\(0, 16", lambda: attention(two, q[:0], k[:0], v[:0])),
        (InputError, "got q list", lambda: attention(two, q.tolist(), k, v)),
        (InputError, "float32", lambda: attention(two, q, k.float(), v)),
        (InputError, "float32", lambda: attention(two, q, k, v, do.float())),
        (KernelError, "int64", lambda: attention(two, q.long(), k.long(), v.long())),
        (InputError, "16 tokens.*8 and 8", lambda: attention(ring, q, k, v, shards=halves)),
        (InputError, "16 tokens.*at 16", lambda: attention(two, q, k, v, mask=Mask(documents=(0, 16)))),
        (ConfigError, "size 'auto'", lambda: attention(SequenceParallelConfig(), q, k, v)),
    ]
    for kind, value, call in refused:
        with pytest.raises(kind, match=value):
            call()


def test_distflash_refuses_by_name_where_a_query_sees_a_later_block():
    q, k, v, _ = tensors(1, 12, (2, 1), 4)
    config = SequenceParallelConfig(size=4, ulysses=1, schedule="distflash")
    crossed = UnevenShards([(Run(3 * r, 1, 3),) for r in (1, 0, 2, 3)])
    for mask, shards in ((Mask(causal=False), None), (Mask(causal=False, window=5), None), (Mask(), crossed)):
        with pytest.raises(ConfigError, match=r"distflash.*causal"):
            attention(config, q, k, v, mask=mask, shards=shards)
    each_ends_with_a_block = Mask(causal=False, documents=(0, 3, 6, 9))
    found = attention(config, q, k, v, mask=each_ends_with_a_block).out
    assert error(found, dense(q, k, v, q, mask=each_ends_with_a_block)[0]) <= 1e-10

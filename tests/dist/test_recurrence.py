"""Layers with a state over shared sequences equal the same layers over each document alone."""

import itertools

import pytest
import torch

from ds_seqpar.compiler import states
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.data.batch_layout import positions_held
from tests import oracle
from tests.dist.ranks import make
from tests.launch import on_each_of
from tests.recurrent import KINDS, alone, inputs, layer


def compared(sp, kind, seq, heads=4, groups=2, shards=None, documents=()):
    tokens, parameters = inputs(kind, seq, heads, groups)
    whole = [x.clone().requires_grad_() for x in (*tokens, *parameters)]
    expected = alone(kind, whole[: len(tokens)], whole[len(tokens) :], documents, seq)
    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected.backward(do)
    even = shards or EvenShards(sp.config.layout, seq, sp.size // sp.config.ulysses)
    held = positions_held(even, sp.config.ulysses, sp.rank)
    local = [x[:, held].clone().requires_grad_() for x in tokens]
    mine = [x.clone().requires_grad_() for x in parameters]
    out = layer(kind, sp.runtime, local, mine, shards, documents)
    out.backward(do[:, held])
    found = [out.detach(), *(x.grad for x in local), *(sp.sum_over_ranks(x.grad) for x in mine)]
    of_tokens, of_parameters = whole[: len(tokens)], whole[len(tokens) :]
    wanted = [expected.detach(), *(x.grad for x in of_tokens)]
    oracle.assert_exact(found, [*(x[:, held] for x in wanted), *(x.grad for x in of_parameters)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_each_of("ranks")
def test_layers_equal_each_document_alone(ranks):
    for ulysses in {1, 2, ranks} & {*range(1, ranks + 1)}:
        for way in ("states", "heads") if ulysses > 1 else ("auto",):
            for layout in ("balanced", "contiguous"):
                sp = make(ulysses=ulysses, layout=layout, recurrent_layers=way)
                for kind, at_once in itertools.product(KINDS, (2**21, 0)):
                    states.AT_ONCE = at_once  # 0: states go from run to run
                    compared(sp, kind, 16)
                    compared(sp, kind, 24, documents=(0, 1, 2, 9, 20))
                sp.close()

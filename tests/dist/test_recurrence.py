"""Layers with a state over shared sequences equal the same layers over each document alone."""

import itertools

import pytest
import torch

from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.batch_layout import positions_held
from ds_seqpar.operators import recurrence, segments
from ds_seqpar.operators.recurrence import Cell, Rows
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
                    segments.AT_ONCE = at_once  # 0: states go from run to run
                    recurrence.PIECE = at_once and 2**24  # 0: states are added token by token
                    compared(sp, kind, 16)
                    compared(sp, kind, 24, documents=(0, 1, 2, 9, 20))
                sp.close()


HEADS, GROUPS, KEYS, VALUES = 16, 2, 32, 8


def of_states(tokens, parameters, continues):
    """What a layer that keeps nothing for backward returns."""
    values, readout, decay = tokens
    state = values.new_zeros(len(values), HEADS, KEYS, VALUES, dtype=torch.float32)
    return Rows(values, state, readout, decay[:, -1, :, None, None], decay)


@on_each_of(2)
def test_a_token_keeps_no_readout_of_each_head():
    sizes = {}
    with make() as sp:
        for seq in (64, 128):
            random = torch.randn(1, seq, HEADS, VALUES), torch.randn(1, seq, GROUPS, KEYS)
            values, readout = (x.bfloat16().requires_grad_() for x in random)
            decay, kept = torch.rand(1, seq, HEADS, requires_grad=True), {}

            def save(x, kept=kept):
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
                cell = Cell(KEYS, VALUES, decays=True)
                out = recurrence.recurrence(sp.runtime, of_states, [values, readout, decay], [], cell)
            sizes[seq] = sum(kept.values())
            out.sum().backward()
    inputs = 2 * GROUPS * KEYS + 4 * HEADS  # bytes of a token's readout and decay, which are there anyway
    assert sizes[128] - sizes[64] <= 64 * inputs < 64 * 4 * HEADS * KEYS

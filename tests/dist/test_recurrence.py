"""Layers with a state over shared sequences equal the same layers over each document alone."""

import functools
import itertools

import pytest
import torch

from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.batch_layout import positions_held
from ds_seqpar.operators import recurrence, segments
from ds_seqpar.operators.recurrence import Cell, Rows
from tests import oracle
from tests.dist.ranks import make
from tests.grids import cover, few_then_rest, whole
from tests.launch import on_each_of
from tests.recurrent import KINDS, alone, inputs, layer


@functools.cache
def expected(kind, seq, documents):
    """(tokens, parameters, do, [out, gradients of tokens], gradients of parameters)."""
    tokens, parameters = inputs(kind, seq, heads=4, groups=2)
    of_tokens, of_parameters = ([x.clone().requires_grad_() for x in side] for side in (tokens, parameters))
    out = alone(kind, of_tokens, of_parameters, documents, seq)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(do)
    return tokens, parameters, do, [out.detach(), *(x.grad for x in of_tokens)], [x.grad for x in of_parameters]


def compared(sp, kind, seq, documents=()):
    tokens, parameters, do, of_tokens, of_parameters = expected(kind, seq, documents)
    held = positions_held(EvenShards(sp.config.layout, seq, sp.size // sp.config.ulysses), sp.config.ulysses, sp.rank)
    local = [x[:, held].clone().requires_grad_() for x in tokens]
    mine = [x.clone().requires_grad_() for x in parameters]
    out = layer(kind, sp.runtime, local, mine, None, documents)
    out.backward(do[:, held])
    found = [out.detach(), *(x.grad for x in local), *(sp.sum_over_ranks(x.grad) for x in mine)]
    oracle.assert_exact(found, [*(x[:, held] for x in of_tokens), *of_parameters])


AXES = {
    "way": ((1, "auto"), (2, "states"), (2, "heads"), (4, "states"), (4, "heads")),
    "layout": ("balanced", "contiguous"), "kind": KINDS, "at_once": (2**21, 0),
    "pack": ((16, ()), (24, (0, 1, 2, 9, 20))),
}  # fmt: skip


@pytest.mark.parametrize("cases", few_then_rest(cover(**AXES), whole(**AXES)))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_each_of("ranks")
def test_layers_equal_each_document_alone(ranks, cases):
    by_way = itertools.groupby(cases, lambda case: (*case["way"], case["layout"]))
    for (ulysses, way, layout), group in by_way:
        if ulysses > ranks:
            continue
        with make(ulysses=ulysses, layout=layout, recurrent_layers=way) as sp, pytest.MonkeyPatch.context() as patch:
            for case in group:
                patch.setattr(segments, "AT_ONCE", case["at_once"])  # 0: states go from run to run
                patch.setattr(recurrence, "PIECE", case["at_once"] and 2**24)  # 0: states are added token by token
                compared(sp, case["kind"], *case["pack"])


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

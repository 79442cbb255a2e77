"""Layers with a state, computed token by token: over each document alone, and shared by ranks."""

import itertools

import torch
from torch.nn import functional as F

from ds_seqpar.operators import recurrence
from ds_seqpar.operators.recurrence import Cell, Rows

KINDS = ("delta", "decayed", "conv")


def delta(q, k, v, g, beta, state):
    """A gated delta rule, token by token: (N, L, H, ..) -> (out, final state)."""
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]) if state is None else state.to(v.dtype)
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        change = (v[:, t] - torch.einsum("nhk,nhkv->nhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + torch.einsum("nhk,nhv->nhkv", k[:, t], change)
        outs.append(torch.einsum("nhk,nhkv->nhv", q[:, t], state))
    return torch.stack(outs, 1), state


def decayed(tokens, parameters, continues):
    """Mamba-2's recurrence, token by token."""
    x, dt, keys, readout = tokens
    a, d = parameters
    heads = x.shape[2]
    keys, read = (y.repeat_interleave(heads // y.shape[2], 2) for y in (keys, readout))
    decay = dt * a
    state, outs = x.new_zeros(len(x), heads, keys.shape[3], x.shape[3]), []
    for t in range(x.shape[1]):
        new = torch.einsum("nhk,nhv->nhkv", keys[:, t], x[:, t] * dt[:, t, :, None])
        state = state * decay[:, t].exp()[..., None, None] + new
        outs.append(torch.einsum("nhk,nhkv->nhv", read[:, t], state) + d[:, None] * x[:, t])
    decay = decay.cumsum(1).exp()
    return Rows(torch.stack(outs, 1), state, readout, decay[:, -1, :, None, None], decay)


def conv(weight):
    def function(x):
        size = weight.shape[-1]
        return F.silu(F.conv1d(x.mT, weight[:, None], padding=size - 1, groups=len(weight))[..., : x.shape[1]].mT)

    return function


def inputs(kind, seq, heads, groups):
    make_random = torch.Generator().manual_seed(seq + heads)

    def random(*shape):
        return torch.randn(*shape, generator=make_random, dtype=torch.float64)

    if kind == "conv":
        return [random(2, seq, 6)], [random(6, heads)]
    if kind == "delta":
        keys = [F.normalize(random(2, seq, groups, 4), dim=-1) for _ in range(2)]
        gates = [-random(2, seq, heads).abs(), random(2, seq, heads).sigmoid()]
        return [random(2, seq, heads, 3), *keys, *gates], []
    tokens = [random(2, seq, heads, 3), random(2, seq, heads).abs()]
    return [*tokens, random(2, seq, groups, 4), random(2, seq, groups, 4)], [-random(heads).abs(), random(heads)]


def layer(kind, runtime, tokens, parameters, shards, documents):
    if kind == "conv":
        return recurrence.causal_conv(
            runtime, conv(parameters[0]), tokens[0], parameters[0].shape[1], shards, documents
        )
    function, cell = (
        (recurrence.delta_rule(delta), Cell(4, 3, False)) if kind == "delta" else (decayed, Cell(4, 3, True))
    )
    return recurrence.recurrence(runtime, function, tokens, parameters, cell, shards, documents)


def alone(kind, tokens, parameters, documents, seq):
    """The layer over each document alone."""
    outs = []
    for start, end in itertools.pairwise([*(documents or (0,)), seq]):
        part = [x[:, start:end] for x in tokens]
        if kind == "conv":
            outs.append(conv(parameters[0])(part[0]))
        elif kind == "delta":
            v, q, k, g, beta = part
            outs.append(delta(q, k, v, g, beta, None)[0])
        else:
            outs.append(decayed(part, parameters, False).out)
    return torch.cat(outs, 1)

"""A kernel from one class, as a user would write it, which takes windows by itself: nothing else knows of it."""

import pytest
import torch

from ds_seqpar import Mask, SequenceParallelConfig
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.runtime.kernels import KernelSupport, register, remove
from ds_seqpar.testing import attention
from tests.oracle import dense, errors, seen, tensors

SEQ = 48


class Toy:
    """fp64 alone, with a dense matrix; a band of any width and any number of rows is one call."""

    name = "toy"
    support = KernelSupport(band=1 << 40)
    tolerance = {torch.float64: 1e-12}  # noqa: RUF012
    ran_on = "CPU"

    def __init__(self):
        self.bands = []  # (rows, columns, width) of each forward call

    def reasons(self, spec):
        return []

    def forward(self, q, k, v, causal, scale, width=0):
        if width:
            self.bands.append((q.shape[1], k.shape[1], width))
        scores = self.scores(q, k, causal, scale, width)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), self.shared(v, q))
        return out, scores.logsumexp(-1).transpose(1, 2)

    def backward(self, do, q, k, v, out, lse, causal, scale, width=0):
        p = torch.exp(self.scores(q, k, causal, scale, width) - lse.transpose(1, 2)[..., None])
        delta = (do * out).sum(-1).transpose(1, 2)[..., None]
        ds = p * (torch.einsum("bqhd,bkhd->bhqk", do, self.shared(v, q)) - delta) * scale
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, self.shared(k, q))
        dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, do)
        return dq, *(x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))

    def scores(self, q, k, causal, scale, width):
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        hidden = (j > i) & causal | ((j < i) | (j >= i + width)) & (width > 0)
        return (torch.einsum("bqhd,bkhd->bhqk", q, self.shared(k, q)) * scale).masked_fill(hidden, float("-inf"))

    def shared(self, x, q):
        """Each key/value head for all of its query heads."""
        return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


@pytest.fixture
def toy():
    kernel = Toy()
    register(kernel)
    yield kernel
    remove(kernel.name)


SETTINGS = [
    {"size": 1},
    {"size": 4, "ulysses": 1},
    {"size": 4, "ulysses": 1, "layout": "contiguous"},
    {"size": 4, "ulysses": 2, "layout": "striped"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("mask", [Mask(window=7), Mask(window=7, documents=(0, 16, 32)), Mask()], ids=str)
def test_it_equals_dense_attention(toy, settings, mask):
    q, k, v, do = tensors(2, SEQ, (4, 2))
    found = attention(SequenceParallelConfig(kernel="toy", **settings), q, k, v, do, mask=mask)
    wanted = dense(q, k, v, do, seen(mask, range(SEQ), range(SEQ)))
    assert max(errors((found.out, found.dq, found.dk, found.dv), wanted)) <= 1e-12
    assert bool(toy.bands) == bool(mask.window)


def test_a_window_is_given_to_it_as_one_band(toy):
    attention(SequenceParallelConfig(size=1, kernel="toy"), *tensors(1, SEQ, (4, 2)), mask=Mask(window=7))
    assert toy.bands == [(SEQ - 7, SEQ - 1, 7)]


def test_its_name_is_its_own(toy):
    with pytest.raises(ConfigError, match=r"kernel.*toy"):
        register(Toy())
    remove("toy")
    with pytest.raises(ConfigError, match="toy"):
        SequenceParallelConfig(size=1, kernel="toy")
    register(toy)

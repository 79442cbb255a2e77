"""Whole tensors whose tokens are in parts: in torch's functions they are the whole tensor, with its gradients."""

import copy
import dataclasses
import io
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.base.errors import InputError
from ds_seqpar.whole import WholeTensor, shard_spec, whole_of
from ds_seqpar.whole.shard_spec import ShardSpec
from tests.launch import on_each_of
from tests.words import missing

SIZE = 5  # of the last dim
GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randint(0, SIZE, (2, 8), generator=GENERATOR)
MASK = torch.rand(2, 8, generator=GENERATOR) > 0.3


def token_logps(w):
    labels = TARGET[:, 1 : w.shape[1]]
    return torch.gather(w[:, :-1].log_softmax(-1), 2, labels[..., None]).squeeze(2) * MASK[:, 1 : w.shape[1]]


def over(w, x):
    """x for the tokens of w."""
    return x[:, : w.shape[1]]


def set_zero(w):
    w[:, 0] = 0
    return w


def set_masked(w):
    w[over(w, MASK)] = 1
    return w


def changed_after_a_look(w):
    x = w * 1
    if not x.sum().isfinite():
        return None
    return x.mul_(w)


def chunked(w):
    """A loss in chunks of tokens, each computed again in backward."""
    chunks = range(0, w.shape[1], 3)
    return sum(checkpoint(lambda x: x.logsumexp(-1).sum(), w[:, at : at + 3], use_reentrant=False) for at in chunks)


# a use -> (what it makes of a whole tensor w (2, tokens, 5), differentiable; whether that is a plain one)
USES = {
    "sum": (lambda w: w.sum(), True),
    "without the last token": (lambda w: w[:, :-1], False),
    "without the last token, contiguous": (lambda w: w[..., :-1, :].contiguous(), False),
    "some of the last token": (lambda w: w[:, -1, 2:4], False),
    "a number": (lambda w: w[1, 3, 2], True),
    "rows": (lambda w: w[:1], False),
    "every third token": (lambda w: w[:, ::3, :], False),
    "chosen tokens": (lambda w: w[over(w, MASK)], True),
    "tokens by number": (lambda w: w[:, torch.tensor([3, 1])], True),
    "a new dim": (lambda w: w[None], True),
    "float": (lambda w: w.float().double(), False),
    "to": (lambda w: w.to("cpu", torch.float32).type(torch.float64), False),
    "scaled": (lambda w: (w / 0.7 - 1) * 2, False),
    "log_softmax": (lambda w: w.log_softmax(-1), False),
    "entropy": (lambda w: -(F.softmax(w, dim=-1) * F.log_softmax(w, dim=-1)).sum(-1), False),
    "log-probabilities": (token_logps, False),
    "preference": (lambda w: F.logsigmoid(token_logps(w).sum(-1)), True),
    "masked": (lambda w: w.masked_fill(~over(w, MASK)[..., None], 0.0), False),
    "where": (lambda w: torch.where(over(w, MASK)[..., None], w, 0.0), False),
    "greatest of each": (lambda w: w.max(dim=-1).values, False),
    "topk": (lambda w: w.topk(2).values, False),
    "mean over tokens": (lambda w: w.mean(1), True),
    "standard deviation": (lambda w: w.std(), True),
    "norm": (lambda w: w.norm(), True),
    "cross entropy": (lambda w: F.cross_entropy(w.view(-1, SIZE), over(w, TARGET).reshape(-1)), True),
    "shifted cross entropy": (
        lambda w: F.cross_entropy(w[:, :-1].reshape(-1, SIZE), over(w, TARGET)[:, 1:].reshape(-1)),
        True,
    ),
    "cross entropy by class": (lambda w: F.cross_entropy(w.transpose(1, 2), over(w, TARGET)), True),
    "cross entropy of each": (
        lambda w: F.cross_entropy(w.flatten(0, 1), over(w, TARGET).flatten() - 1, reduction="none", ignore_index=-1),
        False,
    ),
    "weighted cross entropy": (
        lambda w: F.cross_entropy(w.flatten(0, 1), over(w, TARGET).flatten(), torch.arange(1.0, 6, dtype=w.dtype)),
        True,
    ),
    "divergence": (lambda w: F.kl_div(w.log_softmax(-1), torch.full_like(w, 0.2), reduction="batchmean"), True),
    "permuted": (lambda w: w.permute(1, 0, 2), True),
    "concatenated": (lambda w: torch.cat([w, w.flip(1)], 0), True),
    "a product": (lambda w: w @ torch.arange(15.0, dtype=w.dtype).view(SIZE, 3), True),
    "attention": (lambda w: F.scaled_dot_product_attention(w, w, w), True),
    "einsum": (lambda w: torch.einsum("bsd,btd->bst", w, w), True),
    "flattened": (lambda w: w.flatten(), True),
    "cross entropy, after a look": (
        lambda w: w.sum() + F.cross_entropy(w.view(-1, SIZE), over(w, TARGET).reshape(-1)),
        True,
    ),
    "linear layer, after a look": (lambda w: w.sum() + F.linear(w, torch.ones(2, SIZE, dtype=w.dtype)).sum(), True),
    "iterated": (lambda w: [row.sum() for row in w][1], True),
    "split": (lambda w: w.split(3, 1)[1], True),
    "in place": (lambda w: (w * 1).div_(3).masked_fill_(~over(w, MASK)[..., None], 0.0), False),
    "assigned": (lambda w: set_zero(w * 1), False),
    "assigned by a mask": (lambda w: set_masked(w * 1), False),
    "heads": (lambda w: w.view(*w.shape[:2], 1, SIZE), False),
    "twice": (lambda w: w.sum() + w[:, 1:].exp().sum() + w.log_softmax(-1)[..., 0].sum(), True),
    "chunks": (chunked, True),
    "checkpointed": (lambda w: checkpoint(torch.exp, w, use_reentrant=True), False),
}


def spreads(sp):
    """A batch that is shared equally, one of another length, and one with documents, in rows that lie end to end."""
    documents = dataclasses.replace(sp.place(16, (3, 5, 8)), rows=2)
    return [ShardSpec.of(sp, 2, *case, "logits") for case in ((8, None), (7, sp.place(7)), (8, documents))]


@on_each_of(2)
def test_a_use_gives_what_the_whole_gives_and_its_gradient():
    """And it is in parts still, or is not, as the table says."""
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1))
    for number, where in enumerate(spreads(sp)):
        x = torch.randn(2, where.tokens, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for name, (use, plain) in USES.items():
            leaf, own = x.clone().requires_grad_(), where.shard(x).clone().requires_grad_()
            wanted, got = use(leaf), use(whole_of(own, where))
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), (name, number)
            assert isinstance(got, WholeTensor) != plain, (name, number)
            for result in (wanted, got):
                (result**2).sum().backward()
            grad = where.gathered(own.grad) / sp.size
            for a, b in ((got.detach(), wanted.detach()), (grad, leaf.grad)):
                assert (a - b).abs().max() < 1e-6, (name, number)


def saved(w):
    file = io.BytesIO()
    torch.save({"logits": w}, file)
    file.seek(0)
    return torch.load(file)["logits"]


# without gradients: a use -> what it makes of a whole tensor
LOOKS = {
    "print": str,
    "repr": repr,
    "format": lambda w: f"{w}",
    "numpy": lambda w: w.numpy(),
    "asarray": np.asarray,
    "numpy of a conversion": lambda w: w.float().cpu().numpy(),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w[0, 0, 0].item(),
    "truth": lambda w: bool((w > 100).any()),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "save": saved,
    "argmax": lambda w: w.argmax(-1),
    "accuracy": lambda w: (w.argmax(-1) == over(w, TARGET)).float().mean().item(),
    "equal": lambda w: torch.equal(w, w.clone()),
    "allclose": lambda w: torch.allclose(w, w + 0),
    "is nan": lambda w: torch.isnan(w).any().item(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "bits": lambda w: w.view(torch.int32),
    "as_tensor": torch.as_tensor,
    "from_dlpack": torch.from_dlpack,
    "shape": lambda w: (w.shape, w.size(-1), w.dim(), len(w), w.numel(), w.dtype, w.device, w.is_contiguous()),
    "quantile": lambda w: w.quantile(0.5, -1),
    "out": lambda w: torch.add(w, 1, out=torch.empty(w.shape)),
    "sort": lambda w: w.sort(-1, descending=True).indices,
    "bincount": lambda w: torch.bincount(w.argmax(-1).flatten(), minlength=SIZE),
    "moved to the CPU": lambda w: w.detach().cpu().float(),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


@on_each_of(2)
def test_looks_without_gradients():
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1))
    for number, where in enumerate(spreads(sp)):
        x = torch.randn(2, where.tokens, SIZE, generator=torch.Generator().manual_seed(1))
        for name, inference in itertools.product(LOOKS, (False, True)):
            with torch.inference_mode(inference):
                wanted, got = LOOKS[name](x), LOOKS[name](whole_of(where.shard(x), where))
                assert same(wanted, got), (name, number, inference)


@on_each_of(2)
def test_accelerate_converts_it_without_a_look_and_gathers_it_whole():
    from accelerate import Accelerator
    from accelerate.utils import convert_outputs_to_fp32, send_to_device

    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1))
    accelerator, (where, *_) = Accelerator(cpu=True), spreads(sp)
    x = torch.randn(2, 8, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    output = convert_outputs_to_fp32(lambda: {"logits": whole_of(where.shard(x), where)})()
    moved = send_to_device(output, "cpu")["logits"]
    assert isinstance(moved, WholeTensor)
    assert moved._gathered is None
    assert same(accelerator.gather_for_metrics(moved), torch.cat([x, x]).float())


@on_each_of(2)
def test_a_rank_may_work_on_its_part():
    """The part itself, and a loss that ranks make of their parts; its gradient, beside that of the whole."""
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1))
    for where in spreads(sp):
        x = torch.randn(2, where.tokens, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = []
        for loss in (lambda w: w.exp().sum(), lambda w: sp.sum_over_ranks(w.local.exp().sum())):
            own = where.shard(x).clone().requires_grad_()
            whole = whole_of(own, where)
            loss(whole).backward()
            grads.append(own.grad)
            assert torch.equal(whole.local, own)
            assert whole.placement is where.placement
        assert torch.allclose(*grads)


@on_each_of(2, keep=None)
def test_a_slice_is_not_changed_in_place_and_a_large_gather_is_warned_of_once():
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1))
    where, *_ = spreads(sp)
    whole, said = whole_of(torch.ones(2, 4, SIZE), where), set()
    for change in (
        lambda: whole[:, 1:].zero_(),
        lambda: whole[:, 1:].mul_(2),
        lambda: whole[:, -1].mul_(2),
        lambda: whole[0].zero_(),
        lambda: whole.unsqueeze(-1).add_(1),
        lambda piece=whole[:, 1:]: whole.mul_(2),
    ):
        with pytest.raises(InputError, match="changed in place") as raised:
            change()
        said.add(str(raised.value))
    assert len(said) == 1
    other = whole_of(torch.ones(2, 4, SIZE), where)
    other[:, 1:].exp()
    other.mul_(2)  # which has no piece any more
    for change in (
        lambda: whole.unsqueeze_(0),
        lambda: whole.resize_(2),
        lambda: setattr(whole, "data", torch.zeros(1)),
        lambda: torch.exp(torch.ones(whole.shape), out=whole),
    ):
        with pytest.raises(InputError, match="another shape or other memory"):
            change()
    shard_spec.LARGE = 100
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            str(whole_of(torch.ones(2, 4, SIZE), where))
            whole_of(torch.ones(2, 4, SIZE), where)[:, :1].tolist()
    (warning,) = seen
    assert missing(str(warning.message), "whole logits of 0.0 GiB", "logits.local") == []


@on_each_of(2, keep=None)
def test_losses_of_tokens_gather_a_number_a_token():
    """A gather of more than that warns, backward too."""
    names = ["preference", "cross entropy", "shifted cross entropy", "log-probabilities", "entropy"]
    where, *_ = spreads(SequenceParallel(SequenceParallelConfig(size=2, ulysses=1)))
    shard_spec.LARGE = 2 * 8 * torch.float64.itemsize
    for name in (*names, "standard deviation"):
        own = torch.randn(2, 4, SIZE, dtype=torch.float64, requires_grad=True)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            USES[name][0](whole_of(own, where.named(name))).sum().backward()
        assert len(seen) == (name not in names), name


@on_each_of(2)
def test_outputs_of_two_forwards_with_one_layout_stay_in_parts_together():
    """Of their tokens, and of the same slice of them; with another layout they become whole."""
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1))
    for where, again in zip(spreads(sp), spreads(sp), strict=True):
        x, y = torch.randn(2, 2, where.tokens, SIZE, generator=torch.Generator().manual_seed(1))
        a, b = whole_of(where.shard(x), where), whole_of(again.shard(y), again)
        for found, wanted in ((a - b, x - y), (a[:, 1:] - b[:, 1:], x[:, 1:] - y[:, 1:])):
            assert isinstance(found, WholeTensor)
            assert a._gathered is b._gathered is None
            assert torch.equal(found.whole(), wanted)
        assert torch.equal(a[:, 1:] - b[:, :-1], x[:, 1:] - y[:, :-1])

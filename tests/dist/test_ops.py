"""The custom ops say truly what they do, and a compiler takes them as they are."""

import copy
import gc
import importlib
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import is_cudagraph_unsafe_fx_node

from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.runtime.admit import CONFIGURED
from tests import oracle
from tests.dist.ranks import SECONDS, WRONG, attend, gather_all, leaves, make, refusal
from tests.launch import on_each_of
from tests.words import missing

# heads that two Ulysses ranks do not divide, k/v's own and shared
DECLARED = [((6, 3), torch.float64), ((5, 1), torch.float32)]


@pytest.mark.parametrize(
    ("heads", "dtype"), [((5, 1), torch.bfloat16), *(pytest.param(*case, marks=pytest.mark.slow) for case in DECLARED)]
)
@on_each_of(2, keep=None)
def test_ops_are_what_they_declare(heads, dtype):
    """opcheck of every op on two Ulysses ranks; and a copied SequenceParallel is the same."""
    sp = make(size=2, ulysses=2, layout="contiguous")
    assert copy.deepcopy(sp) is sp
    q, k, v = leaves(sp, *oracle.tensors(1, 8, heads, dtype=dtype)[:3])
    handle, ops = sp.runtime.handle, torch.ops.ds_seqpar
    settings = handle, CAUSAL.handle, CONFIGURED
    sinks = torch.randn(heads[0], requires_grad=True)
    head_chunks = 2 if heads[1] > 2 else 1
    zeros = sinks.new_zeros(heads[0])
    calls = [(ops.agree.default, ([q, k, v], *settings, None, True, False, 2.0, zeros, "attention"))]
    for given, count, keep, lse in ((None, 1, 2, False), (sinks, 1, 1, True), (sinks, head_chunks, 0, False)):
        what = *settings, 0.5, 2.0, count, keep, "attention", 8
        forward = [q, k, v], given, *what, lse, None, [1, 2, sp.rank, 8, 8], None
        out, *rest = (x.detach() for x in ops.attention(*forward))
        own = () if keep else tuple(x.detach() for x in (q, k, v))
        common = rest.pop() if dtype == torch.float32 else None
        saved = [*(rest[:-1] if lse else rest), *(() if keep > 1 else (out,)), *own]
        dealt = None if given is None else given.detach()
        backward = out.clone(), dealt, common, saved, [*q.shape, *k.shape, *v.shape], *what
        calls += [(ops.attention.default, forward), (ops.attention_backward.default, backward)]
    for call in calls:
        assert set(torch.library.opcheck(*call).values()) == {"SUCCESS"}


@on_each_of(1, keep=None)
def test_no_cuda_graph_records_an_op():
    """Each talks to other ranks from Python, which a replay would not run. Inductor leaves out what says so."""
    importlib.import_module("hf_integration.model.agreement")  # has an op too
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ds_seqpar::")]
    packets = [getattr(torch.ops.ds_seqpar, name.partition("::")[2]) for name in names]
    assert len(packets) >= 4
    assert all(torch.Tag.cudagraph_unsafe in packet.default.tags for packet in packets)
    sp, found = make(size=1), []

    def compiled(graph, _):
        found.append([x.target.name() for x in graph.graph.nodes if is_cudagraph_unsafe_fx_node(x)])
        return make_boxed_func(graph.forward)

    function = torch.compile(lambda *x: sp.attention(*x), backend=aot_autograd(fw_compiler=compiled), fullgraph=True)
    attend(sp, *oracle.tensors(1, 24, (4, 4)), way=function)
    assert found == [["ds_seqpar::agree", "ds_seqpar::attention"], ["ds_seqpar::attention_backward"]]


# what inductor makes of an op follows from what that declares, which is tested above
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_each_of(2, timeout=300, keep=None)
def test_compiled_attention_is_one_graph(backend):
    """A function around attention, called again with other sizes."""
    sp = make(ulysses=2)
    function = torch.compile(lambda q, k, v: 2.0 * sp.attention(q, k, v), backend=backend, fullgraph=True)
    for seq in (24, 48):
        q, k, v, do = whole = oracle.tensors(1, seq, (9, 3))
        out, *grads = attend(sp, q, k, v, do / 2, way=function)
        oracle.assert_exact([out / 2, *grads], oracle.dense(*whole), seq)
    assert sum(counters["graph_break"].values()) == 0


@on_each_of(2, timeout=SECONDS * 3, keep=None)
def test_compiled_attention_still_asks_its_peers():
    """What ranks are told by a compiled function that one of them calls with other things than the rest."""
    sp = make()
    function = torch.compile(
        lambda q, k, v, causal=True: sp.attention(q, k, v, causal=causal) * 1.0, backend="aot_eager"
    )
    q, k, v = oracle.tensors(1, 8, (4, 2))[:3]
    wrong = sp.rank == WRONG
    for word, *given in (
        ("float32", *(x.float() if wrong else x for x in (q, k, v))),
        ("causal False", q, k, v, not wrong),
        ("one sequence", q, k[:, :, :0] if wrong else k, v[:, :, :0] if wrong else v),
        ("q (8, 4, 8)", q[0] if wrong else q, k, v),
        ("got None", q, k, v, None),
    ):
        kind, message = refusal(function, *given)
        assert kind in ("DisagreementError", "InputError"), word
        assert word in message
    leaves = [x.requires_grad_() for x in (q, k, v)]
    losses = [function(*leaves).square().sum() for _ in range(2)]
    for at, loss in enumerate(reversed(losses) if wrong else losses):
        kind, message = refusal(loss.backward)
        assert kind == "DisagreementError"
        of_rank_0 = ("the last call but 1'; rank 1:", "the last call'; rank 1:")[at]
        assert missing(message, "the same backward", "another order", of_rank_0) == []
    found, *whole = gather_all(sp, function(q, k, v), q, k, v)
    oracle.assert_exact([found], [oracle.attention(*whole)])


@pytest.mark.slow
@on_each_of(2, keep=None)
def test_one_compiled_function_serves_several_in_a_process():
    """The function is compiled again with the number of the SequenceParallel as a symbol."""

    def attend(sp, q, k, v):
        return sp.attention(q, k, v)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for ulysses in (2, 2, 1):
        sp = make(size=2, ulysses=ulysses)
        tensors, grads = [torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3)], []
        for function in (compiled, attend):
            out = function(sp, *tensors)
            grads.append([out.detach(), *torch.autograd.grad(out.square().sum(), tensors)])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@on_each_of(1, keep=None)
def test_a_backward_finds_any_number_of_masks_that_only_forwards_had():
    """Of a compiled graph, which has nothing but their handles; they are freed with it."""
    sp, count = make(size=1, ulysses=1), 300
    compiled = torch.compile(lambda q, k, v, mask: sp.attention(q, k, v, mask=mask), backend="aot_eager")
    tensors, alive = [torch.randn(1, count, 2, 8, requires_grad=True) for _ in range(3)], []

    def out(function, start):
        mask = Mask(documents=(0, start))
        alive.append(weakref.ref(mask))
        return function(*tensors, mask)

    total = sum(out(compiled, start) for start in range(1, count))
    found = torch.autograd.grad(total.sum(), tensors)
    del total
    gc.collect()
    assert sum(mask() is not None for mask in alive) < count // 3  # those of programs that are kept
    expected = sum(out(lambda q, k, v, mask: sp.attention(q, k, v, mask=mask), start) for start in range(1, count))
    for a, b in zip(found, torch.autograd.grad(expected.sum(), tensors), strict=True):
        torch.testing.assert_close(a, b)

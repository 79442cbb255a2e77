"""A function of each token in tiles: the same numbers, one gradient a parameter, and nothing of a whole size inside."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_integration.memory.tiled_function import GradientSums, tile_slices, tiled, tiled_sum
from tests.live import Live

WIDTH, INNER = 8, 48


class Mlp(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout, self.calls = nn.Dropout(dropout), 0

    def forward(self, x):
        self.calls += 1
        return self.down(self.dropout(torch.tanh(self.up(x))))


def mlp(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return Mlp(**changes).to(dtype)


def tokens(seq, rows=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, seq, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def in_tiles(module, x, tiles):
    return tiled(lambda tile, _: module(tile), x, [p for p in module.parameters() if p.requires_grad], tiles)


def gradients(module, out, x):
    """Of a loss in which no two tokens weigh alike."""
    weights = torch.linspace(-1, 2, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view_as(out).to(out.dtype)
    (out * weights).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def error(found, expected):
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("tiles", [1, 2, 5, 64])
@pytest.mark.parametrize(("seq", "rows"), [(1, 1), (17, 1), (64, 1), (17, 3)])
def test_results_and_gradients_are_those_without_tiles(seq, rows, tiles):
    (plain, x), (mine, y) = ((mlp(), tokens(seq, rows)) for _ in range(2))
    expected, found = plain(x), in_tiles(mine, y, tiles)
    assert error([found], [expected]) < 1e-14
    assert error(gradients(mine, found, y), gradients(plain, expected, x)) < 1e-13


def weighed(module):
    """compute of a sum in tiles: of 17 tokens, no two alike."""
    return lambda tile, cut: (module(tile).sum(-1) * torch.arange(1, 18)[cut]).sum()


def test_a_sum_of_tiles():
    """Computed once: its gradients are taken in forward."""
    (plain, x), (mine, y) = ((mlp(), tokens(17, 2)) for _ in range(2))
    loss = tiled_sum(weighed(mine), y, GradientSums(mine.parameters()), 5)
    expected = weighed(plain)(x, slice(None))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    (3 * loss).backward()
    (3 * expected).backward()
    assert mine.calls == 5
    found = [y.grad, *(p.grad for p in mine.parameters())]
    assert error(found, [x.grad, *(p.grad for p in plain.parameters())]) < 1e-13
    with pytest.raises(RuntimeError, match=r"tiled loss.*once"):
        loss.backward()


@pytest.mark.parametrize(("dtype", "gradient", "calls"), [(torch.float16, True, 10), (torch.float64, False, 5)])
def test_a_sum_whose_gradients_are_not_taken_in_forward(dtype, gradient, calls):
    """fp16, as the loss's scale comes later, and where nobody wants any."""
    module, x = mlp(dtype), tokens(17, dtype=dtype)
    sums = GradientSums(module.parameters())
    with torch.set_grad_enabled(gradient):
        loss = tiled_sum(weighed(module), x, sums, 5)
    assert module.calls == 5
    assert sums.totals == [None] * 4
    if gradient:
        (2.0**-20 * loss.float() * 2.0**20).backward()
        assert x.grad.isfinite().all()
        assert x.grad.any()
    assert module.calls == calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wide_head_adds_up_its_gradient_in_place(dtype, bias):
    """No tile's gradient of the weight stands beside the sum; in bf16 4,096 rows of it do."""
    torch.manual_seed(0)
    rows, seq = 3 * 4096 + 5, 17
    mine = nn.Linear(WIDTH, rows, bias=bias, dtype=torch.float64)
    mine = mine.to(dtype)
    plain, (x, y) = copy.deepcopy(mine).double(), (tokens(seq, dtype=dtype) for _ in range(2))
    weights = torch.rand(rows, dtype=torch.float64).to(dtype)
    sums = GradientSums(mine.parameters())
    with Live(y, weights, *mine.parameters()) as live:

        def compute(tile, cut):
            return (sums.linear(tile, mine.weight, mine.bias) * weights).sum().double()

        loss = tiled_sum(compute, y, sums, seq)
        inside = live.peak
    loss.backward()
    exact = x.detach().double().requires_grad_()
    (plain(exact) * weights.double()).sum().backward()
    found = [y.grad, *(p.grad for p in mine.parameters())]
    expected = [exact.grad, *(p.grad for p in plain.parameters())]
    assert error(found, expected) < {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    wide, tile = torch.promote_types(dtype, torch.float32).itemsize, rows * dtype.itemsize
    assert inside < rows * WIDTH * wide + 4 * tile + 4096 * WIDTH * 4 + 4096


@pytest.mark.parametrize(("tokens", "tiles"), [(5, 4), (4, 4), (3, 8), (100, 7), (1, 3), (0, 4), (10, 6)])
def test_no_tile_is_empty(tokens, tiles):
    """deepspeed PR 8434: tiles of ceil(tokens / tiles) each end with an empty one (10 in 6: five of 2 and 0)."""
    found = tile_slices(tokens, tiles)
    sizes = [cut.stop - cut.start for cut in found]
    assert sum(sizes) == tokens
    assert [cut.start for cut in found[1:]] == [cut.stop for cut in found[:-1]]
    assert sizes == [0] if tokens == 0 else min(sizes) >= max(sizes) - 1 >= 0 and min(sizes) > 0
    assert len(found) == max(1, min(tokens, tiles))


def test_a_rank_without_tokens_has_gradients_that_are_zero():
    """Not none: its peers reduce theirs with them."""
    module, x = mlp(), tokens(0)
    found = gradients(module, in_tiles(module, x, 4), x)
    assert all(g is not None and not g.any() for g in found)


def untiled_error(seq, tiles):
    """Errors against fp64 of bf16 gradients: (without tiles, in tiles)."""
    exact, x = mlp(), tokens(seq)
    with torch.no_grad():  # the same values that bf16 has
        for p in (*exact.parameters(), x):
            p.copy_(p.bfloat16().double())
    expected, found = gradients(exact, exact(x), x), []
    for count in (None, tiles):
        module, y = copy.deepcopy(exact).bfloat16(), x.detach().bfloat16().requires_grad_()
        module.zero_grad()
        found.append(error(gradients(module, module(y) if count is None else in_tiles(module, y, count), y), expected))
    return found


@pytest.mark.parametrize("tiles", [8, 1024])
def test_bf16_gradients_are_added_up_in_fp32(tiles):
    """axolotl PR 2865: adding tiles up in bf16 changed the loss. 1,024 of them in bf16 end 13 times as far off."""
    plain, mine = untiled_error(2048, tiles)
    assert mine < 2 * plain < 0.05


def test_hooks_of_a_parameter_run_once():
    """kernels-community#1000, #1081: gradients reduced, or marked as ready, once for each tile."""
    (plain, x), (mine, y) = ((mlp(), tokens(12)) for _ in range(2))
    ran, scaled = [], []
    for module in (plain, mine):
        for p in module.parameters():
            p.register_hook(lambda g: 2 * g)
            p.register_post_accumulate_grad_hook(lambda p: ran.append(p))
    expected = gradients(plain, plain(x), x)
    del ran[:]
    for p in mine.parameters():
        p.register_hook(lambda g: scaled.append(1))
    found = gradients(mine, in_tiles(mine, y, 5), y)
    assert len(ran) == len(scaled) == len(list(mine.parameters()))
    assert error(found, expected) < 1e-13


def test_frozen_parameters_and_an_input_without_gradient():
    (plain, x), (mine, y) = ((mlp(), tokens(12).detach()) for _ in range(2))
    for module in (plain, mine):
        module.up.requires_grad_(False)
        module.down.bias.requires_grad_(False)
    plain(x).square().sum().backward()
    in_tiles(mine, y, 5).square().sum().backward()
    assert error([mine.down.weight.grad], [plain.down.weight.grad]) < 1e-13
    assert mine.up.weight.grad is None
    assert mine.down.bias.grad is None


def test_dropout_drops_the_same_in_backward():
    """LoRA inside an MLP may have it."""
    dropped, x = nn.Dropout(0.5), tokens(40)
    state = torch.get_rng_state()
    out = tiled(lambda tile, _: dropped(tile), x, [], 4)
    after = torch.get_rng_state()
    torch.rand(7)
    moved = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(state, after)
    torch.testing.assert_close(x.grad, out.detach() / x.detach())
    assert 0.2 < (x.grad == 0).double().mean() < 0.8


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_that_of_forward(inside):
    """Also where backward is called inside: a weight that forward has cast without gradients gets its gradient."""
    found = []
    for tiles in (None, 5):
        module, x = mlp(torch.float32), tokens(20, dtype=torch.float32)
        dtypes = set()
        module.up.register_forward_hook(lambda m, args, out, dtypes=dtypes: dtypes.add(out.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x) if tiles is None else in_tiles(module, x, tiles)
            gradient = gradients(module, out, x) if inside else None
        found.append(gradient if inside else gradients(module, out, x))
        assert dtypes == {torch.bfloat16}
        assert out.dtype == torch.bfloat16
        assert found[-1][1].dtype == torch.float32
    assert error(*found) < 2e-2


@pytest.mark.parametrize(("reentrant", "calls"), [(None, 2), (False, 2), (True, 3)])
def test_a_checkpoint_does_not_compute_the_tiles_again(reentrant, calls):
    """torch's non-reentrant checkpoint stops once it has what backward needs, and that is kept before the tiles."""
    (plain, x), (mine, y) = ((mlp(), tokens(12)) for _ in range(2))

    def block(x):
        return x + in_tiles(mine, torch.sin(x), 4)

    out = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
    found = gradients(mine, out, y)
    assert error(found, gradients(plain, x + plain(torch.sin(x)), x)) < 1e-13
    assert mine.calls == calls * 4


def test_there_is_no_second_derivative():
    module, x = mlp(), tokens(6)
    (gradient,) = torch.autograd.grad(in_tiles(module, x, 2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("tiles", [None, 16])
def test_what_is_inside_never_stands_whole(tiles):
    """Bytes beyond inputs, output and gradients: of a tile with tiles, of all tokens without."""
    seq = 4096
    module, x = mlp(torch.float32), tokens(seq, dtype=torch.float32)
    with Live(x, *module.parameters()) as live:
        out = module(x) if tiles is None else in_tiles(module, x, tiles)
        out.backward(torch.ones_like(out))
        peak = live.peak
    inside, outside = seq * INNER * 4, seq * WIDTH * 4
    if tiles is None:
        assert peak > 2 * inside
    else:
        assert peak < 4 * outside + 6 * inside / tiles


def test_hooks_stay_where_backward_fails():
    module, x = mlp(), tokens(6)
    module.up.weight.register_hook(lambda g: g)
    failing = []

    def compute(tile, _):
        if failing:
            raise RuntimeError("on purpose")
        return module(tile)

    out = tiled(compute, x, list(module.parameters()), 2)
    failing.append(True)
    with contextlib.suppress(RuntimeError):
        out.sum().backward()
    assert len(module.up.weight._backward_hooks) == 1

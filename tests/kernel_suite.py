"""Tests that every block kernel must pass where it can run. Each device makes a test class from `KernelSuite`. Also
`LowerRight`: a CPU kernel that aligns a causal mask as CUDA's flash kernels do, so that the path to those is tested
without a GPU.
"""

import pytest
import torch

from ds_seqpar.core.compiler.tiles.tiles import Segments
from ds_seqpar.core.runtime.kernels import BlockSpec, KernelSupport
from ds_seqpar.core.runtime.kernels.accumulate import merge_
from ds_seqpar.core.runtime.kernels.reference import Reference
from tests.oracle import attention, dense, error

SCALE = 0.3  # not head_dim ** -0.5: a kernel must take the one it is given


BANDS = ((192, 703, 512), (192, 447, 256), (64, 64, 1), (9, 9, 9))  # rows, columns, width
SEGMENTS = [
    Segments((40,), (40,), 6, 0),
    Segments((40,), (70,), 50, 0),
    Segments((40,), (50,), 9, 12),
    Segments((40,), (60,), 12, -1),
    Segments((1, 30, 2, 17), (1, 30, 2, 17), -1, 0),
    Segments((1, 30, 2, 17), (1, 30, 2, 17), 5, 0),
    Segments((5, 3, 20, 0), (9, 0, 31, 7), -1, -1),  # 3 rows without a key, 7 keys without a row
    Segments((1, 0, 1), (1, 2, 1), -1, -1),
    # more than the blocks that a GPU's kernel works in: rows of a block begin in others, and some see none of one
    Segments((300,), (300,), 20, 0),
    Segments((600,), (699,), 99, 0),
    Segments((200,), (450,), 70, 0),
    Segments((300,), (420,), 30, 40),
    Segments((150, 140, 0, 300), (150, 0, 260, 300), 40, 0),
]


def takes(kernel, segments):
    several, wants = len(segments.rows) > 1, 1 if segments.right == 0 else 2
    return several <= kernel.support.segments and wants <= kernel.support.windows


def seen(segments):
    """The columns that each row sees."""
    blocks = []
    for rows, columns in zip(segments.rows, segments.columns, strict=True):
        distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
        left, right = segments.left, segments.right
        blocks.append(((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0)))
    return torch.block_diag(*blocks).bool()


class LowerRight(Reference):
    """The reference with a causal mask that ends in the lower right corner: row i sees columns 0 .. i + Sk - Sq."""

    name = "lower_right"
    support = KernelSupport(square=True)

    def forward(self, q, k, v, causal, scale):
        shift = k.shape[1] - q.shape[1] if causal else 0
        if shift >= 0:
            out, lse = super().forward(_pad(q, shift), k, v, causal, scale)
            return out[:, shift:], lse[:, shift:]
        out, lse = super().forward(q[:, -shift:], k, v, causal, scale)
        return _pad(out, -shift), _pad(lse, -shift, float("-inf"))

    def backward(self, do, q, k, v, out, lse, causal, scale):
        shift = k.shape[1] - q.shape[1] if causal else 0
        if shift >= 0:
            padded = (_pad(x, shift) for x in (do, q))
            dq, dk, dv = super().backward(*padded, k, v, _pad(out, shift), _pad(lse, shift), causal, scale)
            return dq[:, shift:], dk, dv
        cut = (x[:, -shift:] for x in (do, q))
        dq, dk, dv = super().backward(*cut, k, v, out[:, -shift:], lse[:, -shift:], causal, scale)
        return _pad(dq, -shift), dk, dv


def _pad(x, rows, value=0.0):
    """Adds `rows` rows on top."""
    return torch.cat([x.new_full((x.shape[0], rows, *x.shape[2:]), value), x], dim=1)


def cases(kernels, dtypes=None):
    """(kernel, dtype) for every dtype that a kernel has a tolerance for. dtypes: only these."""
    return [
        pytest.param(kernel, dtype, id=f"{kernel.name}-{str(dtype).removeprefix('torch.')}")
        for kernel in kernels
        for dtype in kernel.tolerance
        if dtypes is None or dtype in dtypes
    ]


class KernelSuite:
    """Needs a `device` attribute; every test gets a kernel and a dtype."""

    device = "cpu"

    def inputs(self, kernel, dtype, q_len, kv_len, heads=(4, 2), head_dim=32):
        """q, k, v, do; skips where the kernel cannot take them here."""
        spec = BlockSpec(self.device, dtype, *heads, head_dim)
        if reasons := kernel.reasons(spec):
            pytest.skip(f"{kernel.name} {' and '.join(reasons)}")
        dice = torch.Generator().manual_seed(q_len + 100 * kv_len)
        shapes = [(q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1]), (q_len, heads[0])]
        return [torch.randn(2, *shape, head_dim, generator=dice).to(self.device, dtype) for shape in shapes]

    def close(self, kernel, dtype, found, wanted):
        for name, got, want in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
            assert got.shape == want.shape, name
            assert error(got.cpu(), want) <= kernel.tolerance[dtype], name

    def near(self, kernel, dtype, found, wanted):
        """The same for a gradient that may be 0: the dq of a row that sees one key."""
        for got, want in zip(found, wanted, strict=True):
            assert (got.cpu().double() - want).abs().max() <= kernel.tolerance[dtype] * max(1.0, want.abs().max())

    def check(self, kernel, dtype, q, k, v, do, causal):
        """A single block is the whole: its out and lse are the global ones."""
        out, lse = kernel.forward(q, k, v, causal, SCALE)
        grads = kernel.backward(do, q, k, v, out, lse, causal, SCALE)
        assert {x.dtype for x in (out, *grads)} == {dtype}
        self.check_lse(kernel, dtype, q, k, lse, causal)
        self.close(kernel, dtype, (out, *grads), dense(*(x.cpu() for x in (q, k, v, do)), causal, SCALE))

    def check_lse(self, kernel, dtype, q, k, lse, causal):
        assert lse.shape == q.shape[:3]
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        q, k = q.cpu().double(), k.cpu().double()
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = torch.einsum("bqhd,bkhd->bqhk", q, keys) * SCALE
        if causal:
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
        # an lse that had been rounded to bf16 or fp16 on its way would be off by more than 1e-4
        assert error(lse.cpu(), torch.logsumexp(scores, -1)) <= min(kernel.tolerance[dtype], 1e-4)

    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_square_block(self, kernel, dtype, causal, heads):
        self.check(kernel, dtype, *self.inputs(kernel, dtype, 37, 37, heads), causal)

    @pytest.mark.parametrize("head_dim", [20, 64, 80, 128])
    def test_head_dim(self, kernel, dtype, head_dim):
        self.check(kernel, dtype, *self.inputs(kernel, dtype, 40, 40, head_dim=head_dim), True)

    @pytest.mark.parametrize(("q_len", "kv_len"), [(24, 56), (56, 24), (1, 9), (9, 2)])
    def test_full_block_of_unequal_lengths(self, kernel, dtype, q_len, kv_len):
        self.check(kernel, dtype, *self.inputs(kernel, dtype, q_len, kv_len), False)

    # if lengths differ, a mask that a kernel aligns to the other corner is silently wrong
    @pytest.mark.parametrize(("q_len", "kv_len"), [(24, 56), (56, 24), (9, 2)])
    def test_causal_block_of_unequal_lengths_is_aligned_top_left(self, kernel, dtype, q_len, kv_len):
        inputs = self.inputs(kernel, dtype, q_len, kv_len)
        if kernel.support.square:
            pytest.skip(f"{kernel.name} takes square causal blocks only")
        self.check(kernel, dtype, *inputs, True)

    def test_strided_inputs(self, kernel, dtype):
        """Inputs as the walker passes them: k and v are parts of one tensor, rows are parts of longer ones."""
        q, k, v, do = self.inputs(kernel, dtype, 48, 48)
        pair = torch.stack([k, v], dim=2)
        out, lse = kernel.forward(q, *pair.unbind(2), True, SCALE)
        grads = kernel.backward(do, q, *pair.unbind(2), out, lse, True, SCALE)
        wanted = dense(*(x.cpu() for x in (q, k, v, do)), True, SCALE)
        self.close(kernel, dtype, (out, *grads), wanted)
        rows, cols = slice(8, 32), slice(16, 40)
        half = [x[:, rows] for x in (q, do)]
        k, v = pair[:, cols].unbind(2)
        out, lse = kernel.forward(half[0], k, v, True, SCALE)
        wide = [torch.cat([x, x, x], dim=1)[:, 24:48] for x in (out, lse)]
        grads = kernel.backward(half[1], half[0], k, v, *wide, True, SCALE)
        wanted = dense(*(x.cpu() for x in (half[0], k, v, half[1])), True, SCALE)
        self.close(kernel, dtype, (out, *grads), wanted)

    def test_an_out_of_some_heads_of_a_longer_one(self, kernel, dtype):
        """An out as the walker passes it if a rank computes a few heads at a time."""
        for kernel_heads in ((4, 4), (4, 2)):
            q, k, v, do = self.inputs(kernel, dtype, 40, 40, kernel_heads)
            out, lse = kernel.forward(q, k, v, True, SCALE)
            parts = [torch.cat([x.flip(2), x], dim=2)[:, :, x.shape[2] :] for x in (do, q, k, v, out, lse)]
            grads = kernel.backward(*parts, True, SCALE)
            self.close(kernel, dtype, (out, *grads), dense(*(x.cpu() for x in (q, k, v, do)), True, SCALE))

    # diffusers#14265: forward right, gradients wrong
    @pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
    def test_backward_of_a_block_takes_the_whole_rows_out_and_lse(self, kernel, dtype, heads):
        q, k, v, do = self.inputs(kernel, dtype, 32, 48, heads)
        blocks = [(k[:, :16], v[:, :16]), (k[:, 16:], v[:, 16:])]
        parts = [kernel.forward(q, *block, False, SCALE) for block in blocks]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out, lse = parts[0][0].to(wide), parts[0][1].clone()
        merge_(out, lse, *parts[1])
        grads = [kernel.backward(do, q, *block, out.to(dtype), lse, False, SCALE) for block in blocks]
        dq = grads[0][0].to(wide) + grads[1][0].to(wide)
        dk, dv = (torch.cat([first, second], dim=1) for first, second in zip(*(g[1:] for g in grads), strict=True))
        wanted = dense(*(x.cpu() for x in (q, k, v, do)), False, SCALE)
        self.close(kernel, dtype, (out, dq, dk, dv), wanted)

    def test_bands(self, kernel, dtype):
        if not (taken := [band for band in BANDS if band[2] <= kernel.support.band]):
            pytest.skip(f"{kernel.name} takes no bands")
        for band in taken:
            self.check_band(kernel, dtype, *band)

    def check_band(self, kernel, dtype, rows, columns, width):
        q, k, v, do = self.inputs(kernel, dtype, rows, columns)
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        out, lse = kernel.forward(q, k, v, False, SCALE, width)
        grads = kernel.backward(do, q, k, v, out, lse, False, SCALE, width)
        wanted = dense(*(x.cpu() for x in (q, k, v, do)), (i <= j) & (j < i + width), SCALE)
        self.near(kernel, dtype, (out, *grads), wanted)

    def test_segments(self, kernel, dtype):
        """A window, and blocks of several sizes, including rows without a key and keys without a row."""
        if not (taken := [one for one in SEGMENTS if takes(kernel, one)]):
            pytest.skip(f"{kernel.name} takes no segments")
        for segments in taken:
            self.check_segments(kernel, dtype, segments)

    def check_segments(self, kernel, dtype, segments):
        q, k, v, do = self.inputs(kernel, dtype, sum(segments.rows), sum(segments.columns))
        out, lse = kernel.forward(q, k, v, False, SCALE, segments)
        grads = kernel.backward(do, q, k, v, out, lse, False, SCALE, segments)
        sees = seen(segments)
        assert torch.equal(lse.isneginf().all(2).cpu(), ~sees.any(1).expand(2, -1))
        self.near(kernel, dtype, (out, *grads), dense(*(x.cpu() for x in (q, k, v, do)), sees, SCALE))

    # OpenRLHF#564, ring-flash-attention#42: what comes out must not depend on which block a row was computed in
    def test_causal_and_full_blocks_merge_to_the_whole(self, kernel, dtype):
        q, k, v, _ = self.inputs(kernel, dtype, 32, 32)
        late, early = slice(16, 32), slice(0, 16)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out, lse = (x.to(wide) for x in kernel.forward(q[:, late], k[:, late], v[:, late], True, SCALE))
        merge_(out, lse, *kernel.forward(q[:, late], k[:, early], v[:, early], False, SCALE))
        wanted = attention(*(x.cpu().double() for x in (q, k, v)), True, SCALE)[:, late]
        assert error(out.cpu(), wanted) <= kernel.tolerance[dtype]
        assert torch.isfinite(lse).all()

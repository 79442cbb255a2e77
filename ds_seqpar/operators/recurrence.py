"""Layers with a recurrent state: gated delta rules, Mamba-2, lightning attention and causal convolutions.

Each rank runs the layer's own function on each segment of its tokens, starting from a zero state. The function is
linear in the initial state, so the rank adds the contribution of the true state afterwards. A run of consecutive tokens
maps the previous state S to the next state M S + S'. Ranks exchange the maps of their runs (see `states`), and each
rank combines the maps of all previous runs. Segments form the rows of a batch, padded on the left with zeros, which
leave the state at zero. The layers' functions need not support documents or several runs per rank.

If configured, ranks first exchange heads, so that each Ulysses rank processes some heads of all tokens of its CP rank.

The ranks must already have agreed on the inputs, as in a patched model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.errors import SECTION, ConfigError
from ..core.compiler.sharding.heads import MessageLayout, message_layout
from ..core.compiler.sharding.shards import Shards, tokens_by_ulysses_rank, tokens_of
from ..core.runtime.buffers import Tensors, join_out, pack_in, split_in, sum_dtype, unpack_out
from ..core.runtime.runtime import Runtime
from ..core.runtime.seams import GuardedCall
from .precision import all_digits
from .segments import Segment, Segments, received_bytes, segments_of
from .states import Entering, Tied

Context: TypeAlias = Any  # autograd's ctx
STATES, HEADS, HALO = "states of a layer", "heads of a layer with a state", "tokens before a convolution"
COUNTED = "state_heads"  # the name under which statistics count exchanged elements
RATIO = 2  # maximum ratio of segment lengths in one batch
PIECE = 2**24  # maximum number of output elements to which states are added at a time, in fp32


class Rows(NamedTuple):
    """The results of a layer's function for segments (N, L, ...), starting from a zero state.

    Attributes:
        out: The output (N, L, H, V).
        state: The state after the last token (N, H, K, V) in fp32 (fp64 for fp64 inputs).
        readout: (N, L, groups, K), with the same number of heads in each group. If the state before the first token is
            S, `decay * (readout @ S)` must be added to `out`.
        transition: The matrix M in M S + state, of shape (N, H, K, K) or (N, H, 1, 1). A segment that continues a
            document requires `transition`, `readout` and `decay`.
        decay: (N, L, H) in the state's dtype. None means 1.
    """

    out: Tensor
    state: Tensor
    readout: Tensor | None = None
    transition: Tensor | None = None
    decay: Tensor | None = None


class Cell(NamedTuple):
    """The form of a head's state (K, V). The transition is a matrix, or a scalar if the state only decays."""

    keys: int
    values: int
    decays: bool

    @property
    def transition(self) -> tuple[int, int]:
        return (1, 1) if self.decays else (self.keys, self.keys)


# arguments: tokens (N, L, heads, ...) of some heads, parameters (heads, ...), whether segments continue documents
Function = Callable[[list[Tensor], list[Tensor], bool], Rows]


def recurrence(
    runtime: Runtime, function: Function, tokens: Sequence[Tensor], parameters: Sequence[Tensor], cell: Cell,
    shards: Shards | None = None, documents: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """Run a layer with a recurrent state over the whole sequence, given each rank's local tokens.

    Double backward is not supported. The call and its backward pass are collective across the ranks that share the
    sequence.

    Args:
        runtime: This rank's runtime.
        function: The layer's function.
        tokens: Tensors (B, s, heads, ...). The first tensor contains the values, with all H heads.
        parameters: Tensors (H, ...).
        cell: The form of a head's state.
        shards: The tokens of each CP rank, or None for the configured layout.
        documents: Start positions of documents; () for a single document.

    Returns:
        The output (B, s, H, V).

    Raises:
        ConfigError: The configured layout or the numbers of heads are unsuitable. Raised on every rank.
    """
    shards = shards or runtime.shards(tokens[0].shape[1] * runtime.ulysses.size)
    if not _exchanges_heads(runtime, tokens, parameters, cell, shards, documents):
        segments = segments_of(shards, documents, runtime.ulysses.size)
        return _recurrence(runtime.one_ring, segments, function, tokens, parameters, cell)
    size, rank = runtime.ulysses
    counts = tokens_by_ulysses_rank(shards, "q", runtime.rank, size)
    tokens = exchange_heads(runtime, tokens, counts, inward=True)
    parameters = [x[rank * len(x) // size : (rank + 1) * len(x) // size] for x in parameters]
    segments = segments_of(shards, documents, None)
    out = _recurrence(runtime, segments, function, tokens, parameters, cell)
    return exchange_heads(runtime, [out], counts, inward=False)[0]


def causal_conv(
    runtime: Runtime, function: Callable[[Tensor], Tensor], x: Tensor, kernel_size: int, shards: Shards | None = None,
    documents: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """Run a layer's causal convolution over the whole sequence, given each rank's local tokens.

    Args:
        runtime: This rank's runtime.
        function: The layer's convolution from (N, L, C) to (N, L, C), with zeros before the first token. A token
            depends on the `kernel_size - 1` preceding tokens.
        x: The input (B, s, C).
        kernel_size: The length of the kernel.
        shards: See `recurrence`.
        documents: See `recurrence`.

    Returns:
        The output (B, s, C).
    """
    shards = shards or runtime.shards(x.shape[1] * runtime.ulysses.size)
    peers, before = runtime.one_ring, kernel_size - 1
    segments = segments_of(shards, documents, runtime.ulysses.size)
    mine = segments.of_rank[peers.rank]
    pieces = _pieces(x, mine)
    lengths = [piece.shape[1] for piece in pieces]
    entering = None
    if segments.continues and before:
        entering = Entering.apply(*_tails(x, pieces, mine, before), peers, segments, segments.reach(before), HALO)
        for number, halo in zip(_first_of_runs(mine), entering[:, :, 0].unbind(1), strict=True):
            if mine[number].enters is not None:
                pieces[number] = torch.cat([halo, pieces[number]], 1)
    outs: dict[int, Tensor] = {}
    for group in _groups([piece.shape[1] for piece in pieces], [False] * len(pieces)):
        rows = function(_batched([pieces[number] for number in group]))
        outs.update(zip(group, _unbatched(rows, len(x), [lengths[number] for number in group]), strict=True))
    out = _joined(outs, len(mine))
    return out if entering is None else Tied.apply(out, entering)


def _tails(x: Tensor, pieces: Sequence[Tensor], segments: Sequence[Segment], count: int) -> tuple[Tensor, Tensor]:
    """Return each run's last `count` tokens as a state (B, runs, 1, count, C), and the run's map (..., count, count).

    If a run is shorter than `count`, the run's map shifts tokens from before the run.
    """
    tails, maps = [], []
    for segment, piece in zip(segments, pieces, strict=False):
        if segment.leaves is not None:
            kept = min(count, segment.length)
            tails.append(torch.cat([_zeros(piece, count - kept), piece[:, segment.length - kept :]], 1))
            moved = count - kept if segment.enters is not None else 0
            maps.append(torch.diag(x.new_ones(moved), kept) if moved else x.new_zeros(count, count))
    if not tails:
        return x[:, :, None, None].expand(-1, 0, 1, count, -1), x.new_zeros(len(x), 0, 1, count, count)
    return torch.stack(tails, 1)[:, :, None], torch.stack(maps).expand(len(x), -1, -1, -1)[:, :, None]


def delta_rule(function: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    """Return the `Function` of a delta rule.

    With zero values and the identity as the initial state, the final state is the transition and the outputs are the
    readout. Transition and readout are computed in the same call as the output, as additional columns of the values.

    Args:
        function: A function that takes q (N, L, heads, K), k, v (N, L, H, V), g, beta, and an initial state (N, H, K,
            V) or None, and returns (out, final state).
    """

    def rows(tokens: list[Tensor], parameters: list[Tensor], continues: bool) -> Rows:
        v, q, k, g, beta = tokens
        if not continues:
            return Rows(*function(q, k, v, g, beta, None))
        keys, values = k.shape[-1], v.shape[-1]
        v = torch.cat([v, v.new_zeros(*v.shape[:-1], keys)], -1)
        initial = v.new_zeros(len(v), v.shape[2], keys, values + keys, dtype=sum_dtype(v.dtype))
        initial[..., values:] = torch.eye(keys, dtype=initial.dtype, device=initial.device)
        out, state = function(q, k, v, g, beta, initial)
        (out, readout), (state, transition) = (x.split([values, keys], -1) for x in (out, state))
        return Rows(out, state, readout, transition)

    return rows


def _exchanges_heads(
    runtime: Runtime, tokens: Sequence[Tensor], parameters: Sequence[Tensor], cell: Cell, shards: Shards,
    documents: tuple[int, ...],
) -> bool:  # fmt: skip
    """Return whether Ulysses ranks exchange heads. With "auto", heads are exchanged if each rank then receives fewer
    bytes.
    """
    size, way, heads = runtime.ulysses.size, runtime.config.recurrent_layers, tokens[0].shape[2]
    if size == 1 or way == "states":
        return False
    fits = heads % size == 0 and all(x.shape[2] % size == 0 or size % x.shape[2] == 0 for x in tokens)
    if way == "heads" and not fits:
        raise ConfigError(
            f'{SECTION}.recurrent_layers "heads" needs ulysses that divides the heads of layers with a state; got '
            f'ulysses {size} and {heads} heads, set recurrent_layers to "states" or "auto"'
        )
    if way == "heads" or not fits:
        return fits
    item = heads * len(tokens[0]) * sum_dtype(tokens[0].dtype).itemsize
    numbers = item * cell.keys * cell.values, item * math.prod(cell.transition)
    of_heads, of_states = (
        received_bytes(x.reach(), x.most_runs, numbers[0] / share, numbers[1] / share)
        for share, x in ((size, segments_of(shards, documents, None)), (1, segments_of(shards, documents, size)))
    )
    of_token = sum(x.shape[2:].numel() * x.element_size() for x in (*tokens, tokens[0]))
    local = sum(tokens_of(shards, "q", rank) for rank in range(shards.size)) / (shards.size * size)
    return len(tokens[0]) * local * (size - 1) / size * of_token + of_heads < of_states


# ---- heads


def exchange_heads(runtime: Runtime, tensors: Sequence[Tensor], tokens: Sequence[int], inward: bool) -> list[Tensor]:
    """Exchange heads among Ulysses ranks.

    Inward, (B, s, H, ...) becomes (B, T, H / U, ...). Outward, (B, T, H / U, ...) becomes (B, s, H, ...).

    Args:
        runtime: This rank's runtime.
        tensors: The tensors to exchange. Tensors of the same dtype share a message. If a tensor has fewer heads than
            there are Ulysses ranks, each rank receives the head that belongs to the rank's heads of the other tensors.
        tokens: Number of tokens of each Ulysses rank.
        inward: Whether to exchange heads inward. If False, heads are exchanged outward.
    """
    exchanged: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        numbers = [number for number, x in enumerate(tensors) if x.dtype == dtype]
        flat = [x.flatten(3) if x.dim() > 3 else x[..., None] for x in map(tensors.__getitem__, numbers)]
        exchanged.update(zip(numbers, ExchangeHeads.apply(runtime, tuple(tokens), inward, *flat), strict=True))
    shapes = [x.shape[3:] for x in tensors]
    return [exchanged[number].reshape(*exchanged[number].shape[:3], *shape) for number, shape in enumerate(shapes)]


class ExchangeHeads(torch.autograd.Function):
    """An all-to-all for the heads of several tensors (B, tokens, heads, D). Backward is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Context, runtime: Runtime, tokens: tuple[int, ...], inward: bool, *xs: Tensor) -> Tensors:
        size, rank = runtime.ulysses
        totals = tuple(x.shape[2] if inward else x.shape[2] * size for x in xs)
        layout = message_layout(totals, tuple(x.shape[3] for x in xs), None, len(xs[0]), tokens, rank)
        ctx.exchange = runtime, layout, inward
        with runtime.guarded(GuardedCall("forward", HEADS)):
            return _exchanged(runtime, layout, inward, xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple:
        runtime, layout, inward = ctx.exchange
        with runtime.guarded(GuardedCall("backward", HEADS)):
            return None, None, None, *_exchanged(runtime, layout, not inward, grads)


def _exchanged(runtime: Runtime, layout: MessageLayout, inward: bool, xs: Tensors) -> Tensors:
    outgoing, incoming = layout.sizes(inward)
    if inward:
        pack_in(xs, layout, sent := xs[0].new_empty(sum(outgoing)))
    else:
        sent = join_out(xs).contiguous().view(-1)
    received = sent.new_empty(sum(incoming))
    runtime.comm.exchange(COUNTED, sent, received, (outgoing, incoming)).wait()
    return tuple(split_in(received, layout) if inward else unpack_out(received, layout))


# ---- segments


def _recurrence(
    peers: Runtime, segments: Segments, function: Function, tokens: Sequence[Tensor], parameters: Sequence[Tensor],
    cell: Cell,
) -> Tensor:  # fmt: skip
    """Run a layer on this rank's segments, for all heads of the tensors on this rank."""
    mine, batch = segments.of_rank[peers.rank], len(tokens[0])
    pieces = [_pieces(x, mine) for x in tokens]
    lengths = [piece.shape[1] for piece in pieces[0]]
    continues = [segment.enters is not None for segment in mine] or [False]
    outs: dict[int, Tensor] = {}
    readouts: dict[int, Tensor] = {}
    decays: dict[int, Tensor] = {}
    states: dict[int, Tensor] = {}
    maps: dict[int, Tensor] = {}
    for group in _groups(lengths, continues):
        batched = [_batched([of_token[number] for number in group]) for of_token in pieces]
        rows, wanted = function(batched, list(parameters), continues[group[0]]), [lengths[number] for number in group]
        outs.update(zip(group, _unbatched(rows.out, batch, wanted), strict=True))
        states.update(zip(group, rows.state.unflatten(0, (batch, -1)).unbind(1), strict=True))
        if continues[group[0]] and rows.readout is not None and rows.transition is not None:
            readouts.update(zip(group, _unbatched(rows.readout, batch, wanted), strict=True))
            maps.update(zip(group, rows.transition.unflatten(0, (batch, -1)).unbind(1), strict=True))
            if rows.decay is not None:
                decays.update(zip(group, _unbatched(rows.decay, batch, wanted), strict=True))
    if not segments.continues:
        return _joined(outs, len(mine))
    dtype, leaving = sum_dtype(tokens[0].dtype), [n for n, segment in enumerate(mine) if segment.leaves is not None]
    nothing = states[0].new_zeros(*states[0].shape[:2], *cell.transition)
    of_runs = torch.stack([states[number] for number in leaving or [0]], 1)[:, : len(leaving)].to(dtype)
    of_maps = torch.stack([maps.get(number, nothing) for number in leaving or [0]], 1)[:, : len(leaving)].to(dtype)
    entering = Entering.apply(of_runs, of_maps, peers, segments, segments.reach(), STATES)
    for run, number in enumerate(_first_of_runs(mine)):
        if number in readouts:
            outs[number] = _Continued.apply(outs[number], readouts[number], decays.get(number), entering[:, run])
    return Tied.apply(_joined(outs, len(mine)), entering)


class _Continued(torch.autograd.Function):
    """Add `decay * (readout @ state)` to the output (B, L, H, V) of a segment that was computed from a zero state.

    The sum is computed piece by piece along the tokens, and recomputed in backward. Otherwise, fp32 readouts of all
    heads would take more memory than all other tensors that the layer saves for backward.
    """

    @staticmethod
    def forward(ctx: Context, out: Tensor, readout: Tensor, decay: Tensor | None, state: Tensor) -> Tensor:
        ctx.save_for_backward(readout, decay, state)
        continued = torch.empty_like(out)
        with all_digits(state.device.type):
            for piece in _Continued.pieces(out):
                read = _Continued.read(readout[:, piece], state)
                continued[:, piece] = out[:, piece] + (read if decay is None else read * decay[:, piece, :, None])
        return continued

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple:
        readout, decay, state = ctx.saved_tensors
        d_readout, d_state = torch.empty_like(readout), torch.zeros_like(state)
        d_decay = None if decay is None else torch.empty_like(decay)
        groups = readout.shape[2]
        with all_digits(state.device.type):
            for piece in _Continued.pieces(grad):
                rows, part = readout[:, piece].to(state.dtype), grad[:, piece].to(state.dtype)
                if decay is not None and d_decay is not None:
                    d_decay[:, piece] = (_Continued.read(rows, state) * part).sum(-1)
                    part = part * decay[:, piece, :, None]
                of_groups = part.unflatten(2, (groups, -1))
                d_readout[:, piece] = torch.einsum("blgrv,bgrkv->blgk", of_groups, state.unflatten(1, (groups, -1)))
                d_state += torch.einsum("blgk,blgrv->bgrkv", rows, of_groups).flatten(1, 2)
        return grad, d_readout, d_decay, d_state

    @staticmethod
    def read(readout: Tensor, state: Tensor) -> Tensor:
        """Multiply readouts (B, L, groups, K) by a state (B, H, K, V), with a result of shape (B, L, H, V)."""
        states = state.unflatten(1, (readout.shape[2], -1))
        return torch.einsum("blgk,bgrkv->blgrv", readout.to(state.dtype), states).flatten(2, 3)

    @staticmethod
    def pieces(out: Tensor) -> Iterator[slice]:
        tokens = max(1, PIECE // (out.shape[0] * out.shape[2:].numel()))
        return (slice(start, start + tokens) for start in range(0, out.shape[1], tokens))


def _first_of_runs(segments: Sequence[Segment]) -> list[int]:
    return [number for number in range(len(segments)) if not number or segments[number - 1].leaves is not None]


def _pieces(x: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Split x into segments. A rank without segments returns a single zero token to keep its autograd graph."""
    if not segments:
        return [torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1)]
    return [x] if len(segments) == 1 else list(x.split([segment.length for segment in segments], 1))


def _groups(lengths: Sequence[int], continues: Sequence[bool]) -> list[list[int]]:
    """Return the indices of the segments in each batch."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (continues[number], lengths[number])):
        first = groups[-1][0] if groups else number
        if groups and continues[number] == continues[first] and lengths[number] <= RATIO * lengths[first]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _batched(pieces: Sequence[Tensor]) -> Tensor:
    """Stack pieces (B, length, ...) as rows (B * pieces, maximum length, ...), padded with zeros on the left."""
    if len(pieces) == 1:
        return pieces[0]
    longest = max(piece.shape[1] for piece in pieces)
    rows = [x for piece in pieces for x in (_zeros(piece, longest - piece.shape[1]), piece)]
    return torch.cat(rows, 1).unflatten(1, (len(pieces), longest)).flatten(0, 1)


def _unbatched(rows: Tensor, batch: int, lengths: Sequence[int]) -> list[Tensor]:
    """Undo `_batched` by returning the last tokens (B, length, ...) of each piece's rows."""
    sizes = [size for length in lengths for size in (rows.shape[1] - length, length)]
    return list(rows.unflatten(0, (batch, -1)).flatten(1, 2).split(sizes, 1)[1::2])


def _joined(pieces: dict[int, Tensor], count: int) -> Tensor:
    """Concatenate the pieces of `count` segments in order. The result is empty if there are no segments."""
    if count < 2:
        return pieces[0] if count else pieces[0][:, :0]
    return torch.cat([pieces[number] for number in range(count)], 1)


def _zeros(like: Tensor, tokens: int) -> Tensor:
    return like.new_zeros(len(like), tokens, *like.shape[2:])
